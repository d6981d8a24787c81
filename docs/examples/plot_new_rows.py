"""
What new rows see
=================

The guarantee is exact on the rows that the moments were gathered from. On new rows of the same
distribution a trace of sampling size is left: with d features and n rows, about d / n of the
variance of the concept can be explained. It shrinks as n grows.
"""

import matplotlib.pyplot as plt
import numpy as np

import splince_fast as sf

rng = np.random.default_rng(0)
d = 50
direction = rng.normal(size=d) / np.sqrt(d)


def draw(n):
    z = rng.integers(0, 2, size=n)
    return rng.normal(size=(n, d)) + np.outer(z, direction), z


def explained(X, z):
    """Share of the variance of z that least squares on X explains: R squared."""
    X, z = X - X.mean(axis=0), z - z.mean()
    fitted = X @ np.linalg.lstsq(X, z, rcond=1e-10)[0]
    return fitted @ fitted / (z @ z)


# %%
# The new rows are many, so that their own sampling error (about d / 100,000) is small.

new, new_z = draw(100_000)
sizes = np.array([100, 200, 500, 1000, 2000, 5000, 10_000, 20_000])
seen, unseen = [], []
for n in sizes:
    found = []
    for _ in range(5):
        X, z = draw(n)
        eraser = sf.leace(sf.Moments().update(X, {"z": z}), erase="z")
        found.append((explained(eraser(X), z), explained(eraser(new[:20_000]), new_z[:20_000])))
    inside, outside = np.mean(found, axis=0)
    seen.append(inside)
    unseen.append(outside)

# %%
# Inside the sample nothing is left but rounding.

print(f"largest R squared on the rows themselves: {max(seen):.1e}")

figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
ax.loglog(sizes, unseen, "o-", label="new rows")
ax.loglog(sizes, d / sizes, "k--", label="d / n")
ax.axhline(explained(new, new_z), color="0.5", label="before erasing")
ax.axhline(d / 20_000, color="0.5", ls=":", label="chance for 20,000 new rows")
ax.set(xlabel="rows n that the eraser was fitted on", ylabel="R squared of the concept")
ax.legend()
plt.show()
