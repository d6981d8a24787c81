"""Fit and erase on a dask cluster: workers read the files, and only states travel.

    python examples/cluster.py [FOLDER] [ADDRESS]

ADDRESS is that of a scheduler whose workers see FOLDER; without it two local workers start.
"""

import sys
import tempfile
from pathlib import Path

import dask.array as da
import numpy as np
from dask import delayed
from dask.distributed import Client, LocalCluster

import splince_fast as sf

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    rng = np.random.default_rng(0)
    language, direction = rng.choice(["en", "de"], size=20_000), rng.normal(size=32)
    for i, part in enumerate(np.split(language, 4)):
        rows = rng.normal(size=(5000, 32)) + np.outer(part == "de", direction)
        np.save(folder / f"{i}.npy", rows)
    files = sorted(folder.glob("?.npy"))

    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as local,
        Client(sys.argv[2] if len(sys.argv) > 2 else local) as client,
    ):
        source = sf.sources.from_npy(files, {"language": language})
        moments = sf.Moments.from_blocks(source, client=client)
        eraser = sf.leace(moments, erase="language")
        rows = [da.from_delayed(delayed(np.load)(f), (5000, 32), float) for f in files]
        rows = da.concatenate(rows)
        da.to_npy_stack(folder / "clean", eraser(rows))
        for name, X in {"before": rows, "after": da.from_npy_stack(folder / "clean")}.items():
            english, german = (X[language == code].mean(axis=0) for code in ("en", "de"))
            gap = float(abs(english - german).max().compute())
            print(f"largest difference of the means of both languages {name}: {gap:.0e}")
