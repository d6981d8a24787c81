"""Repair of erased rows, and the strength of what is given back.

Tolerances. B Ty = Sy holds to the bound of the report, 8 d eps q |B|^2 and the rounding of the sums
that Ty and Sy are. Two computations of B differ by the condition of T on its support, kappa, times
that of the whitened Cov(t, y), q, and by the rounding of the covariances of n rows (`problems`).

Module: `_solve.restore`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import EPS, Data, Float, draw_data, many, report

import splince_fast as sf
from splince_fast.baselines import INLP


def moments_of(x: Float, data: Data, **options: Any) -> sf.Moments:
    return sf.Moments(**options).update(x, {"z": data.z, "y": data.y})


def covariance(x: Float, y: Float) -> Float:
    return np.asarray((x - x.mean(axis=0)).T @ (y - y.mean(axis=0)) / len(x))


def some_map(rng: np.random.Generator, d: int, rank: int) -> Float:
    """A linear map of that rank, with singular values from 0.2 to 2."""
    left, right = (np.linalg.qr(rng.normal(size=(d, d)))[0][:, :rank] for _ in range(2))
    return np.asarray(left * rng.uniform(0.2, 2.0, rank) @ right.T)


def by_kkt(t: Float, ty: Float, sy: Float, weight: Float) -> Float:
    """argmin tr(M E T E^T) subject to E Ty = Sy - Ty, as one linear system for all entries of E.

    Neither T^+ nor a factor of T: least squares of the stationarity condition and the constraint.
    """
    d, k = ty.shape
    system = np.block(
        [
            [np.kron(t, weight), np.kron(ty, np.eye(d))],
            [np.kron(ty.T, np.eye(d)), np.zeros((k * d, k * d))],
        ]
    )
    target = np.concatenate([np.zeros(d * d), (sy - ty).T.reshape(-1)])
    solution = np.linalg.lstsq(system, target, rcond=1e-12)[0]
    return np.asarray(solution[: d * d].reshape(d, d).T)


# --- the constraint ------------------------------------------------------------------------------


@many
@given(
    seed=st.integers(0, 2**20), d=st.integers(3, 20), ky=st.integers(1, 2),
    lost=st.integers(0, 2), n=st.sampled_from([12, 60, 400]), shift=st.booleans(),
)  # fmt: skip
def test_any_eraser_s_rows_get_the_covariance_back(
    seed: int, d: int, ky: int, lost: int, n: int, shift: bool
) -> None:
    data = draw_data(seed, n=n, d=d, kz=2, ky=ky, kappa=30.0)
    rng = np.random.default_rng(seed)
    t = data.x @ some_map(rng, d, max(ky, d - lost)).T + 5.0 * rng.normal(size=d) * shift
    before, after = moments_of(data.x, data), moments_of(t, data)
    repaired = sf.repair(after, before=before, keep="y")
    figures = report(repaired)
    assert all(v.residual <= v.bound for v in figures.variables)
    clean = repaired(t)
    np.testing.assert_allclose(clean.mean(axis=0), t.mean(axis=0), rtol=1e-12, atol=1e-12)
    wanted, found = covariance(data.x, data.y), covariance(clean, data.y)
    size = np.linalg.norm(data.x.std(axis=0)) + np.linalg.norm(t.std(axis=0))
    offset = np.abs(np.concatenate([data.x, t])).max() / data.x.std()
    slack = 64 * n**0.5 * EPS * (1 + offset) * size * np.linalg.norm(data.y.std(axis=0))
    bound = max(v.bound for v in figures.variables) * np.linalg.norm(wanted)
    assert np.linalg.norm(found - wanted) <= bound + slack * figures.amplification
    # Control: the rows before repair have another one.
    assert np.linalg.norm(covariance(t, data.y) - wanted) > 1e-3 * np.linalg.norm(wanted)


def test_classes_of_any_order_and_weights() -> None:
    data = draw_data(3, d=6, kz=4, ky=1)
    rng = np.random.default_rng(0)
    names = np.array(["a", "b", "c", "d"])[data.z]
    weights, t = rng.uniform(0.5, 2.0, len(names)), data.x @ some_map(rng, 6, 6).T
    order = rng.permutation(len(names))
    before = sf.Moments().update(data.x, {"y": names}, sample_weight=weights)
    after = sf.Moments().update(t[order], {"y": names[order]}, sample_weight=weights[order])
    assert after.classes("y") == before.classes("y")
    # Blocks name classes in the order in which they come.
    last = names == "d"
    blocks = sf.Moments()
    for part in (last, ~last):
        blocks.update(t[part], {"y": names[part]}, sample_weight=weights[part])
    assert blocks.classes("y") != before.classes("y")
    repaired = sf.repair(after, before=before, keep="y")
    other = sf.repair(blocks, before=before, keep="y")
    np.testing.assert_allclose(other.matrix(), repaired.matrix(), atol=1e-10)
    clean = repaired(t)
    for name in np.unique(names):
        inside = names == name
        means = [np.average(x[inside], axis=0, weights=weights[inside]) for x in (clean, data.x)]
        whole = [np.average(x, axis=0, weights=weights) for x in (clean, data.x)]
        np.testing.assert_allclose(means[0] - whole[0], means[1] - whole[1], atol=1e-10)


@pytest.mark.parametrize("scales", [(1e-12, 1e12), (1e12, 1e-12)])
def test_units_of_all_features_do_not_matter(scales: tuple[float, float]) -> None:
    data = draw_data(4, d=6, ky=1)
    found = []
    for scale in (1.0, *scales):
        scaled = Data(data.x * scale, data.z, data.y)
        before = scaled.moments()
        t = sf.sal(before, erase="z")(scaled.x)
        found.append(sf.repair(moments_of(t, scaled), before=before, keep="y").matrix())
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-11)


# --- the least change ----------------------------------------------------------------------------


@many
@given(
    seed=st.integers(0, 2**20), d=st.integers(3, 6), ky=st.integers(1, 2), lost=st.integers(0, 1),
    identity=st.booleans(),
)  # fmt: skip
def test_the_change_is_the_least_in_any_inner_product(
    seed: int, d: int, ky: int, lost: int, identity: bool
) -> None:
    data = draw_data(seed, d=d, kz=2, ky=ky, kappa=10.0)
    rng = np.random.default_rng(seed)
    t = data.x @ some_map(rng, d, max(ky, d - lost)).T
    repaired = sf.repair(moments_of(t, data), before=data.moments(), keep="y")
    root = rng.normal(size=(d, d))
    weight = np.eye(d) if identity else root @ root.T / d + 0.1 * np.eye(d)
    cov, ty, sy = covariance(t, t), covariance(t, data.y), covariance(data.x, data.y)
    expected = by_kkt(cov, ty, sy, weight)
    values = np.linalg.eigvalsh(cov)
    values = values[values > 1e-12 * values[-1]]
    kappa, q = values[-1] / values[0], np.linalg.cond(ty)
    change = repaired.matrix() - np.eye(d)
    rows = (t - t.mean(axis=0)) @ (change - expected).T
    size = np.linalg.norm((t - t.mean(axis=0)) @ expected.T) + np.linalg.norm(t - t.mean(axis=0))
    bound = 1e3 * d**2 * EPS * kappa**2 * np.linalg.cond(weight) * q**2
    assert np.linalg.norm(rows) <= bound * size
    cost = np.trace(expected @ cov @ expected.T) / np.trace(covariance(data.x, data.x))
    assert report(repaired).distortion == pytest.approx(cost, rel=max(1e-9, bound), abs=1e-12)


def test_control_another_covariance_changes_more() -> None:
    data = draw_data(0, d=6, ky=1, kappa=20.0)
    rng = np.random.default_rng(0)
    t = data.x @ some_map(rng, 6, 6).T
    cov, ty, sy = covariance(t, t), covariance(t, data.y), covariance(data.x, data.y)
    found = sf.repair(moments_of(t, data), before=data.moments(), keep="y").matrix() - np.eye(6)
    least = np.trace(found @ cov @ found.T)
    for wrong in (np.eye(6), cov + 0.1 * np.trace(cov) / 6 * np.eye(6)):
        other = by_kkt(wrong, ty, sy, np.eye(6))
        np.testing.assert_allclose(other @ ty, sy - ty, atol=1e-10)  # the constraint cannot tell
        assert np.trace(other @ cov @ other.T) > 1.01 * least


# --- LEACE, SAL, INLP ----------------------------------------------------------------------------


@many
@given(
    seed=st.integers(0, 2**20), n=st.sampled_from([14, 400]), d=st.integers(5, 16),
    kz=st.integers(2, 3), single=st.booleans(),
)  # fmt: skip
def test_the_repair_of_leace_is_splince(seed: int, n: int, d: int, kz: int, single: bool) -> None:
    data = draw_data(seed, n=n, d=d, kz=kz, ky=1, kappa=30.0, mean=0.3)
    before = data.moments()
    leace, splince = sf.leace(before, erase="z"), sf.splince(before, erase="z", keep="y")
    assume(report(splince).amplification < 1e3)  # else the problem itself loses the digits
    erased = leace(data.x)
    after = moments_of(erased, data)
    repaired = sf.repair(after.factored() if single else after, before=before, keep="y")
    found, expected = (repaired @ leace)(data.x), splince(data.x)
    assert np.linalg.norm(found - expected) <= 1e-9 * np.linalg.norm(expected - data.x.mean(axis=0))
    parts = [report(p).distortion for p in (leace, repaired)]
    assert sum(parts) == pytest.approx(report(splince).distortion, rel=1e-9)


def test_control_the_repair_of_sal_is_not_splince() -> None:
    data = draw_data(0, d=6, ky=1)
    before = data.moments()
    sal, splince = sf.sal(before, erase="z"), sf.splince(before, erase="z", keep="y")
    both = sf.repair(moments_of(sal(data.x), data), before=before, keep="y") @ sal
    change = both(data.x) - splince(data.x)
    assert np.linalg.norm(change) > 1e-2 * np.linalg.norm(data.x - data.x.mean(axis=0))
    # It satisfies the same constraints, at a higher price.
    clean = both(data.x)
    hot = np.eye(3)[data.z]
    np.testing.assert_allclose(covariance(clean, hot), 0.0, atol=1e-12)
    np.testing.assert_allclose(covariance(clean, data.y), covariance(data.x, data.y), atol=1e-12)
    moved = np.sum((clean - data.x) ** 2) / np.sum((data.x - data.x.mean(axis=0)) ** 2)
    assert moved > 1.001 * report(splince).distortion  # type: ignore[operator]


def test_a_repair_leaves_linear_predictors_what_they_read() -> None:
    """Of a concept that INLP left a trace of, and of one that it removed."""
    data = draw_data(1, n=600, d=10, kz=2, ky=1, kappa=10.0)
    before = data.moments()
    eraser = INLP(max_rank=2, random_state=0).fit(data.x, concept=data.z).projection_
    t = eraser(data.x)
    repaired = sf.repair(moments_of(t, data), before=before, keep="y")
    read = []
    for rows in (t, repaired(t)):
        design = np.column_stack([np.ones(len(rows)), rows])
        read.append(design @ np.linalg.lstsq(design, data.z, rcond=1e-10)[0])
    np.testing.assert_allclose(read[1], read[0], atol=1e-9)
    # Class means that are equal stay equal.
    t = sf.sal(before, erase="z")(data.x)
    clean = sf.repair(moments_of(t, data), before=before, keep="y")(t)
    assert np.abs(clean[data.z == 1].mean(axis=0) - clean[data.z == 0].mean(axis=0)).max() < 1e-12


# --- rounding of the eraser is not read ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_an_erased_feature_that_is_rounding_is_not_read(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(500, 5)) * [1e3, 1, 1, 1, 1] + [7, 0, 3, 0, 0]
    y = x[:, 1] + 1e-3 * x[:, 0] + rng.normal(size=500)
    noise = float(np.finfo(dtype).eps)
    t = x.copy()
    t[:, 0] = 7 + noise * rng.normal(size=500)  # erased, but for rounding
    before, after = (sf.Moments().update(v.astype(dtype), {"y": y}) for v in (x, t))
    repaired = sf.repair(after, before=before, keep="y")
    assert np.abs(repaired.right[0]).max() == 0.0
    assert report(repaired).amplification < 3
    clean = repaired(t)
    np.testing.assert_allclose(
        covariance(clean, y[:, None]), covariance(x, y[:, None]), rtol=1e-4, atol=1e-6
    )
    # Control: a snapshot has been factored without knowing the rows before erasing.
    if dtype is np.float64 and noise * 500 > 0:
        t[:, 0] = noise * rng.normal(size=500)
        snapshot = sf.Moments().update(t, {"y": y}).factored()
        with pytest.raises(
            sf.exceptions.InputError, match=r"factor uses feature\(s\) 0,.*pass the moments"
        ):
            sf.repair(snapshot, before=before, keep="y")


# --- feasibility ---------------------------------------------------------------------------------


def exact_rank(matrix: Any) -> int:
    """Rank of integers by elimination in exact arithmetic."""
    rows, rank = [[Fraction(int(v)) for v in row] for row in matrix], 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            factor = rows[i][column] / rows[rank][column]
            rows[i] = [a - factor * b for a, b in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def test_feasibility_is_decided_as_exact_arithmetic_does() -> None:
    """Integer rows through integer maps; 500 of 500, of both kinds."""
    rng, decided = np.random.default_rng(6), {True: 0, False: 0}
    while sum(decided.values()) < 500:
        d, k, n = rng.integers(2, 5), rng.integers(1, 4), 12
        x = rng.integers(-4, 5, (n, d))
        y = x @ rng.integers(-1, 2, (d, k)) + rng.integers(-1, 2, (n, k))
        if rng.random() < 0.3:
            y[:, -1] = y[:, 0]
        t = x @ rng.integers(-1, 2, (d, d))
        if rng.random() < 0.5:  # fewer directions are left
            t[:, rng.integers(d) :] = 0
        if (y.std(axis=0) == 0).any() or not t.any():
            continue
        # n^2 times the covariances, in integers
        ty, sy = (n * v.T @ y - np.outer(v.sum(axis=0), y.sum(axis=0)) for v in (t, x))
        feasible = exact_rank(np.concatenate([ty, sy])) == exact_rank(ty)
        # A covariance of exactly 0 follows from sums of n products, which both states hold.
        before, after = (
            sf.Moments(kinds={"y": "continuous"}).update(v.astype(float), {"y": y}) for v in (x, t)
        )
        try:
            sf.repair(after, before=before, keep="y")
            found = True
        except sf.exceptions.InfeasibleError:
            found = False
        assert found == feasible, (x, t, y)
        decided[feasible] += 1
    assert min(decided.values()) > 50


def test_the_error_names_the_combination_that_is_lost() -> None:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(300, 4))
    y = np.column_stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]])
    design = np.column_stack([np.ones(300), x[:, 0]])
    t = x - design @ np.linalg.lstsq(design, x, rcond=None)[0]  # the sum of the columns is gone
    before, after = (sf.Moments().update(v, {"y": y}) for v in (x, t))
    with pytest.raises(
        sf.exceptions.InfeasibleError, match=r"combination 1 y\[(0|1)\] \+ 1 y\[(0|1)\] "
    ):
        sf.repair(after, before=before, keep="y")
    z = np.array(["p", "q", "r"])[np.argmax(x[:, :3], axis=1)]
    before = sf.Moments().update(x, {"z": z})
    erased = sf.leace(before, erase="z")(x)
    with pytest.raises(sf.exceptions.InfeasibleError, match=r"\[z = ") as caught:
        sf.repair(sf.Moments().update(erased, {"z": z}), before=before, keep="z")
    assert caught.value.cosine == 1.0


# --- refusals ------------------------------------------------------------------------------------


def test_moments_that_do_not_belong_together_are_refused() -> None:
    data = draw_data(8, d=5, ky=1)
    before = data.moments()
    t = sf.sal(before, erase="z")(data.x)
    after = moments_of(t, data)

    def refused(error: type[Exception], match: str, after: Any = after, **options: Any) -> None:
        with pytest.raises(error, match=match):
            sf.repair(after, **{"before": before, "keep": "y"} | options)

    half = moments_of(t[:150], Data(data.x[:150], data.z[:150], data.y[:150]))
    refused(sf.exceptions.InputError, "150 erased rows .* and 400 rows .* differ by 250", half)
    rows = moments_of(t, Data(data.x, data.z, data.y + 1e-3 * data.y**2))
    refused(sf.exceptions.InputError, "another mean, standard deviation or weight", rows)
    mixed = moments_of(t, Data(data.x, np.roll(data.z, 1) * (data.z > 0), data.y))
    refused(sf.exceptions.InputError, "rows with a label of 'z'", mixed, keep="z")
    classes = sf.Moments().update(t, {"y": data.z})
    refused(sf.exceptions.IncompatibleMomentsError, "classes on one side", classes)
    columns = sf.Moments().update(t, {"y": np.column_stack([data.y, data.y**2])})
    refused(sf.exceptions.IncompatibleMomentsError, "columns", columns)
    refused(sf.exceptions.InputError, "4 features and those before", moments_of(t[:, :4], data))
    refused(sf.exceptions.UnknownVariableError, "profession", keep="profession")
    refused(sf.exceptions.UnknownVariableError, "y", sf.Moments().update(t, {"z": data.z}))
    constant = sf.Moments().update(t, {"y": np.ones(400)})
    refused(sf.exceptions.ConstantVariableError, "single value", constant, before=constant)
    refused(sf.exceptions.InputError, "keep is an ndarray", keep=np.eye(5)[:, :1])
    refused(sf.exceptions.InputError, "keep is None;", keep=None)
    refused(sf.exceptions.InputError, "pass sf.Moments", [after])
    refused(sf.exceptions.NotEnoughDataError, "empty", sf.Moments())
    for strength in (-0.1, 1.1, float("nan"), "1", None, True):
        refused(sf.exceptions.InputError, "strength", strength=strength)
    variances = moments_of(t, data, covariance_type="diag")
    refused(sf.exceptions.InputError, "covariance_type='diag' do not keep", variances)
    # They know Cov(x, y).
    plain = sf.repair(after, before=before, keep="y").matrix()
    other = sf.repair(
        after, before=moments_of(data.x, data, covariance_type="diag"), keep="y"
    ).matrix()
    np.testing.assert_allclose(other, plain, atol=1e-12)


@pytest.mark.parametrize("factored", ["sample", 0.3, "oas"])
def test_any_factor_of_the_erased_rows_restores_exactly_at_a_price(factored: Any) -> None:
    data = draw_data(9, n=4000 if factored == "sample" else 300, d=8, kz=2, ky=1, kappa=20.0)
    x = data.x if factored == "sample" else data.x * np.geomspace(1e-3, 1, 8)
    before = moments_of(x, data)
    t = sf.sal(before, erase="z")(x)
    after = moments_of(t, data)
    least = report(sf.repair(after, before=before, keep="y")).distortion
    if factored == "sample":
        other: Any = moments_of(t, data, subsample=0.1)
    else:
        other = after.factored(shrinkage=factored)
    repaired = sf.repair(other, before=before, keep="y")
    assert (report(repaired).sampling is not None) == (factored == "sample")
    clean, scale = repaired(t), x.std(axis=0)[:, None]
    found, wanted = covariance(clean, data.y), covariance(x, data.y)
    np.testing.assert_allclose(found / scale, wanted / scale, atol=1e-11)
    cost = float(np.sum((clean - t) ** 2) / np.sum((x - x.mean(axis=0)) ** 2))
    assert least is not None
    assert least < cost
    if factored == "sample":
        assert cost < 1.2 * least
    assert report(repaired).distortion == pytest.approx(cost, rel=0.1)


# --- the map -------------------------------------------------------------------------------------


def test_the_report_and_the_file_of_a_repair(tmp_path: Any) -> None:
    data = draw_data(10, d=6, ky=2)
    before = data.moments()
    eraser = sf.sal(before, erase="z")
    repaired = sf.repair(moments_of(eraser(data.x), data), before=before, keep="y")
    figures = report(repaired)
    assert (figures.method, figures.rank, figures.rank_covariance) == ("repair", 2, 4)
    scale = np.maximum(data.x.std(axis=0), eraser(data.x).std(axis=0))
    size = np.linalg.norm(repaired.matrix() * scale / scale[:, None], 2)
    assert figures.amplification == pytest.approx(size)
    assert "digits lost" in str(figures)
    assert "removes 2" not in figures.explain()
    assert "rank 2 changed" in repr(repaired)
    repaired.save(tmp_path / "map")
    again = sf.Projection.load(tmp_path / "map")
    assert again.report == figures
    np.testing.assert_array_equal(again.matrix(), repaired.matrix())
    nothing = sf.repair(before, before=before, keep="y")
    assert nothing.rank == 0
    assert report(nothing).distortion == 0.0


@pytest.mark.filterwarnings("ignore:the repair is sensitive")
def test_little_that_is_left_warns() -> None:
    rng = np.random.default_rng(11)
    x = rng.normal(size=(500, 4))
    y = x[:, 0] + rng.normal(size=500)
    design = np.column_stack([np.ones(500), x[:, 0], y])
    t = x - design @ np.linalg.lstsq(design, x, rcond=None)[0]
    t[:, 1] += 1e-5 * x[:, 0]
    before, after = (sf.Moments().update(v, {"y": y}) for v in (x, t))
    with pytest.warns(sf.exceptions.PrecisionWarning, match="enlarges deviations"):
        repaired = sf.repair(after, before=before, keep="y")
    assert report(repaired).amplification > 1e4


# --- strength ------------------------------------------------------------------------------------


@many
@given(
    seed=st.integers(0, 2**20), n=st.sampled_from([14, 400]), b=st.floats(0, 1),
    null_space=st.sampled_from(["keep", "drop"]), solver=st.sampled_from(["auto", "eigh"]),
)  # fmt: skip
def test_strength_lies_between_leace_and_splince(
    seed: int, n: int, b: float, null_space: str, solver: str
) -> None:
    data = draw_data(seed, n=n, d=8, kz=3, ky=1, kappa=20.0, mean=0.3)
    moments = data.moments()
    options: dict[str, Any] = {"null_space": null_space, "solver": solver}
    leace = sf.leace(moments, erase="z", **options)
    splince = sf.splince(moments, erase="z", keep="y", **options)
    assume(report(splince).amplification < 1e3)
    part = sf.splince(moments, erase="z", keep="y", strength=b, **options)
    expected = (1 - b) * leace.matrix() + b * splince.matrix()
    size = np.linalg.norm(splince.matrix())
    assert np.linalg.norm(part.matrix() - expected) <= 1e-10 * size
    assert report(part).strength == b
    least, most = (report(e).distortion for e in (leace, splince))
    assert least is not None
    assert most is not None
    assert report(part).distortion == pytest.approx(least + b**2 * (most - least), rel=1e-8)
    z, y = report(part).variables
    assert z.residual <= z.bound
    lost = report(sf.splince(moments, erase="z", keep="y", strength=0.0, **options)).variables[1]
    assert y.residual == pytest.approx((1 - b) * lost.residual, abs=1e-9)


def test_the_ends_of_strength_are_the_methods_to_the_bit() -> None:
    data = draw_data(12, d=9, ky=2)
    for moments in (data.moments(), data.moments().factored(), moments_of(data.x, data)):
        splince = sf.splince(moments, erase="z", keep="y")
        ends = [sf.splince(moments, erase="z", keep="y", strength=b) for b in (0, 1.0)]
        np.testing.assert_array_equal(ends[1].matrix(), splince.matrix())
        np.testing.assert_array_equal(ends[0].matrix(), sf.leace(moments, erase="z").matrix())
        assert report(ends[1]) == report(splince)


def hidden(kind: str) -> tuple[sf.Moments, dict[str, Any]]:
    """Problems whose factor admits directions, has constant features, or is no full covariance."""
    rng = np.random.default_rng(13)
    n, d = 600, 7
    x = rng.normal(size=(n, d))
    z, y = x[:, 0] + x[:, 1] + rng.normal(size=n), x[:, 0] - x[:, 2] + rng.normal(size=n)
    options: dict[str, Any] = {}
    if kind == "admitted":
        x[:, 6] = x[:, 5] + 1e-8 * z
    if kind == "constant":
        x[:, 6] = 3.0
    if kind == "shrunk":
        options = {"shrinkage": 0.2}
    how = {"sample": {"subsample": 0.5}, "diag": {"covariance_type": "diag"}}.get(kind, {})
    return sf.Moments(**how).update(x, {"z": z, "y": y}), options


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.LabelFeatureWarning")
@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.PrecisionWarning")
@pytest.mark.parametrize("kind", ["admitted", "constant", "shrunk", "sample", "diag"])
def test_strength_of_hidden_problems(kind: str) -> None:
    moments, options = hidden(kind)
    ends = [
        sf.splince(moments, erase="z", keep="y", strength=b, **options).matrix() for b in (0, 1)
    ]
    part = sf.splince(moments, erase="z", keep="y", strength=0.25, **options)
    size = np.linalg.norm(ends[1])
    np.testing.assert_allclose(part.matrix(), 0.75 * ends[0] + 0.25 * ends[1], atol=1e-9 * size)
    z, _ = report(part).variables
    assert z.residual <= z.bound
    whole = report(sf.splince(moments, erase="z", keep="y", **options)).variables[1]
    assert whole.residual <= whole.bound
    assert part.rank == 1
