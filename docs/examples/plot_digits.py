"""
Images: erase how bold a digit is written
=========================================

scikit-learn's digits are images of 8 x 8 pixels. The concept is the boldness of the stroke, that is
the mean brightness, a quantity; the task is whether the digit is a 0, which is bolder than most.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import splince_fast as sf

digits = load_digits()
X = digits.data
boldness = X.mean(axis=1)
zero = (digits.target == 0).astype(int)

moments = sf.Moments().update(X, {"boldness": boldness, "zero": zero})
erasers = {
    "LEACE": sf.leace(moments, erase="boldness"),
    "SPLINCE": sf.splince(moments, erase="boldness", keep="zero"),
}

# %%
# The upper row shows three bold and three faint zeros; the rows below show them erased.

order = np.argsort(boldness[zero == 1])
chosen = np.flatnonzero(zero)[np.concatenate([order[-3:], order[:3]])]
rows = {"as it is": X} | {name: eraser(X) for name, eraser in erasers.items()}
figure, axes = plt.subplots(3, 6, figsize=(8, 4.2), layout="constrained")
for line, (name, images) in zip(axes, rows.items(), strict=True):
    for ax, i in zip(line, chosen, strict=True):
        ax.imshow(images[i].reshape(8, 8), cmap="gray_r", vmin=0, vmax=16)
        ax.set(xticks=[], yticks=[])
    line[0].set_ylabel(name)
plt.show()

# %%
# What is left: the correlation of the best-correlated pixel with boldness, and the distance between
# the mean image of the zeros and that of the others.

for name, images in rows.items():
    centred = images - images.mean(axis=0)
    covariance = centred.T @ (boldness - boldness.mean()) / len(X)
    gap = np.linalg.norm(images[zero == 1].mean(axis=0) - images[zero == 0].mean(axis=0))
    print(f"{name:8} largest covariance {np.abs(covariance).max():8.1e}   gap of means {gap:.2f}")
