"""compare: erasers x heads x association levels x seeds, in processes and resumable."""

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
from splince_fast.evaluation._cells import texts_of
from splince_fast.evaluation._data import blocks, level_moments
from splince_fast.evaluation._identity import key
from splince_fast.evaluation._job import Job
from splince_fast.evaluation._records import (
    ADVICE,
    ERASER_ROW,
    Context,
    Journal,
    OwnMetric,
    Record,
    RecordId,
)
from splince_fast.evaluation.heads import ALPHAS
from splince_fast.evaluation.plan import ComparisonPlan, Component, Settings, make_plan
from splince_fast.evaluation.result import Comparison
from splince_fast.evaluation.splits import Split
from splince_fast.exceptions import InputError, SplinceWarning
from splince_fast.labels import ClassCodes
from splince_fast.moments import Moments

JobId = tuple[int, float | None]  # seed and level
_ADVISER = Component(ADVICE, None, "advice")
_LAYOUT = 3  # of the records; those of another layout are computed again


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

    For every seed and level of association the rows are split, moments are merged from pieces
    that were accumulated once per seed, every eraser is made from the same moments, heads are
    fitted on erased training rows and scored on erased test rows, and probes look for the concept
    in the test rows, which no eraser has seen. The figures are the same for any `n_jobs`, in any
    order, interrupted or not.

    Parameters
    ----------
    X : array-like of shape (n, d), or path
        Embeddings: array, memory map, torch tensor, frame, a .npy file, a .parquet file with the
        column "embedding", or a source, such as :func:`splince_fast.sources.from_parquet` of
        another column. Maps and files are read block by block; a job holds its own rows, in
        float64.
    task, concept : column of shape (n,)
        Labels of any kind. Several concepts as a mapping, frame or tuple of columns are erased
        jointly. Floats are a quantity; the association protocol needs classes.
    groups : column of shape (n,), optional
        Rows of one group (a person, a document) stay in one part and in one fold, those that
        choose alpha included; with `test` a group in several parts is an error.
    erasers : sequence or mapping
        Of "none", "SAL", "LEACE", "SPLINCE", "MeanProjection", "random", "INLP", "RLACE", and
        "SAL+repair", "INLP+repair", "RLACE+repair", which keep the task by
        :func:`splince_fast.repair` of the training rows; "LEACE*0.9" (any of them and a number) is
        the partial eraser :meth:`Projection.scaled`, from whose rows a linear probe still reads the
        concept; estimators with a ``projection_``, fitted
        on copies of the centred and scaled training and validation rows; or functions from
        :class:`Moments` of the training rows, with the variables "task" ("kept task" where a
        concept is named "task") and "concept" (or the names of several), to a :class:`Projection`
        or :class:`ConditionalEraser`. A mapping names them. Estimators get a mapping of columns
        where there are both classes and quantities among several concepts.

        "quadratic" and "isotropic" are :func:`splince_fast.quadratic` and ``isotropic`` of two
        folds of the training rows, for one concept of classes; both keep the task. "oracle"
        (:func:`splince_fast.oracle`, which keeps the task) and "quadratic" erase training,
        validation and test rows with the concept's label of each row, so that their figures hold
        only where every later row has its label; a note of the result says so.
    heads : sequence or mapping
        Of "retrained" (refitted after erasing, its alpha selected), "frozen" (that of the
        unerased rows), "unregularised"; or classifiers, fitted on erased rows.
    association : float or sequence of float, optional
        Levels p of :func:`spurious_split`; None is the natural split.
    aligned_class, sizes
        As for :func:`spurious_split`; the default sizes are the largest feasible at all levels.
        Without `sizes` a job holds at most 512 MiB of rows, drawn at random where there are more.
    association_method : {"subsample", "weights"}
        How training and validation rows reach an association, as for :func:`spurious_split`:
        cells lose rows, or all rows stay and moments, heads and the choice of alpha weigh
        them. Test rows are the same for both. Estimators and classifiers get ``sample_weight``.
    unlabelled : bool
        Let training rows that have the concept and lack the task count for the moments, thus for
        Cov(x) and for the covariance with the concept; heads and probes never see them.
    n_seeds, random_state : int
        The seeds are random_state, random_state + 1, ...
    alphas : sequence of float
        Penalties to choose from; every point is kept.
    select : {"worst_group", "accuracy"}
        Score of the validation rows that chooses alpha, the same for every eraser.
    leakage : sequence of {"linear", "quadratic", "mlp", "boosting"}
        Probes for the concept on erased test rows; a quantity has the linear one alone.
    metrics : mapping of str to function or Metric, optional
        Further metrics of (y_true, y_pred). A :class:`Metric` says in which direction it is
        better; a function alone is shown without a best eraser and without a star.
    test : column of shape (n,), optional
        A split of your own, instead of resampling: a mask of test rows, or the names "train",
        "validation", "test". Pass ``n_seeds=1``; intervals are then of a bootstrap.
    n_jobs : int, optional
        Processes, each with one BLAS thread; -1 is one per processor.
    run : path, optional
        A folder in which every finished cell is kept: a run that was stopped goes on from there.
        A cell counts as finished while the data, settings, code and values that it depends on
        are the same, globals and closures of functions included; functions of which these cannot
        be read are named in a warning and computed again.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.
    strict : bool
        Raise where an eraser, head or metric fails, instead of keeping the reason as a row.

    Returns
    -------
    Comparison
        Tables, differences with tests, figures and a report.

    Raises
    ------
    InputError, LabelError, NonFiniteError, NotEnoughDataError
        Before anything runs; or at a failing cell where `strict` is set.

    Warns
    -----
    SplinceWarning
        Test rows also occur among training rows; rows lack labels, or are more than a job holds;
        cells cannot be reused.

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
    components = {e.name: e for e in (*plan.erasers, _ADVISER)}
    for cell, cell_key in keys.items():
        if cell_key not in journal.records:
            erasers = pending.setdefault((cell.seed, cell.p), [])
            # An eraser with a missing record runs again with all heads.
            if components[cell.eraser] not in erasers:
                erasers.append(components[cell.eraser])
    records = {cell: journal.records[k] for cell, k in keys.items() if k in journal.records}
    with tempfile.TemporaryDirectory(prefix="splince-fast-") as scratch, ExitStack() as stack:
        bar = stack.enter_context(Progress(len(pending), show=progress, unit="jobs"))
        for job_records in _run_jobs(plan, splits, pending, workers, Path(scratch)):
            journal.add({keys[r.id]: r for r in job_records if not _is_unread(plan, r)})
            records |= {r.id: r for r in job_records}
            failed = [r for r in job_records if r.reason and r.eraser != ADVICE]
            if strict and failed:
                raise InputError(f"{failed[0].eraser} {failed[0].head}: {failed[0].reason}")
            bar.advance(1)
    return Comparison([records[cell] for cell in keys], _context(plan, splits, notes))


def _keys(plan: ComparisonPlan, splits: Mapping[JobId, Split]) -> dict[RecordId, str]:
    """Hash of all that a record depends on, for every record in its order."""
    heads = {head.name: head.identity for head in plan.heads}
    metrics = {metric.name: metric.identity for metric in plan.metrics}
    keys = {}
    for (seed, p), split in splits.items():
        for eraser, head in _pairs(plan):
            of_head = head != ERASER_ROW
            keys[RecordId(seed, p, eraser.name, head)] = key(
                layout=_LAYOUT,
                data=plan.fingerprint,
                version=library_version(),
                seed=seed,
                p=p,
                sizes=split.sizes,
                aligned_class=repr(split.aligned_class),
                association_method=plan.association_method,
                unlabelled=plan.unlabelled,
                eraser=(eraser.name, eraser.identity),
                head=(head, heads.get(head, "")),
                alphas=plan.alphas if of_head else (),
                select=plan.select if of_head else "",
                probes=() if of_head else plan.probes,
                metrics=metrics if of_head else {},
            )
    return keys


def _pairs(plan: ComparisonPlan) -> list[tuple[Component, str]]:
    """(eraser, head) of every record of a job, the eraser's own first."""
    pairs = [(e, h) for e in plan.erasers for h in (ERASER_ROW, *(h.name for h in plan.heads))]
    return [*pairs, (_ADVISER, ERASER_ROW)] if isinstance(plan.task, ClassCodes) else pairs


def _is_unread(plan: ComparisonPlan, record: Record) -> bool:
    """Whether a record depends on a component whose changes cannot be detected."""
    used = [e for e in plan.erasers if e.name == record.eraser]
    if record.head != ERASER_ROW:
        used += [*(h for h in plan.heads if h.name == record.head), *plan.metrics]
    return any(component.unread for component in used)


def _data_notes(
    plan: ComparisonPlan, splits: Mapping[JobId, Split], *, resumable: bool
) -> list[str]:
    """Notes on the data, which are also warnings, and on the splits."""
    notes = list(plan.notes)
    if resumable:
        notes += [
            f"{component.name} is computed again in every run, because its changes cannot be "
            f"seen: {component.unread}"
            for component in (*plan.erasers, *plan.heads, *plan.metrics) if component.unread
        ]  # fmt: skip
    n = len(plan.usable)
    missing = n - int(plan.usable.sum())
    if missing:
        text = f"{missing:,} of {n:,} rows lack a label and were left out"
        first = next(iter(splits.values()))
        if plan.unlabelled:
            more = len(plan.moment_rows(first)[0]) - len(first.train)
            text += f", but for the moments, in which {more:,} of them count"
        notes.append(text)
    hashes = (hash(row.tobytes()) for _, rows in blocks(plan.X) for row in rows)
    row_hash = np.fromiter(hashes, dtype=np.int64, count=len(plan.X))  # equal rows, equal hashes
    shared = max(
        int(np.isin(row_hash[split.test], row_hash[plan.moment_rows(split)[0]]).sum())
        for split in splits.values()
    )
    if shared:
        notes.append(
            f"up to {shared:,} test rows of a split occur among its training rows, too: remove "
            "duplicates, or keep them together with groups="
        )
    for note in notes:
        warn(note, SplinceWarning)
    adjustments = dict.fromkeys(note for split in splits.values() for note in split.notes)
    return [*notes, *adjustments, *_unused_rows_note(plan, splits), *_weight_notes(splits)]


def _unused_rows_note(plan: ComparisonPlan, splits: Mapping[JobId, Split]) -> list[str]:
    """Note on the rows that the subsamples of association levels leave out; none with `sizes`."""
    used, n = max(sum(split.sizes) for split in splits.values()), int(plan.usable.sum())
    subsampled = plan.protocol is not None and plan.association_method == "subsample"
    if not subsampled or plan.max_rows is None or plan.notes or used == n:
        return []
    return [
        f"{used:,} of {n:,} rows are used: more would not give every cell of task and concept its "
        "fraction at each level of association"
    ]


def _weight_notes(splits: Mapping[JobId, Split]) -> list[str]:
    """Effective numbers of weighted training rows: the largest and the smallest of all splits."""
    sums = [(float(s.weights.sum()), s) for s in splits.values() if s.weights is not None]
    if not sums:
        return []
    extremes = dict.fromkeys(choose(sums, key=lambda pair: pair[0]) for choose in (max, min))
    text = " and ".join(
        f"{weight:,.0f} of {len(split.train):,} at p = {split.p:g}" for weight, split in extremes
    )
    return [
        f"the weighted training rows are worth {text}: (sum w)^2 / sum w^2 rows of equal weight"
    ]


def _context(plan: ComparisonPlan, splits: Mapping[JobId, Split], notes: list[str]) -> Context:
    """The context of the result."""
    first = next(iter(splits.values()))
    truth = None
    if plan.test is not None and isinstance(plan.task, ClassCodes):
        truth = plan.test_labels(first.test)
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
        notes=tuple(notes), truth=truth,
        eraser_roles=tuple(e.role for e in plan.erasers),
        head_roles=tuple(h.role for h in plan.heads),
        own_metrics={
            m.name: OwnMetric(m.spec.label, m.spec.lower_is_better) for m in plan.metrics
        },
        same_test=same_test,
    )  # fmt: skip


# -- jobs in processes of one BLAS thread each ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worker:
    """Runs jobs in this process or another one; it is pickled with every call.

    `rows` are an array, or the path of a .npy file that the process maps; `own_process` is False
    in the process of the caller.
    """

    plan: ComparisonPlan
    rows: Any
    scratch: Path
    own_process: bool

    def make_moments(self, seed: int, splits: Sequence[Split]) -> None:
        """Accumulate the rows of a seed once, and write the moments of its levels."""
        plan = self.plan
        with self._one_thread():
            parts = [plan.moment_rows(split) for split in splits]
            moments = level_moments(self._rows(), plan.variables, parts)
            for p, level in zip(plan.levels, moments, strict=True):
                level.save(self._path(seed, p))

    def run_job(
        self, seed: int, p: float | None, split: Split, erasers: Sequence[Component]
    ) -> list[Record]:
        """Records of the erasers at a seed and level."""
        with self._one_thread():
            moments = Moments.load(self._path(seed, p))
            return Job(self.plan, self._rows(), seed, p, split, moments).run(erasers)

    def _path(self, seed: int, p: float | None) -> Path:
        return self.scratch / f"{seed}-{p}.safetensors"

    def _rows(self) -> NDArray[np.generic]:
        rows = self.rows
        return np.load(rows, mmap_mode="r") if isinstance(rows, str) else np.asarray(rows)

    def _one_thread(self) -> AbstractContextManager[object]:
        """Limit BLAS to one thread, and in a worker process also the library's kernels."""
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
    """Records of finished jobs, in any order: first the moments of each seed, then its levels."""
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
    left = dict(pending)
    for alone in (False, True):
        # After a worker has died, the other jobs run alone, one at a time.
        for batch in [[job] for job in left] if alone else [list(left)]:
            calls = (joblib.delayed(worker.run_job)(*j, splits[j], left[j]) for j in batch)
            try:
                for records in parallel(calls):
                    del left[records[0].seed, records[0].p]
                    yield records
            except loky.TerminatedWorkerError as error:
                if alone:
                    reason = f"the process died twice, perhaps for lack of memory ({error})"
                    yield _failed(plan, batch[0], splits[batch[0]], left.pop(batch[0]), reason)
        if not left:
            return


def _failed(
    plan: ComparisonPlan, job: JobId, split: Split, erasers: Sequence[Component], reason: str
) -> list[Record]:
    """Records of a job that could not be run."""
    return [
        Record(*job, split.sizes, eraser.name, head, reason=reason)
        for eraser, head in _pairs(plan) if eraser in erasers
    ]  # fmt: skip


def _on_disk(X: NDArray[np.generic], scratch: Path) -> str:
    """Path of a .npy file of the rows, which every worker maps."""
    if isinstance(X, np.memmap) and X.mode != "c" and X.flags.c_contiguous:
        name = str(X.filename)  # in mode "c" the file lacks the changes that were made to the map
        if name.endswith(".npy") and np.load(name, mmap_mode="r").shape == X.shape:
            return name
    path = scratch / "rows.npy"
    np.save(path, X)
    return str(path)


def workers_of(n_jobs: int | None) -> int:
    """Number of processes."""
    if n_jobs is None:
        return 1
    if not is_integer(n_jobs) or n_jobs == 0:
        raise InputError(f"n_jobs is {n_jobs!r}; pass a number of processes, or -1 for all")
    joblib: Any = import_module("joblib")
    return int(joblib.effective_n_jobs(n_jobs))
