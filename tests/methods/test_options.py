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
        assert ("a linear predictor can use it" in figures.explain()) == left
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


NAN, HALF = float("nan"), np.float32(0.5)
# option: values on the ends of the valid range, and values out of it
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "max_amplification": ([None, 1, np.inf], [0.5, -1, NAN, "10", True]),
    "on_infeasible": (["raise", "drop"], ["ignore", None, 1]),
    "null_space": (["keep", "drop"], ["identity", None]),
    "shrinkage": ([None, 0, HALF, 1, "oas"], [-0.1, 1.5, NAN, "lw", True]),
    "rank_tol": (["auto", 0, HALF], [1.0, -1e-3, NAN, "tight", None]),
    "solver": (["auto", "cholesky", "eigh"], ["svd", None]),
    "strength": ([0, HALF, 1], [-0.1, 1.1, NAN, "1", None, True]),
}


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.DroppedDirectionsWarning")
@pytest.mark.parametrize("name", RANGES)
def test_ranges_of_options(name: str) -> None:
    moments = draw_data(0).moments()
    valid, invalid = RANGES[name]
    for value in valid:
        sf.splince(moments, erase="z", keep="y", **{name: value})
    for value in invalid:
        with pytest.raises(sf.exceptions.InputError, match=f"{name} is {value!r}"):
            sf.splince(moments, erase="z", keep="y", **{name: value})


def test_levels_and_fractions_may_be_numbers_of_numpy_and_no_booleans() -> None:
    eraser = sf.leace(draw_data(0).moments(), erase="z")
    assert report(eraser).certificate(delta=HALF) == report(eraser).certificate(delta=0.5)
    with pytest.raises(sf.exceptions.InputError, match="is True"):
        eraser.scaled(True)


@pytest.mark.parametrize("wrong", [None, 3, 2.5, True, object(), ["a"]])
def test_paths_and_folds_of_other_types_are_refused(wrong: Any) -> None:
    data = draw_data(0)
    moments = data.moments()
    for call in (sf.load_eraser, sf.Moments.load, sf.Projection.load, moments.save):
        with pytest.raises(
            sf.exceptions.InputError, match=r"the path is .*; pass the name of a file"
        ):
            call(wrong)
    if wrong is not None:
        with pytest.raises(sf.exceptions.InputError, match="the path is"):
            sf.Moments.from_blocks([(data.x, {"z": data.z})], checkpoint=wrong)
    if not isinstance(wrong, list):
        with pytest.raises(sf.exceptions.InputError, match="two or more"):
            sf.cross_report(wrong, erase="z")
