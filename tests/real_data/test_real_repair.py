"""Repair of erasers that know no task, on biographies: the profession is kept, gender erased."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from problems import Float, ignored, sensitive

import splince_fast as sf
from splince_fast.baselines import INLP, RLACE

pytestmark = [sensitive, ignored("PrecisionWarning", "the repair is sensitive")]

Labels = NDArray[np.int64]


@pytest.fixture(scope="module")
def bug(real_data: Callable[[str], Path]) -> tuple[Float, Labels, Labels]:
    folder = real_data("bug_profession_gender")
    x, z, y = (np.load(folder / f"{name}.npy") for name in ("X", "z", "y"))
    return x.astype(np.float64), z.astype(np.int64), y.astype(np.int64)


def cross(x: Float, labels: Labels) -> Float:
    centred = labels - labels.mean()
    return np.asarray((x - x.mean(axis=0)).T @ centred / len(x))


def read(x: Float, labels: Labels) -> float:
    """R^2 of the best linear predictor of the labels, x whitened where it varies."""
    centred = x - x.mean(axis=0)
    u, sizes, _ = np.linalg.svd(centred / centred.std(), full_matrices=False)
    u = u[:, sizes > 1e-6 * sizes[0]]
    z = labels - labels.mean()
    return float(np.sum((u.T @ z) ** 2) / np.sum(z**2))


@pytest.mark.parametrize(
    ("baseline", "step"),
    [
        (INLP(max_rank=4, random_state=0), 3),
        pytest.param(INLP(random_state=0), 1, marks=pytest.mark.slow),
        pytest.param(
            RLACE(max_steps=3000, check_every=500, step_size=0.05, random_state=0),
            1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["INLP of rank 4", "INLP", "R-LACE"],
)
def test_repaired_baselines_keep_the_task_and_leak_no_more(
    baseline: Any, step: int, bug: tuple[Float, Labels, Labels]
) -> None:
    x, z, y = (array[::step] for array in bug)
    eraser = baseline.fit(x, concept=z).projection_
    t = eraser(x)
    before, after = (sf.Moments().update(rows, {"y": y}) for rows in (x, t))
    repaired = sf.repair(after, before=before, keep="y")
    clean, wanted = (repaired @ eraser)(x), cross(x, y)
    assert np.linalg.norm(cross(clean, y) - wanted) <= 1e-10 * np.linalg.norm(wanted)
    assert np.linalg.norm(cross(t, y) - wanted) > 1e-2 * np.linalg.norm(wanted)  # control
    # These erasers leave a trace of the concept; a map that can be undone neither adds nor removes.
    leaked = read(t, z)
    assert read(clean, z) == pytest.approx(leaked, rel=1e-6)
    assert leaked < 0.9 * read(x, z)
    assert repaired.report.amplification < 10


def test_exact_erasers_stay_guarded_on_biographies(bug: tuple[Float, Labels, Labels]) -> None:
    x, z, y = bug
    before = sf.Moments().update(x, {"z": z, "y": y})
    splince = sf.splince(before, erase="z", keep="y")
    for eraser in (sf.leace(before, erase="z"), sf.sal(before, erase="z")):
        after = sf.Moments().update(eraser(x), {"y": y})
        both = sf.repair(after, before=before, keep="y") @ eraser
        clean = both(x)
        assert np.linalg.norm(cross(clean, z)) <= 1e-12 * np.linalg.norm(cross(x, z))
        assert np.linalg.norm(cross(clean, y) - cross(x, y)) <= 1e-12 * np.linalg.norm(cross(x, y))
        gap = np.linalg.norm(clean - splince(x)) / np.linalg.norm(x - x.mean(axis=0))
        assert gap < 1e-9 if eraser.method == "LEACE" else gap > 1e-3
