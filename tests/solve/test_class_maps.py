"""Equal class covariances at the least change, against duals, grids and naive twins."""

from __future__ import annotations

import numpy as np
import pytest

from splince_fast._solve import class_maps as numerics
from splince_fast._solve.class_maps import (
    ClassProblem,
    Search,
    SingularClassError,
    solve,
    support_of,
)

EPS = float(np.finfo(np.float64).eps)


def problem(rng, d, k, q, spread=1.0):
    """Random classes of any relation between x and what is kept."""
    p = rng.dirichlet(np.full(k, 5.0))
    joint = []
    for _ in range(k):
        root = np.eye(d + q) + spread * rng.normal(size=(d + q, d + q))
        joint.append(root @ root.T)
    joint = np.array(joint)
    covariances, crosses = joint[:, :d, :d], joint[:, :d, d:]
    kept = np.tensordot(p, crosses, 1) + 0.5 * rng.normal(size=(d, q))
    pooled = np.tensordot(p, covariances, 1)
    return ClassProblem(p, covariances, crosses, kept, support_of(pooled, np.zeros(d), EPS))


def search_of(case):
    roots = [np.linalg.cholesky(s) for s in case.covariances]
    crosses = [np.linalg.solve(r, c) for r, c in zip(roots, case.crosses, strict=True)]
    variance = float(case.fractions @ np.trace(case.covariances, axis1=1, axis2=2))
    return Search(case.fractions, roots, crosses, case.kept, variance)


def cost_of(case, maps):
    change = maps - np.eye(maps.shape[1])
    return sum(
        p * np.trace(e @ s @ e.T)
        for p, e, s in zip(case.fractions, change, case.covariances, strict=True)
    )


def kept_by(case, maps):
    return sum(p * a @ c for p, a, c in zip(case.fractions, maps, case.crosses, strict=True))


def erased_by(case, maps):
    return np.array([a @ s @ a.T for a, s in zip(maps, case.covariances, strict=True)])


def feasible_with(case, rotations):
    """Maps of the least cost with these rotations; written without the module."""
    roots = [np.linalg.cholesky(s) for s in case.covariances]
    inverses = [np.linalg.inv(r) for r in roots]
    p = case.fractions
    r0 = sum(w * r @ o.T for w, r, o in zip(p, roots, rotations, strict=True))
    vq = sum(w * o @ i @ c for w, o, i, c in zip(p, rotations, inverses, case.crosses, strict=True))
    r = r0 + (case.kept - r0 @ vq) @ np.linalg.inv(vq.T @ vq) @ vq.T
    return np.array([r @ o @ i for o, i in zip(rotations, inverses, strict=True)])


def orthogonal(rng, d):
    return np.linalg.qr(rng.normal(size=(d, d))).Q


def sqrtm(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def transport(a, b):
    """The symmetric T >= 0 with T a T = b."""
    root = sqrtm(a)
    inverse = np.linalg.inv(root)
    return inverse @ sqrtm(root @ b @ root) @ inverse


def barycentre(covariances, p):
    """Alvarez-Esteban et al. (2016)."""
    sigma = np.tensordot(p, covariances, 1)
    for _ in range(500):
        step = sum(w * transport(sigma, s) for w, s in zip(p, covariances, strict=True))
        sigma = step @ sigma @ step
    return sigma


CASES = [(d, k, q, seed) for d in (2, 4, 6) for k in (2, 3) for q in (0, 1, 2) for seed in (0, 1)]


@pytest.mark.parametrize(("d", "k", "q", "seed"), CASES)
def test_covariances_are_equal_and_the_task_is_kept(d, k, q, seed):
    case = problem(np.random.default_rng(seed), d, k, q)
    for optimal in (True, False):
        found = solve(case, optimal=optimal)
        size = max(1.0, np.abs(found.maps).max()) ** 2
        erased = erased_by(case, found.maps)
        # Sums of d terms of the size of A S A^T, conditioned by S.
        tolerance = 64 * d * EPS * size * max(np.linalg.cond(s) for s in case.covariances)
        assert np.abs(erased - erased[0]).max() <= tolerance
        assert np.abs(kept_by(case, found.maps) - case.kept).max(initial=0.0) <= tolerance
        assert np.isclose(found.cost, cost_of(case, found.maps), rtol=1e-9)


@pytest.mark.parametrize(("d", "k", "q", "seed"), CASES)
def test_no_feasible_map_is_below_the_bound(d, k, q, seed):
    rng = np.random.default_rng(seed)
    case = problem(rng, d, k, q)
    found = solve(case)
    assert found.bound <= found.cost * (1 + 1e-12)
    for _ in range(100):
        maps = feasible_with(case, [orthogonal(rng, d) for _ in range(k)])
        assert found.bound <= cost_of(case, maps)
    nearest = feasible_with(case, [np.eye(d)] * k)
    assert found.bound <= cost_of(case, nearest)


@pytest.mark.parametrize("k", [2, 3])
def test_the_gap_is_zero_unless_a_determinant_is(k):
    """Undamped iteration cycles in some of these; a gap that stays open has a zero determinant."""
    rng = np.random.default_rng(0)
    closed = 0
    for _ in range(30 if k == 2 else 6):
        found = solve(problem(rng, int(rng.integers(2, 7)), k, int(rng.integers(1, 3))))
        if found.determinants.min() > 1e-3:
            assert found.gap <= 10 * numerics.GAP
            closed += 1
        elif found.gap > 1e-3:
            assert found.determinants.min() < 1e-2
    assert closed >= (15 if k == 2 else 3)


def undamped(case, steps):
    """Q4 as printed; the relative change of R in the last step."""
    roots = [sqrtm(s) for s in case.covariances]
    inverses = [np.linalg.inv(r) for r in roots]
    p, lam = case.fractions, np.zeros_like(case.kept)
    r = sum(w * root for w, root in zip(p, roots, strict=True))
    for _ in range(steps):
        turned = []
        for root, inverse, cross in zip(roots, inverses, case.crosses, strict=True):
            f = root + lam @ (inverse @ cross).T
            u, _, vt = np.linalg.svd(f.T @ r)
            turned.append((u @ vt).T)
        r0 = sum(w * root @ o.T for w, root, o in zip(p, roots, turned, strict=True))
        vq = sum(
            w * o @ i @ c for w, o, i, c in zip(p, turned, inverses, case.crosses, strict=True)
        )
        lam = (case.kept - r0 @ vq) @ np.linalg.inv(vq.T @ vq)
        old, r = r, r0 + lam @ vq.T
    return np.linalg.norm(r - old) / np.linalg.norm(r)


def test_problems_on_which_undamped_iteration_cycles_are_solved():
    rng = np.random.default_rng(1)
    cycled = 0
    for _ in range(60):
        case = problem(rng, int(rng.integers(2, 5)), 2, 1)
        found = solve(case)
        if found.determinants.min() < 1e-2 or undamped(case, 150) < 1e-4:
            continue
        cycled += 1
        assert found.gap <= 10 * numerics.GAP
    assert cycled >= 2


@pytest.mark.parametrize("k", [2, 3])
def test_gradient_against_differences(k):
    rng = np.random.default_rng(3)
    case = problem(rng, 4, k, 2)
    search = search_of(case)
    start = search.mean_root()
    lam = 0.1 * rng.normal(size=case.kept.shape)
    point = search.at(lam, start)

    def value(multiplier):
        """f by the naive barycentre."""
        tilde = []
        for s, c in zip(case.covariances, case.crosses, strict=True):
            a = np.eye(4) + multiplier @ np.linalg.solve(s, c).T
            tilde.append(a @ s @ a.T)
        sigma = barycentre(np.array(tilde), case.fractions)
        return np.trace(sigma) - 2 * np.sum(multiplier * case.kept)

    assert np.isclose(point.value, value(lam), rtol=1e-9)
    step, numeric = 1e-5, np.zeros_like(lam)
    for index in np.ndindex(*lam.shape):
        e = np.zeros_like(lam)
        e[index] = step
        numeric[index] = (value(lam + e) - value(lam - e)) / (2 * step)
    # Differences of f lose eps |f| / step; central ones err by step^2.
    assert np.abs(numeric - point.gradient).max() < 1e-6 * np.abs(point.gradient).max()
    without = point.gradient + 2 * case.kept  # control: the S_y term left out
    assert np.abs(numeric - without).max() > 1e-2


def test_two_classes_without_a_task_are_optimal_transport():
    case = problem(np.random.default_rng(4), 5, 2, 0)
    found = solve(case)
    sigma = barycentre(case.covariances, case.fractions)
    twin = np.array([transport(s, sigma) for s in case.covariances])
    assert np.allclose(found.maps, twin, rtol=1e-7, atol=1e-7)
    assert found.gap <= 1e-10
    # Control: transport to the arithmetic mean gives equal covariances, too, and costs more.
    mean = np.tensordot(case.fractions, case.covariances, 1)
    other = np.array([transport(s, mean) for s in case.covariances])
    erased = erased_by(case, other)
    assert np.abs(erased - erased[0]).max() < 1e-10
    assert cost_of(case, other) > found.bound * 1.01


@pytest.mark.parametrize("seed", range(8))
def test_two_by_two_against_a_grid_of_rotations(seed):
    case = problem(np.random.default_rng(seed), 2, 2, 1)
    found = solve(case)
    costs = []
    for angle in np.linspace(0, 2 * np.pi, 2000, endpoint=False):
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        for flip in (turn, turn @ np.diag([1.0, -1.0])):
            costs.append(cost_of(case, feasible_with(case, [np.eye(2), flip])))
    assert found.bound <= min(costs)
    if found.determinants.min() > 1e-3:
        # Within the grid: the cost is quadratic around its minimum.
        assert found.cost <= min(costs) * (1 + 1e-12)
        assert np.isclose(found.cost, min(costs), rtol=1e-4)


@pytest.mark.parametrize("k", [2, 3])
def test_repair_is_that_of_qleace(k):
    case = problem(np.random.default_rng(5), 4, k, 2)
    empty = ClassProblem(
        case.fractions, case.covariances, case.crosses[:, :, :0], case.kept[:, :0], case.support
    )
    plain = solve(empty).maps
    t = erased_by(case, plain)[0]
    ty = kept_by(case, plain)
    h = ty.T @ np.linalg.solve(t, ty)
    b = np.eye(4) + (case.kept - ty) @ np.linalg.inv(h) @ np.linalg.solve(t, ty).T
    found = solve(case, optimal=False)
    assert np.allclose(found.maps, b @ plain, rtol=1e-6, atol=1e-6)
    assert found.cost >= solve(case).cost * (1 - 1e-9)
    assert not np.allclose(solve(case).maps, b @ plain, rtol=1e-2)  # the optimum is another map


def test_equal_classes_change_nothing():
    rng = np.random.default_rng(6)
    one = problem(rng, 4, 2, 0)
    same = np.stack([one.covariances[0]] * 2)
    case = ClassProblem(
        one.fractions, same, one.crosses, one.kept, support_of(same[0], np.zeros(4), EPS)
    )
    found = solve(case)
    assert np.allclose(found.maps, np.eye(4), atol=1e-12)
    assert found.cost <= 1e-12


def test_a_combination_that_no_class_relates_to_x():
    rng = np.random.default_rng(7)
    case = problem(rng, 5, 2, 3)
    lost = np.array([1.0, -2.0, 0.5])
    lost /= np.linalg.norm(lost)
    crosses = case.crosses - case.crosses @ np.outer(lost, lost)
    kept = np.tensordot(case.fractions, crosses, 1)
    between = np.outer(rng.normal(size=5), lost)
    found = solve(
        ClassProblem(case.fractions, case.covariances, crosses, kept + between, case.support)
    )
    assert found.lost_combination is not None
    assert np.isclose(abs(found.lost_combination @ lost), 1.0)
    # x does not covary with it over all rows: nothing is asked.
    feasible = ClassProblem(case.fractions, case.covariances, crosses, kept, case.support)
    found = solve(feasible)
    assert found.lost_combination is None
    assert found.rank == 2
    assert np.allclose(kept_by(feasible, found.maps), kept, atol=1e-9)


def test_constant_copied_and_tiny_features():
    """Off the support the identity; x has class means there, and the task is kept there."""
    rng = np.random.default_rng(8)
    d, k, q = 4, 2, 1
    inner = problem(rng, d, k, q, 0.3)
    lift = np.zeros((d + 3, d))
    lift[:d] = np.eye(d)
    lift[d] = lift[0]  # a copy
    lift[d + 2, 1] = 1e-9  # a tiny feature
    covariances = lift @ inner.covariances @ lift.T
    covariances[:, d + 2, d + 2] += 1e-18
    kept = lift @ inner.kept
    kept[d + 1] = 0.3  # constant within classes: its covariance with y is between them
    pooled = np.tensordot(inner.fractions, covariances, 1)
    support = support_of(pooled, np.zeros(d + 3), EPS)
    assert support.rank == d
    assert support.tiny.shape == (d + 3, 1)
    case = ClassProblem(inner.fractions, covariances, lift @ inner.crosses, kept, support)
    found = solve(case)
    erased = erased_by(case, found.maps)
    assert np.abs(erased - erased[0]).max() < 1e-10
    assert np.abs(kept_by(case, found.maps) - kept).max() < 1e-10
    off = np.zeros(d + 3)
    off[0], off[d] = 1.0, -1.0
    assert np.allclose(found.maps @ off, off)
    assert found.gap < 1e-6


def test_singular_classes_are_named():
    rng = np.random.default_rng(9)
    case = problem(rng, 3, 2, 0)
    covariances = case.covariances.copy()
    covariances[1, 0, :] = covariances[1, :, 0] = 0.0
    with pytest.raises(SingularClassError) as error:
        solve(ClassProblem(case.fractions, covariances, case.crosses, case.kept, case.support))
    assert error.value.index == 1


@pytest.mark.parametrize("condition", [1e1, 1e4, 1e9, np.inf])
def test_rotation_is_orthogonal_and_maximal(condition):
    rng = np.random.default_rng(10)
    d = 20
    sizes = np.zeros(d) if np.isinf(condition) else np.geomspace(1, 1 / condition, d)
    if np.isinf(condition):
        sizes[:5] = 1.0
    m = (orthogonal(rng, d) * sizes) @ orthogonal(rng, d)
    turned = numerics.rotation(m)
    assert np.abs(turned.T @ turned - np.eye(d)).max() < 64 * d * EPS
    assert np.isclose(np.trace(turned @ m), sizes.sum(), rtol=1e-10)
