"""Judging heads: figures on test rows, and the choice of a strength without validation rows."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import _linear, _logistic
from splince_fast.evaluation.metrics import average_gap, gap_per_class
from splince_fast.exceptions import LabelError
from splince_fast.labels import Columns

if TYPE_CHECKING:
    from splince_fast.evaluation import _erasers
    from splince_fast.evaluation._job import Job

Float = NDArray[np.float64]
Codes = NDArray[np.intp]
Record = dict[str, Any]

FOLDS = 5


def decided_by(scores: Float, present: Codes) -> Codes:
    """Codes of the task from (n, C) scores."""
    local = _linear.decide(scores[:, 0] if scores.shape[1] == 1 else scores)
    return np.asarray(present[local])


def few_validation_rows(job: Job) -> bool:
    """Whether a cell that occurs in training has fewer than five validation rows."""
    train = job.cells(job.split.train)
    counts = np.bincount(job.cells(job.split.validation), minlength=int(train.max(initial=-1)) + 1)
    return bool((counts[np.unique(train)] < _linear.MIN_CELL).any())


def judged_by_folds(job: Job, how: _erasers.Map, notes: list[str]) -> list[tuple[float, float]]:
    """(worst group, accuracy) of every strength over leave-out folds of the training rows."""
    truth, cells = job.task(job.split.train), job.cells(job.split.train)
    present, local = job.classes()
    n, strengths = len(local), job.plan.strengths
    fold = np.empty(n, dtype=np.intp)
    rng = np.random.default_rng(job.seed)
    order = rng.permutation(n)
    order = order[np.argsort(cells[order], kind="stable")]
    fold[order] = np.arange(n) % FOLDS
    whole = [f for f in range(FOLDS) if len(np.unique(local[fold != f])) == len(present)]
    if not whole:
        counts = np.bincount(local).tolist()
        raise LabelError(
            f"no fold of the training rows has every class; the classes have {counts} rows"
        )
    if len(whole) < FOLDS:
        notes.append(f"{FOLDS - len(whole)} folds lack a class and were left out")
    J = len(strengths)
    mass = np.ones(n) if job.split.weights is None else job.split.weights
    inside = np.stack([(fold != f) * mass for f in whole for _ in strengths], 1)
    weights = inside / inside.sum(axis=0)
    fits = _logistic.fit(
        job.train, local, len(present), np.tile(np.array(strengths), len(whole)),
        sample_weights=weights, factors=how.factors, gram=job.gram(),
    )  # fmt: skip
    held = np.isin(fold, whole)
    judged = []
    for j in range(J):
        decided = np.zeros(n, dtype=np.intp)
        for i, f in enumerate(whole):
            of = fold == f
            k = i * J + j
            scores = job.scores(job.train[of], fits.weights[k], fits.intercepts[k], how)
            decided[of] = decided_by(scores, present)
        judged.append(_linear.score(truth[held], decided[held], cells[held], mass[held]))
    return judged


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What every head of a job is judged by: the task of the test rows, and their cells."""

    codes: Codes
    class_counts: Codes
    inside: NDArray[np.bool_]  # rows in a cell
    cells: Codes  # of those rows
    cell_counts: Codes
    concept: Codes | None
    n_concepts: int
    unseen: int

    @classmethod
    def of(cls, job: Job, n_classes: int) -> Truth:
        """Read it once for all erasers and heads."""
        rows, plan = job.split.test, job.plan
        codes, cells = job.task(rows), job.cells(rows)
        inside = cells >= 0
        concept, names = plan.concept_codes, plan.cells
        judged = names is not None and concept is not None
        seen = np.zeros(max(codes.max(initial=0), job.task(job.split.train).max()) + 1, bool)
        seen[job.task(job.split.train)] = True
        return cls(
            codes,
            np.bincount(codes, minlength=n_classes),
            inside,
            cells[inside],
            np.bincount(cells[inside], minlength=len(names.names) if names is not None else 0),
            concept.codes[rows] if judged and concept is not None else None,
            len(concept.names) if concept is not None else 0,
            int((~seen[codes]).sum()),
        )


def with_values(job: Job, record: Record, decided: Any) -> Record:
    """A record with the figures of decisions on the test rows."""
    if isinstance(job.plan.task, Columns):
        rows = job.split.test
        return _quantity(job, record, job.task(rows), decided.reshape(len(rows), -1))
    classes = job.plan.task.classes
    if job.truth is None:
        job.truth = Truth.of(job, len(classes))
    truth = job.truth
    correct = decided == truth.codes
    values = {"accuracy": float(correct.mean())}
    counts, size = truth.class_counts, len(classes)
    right = np.bincount(truth.codes, correct, size)
    values["class_accuracy"] = float(np.mean(right[counts > 0] / counts[counts > 0]))
    if truth.concept is not None:
        there = truth.cell_counts
        hits = np.bincount(truth.cells, correct[truth.inside], len(there))
        present = np.flatnonzero(there)
        values["worst_group"] = float(np.min(hits[present] / there[present]))
        record["cells"] = [[int(c), int(there[c]), int(hits[c])] for c in present]
        gaps = gap_per_class(truth.codes, decided, truth.concept, size, truth.n_concepts)
        values["tpr_gap"] = average_gap(gaps, "rms")
    if job.plan.metrics:
        names = np.array(classes)
        for name, metric in job.plan.metrics.items():
            values[name] = float(metric(names[truth.codes], names[decided]))
    if truth.unseen:
        record["notes"].append(
            f"{truth.unseen} test rows have classes of the task unseen in training: they "
            "count as errors"
        )
    if (decided == decided[0]).all():
        record["notes"].append(
            "the head decides the same class everywhere, so its worst group has accuracy 0"
        )
    record["values"] = values
    if job.plan.test is not None:
        record["decided"] = base64.b64encode(decided.astype("<u2").tobytes()).decode()
    return record


def _quantity(job: Job, record: Record, truth: Float, predicted: Float) -> Record:
    """Figures of a head that predicts a quantity."""
    error = float(np.mean((truth - predicted) ** 2))
    spread = float(np.mean((truth - truth.mean(axis=0)) ** 2))
    record["values"] = {"mse": error, "r2": 1 - error / spread if spread else math.nan}
    concept = job.concept(job.split.test)
    z = np.asarray(concept, dtype=np.float64).reshape(len(truth), -1)[:, 0]
    if np.ptp(z) > 0 and np.ptp(predicted[:, 0]) > 0:
        record["values"]["concept_correlation"] = float(np.corrcoef(predicted[:, 0], z)[0, 1])
    return record
