"""Options of the methods, and the selection of variables: what each does, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from problems import (
    Float,
    assert_erased_in_mean,
    assert_same,
    change,
    covariance,
    draw_data,
    erase,
    ignored,
    report,
    slack,
    told,
)

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
    text = figures.explain()
    assert (f"{len(lost)} kept direction(s) were dropped" in text) == bool(lost)
    assert ("loses the fraction" in text) == bool(lost)
    assert (figures.distortion == pytest.approx(figures.distortion_leace)) == (cap == 1.0)
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


@pytest.mark.parametrize("method", ["leace", "sal"])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_report_says_what_a_tolerance_for_ranks_leaves(method: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    z = rng.integers(0, 4, 2000)
    x = rng.normal(size=(2000, 6)) + (np.eye(6) * [3, 0.5, 0.3, 0, 0, 0])[z]
    x *= scale
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


def test_joint_cells_are_erased_beyond_the_margins() -> None:
    """The interaction of two variables is visible in x, and only their joint cells tell it."""
    rng = np.random.default_rng(26)
    a, b = rng.integers(0, 2, size=4000), rng.integers(0, 2, size=4000)
    x = rng.normal(size=(4000, 6))
    x[:, 0] += a ^ b
    x[:, 1] += a
    moments = sf.Moments(joint=[("a", "b")]).update(x, {"a": a, "b": b})
    margins, cells = sf.leace(moments, erase=["a", "b"]), sf.leace(moments, erase=("a", "b"))
    assert (margins.rank, cells.rank) == (2, 3)

    def spread(eraser: sf.Projection) -> float:
        clean = eraser(x)
        means = [clean[(a == i) & (b == j)].mean(axis=0) for i in (0, 1) for j in (0, 1)]
        return float(np.ptp(means, axis=0).max())

    assert spread(cells) < 1e-11
    assert spread(margins) > 0.5
    both = sf.leace(moments, erase=["a", ("a", "b")])
    assert_same(change(both), change(cells), 1e-11)


def test_a_cascade_must_be_refitted_and_then_equals_the_joint_eraser() -> None:
    data = draw_data(27, d=10, ky=1)
    rng = np.random.default_rng(1)
    other = (data.x @ rng.normal(size=10) + data.z > 0).astype(int)
    labels = {"z": data.z, "o": other, "y": data.y}
    moments = sf.Moments().update(data.x, labels)

    def cascade(method: str, second: str, *, refit: bool) -> sf.Projection:
        first = erase(method, moments)
        seen = sf.Moments().update(first(data.x), labels) if refit else moments
        return erase(second, seen, z="o") @ first

    for method in ("leace", "splince"):
        both = cascade(method, method, refit=True)
        assert_erased_in_mean(both(data.x), data.z)
        assert_erased_in_mean(both(data.x), other)
        joint = erase(method, moments, z=["z", "o"])
        np.testing.assert_allclose(both(data.x), joint(data.x), atol=1e-11)
        # Fitted on the same moments, one brings back what the other erased.
        clean = cascade(method, method, refit=False)(data.x)
        assert (
            np.abs(np.diff([clean[other == c].mean(axis=0) for c in (0, 1)], axis=0)).max() > 0.01
        )
    # Kept in the first stage only, the task is lost in the second.
    half = covariance(cascade("splince", "leace", refit=True)(data.x), data.y)
    assert np.linalg.norm(half - covariance(data.x, data.y)) > 1e-3 * np.linalg.norm(half)


def test_the_cross_covariance_as_directions_is_the_variable() -> None:
    data = draw_data(29)
    moments = data.moments()
    by_direction = erase("splince", moments, y=moments.cross_covariance("y"))
    assert_same(change(by_direction), change(erase("splince", moments)), slack(data))


def test_directions_off_the_support_stay_and_cost_nothing() -> None:
    data = draw_data(31, n=10, d=20, kz=2, ky=1)
    moments = data.moments()
    centred = data.x - data.x.mean(axis=0)
    null = np.linalg.svd(centred)[2][9:].T
    eraser = erase("splince", moments, y=null[:, :3])
    assert_same(change(eraser), change(erase("leace", moments)), 1e-10)
    np.testing.assert_allclose(eraser.matrix() @ null, null, atol=1e-10)


# The warning is of the bound, which knows what the directions are worth.
@ignored("PrecisionWarning")
@pytest.mark.parametrize(("gap", "rank"), [(1e-6, 2), (1e-10, 2), (1e-17, 1)])
def test_directions_to_be_kept_count_down_to_rounding(gap: float, rank: int) -> None:
    """Two directions so far apart span a plane, and both of its axes stay."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, 500)
    moments = sf.Moments().update(rng.normal(size=(500, 6)) + z[:, None], {"z": z})
    u, v = np.linalg.qr(rng.normal(size=(6, 2)))[0].T
    eraser = sf.splince(moments, erase="z", keep=np.stack([u, u + gap * v], axis=1))
    assert report(eraser).variables[1].rank == rank
    kept = [np.linalg.norm(eraser.matrix() @ axis - axis) for axis in (u, v)]
    assert kept[0] < 1e-12
    # The axis is known to the rounding of the directions over their gap.
    assert (kept[1] < 1e-14 / gap) if rank == 2 else (kept[1] > 1e-3)
