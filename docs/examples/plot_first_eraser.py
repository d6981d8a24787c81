"""
What an eraser does to a cloud of points
========================================

Two entangled labels in the plane and one more dimension: the concept moves the points along one
direction, the task along another. LEACE removes the concept with the least change; SPLINCE leaves
the difference of the task's class means where it is.
"""

import matplotlib.pyplot as plt
import numpy as np

import splince_fast as sf

rng = np.random.default_rng(0)
n = 1500
z = rng.integers(0, 2, size=n)
y = np.where(rng.random(n) < 0.8, z, 1 - z)
X = 0.5 * rng.normal(size=(n, 3))
X += np.outer(z, [2.0, 0.5, 0.0]) + np.outer(y, [0.8, 1.5, 0.6])

# %%
# One pass over the rows gives the moments; every eraser follows from them.

moments = sf.Moments().update(X, {"concept": z, "task": y})
erasers = {
    "as it is": None,
    "LEACE": sf.leace(moments, erase="concept"),
    "SPLINCE": sf.splince(moments, erase="concept", keep="task"),
}

# %%
# Colour is the concept, shape is the task. Crosses are the class means of the task.

figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharex=True, sharey=True, layout="constrained")
for ax, (name, eraser) in zip(axes, erasers.items(), strict=True):
    clean = X if eraser is None else eraser(X)
    for concept, colour in ((0, "#0072b2"), (1, "#e69f00")):
        for task, marker in ((0, "o"), (1, "^")):
            chosen = (z == concept) & (y == task)
            ax.scatter(*clean[chosen, :2].T, s=6, c=colour, marker=marker, alpha=0.35)
    for task in (0, 1):
        ax.plot(*clean[y == task, :2].mean(axis=0), "kx", markersize=9, markeredgewidth=2)
    ax.set_title(name)
plt.show()

# %%
# The report states the cost of keeping the task.

print(erasers["SPLINCE"].report)
