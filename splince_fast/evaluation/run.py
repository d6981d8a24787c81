"""Function compare: fit and score every eraser and head at every level and seed.

Jobs run in parallel, and an interrupted run can be resumed.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.progress import Progress
from splince_fast._runtime.version import library_version
from splince_fast._runtime.warn import warn
from splince_fast._solve.options import is_integer
from splince_fast.evaluation._digest import hash_settings
from splince_fast.evaluation.data import blocks, level_moments, texts_of
from splince_fast.evaluation.heads import ALPHAS
from splince_fast.evaluation.job import Job
from splince_fast.evaluation.plan import ComparisonPlan, Component, Settings, make_plan
from splince_fast.evaluation.records import (
    ADVICE,
    ERASER_ROW,
    Context,
    CustomMetric,
    Journal,
    Record,
    RecordId,
)
from splince_fast.evaluation.result import Comparison
from splince_fast.evaluation.splits import Split
from splince_fast.exceptions import InputError, SplinceWarning
from splince_fast.labels import ClassCodes
from splince_fast.moments import Moments

JobId = tuple[int, float | None]  # seed and level
_ADVICE_COMPONENT = Component(ADVICE, None, "advice")
_LAYOUT = 3  # version of the record layout; records of another version are computed again


def compare(
    X: object,
    *,
    task: object,
    concept: object,
    groups: object = None,
    erasers: object = ("none", "SAL", "LEACE", "SPLINCE"),
    heads: object = ("retrained", "frozen"),
    association: object = None,
    aligned_class: object = None,
    sizes: tuple[int, int, int] | None = None,
    association_method: str = "subsample",
    unlabelled: bool = False,
    n_seeds: int = 5,
    random_state: int = 0,
    alphas: Sequence[float] = ALPHAS,
    select: str = "worst_group",
    leakage: Sequence[str] = ("linear",),
    metrics: Mapping[str, object] | None = None,
    test: object = None,
    n_jobs: int | None = None,
    run: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    strict: bool = False,
) -> Comparison:
    """Compare erasers on one data set: leakage, task accuracy and distortion, with intervals.

    For every seed and level of association, the rows are split into training, validation and test
    rows. Every eraser is fitted to the same moments of the training rows. Heads are fitted on
    erased training rows and scored on erased test rows. Probes, which predict the concept, are
    trained and scored by cross-validation within erased test rows. The values do not depend on
    `n_jobs`, on the order of the jobs, or on interruptions.

    Parameters
    ----------
    X : array-like of shape (n, d), or path
        Embeddings: an array, memory map, torch tensor, frame, .npy file, .parquet file with the
        column "embedding", or a source, such as :func:`splince_fast.sources.from_parquet` for
        another column. Memory maps and files are read in blocks. A job copies the rows of its split
        to float64.
    task, concept : column of shape (n,)
        Labels of any kind: classes, or a quantity if they are floats. Several concepts, passed as a
        mapping, frame or tuple of columns, are erased jointly. With `association`, task and
        concepts must be classes.
    groups : column of shape (n,), optional
        Groups, such as persons or documents. All rows of a group are in the same part of a split
        and in the same cross-validation fold. If `test` divides a group, InputError is raised.
    erasers : sequence or mapping
        Names, estimators or functions. The keys of a mapping replace the names in the result. The
        names are "none", "SAL", "LEACE", "SPLINCE", "MeanProjection", "random", "INLP", "RLACE",
        "quadratic", "isotropic" and "oracle". "SAL+repair", "INLP+repair" and "RLACE+repair"
        restore the covariance with the task by :func:`splince_fast.repair`. A name with an
        intensity, such as "LEACE*0.9", is the partial eraser :meth:`Projection.scaled`; a linear
        probe still finds the concept after a partial erasure.

        An estimator is fitted on copies of the centred and scaled training and validation rows, and
        must set ``projection_``. If some of several concepts are classes and some are quantities,
        it receives the concepts as a mapping of columns. A function is called with the
        :class:`Moments` of the training rows and returns a :class:`Projection` or
        :class:`ConditionalEraser`. The variables of the moments are "task" ("kept task" if a
        concept is named "task") and "concept", or the names of the concepts if there are several.

        "quadratic" and "isotropic" are :func:`splince_fast.quadratic` and ``isotropic``, fitted to
        two folds of the training rows; they need one concept of classes. "oracle" is
        :func:`splince_fast.oracle`. All three keep the task. "oracle" and "quadratic" use the
        concept label of every training, validation and test row; a note in the result says that
        their values hold only for rows with a label of the concept.
    heads : sequence or mapping
        "retrained" (fitted on erased rows, with a selected alpha), "frozen" (fitted on unerased
        rows), "unregularised" (fitted on erased rows with alpha 0), or classifiers, which are
        fitted on erased rows. The keys of a mapping replace the names in the result.
    association : float or sequence of float, optional
        Levels p of :func:`spurious_split`; None is the natural split.
    aligned_class, sizes
        As for :func:`spurious_split`; the default sizes are the largest that are feasible at all
        levels. Without `sizes`, a job uses a random sample of at most 512 MiB of rows in float64.
    association_method : {"subsample", "weights"}
        As `method` of :func:`spurious_split`. "subsample" drops rows of cells. "weights" keeps all
        rows and weights them in the moments, in heads and in the selection of alpha; estimators and
        classifiers receive the weights as ``sample_weight``. Both methods have the same test rows.
    unlabelled : bool
        Whether rows with a label of the concept, but without a label of the task, are added to the
        moments. They then count in Cov(x) and in the covariance with the concept. Heads and probes
        do not use these rows.
    n_seeds, random_state : int
        The seeds are random_state, random_state + 1, ...
    alphas : sequence of float
        Candidate penalties of the head "retrained". The result has its metrics at every alpha.
    select : {"worst_group", "accuracy"}
        Validation score by which alpha is selected for every eraser. For a task that is a quantity,
        alpha is always selected by the mean squared error.
    leakage : sequence of {"linear", "quadratic", "mlp", "boosting"}
        Probes for the concept on erased test rows; for a quantity only "linear" is computed.
    metrics : mapping of str to function or Metric, optional
        Custom metrics: functions of (y_true, y_pred). To mark the best eraser by a metric, pass a
        :class:`Metric` with a direction instead of a plain function.
    test : column of shape (n,), optional
        A fixed split instead of resampling: a mask of test rows, or a column of the names "train",
        "validation" and "test". A fixed split requires ``n_seeds=1``, and its intervals are
        bootstrap intervals.
    n_jobs : int, optional
        Number of processes, each with one BLAS thread; -1 means one process per processor. The
        default is 1.
    run : path, optional
        Folder in which finished records are stored, so that an interrupted run can be continued.
        The folder of a run on other rows, labels or concept names is refused. A record is computed
        again if its settings or code have changed, including the globals and closures of functions.
        Records that depend on a function whose code or variables cannot be read are computed again
        in every run, with a warning.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.
    strict : bool
        Raise if an eraser, head or metric fails, instead of storing the reason in the result.

    Returns
    -------
    Comparison
        The result, with tables, tests of differences, figures and a report.

    Raises
    ------
    InputError, LabelError, NonFiniteError, NotEnoughDataError
        Invalid arguments, before any job runs; or, with `strict`, a failed eraser, head or metric.

    Warns
    -----
    SplinceWarning
        Some test rows are equal to training rows; rows lack labels; a job uses a sample of the
        rows; records cannot be reused by a later run.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import evaluation as ev
    >>> rng = np.random.default_rng(0)
    >>> y, z = rng.integers(0, 2, 900), rng.integers(0, 2, 900)
    >>> X = rng.normal(size=(900, 6))
    >>> X[:, 0] += 2 * z
    >>> X[:, 1] += 2 * y
    >>> result = ev.compare(X, task=y, concept=z, n_seeds=2, alphas=(0.01,), progress=False)
    >>> result.mean("probe_accuracy", eraser="none") > 0.8
    True
    >>> result.mean("probe_accuracy", eraser="LEACE") < 0.6
    True
    """
    settings = Settings(
        task=task, concept=concept, groups=groups, erasers=erasers, heads=heads,
        association=association, aligned_class=aligned_class, sizes=sizes,
        association_method=association_method, unlabelled=unlabelled, n_seeds=n_seeds,
        random_state=random_state, alphas=alphas, select=select, leakage=leakage,
        metrics=metrics, test=test,
    )  # fmt: skip
    plan = make_plan(X, settings)
    workers = workers_of(n_jobs)
    journal = Journal(run, plan.fingerprint)
    splits = {(seed, p): plan.split(seed, p) for seed in plan.seeds for p in plan.levels}
    notes = _data_notes(plan, splits, resumable=run is not None)
    keys = _keys(plan, splits)
    pending: dict[JobId, list[Component]] = {}
    components = {e.name: e for e in (*plan.erasers, _ADVICE_COMPONENT)}
    for record_id, record_key in keys.items():
        if record_key not in journal.records:
            erasers = pending.setdefault((record_id.seed, record_id.p), [])
            # If one record of an eraser is missing, the eraser runs again with all heads.
            if components[record_id.eraser] not in erasers:
                erasers.append(components[record_id.eraser])
    records = {i: journal.records[k] for i, k in keys.items() if k in journal.records}
    with tempfile.TemporaryDirectory(prefix="splince-fast-") as scratch, ExitStack() as stack:
        bar = stack.enter_context(Progress(len(pending), show=progress, unit="jobs"))
        for job_records in _run_jobs(plan, splits, pending, workers, Path(scratch)):
            journal.add({keys[r.id]: r for r in job_records if not _is_unreadable(plan, r)})
            records |= {r.id: r for r in job_records}
            failed = [r for r in job_records if r.reason and r.eraser != ADVICE]
            if strict and failed:
                raise InputError(f"{failed[0].eraser} {failed[0].head}: {failed[0].reason}")
            bar.advance(1)
    return Comparison([records[record_id] for record_id in keys], _context(plan, splits, notes))


def _keys(plan: ComparisonPlan, splits: Mapping[JobId, Split]) -> dict[RecordId, str]:
    """Return the hash of the inputs of each record by record id, in the order of the result."""
    heads = {head.name: head.digest for head in plan.heads}
    metrics = {metric.name: metric.digest for metric in plan.metrics}
    keys = {}
    for (seed, p), split in splits.items():
        for eraser, head in _pairs(plan):
            is_head = head != ERASER_ROW
            keys[RecordId(seed, p, eraser.name, head)] = hash_settings(
                layout=_LAYOUT,
                data=plan.fingerprint,
                version=library_version(),
                seed=seed,
                p=p,
                sizes=split.sizes,
                aligned_class=repr(split.aligned_class),
                association_method=plan.association_method,
                unlabelled=plan.unlabelled,
                eraser=(eraser.name, eraser.digest),
                head=(head, heads.get(head, "")),
                alphas=plan.alphas if is_head or eraser.name == ADVICE else (),
                select=plan.select if is_head else "",
                probes=() if is_head else plan.probes,
                metrics=metrics if is_head else {},
            )
    return keys


def _pairs(plan: ComparisonPlan) -> list[tuple[Component, str]]:
    """(eraser, head) of every record of a job; the record of an eraser itself comes first."""
    pairs = [(e, h) for e in plan.erasers for h in (ERASER_ROW, *(h.name for h in plan.heads))]
    return [*pairs, (_ADVICE_COMPONENT, ERASER_ROW)] if isinstance(plan.task, ClassCodes) else pairs


def _is_unreadable(plan: ComparisonPlan, record: Record) -> bool:
    """Whether a record depends on an eraser, head or metric whose code cannot be read."""
    used = [e for e in plan.erasers if e.name == record.eraser]
    if record.head != ERASER_ROW:
        used += [*(h for h in plan.heads if h.name == record.head), *plan.metrics]
    return any(component.unreadable for component in used)


def _data_notes(
    plan: ComparisonPlan, splits: Mapping[JobId, Split], *, resumable: bool
) -> list[str]:
    """Return notes on the data and on the splits; issue the notes on the data as warnings, too."""
    notes = list(plan.notes)
    if resumable:
        notes += [
            f"{component.name} is computed again in every run, because changes of its code or "
            f"variables cannot be detected: {component.unreadable}"
            for component in (*plan.erasers, *plan.heads, *plan.metrics) if component.unreadable
        ]  # fmt: skip
    n = len(plan.usable)
    missing = n - int(plan.usable.sum())
    if missing:
        text = f"{missing:,} of {n:,} rows lack a label and were left out"
        first = next(iter(splits.values()))
        if plan.unlabelled:
            n_unlabelled = len(plan.moment_rows(first)[0]) - len(first.train)
            text += f"; {n_unlabelled:,} of these rows count in the moments"
        notes.append(text)
    hashes = (hash(row.tobytes()) for _, rows in blocks(plan.X) for row in rows)
    row_hash = np.fromiter(hashes, dtype=np.int64, count=len(plan.X))
    n_duplicates = max(
        int(np.isin(row_hash[split.test], row_hash[plan.moment_rows(split)[0]]).sum())
        for split in splits.values()
    )
    if n_duplicates:
        notes.append(
            f"up to {n_duplicates:,} test rows of a split equal training rows of the split: remove "
            "the duplicates, or keep them in one part with groups="
        )
    for note in notes:
        warn(note, SplinceWarning)
    adjustments = dict.fromkeys(note for split in splits.values() for note in split.notes)
    return [*notes, *adjustments, *_unused_rows_note(plan, splits), *_weight_notes(splits)]


def _unused_rows_note(plan: ComparisonPlan, splits: Mapping[JobId, Split]) -> list[str]:
    """Note on the number of rows that subsampling to the association levels leaves unused.

    The list is empty if all rows are used, `sizes` were passed, or the plan notes a size limit.
    """
    used, n = max(sum(split.sizes) for split in splits.values()), int(plan.usable.sum())
    subsampled = plan.protocol is not None and plan.association_method == "subsample"
    if not subsampled or plan.max_rows is None or plan.notes or used == n:
        return []
    return [
        f"{used:,} of {n:,} rows are used: with more rows, the cells of task and concept could not "
        "have their fractions at every association level"
    ]


def _weight_notes(splits: Mapping[JobId, Split]) -> list[str]:
    """Note on the largest and smallest effective number of training rows over all splits.

    The list is empty if rows have no weights.
    """
    sums = [(float(s.weights.sum()), s) for s in splits.values() if s.weights is not None]
    if not sums:
        return []
    extremes = dict.fromkeys(extreme(sums, key=lambda pair: pair[0]) for extreme in (max, min))
    text = " and ".join(
        f"{weight:,.0f} of {len(split.train):,} at p = {split.p:g}" for weight, split in extremes
    )
    return [f"the effective number of training rows, (sum w)^2 / sum w^2 with weights w, is {text}"]


def _context(plan: ComparisonPlan, splits: Mapping[JobId, Split], notes: list[str]) -> Context:
    """Settings and data of the comparison, for the result."""
    first = next(iter(splits.values()))
    test_labels = None
    if plan.test is not None and isinstance(plan.task, ClassCodes):
        test_labels = plan.test_labels(first.test)
    aligned = None if plan.protocol is None else plan.protocol.aligned_class
    if isinstance(aligned, dict):
        aligned = ", ".join(f"{a} to {b}" for a, b in aligned.items())
    test_rows = {job: np.sort(split.test) for job, split in splits.items()}
    same_test = all(
        np.array_equal(rows, test_rows[seed, plan.levels[0]])
        for (seed, _), rows in test_rows.items()
    )
    return Context(
        n=len(plan.usable), d=int(plan.X.shape[1]), erasers=tuple(e.name for e in plan.erasers),
        heads=tuple(h.name for h in plan.heads), levels=plan.levels, seeds=plan.seeds,
        sizes=first.sizes, aligned_class="" if aligned is None else str(aligned),
        association_method=plan.association_method, alphas=plan.alphas,
        select=plan.select, probes=plan.probes, concepts=tuple(plan.concepts),
        cells=() if plan.cells is None else texts_of(plan.cells.classes),
        fingerprint=plan.fingerprint, version=library_version(),
        notes=tuple(notes), test_labels=test_labels,
        eraser_roles=tuple(e.role for e in plan.erasers),
        head_roles=tuple(h.role for h in plan.heads),
        custom_metrics={
            m.name: CustomMetric(m.spec.label, m.spec.lower_is_better) for m in plan.metrics
        },
        same_test=same_test,
        concept_sizes=tuple(
            len(concept.classes) if isinstance(concept, ClassCodes) else 0
            for concept in plan.concepts.values()
        ),
    )  # fmt: skip


# -- processes, with one BLAS thread each -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worker:
    """Runner of jobs in the calling process or in worker processes; pickled with every call.

    `rows` is an array, or the path of a .npy file to memory-map. `own_process` is True if jobs run
    in worker processes.
    """

    plan: ComparisonPlan
    rows: Any
    scratch: Path
    own_process: bool

    def make_moments(self, seed: int, splits: Sequence[Split]) -> None:
        """Compute the moments of a seed at every level, in one pass over the rows; save them."""
        plan = self.plan
        with self._one_thread():
            parts = [plan.moment_rows(split) for split in splits]
            moments = level_moments(self._rows(), plan.variables, parts)
            for p, level in zip(plan.levels, moments, strict=True):
                level.save(self._path(seed, p))

    def run_job(
        self, seed: int, p: float | None, split: Split, erasers: Sequence[Component]
    ) -> list[Record]:
        """Run the job of a seed and level; return the records of the erasers."""
        with self._one_thread():
            moments = Moments.load(self._path(seed, p))
            return Job(self.plan, self._rows(), seed, p, split, moments).run(erasers)

    def _path(self, seed: int, p: float | None) -> Path:
        return self.scratch / f"{seed}-{p}.safetensors"

    def _rows(self) -> NDArray[np.generic]:
        rows = self.rows
        return np.load(rows, mmap_mode="r") if isinstance(rows, str) else np.asarray(rows)

    def _one_thread(self) -> AbstractContextManager[object]:
        """Limit BLAS to one thread; in a worker process, limit the library's kernels, too."""
        from threadpoolctl import threadpool_limits

        if self.own_process:
            os.environ["SPLINCE_FAST_NUM_THREADS"] = "1"
        limits: AbstractContextManager[object] = threadpool_limits(1)
        return limits


def _run_jobs(
    plan: ComparisonPlan,
    splits: Mapping[JobId, Split],
    pending: Mapping[JobId, list[Component]],
    workers: int,
    scratch: Path,
) -> Iterator[list[Record]]:
    """Compute all moments, then run the jobs; yield the records of each job as it ends."""
    if not pending:
        return
    joblib: Any = import_module("joblib")
    loky: Any = import_module("joblib.externals.loky.process_executor")
    worker = Worker(plan, plan.X, scratch, own_process=False)
    if workers > 1:
        rows = _on_disk(plan.X, scratch)
        worker = Worker(dataclasses.replace(plan, X=None), rows, scratch, own_process=True)

    def parallel(calls: Iterator[object]) -> Iterator[Any]:
        results: Iterator[object] = joblib.Parallel(workers, return_as="generator_unordered")(calls)
        return results

    seeds = dict.fromkeys(seed for seed, _ in pending)
    levels = {seed: [splits[seed, p] for p in plan.levels] for seed in seeds}
    list(parallel(joblib.delayed(worker.make_moments)(seed, levels[seed]) for seed in seeds))
    remaining = dict(pending)
    for one_by_one in (False, True):
        # If a worker died, the remaining jobs run one at a time.
        for batch in [[job] for job in remaining] if one_by_one else [list(remaining)]:
            calls = (joblib.delayed(worker.run_job)(*j, splits[j], remaining[j]) for j in batch)
            try:
                for records in parallel(calls):
                    del remaining[records[0].seed, records[0].p]
                    yield records
            except loky.TerminatedWorkerError as error:
                if one_by_one:
                    reason = f"the worker process died twice, perhaps for lack of memory ({error})"
                    job = batch[0]
                    yield _failed(plan, job, splits[job], remaining.pop(job), reason)
        if not remaining:
            return


def _failed(
    plan: ComparisonPlan, job: JobId, split: Split, erasers: Sequence[Component], reason: str
) -> list[Record]:
    """Return the records of a job that could not be run; they hold the reason."""
    return [
        Record(*job, split.sizes, eraser.name, head, reason=reason)
        for eraser, head in _pairs(plan) if eraser in erasers
    ]  # fmt: skip


def _on_disk(X: NDArray[np.generic], scratch: Path) -> str:
    """Return the path of a .npy file of the rows, which workers memory-map; write it if needed."""
    # The file of a copy-on-write map (mode "c") lacks the changes made in memory.
    if isinstance(X, np.memmap) and X.mode != "c" and X.flags.c_contiguous:
        name = str(X.filename)
        if name.endswith(".npy") and np.load(name, mmap_mode="r").shape == X.shape:
            return name
    path = scratch / "rows.npy"
    np.save(path, X)
    return str(path)


def workers_of(n_jobs: int | None) -> int:
    """Return the number of processes for `n_jobs`; raise InputError for an invalid value."""
    if n_jobs is None:
        return 1
    if not is_integer(n_jobs) or n_jobs == 0:
        raise InputError(f"n_jobs is {n_jobs!r}; pass a number of processes, or -1 for all")
    joblib: Any = import_module("joblib")
    return int(joblib.effective_n_jobs(n_jobs))
