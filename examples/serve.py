"""Serve an eraser without this library: a torch.export program, and ONNX in onnxruntime.

    pip install "splince_fast[torch]" onnx onnxscript onnxruntime
    python examples/serve.py [FOLDER]

Layers of a service see (batch, token, feature); batch and number of tokens change per request.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import splince_fast as sf
from splince_fast import nn as snn

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
rng = np.random.default_rng(0)
gender = rng.integers(0, 2, size=(200, 12))
X = rng.normal(size=(200, 12, 64)) + gender[..., None] * rng.normal(size=64) + 3
X = X.astype(np.float32)
eraser = sf.leace(sf.Moments().update(X, {"gender": gender}), erase="gender")

# Export.
module = snn.Eraser(eraser)
axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
example = (torch.zeros(2, 3, eraser.n_features),)
program = torch.export.export(module, example, dynamic_shapes=(axes,))
torch.export.save(program, folder / "eraser.pt2")
onnx = torch.onnx.export(program, dynamo=True, input_names=["x"])
onnx.save(folder / "eraser.onnx")

# Compare.
session = onnxruntime.InferenceSession(folder / "eraser.onnx")
served = {
    "torch.export": torch.export.load(folder / "eraser.pt2").module()(torch.from_numpy(X)).numpy(),
    "onnxruntime": session.run(None, {"x": X})[0],
}


def gap(rows):
    women, men = (rows[gender == k].mean(axis=0, dtype=float) for k in (0, 1))
    return np.linalg.norm(women - men)


print(f"distance of the means of women and men: {gap(X):.3f}, erased {gap(eraser(X)):.0e}")
for name, rows in served.items():
    error = np.linalg.norm(rows - eraser(X), axis=-1) / np.linalg.norm(X, axis=-1)
    print(f"{name}: {gap(rows):.0e}; largest difference from the library {error.max():.0e}")
