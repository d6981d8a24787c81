"""Golden numbers: erasers, covariances and reports of version 0.1.0 (commit 60e9cd0) on real data.

The data are not part of the project (see the environment variable SPLINCE_FAST_DATA).

Each eraser is applied to eight rows; their change, in units of the features' deviations, is
sketched by four random vectors. Rows enter as float64, so that another order of summation, that of
another BLAS or processor, moves S by about n eps and the sketch by kappa n eps: 4e-5 for kappa
below 1e7 on the support of these sets and n below 2e4. A tolerance of 1e-4 is above that, and far
below what another formula does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import sensitive

import splince_fast as sf

GOLDEN = Path(__file__).parents[1] / "data" / "golden_0_1_0.json"
TOLERANCE = 1e-4
SETS = {
    "bug_profession_gender": ("z.npy", "y.npy", "classes"),
    "professions_smollm2": ("z_stereotype.npy", "y_fact.npy", "continuous"),
    "professions_word2vec": ("z_stereotype.npy", "y_fact.npy", "continuous"),
    "toxicity_en_de_fr": ("z.npy", "y.npy", "classes"),
}
METHODS: dict[str, Callable[[sf.Moments], sf.Projection]] = {
    "splince": lambda m: sf.splince(m, erase="z", keep="y"),
    "splince-oas": lambda m: sf.splince(m, erase="z", keep="y", shrinkage="oas"),
    "leace": lambda m: sf.leace(m, erase="z"),
    "sal": lambda m: sf.sal(m, erase="z"),
    "sal-keep": lambda m: sf.sal(m, erase="z", keep="y"),
}


def results(folder: Path) -> dict[str, Any]:
    """Sketches of everything that is compared, for one data set."""
    z_file, y_file, kind = SETS[folder.name]
    X = np.load(folder / "X.npy").astype(np.float64)
    # That version whitened every feature, however little it varies. No figure depends on the unit.
    deviations = X.std(axis=0)
    X[:, deviations < 1e-20 * np.linalg.norm(deviations)] *= 2.0**80
    moments = sf.Moments(kinds={"z": kind, "y": kind})
    for rows in np.array_split(np.arange(len(X)), 3):
        moments.update(
            X[rows], {"z": np.load(folder / z_file)[rows], "y": np.load(folder / y_file)[rows]}
        )
    sd = np.sqrt(np.diag(moments.covariance()))
    unit = np.where(sd > 0, sd, 1.0)
    sketch = np.random.default_rng(0).normal(size=(X.shape[1], 4)) / X.shape[1] ** 0.5
    correlation = moments.covariance() / np.outer(unit, unit)
    found: dict[str, Any] = {
        "covariance": (sketch.T @ correlation @ sketch).ravel().tolist(),
        "cross": (sketch.T @ (moments.cross_covariance("z") / unit[:, None])).ravel().tolist(),
        "mean": (sketch.T @ ((moments.mean - X[0]) / unit)).tolist(),
    }
    for name, method in METHODS.items():
        eraser = method(moments)
        report = eraser.report
        change = (eraser(X[:8]) - X[:8]) / unit
        found[name] = {
            "change": (change @ sketch).ravel().tolist(),
            "rank": report.rank,
            "rank_covariance": report.rank_covariance,
            "distortion": report.distortion,
        }
    return found


def compare(found: Any, golden: Any, where: str) -> None:
    """Equality of ranks, and of numbers to the tolerance times the largest of their list."""
    if isinstance(golden, dict):
        for key in golden:
            compare(found[key], golden[key], f"{where}.{key}")
    elif golden is None or isinstance(golden, int):
        assert found == golden, where
    else:
        size = float(np.abs(golden).max())
        assert np.abs(np.subtract(found, golden)).max() <= TOLERANCE * size, where


@sensitive
@pytest.mark.parametrize("name", SETS)
def test_numbers_are_those_of_version_0_1_0(name: str, real_data: Callable[[str], Path]) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    compare(results(real_data(name)), golden, name)
    # Control: another method's eraser is told apart.
    with pytest.raises(AssertionError):
        compare(golden["sal"], golden["leace"], name)
