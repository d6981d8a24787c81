"""Options of the methods: what each gives up, and what it refuses."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from problems import (
    Data,
    Float,
    draw_data,
    erase,
    report,
)

import splince_fast as sf


def fan(cosines: tuple[float, ...] = (0.2, 0.9, 0.999)) -> tuple[sf.Moments, Float]:
    """White data with y_j at the given cosines to z_j; the whole problem can be read off."""
    rng = np.random.default_rng(20)
    x = np.linalg.qr(rng.normal(size=(900, 9)))[0]
    x = np.linalg.qr(x - x.mean(axis=0))[0]
    labels: dict[str, Any] = {}
    for j, c in enumerate(cosines):
        labels[f"z{j}"] = x[:, j]
        labels[f"y{j}"] = c * x[:, j] + (1 - c**2) ** 0.5 * x[:, j + 3]
    return sf.Moments().update(x, labels), x


@pytest.mark.parametrize(
    ("cap", "lost"), [(1.0, {0, 1, 2}), (2.0, {1, 2}), (10.0, {2}), (1e3, set()), (np.inf, set())]
)
def test_max_amplification_gives_up_what_lies_above_it_and_no_more(
    cap: float, lost: set[int]
) -> None:
    moments, _ = fan()
    names = {"z": ["z0", "z1", "z2"], "y": ["y0", "y1", "y2"]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eraser = erase("splince", moments, names["z"], names["y"], max_amplification=cap)
    kinds = [w.category for w in caught if w.category is not sf.exceptions.LabelFeatureWarning]
    assert kinds == ([sf.exceptions.DroppedDirectionsWarning] if lost else [])
    figures = report(eraser)
    assert figures.dropped == len(lost)
    assert figures.amplification <= cap
    assert figures.cosines == pytest.approx((0.999, 0.9, 0.2), abs=1e-12)
    for j, variable in enumerate(figures.variables[3:]):
        cosine = (0.2, 0.9, 0.999)[j]
        # A dropped column loses exactly its part in the erased direction.
        expected = cosine if j in lost else 0.0
        assert variable.residual == pytest.approx(expected, abs=1e-9)
    assert all(v.residual <= v.bound for v in figures.variables[:3])


def test_dropping_nothing_changes_nothing() -> None:
    data = draw_data(0)
    moments = data.moments()
    plain = erase("splince", moments)
    for options in ({"on_infeasible": "drop"}, {"max_amplification": 1e6}):
        np.testing.assert_array_equal(erase("splince", moments, **options).matrix(), plain.matrix())


@pytest.mark.parametrize("method", ["splince", "sal that keeps"])
def test_what_clashes_is_given_up_and_the_rest_is_kept(method: str) -> None:
    data = draw_data(21, ky=1)
    labels = {"z": data.z, "same": np.where(data.z == 1, "a", "b"), "y": data.y}
    moments = sf.Moments().update(data.x, labels)
    with pytest.raises(sf.exceptions.InfeasibleError):
        erase(method, moments, y=["same", "y"])
    with pytest.warns(sf.exceptions.DroppedDirectionsWarning):
        eraser = erase(method, moments, y=["same", "y"], on_infeasible="drop")
    erased, given_up, kept = report(eraser).variables
    assert erased.residual <= erased.bound
    assert given_up.residual == pytest.approx(1.0, abs=1e-6)
    # y is kept up to its share in the direction that was given up: a plane cannot tell them apart.
    assert kept.residual < 1
    alone = report(erase(method, moments)).variables[1]
    assert alone.residual <= alone.bound


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.LabelFeatureWarning")
def test_tolerance_for_ranks_leaves_weak_directions_alone() -> None:
    rng = np.random.default_rng(22)
    x = np.linalg.qr(rng.normal(size=(500, 5)))[0]
    x = np.linalg.qr(x - x.mean(axis=0))[0]
    noise = np.linalg.qr(np.column_stack([np.ones(500), x, rng.normal(size=500)]))[0][:, -1]
    weak = 1e-3 * x[:, 1] + (1 - 1e-6) ** 0.5 * noise
    moments = sf.Moments().update(x, {"z": np.column_stack([x[:, 0], weak])})
    ranks = [sf.leace(moments, erase="z", rank_tol=t).rank for t in ("auto", 1e-4, 1e-2)]
    assert ranks == [2, 2, 1]


@pytest.mark.parametrize("method", ["leace", "sal"])
def test_a_report_says_what_a_tolerance_for_ranks_leaves(method: str) -> None:
    rng = np.random.default_rng(0)
    z = rng.integers(0, 4, 2000)
    x = rng.normal(size=(2000, 6)) + (np.eye(6) * [3, 0.5, 0.3, 0, 0, 0])[z]
    moments = sf.Moments().update(x, {"z": z})
    for rank_tol in ("auto", 1e-9, 0.4):
        figures = report(getattr(sf, method)(moments, erase="z", rank_tol=rank_tol))
        (erased,), left = figures.variables, rank_tol == 0.4
        assert (erased.residual > 0.1, erased.rank < 3) == (left, left)
        assert erased.bound < 1e-12
        assert (erased.expected is None) == (left or method == "sal")
        assert ("still predicts 'z' (rank_tol)" in figures.explain()) == left
        assert ("no linear predictor" in figures.explain()) != left


def test_rank_tolerance_does_not_depend_on_units() -> None:
    data = draw_data(23)
    for scale in (1e-12, 1e12):
        moments = Data(data.x * scale, data.z, data.y).moments()
        for method in ("leace", "sal"):
            assert (
                erase(method, moments, rank_tol=0.9).rank
                == erase(method, data.moments(), rank_tol=0.9).rank
            )


OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_amplification": [0.5, -1, float("nan"), "10"],
    "on_infeasible": ["ignore"],
    "null_space": ["identity"],
    "shrinkage": [-0.1, 1.5, float("nan"), "lw"],
    "rank_tol": [1.0, -1e-3, float("nan"), "tight"],
    "solver": ["svd", None],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_parameters_out_of_range(name: str) -> None:
    moments = draw_data(0).moments()
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(sf.exceptions.InputError, match=name):
            sf.splince(moments, erase="z", keep="y", **{name: value})


def test_numbers_of_numpy_pass_and_booleans_do_not() -> None:
    X, z = np.random.default_rng(0).normal(size=(300, 3)), np.arange(300) % 2
    X = X + z[:, None]
    moments = sf.Moments().update(X, {"z": z})
    half = np.float32(0.5)
    eraser = sf.leace(moments, erase="z", shrinkage=half)
    assert eraser.report is not None
    assert eraser.report.certificate(delta=half) == eraser.report.certificate(delta=0.5)
    for call in (
        lambda: sf.leace(moments, erase="z", shrinkage=True),
        lambda: sf.sal(moments, erase="z", max_amplification=True),
        lambda: eraser.scaled(True),
    ):
        with pytest.raises(sf.exceptions.InputError, match="is True"):
            call()


@pytest.mark.parametrize("wrong", [None, 3, 2.5, True, object(), ["a"]])
def test_paths_and_folds_of_other_types_are_refused(wrong: Any) -> None:
    X, z = np.random.default_rng(0).normal(size=(300, 3)), np.arange(300) % 2
    moments = sf.Moments().update(X, {"z": z})
    for call in (sf.load_eraser, sf.Moments.load, sf.Projection.load, moments.save):
        with pytest.raises(
            sf.exceptions.InputError, match=r"the path is .*; pass the name of a file"
        ):
            call(wrong)
    if wrong is not None:
        with pytest.raises(sf.exceptions.InputError, match="the path is"):
            sf.Moments.from_blocks([(X, {"z": z})], checkpoint=wrong)
    if not isinstance(wrong, list):
        with pytest.raises(sf.exceptions.InputError, match="two or more"):
            sf.cross_report(wrong, erase="z")
