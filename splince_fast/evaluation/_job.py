"""One job of a comparison: all erasers and heads of a seed at a level."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.conditional import NEEDS_LABELS
from splince_fast.evaluation import _logistic, advice, heads, probes
from splince_fast.evaluation._data import of_rows
from splince_fast.evaluation._erasers import (
    ErasedRows,
    FitData,
    Map,
    Part,
    cloned,
    fit_eraser,
    weight_of,
)
from splince_fast.evaluation._pages import gathered
from splince_fast.evaluation._records import ADVISER, ERASER_ROW, PathPoint, Record, TestLabels
from splince_fast.evaluation.plan import Component, Plan
from splince_fast.evaluation.scoring import (
    OF_ERASERS,
    ClassPredictions,
    Erasure,
    QuantityPredictions,
    add_scores,
    reason_of,
    scores,
)
from splince_fast.evaluation.splits import Split
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError, SplinceWarning
from splince_fast.labels import ClassCodes, Columns, Encoded
from splince_fast.moments import Moments
from splince_fast.moments.factored import Factored
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

FOLDS = 5  # of the training rows, to choose alpha where validation cells are too small


@dataclass(frozen=True, slots=True, eq=False)
class HeadFit:
    """One head in scaled coordinates; `classes` are the codes of its classes."""

    weights: Float
    intercepts: Float
    classes: Codes | None
    alpha: float
    converged: bool


@dataclass(frozen=True, slots=True, eq=False)
class HeadPath:
    """Heads over alphas and the position of the chosen one."""

    fits: tuple[HeadFit, ...]
    chosen: int
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> HeadFit:
        """The chosen head."""
        return self.fits[self.chosen]


@dataclass(frozen=True, slots=True, eq=False)
class ProbeRows:
    """Test rows that probes use for a concept of classes, their codes, and folds."""

    rows: Codes  # positions among the test rows
    codes: Codes
    n_classes: int
    folds: list[probes.Fold]
    reason: str


class Job:
    """Rows, labels and moments of one (seed, level); coordinates are centred and scaled.

    Parameters
    ----------
    plan : Plan
    X : (n, d)
        All rows; those of the split are read.
    seed, p : int and float or None
    split : Split
    moments : Moments
        Of the training rows.
    """

    def __init__(
        self, plan: Plan, X: Any, seed: int, p: float | None, split: Split, moments: Moments
    ) -> None:
        self.plan, self.seed, self.p, self.split, self.moments = plan, seed, p, split, moments
        self.S = moments.covariance(ddof=0)  # in units of the data
        self.scale = math.sqrt(float(np.trace(self.S)) / len(self.S)) or 1.0

        def scaled(rows: Codes) -> Float:
            taken = gathered(X, rows)
            taken -= moments.mean
            taken /= self.scale
            return taken

        self.train, self.validation, self.test = map(
            scaled, (split.train, split.validation, split.test)
        )
        self.unerased_path: HeadPath | None = None
        self._probed: dict[str, ProbeRows] = {}

    @cached_property
    def unerased(self) -> ErasedRows:
        """The rows as they are."""
        identity = Map.identity(len(self.S))
        return ErasedRows(self.train, self.validation, self.test, identity, self.gram)

    @cached_property
    def gram(self) -> Float:
        """Cov of the scaled training rows, from the moments."""
        return np.asarray(self.S / self.scale**2)

    # -- labels ----------------------------------------------------------------------------

    def task(self, rows: Codes) -> Any:
        """Codes of the task, or its values."""
        task = self.plan.task
        return task.codes[rows] if isinstance(task, ClassCodes) else task.values[rows]

    def cells(self, rows: Codes) -> Codes:
        """Cells of task and concepts; -1 throughout where one is a quantity."""
        cells = self.plan.cells
        return np.full(len(rows), -1) if cells is None else cells.codes[rows]

    def strata(self, rows: Codes) -> Codes:
        """Cells of a task of classes; its classes where a concept is a quantity."""
        return self.cells(rows) if self.plan.cells is not None else np.asarray(self.task(rows))

    def concept(self, rows: Codes) -> Any:
        """Concepts that estimators erase.

        Joint codes of classes, the columns of quantities, or a mapping where there are both.
        """
        joint = self.plan.concept_codes
        if joint is not None:
            return joint.codes[rows]
        columns = {
            name: c.values[rows] if isinstance(c, Columns) else c.codes[rows]
            for name, c in self.plan.concepts.items()
        }
        if all(isinstance(c, Columns) for c in self.plan.concepts.values()):
            return np.concatenate(list(columns.values()), axis=1)
        return columns

    def single_concept(self, rows: Codes) -> Float | None:
        """The concept as (n,) numbers; None unless it is one column or two classes."""
        concept = next(iter(self.plan.concepts.values()))
        if len(self.plan.concepts) > 1:
            return None
        if isinstance(concept, Columns):
            return concept.values[rows, 0] if concept.values.shape[1] == 1 else None
        return concept.codes[rows].astype(np.float64) if len(concept.classes) == 2 else None

    @cached_property
    def test_labels(self) -> TestLabels:
        """Labels that predicted classes are scored by."""
        return self.plan.test_labels(self.split.test)

    def classes(self) -> tuple[Codes, Codes]:
        """Codes of the classes among the training rows, and the local code of each row."""
        present, local = np.unique(self.task(self.split.train), return_inverse=True)
        return present, local.astype(np.intp)

    def sample_weights(self, count: int) -> Float | None:
        """(n, count): weights of the training rows for that many fits; None for equal weights."""
        weights = self.split.weights
        if weights is None:
            return None
        return np.broadcast_to((weights / weights.sum())[:, None], (len(weights), count))

    # -- erasers ---------------------------------------------------------------------------

    def run(self, erasers: list[Component]) -> list[Record]:
        """All records of some erasers."""
        data = self._fit_data()
        records = []
        for eraser in erasers:
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", SplinceWarning)
                    if eraser.name == ADVISER:
                        records.append(self._advice(data.factored))
                        continue
                    found = self._outcomes(eraser, data)
                texts = [str(w.message) for w in caught if issubclass(w.category, SplinceWarning)]
                notes = found[0].notes + tuple(dict.fromkeys(texts))
                records += [dataclasses.replace(found[0], notes=notes), *found[1:]]
            except Exception as error:  # of foreign code too: the other erasers go on
                reason = reason_of(error)
                names = [ERASER_ROW]
                if eraser.name != ADVISER:
                    names += [head.name for head in self.plan.heads]
                records += [self._record(eraser.name, name, reason=reason) for name in names]
        return records

    def _record(self, eraser: str, head: str, **fields: Any) -> Record:
        return Record(self.seed, self.p, self.split.sizes, eraser, head, **fields)

    def _part(self, rows: Float, numbers: Codes) -> Part:
        labels: dict[str, Encoded] = {self.plan.task_name: self.plan.task, **self.plan.concepts}
        encoded = {name: of_rows(column, numbers) for name, column in labels.items()}
        return Part(rows, self.task(numbers), self.concept(numbers), encoded)

    def _fit_data(self) -> FitData:
        split, plan = self.split, self.plan
        return FitData(
            self.moments, self.moments.factored(), tuple(plan.concepts), plan.task_name,
            self._part(self.train, split.train), self._part(self.validation, split.validation),
            split.weights, None if plan.groups is None else plan.groups[split.train],
            self.seed, self.scale,
        )  # fmt: skip

    def _outcomes(self, eraser: Component, data: FitData) -> list[Record]:
        """Records of an eraser and of its heads."""
        found = fit_eraser(eraser.spec, data)
        plan, mean = self.plan, self.moments.mean
        concepts = tuple(plan.concepts)
        notes: tuple[str, ...] = ()
        if isinstance(found, Projection):
            eraser_map = Map.of(found, mean, self.scale)
            rows = dataclasses.replace(self.unerased, eraser_map=eraser_map)
            erasure = Erasure(found, self.moments, self.S, plan.task_name, concepts)
        else:
            test = self._part(self.test, self.split.test)
            train, validation, tested = (
                found.erase(part, mean, self.scale) for part in (data.train, data.validation, test)
            )
            rows = ErasedRows(train, validation, tested, self.unerased.eraser_map, None)
            before, after = map(data.training_moments, (self.train, train))
            change = np.average(np.sum((train - self.train) ** 2, axis=1), weights=data.weights)
            erasure = Erasure(
                None, before, before.covariance(ddof=0), plan.task_name, concepts, after,
                float(change),
            )  # fmt: skip
            notes = (f"{NEEDS_LABELS}; the test rows were erased with theirs",)
        values, probe_notes = self._leakage(rows.eraser_map(rows.test))
        values |= scores(OF_ERASERS, erasure)
        records = [self._record(eraser.name, ERASER_ROW, values=values, notes=notes + probe_notes)]
        for head in plan.heads:
            try:
                records.append(self._head(eraser.name, head, rows))
            except Exception as error:
                records.append(self._record(eraser.name, head.name, reason=reason_of(error)))
        return records

    def _leakage(self, erased: Float) -> tuple[dict[str, float], tuple[str, ...]]:
        """Metrics of the probes on erased test rows, concept by concept."""
        values: dict[str, float] = {}
        notes: list[str] = []
        rows, plan = self.split.test, self.plan
        groups = None if plan.groups is None else plan.groups[rows]
        for name, concept in plan.concepts.items() if plan.probes else ():
            suffix = f"[{name}]" if len(plan.concepts) > 1 else ""
            if isinstance(concept, ClassCodes):
                use = self._probe_rows(name, concept, groups)
                left_out = len(rows) - len(use.rows)
                found = probes.probe_codes(
                    erased[use.rows] if left_out else erased, use.codes, use.n_classes,
                    list(plan.probes), (), use.folds, use.reason, 0,
                )  # fmt: skip
                if left_out:
                    notes.append(
                        f"{left_out} test rows have classes of {name!r} unseen in training: the "
                        "probes leave them out"
                    )
            else:
                found = probes.probe_quantity(
                    erased, concept.values[rows], None, ["linear"], 5, 0, groups, 0
                )
            if found.reason:
                notes.append(f"leakage of {name!r} not measurable: {found.reason}")
                if found.n_classes and isinstance(concept, ClassCodes):
                    counts = np.bincount(concept.codes[rows])
                    values[f"probe_chance{suffix}"] = float(counts.max() / counts.sum())
            if found.hint and groups is None:
                notes.append(f"{name!r}: {found.hint}")
            for probe in found.probes:
                values |= {f"{key}{suffix}": value for key, value in probe.figures().items()}
        return values, tuple(notes)

    def _probe_rows(self, name: str, concept: ClassCodes, groups: Codes | None) -> ProbeRows:
        """Test rows whose class of a concept occurs in training, with the folds of the probes."""
        if name not in self._probed:
            codes = concept.codes[self.split.test]
            rows = np.flatnonzero(np.isin(codes, np.unique(concept.codes[self.split.train])))
            present, local = np.unique(codes[rows], return_inverse=True)
            members = None if groups is None else groups[rows]
            folds, reason = probes.folds_of(local, len(present), 5, members, 0)
            self._probed[name] = ProbeRows(rows, local.astype(np.intp), len(present), folds, reason)
        return self._probed[name]

    # -- heads -----------------------------------------------------------------------------

    def _head(self, eraser: str, head: Component, rows: ErasedRows) -> Record:
        """One head on the erased rows; a path over alphas comes with "retrained"."""
        if head.spec == "frozen":
            if self.unerased_path is None:
                self.unerased_path = self._path(self.unerased)
            fit = self.unerased_path.best
            return self._scored(self._record(eraser, head.name), fit, rows, frozen=True)
        if head.spec == "retrained":
            path = self._path(rows)
            erased = len(rows.eraser_map.left) or rows.train is not self.train
            if self.unerased_path is None and not erased:
                self.unerased_path = path
            start = self._record(eraser, head.name)
            points = [self._scored(start, fit, rows) for fit in path.fits]
            best = points[path.chosen]
            reasons = (best.reason, *(point.reason for point in points))
            return dataclasses.replace(
                best,
                notes=best.notes + path.notes,
                reason=next(filter(None, reasons), ""),
                path=tuple(PathPoint(float(p.alpha or 0), p.values) for p in points),
            )
        if head.spec == "unregularised":
            return self._scored(self._record(eraser, head.name), self._unregularised(rows), rows)
        return self._classifier(eraser, head, rows)

    def _path(self, rows: ErasedRows) -> HeadPath:
        """Heads at every alpha, and the choice among them."""
        alphas = self.plan.alphas
        validation, apply = self.split.validation, rows.eraser_map
        if isinstance(self.plan.task, Columns):
            w, b = heads.ridge_path(rows.train, self.task(self.split.train), alphas, apply.factors)
            fits = tuple(HeadFit(w[j], b[j], None, alpha, True) for j, alpha in enumerate(alphas))
            errors = []
            for fit in fits if len(validation) else ():
                predicted = apply.scores(rows.validation, fit.weights, fit.intercepts)
                rest = self.task(validation) - predicted
                errors.append((-float(np.mean(rest**2)), 0.0))
            return HeadPath(fits, heads.choose(errors, alphas, "worst_group") if errors else 0)
        fits = self._logistic_fits(rows, np.array(alphas))
        if len(alphas) == 1:
            return HeadPath(fits, 0)
        if self._has_few_validation_rows():
            notes = [
                f"validation cells have fewer than {heads.MIN_CELL} rows: {FOLDS} folds of the "
                "training rows chose alpha"
            ]
            scored = self._scores_by_folds(rows, notes)
            return HeadPath(fits, heads.choose(scored, alphas, self.plan.select), tuple(notes))
        y_true, cells = self.task(validation), self.cells(validation)
        weights = self.split.validation_weights
        scored = [
            heads.score(y_true, _predict(fit, rows.validation, apply), cells, weights)
            for fit in fits
        ]
        return HeadPath(fits, heads.choose(scored, alphas, self.plan.select))

    def _logistic_fits(
        self, rows: ErasedRows, alphas: Float, max_iter: int = 400
    ) -> tuple[HeadFit, ...]:
        """Logistic heads on the training rows.

        Raises
        ------
        InputError
            Separable classes at alpha 0.
        """
        present, local = self.classes()
        fits = _logistic.fit(
            rows.train, local, len(present), alphas, factors=rows.eraser_map.factors,
            gram=rows.gram, sample_weights=self.sample_weights(len(alphas)), max_iter=max_iter,
        )  # fmt: skip
        if fits.separable.any():
            raise InputError(heads.SEPARABLE)
        return tuple(
            HeadFit(fits.weights[j], fits.intercepts[j], present, alpha, bool(fits.converged[j]))
            for j, alpha in enumerate(alphas.tolist())
        )

    def _unregularised(self, rows: ErasedRows) -> HeadFit:
        """The head of alpha 0."""
        if isinstance(self.plan.task, ClassCodes):
            return self._logistic_fits(rows, np.zeros(1), max_iter=1000)[0]
        target, factors = self.task(self.split.train), rows.eraser_map.factors
        w, b = heads.ridge_path(rows.train, target, (0.0,), factors)
        return HeadFit(w[0], b[0], None, 0.0, True)

    def _has_few_validation_rows(self) -> bool:
        """Whether a cell that occurs in training has fewer validation rows than MIN_CELL."""
        train = self.strata(self.split.train)
        size = int(train.max(initial=-1)) + 1
        counts = np.bincount(self.strata(self.split.validation), minlength=size)
        return bool((counts[np.unique(train)] < heads.MIN_CELL).any())

    def _scores_by_folds(self, rows: ErasedRows, notes: list[str]) -> list[tuple[float, float]]:
        """(worst group, accuracy) of every alpha over held-out folds of the training rows."""
        split, groups = self.split, self.plan.groups
        y_true, cells = self.task(split.train), self.cells(split.train)
        present, local = self.classes()
        n, alphas = len(local), np.array(self.plan.alphas)
        members = None if groups is None else groups[split.train]
        fold = fold_of_rows(self.strata(split.train), members, self.seed)
        whole = [f for f in range(FOLDS) if len(np.unique(local[fold != f])) == len(present)]
        if not whole:
            raise LabelError(
                "no fold of the training rows has every class; the classes have "
                f"{np.bincount(local).tolist()} rows"
            )
        if len(whole) < FOLDS:
            notes.append(f"{FOLDS - len(whole)} folds lack a class and were left out")
        mass = np.ones(n) if split.weights is None else split.weights
        inside = np.stack([(fold != f) * mass for f in whole for _ in alphas], 1)
        fits = _logistic.fit(
            rows.train, local, len(present), np.tile(alphas, len(whole)),
            sample_weights=inside / inside.sum(axis=0), factors=rows.eraser_map.factors,
            gram=rows.gram,
        )  # fmt: skip
        held_out = np.isin(fold, whole)
        scored = []
        for j, alpha in enumerate(alphas.tolist()):
            y_pred = np.zeros(n, dtype=np.intp)
            for i, f in enumerate(whole):
                k = i * len(alphas) + j
                fit = HeadFit(fits.weights[k], fits.intercepts[k], present, alpha, True)
                y_pred[fold == f] = _predict(fit, rows.train[fold == f], rows.eraser_map)
            scored.append(
                heads.score(y_true[held_out], y_pred[held_out], cells[held_out], mass[held_out])
            )
        return scored

    def _classifier(self, eraser: str, head: Component, rows: ErasedRows) -> Record:
        """A classifier of scikit-learn's kind, fitted on erased training rows."""
        model = cloned(head.spec, self.seed)
        accepted = inspect.signature(model.fit).parameters
        apply, split = rows.eraser_map, self.split
        passed: dict[str, Any] = dict(weight_of(model, split.weights))
        if "groups" in accepted and self.plan.cells is not None:
            passed["groups"] = self.cells(split.train)
            if "validation" in accepted and len(split.validation):
                v = split.validation
                passed["validation"] = (apply(rows.validation), self.task(v), self.cells(v))
        target = self.task(split.train)
        target = target.ravel() if target.ndim == 2 and target.shape[1] == 1 else target
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(apply(rows.train), target, **passed)
        converged = not any("Convergence" in w.category.__name__ for w in caught)
        record = self._record(eraser, head.name, converged=converged)
        return self._add_scores(record, np.asarray(model.predict(apply(rows.test))))

    def _scored(
        self, record: Record, fit: HeadFit, rows: ErasedRows, *, frozen: bool = False
    ) -> Record:
        """Metrics on the test rows; a frozen head was not fitted to rows that are erased."""
        record = dataclasses.replace(record, alpha=fit.alpha, converged=fit.converged)
        if frozen:
            offset = fit.weights @ rows.eraser_map.offset
            fit = dataclasses.replace(fit, intercepts=fit.intercepts + offset)
        return self._add_scores(record, _predict(fit, rows.test, rows.eraser_map))

    def _add_scores(self, record: Record, y_pred: Any) -> Record:
        """The record with the metrics of predictions on the test rows."""
        task, rows = self.plan.task, self.split.test
        own = {metric.name: metric.spec for metric in self.plan.metrics}
        if isinstance(task, Columns):
            predicted = np.asarray(y_pred, dtype=np.float64).reshape(len(rows), -1)
            quantities = QuantityPredictions(self.task(rows), predicted, self.single_concept(rows))
            return add_scores(record, quantities, own, ())
        if self.n_unseen:
            note = (
                f"{self.n_unseen} test rows have classes of the task unseen in training: they "
                "count as errors"
            )
            record = dataclasses.replace(record, notes=(*record.notes, note))
        if self.plan.test is not None:
            record = record.with_predictions(y_pred)
        predictions = ClassPredictions(self.test_labels, y_pred)
        return add_scores(record, predictions, own, task.classes, self.concept_classes)

    @cached_property
    def concept_classes(self) -> tuple[str, ...]:
        """Names of the joint classes of the concepts; empty where one is a quantity."""
        joint = self.plan.concept_codes
        names = () if joint is None else joint.names
        return tuple(" · ".join(map(str, n)) if isinstance(n, tuple) else str(n) for n in names)

    @cached_property
    def n_unseen(self) -> int:
        """Test rows with classes of the task that training lacks."""
        classes, _ = self.classes()
        return int((~np.isin(self.task(self.split.test), classes)).sum())

    # -- advice ----------------------------------------------------------------------------

    def _advice(self, moments: Factored) -> Record:
        """Advice from the moments, before anything is measured."""
        erase = list(self.plan.concepts)
        frozen = advice.frozen_head_advice(moments, erase, self.plan.task_name)
        values = {
            "rho": frozen.rho,
            "threshold": frozen.threshold,
            **self._frozen_errors(moments),
        }
        for name in erase:
            trace = advice.held_out_trace(moments, name)
            suffix = f"[{name}]" if len(erase) > 1 else ""
            values |= {
                f"trace_before{suffix}": trace.before,
                f"expected_trace{suffix}": trace.expected,
                f"expected_r2{suffix}": trace.r2,
                f"rows_for_half{suffix}": trace.rows_for(max(trace.r2 / 2, 1e-12)),
            }
        return self._record(ADVISER, ERASER_ROW, values=values)

    def _frozen_errors(self, moments: Factored) -> dict[str, float]:
        """Squared error that SPLINCE has above LEACE, frozen ridge heads of extreme alphas."""
        assert isinstance(self.plan.task, ClassCodes)
        place = {name: k for k, name in enumerate(self.moments.classes(self.plan.task_name))}
        columns = np.array([place.get(name, len(place)) for name in self.plan.task.classes])
        ones = np.eye(len(place) + 1)[:, :-1]  # a class that training lacks has no column
        train, test = (
            ones[columns[self.task(rows)]] for rows in (self.split.train, self.split.test)
        )
        mean = np.average(train, axis=0, weights=self.split.weights)
        cross = self.moments.cross_covariance(self.plan.task_name, ddof=0) / self.scale
        values = {"task_classes": float(len(place))}
        for name, alpha in (("strong", self.plan.alphas[0]), ("weak", self.plan.alphas[-1])):
            head: Float = np.asarray(
                np.linalg.solve(self.gram + alpha * np.eye(len(cross)), cross).T,
                dtype=np.float64,
            )
            errors = advice.frozen_squared_errors(
                moments, list(self.plan.concepts), self.plan.task_name, head, self.test, test, mean
            )
            values[f"squared_error_{name}"] = errors["SPLINCE"] - errors["LEACE"]
        return values


def _predict(fit: HeadFit, rows: Float, eraser_map: Map) -> Any:
    """(n,) codes of the task, or (n, k) values of a quantity, of erased rows."""
    found = eraser_map.scores(rows, fit.weights, fit.intercepts)
    if fit.classes is None:
        return found
    return np.asarray(fit.classes[heads.decide(found)])


def fold_of_rows(cells: Codes, groups: Codes | None, seed: int) -> Codes:
    """The fold of each row: rows of a cell are spread evenly over folds, and groups stay whole.

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
    n_groups = len(np.unique(members))
    if n_groups < FOLDS:
        raise NotEnoughDataError(
            f"the training rows have {n_groups} groups, and {FOLDS} folds of whole groups are to "
            "choose alpha; pass one, or validation rows of at least "
            f"{heads.MIN_CELL} per cell"
        )
    splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of cells smaller than the folds
        for f, (_, held_out) in enumerate(splitter.split(cells[:, None], cells, members)):
            fold[held_out] = f
    return fold
