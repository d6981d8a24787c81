"""Other ways to do the same jobs, each in its recommended use, behind one form.

A contender that cannot run because a package is not installed is an :class:`Absent` that names it.
Data are put into the form that each package wants before the clock starts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import _machine, _reference
from benchmarks._data import Problem, one_hot
from benchmarks._timing import Contender

OURS = "splince_fast"
OTHER = "other form"
FLOOR = "floor"
# Exact LEACE by concept-erasure, its fastest documented setting: without these it also estimates
# shrinkage, and checks by d x d products whether the trace grew, as that of exact LEACE never does.
_PLAIN = {"shrinkage": False, "constrain_cov_trace": False}
_PACKAGES = {
    "torch": "torch",
    "concept_erasure": "concept-erasure",
    "fairlearn": "fairlearn",
    "sklearnex": "scikit-learn-intelex",
}


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender left out, and why."""

    reason: str


def absent(*modules: str) -> Absent | None:
    """What is missing of these modules; None if nothing is: they are loaded then, threads equal."""
    missing = [_PACKAGES.get(module, module) for module in modules if not find_spec(module)]
    if missing:
        return Absent(f"not installed: {', '.join(missing)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they warn of each other at import
        for module in modules:
            import_module(module)
    _machine.equal_threads()
    return None


def split(
    contenders: Mapping[str, Contender | Absent],
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those that can run, and the reasons of the others."""
    present = {name: c for name, c in contenders.items() if isinstance(c, Contender)}
    return present, {name: c.reason for name, c in contenders.items() if isinstance(c, Absent)}


# --- accumulating the covariance of x, and its covariance with labels where the tool can ----------


def accumulate_ours(data: Problem, block_rows: int, **parameters: Any) -> Contender:
    """`Moments.update` block by block, with a class-coded concept and a class-coded task."""
    moments = sf.Moments(kinds=dict.fromkeys(data.labels, "classes"), **parameters)
    blocks = [(block.X, block.labels) for block in data.blocks(block_rows)]

    def run() -> None:
        for X, labels in blocks:
            moments.update(X, labels)

    return Contender(run, units=len(data.X))


def accumulate_syrk(data: Problem, block_rows: int) -> Contender:
    """The floor: a bare symmetric product per block in the dtype of the data, nothing else."""
    d = data.X.shape[1]
    total = np.zeros((d, d), data.X.dtype, order="F")
    blocks = data.blocks(block_rows)

    def run() -> None:
        for block in blocks:
            _reference.syrk_into(block.X, total)

    return Contender(run, units=len(data.X))


def accumulate_concept_erasure(
    data: Problem, block_rows: int, *, dtype: str, classes: int = 2, only: int | None = None
) -> Contender | Absent:
    """`LeaceFitter.update`: the concept alone; a binary one as one column, others one-hot.

    Parameters
    ----------
    dtype : {"float32", "float64"}
        Of its statistics.
    only : int, optional
        Use just so many of the blocks, where all of them would take too long.
    """
    if missing := absent("torch", "concept_erasure"):
        return missing
    import torch
    from concept_erasure import LeaceFitter

    columns = 1 if classes == 2 else classes
    fitter = LeaceFitter(data.X.shape[1], columns, dtype=getattr(torch, dtype))
    blocks = [
        (torch.from_numpy(b.X), torch.from_numpy(label_columns(b.z, classes, b.X.dtype)))
        for b in data.blocks(block_rows)[:only]
    ]

    def run() -> None:
        for x, z in blocks:
            fitter.update(x, z)

    return Contender(run, units=sum(len(x) for x, _ in blocks))


def accumulate_onedal(
    data: Problem, block_rows: int, *, only: int | None = None
) -> Contender | Absent:
    """`sklearnex.covariance.IncrementalEmpiricalCovariance.partial_fit`; it takes no labels."""
    if missing := absent("sklearnex"):
        return missing
    from sklearnex.covariance import IncrementalEmpiricalCovariance

    estimator = IncrementalEmpiricalCovariance()
    blocks = data.blocks(block_rows)[:only]

    def run() -> None:
        for block in blocks:
            estimator.partial_fit(block.X)

    return Contender(run, units=sum(len(block.X) for block in blocks))


def accumulate_ipca(data: Problem, block_rows: int) -> Contender:
    """scikit-learn's `IncrementalPCA.partial_fit` with every component: the whole covariance."""
    from sklearn.decomposition import IncrementalPCA

    estimator = IncrementalPCA()
    blocks = data.blocks(block_rows)

    def run() -> None:
        for block in blocks:
            estimator.partial_fit(block.X)

    return Contender(run, units=len(data.X))


def accumulate_ledoit_wolf(data: Problem) -> Contender:
    """scikit-learn's `LedoitWolf.fit` of all rows at once, without the inverse."""
    from sklearn.covariance import LedoitWolf

    return Contender(lambda: LedoitWolf(store_precision=False).fit(data.X), units=len(data.X))


def accumulate_numpy(data: Problem) -> Contender:
    """`numpy.cov` of all rows at once, in their own dtype."""
    return Contender(lambda: np.cov(data.X, rowvar=False, dtype=data.X.dtype), units=len(data.X))


def accumulate_torch(data: Problem) -> Contender | Absent:
    """`torch.cov` of all rows at once."""
    if missing := absent("torch"):
        return missing
    import torch

    x = torch.from_numpy(data.X)
    return Contender(lambda: torch.cov(x.T), units=len(data.X))


def label_columns(codes: NDArray[np.int64], classes: int, dtype: Any) -> NDArray[Any]:
    """Labels as the columns that concept-erasure and fairlearn want."""
    return codes[:, None].astype(dtype) if classes == 2 else one_hot(codes, classes, dtype)


# --- covariances as each tool finds them ----------------------------------------------------------


def covariances(data: Problem, block_rows: int) -> dict[str, Callable[[], NDArray[Any]] | Absent]:
    """The covariance of the rows by each tool that streams or is handed all of them."""
    found: dict[str, Callable[[], NDArray[Any]] | Absent] = {
        OURS: lambda: _moments_in_blocks(data, block_rows).covariance(),
        "NumPy": lambda: np.cov(data.X, rowvar=False),
        "NumPy float32": lambda: np.cov(data.X, rowvar=False, dtype=np.float32),
    }
    found["torch"] = absent("torch") or partial(_torch_covariance, data)
    for dtype in ("float32", "float64"):
        found[f"concept-erasure {dtype}"] = absent("torch", "concept_erasure") or partial(
            _concept_erasure_covariance, data, block_rows, dtype
        )
    found["oneDAL"] = absent("sklearnex") or partial(_onedal_covariance, data, block_rows)
    return found


def _moments_in_blocks(data: Problem, block_rows: int) -> sf.Moments:
    moments = sf.Moments()
    for block in data.blocks(block_rows):
        moments.update(block.X, block.labels)
    return moments


def _torch_covariance(data: Problem) -> NDArray[Any]:
    import torch

    return np.asarray(torch.cov(torch.from_numpy(data.X).T).numpy())


def _concept_erasure_covariance(data: Problem, block_rows: int, dtype: str) -> NDArray[Any]:
    import torch
    from concept_erasure import LeaceFitter

    fitter = LeaceFitter(data.X.shape[1], 1, dtype=getattr(torch, dtype), shrinkage=False)
    for block in data.blocks(block_rows):
        fitter.update(torch.from_numpy(block.X), torch.from_numpy(block.z))
    return np.asarray(fitter.sigma_xx.numpy())


def _onedal_covariance(data: Problem, block_rows: int) -> NDArray[Any]:
    from sklearnex.covariance import IncrementalEmpiricalCovariance

    estimator = IncrementalEmpiricalCovariance()
    for block in data.blocks(block_rows):
        estimator.partial_fit(block.X)
    # Its estimate divides by n; the others by n - 1.
    n = len(data.X)
    return np.asarray(estimator.covariance_, np.float64) * (n / (n - 1))


# --- erasing, from rows and labels to clean rows --------------------------------------------------


# Arrays of the size of the rows that each holds at its peak, the rows and the result included.
ARRAYS_AT_PEAK = {
    f"{OURS}": 2, OTHER: 2, "concept-erasure": 4, "fairlearn": 9, "NumPy": 6,
}  # fmt: skip


def erasers(
    data: Problem, classes: int = 2, *, free_bytes: float = float("inf")
) -> dict[str, Callable[[], NDArray[Any]] | Absent]:
    """Fit and apply, each as its documentation does it; rows in, clean rows of their dtype out.

    All erase; "other form" (SPLINCE beside LEACE) and the paper's formula also keep a task. Those
    that would need more memory than is free are left out.
    """
    builders: dict[str, Callable[[], Callable[[], NDArray[Any]] | Absent]] = {
        OURS: lambda: lambda: sf.LEACE().fit(data.X, concept=data.z).transform(data.X),
        OTHER: lambda: lambda: sf.SPLINCE().fit(data.X, data.y, concept=data.z).transform(data.X),
        "concept-erasure": lambda: _concept_erasure(data, classes),
        "fairlearn": lambda: _correlation_remover(data, classes),
        "NumPy": lambda: partial(_explicit, data, classes),
    }
    found = {}
    for name, build in builders.items():
        beyond = (ARRAYS_AT_PEAK[name] - 1) * data.X.nbytes
        short = beyond > free_bytes
        reason = f"needs {beyond / 2**30:.0f} GiB beside the rows, more than is free"
        found[name] = Absent(reason) if short else build()
    return found


def _concept_erasure(data: Problem, classes: int) -> Callable[[], NDArray[Any]] | Absent:
    if missing := absent("torch", "concept_erasure"):
        return missing
    import torch
    from concept_erasure import LeaceEraser

    x = torch.from_numpy(data.X)
    z = torch.from_numpy(label_columns(data.z, classes, data.X.dtype))
    return lambda: np.asarray(LeaceEraser.fit(x, z, **_PLAIN)(x).numpy())


def _correlation_remover(data: Problem, classes: int) -> Callable[[], NDArray[Any]] | Absent:
    if missing := absent("fairlearn"):
        return missing
    from fairlearn.preprocessing import CorrelationRemover

    d = data.X.shape[1]
    table = np.hstack([data.X, label_columns(data.z, classes, data.X.dtype)])
    columns = list(range(d, table.shape[1]))
    return lambda: np.asarray(
        CorrelationRemover(sensitive_feature_ids=columns).fit_transform(table)
    )


def _explicit(data: Problem, classes: int) -> NDArray[Any]:
    """The formula of Theorem 1 on float64 covariances, then one product per row."""
    X = data.X.astype(np.float64)
    mean = X.mean(axis=0)
    X -= mean
    Sz, Sy = (X.T @ one_hot(v, classes, np.float64) / len(X) for v in (data.z, data.y))
    P = _reference.explicit_splince(X.T @ X / len(X), Sz, Sy, classes - 1, classes - 1)
    offset = mean - P @ mean
    return np.asarray(data.X @ P.T.astype(data.X.dtype) + offset.astype(data.X.dtype))


# --- solving: from accumulated statistics to an eraser --------------------------------------------


def solvers(data: Problem, classes: int = 2) -> dict[str, Contender | Absent]:
    """Each starts from its own float64 statistics of the same rows.

    SPLINCE is ours, LEACE the other form; concept-erasure does LEACE, NumPy SPLINCE.
    """
    moments = data.moments()
    S = moments.covariance()
    Sz, Sy = (moments.cross_covariance(name) for name in ("z", "y"))
    rank = classes - 1
    return {
        OURS: Contender(lambda: sf.splince(moments, erase="z", keep="y")),
        OTHER: Contender(lambda: sf.leace(moments, erase="z")),
        "concept-erasure": solve_concept_erasure(data, classes),
        "NumPy": Contender(lambda: _reference.explicit_splince(S, Sz, Sy, rank, rank)),
    }


def solve_concept_erasure(data: Problem, classes: int = 2) -> Contender | Absent:
    """`LeaceFitter.eraser` in float64, exact LEACE; the result that it caches is discarded."""
    if missing := absent("torch", "concept_erasure"):
        return missing
    import torch
    from concept_erasure import LeaceFitter

    z = torch.from_numpy(label_columns(data.z, classes, np.float64))
    fitter = LeaceFitter(data.X.shape[1], z.shape[1], dtype=torch.float64, **_PLAIN)
    fitter.update(torch.from_numpy(data.X), z)

    def forget() -> None:
        if hasattr(fitter, "_cached_eraser"):
            del fitter._cached_eraser

    return Contender(lambda: fitter.eraser, before=forget)


# --- applying ------------------------------------------------------------------------------------


def appliers(X: NDArray[Any], eraser: sf.Projection) -> dict[str, Contender | Absent]:
    """The same map on the same rows: into a given array, into a new one (other form), the rest."""
    out = np.empty_like(X)
    left, right, mean = (
        np.ascontiguousarray(a, dtype=X.dtype) for a in (eraser.left, eraser.right, eraser.mean)
    )
    return {
        OURS: Contender(lambda: eraser(X, out=out), units=len(X)),
        OTHER: Contender(lambda: eraser(X), units=len(X)),
        FLOOR: Contender(lambda: np.copyto(out, X), units=len(X)),
        "concept-erasure": _apply_concept_erasure(X, left, right, mean),
        "NumPy": Contender(lambda: _reference.explicit_apply(X, left, right, mean), units=len(X)),
    }


def _apply_concept_erasure(
    X: NDArray[Any], left: NDArray[Any], right: NDArray[Any], mean: NDArray[Any]
) -> Contender | Absent:
    """Its eraser, holding our factors: every tool applies the same map."""
    if missing := absent("torch", "concept_erasure"):
        return missing
    import torch
    from concept_erasure import LeaceEraser

    theirs = LeaceEraser(torch.from_numpy(left), torch.from_numpy(right).T, torch.from_numpy(mean))
    x = torch.from_numpy(X)
    return Contender(lambda: theirs(x), units=len(X))
