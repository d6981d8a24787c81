"""Write the embeddings of ``reproduction/bios.npz``, quantised to eight bits per value.

``python tools/build_experiment_data.py FOLDER`` reads X.npy, y.npy and z.npy of
``bug_profession_gender`` in FOLDER. Each feature is rounded to 255 levels from its minimum to its
maximum.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

TARGET = Path(__file__).resolve().parent.parent / "reproduction/bios.npz"


def main() -> None:
    """Read the arrays, quantise the rows, and write the file."""
    folder = Path(sys.argv[1])
    X = np.load(folder / "X.npy").astype(np.float64)
    y, z = (np.load(folder / f"{name}.npy").astype(np.int8) for name in "yz")
    centre = (X.max(axis=0) + X.min(axis=0)) / 2
    step = (X.max(axis=0) - X.min(axis=0)) / 254
    step[step == 0] = 1.0
    codes = np.round((X - centre) / step).astype(np.int8)
    np.savez_compressed(
        TARGET, codes=codes, centre=centre.astype(np.float32), step=step.astype(np.float32),
        y=y, z=z,
    )  # fmt: skip
    print(f"{TARGET.stat().st_size / 1e6:.2f} MB, {len(X)} rows")


if __name__ == "__main__":
    main()
