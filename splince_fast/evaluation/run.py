"""Function compare: fit and score every eraser and head at every level and seed."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from splince_fast._runtime.arguments import library_version, warn
from splince_fast._runtime.progress import Progress
from splince_fast._solve.options import is_integer
from splince_fast.evaluation.data import blocks, texts_of
from splince_fast.evaluation.erasers import Component
from splince_fast.evaluation.heads import ALPHAS
from splince_fast.evaluation.job import Job
from splince_fast.evaluation.plan import ComparisonPlan, make_plan
from splince_fast.evaluation.records import ERASER_ROW, Context, Journal, Record, RecordId
from splince_fast.evaluation.result import Comparison
from splince_fast.evaluation.splits import Split
from splince_fast.exceptions import InputError, SplinceWarning
from splince_fast.labels import ClassCodes

JobId = tuple[int, float | None]  # seed and level
_LAYOUT = 6  # version of the record layout; records of another version are computed again
# A note is added where the lowest of the cells may lie this far from its accuracy by chance.
_NOISY_MINIMUM = 0.1


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
    n_seeds: int = 5,
    random_state: int = 0,
    alphas: Sequence[float] = ALPHAS,
    leakage: object = ("linear",),
    metrics: Mapping[str, object] | None = None,
    test: object = None,
    n_jobs: int | None = None,
    run: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Compare erasers on one data set: leakage, task accuracy and distortion, with intervals.

    For every seed and association level, erasers and heads are fitted to training rows, and heads
    are scored on erased test rows, within which probes for the concept are cross-validated. The
    values do not depend on `n_jobs`, on the order of the jobs, or on interruptions.

    Parameters
    ----------
    X : array-like of shape (n, d), or path
        Embeddings: an array, memory map, torch tensor, frame, .npy file or source. Memory maps and
        files are read in blocks.
    task, concept : column of shape (n,)
        Labels of any kind: classes, or a quantity if they are floats. Several concepts, passed as a
        mapping, frame or tuple of columns, are erased jointly.
    groups : column of shape (n,), optional
        Groups, such as persons. All rows of a group are in one part of a split and in one fold.
    erasers : sequence or mapping
        Names ("none", "SAL", "LEACE", "SPLINCE", "MeanProjection", "FairPCA", "INLP", "RLACE",
        "oracle", "quadratic", and "random", a random subspace of the dimension of the concepts),
        functions or transformers. The keys of a mapping replace the names in the result.
        A function takes the training rows and a dictionary of their labels, "task" ("kept task" if
        a concept has that name) and "concept" or the names of several, and returns a map of rows. A
        transformer has ``fit(X, task, concept=...)``; see docs/howto/compare.md.
    heads : sequence or mapping
        "retrained" (fitted on erased rows, with a selected alpha), "frozen" (fitted on unerased
        rows), "unregularised" (fitted on erased rows with alpha 0), or classifiers.
    association, aligned_class, sizes
        Levels p of :func:`spurious_split` with its other parameters, for classes; None is the
        natural split. The default sizes are the largest that are feasible at all levels.
    n_seeds, random_state : int
        The seeds are random_state, random_state + 1, ...
    alphas : sequence of float
        Candidate penalties of the head "retrained"; the best worst group of the validation rows,
        or mean squared error of a quantity, selects one. The result has its metrics at each.
    leakage : sequence or mapping
        Probes for the concept: "linear", or classifiers, whose metrics are named after them, such
        as "MLPClassifier_accuracy". A quantity has only "linear".
    metrics : mapping of str to function or Metric, optional
        Custom metrics: functions of (y_true, y_pred), or with a direction :class:`Metric`.
    test : column of shape (n,), optional
        A fixed split, with ``n_seeds=1`` and bootstrap intervals: a mask of test rows, or a column
        of the names "train", "validation" and "test".
    n_jobs : int, optional
        Number of processes, each with one BLAS thread; -1 means one per processor, None one.
    run : path, optional
        Folder of finished records, with which an interrupted run is continued. A record that
        depends on a function or an object of the caller is computed in every run.
    progress : bool, optional
        Show a progress bar on stderr; by default in a terminal or notebook, after two seconds.

    Returns
    -------
    Comparison
        The result, with tables, tests of differences, figures and a report.

    Raises
    ------
    InputError, LabelError, NonFiniteError, NotEnoughDataError
        Invalid arguments, before any job runs. An eraser, head or metric that fails later is a
        record with the reason.

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
    >>> result.mean("probe_accuracy", eraser="LEACE") < 0.6
    True
    """
    plan = make_plan(
        X, task=task, concept=concept, groups=groups, erasers=erasers, heads=heads,
        association=association, aligned_class=aligned_class, sizes=sizes, n_seeds=n_seeds,
        random_state=random_state, alphas=alphas, leakage=leakage, metrics=metrics,
        test=test,
    )  # fmt: skip
    if n_jobs is not None and (not is_integer(n_jobs) or n_jobs == 0):
        raise InputError(f"n_jobs is {n_jobs!r}; pass a number of processes, or -1 for all")
    joblib: Any = import_module("joblib")
    workers = 1 if n_jobs is None else joblib.effective_n_jobs(n_jobs)
    journal = Journal(run, plan.fingerprint)
    splits = {(seed, p): plan.split(seed, p) for seed in plan.seeds for p in plan.levels}
    notes = _data_notes(plan, splits)
    keys = _keys(plan, splits)
    records = {i: journal.records[k] for i, k in keys.items() if k in journal.records}
    # If one record of an eraser is missing, the eraser runs again with all heads.
    missing = {record_id[:3] for record_id in keys.keys() - records.keys()}
    pending = {
        job: [eraser for eraser in plan.erasers if (*job, eraser.name) in missing]
        for job in splits if any(job == record_id[:2] for record_id in missing)
    }  # fmt: skip
    # Workers memory-map large arrays of the plan.
    calls = (
        joblib.delayed(_run_job)(plan, job, splits[job], components, own_process=workers > 1)
        for job, components in pending.items()
    )
    with Progress(len(pending), show=progress, unit="jobs") as bar:
        for job_records in joblib.Parallel(workers, return_as="generator_unordered")(calls):
            journal.add({keys[r.id]: r for r in job_records if keys[r.id]})
            records |= {r.id: r for r in job_records}
            bar.advance(1)
    return Comparison([records[record_id] for record_id in keys], _context(plan, splits, notes))


def _keys(plan: ComparisonPlan, splits: Mapping[JobId, Split]) -> dict[RecordId, str]:
    """Return the hash of each record's inputs; "" if an object of the caller is among them."""
    keys = {}
    heads = (Component(ERASER_ROW, "eraser"), *plan.heads)
    for ((seed, p), split), eraser, head in product(splits.items(), plan.erasers, heads):
        is_head = head.name != ERASER_ROW
        used = [eraser, head, *(() if is_head else plan.probes)]
        settings = (
            _LAYOUT, plan.fingerprint, library_version(), seed, p, split.sizes, split.aligned_class,
            [(c.name, c.role) for c in used], plan.alphas if is_head else (),
        )  # fmt: skip
        key = hashlib.sha256(repr(settings).encode()).hexdigest()[:20]
        known = all(c.role for c in used) and not (is_head and plan.metrics)
        keys[seed, p, eraser.name, head.name] = key if known else ""
    return keys


def _data_notes(plan: ComparisonPlan, splits: Mapping[JobId, Split]) -> list[str]:
    """Return notes on the data and on the splits; issue the notes on the data as warnings, too."""
    notes = list(plan.notes)
    n, n_usable = len(plan.usable), int(plan.usable.sum())
    if n_usable < n:
        notes.append(f"{n - n_usable:,} of {n:,} rows lack a label and were left out")
    hashes = (hash(row.tobytes()) for rows in blocks(plan.X) for row in rows)
    row_hash = np.fromiter(hashes, dtype=np.int64, count=n)
    n_duplicates = max(
        int(np.isin(row_hash[split.test], row_hash[split.train]).sum()) for split in splits.values()
    )
    if n_duplicates:
        notes.append(
            f"up to {n_duplicates:,} test rows of a split equal training rows of the split: remove "
            "the duplicates, or keep them in one part with groups="
        )
    for note in notes:
        warn(note, SplinceWarning)
    notes += dict.fromkeys(note for split in splits.values() for note in split.notes)
    return [*notes, *_minimum_note(plan, splits)]


def _minimum_note(plan: ComparisonPlan, splits: Mapping[JobId, Split]) -> list[str]:
    """Note on the bias of the worst group, the minimum of the accuracies of many small cells."""
    # By Hoeffding's lemma, the expected minimum of the errors of k means of n values in [0, 1] is
    # at least -sqrt(log k / (2 n)).
    if plan.cells is None:
        return []
    tests = (plan.cells.codes[split.test] for split in splits.values())
    counts = [np.unique(codes, return_counts=True)[1] for codes in tests]
    bound, k, n = max(
        (math.sqrt(math.log(len(c)) / (2 * c.min())), len(c), c.min()) for c in counts
    )
    text = (
        f"the worst group is the lowest of {k} cells, the smallest of {n} test rows: chance alone "
        f"lowers it by up to {bound:.2f}, and hides differences between erasers"
    )
    return [text] if bound > _NOISY_MINIMUM else []


def _context(plan: ComparisonPlan, splits: Mapping[JobId, Split], notes: list[str]) -> Context:
    """Settings and data of the comparison, for the result."""
    first = next(iter(splits.values()))
    has_labels = plan.test is not None and isinstance(plan.task, ClassCodes)
    aligned = None if plan.protocol is None else plan.protocol.aligned_class
    if isinstance(aligned, dict):
        aligned = ", ".join(f"{a} to {b}" for a, b in aligned.items())
    return Context(
        n=len(plan.usable), d=int(plan.X.shape[1]), erasers=tuple(e.name for e in plan.erasers),
        heads=tuple(h.name for h in plan.heads), levels=plan.levels, seeds=plan.seeds,
        sizes=first.sizes, aligned_class="" if aligned is None else str(aligned),
        alphas=plan.alphas, probes=tuple(probe.name for probe in plan.probes),
        concepts=tuple(plan.concepts),
        cells=() if plan.cells is None else texts_of(plan.cells.classes),
        fingerprint=plan.fingerprint, notes=tuple(notes),
        test_labels=plan.codes(first.test) if has_labels else None,
        eraser_roles=tuple(e.role for e in plan.erasers),
        head_roles=tuple(h.role for h in plan.heads),
        custom_metrics={k: (m.label, m.lower_is_better) for k, m in plan.metrics.items()},
    )  # fmt: skip


def _run_job(
    plan: ComparisonPlan, job: JobId, split: Split, erasers: Sequence[Component], *,
    own_process: bool,
) -> list[Record]:  # fmt: skip
    """Run the job of a seed and level with one BLAS thread; return the records of the erasers."""
    from threadpoolctl import threadpool_limits

    if own_process:  # one thread of the library's kernels, too
        os.environ["SPLINCE_FAST_NUM_THREADS"] = "1"
    with threadpool_limits(1):
        return Job(plan, *job, split).run(erasers)
