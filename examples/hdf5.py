"""An HDF5 file without gender: embeddings and labels in one file, read and written block by block.

    pip install ".[hdf5]" && python examples/hdf5.py [FOLDER]

The rows are sentence embeddings with the profession masked, from reproduction/.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

import splince_fast as sf

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
with np.load(Path(__file__).parents[1] / "reproduction" / "bios.npz") as data:
    X = data["centre"] + data["step"] * data["codes"].astype(np.float32)
    X = X[:, X.std(axis=0) > 1e-6]  # less two features that are constant
    with h5py.File(folder / "people.h5", "w") as file:
        file.create_dataset("minilm/last", data=X, chunks=(500, X.shape[1]), compression="gzip")
        file["man"], file["artist"] = data["z"], data["y"]

labels = {"man": "/man", "artist": "/artist"}  # data sets of the same file
source = sf.sources.from_hdf5(folder / "people.h5", "minilm/last", labels)
eraser = sf.splince(sf.Moments.from_blocks(source), erase="man", keep="artist")
eraser.save(folder / "gender.safetensors")
names = ["apply", "gender.safetensors", "people.h5", "--key", "minilm/last", "-o", "clean.h5"]
subprocess.run([sys.executable, "-m", "splince_fast", *names], cwd=folder, check=True)

fits = {}
for name in ("people.h5", "clean.h5"):
    rows = sf.sources.from_hdf5(folder / name, "minilm/last", labels)
    fits[name] = sf.Moments.from_blocks(rows)
    sizes = (f"{v} {np.linalg.norm(fits[name].cross_covariance(v)):.1e}" for v in labels)
    with h5py.File(folder / name) as file:
        print(f"{name}: covariance with {', '.join(sizes)}; it holds {', '.join(file)}")
