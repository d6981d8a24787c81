"""Contenders of other packages, each in its recommended use.

Data are converted to the form that each package needs before the clock starts. The results of calls
are comparable: either all contenders of a job write into a given array, or all return a new one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks.data import Array, Problem, cut
from benchmarks.timing import Absent, Contender, each

CE = "concept-erasure"
CE64 = "concept-erasure float64"
ONEDAL = "oneDAL"
DASK_COV = "dask.array.cov"
DASK_PCA = "dask-ml IncrementalPCA"
# Exact LEACE by concept-erasure, its fastest documented setting: without these it also estimates
# shrinkage, and checks by d x d products whether the trace grew, as that of exact LEACE never does.
_PLAIN = {"shrinkage": False, "constrain_cov_trace": False}
Make = Callable[..., Any]


def needs(*modules: str) -> Callable[[Make], Make]:
    """Without one of these modules a contender, or job, is :class:`Absent`.

    Warnings are ignored while it is made: packages warn of each other when they are imported.
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
    """A binary concept as one column (n, 1) of the dtype of the rows."""
    return data.z[:, None].astype(data.X.dtype)


def _tensors(data: Problem) -> tuple[Any, Any]:
    """Rows, and the column of the concept."""
    import torch

    return torch.from_numpy(data.X), torch.from_numpy(_concept(data))


@needs("torch", "concept_erasure")
def stream_concept_erasure(data: Problem, block_rows: int, dtype: str) -> Contender:
    """`LeaceFitter.update` with the concept alone; `dtype` is that of its statistics."""
    import torch
    from concept_erasure import LeaceFitter

    x, z = _tensors(data)
    fitter = LeaceFitter(x.shape[1], z.shape[1], dtype=getattr(torch, dtype), **_PLAIN)
    blocks = list(zip(x.split(block_rows), z.split(block_rows), strict=True))
    return each(blocks, fitter.update, lambda fitter: fitter.sigma_xx.numpy())


@needs("sklearnex")
def stream_onedal(data: Problem, block_rows: int) -> Contender:
    """`sklearnex.covariance.IncrementalEmpiricalCovariance.partial_fit`; it takes no labels."""
    from sklearnex.covariance import IncrementalEmpiricalCovariance

    blocks = [(X,) for X, _ in cut(block_rows, data.X)]
    n = len(data.X)  # its estimate divides by n; the others by n - 1
    fit = IncrementalEmpiricalCovariance().partial_fit
    return each(blocks, fit, lambda estimator: estimator.covariance_ * (n / (n - 1)))


@needs("torch", "concept_erasure")
def erase_concept_erasure(data: Problem) -> Contender:
    """`LeaceEraser.fit` and a call."""
    from concept_erasure import LeaceEraser

    x, z = _tensors(data)
    return Contender(lambda: LeaceEraser.fit(x, z, **_PLAIN)(x).numpy(), len(x), answer=np.asarray)


@needs("fairlearn")
def erase_fairlearn(data: Problem) -> Contender:
    """`CorrelationRemover.fit_transform`: residuals of a regression on the concept, per feature.

    Without an answer: it may move rows by their labels, which an eraser cannot see.
    """
    from fairlearn.preprocessing import CorrelationRemover

    table = np.hstack([data.X, _concept(data)])
    remover = CorrelationRemover(sensitive_feature_ids=[data.X.shape[1]])
    return Contender(partial(remover.fit_transform, table), len(table))


def explicit_splince(S: Array, Sz: Array, Sy: Array) -> Array:
    """P of Theorem 1 as it is printed: P = W^+ V (U^T V)^{-1} U^T W, in NumPy.

    U spans colsp(W Sz)^perp, V spans colsp(W Sy) + colsp([W Sz, W Sy])^perp; each comes from a
    complete QR decomposition. Of the equivalent whitenings, W = diag(lambda)^{-1/2} Q^T from
    S = Q diag(lambda) Q^T is taken: it needs no product of its own. Holstege, Ravfogel and Wouters
    (NeurIPS 2025). Concept and task are binary: either side has rank one.
    """
    eigenvalues, Q = np.linalg.eigh(S)
    roots = np.sqrt(eigenvalues)
    W = Q.T / roots[:, None]
    A, B = (np.linalg.svd(W @ side, full_matrices=False).U[:, :1] for side in (Sz, Sy))
    U = np.linalg.qr(A, mode="complete").Q[:, 1:]
    beyond = np.linalg.qr(np.hstack([A, B]), mode="complete").Q[:, 2:]
    V = np.hstack([B, beyond])
    return np.asarray(((Q * roots) @ V) @ np.linalg.solve(U.T @ V, U.T @ W))


def erase_numpy(data: Problem) -> Contender:
    """SPLINCE by Theorem 1 on float64 covariances, then one product per row."""

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
    """`LeaceFitter.eraser`, exact LEACE; the result that it caches is discarded."""
    from concept_erasure import LeaceFitter

    fitter = LeaceFitter.fit(*_tensors(data), **_PLAIN)

    def run() -> Any:
        vars(fitter).pop("_cached_eraser", None)
        return fitter.eraser

    return Contender(run, answer=lambda eraser: eraser.P.numpy())


def _factors(X: Array, eraser: sf.Projection) -> list[Array]:
    """Left and right factor and mean, in the dtype of the rows."""
    return [np.ascontiguousarray(a, X.dtype) for a in (eraser.left, eraser.right, eraser.mean)]


def apply_numpy(X: Array, eraser: sf.Projection, out: Array | None = None) -> Contender:
    """The formula X - ((X - mean) right) left^T."""
    left, right, mean = _factors(X, eraser)
    return Contender(
        lambda: np.subtract(X, ((X - mean) @ right) @ left.T, out=out), len(X), answer=np.asarray
    )


@needs("torch", "concept_erasure")
def apply_concept_erasure(X: Array, eraser: sf.Projection) -> Contender:
    """Its eraser with our factors, so that every contender applies the same map; a new array."""
    import torch
    from concept_erasure import LeaceEraser

    x, left, right, mean = map(torch.from_numpy, (X, *_factors(X, eraser)))
    return Contender(partial(LeaceEraser(left, right.T, mean), x), len(X), answer=np.asarray)
