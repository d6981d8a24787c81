"""Quadratic erasers on real embeddings: figures of an independent implementation.

Split: r = default_rng(0); cells (y, z) with the association .8 (tied z = 0), in order
(0, 0), (0, 1), ..: r.permutation(cell)[: int(N share)], N the largest possible; concatenated and
permuted once more; the first 55 % are fitted, the others new. X is centred and divided by the root
of the mean variance of the fitted rows. "cv" has the halves of default_rng(1).permutation(n).
Distortions are given to three digits. The squared difference of the class covariances in new rows
is a product of random halves that the figures do not state: the mean over ten halvings is compared
within 12 %.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import splince_fast as sf

Float = NDArray[np.float64]
Rows = tuple[Float, NDArray[Any], NDArray[Any]]

pytestmark = pytest.mark.filterwarnings("ignore::splince_fast.UnseenRowsWarning")


def split(y: NDArray[Any], z: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    r, classes = np.random.default_rng(0), np.unique(z)
    cells = []
    for task in (0, 1):
        for c in classes:
            # (1 - p) / 2 for p = .8 is not .1 in floating point, and int(N share) hangs on it.
            tied = 0.8 / 2 if (task == 1) == (c == 0) else (1 - 0.8) / 2
            share = tied if c == 0 else tied / (len(classes) - 1)
            cells.append((np.flatnonzero((y == task) & (z == c)), share))
    n = int(min(len(cell) / share for cell, share in cells))
    chosen = np.concatenate([r.permutation(cell)[: int(n * share)] for cell, share in cells])
    chosen = r.permutation(chosen)
    count = int(0.55 * len(chosen))
    return chosen[:count], chosen[count:]


def rows(folder: Path, components: int | None) -> tuple[Rows, Rows]:
    x, y, z = (np.load(folder / f"{name}.npy") for name in ("X", "y", "z"))
    fit, new = split(y, z)
    x = x.astype(np.float64)
    x = x - x[fit].mean(axis=0)
    x /= np.sqrt(x[fit].var(axis=0).mean())
    if components is not None:
        x = x @ np.linalg.svd(x[fit], full_matrices=False)[2][:components].T
    return (x[fit], y[fit], z[fit]), (x[new], y[new], z[new])


def folds(data: Rows, count: int = 2) -> dict[Any, sf.Folds]:
    """Moments of each class in equal parts of the rows."""
    x, y, z = data
    order = np.random.default_rng(1).permutation(len(x))
    parts = {}
    for c in np.unique(z):
        parts[int(c)] = sf.Folds(count)
        parts[int(c)]._folds = tuple(
            sf.Moments().update(x[half][z[half] == c], {"y": y[half][z[half] == c]})
            for half in np.split(order, [len(x) * i // count for i in range(1, count)])
        )
    return parts


def difference(x: Float, z: NDArray[Any]) -> float:
    """dS2 of new rows: products of halves, white by their pooled covariance."""

    def covariances(part: NDArray[np.intp]) -> list[Float]:
        return [np.cov(x[part][z[part] == c].T, ddof=0) for c in (0, 1)]

    pooled = sum(np.mean(z == c) * s for c, s in enumerate(covariances(np.arange(len(x)))))
    values, vectors = np.linalg.eigh(pooled)
    kept = values > 1e-6 * values.mean()
    white = vectors[:, kept] / np.sqrt(values[kept])
    found = []
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(x))
        a, b = (
            white.T @ (s[1] - s[0]) @ white
            for s in (covariances(order[: len(x) // 2]), covariances(order[len(x) // 2 :]))
        )
        found.append(np.vdot(a, b) / 4)
    return float(np.mean(found))


# Per data set and number of components: 1 - a; D_oL and D_L; distortion of QLEACE, raw and "cv",
# and of q-SPLINCE; dS2 of new rows before, and after QLEACE, raw and "cv".
TABLE: dict[tuple[str, int | None], Any] = {
    ("bug_profession_gender", None): (
        None, (0.0305, 0.0402), (0.059, 0.032), (0.089, 0.066), (10.07, 31.95, 8.13),
    ),
    ("bug_profession_gender", 64): (
        0.610, (0.051, 0.072), (0.069, 0.057), (0.139, 0.130), (2.09, 1.13, 0.72),
    ),
    ("toxicity_en_de_fr", None): (
        None, (0.1025, 0.1080), (0.222, 0.110), (0.275, 0.181), None,
    ),
    ("toxicity_en_de_fr", 64): (
        0.814, (0.169, 0.183), (0.251, 0.215), (0.552, 0.526), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(key, marks=[pytest.mark.slow] if key[1] is None else []) for key in TABLE],
    ids=lambda key: f"{key[0]}-{key[1]}",
)
def test_quadratic_figures_are_those_of_an_independent_implementation(
    case: tuple[str, int | None], real_data: Callable[[str], Path]
) -> None:
    share, plain, without, with_task, new_rows = TABLE[case]
    fitted, new = rows(real_data(case[0]), case[1])
    x, y, z = fitted
    parts = folds(fitted)
    digits = {"abs": 5.5e-4 if case[1] is not None else 6.5e-4}
    moved = sf.quadratic(parts, erase="z", shrinkage=1)
    assert moved.report is not None
    assert moved.report.distortion == pytest.approx(plain[0], **digits)
    assert moved.report.distortion_leace == pytest.approx(plain[1], **digits)
    for keep, figures in ((None, without), ("y", with_task)):
        for shrinkage, figure in zip((None, "cv"), figures, strict=True):
            eraser = sf.quadratic(parts, erase="z", keep=keep, shrinkage=shrinkage)
            report = eraser.report
            assert report is not None
            clean = eraser(x, {"z": z})
            change = np.sum((clean - x) ** 2) / np.sum((x - x.mean(axis=0)) ** 2)
            assert change == pytest.approx(figure, **digits)
            assert report.distortion == pytest.approx(change, rel=1e-9)
            assert report.quadratic.gap is not None
            assert report.quadratic.gap < 1e-6
            classes = [clean[z == c] for c in np.unique(z)]
            gap = max(np.abs(part.mean(axis=0)).max() for part in classes)
            assert gap < 1e-10
            if shrinkage is None:
                covariances = [np.cov(part.T, ddof=0) for part in classes]
                largest = np.abs(covariances[0]).max()
                for other in covariances[1:]:
                    assert np.abs(other - covariances[0]).max() < 1e-10 * largest
            elif share is not None:
                assert 1 - report.shrinkage == pytest.approx(share, abs=5e-4)
            if keep is not None:
                wanted = (x - x.mean(axis=0)).T @ (y - y.mean())
                found = (clean - clean.mean(axis=0)).T @ (y - y.mean())
                assert np.linalg.norm(found - wanted) < 1e-10 * np.linalg.norm(wanted)
            if new_rows is not None and keep is None:
                erased = eraser(new[0], {"z": new[2]})
                figure = new_rows[1 if shrinkage is None else 2]
                assert difference(erased, new[2]) == pytest.approx(figure, rel=0.12)
    if new_rows is not None:
        assert difference(new[0], new[2]) == pytest.approx(new_rows[0], rel=0.12)


def test_eigenvalues_leave_less_in_new_rows_than_one_share(
    real_data: Callable[[str], Path],
) -> None:
    fitted, new = rows(real_data("bug_profession_gender"), 64)
    parts = folds(fitted, 10)
    left = {}
    for shrinkage in (None, "cv", "cv-eig"):
        eraser = sf.quadratic(parts, erase="z", shrinkage=shrinkage)
        left[shrinkage] = difference(eraser(new[0], {"z": new[2]}), new[2])
    assert left["cv-eig"] < left["cv"] < left[None]
    assert left["cv-eig"] == pytest.approx(0.56, rel=0.12)


def test_prompts_of_one_noun_need_groups(real_data: Callable[[str], Path]) -> None:
    """Halves of rows find differences of 64 components that halves of professions do not."""
    import csv

    folder = real_data("professions_smollm2")
    x = np.load(folder / "X.npy").astype(np.float64)
    z = np.load(folder / "z_stereotype.npy") > 0
    with (folder / "prompts.csv").open(newline="") as file:
        noun = np.array([row["profession"] for row in csv.DictReader(file)])
    x = (x - x.mean(axis=0)) @ np.linalg.svd(x - x.mean(axis=0), full_matrices=False)[2][:64].T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares = [
            sf.quadratic(
                sf.Folds(2, by="z", groups=groups).update(x, {"z": z, "noun": noun}), erase="z"
            ).report.shrinkage
            for groups in (None, "noun")
        ]
    assert 1 - shares[0] > 0.6
    assert 1 - shares[1] < 0.4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("components", "neutral", "kept", "distortion"),
    [(None, 0.0, 184, 0.609), (64, 0.1, 36, 0.658)],
)
def test_isotropic_keeps_half_of_the_dimensions(
    components: int | None,
    neutral: float,
    kept: int,
    distortion: float,
    real_data: Callable[[str], Path],
) -> None:
    """The number of dimensions follows from eigenvalues that NumPy computes from the rows."""
    (x, y, z), _ = rows(real_data("bug_profession_gender"), components)
    eraser = sf.isotropic(
        sf.Moments(by="z").update(x, {"z": z, "y": y}), erase="z", keep="y", neutral=neutral
    )
    report = eraser.report
    assert report is not None
    assert report.isotropic.n_kept == kept
    assert report.distortion == pytest.approx(distortion, abs=5e-4)
    clean = eraser(x)
    varies = x.std(axis=0) > 1e-6  # three features of rounding are left alone
    assert varies.sum() == (381 if components is None else components)
    (first, second), (before, after) = (
        [part[z == c] for c in (0, 1)] for part in (clean, x[:, varies])
    )
    assert np.abs(first.mean(axis=0) - second.mean(axis=0)).max() < 1e-9
    gap = np.cov(first.T, ddof=0) - np.cov(second.T, ddof=0)
    assert (np.abs(gap).max() < 1e-8) == (neutral == 0.0)
    # White by the pooled covariance, off the difference of the means.
    covariances = [np.cov(part.T, ddof=0) for part in (before, after)]
    pooled = sum(np.mean(z == c) * S for c, S in enumerate(covariances))
    values, vectors = np.linalg.eigh(pooled)
    white = (vectors / np.sqrt(values.clip(1e-300)))[:, values > 1e-9 * values[-1]]
    difference = white.T @ (after.mean(axis=0) - before.mean(axis=0))
    basis = white @ np.linalg.svd(difference[:, None])[0][:, 1:]
    w = np.linalg.eigvalsh(basis.T @ (covariances[1] - covariances[0]) @ basis)
    zero = np.abs(w) <= neutral * np.abs(w).max()
    assert kept == zero.sum() + min(np.sum(w[~zero] > 0), np.sum(w[~zero] < 0))
