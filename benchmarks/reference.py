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
    routine = blas.ssyrk if X.dtype == np.float32 else blas.dsyrk
    routine(1.0, X.T, beta=1.0, c=total, lower=1, overwrite_c=1)


def gemm_into(X: NDArray[Any], Z: NDArray[Any], total: NDArray[Any]) -> None:
    """total += X^T Z by SciPy's BLAS; X and Z C-contiguous, total Fortran-ordered."""
    routine = blas.sgemm if X.dtype == np.float32 else blas.dgemm
    routine(1.0, X.T, Z.T, beta=1.0, c=total, trans_b=1, overwrite_c=1)


def copy_lower(source: Float, target: Float) -> None:
    """Copy the lower triangle, by block columns; both arrays (d, d) and Fortran-ordered."""
    step = 256
    for start in range(0, len(source), step):
        target[start:, start : start + step] = source[start:, start : start + step]


def factor_and_solve(S: Float, sides: list[Float], work: list[Float]) -> list[Float]:
    """Cholesky of S and a triangular solve for each side, by bare LAPACK and BLAS.

    S, of which the lower triangle is read, and the sides stay as they are: like a library that
    keeps its moments, this copies them first, into `work`. All arrays are Fortran-ordered.
    """
    copy_lower(S, work[0])
    _, status = lapack.dpotrf(work[0], lower=1, clean=0, overwrite_a=1)
    if status:
        raise ArithmeticError(f"dpotrf returned {status}")
    for side, target in zip(sides, work[1:], strict=True):
        np.copyto(target, side)
        blas.dtrsm(1.0, work[0], target, lower=1, overwrite_b=1)
    return work


def explicit_splince(S: Float, Sz: Float, Sy: Float, rank_z: int, rank_y: int) -> Float:
    """P of Theorem 1 as it is printed: P = W^+ V (U^T V)^{-1} U^T W, in NumPy.

    U spans colsp(W Sz)^perp, V spans colsp(W Sy) + colsp([W Sz, W Sy])^perp; each comes from a
    complete QR decomposition. Of the equivalent whitenings, W = diag(lambda)^{-1/2} Q^T from
    S = Q diag(lambda) Q^T is taken: it needs no product of its own. Holstege, Ravfogel and Wouters
    (NeurIPS 2025).
    """
    eigenvalues, Q = np.linalg.eigh(S)
    roots = np.sqrt(eigenvalues)
    W = Q.T / roots[:, None]
    A, B = leading(W @ Sz, rank_z), leading(W @ Sy, rank_y)
    U = np.linalg.qr(A, mode="complete").Q[:, rank_z:]
    beyond = np.linalg.qr(np.hstack([A, B]), mode="complete").Q[:, rank_z + rank_y :]
    V = np.hstack([B, beyond])
    return np.asarray(((Q * roots) @ V) @ np.linalg.solve(U.T @ V, U.T @ W))


def scipy_splince(S: Float, Sz: Float, Sy: Float) -> tuple[Float, Float]:
    """Factors of I - P by the same algebra as the library, written in scipy.linalg calls."""
    scale = 1.0 / np.sqrt(np.diagonal(S))
    L = scipy.linalg.cholesky(S * np.outer(scale, scale), lower=True, check_finite=False)
    A, B = (
        scipy.linalg.solve_triangular(L, scale[:, None] * T, lower=True, check_finite=False)
        for T in (Sz, Sy)
    )
    Qz, Qy = (scipy.linalg.orth(T) for T in (A, B))
    N = Qz - Qy @ (Qy.T @ Qz)
    N -= Qy @ (Qy.T @ N)
    left = scipy.linalg.solve((N.T @ Qz).T, (L @ Qz).T).T / scale[:, None]
    right = scipy.linalg.solve_triangular(L, N, lower=True, trans=1, check_finite=False)
    return left, right * scale[:, None]


def leading(M: Float, rank: int) -> Float:
    """Orthonormal basis of the leading left singular vectors."""
    return np.asarray(np.linalg.svd(M, full_matrices=False).U[:, :rank])


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


def class_means(X: NDArray[Any], z: NDArray[np.int64]) -> Float:
    """(k, d) float64 means of the classes, from deviations about the first row."""
    origin = X[0].astype(np.float64)
    return np.stack([(X[z == c].astype(np.float64) - origin).mean(axis=0) for c in np.unique(z)])


def trace_left(before: NDArray[Any], after: NDArray[Any], z: NDArray[np.int64]) -> float:
    """Spread of the class means after erasure over that before: 0 is perfect, 1 nothing erased."""
    first, second = (class_means(X, z) for X in (before, after))
    spread = [np.linalg.norm(means - means.mean(axis=0)) for means in (first, second)]
    return float(spread[1] / spread[0])
