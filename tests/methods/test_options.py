"""Options of the methods: what each gives up, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from problems import Data, Float, draw_data, erase, ignored, report, told

import splince_fast as sf
from splince_fast.exceptions import DroppedDirectionsWarning, InfeasibleError, InputError


def white(n: int, d: int, seed: int) -> Float:
    """Centred rows with orthonormal columns."""
    rng = np.random.default_rng(seed)
    x = np.linalg.qr(rng.normal(size=(n, d)))[0]
    return np.asarray(np.linalg.qr(x - x.mean(axis=0))[0])


@pytest.mark.parametrize(
    ("cap", "lost"), [(1.0, {0, 1, 2}), (2.0, {1, 2}), (10.0, {2}), (1e3, set()), (np.inf, set())]
)
def test_max_amplification_gives_up_what_lies_above_it_and_no_more(
    cap: float, lost: set[int]
) -> None:
    """White data with y_j at given cosines to z_j; the whole problem can be read off."""
    x, cosines = white(900, 9, 20), (0.2, 0.9, 0.999)
    tasks = {f"y{j}": c * x[:, j] + (1 - c**2) ** 0.5 * x[:, j + 3] for j, c in enumerate(cosines)}
    moments = sf.Moments().update(x, {f"z{j}": x[:, j] for j in range(3)} | tasks)
    eraser, caught = told(
        erase, "splince", moments, ["z0", "z1", "z2"], list(tasks), max_amplification=cap
    )
    assert (DroppedDirectionsWarning in map(type, caught)) == bool(lost)
    figures = report(eraser)
    assert figures.dropped == len(lost)
    assert figures.amplification <= cap
    assert figures.cosines == pytest.approx((0.999, 0.9, 0.2), abs=1e-12)
    # A dropped column loses exactly its part in the erased direction.
    expected = [c if j in lost else 0.0 for j, c in enumerate(cosines)]
    assert [v.residual for v in figures.variables[3:]] == pytest.approx(expected, abs=1e-9)
    assert all(v.residual <= v.bound for v in figures.variables[:3])
    # Where nothing is dropped, nothing changes.
    plain = draw_data(0).moments()
    options: Any = {"max_amplification": 1e6} if lost else {"on_infeasible": "drop"}
    found, expected_map = erase("splince", plain, **options), erase("splince", plain)
    np.testing.assert_array_equal(found.matrix(), expected_map.matrix())


@pytest.mark.parametrize("method", ["splince", "sal that keeps"])
def test_what_clashes_is_given_up_and_the_rest_is_kept(method: str) -> None:
    data = draw_data(21, ky=1)
    labels = {"z": data.z, "same": np.where(data.z == 1, "a", "b"), "y": data.y}
    moments = sf.Moments().update(data.x, labels)
    with pytest.raises(InfeasibleError):
        erase(method, moments, y=["same", "y"])
    with pytest.warns(DroppedDirectionsWarning):
        eraser = erase(method, moments, y=["same", "y"], on_infeasible="drop")
    erased, given_up, kept = report(eraser).variables
    assert erased.residual <= erased.bound
    assert given_up.residual == pytest.approx(1.0, abs=1e-6)
    # y is kept up to its share in the direction that was given up: a plane cannot tell them apart.
    assert kept.residual < 1
    alone = report(erase(method, moments)).variables[1]
    assert alone.residual <= alone.bound


@ignored("LabelFeatureWarning")
def test_tolerance_for_ranks_leaves_weak_directions_alone() -> None:
    x = white(500, 6, 22)
    weak = 1e-3 * x[:, 1] + (1 - 1e-6) ** 0.5 * x[:, 5]
    moments = sf.Moments().update(x[:, :5], {"z": np.column_stack([x[:, 0], weak])})
    ranks = [sf.leace(moments, erase="z", rank_tol=t).rank for t in ("auto", 1e-4, 1e-2)]
    assert ranks == [2, 2, 1]
    data = draw_data(23)
    for method in ("leace", "sal"):  # in any units
        scaled = [Data(data.x * scale, data.z, data.y) for scale in (1.0, 1e-12, 1e12)]
        assert len({erase(method, d.moments(), rank_tol=0.9).rank for d in scaled}) == 1


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


@ignored("DroppedDirectionsWarning")
@pytest.mark.parametrize("name", RANGES)
def test_ranges_of_options(name: str) -> None:
    moments = draw_data(0).moments()
    valid, invalid = RANGES[name]
    for value in valid:
        sf.splince(moments, erase="z", keep="y", **{name: value})
    for value in invalid:
        with pytest.raises(InputError, match=f"{name} is {value!r}"):
            sf.splince(moments, erase="z", keep="y", **{name: value})


def test_levels_may_be_numbers_of_numpy() -> None:
    figures = report(sf.leace(draw_data(0).moments(), erase="z"))
    assert figures.certificate(delta=HALF) == figures.certificate(delta=0.5)
