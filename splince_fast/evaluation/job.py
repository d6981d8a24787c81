"""One job of a comparison: all erasers and heads at one seed and association level."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.names import listed
from splince_fast.conditional import NEEDS_LABELS
from splince_fast.evaluation import heads, probes
from splince_fast.evaluation.data import Codes, Float, fill_missing_groups, values_of
from splince_fast.evaluation.erasers import (
    Component,
    FitData,
    ScaledCoordinates,
    clone_with_seed,
    fit_eraser,
)
from splince_fast.evaluation.heads import Head
from splince_fast.evaluation.metrics import (
    OF_CLASSES,
    add_scores,
    as_codes,
    as_quantities,
    concept_key,
    erasure_scores,
    reason_of,
    scores,
)
from splince_fast.evaluation.plan import ComparisonPlan
from splince_fast.evaluation.probes import FOLDS
from splince_fast.evaluation.records import ERASER_ROW, Record
from splince_fast.evaluation.splits import Split
from splince_fast.exceptions import LabelError, NotEnoughDataError, SplinceWarning
from splince_fast.labels import ClassCodes, Columns
from splince_fast.moments import Moments

# An erased feature counts as constant if its standard deviation is below this fraction of the root
# mean variance of the unerased features.
ROUNDING = 2.0**-32
_SELECTION = {key: OF_CLASSES[key] for key in ("worst_group", "accuracy")}  # they select alpha


class ErasedRows(NamedTuple):
    """Scaled rows of all parts after an eraser."""

    train: Float
    validation: Float
    test: Float


# Heads at all alphas, in descending order, the index of the selected one, and notes.
HeadPath = tuple[list[Head], int, tuple[str, ...]]


class Job:
    """Rows of a split, with labels and moments, at one seed and association level."""

    def __init__(self, plan: ComparisonPlan, seed: int, p: float | None, split: Split) -> None:
        self.plan, self.seed, self.p, self.split = plan, seed, p, split
        parts = [plan.part(rows) for rows in (split.train, split.validation, split.test)]
        moments = Moments().update(parts[0].rows, dict(parts[0].labels))
        S = moments.covariance(ddof=0)  # Cov(x) of unscaled rows, (d, d)
        scale = math.sqrt(float(np.trace(S)) / len(S)) or 1.0
        coordinates = ScaledCoordinates(moments.mean, scale)
        for part in parts:
            part.rows[:] = coordinates.to_scaled(part.rows)
        self.train, self.validation, self.test = parts
        self.data = FitData(
            moments.factored(), tuple(plan.concepts), plan.task_name, self.train, self.validation,
            seed, coordinates,
        )  # fmt: skip
        self.unerased = ErasedRows(self.train.rows, self.validation.rows, self.test.rows)
        if isinstance(plan.task, ClassCodes):
            # Class codes that occur in the training rows, and the index of each training row.
            self.classes, self.class_index = np.unique(self.train.codes.task, return_inverse=True)

    @cached_property
    def _unerased_head_path(self) -> HeadPath:
        return self._fit_head_path(self.unerased)

    def run(self, erasers: Sequence[Component]) -> list[Record]:
        """Fit and score the erasers with all heads; the records of a failure hold its reason."""
        records = []
        for eraser in erasers:
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", SplinceWarning)
                    first, *others = self._eraser_records(eraser)
                texts = [str(w.message) for w in caught if issubclass(w.category, SplinceWarning)]
                notes = first.notes + tuple(dict.fromkeys(texts))
                records += [dataclasses.replace(first, notes=notes), *others]
            except Exception as error:  # code of the caller may raise any exception
                names = (ERASER_ROW, *(head.name for head in self.plan.heads))
                reason = reason_of(error)
                records += [self._record(eraser.name, name, reason=reason) for name in names]
        return records

    def _record(self, eraser: str, head: str, **fields: Any) -> Record:
        return Record(self.seed, self.p, self.split.sizes, eraser, head, **fields)

    def _eraser_records(self, component: Component) -> list[Record]:
        """Fit and score one eraser and its heads; the record of the eraser itself comes first."""
        name, data = component.name, self.data
        eraser = fit_eraser(component.spec, data)
        rows, reason = self.unerased, ""
        if eraser.rank != 0:
            rows = ErasedRows(*map(eraser, (self.train, self.validation, self.test)))
        try:
            values, notes = self._leakage(rows.test)
        except Exception as error:
            values, notes, reason = {}, (), f"leakage: {reason_of(error)}"
        if eraser.uses_labels:
            notes = (f"{NEEDS_LABELS}; the test rows were erased with their labels", *notes)
        values |= erasure_scores(
            self.train.rows, rows.train, self.train.labels, data.task, eraser.rank
        )
        records = [self._record(name, ERASER_ROW, values=values, notes=notes, reason=reason)]
        for head in self.plan.heads:
            try:
                records.append(self._head_record(name, head, rows))
            except Exception as error:
                records.append(self._record(name, head.name, reason=reason_of(error)))
        return records

    def _leakage(self, erased: Float) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the metrics of the probes for each concept on erased test rows, and notes."""
        values: dict[str, float] = {}
        notes: list[str] = []
        for name, (used, target) in self._probe_targets.items() if self.plan.probes else ():
            rows = erased[used]
            leakage = probes.score_probes(rows, target, self.plan.probes, constant_tol=ROUNDING)
            found = {k: v for probe in leakage.probes for k, v in probe.scores().items()}
            if n_unused := len(erased) - len(used):
                notes.append(
                    f"{n_unused} test rows have a class of {name!r} that no training row has; "
                    "the probes leave these rows out"
                )
            if leakage.reason:
                notes.append(f"leakage of {name!r} cannot be measured: {leakage.reason}")
                found = {"probe_chance": target.chance} if leakage.n_classes else {}
            values |= {concept_key(k, name, self.data.concepts): v for k, v in found.items()}
        return values, tuple(notes)

    @cached_property
    def _probe_targets(self) -> dict[str, tuple[Codes, probes.ProbeTarget]]:
        """Test rows whose class occurs in training, and target of the probes, by concept."""
        targets, split, groups = {}, self.split, self.test.codes.groups
        for name, concept in self.plan.concepts.items():
            labels = values_of(concept)
            used = np.arange(len(split.test))
            if isinstance(concept, ClassCodes):
                used = np.flatnonzero(np.isin(labels[split.test], labels[split.train]))
            members = None if groups is None else groups[used]
            targets[name] = used, probes.target_of(labels[split.test[used]], members, 0)
        return targets

    def _head_record(self, eraser: str, head: Component, rows: ErasedRows) -> Record:
        """Fit and score one head on erased rows; the record of "retrained" covers all alphas."""
        record = self._record(eraser, head.name)
        if head.spec == "frozen":
            fits, selected, _ = self._unerased_head_path
            return self._scored_record(record, fits[selected], rows)
        if head.spec == "unregularised":
            return self._scored_record(record, self._fit(rows, (0.0,), max_iter=1000)[0], rows)
        if head.spec != "retrained":
            return self._classifier_record(record, head, rows)
        path = self._unerased_head_path if rows is self.unerased else self._fit_head_path(rows)
        fits, selected, notes = path
        records = [self._scored_record(record, fit, rows) for fit in fits]
        best = records[selected]
        return dataclasses.replace(
            best,
            notes=best.notes + notes,
            reason=next(filter(None, (best.reason, *(r.reason for r in records))), ""),
            path=tuple((float(r.alpha or 0), r.values) for r in records),
        )

    def _fit_head_path(self, rows: ErasedRows) -> HeadPath:
        """Fit heads at every alpha; select one by validation rows or folds of training rows."""
        alphas, validation = self.plan.alphas, self.validation
        fits = self._fit(rows, alphas)
        is_quantity = isinstance(self.plan.task, Columns)
        notes: tuple[str, ...] = ()
        if len(alphas) == 1 or (is_quantity and not len(validation.rows)):
            return fits, 0, notes
        predictions = [self._predict(fit, rows.validation) for fit in fits]
        if is_quantity:
            errors = [np.mean((validation.codes.task - y_pred) ** 2) for y_pred in predictions]
            return fits, int(np.argmin(errors)), notes
        # A cell with training rows may have too few validation rows.
        counts = np.bincount(validation.strata, minlength=int(self.train.strata.max()) + 1)
        if (counts[np.unique(self.train.strata)] < heads.MIN_CELL).any():
            scored, left_out = self._scores_by_folds(rows)
            text = (
                f"; {left_out} of {FOLDS} folds were left out, as their training rows lack a class"
            )
            notes = (
                f"a validation cell has fewer than {heads.MIN_CELL} rows, so alpha was selected by "
                f"{FOLDS}-fold cross-validation on the training rows{text * (left_out > 0)}",
            )
        else:
            scored = [scores(_SELECTION, validation.codes, y_pred) for y_pred in predictions]
        return fits, heads.select_best(scored, alphas), notes

    def _fit(self, rows: ErasedRows, alphas: Sequence[float], **options: Any) -> list[Head]:
        """Fit linear heads, whose classes are codes, on the training rows, one per alpha."""
        if isinstance(self.plan.task, Columns):
            return heads.ridge_path(rows.train, self.train.codes.task, alphas)
        names = tuple(self.classes.tolist())
        return heads.logistic_path(rows.train, self.class_index, names, alphas, **options)

    def _predict(self, head: Head, rows: Float) -> NDArray[Any]:
        """Predict class codes (n,) or values (n, k) of the task."""
        values = rows @ head.coef_.T + head.intercept_
        return self.classes[heads.decide(values)] if head.classes_ else values

    def _scores_by_folds(self, rows: ErasedRows) -> tuple[list[dict[str, float]], int]:
        """Return the scores of every alpha, and the number of folds that lack a class."""
        train, codes, alphas = self.train, self.class_index, self.plan.alphas
        fold = fold_of_rows(train.strata, train.codes.groups, self.seed)
        folds = [f for f in range(FOLDS) if len(np.unique(codes[fold != f])) == len(self.classes)]
        if not folds:
            raise LabelError(
                "alpha cannot be selected by cross-validation, because the training rows of every "
                f"fold lack a class; the classes have {listed(np.bincount(codes).tolist())} rows"
            )
        weights = np.stack([fold != f for f in folds for _ in alphas], 1).astype(np.float64)
        weights /= weights.sum(axis=0)
        fits = self._fit(rows, alphas * len(folds), sample_weights=weights)
        held_out = np.isin(fold, folds)
        labels = train.codes.take(held_out)
        scored = []
        for j in range(len(alphas)):
            y_pred = np.zeros(len(codes), dtype=np.intp)
            for i, f in enumerate(folds):
                fit = fits[i * len(alphas) + j]
                y_pred[fold == f] = self._predict(fit, rows.train[fold == f])
            scored.append(scores(_SELECTION, labels, y_pred[held_out]))
        return scored, FOLDS - len(folds)

    def _classifier_record(self, record: Record, head: Component, rows: ErasedRows) -> Record:
        """Fit a classifier with the interface of scikit-learn to erased rows, and score it."""
        model, target = clone_with_seed(head.spec, self.seed), self.train.codes.task.copy()
        target = target.ravel() if target.ndim == 2 and target.shape[1] == 1 else target
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(rows.train.copy(), target)
        converged = not any("Convergence" in w.category.__name__ for w in caught)
        record = dataclasses.replace(record, converged=converged)
        return self._add_scores(record, np.asarray(model.predict(rows.test.copy())))

    def _scored_record(self, record: Record, fit: Head, rows: ErasedRows) -> Record:
        """Return the record with the alpha of a head, and its metrics on the test rows."""
        record = dataclasses.replace(record, alpha=fit.alpha, converged=fit.converged)
        return self._add_scores(record, self._predict(fit, rows.test))

    def _add_scores(self, record: Record, y_pred: NDArray[Any]) -> Record:
        """Return the record with the metrics of the predictions on the test rows."""
        plan, labels = self.plan, self.test.codes
        if isinstance(plan.task, Columns):
            y_pred = as_quantities(y_pred, labels.task.shape)
            return add_scores(record, labels, y_pred, (), plan.metrics)
        if n_unknown := int((~np.isin(labels.task, self.classes)).sum()):
            note = (
                f"{n_unknown} test rows have a class of the task that no training row has; they "
                "count as errors"
            )
            record = dataclasses.replace(record, notes=(*record.notes, note))
        y_pred = as_codes(y_pred, len(labels.task), self.classes)
        if plan.test is not None:
            record = dataclasses.replace(record, y_pred=tuple(y_pred.tolist()))
        return add_scores(record, labels, y_pred, plan.task.classes, plan.metrics)


def fold_of_rows(cells: Codes, groups: Codes | None, seed: int) -> Codes:
    """Return the fold (n,) of each row; cells are spread evenly, and groups are not divided."""
    fold = np.empty(len(cells), dtype=np.intp)
    if groups is None:
        order = np.random.default_rng(seed).permutation(len(cells))
        order = order[np.argsort(cells[order], kind="stable")]
        fold[order] = np.arange(len(cells)) % FOLDS
        return fold
    groups = fill_missing_groups(groups)
    folds = probes.folds_of(cells, groups, seed)
    if not folds:
        raise NotEnoughDataError(
            f"the training rows have {len(np.unique(groups))} groups, too few for the {FOLDS} "
            "folds that select alpha; pass one alpha, or validation rows of at least "
            f"{heads.MIN_CELL} per cell"
        )
    for f, (_, held_out) in enumerate(folds):
        fold[held_out] = f
    return fold
