"""Contenders of other packages, each in its recommended use.

Data are converted to the format of each package before timing. Either all contenders of a job write
into an existing array, or all return a new array.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks.data import Array, Problem, split_rows
from benchmarks.timing import Absent, Contender, each

CE = "concept-erasure"
CE64 = "concept-erasure float64"
ONEDAL = "oneDAL"
DASK_COV = "dask.array.cov"
DASK_PCA = "dask-ml IncrementalPCA"
# Fastest documented setting of concept-erasure for exact LEACE. The defaults add shrinkage, and
# d x d products that check that the trace of the covariance does not increase.
_PLAIN = {"shrinkage": False, "constrain_cov_trace": False}
Make = Callable[..., Any]


def needs(*modules: str) -> Callable[[Make], Make]:
    """Make a function return :class:`Absent` if one of the modules is not installed.

    Warnings in the function are ignored, because imported packages warn of each other.
    """

    def decorate(make: Make) -> Make:
        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            if missing := [name for name in modules if not find_spec(name)]:
                return Absent(f"not installed: {', '.join(missing)}")
            with warnings.catch_warnings(action="ignore"):
                return make(*args, **kwargs)

        return made

    return decorate


def _concept(data: Problem) -> Array:
    """Return the binary concept as a column, (n, 1), in the dtype of the rows."""
    return data.z[:, None].astype(data.X.dtype)


def _tensors(data: Problem) -> tuple[Any, Any]:
    """Return the rows and the concept column as tensors."""
    import torch

    return torch.from_numpy(data.X), torch.from_numpy(_concept(data))


@needs("torch", "concept_erasure")
def stream_concept_erasure(data: Problem, block_rows: int, dtype: str) -> Contender:
    """Return a contender that calls `LeaceFitter.update` with the concept.

    `dtype` is the dtype of the statistics.
    """
    import torch
    from concept_erasure import LeaceFitter

    x, z = _tensors(data)
    fitter = LeaceFitter(x.shape[1], z.shape[1], dtype=getattr(torch, dtype), **_PLAIN)
    blocks = list(zip(x.split(block_rows), z.split(block_rows), strict=True))
    return each(blocks, fitter.update, lambda fitter: fitter.sigma_xx.numpy())


@needs("sklearnex")
def stream_onedal(data: Problem, block_rows: int) -> Contender:
    """Return a contender that fits the covariance of oneDAL block by block, without labels.

    It calls `sklearnex.covariance.IncrementalEmpiricalCovariance.partial_fit`.
    """
    from sklearnex.covariance import IncrementalEmpiricalCovariance

    blocks = [(X,) for X, _ in split_rows(block_rows, data.X)]
    n = len(data.X)  # oneDAL divides by n, the other contenders by n - 1
    fit = IncrementalEmpiricalCovariance().partial_fit
    return each(blocks, fit, lambda estimator: estimator.covariance_ * (n / (n - 1)))


@needs("torch", "concept_erasure")
def erase_concept_erasure(data: Problem) -> Contender:
    """Return a contender that fits a `LeaceEraser` and applies it."""
    from concept_erasure import LeaceEraser

    x, z = _tensors(data)
    return Contender(lambda: LeaceEraser.fit(x, z, **_PLAIN)(x).numpy(), len(x), answer=np.asarray)


@needs("fairlearn")
def erase_fairlearn(data: Problem) -> Contender:
    """Return a contender that calls `CorrelationRemover.fit_transform`.

    CorrelationRemover returns the residuals of a regression of the features on the concept. These
    residuals are not compared with other contenders, because they depend on the labels of the rows,
    unlike erased rows.
    """
    from fairlearn.preprocessing import CorrelationRemover

    table = np.hstack([data.X, _concept(data)])
    remover = CorrelationRemover(sensitive_feature_ids=[data.X.shape[1]])
    return Contender(partial(remover.fit_transform, table), len(table))


def explicit_splince(S: Array, Sz: Array, Sy: Array) -> Array:
    """Return SPLINCE by Theorem 1 as printed, P = W^+ V (U^T V)^{-1} U^T W, in NumPy.

    The columns of U span colsp(W Sz)^perp, the columns of V span
    colsp(W Sy) + colsp([W Sz, W Sy])^perp. Both matrices come from complete QR decompositions. The
    whitening is W = diag(lambda)^{-1/2} Q^T with S = Q diag(lambda) Q^T; this choice saves a d x d
    product. Concept and task are binary, so Sz and Sy have rank one. The theorem is due to
    Holstege, Ravfogel and Wouters (NeurIPS 2025).
    """
    eigenvalues, Q = np.linalg.eigh(S)
    roots = np.sqrt(eigenvalues)
    W = Q.T / roots[:, None]
    A, B = (np.linalg.svd(W @ cov, full_matrices=False).U[:, :1] for cov in (Sz, Sy))
    U = np.linalg.qr(A, mode="complete").Q[:, 1:]
    complement = np.linalg.qr(np.hstack([A, B]), mode="complete").Q[:, 2:]
    V = np.hstack([B, complement])
    return np.asarray(((Q * roots) @ V) @ np.linalg.solve(U.T @ V, U.T @ W))


def erase_numpy(data: Problem) -> Contender:
    """Return a contender that computes SPLINCE by Theorem 1 and applies it by one product.

    The covariances are float64.
    """

    def run() -> Array:
        X = data.X.astype(np.float64)
        mean = X.mean(axis=0)
        X -= mean
        n = len(X)
        Sz, Sy = (X.T @ codes[:, None] / n for codes in (data.z, data.y))
        P = explicit_splince(X.T @ X / n, Sz, Sy)
        offset = mean - P @ mean
        return np.asarray(data.X @ P.T.astype(data.X.dtype) + offset.astype(data.X.dtype))

    return Contender(run, len(data.X), answer=np.asarray)


@needs("torch", "concept_erasure")
def solve_concept_erasure(data: Problem) -> Contender:
    """Return a contender that computes `LeaceFitter.eraser`, exact LEACE.

    The result that the fitter caches is removed before each call.
    """
    from concept_erasure import LeaceFitter

    fitter = LeaceFitter.fit(*_tensors(data), **_PLAIN)

    def run() -> Any:
        vars(fitter).pop("_cached_eraser", None)
        return fitter.eraser

    return Contender(run, answer=lambda eraser: eraser.P.numpy())


def _factors(X: Array, eraser: sf.Projection) -> list[Array]:
    """Return left factor, right factor and mean of an eraser, in the dtype of the rows."""
    return [np.ascontiguousarray(a, X.dtype) for a in (eraser.left, eraser.right, eraser.mean)]


def apply_numpy(X: Array, eraser: sf.Projection, out: Array | None = None) -> Contender:
    """Return a contender that computes X - ((X - mean) right) left^T in NumPy."""
    left, right, mean = _factors(X, eraser)
    return Contender(
        lambda: np.subtract(X, ((X - mean) @ right) @ left.T, out=out), len(X), answer=np.asarray
    )


@needs("torch", "concept_erasure")
def apply_concept_erasure(X: Array, eraser: sf.Projection) -> Contender:
    """Return a contender that applies a `LeaceEraser` with the factors of `eraser`.

    The result is a new array.
    """
    import torch
    from concept_erasure import LeaceEraser

    x, left, right, mean = map(torch.from_numpy, (X, *_factors(X, eraser)))
    return Contender(partial(LeaceEraser(left, right.T, mean), x), len(X), answer=np.asarray)
