"""Linear heads on erased features (frozen, refitted or penalised), and random erasers.

A head theta scores theta^T x. The effective head of theta behind an eraser is the head on x that
gives the same scores without the eraser.
"""

from __future__ import annotations

from collections.abc import Callable

from proofs_check import _reference
from proofs_check._check import Bench
from proofs_check._families import Sample, integers
from proofs_check._fits import least_squares, range_coordinates, with_ones
from proofs_check._linalg import (
    Matrix,
    Number,
    eye,
    hstack,
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
    """Return beta = S^+ Sy, the least-squares head; its columns belong to the columns of y."""
    return c.s_pinv @ c.sy


def excess_risk(c: Covariances, phi: Matrix, beta: Matrix) -> Matrix:
    """Return the matrix of the excess risk of an effective head over the head beta.

    ``phi`` is the effective head; its scores are phi^T x.
    """
    gap = phi - beta
    return gap.T @ c.s @ gap


def deployed(p: Matrix, theta: Matrix) -> Matrix:
    """Return P^T theta, the effective head of theta in the deployed reading, x -> P x."""
    return p.T @ theta


def literal(p: Matrix, theta: Matrix) -> Matrix:
    """Return P theta, the effective head of theta in the printed proof.

    The proof writes the scores as X Q^T beta with Q^T = P.
    """
    return p @ theta


def whitened_problem(bench: Bench, d: int, k_z: int = 1, k_y: int = 1) -> Covariances:
    """Draw a feasible problem with S = I and Sz^T Sy != 0."""
    while True:
        c = Covariances(
            eye(d), integers(bench.rng, d, k_z), integers(bench.rng, d, k_y), zeros(d, 1)
        )
        if c.ranks == (d, k_z, k_y) and c.feasible and not is_zero(c.sz.T @ c.sy):
            return c


def random_guarded_matrix(bench: Bench, c: Covariances) -> Matrix:
    """Draw a matrix P with P Sz = 0."""
    free = null_basis(c.z.T)
    return integers(bench.rng, c.d, free.shape[1]) @ free.T


Fit = Callable[[Matrix, Matrix], Matrix]


def random_projector(bench: Bench, c: Covariances) -> Matrix:
    """Draw a projector with kernel colsp(Sz) and a random range."""
    while True:
        onto = integers(bench.rng, c.d, c.d - c.ranks[1])
        if rank(hstack(onto, c.z)) == c.d:
            return oblique(onto, c.z)


def other_kernel(c: Covariances) -> Matrix:
    """Return LEACE of another concept: the sum of z and the first column of y."""
    return _reference.leace(Covariances(c.s, c.sz + c.sy[:, :1], c.sy, c.mean))


def predictions(
    p: Matrix, sample: Sample, test: Matrix, y: Matrix, *, intercept: bool, offset: bool, fit: Fit
) -> Matrix:
    """Fit a head theta in range(P) to r(x) = Px + b; return its predictions for ``test``.

    If ``offset``, b = E x - P E x; else b = 0. ``fit`` maps (features, y) to coefficients.
    """
    shift = (eye(len(p)) - p) @ sample.covariances.mean if offset else 0 * sample.covariances.mean
    basis = range_coordinates(p)

    def inputs(x: Matrix) -> Matrix:
        rows = (x @ p.T + shift.T) @ basis
        return with_ones(rows) if intercept else rows

    return inputs(test) @ fit(inputs(sample.x), y)


def constrained_predictions(sample: Sample, test: Matrix, y: Matrix) -> Matrix:
    """Return the reference predictions, those of least squares on x under Sz^T phi = 0.

    phi is the head; the fit includes an intercept.
    """
    basis = null_basis(sample.covariances.z.T)
    return with_ones(test @ basis) @ least_squares(with_ones(sample.x @ basis), y)


def penalty_metric(p: Matrix) -> Matrix:
    """Return (P^T P)^+, the metric of the ridge penalty on effective heads.

    For theta in range(P) and phi = P^T theta, |theta|^2 = phi^T (P^T P)^+ phi.
    """
    return pinv(p.T @ p)


def ridge_head(c: Covariances, p: Matrix, alpha: Number) -> Matrix:
    """Return the effective head P^T theta of a ridge head theta on Px.

    theta is restricted to range(P); ``alpha`` is the ridge penalty.
    """
    basis = range_coordinates(p)
    effective_basis = p.T @ basis
    eta = (
        inverse(effective_basis.T @ c.s @ effective_basis + alpha * (basis.T @ basis))
        @ effective_basis.T
        @ c.sy
    )
    return effective_basis @ eta
