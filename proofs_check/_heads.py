"""Linear heads behind an eraser: frozen, refitted, penalised; and random erasers to compare."""

from __future__ import annotations

from collections.abc import Callable

from proofs_check import _reference
from proofs_check._check import Bench
from proofs_check._families import Sample, integers
from proofs_check._fits import least_squares, range_coordinates, with_ones
from proofs_check._linalg import (
    Matrix,
    Number,
    beside,
    eye,
    inverse,
    is_zero,
    null_basis,
    oblique,
    pinv,
    rank,
    zeros,
)
from proofs_check._reference import Covariances


def head(c: Covariances) -> Matrix:
    """beta = S^+ Sy, the best linear head (of all columns of y)."""
    return c.s_pinv @ c.sy


def excess(c: Covariances, read: Matrix, beta: Matrix) -> Matrix:
    """Excess risk matrix of the effective head ``read`` (x is scored by read^T x)."""
    gap = read - beta
    return gap.T @ c.s @ gap


def deployed(p: Matrix, theta: Matrix) -> Matrix:
    """Effective head of theta behind x -> P x."""
    return p.T @ theta


def literal(p: Matrix, theta: Matrix) -> Matrix:
    """Effective head in the printed proof, X Q^T beta with Q^T = P."""
    return p @ theta


def whitened_problem(bench: Bench, d: int, k_z: int = 1, k_y: int = 1) -> Covariances:
    """Problem with S = I."""
    while True:
        c = Covariances(
            eye(d), integers(bench.rng, d, k_z), integers(bench.rng, d, k_y), zeros(d, 1)
        )
        if c.ranks == (d, k_z, k_y) and c.feasible and not is_zero(c.sz.T @ c.sy):
            return c


def random_guarded(bench: Bench, c: Covariances) -> Matrix:
    """A random matrix that sends colsp(Sz) to 0."""
    free = null_basis(c.z.T)
    return integers(bench.rng, c.d, free.shape[1]) @ free.T


Fit = Callable[[Matrix, Matrix], Matrix]


def random_range(bench: Bench, c: Covariances) -> Matrix:
    """Random projector with kernel colsp(Sz)."""
    while True:
        onto = integers(bench.rng, c.d, c.d - c.ranks[1])
        if rank(beside(onto, c.z)) == c.d:
            return oblique(onto, c.z)


def other_kernel(c: Covariances) -> Matrix:
    """LEACE for another concept: z + y."""
    return _reference.leace(Covariances(c.s, c.sz + c.sy[:, :1], c.sy, c.mean))


def predictions(
    p: Matrix, sample: Sample, test: Matrix, y: Matrix, *, intercept: bool, offset: bool, fit: Fit
) -> Matrix:
    """Head theta in range(P) fitted on r(x) = Px + b, read at the rows of ``test``.

    ``offset`` chooses b = E x - P E x instead of 0; ``fit`` maps (features, y) to coefficients.
    """
    shift = (eye(len(p)) - p) @ sample.covariances.mean if offset else 0 * sample.covariances.mean
    basis = range_coordinates(p)

    def inputs(x: Matrix) -> Matrix:
        rows = (x @ p.T + shift.T) @ basis
        return with_ones(rows) if intercept else rows

    return inputs(test) @ fit(inputs(sample.x), y)


def constrained(sample: Sample, test: Matrix, y: Matrix) -> Matrix:
    """The reference: phi fitted on raw rows under Sz^T phi = 0, with intercept."""
    basis = null_basis(sample.covariances.z.T)
    return with_ones(test @ basis) @ least_squares(with_ones(sample.x @ basis), y)


def penalty_metric(p: Matrix) -> Matrix:
    """(P^T P)^+: |theta|^2 for theta in range(P) is phi^T (P^T P)^+ phi, phi = P^T theta."""
    return pinv(p.T @ p)


def ridge_head(c: Covariances, p: Matrix, strength: Number) -> Matrix:
    """Effective head phi = P^T theta of a ridge fit on P x: theta in range(P), from moments."""
    basis = range_coordinates(p)
    rows_of_head = p.T @ basis
    eta = (
        inverse(rows_of_head.T @ c.s @ rows_of_head + strength * (basis.T @ basis))
        @ rows_of_head.T
        @ c.sy
    )
    return rows_of_head @ eta
