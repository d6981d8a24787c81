"""Single cells without the donor: an AnnData file whose covariance with the cell type is kept.

    pip install ".[hdf5]" anndata && python examples/cells.py [FOLDER]

Cells of three types from four donors; each donor has more of one type, and shifts all of its cells.
"""

import sys
import tempfile
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

import splince_fast as sf

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
rng = np.random.default_rng(0)
donor = rng.integers(0, 4, size=3000)
cell_type = np.where(rng.random(3000) < 0.4, donor % 3, rng.integers(0, 3, size=3000))
pca = rng.normal(size=(3000, 30))
pca += 2 * rng.normal(size=(4, 30))[donor] + rng.normal(size=(3, 30))[cell_type]
counts = rng.poisson(1.0, size=(3000, 50)).astype(np.float32)

labels = {"donor": "/obs/donor", "cell_type": "/obs/cell_type"}
strings = anndata.settings.override(allow_write_nullable_strings=True)
with strings, pd.option_context("mode.string_storage", "python"):  # anndata 0.12 beside pandas 3
    cells = anndata.AnnData(counts, obsm={"X_pca": pca.astype(np.float32)})
    cells.obs["donor"] = pd.Categorical.from_codes(donor, ["d1", "d2", "d3", "d4"])
    cells.obs["cell_type"] = pd.Categorical.from_codes(cell_type, ["B", "T", "NK"])
    cells.write_h5ad(folder / "cells.h5ad")

    source = sf.sources.from_hdf5(folder / "cells.h5ad", "X_pca", labels)
    eraser = sf.splince(sf.Moments.from_blocks(source), erase="donor", keep="cell_type")
    cells.obsm["X_clean"] = eraser(cells.obsm["X_pca"])
    cells.write_h5ad(folder / "clean.h5ad")

fits = {}
for key in ("X_pca", "X_clean"):
    fits[key] = sf.Moments.from_blocks(sf.sources.from_hdf5(folder / "clean.h5ad", key, labels))
    for name in labels:
        covariance = np.linalg.norm(fits[key].cross_covariance(name))
        accuracy = cross_val_score(LogisticRegression(), cells.obsm[key], cells.obs[name]).mean()
        print(f"{key}: covariance with {name} {covariance:.1e}, accuracy of a probe {accuracy:.3f}")
