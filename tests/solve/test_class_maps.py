"""QLEACE: equal class covariances at the least change, against naive twins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from splince_fast._solve import class_maps as numerics
from splince_fast._solve.class_maps import SingularClassError, qleace, support_of

EPS = float(np.finfo(np.float64).eps)


class Problem(NamedTuple):
    fractions: np.ndarray  # (k,)
    covariances: np.ndarray  # (k, d, d)
    weights: np.ndarray  # (d,)

    def solve(self):
        pooled = np.tensordot(self.fractions, self.covariances, 1)
        support = support_of(pooled, EPS)
        return qleace(self.fractions, self.covariances, self.weights, support).maps

    def cost(self, maps):
        change = self.weights[:, None] * (maps - np.eye(maps.shape[1]))
        return sum(
            p * np.trace(e @ s @ e.T)
            for p, e, s in zip(self.fractions, change, self.covariances, strict=True)
        )

    def erased(self, maps):
        return np.array([a @ s @ a.T for a, s in zip(maps, self.covariances, strict=True)])


def problem(rng, d, k):
    roots = np.eye(d) + rng.normal(size=(k, d, d))
    fractions = rng.dirichlet(np.full(k, 5.0))
    return Problem(fractions, np.array([r @ r.T for r in roots]), rng.uniform(0.1, 1.0, d))


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


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_classes_get_one_covariance_at_the_least_change(k, seed):
    rng = np.random.default_rng(seed)
    case = problem(rng, 5, k)
    found = case.solve()
    erased = case.erased(found)
    # Sums of d terms of the size of A S A^T, conditioned by S.
    size = max(1.0, np.abs(found).max()) ** 2
    tolerance = 64 * 5 * EPS * size * max(np.linalg.cond(s) for s in case.covariances)
    assert np.abs(erased - erased[0]).max() <= tolerance
    # Twin: in units of the weights, optimal transport to the barycentre.
    units = np.outer(case.weights, case.weights)
    sigma = barycentre(case.covariances * units, case.fractions)
    twin = np.array([transport(s * units, sigma) for s in case.covariances])
    twin = twin / case.weights[:, None] * case.weights
    assert np.allclose(found, twin, rtol=1e-6, atol=1e-6)
    # Control: other maps to one covariance cost more.
    least = case.cost(found)
    mean = np.tensordot(case.fractions, case.covariances, 1)
    others = [np.array([transport(s, mean) for s in case.covariances])]
    roots = [np.linalg.cholesky(s) for s in case.covariances]
    for _ in range(20):
        turns = [orthogonal(rng, 5) for _ in range(k)]
        terms = zip(case.fractions, roots, turns, strict=True)
        root = sum(p * r @ o.T for p, r, o in terms)
        pairs = zip(roots, turns, strict=True)
        others.append(np.array([root @ o @ np.linalg.inv(r) for r, o in pairs]))
    for other in others:
        erased = case.erased(other)
        assert np.abs(erased - erased[0]).max() < 1e-9 * np.abs(erased[0]).max() * 1e3
        assert case.cost(other) > 1.001 * least


def test_equal_classes_change_nothing():
    one = problem(np.random.default_rng(6), 4, 2)
    same = one._replace(covariances=np.stack([one.covariances[0]] * 2))
    assert np.allclose(same.solve(), np.eye(4), atol=1e-12)


def test_constant_copied_and_tiny_features():
    """Off the support the identity; in directions too small to whiten the mean."""
    d = 4
    inner = problem(np.random.default_rng(8), d, 2)
    lift = np.zeros((d + 3, d))
    lift[:d] = np.eye(d)
    lift[d] = lift[0]  # a copy
    lift[d + 2, 1] = 1e-5  # a tiny feature
    covariances = lift @ inner.covariances @ lift.T
    covariances[:, d + 2, d + 2] += 1e-10
    support = support_of(np.tensordot(inner.fractions, covariances, 1), EPS)
    assert support.rank == d
    assert support.tiny.shape == (d + 3, 1)
    found = qleace(inner.fractions, covariances, np.ones(d + 3), support).maps
    erased = inner._replace(covariances=covariances).erased(found)
    assert np.abs(erased - erased[0]).max() < 1e-10
    assert np.allclose(found[:, :, d + 1], np.eye(d + 3)[d + 1])  # a constant feature
    off = np.zeros(d + 3)
    off[0], off[d] = 1.0, -1.0
    assert np.allclose(found @ off, off)
    assert np.allclose(found @ support.tiny, 0.0)


def test_singular_classes_are_named():
    case = problem(np.random.default_rng(9), 3, 2)
    case.covariances[1, 0, :] = case.covariances[1, :, 0] = 0.0
    with pytest.raises(SingularClassError) as error:
        case.solve()
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
