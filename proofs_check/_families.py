"""Random problems with small integer data, so that their moments are exact fractions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proofs_check._linalg import (
    Matrix,
    diagonal,
    equal,
    eye,
    inverse,
    is_zero,
    rational,
    to_float,
    zeros,
)
from proofs_check._reference import Covariances

Rng = np.random.Generator


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of features with labels of the concept and of the task.

    ``x`` (n, d), ``z`` (n, k_z) and ``y`` (n, k_y) are exact numbers. ``z_labels`` and
    ``y_labels`` are the same labels in the form that a user passes: 2-D floats, or classes.
    """

    family: str
    x: Matrix
    z: Matrix
    y: Matrix
    z_labels: NDArray[Any]
    y_labels: NDArray[Any]

    @cached_property
    def covariances(self) -> Covariances:
        """Exact mean and covariances of the rows, with divisor n."""
        n = len(self.x)
        mean = self.x.sum(axis=0, keepdims=True) / n
        centred = self.x - mean
        return Covariances(
            s=centred.T @ centred / n,
            sz=centred.T @ self.z / n,
            sy=centred.T @ self.y / n,
            mean=mean.T,
        )

    @cached_property
    def features(self) -> NDArray[np.float64]:
        """The features in float64; the conversion is exact."""
        return to_float(self.x)


def continuous_sample(x: NDArray[Any], z: NDArray[Any], y: NDArray[Any], family: str) -> Sample:
    """Return a sample from integer arrays, with continuous label columns."""
    x_exact, z_exact, y_exact = (rational(v) for v in (x, z, y))
    return Sample(family, x_exact, z_exact, y_exact, z.astype(np.float64), y.astype(np.float64))


def class_sample(x: NDArray[Any], z: NDArray[Any], y: NDArray[Any], family: str) -> Sample:
    """Return a sample from integer classes; ``z`` and ``y`` are one-hot.

    The classes of ``z_labels`` are strings, those of ``y_labels`` are integers.
    """
    one_hot = [rational((v[:, None] == np.unique(v)).astype(int)) for v in (z, y)]
    names = np.array(["zero", "one", "two", "three"])
    return Sample(family, rational(x), one_hot[0], one_hot[1], names[z], y)


def _features(rng: Rng, n: int, d: int) -> NDArray[np.int64]:
    """Draw integer rows; each column has a random offset."""
    return rng.integers(-4, 5, (n, d)) + rng.integers(-3, 4, d)


def _labels(rng: Rng, x: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Draw k integer label columns: linear functions of x plus noise."""
    noise = rng.integers(-3, 4, (len(x), k))
    return np.asarray(x @ rng.integers(-2, 3, (x.shape[1], k)) + noise, dtype=np.int64)


def _full_rank(rng: Rng, d: int) -> Sample:
    x = _features(rng, 2 * d + 4, d)
    z = _labels(rng, x, 1)
    return continuous_sample(x, z, z + _labels(rng, x, 1), "full rank")


def _rank_deficient(rng: Rng, d: int) -> Sample:
    inner = max(3, d - 2)
    x = _features(rng, 2 * d + 4, inner)
    x = np.hstack([x, x @ rng.integers(-1, 2, (inner, d - inner))])
    z = _labels(rng, x, 1)
    return continuous_sample(x, z, z + _labels(rng, x, 1), "rank-deficient")


def _fewer_rows(rng: Rng, d: int) -> Sample:
    x = _features(rng, max(4, d - 1), d)
    z = _labels(rng, x, 1)
    return continuous_sample(x, z, z + _labels(rng, x, 1), "n <= d")


def _one_hot(rng: Rng, d: int) -> Sample:
    n, d = 4 * d + 8, max(d, 5)  # Sz and Sy have rank 2 each, so d exceeds 4
    z, y = rng.integers(0, 3, n), rng.integers(0, 3, n)
    y = np.where(rng.random(n) < 0.4, z, y)
    shift = rng.integers(-2, 3, (2, 3, d))
    return class_sample(_features(rng, n, d) + shift[0][z] + shift[1][y], z, y, "one-hot")


def _multi_output(rng: Rng, d: int) -> Sample:
    d = max(d, 5)
    x = _features(rng, 2 * d + 4, d)
    z = _labels(rng, x, 2)
    return continuous_sample(x, z, z + _labels(rng, x, 2), "multi-output")


def _ill_conditioned(rng: Rng, d: int) -> Sample:
    x = _features(rng, 2 * d + 4, d)
    x[:, -1] += 3000 * x[:, 0]
    x[:, 1] *= 1000
    z = _labels(rng, x, 1)
    return continuous_sample(x, z, z + _labels(rng, x, 1), "ill-conditioned")


def _near_infeasible(rng: Rng, d: int) -> Sample:
    x = _features(rng, 2 * d + 4, d)
    z = _labels(rng, x, 1)
    return continuous_sample(x, z, 1000 * z + _labels(rng, x, 1), "near-infeasible")


FAMILIES: dict[str, Callable[[Rng, int], Sample]] = {
    "full rank": _full_rank,
    "rank-deficient": _rank_deficient,
    "n <= d": _fewer_rows,
    "one-hot": _one_hot,
    "multi-output": _multi_output,
    "ill-conditioned": _ill_conditioned,
    "near-infeasible": _near_infeasible,
}


def is_nondegenerate(c: Covariances) -> bool:
    """Return whether a problem is feasible and none of Sz, Sy and C_zy is 0."""
    return bool(c.z.size and c.y.size) and c.feasible and not is_zero(c.gram(c.z, c.y))


def sample(rng: Rng, family: str, d: int) -> Sample:
    """Draw from a family until a problem is feasible and none of Sz, Sy and C_zy is 0."""
    while True:
        drawn = FAMILIES[family](rng, d)
        if is_nondegenerate(drawn.covariances):
            return drawn


def integers(rng: Rng, rows: int, columns: int, bound: int = 3) -> Matrix:
    """Draw an integer matrix with entries in [-bound, bound], as fractions."""
    return rational(rng.integers(-bound, bound + 1, (rows, columns)).reshape(rows, columns))


def problem(rng: Rng, d: int, m: int, k_z: int = 1, k_y: int = 1) -> Covariances:
    """Draw exact moments S = F F^T, Sz = F a, Sy = F b with rank(S) = m.

    The covariances of any (x, z, y) have this form, and all matrices of this form are covariances
    of some (x, z, y).
    """
    while True:
        f = integers(rng, d, m)
        sz = f @ integers(rng, m, k_z)
        c = Covariances(f @ f.T, sz, f @ integers(rng, m, k_y), integers(rng, d, 1))
        if c.ranks == (m, k_z, k_y) and is_nondegenerate(c):
            return c


def rotation(rng: Rng, d: int) -> Matrix:
    """Draw an orthogonal matrix with rational entries, by the Cayley transform."""
    skew = integers(rng, d, d, 2)
    skew = (skew - skew.T) / 2
    return (eye(d) - skew) @ inverse(eye(d) + skew)


def problem_with_root(
    rng: Rng, d: int, m: int, k_z: int = 1, k_y: int = 1
) -> tuple[Matrix, Covariances]:
    """Draw a problem whose S has a rational square root; return the root and the problem."""
    while True:
        orthogonal = rotation(rng, d)
        root = (
            orthogonal @ diagonal([*rng.integers(1, 5, m).tolist(), *[0] * (d - m)]) @ orthogonal.T
        )
        sz = root @ integers(rng, d, k_z)
        c = Covariances(root @ root, sz, root @ integers(rng, d, k_y), zeros(d, 1))
        if c.ranks == (m, k_z, k_y) and is_nondegenerate(c):
            return root, c


def weight_matrix(rng: Rng, d: int, m: int) -> Matrix:
    """Draw a positive semi-definite weight matrix of rank m."""
    while True:
        f = integers(rng, d, m)
        w = f @ f.T
        if Covariances(w, w, w, w).ranks[0] == m:
            return w


def invertible(rng: Rng, d: int) -> Matrix:
    """Draw an invertible integer matrix that is not orthogonal."""
    while True:
        a = integers(rng, d, d)
        try:
            inverse(a)
        except ValueError:
            continue
        if not equal(a.T @ a, eye(d)):
            return a
