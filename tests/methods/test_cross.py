"""Figures of held-out rows: those of the rows themselves, and warnings where they are much worse.

Both sides are sums over a few hundred rows of terms that eraser and covariance know to 1e-12, so
1e-9 is the tolerance of the agreement.
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


def data(n: int = 900, d: int = 12) -> tuple[Float, NDArray[Any], Float]:
    rng = np.random.default_rng(0)
    z = rng.integers(0, 3, n)
    y = rng.normal(size=(n, 2)) + 0.5 * z[:, None]
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=(3, d))[z]
    return x + y @ rng.normal(size=(2, d)) + 5.0, z, y


def split_rows(x: NDArray[Any], k: int, **labels: Any) -> list[sf.Moments]:
    return [
        sf.Moments().update(x[i::k], {name: v[i::k] for name, v in labels.items()})
        for i in range(k)
    ]


def standardised(columns: Float) -> Float:
    return np.asarray((columns - columns.mean(axis=0)) / columns.std(axis=0))


def pillai(x: Float, columns: Float) -> float:
    """Sum of squared canonical correlations, by least squares on the rows."""
    centred = x - x.mean(axis=0)
    u, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    basis = u[:, sizes > 1e-9 * sizes[0]]
    v = np.linalg.qr(columns - columns.mean(axis=0))[0]
    return float(np.sum((basis.T @ v) ** 2))


@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("method", ["splince", "leace", "sal", "mean_projection"])
def test_figures_are_those_of_the_rows(method: str, k: int) -> None:
    x, z, y = data()
    keep = "y" if method in ("splince", "sal") else None
    found = sf.cross_report(split_rows(x, k, z=z, y=y), erase="z", keep=keep, method=method)
    assert found.distortion == tuple(fold.distortion for fold in found.folds)
    for i, fold in enumerate(found.folds):
        inside = np.arange(len(x)) % k == i
        rest = sf.Moments().update(x[~inside], {"z": z[~inside], "y": y[~inside]})
        options = {} if keep is None else {"keep": keep}
        eraser = getattr(sf, method)(rest, erase="z", **options)
        for rows, figure in ((inside, fold.distortion), (~inside, fold.distortion_fitted)):
            moved = ((eraser(x[rows]) - x[rows]) ** 2).sum(axis=1).mean()
            assert figure == pytest.approx(moved / x[rows].var(axis=0).sum(), rel=1e-9)
        held_out, clean = x[inside], eraser(x[inside])
        hot = np.eye(3)[z[inside]][:, 1:]
        assert fold.concept == pytest.approx(pillai(clean, hot) / 2, rel=1e-9)
        assert fold.chance == pytest.approx((x.shape[1] - 2) / (len(held_out) - 1))
        assert fold.n_rows == len(held_out)
        whitening = np.linalg.inv(np.linalg.cholesky(np.cov(held_out.T)))
        change = np.eye(x.shape[1]) - eraser.matrix()
        norm = np.linalg.norm(whitening @ change @ np.linalg.inv(whitening), 2)
        assert fold.amplification == pytest.approx(max(1.0, norm), rel=1e-9)
        if keep is None:
            assert fold.kept is None
        else:
            units = held_out.std(axis=0)[:, None]
            before, after = (
                (v - v.mean(axis=0)).T @ standardised(y[inside]) / len(v) / units
                for v in (held_out, clean)
            )
            lost = np.linalg.norm(after - before) / np.linalg.norm(before)
            assert fold.kept == pytest.approx(1 - lost, rel=1e-9)


def test_method_follows_from_the_task() -> None:
    x, z, y = data()
    folds = split_rows(x, 2, z=z, y=y)
    assert (
        sf.cross_report(folds, erase="z").folds
        == sf.cross_report(folds, erase="z", method="LEACE").folds
    )
    kept = sf.cross_report(folds, erase="z", keep="y")
    assert kept.method == "SPLINCE"
    with pytest.raises(sf.exceptions.InputError, match="SPLINCE needs keep="):
        sf.cross_report(folds, erase="z", method="splince")


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.UnseenRowsWarning")
@pytest.mark.parametrize("n_folds", [2, 3, 5])
def test_weak_features_of_every_fold_are_named(n_folds: int) -> None:
    """Feature i fires in one row of fold i alone, and hardly varies in the other folds."""
    rng = np.random.default_rng(1)
    z = rng.integers(0, 2, 900)
    x = rng.normal(size=(900, 10)) + 0.3 * z[:, None]
    x[:, :6] = 1e-4 * rng.normal(size=(900, 6)) + 3e-5 * z[:, None]
    for i in range(n_folds):
        x[i, i] = 20.0
    found = sf.cross_report(split_rows(x, n_folds, z=z), erase="z")
    assert found.weak_features == tuple(range(n_folds))


def test_few_rows_per_dimension_warn() -> None:
    rng = np.random.default_rng(2)
    z = rng.integers(0, 2, 260)
    x = rng.normal(size=(260, 100)) + 0.2 * z[:, None]
    with pytest.warns(sf.exceptions.UnseenRowsWarning, match="rows per dimension"):
        found = sf.cross_report(split_rows(x, 2, z=z), erase="z", keep=np.eye(100)[:, :1])
    assert found.rows_per_rank == pytest.approx(1.3)


REAL = {
    "professions_word2vec": ("z_stereotype", "y_fact"),
    "professions_smollm2": ("z_stereotype", "y_fact"),
    "bug_profession_gender": ("z", "y"),
}


def real_rows(folder: Path) -> list[Any]:
    """Rows, concept and task in a random order."""
    arrays = [np.load(folder / f"{part}.npy") for part in ("X", *REAL[folder.name])]
    order = np.random.default_rng(0).permutation(len(arrays[0]))
    return [array[order] for array in arrays]


@pytest.mark.parametrize(
    ("name", "shrinkage", "warns"),
    [
        ("professions_word2vec", None, True),
        ("professions_smollm2", "oas", False),
        ("bug_profession_gender", "oas", False),
    ],
)
def test_real_rows_warn_only_if_few_per_dimension(
    real_data: Callable[[str], Path], name: str, shrinkage: str | None, warns: bool
) -> None:
    x, z, y = real_rows(real_data(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = sf.cross_report(
            split_rows(x, 2, z=z, y=y), erase="z", keep="y", shrinkage=shrinkage
        )
    assert (sf.exceptions.UnseenRowsWarning in {w.category for w in caught}) == warns
    if warns:
        assert "rows per dimension" in found.warnings[0]
        assert dict(found.remedies)["shrinkage='oas'"] < np.mean(found.distortion)


# --- do the figures predict? ---------------------------------------------------------------------


def kind_of_rows(kind: str, n: int, d: int = 40) -> tuple[Float, NDArray[Any], NDArray[Any]]:
    """Concept and task in a feature each, and agreeing in 70 % of the rows."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.7, z, 1 - z)
    x = rng.standard_t(3, size=(n, d)) if kind == "heavy" else rng.normal(size=(n, d))
    if kind == "rare":  # a quarter fires in 0.1 % of the rows, and is rounding of an encoder else
        k = d // 4
        fires = rng.random((n, k)) < 1e-3
        x[:, :k] = fires * rng.normal(3, 1, size=(n, k)) + 1e-6 * rng.normal(size=(n, k))
    x[:, d // 2] += z
    x[:, d // 2 + 1] += y
    return x, z, y


def shown(eraser: sf.Projection, x: Float, z: NDArray[Any], y: NDArray[Any]) -> list[float]:
    """Change, trace left and share kept, from rows."""
    clean = eraser(x)
    columns = z[:, None] if z.dtype.kind == "f" else np.eye(int(z.max()) + 1)[z][:, 1:]
    units = x.std(axis=0)
    units[units == 0] = 1.0
    target = (y - y.mean()) / y.std()
    before, after = ((v - v.mean(axis=0)).T @ target / len(v) / units for v in (x, clean))
    return [
        float(((clean - x) ** 2).sum() / ((x - x.mean(axis=0)) ** 2).sum()),
        pillai(clean, columns) / columns.shape[1],
        float(1 - np.linalg.norm(after - before) / np.linalg.norm(before)),
    ]


def assert_predicted(
    folds: list[sf.Moments], parts: list[Any], shrinkage: Any, figures: int = 3
) -> None:
    """Figures of held-out rows lie within the spread over folds, or within 10 % of their mean."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.exceptions.UnseenRowsWarning)
        found = sf.cross_report(folds, erase="z", keep="y", shrinkage=shrinkage)
    said = np.array([[f.distortion, f.concept, f.kept] for f in found.folds])
    held_out = np.mean([shown(found.eraser, *rows) for rows in parts], axis=0)
    said, held_out = said[:, :figures], held_out[:figures]
    low, high = said.min(axis=0), said.max(axis=0)
    # The trace is of the size of its chance level, so that this counts, too.
    slack = 0.1 * np.abs(held_out)
    slack[1] += 0.2 * found.folds[0].chance
    assert (low - slack <= held_out).all(), (said, held_out)
    assert (held_out <= high + slack).all(), (said, held_out)
    # Control: the fitted rows' own figure of the trace, which is 0, is no such prediction.
    assert held_out[1] > slack[1]


def in_fifths(x: Float, z: NDArray[Any], y: NDArray[Any]) -> tuple[list[sf.Moments], list[Any]]:
    """Half of the rows in five folds, the other half in five parts."""
    n = len(x) // 2
    parts = [(x[n + i :: 5], z[n + i :: 5], y[n + i :: 5]) for i in range(5)]
    return split_rows(x[:n], 5, z=z[:n], y=y[:n]), parts


@pytest.mark.parametrize("shrinkage", [None, "oas"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "rare"])
def test_figures_predict_held_out_rows(kind: str, shrinkage: str | None) -> None:
    # The share kept is in units of deviations: features that are dead in a fold have none.
    figures = 2 if kind == "rare" else 3
    assert_predicted(*in_fifths(*kind_of_rows(kind, 8000)), shrinkage, figures)


@pytest.mark.parametrize(("kind", "warns"), [("gaussian", False), ("heavy", False), ("rare", True)])
def test_only_features_that_rarely_fire_warn(kind: str, warns: bool) -> None:
    x, z, y = kind_of_rows(kind, 4000)
    folds = split_rows(x, 2, z=z, y=y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = sf.cross_report(folds, erase="z", keep="y")
    assert (sf.exceptions.UnseenRowsWarning in {w.category for w in caught}) == warns
    assert bool(found.warnings) == bool(found.remedies) == warns
    if warns:
        assert set(found.weak_features) <= set(range(10))
        assert "hardly vary" in found.warnings[0]
        assert found.warnings[0] in found.eraser.report.warnings
        assert dict(found.remedies)["shrinkage='oas'"] < np.mean(found.distortion)
        with warnings.catch_warnings():  # the remedy that it names is silent
            warnings.simplefilter("error")
            after = sf.cross_report(folds, erase="z", keep="y", shrinkage="oas")
        assert np.mean(after.distortion) == pytest.approx(dict(found.remedies)["shrinkage='oas'"])


@pytest.mark.filterwarnings(
    "ignore:the eraser is sensitive:splince_fast.exceptions.PrecisionWarning"
)
@pytest.mark.parametrize(
    ("name", "shrinkage"),
    [
        ("professions_word2vec", "oas"),
        ("professions_smollm2", None),
        ("professions_smollm2", "oas"),
        ("bug_profession_gender", None),
        ("bug_profession_gender", "oas"),
    ],
)
def test_figures_predict_held_out_rows_of_real_data(
    real_data: Callable[[str], Path], name: str, shrinkage: str | None
) -> None:
    """For n below d without shrinkage they do not: word2vec says .03, rows .05, and it warns."""
    x, z, y = real_rows(real_data(name))
    assert_predicted(*in_fifths(x.astype(np.float64), z, y), shrinkage)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"folds": []}, "two or more"),
        ({"folds": "one"}, "two or more"),
        ({"method": "other"}, "must be one of 'splince'"),
        ({"method": "none"}, "on folds; choose one of"),
        ({"method": "leece"}, "did you mean 'leace'"),
        ({"method": "leace", "keep": "y"}, "keeps nothing"),
    ],
)
def test_cross_report_refuses_bad_input(arguments: dict[str, Any], text: str) -> None:
    x, z, y = data(60)
    folds = split_rows(x, 2, z=z, y=y)
    if "folds" in arguments:
        folds = folds[:1] if arguments["folds"] == "one" else []
    options = {"erase": "z"} | {k: v for k, v in arguments.items() if k != "folds"}
    with pytest.raises(sf.exceptions.InputError, match=text):
        sf.cross_report(folds, **options)


@pytest.mark.parametrize("widths", [(6, 3), (20, 60), (4, 4, 5)])
def test_folds_of_unlike_widths_are_an_error_that_names_both(widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, 200)
    folds = [sf.Moments().update(rng.normal(size=(200, d)) + z[:, None], {"z": z}) for d in widths]
    for _ in range(3):
        with pytest.raises(sf.exceptions.IncompatibleMomentsError, match=r"\d features and of \d"):
            sf.cross_report(folds, erase="z")


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_folds_of_another_mean_are_moved_by_it(shift: float) -> None:
    """r moves the mean of a fold: |left right^T (m_f - m)|^2 is part of its distortion."""
    x, z, y = data(600)
    folds = []
    rows = [x[::2], x[1::2] + shift]
    for i, part in enumerate(rows):
        folds.append(sf.Moments().update(part, {"z": z[i::2], "y": y[i::2]}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.exceptions.UnseenRowsWarning)
        found = sf.cross_report(folds, erase="z", keep="y").distortion
    for i, part in enumerate(rows):
        eraser = sf.splince(folds[1 - i], erase="z", keep="y")
        moved = ((eraser(part) - part) ** 2).sum(axis=1).mean() / part.var(axis=0).sum()
        assert found[i] == pytest.approx(moved, rel=1e-9)
        assert (moved > 5) == (shift > 0)
