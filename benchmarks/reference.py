"""What measurements are held against: bare BLAS and LAPACK, explicit formulas, two-pass results."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from scipy.linalg import blas, lapack

Float = NDArray[np.float64]


def syrk_into(X: NDArray[Any], total: NDArray[Any]) -> None:
    """total += X^T X, lower triangle, by SciPy's BLAS; X C-contiguous, total Fortran-ordered."""
    (syrk,) = blas.get_blas_funcs(("syrk",), (X,))
    syrk(1.0, X.T, beta=1.0, c=total, lower=1, overwrite_c=1)


def gemm_into(X: NDArray[Any], Z: NDArray[Any], total: NDArray[Any]) -> None:
    """total += X^T Z by SciPy's BLAS; X and Z C-contiguous, total Fortran-ordered."""
    (gemm,) = blas.get_blas_funcs(("gemm",), (X,))
    gemm(1.0, X.T, Z.T, beta=1.0, c=total, trans_b=1, overwrite_c=1)


def factor_and_solve(S: Float, sides: list[Float], work: list[Float]) -> list[Float]:
    """Cholesky of S and a triangular solve for each side, by bare LAPACK and BLAS.

    S, of which the lower triangle is read, and the sides stay as they are: like a library that
    keeps its moments, this copies them first, into `work`. All arrays are Fortran-ordered.
    """
    factor = work[0]
    for start in range(0, len(S), 256):  # the lower triangle, by block columns
        factor[start:, start : start + 256] = S[start:, start : start + 256]
    _, status = lapack.dpotrf(factor, lower=1, clean=0, overwrite_a=1)
    if status:
        raise ArithmeticError(f"dpotrf returned {status}")
    for side, target in zip(sides, work[1:], strict=True):
        np.copyto(target, side)
        blas.dtrsm(1.0, factor, target, lower=1, overwrite_b=1)
    return work


def explicit_splince(S: Float, Sz: Float, Sy: Float, *, rank: int = 1) -> Float:
    """P of Theorem 1 as it is printed: P = W^+ V (U^T V)^{-1} U^T W, in NumPy.

    U spans colsp(W Sz)^perp, V spans colsp(W Sy) + colsp([W Sz, W Sy])^perp; each comes from a
    complete QR decomposition. Of the equivalent whitenings, W = diag(lambda)^{-1/2} Q^T from
    S = Q diag(lambda) Q^T is taken: it needs no product of its own. Holstege, Ravfogel and Wouters
    (NeurIPS 2025). Either side has the rank that is given.
    """
    eigenvalues, Q = np.linalg.eigh(S)
    roots = np.sqrt(eigenvalues)
    W = Q.T / roots[:, None]
    A, B = (np.linalg.svd(W @ side, full_matrices=False).U[:, :rank] for side in (Sz, Sy))
    U = np.linalg.qr(A, mode="complete").Q[:, rank:]
    beyond = np.linalg.qr(np.hstack([A, B]), mode="complete").Q[:, 2 * rank :]
    V = np.hstack([B, beyond])
    return np.asarray(((Q * roots) @ V) @ np.linalg.solve(U.T @ V, U.T @ W))


def scipy_splince(S: Float, Sz: Float, Sy: Float) -> tuple[Float, Float]:
    """Factors of I - P by the same algebra as the library, written in scipy.linalg calls."""
    scale = 1.0 / np.sqrt(np.diagonal(S))
    L = scipy.linalg.cholesky(S * np.outer(scale, scale), lower=True, check_finite=False)
    Qz, Qy = (
        scipy.linalg.orth(
            scipy.linalg.solve_triangular(L, scale[:, None] * T, lower=True, check_finite=False)
        )
        for T in (Sz, Sy)
    )
    N = Qz - Qy @ (Qy.T @ Qz)
    N -= Qy @ (Qy.T @ N)
    left = scipy.linalg.solve((N.T @ Qz).T, (L @ Qz).T).T / scale[:, None]
    right = scipy.linalg.solve_triangular(L, N, lower=True, trans=1, check_finite=False)
    return left, right * scale[:, None]


def two_pass_covariance(X: NDArray[Any]) -> Float:
    """Covariance (ddof 1) in float64: centre, then multiply."""
    centred = X.astype(np.float64)
    centred -= centred.mean(axis=0)
    centred -= centred.mean(axis=0)  # what the rounding of the first mean left
    return np.asarray(centred.T @ centred) / (len(X) - 1)


def covariance_error(found: NDArray[Any], truth: Float) -> float:
    """Largest entrywise error against sqrt(S_ii S_jj)."""
    root = np.sqrt(np.diagonal(truth))
    return float((np.abs(found - truth) / np.outer(root, root)).max())


def class_spread(X: NDArray[Any], z: NDArray[np.int64]) -> float:
    """Norm of the centred class means in float64, from deviations about the first row."""
    origin = X[0].astype(np.float64)
    means = [(X[z == c].astype(np.float64) - origin).mean(axis=0) for c in np.unique(z)]
    return float(np.linalg.norm(means - np.mean(means, axis=0)))
