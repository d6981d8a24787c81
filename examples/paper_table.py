"""Reproduce a table of the paper, and check two of its rows with NumPy alone.

It is the text beside figure removal_cov: the part of the covariance with the task that is kept
where concept and task agree in 90 % of the training rows. Run it in a checkout:

    python -m examples.paper_table [FOLDER]
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from reproduction import __main__ as reproduction
from reproduction.data import load
from splince_fast import evaluation as ev

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
reproduction.main(["covariance", "--quick", "--seeds", "1", "-o", str(folder)])
table = json.loads((folder / "covariance.json").read_text())["values"]

data = load("bios")  # seed 0 draws the same rows again
task, concept = data.labels["task"], data.labels["concept"]
split = ev.spurious_split(task, concept, p=0.9, sizes=data.sizes, aligned_class=data.aligned_class)
X, y, z = (v[split.train].astype(float) for v in (data.X, task, concept))
X = X[:, X.std(axis=0) > 1e-12]  # less two features that are constant

# Whiten; project the concept u out, orthogonally (LEACE) or without moving the task v (SPLINCE).
X, y, z = X - X.mean(axis=0), y - y.mean(), z - z.mean()
cholesky = np.linalg.cholesky(X.T @ X)
u, v = (np.linalg.solve(cholesky, X.T @ label) for label in (z, y))
by_hand = {}
for name, normal in {"LEACE": u, "SPLINCE": u - v * (u @ v) / (v @ v)}.items():
    kept = cholesky @ (v - u * (normal @ v) / (normal @ u))
    by_hand[name] = float(kept @ kept / np.sum((X.T @ y) ** 2))
    print(f"{name}: {table[f'kept_covariance/{name}/frozen/0.9']:.6f}, by hand {by_hand[name]:.6f}")
