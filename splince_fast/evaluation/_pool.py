"""The jobs of a comparison in processes of one BLAS thread each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve.options import is_integer
from splince_fast.evaluation import _job
from splince_fast.evaluation._context import ADVISER as _ADVISER
from splince_fast.evaluation._context import ERASER_ROW
from splince_fast.evaluation._moments import level_moments
from splince_fast.evaluation._protocol import Split
from splince_fast.evaluation.plan import Named, Plan
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassCodes
from splince_fast.moments import Moments

Where = tuple[int, float | None]  # seed and level
ADVISER = Named(_ADVISER, None, "advice")


def cells_of(plan: Plan) -> list[tuple[Named, str]]:
    """(eraser, head) of every record, the eraser's own first."""
    cells = [(e, h) for e in plan.erasers for h in (ERASER_ROW, *(h.name for h in plan.heads))]
    advised = isinstance(plan.task, ClassCodes)
    return [*cells, *([(ADVISER, ERASER_ROW)] if advised else [])]


def results(
    plan: Plan,
    splits: Mapping[Where, Split],
    pending: Mapping[Where, list[Named]],
    workers: int,
    scratch: Path,
) -> Iterator[tuple[Where, list[dict[str, Any]]]]:
    """Finished jobs as they come: first the moments of each seed, then its levels."""
    if not pending:
        return
    joblib: Any = import_module("joblib")
    seeds = [s for s in plan.seeds if any(job[0] == s for job in pending)]
    rows = plan.X
    if workers > 1:
        rows = _on_disk(plan.X, scratch)
        plan = _without_rows(plan)
    child = workers > 1
    with joblib.Parallel(n_jobs=workers, return_as="generator_unordered") as pool:
        made = pool(
            joblib.delayed(_make_moments)(
                plan, rows, seed, [splits[seed, p] for p in plan.levels], scratch, child
            )
            for seed in seeds
        )
        list(made)
    left = dict(pending)
    for alone in (False, True):
        # After a worker has died, what is left runs alone, one job at a time.
        for batch in [[job] for job in left] if alone else [list(left)]:
            calls = (
                joblib.delayed(_run_job)(plan, rows, *job, splits[job], left[job], scratch, child)
                for job in batch
            )
            try:
                pool = joblib.Parallel(n_jobs=workers, return_as="generator_unordered")
                for job, records in pool(calls):
                    del left[job]
                    yield job, records
            except _dead_worker() as error:
                if alone:
                    reason = f"the process died twice, perhaps for lack of memory ({error})"
                    yield batch[0], _failed(plan, batch[0], left.pop(batch[0]), reason, splits)
        if not left:
            return


def _dead_worker() -> type[BaseException]:
    module = import_module("joblib.externals.loky.process_executor")
    found: type[BaseException] = module.TerminatedWorkerError
    return found


def _failed(
    plan: Plan,
    where: Where,
    erasers: list[Named],
    reason: str,
    splits: Mapping[Where, Split],
) -> list[dict[str, Any]]:
    """Rows of a job that could not be run."""
    return [
        _job.blank(where[0], where[1], splits[where].sizes, eraser.name, head, reason=reason)
        for eraser, head in cells_of(plan)
        if eraser in erasers
    ]


def _on_disk(X: NDArray[Any], scratch: Path) -> Any:
    """Rows as a file that every worker maps."""
    name = getattr(X, "filename", None)
    whole = isinstance(X, np.memmap) and name is not None and X.flags.c_contiguous
    if whole and str(name).endswith(".npy") and np.load(str(name), mmap_mode="r").shape == X.shape:
        return str(name)
    path = scratch / "rows.npy"
    np.save(path, X)
    return str(path)


def _without_rows(plan: Plan) -> Plan:
    return dataclasses.replace(plan, X=None)


def _opened(rows: Any) -> NDArray[Any]:
    return np.load(rows, mmap_mode="r") if isinstance(rows, str) else np.asarray(rows)


def _alone(child: bool) -> Any:
    """One BLAS thread; in a process of our own, one thread of our kernels, too."""
    from threadpoolctl import threadpool_limits

    if child:
        os.environ["SPLINCE_FAST_NUM_THREADS"] = "1"
    return threadpool_limits(1)


def _path(scratch: Path, seed: int, p: float | None) -> Path:
    return scratch / f"{seed}-{p}.safetensors"


def _make_moments(
    plan: Plan, rows: Any, seed: int, splits: list[Split], scratch: Path, child: bool
) -> None:
    """Accumulate the rows of a seed once, and write the moments of its levels."""
    with _alone(child):
        labels = {plan.task_name: plan.task, **plan.concepts}
        parts = [plan.moment_rows(split) for split in splits]
        made = level_moments(_opened(rows), labels, parts)
        for p, moments in zip(plan.levels, made, strict=True):
            moments.save(_path(scratch, seed, p))


def _run_job(
    plan: Plan,
    rows: Any,
    seed: int,
    p: float | None,
    split: Split,
    erasers: list[Named],
    scratch: Path,
    child: bool,
) -> tuple[Where, list[dict[str, Any]]]:
    with _alone(child):
        path = _path(scratch, seed, p)
        job = _job.Job.of(plan, _opened(rows), seed, p, split, Moments.load(path))
        records = job.run(erasers)
        path.unlink(missing_ok=True)
        return (seed, p), records


def workers_of(n_jobs: int | None) -> int:
    if n_jobs is None:
        return 1
    if not is_integer(n_jobs) or n_jobs == 0:
        raise InputError(f"n_jobs is {n_jobs!r}; pass a number of processes, or -1 for all")
    joblib: Any = import_module("joblib")
    return int(joblib.effective_n_jobs(n_jobs))
