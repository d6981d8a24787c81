"""Judging heads: figures on test rows, and the choice of alpha without validation rows."""

from __future__ import annotations

import base64
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import _linear, _logistic
from splince_fast.evaluation.scoring import (
    OF_CLASSES,
    OF_QUANTITIES,
    Decisions,
    Predictions,
    scores,
)
from splince_fast.exceptions import LabelError, NotEnoughDataError, SplinceError
from splince_fast.labels import ClassCodes, Columns, names_array

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
    train = job.strata(job.split.train)
    counts = np.bincount(job.strata(job.split.validation), minlength=int(train.max(initial=-1)) + 1)
    return bool((counts[np.unique(train)] < _linear.MIN_CELL).any())


def judged_by_folds(job: Job, how: _erasers.Map, notes: list[str]) -> list[tuple[float, float]]:
    """(worst group, accuracy) of every alpha over leave-out folds of the training rows."""
    truth, cells = job.task(job.split.train), job.cells(job.split.train)
    present, local = job.classes()
    n, alphas = len(local), job.plan.alphas
    members = None if job.plan.groups is None else job.plan.groups[job.split.train]
    fold = dealt(job.strata(job.split.train), members, job.seed)
    whole = [f for f in range(FOLDS) if len(np.unique(local[fold != f])) == len(present)]
    if not whole:
        counts = np.bincount(local).tolist()
        raise LabelError(
            f"no fold of the training rows has every class; the classes have {counts} rows"
        )
    if len(whole) < FOLDS:
        notes.append(f"{FOLDS - len(whole)} folds lack a class and were left out")
    J = len(alphas)
    mass = np.ones(n) if job.split.weights is None else job.split.weights
    inside = np.stack([(fold != f) * mass for f in whole for _ in alphas], 1)
    weights = inside / inside.sum(axis=0)
    fits = _logistic.fit(
        job.train, local, len(present), np.tile(np.array(alphas), len(whole)),
        sample_weights=weights, factors=how.factors, gram=job.gram(),
    )  # fmt: skip
    held = np.isin(fold, whole)
    judged = []
    for j in range(J):
        decided = np.zeros(n, dtype=np.intp)
        for i, f in enumerate(whole):
            of = fold == f
            k = i * J + j
            found = job.scores(job.train[of], fits.weights[k], fits.intercepts[k], how)
            decided[of] = decided_by(found, present)
        judged.append(_linear.score(truth[held], decided[held], cells[held], mass[held]))
    return judged


def dealt(cells: Codes, groups: Codes | None, seed: int) -> Codes:
    """The fold of each row: those of a cell are dealt evenly, and groups stay whole.

    A row without a group, of code -1, is a group of its own.

    Raises
    ------
    NotEnoughDataError
        There are fewer groups than folds.
    """
    n = len(cells)
    fold = np.empty(n, dtype=np.intp)
    if groups is None:
        order = np.random.default_rng(seed).permutation(n)
        order = order[np.argsort(cells[order], kind="stable")]
        fold[order] = np.arange(n) % FOLDS
        return fold
    from sklearn.model_selection import StratifiedGroupKFold

    alone = groups < 0
    members = np.where(alone, groups.max(initial=-1) + 1 + np.cumsum(alone), groups)
    found = len(np.unique(members))
    if found < FOLDS:
        raise NotEnoughDataError(
            f"the training rows have {found} groups, and {FOLDS} folds of whole groups are to "
            "choose alpha; pass one, or validation rows of at least "
            f"{_linear.MIN_CELL} per cell"
        )
    splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of cells smaller than the folds
        for f, (_, held) in enumerate(splitter.split(cells[:, None], cells, members)):
            fold[held] = f
    return fold


def truth_of(job: Job) -> tuple[Decisions, str]:
    """The task, cells and concept of the test rows, nothing decided yet; and a note, or ""."""
    rows, plan = job.split.test, job.plan
    codes, concept = job.task(rows), plan.concept_codes
    known = np.unique(job.task(job.split.train))
    unseen = int((~np.isin(codes, known)).sum())
    note = (
        f"{unseen} test rows have classes of the task unseen in training: they count as errors"
        if unseen else ""
    )  # fmt: skip
    judged = plan.cells is not None and concept is not None
    return Decisions(
        codes,
        np.full(len(codes), -1),
        len(plan.task.classes) if isinstance(plan.task, ClassCodes) else 0,
        job.cells(rows) if judged else None,
        concept.codes[rows] if judged and concept is not None else None,
        len(concept.names) if concept is not None else 0,
    ), note


def with_values(job: Job, record: Record, decided: Any) -> Record:
    """A record with the metrics of decisions on the test rows."""
    if isinstance(job.plan.task, Columns):
        rows = job.split.test
        predicted = np.asarray(decided, dtype=np.float64).reshape(len(rows), -1)
        found = Predictions(job.task(rows), predicted, job.single_concept(rows))
        record["values"] = scores(OF_QUANTITIES, found)
        _add_own(job, record, _column(found.truth), _column(predicted))
        return record
    if job.truth is None:
        job.truth = truth_of(job)
    truth, note = job.truth
    judged = dataclasses.replace(truth, decided=decided)
    record["values"] = scores(OF_CLASSES, judged)
    if judged.cells is not None:
        found_cells = judged.counted(judged.cells)
        record["cells"] = [list(map(int, cell)) for cell in zip(*found_cells, strict=True)]
    if job.plan.metrics:
        names = names_array(job.plan.task.classes)
        _add_own(job, record, names[truth.truth], names[decided])
    if note:
        record["notes"].append(note)
    if (decided == decided[0]).all():
        record["notes"].append(
            "the head decides the same class everywhere, so its worst group has accuracy 0"
        )
    if job.plan.test is not None:
        record["decided"] = base64.b64encode(decided.astype("<u2").tobytes()).decode()
    return record


def _add_own(job: Job, record: Record, truth: Any, decided: Any) -> None:
    """The caller's own metrics; one that fails is a reason beside the other values."""
    for named in job.plan.metrics:
        try:
            record["values"][named.name] = float(named.what.score(truth, decided))
        except Exception as error:
            record["reason"] = f"metric {named.name!r}: {reason_of(error)}"


def _column(values: Float) -> Float:
    """(n,) where there is one column."""
    return values[:, 0] if values.shape[1] == 1 else values


def reason_of(error: Exception) -> str:
    """Why something failed; the type's name where the text is not ours."""
    return str(error) if isinstance(error, SplinceError) else f"{type(error).__name__}: {error}"
