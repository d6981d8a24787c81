"""
Where erasing helps
===================

On the left the concept is strong and the task weak: a classifier that is trained where both go
together relies on the concept, and erasing it helps the worst group. On the right the task is
strong by itself: the classifier hardly uses the concept, and erasing takes the part of the task
that goes with it.
"""

import matplotlib.pyplot as plt
import numpy as np

from splince_fast import evaluation as ev


def worst_groups(concept_size, task_size):
    rng = np.random.default_rng(0)
    z, y = rng.integers(0, 2, (2, 3000))
    X = rng.normal(size=(3000, 20))
    X[:, 0] += concept_size * z
    X[:, 1] += task_size * y
    return ev.compare(
        X, task=y, concept=z, association=0.9, n_seeds=5, alphas=(0.01, 0.1),
        heads=("retrained",), erasers=("none", "LEACE", "SPLINCE"), progress=False,
    )  # fmt: skip


figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7, 3.2), layout="constrained")
titles = ("concept strong, task weak", "task strong, concept weak")
for axis, title, sizes in zip(axes, titles, ((4, 1), (1, 2)), strict=True):
    result = worst_groups(*sizes)
    print(f"{title}: {result.decision()}\n")
    for i, eraser in enumerate(result.context.erasers):
        found = result.interval("worst_group", eraser=eraser)
        axis.errorbar(i, found.mean, yerr=found.high - found.mean, fmt="o", capsize=3)
    axis.set_xticks(range(3), result.context.erasers)
    axis.set_title(title)
axes[0].set_ylabel("worst-group accuracy")
axes[0].set_ylim(0, 1)

# %%
# Training rows have the association 0.9 of task and concept, test rows 0.5. Bars are 95 %
# intervals over five splits.
