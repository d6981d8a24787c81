"""Real embeddings: the figures of an independent implementation are reproduced.

The data are not part of the project (see the environment variable SPLINCE_FAST_DATA); where they
are absent the tests are skipped and say which folder they miss. The figures were measured with
NumPy alone: eigendecomposition of the covariance, eigenvalues above 1e-12 of the largest.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import splince_fast as sf

# MiniLM has a feature of size 1e-9, for which float32 has no digits: the library says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the eraser is sensitive:splince_fast.exceptions.PrecisionWarning"
)

Float = NDArray[np.float64]
Find = Callable[[str], Path]


def erasers(x: NDArray[np.floating], z: Float, y: Float) -> dict[str, sf.Projection | None]:
    moments = sf.Moments().update(x, {"z": z, "y": y})
    return {
        "none": None,
        "SAL": sf.sal(moments, erase="z"),
        "LEACE": sf.leace(moments, erase="z"),
        "SPLINCE": sf.splince(moments, erase="z", keep="y"),
    }


# --- log-odds of he and she after prompts about professions --------------------------------------


class Professions:
    """Hidden states of a language model, its two output rows, and the scores of the professions."""

    def __init__(self, folder: Path) -> None:
        self.x = np.load(folder / "X.npy")
        self.z = np.load(folder / "z_stereotype.npy").astype(np.float64)
        self.y = np.load(folder / "y_fact.npy").astype(np.float64)
        he, she = np.load(folder / "lm_head_he_she.npy").astype(np.float64)
        self.head = he - she
        with open(folder / "prompts.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.professions = [row["profession"] for row in rows]
        self.train = {"given": np.array([row["split"] == "train" for row in rows])}
        names = list(dict.fromkeys(self.professions))
        order = np.random.default_rng(0).permutation(len(names))
        chosen = {names[i] for i in order[: int(0.7 * len(names))]}
        self.train["random"] = np.array([name in chosen for name in self.professions])

    def coefficients(self, eraser: sf.Projection | None, train: NDArray[np.bool_]) -> Float:
        """Log-odds of the test rows regressed on [1, stereotype, factual]."""
        x = self.x[~train].astype(np.float64)
        odds = (x if eraser is None else eraser(x)) @ self.head
        design = np.column_stack([np.ones(len(x)), self.z[~train], self.y[~train]])
        return np.asarray(np.linalg.lstsq(design, odds, rcond=None)[0][1:])


COEFFICIENTS = {
    ("given", "none"): (0.687, 1.758),
    ("given", "SAL"): (0.131, 1.171),
    ("given", "LEACE"): (0.103, 1.071),
    ("given", "SPLINCE"): (0.169, 1.212),
    ("random", "none"): (0.674, 1.716),
    ("random", "SAL"): (-0.263, 0.763),
    ("random", "LEACE"): (0.084, 1.061),
    ("random", "SPLINCE"): (0.071, 1.201),
}


@pytest.fixture(scope="module")
def professions(real_data: Find) -> Professions:
    return Professions(real_data("professions_smollm2"))


@pytest.mark.parametrize("split", ["given", "random"])
def test_regression_of_log_odds(split: str, professions: Professions) -> None:
    train = professions.train[split]
    fitted = erasers(
        professions.x[train].astype(np.float64), professions.z[train], professions.y[train]
    )
    for method, eraser in fitted.items():
        found = professions.coefficients(eraser, train)
        # Given to the third decimal.
        assert found == pytest.approx(COEFFICIENTS[split, method], abs=6e-4), method
        if eraser is not None and eraser.report is not None:
            assert all(v.residual <= v.bound for v in eraser.report.variables)
        assert eraser is None or eraser.rank == 1
    # Control: the figures tell the methods from each other.
    for a, b in (("SAL", "LEACE"), ("LEACE", "SPLINCE")):
        assert np.abs(np.subtract(COEFFICIENTS[split, a], COEFFICIENTS[split, b])).max() > 5e-3
