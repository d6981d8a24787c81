"""o-LEACE and o-SPLINCE on real embeddings: the changes of an independent implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import splince_fast as sf

# MiniLM has a feature of size 1e-9, for which float32 has no digits: the library says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the eraser is sensitive:splince_fast.exceptions.PrecisionWarning"
)

Float = NDArray[np.float64]

# Of the total variance: o-LEACE, LEACE, o-SPLINCE, SPLINCE; rows fitted and left out.
TABLE = {
    "bug_profession_gender": (0.0305, 0.0402, 0.0674, 0.0867, 3525, 2885),
    "toxicity_en_de_fr": (0.1025, 0.1080, 0.2217, 0.2323, 2061, 1687),
}


def split(folder: Path, p: float = 0.8, seed: int = 0) -> tuple[Float, Any, Any, int]:
    """Rows with the association p, z = 0 aligned with y = 1; the first 55 % of them are fitted."""
    x, z, y = (np.load(folder / f"{name}.npy") for name in ("X", "z", "y"))
    rng, cells = np.random.default_rng(seed), {}
    classes = int(z.max()) + 1
    for label in (0, 1):
        for c in range(classes):
            agreed = (c == 0) == (label == 1)
            share = (p if agreed else 1 - p) / 2
            cells[label, c] = share if c == 0 else share / (classes - 1)
    rows = {cell: np.flatnonzero((y == cell[0]) & (z == cell[1])) for cell in cells}
    most = int(min(len(rows[cell]) / share for cell, share in cells.items()))
    taken = [rng.permutation(rows[cell])[: int(most * share)] for cell, share in cells.items()]
    order = rng.permutation(np.concatenate(taken))
    return x[order].astype(np.float64), z[order], y[order], int(0.55 * len(order))


@pytest.mark.parametrize("name", TABLE)
def test_changes_are_those_of_an_independent_implementation(
    name: str, real_data: Callable[[str], Path]
) -> None:
    o_leace, leace, o_splince, splince, n_fit, n_rest = TABLE[name]
    X, z, y, n = split(real_data(name))
    assert (n, len(X) - n) == (n_fit, n_rest)
    X, z, y = X[:n], z[:n], y[:n]
    moments = sf.Moments(by="z").update(X, {"z": z, "y": y})
    total = X.var(axis=0).sum()
    before = {v: moments.cross_covariance(v, ddof=0) for v in ("z", "y")}
    for keep, expected, other in ((None, o_leace, leace), ("y", o_splince, splince)):
        eraser = sf.oracle(moments, erase="z", keep=keep)
        clean = eraser(X, {"z": z})
        changed = float(((clean - X) ** 2).sum() / len(X) / total)
        assert changed == pytest.approx(expected, abs=6e-5)
        assert eraser.report.distortion == pytest.approx(changed, rel=1e-6)
        plain = (
            sf.leace(moments, erase="z")
            if keep is None
            else sf.splince(moments, erase="z", keep=keep)
        )
        # The reference whitens the two features of deviation 1e-33 as well.
        assert plain.report.distortion == pytest.approx(other, abs=1.2e-4)
        after = sf.Moments().update(clean, {"z": z, "y": y})
        for v, wanted in (("z", 0.0), ("y", 1.0)):
            if v == "z" or keep:
                gap = after.cross_covariance(v, ddof=0) - wanted * before[v]
                assert np.linalg.norm(gap) < 1e-10 * np.linalg.norm(before[v])
