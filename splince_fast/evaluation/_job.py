"""One job of a comparison: a seed at a level, all its erasers and heads."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import _erasers, _linear, _logistic, advice, probes
from splince_fast.evaluation._context import ADVISER, ERASER_ROW, PATH
from splince_fast.evaluation._erasers import weight_of
from splince_fast.evaluation._judge import (
    FOLDS,
    decided_by,
    few_validation_rows,
    judged_by_folds,
    reason_of,
    with_values,
)
from splince_fast.evaluation._pages import gathered
from splince_fast.evaluation._protocol import Split
from splince_fast.evaluation.plan import Named, Plan
from splince_fast.evaluation.scoring import OF_ERASERS, Decisions, Erasure, scores
from splince_fast.exceptions import InputError, SplinceWarning
from splince_fast.labels import ClassCodes, Columns
from splince_fast.moments import Moments
from splince_fast.moments.factored import Factored
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Codes = NDArray[np.intp]
Record = dict[str, Any]


def blank(
    seed: int,
    p: float | None,
    sizes: tuple[int, int, int],
    eraser: str,
    head: str,
    *,
    reason: str = "",
) -> Record:
    """A record without figures."""
    return {
        "seed": seed, "p": p, "eraser": eraser, "head": head, "alpha": None, "values": {},
        "path": [], "cells": [], "reason": reason, "notes": [], "converged": True,
        "sizes": list(sizes),
    }  # fmt: skip


@dataclass(slots=True, eq=False)
class Job:
    """Rows, labels and moments of one (seed, level); coordinates are centred and scaled."""

    plan: Plan
    seed: int
    p: float | None
    split: Split
    moments: Moments
    S: Float  # Cov of the training rows in units of the data, ddof 0
    train: Float
    validation: Float
    test: Float
    unit: float
    base: dict[str, Any] = field(default_factory=dict)  # heads of the unerased rows
    probed: dict[str, Any] = field(default_factory=dict)  # concept: rows, codes, folds of probes
    truth: tuple[Decisions, str] | None = None  # of the test rows, once a head was judged

    @classmethod
    def of(
        cls, plan: Plan, X: Any, seed: int, p: float | None, split: Split, moments: Moments
    ) -> Job:
        """Read the rows and scale them by the moments of the training rows."""
        mean = moments.mean
        S = moments.covariance(ddof=0)
        unit = math.sqrt(float(np.trace(S)) / len(mean)) or 1.0

        def scaled(rows: Codes) -> Float:
            taken = gathered(X, rows)
            taken -= mean
            taken /= unit
            return taken

        return cls(
            plan, seed, p, split, moments, S, scaled(split.train), scaled(split.validation),
            scaled(split.test), unit,
        )  # fmt: skip

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

    def run(self, erasers: list[Named]) -> list[Record]:
        """All records of some erasers; those of the others are known already."""
        moments = self.moments
        context = _erasers.Context(
            moments, moments.factored(), list(self.plan.concepts), self.train,
            self.task(self.split.train), self.concept(self.split.train), self.split.weights,
            (self.validation, self.task(self.split.validation),
             self.concept(self.split.validation)),
            self.seed, self.unit, self.plan.task_name,
        )  # fmt: skip
        records = []
        for eraser in erasers:
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", SplinceWarning)
                    if eraser.name == ADVISER:
                        records.append(self._advice(context.factored))
                        continue
                    found = self._eraser(eraser, context)
                told = [str(w.message) for w in caught if issubclass(w.category, SplinceWarning)]
                found[0]["notes"] += list(dict.fromkeys(told))
                records += found
            except Exception as error:  # of foreign code too: the other erasers go on
                reason = reason_of(error)
                if eraser.name == ADVISER:
                    records.append(self._record(ADVISER, ERASER_ROW, reason=reason))
                    continue
                names = (ERASER_ROW, *(head.name for head in self.plan.heads))
                records += [self._record(eraser.name, name, reason=reason) for name in names]
        return records

    def concept(self, rows: Codes) -> Any:
        """What estimators erase: joint codes of classes, the columns of quantities, or a mapping
        where there are both."""
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

    def _record(self, eraser: str, head: str, *, reason: str = "", **more: Any) -> Record:
        start = blank(self.seed, self.p, self.split.sizes, eraser, head, reason=reason)
        return start | more

    # -- an eraser -------------------------------------------------------------------------

    def _eraser(self, eraser: Named, context: _erasers.Context) -> list[Record]:
        d = self.train.shape[1]
        if eraser.what == "none":
            projection = Projection(np.zeros((d, 0)), np.zeros((d, 0)), self.moments.mean)
        else:
            projection = _erasers.make(eraser.what, context)
        how = _erasers.to_map(projection, self.moments.mean, self.unit)
        fresh = how(self.test)
        values, notes = self._leakage(fresh)
        values |= scores(
            OF_ERASERS,
            Erasure(
                projection, self.moments, self.S, self.plan.task_name, tuple(self.plan.concepts)
            ),
        )
        first = self._record(eraser.name, ERASER_ROW, values=values, notes=notes)
        records = [first]
        for head in self.plan.heads:
            try:
                records += self._head(eraser.name, head, how)
            except Exception as error:
                records.append(self._record(eraser.name, head.name, reason=reason_of(error)))
        return records

    def _leakage(self, fresh: Float) -> tuple[dict[str, float], list[str]]:
        """Figures of the probes on erased test rows, concept by concept."""
        values: dict[str, float] = {}
        notes: list[str] = []
        if not self.plan.probes:
            return values, notes
        rows = self.split.test
        members = None if self.plan.groups is None else self.plan.groups[rows]
        for name, concept in self.plan.concepts.items():
            suffix = f"[{name}]" if len(self.plan.concepts) > 1 else ""
            names: list[str] = list(self.plan.probes)
            if isinstance(concept, ClassCodes):
                found, unseen = self._probe(name, concept, fresh, names)
                if unseen:
                    notes.append(
                        f"{unseen} test rows have classes of {name!r} unseen in training: the "
                        "probes leave them out"
                    )
            else:
                found = probes.probe_quantity(
                    fresh, concept.values[rows], None, ["linear"], 5, 0, members, 0
                )
            if found.reason:
                notes.append(f"leakage of {name!r} not measurable: {found.reason}")
                if found.n_classes and isinstance(concept, ClassCodes):
                    counts = np.bincount(concept.codes[rows])
                    values[f"probe_chance{suffix}"] = float(counts.max() / counts.sum())
            if found.hint and self.plan.groups is None:
                notes.append(f"{name!r}: {found.hint}")
            for probe in found.probes:
                start = "probe" if probe.name == "linear" else probe.name
                figures = {"accuracy": probe.accuracy, "auc": probe.auc, "r2": probe.r2,
                           "chance": probe.chance}  # fmt: skip
                for figure, value in figures.items():
                    if not math.isnan(value):
                        values[f"{start}_{figure}{suffix}"] = value
        return values, notes

    def _probe(
        self, name: str, concept: ClassCodes, fresh: Float, names: list[str]
    ) -> tuple[probes.Leakage, int]:
        """Probes for a class-coded concept, and the test rows that they leave out."""
        rows = self.split.test
        if name not in self.probed:
            codes = concept.codes[rows]
            seen = np.isin(codes, np.unique(concept.codes[self.split.train]))
            known = np.flatnonzero(seen)
            present, local = np.unique(codes[known], return_inverse=True)
            groups = None if self.plan.groups is None else self.plan.groups[rows[known]]
            folds = probes.folds_of(local, len(present), 5, groups, 0)
            self.probed[name] = known, local.astype(np.intp), len(present), *folds
        known, local, count, folds, reason = self.probed[name]
        fresh = fresh if len(known) == len(rows) else fresh[known]
        found = probes.probe_codes(fresh, local, count, names, (), folds, reason, 0)
        return found, len(rows) - len(known)

    # -- heads -----------------------------------------------------------------------------

    def _head(self, eraser: str, head: Named, how: _erasers.Map) -> list[Record]:
        """One head on the erased rows; a path over alphas comes with "retrained"."""
        if head.what == "frozen":
            if "path" not in self.base:
                self.base["path"] = self._path(_erasers.identity(self.train.shape[1]))
            path = self.base["path"]
            return [self._judged(eraser, head.name, path.best(), how, frozen=True)]
        if head.what == "retrained":
            path = self._path(how)
            if not len(how.left) and "path" not in self.base:
                self.base["path"] = path
            record = self._judged(eraser, head.name, path.best(), how)
            record["notes"] += path.notes
            points = []
            for j in range(len(path.alphas)):
                point = self._judged(eraser, PATH, path.at(j), how)
                points.append([path.alphas[j], point["values"]])
                record["reason"] = record["reason"] or point["reason"]
            record["path"] = points
            return [record]
        if head.what == "unregularised":
            return [self._judged(eraser, head.name, self._unregularised(how), how)]
        return [self._classifier(eraser, head, how)]

    def classes(self) -> tuple[Codes, Codes]:
        """Codes of the classes among the training rows, and the local code of each row."""
        present, local = np.unique(self.task(self.split.train), return_inverse=True)
        return present, local.astype(np.intp)

    def sample_weights(self, count: int) -> Float | None:
        """(n, count): weights of the training rows for so many fits; None where all are alike."""
        weights = self.split.weights
        if weights is None:
            return None
        return np.broadcast_to((weights / weights.sum())[:, None], (len(weights), count))

    def gram(self) -> Float:
        """Cov of the scaled training rows, from the moments."""
        return np.asarray(self.S / self.unit**2)

    def _path(self, how: _erasers.Map) -> _Path:
        """Heads at every alpha, and the choice among them."""
        alphas = self.plan.alphas
        rows_v = self.split.validation
        if isinstance(self.plan.task, Columns):
            w, b = _linear.ridge_path(self.train, self.task(self.split.train), alphas, how.factors)
            errors = []
            for j in range(len(alphas)):
                rest = self.task(rows_v) - self.scores(self.validation, w[j], b[j], how)
                errors.append((-float(np.mean(rest**2)), 0.0))
            chosen = _linear.choose(errors, alphas, "worst_group") if len(rows_v) else 0
            return _Path(alphas, w, b, np.ones(len(w), bool), None, chosen, [])
        present, local = self.classes()
        fits = _logistic.fit(
            self.train, local, len(present), np.array(alphas), factors=how.factors,
            gram=self.gram(), sample_weights=self.sample_weights(len(alphas)),
        )  # fmt: skip
        notes: list[str] = []
        if len(alphas) == 1:
            chosen = 0
        elif few_validation_rows(self):
            notes.append(
                f"validation cells have fewer than {_linear.MIN_CELL} rows: {FOLDS} folds of the "
                "training rows chose alpha"
            )
            chosen = _linear.choose(judged_by_folds(self, how, notes), alphas, self.plan.select)
        else:
            truth, cells = self.task(rows_v), self.cells(rows_v)
            weights = self.split.validation_weights
            judged = []
            for j in range(len(alphas)):
                found = self.scores(self.validation, fits.weights[j], fits.intercepts[j], how)
                judged.append(_linear.score(truth, decided_by(found, present), cells, weights))
            chosen = _linear.choose(judged, alphas, self.plan.select)
        return _Path(alphas, fits.weights, fits.intercepts, fits.converged, present, chosen, notes)

    def _unregularised(self, how: _erasers.Map) -> _Fitted:
        """The head of alpha 0."""
        if isinstance(self.plan.task, Columns):
            w, b = _linear.ridge_path(self.train, self.task(self.split.train), (0.0,), how.factors)
            return _Fitted(w[0], b[0], None, 0.0, True)
        present, local = self.classes()
        fits = _logistic.fit(
            self.train, local, len(present), np.zeros(1), factors=how.factors, gram=self.gram(),
            sample_weights=self.sample_weights(1), max_iter=1000,
        )  # fmt: skip
        if fits.separable[0]:
            raise InputError(_linear.SEPARABLE)
        converged = bool(fits.converged[0])
        return _Fitted(fits.weights[0], fits.intercepts[0], present, 0.0, converged)

    def _classifier(self, eraser: str, head: Named, how: _erasers.Map) -> Record:
        """A classifier of scikit-learn's kind, fitted on erased training rows."""
        from sklearn.base import clone

        model = clone(head.what)
        params = model.get_params()
        if "random_state" in params and params["random_state"] is None:
            model.set_params(random_state=self.seed)
        passed: dict[str, Any] = {}
        accepted = inspect.signature(model.fit).parameters
        passed |= weight_of(model, self.split.weights)
        if "groups" in accepted and self.plan.cells is not None:
            passed["groups"] = self.cells(self.split.train)
        if "groups" in passed and "validation" in accepted and len(self.validation):
            v = self.split.validation
            passed["validation"] = (how(self.validation), self.task(v), self.cells(v))
        target = self.task(self.split.train)
        target = target.ravel() if target.ndim == 2 and target.shape[1] == 1 else target
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(how(self.train), target, **passed)
        record = self._record(eraser, head.name)
        record["converged"] = not any("Convergence" in w.category.__name__ for w in caught)
        decided = np.asarray(model.predict(how(self.test)))
        return with_values(self, record, decided)

    def scores(self, rows: Float, w: Float, b: Float, how: _erasers.Map) -> Float:
        """(n, C): r(x)^T w + b, without erasing rows; b is that of centred coordinates."""
        through = w - (w @ how.left.T) @ how.right
        return np.asarray(rows @ through.T + b)

    def _judged(
        self, eraser: str, name: str, fitted: _Fitted, how: _erasers.Map, *, frozen: bool = False
    ) -> Record:
        """Metrics on the test rows; a frozen head was not fitted to rows that are erased."""
        record = self._record(eraser, name, alpha=fitted.alpha)
        record["converged"] = fitted.converged
        shift = fitted.weights @ how.offset if frozen else 0.0
        found = self.scores(self.test, fitted.weights, fitted.intercepts + shift, how)
        decided = found if fitted.present is None else decided_by(found, fitted.present)
        return with_values(self, record, decided)

    def _advice(self, moments: Factored) -> Record:
        """Advice from the moments, before anything is measured."""
        record = self._record(ADVISER, ERASER_ROW)
        erase = list(self.plan.concepts)
        frozen = advice.frozen_head_advice(moments, erase, self.plan.task_name)
        values = {"rho": frozen.rho, "threshold": frozen.threshold, **self._frozen(moments)}
        for name in erase:
            trace = advice.held_out_trace(moments, name)
            suffix = f"[{name}]" if len(erase) > 1 else ""
            values |= {
                f"trace_before{suffix}": trace.before,
                f"expected_trace{suffix}": trace.expected,
                f"expected_r2{suffix}": trace.r2,
                f"rows_for_half{suffix}": trace.rows_for(max(trace.r2 / 2, 1e-12)),
            }
        record["values"] = values
        return record

    def _frozen(self, moments: Factored) -> dict[str, float]:
        """Squared error that SPLINCE has above LEACE, frozen ridge heads of extreme alphas."""
        place = {name: k for k, name in enumerate(self.moments.classes(self.plan.task_name))}
        classes = self.plan.task.classes  # type: ignore[union-attr]
        columns = np.array([place.get(name, len(place)) for name in classes])
        ones = np.eye(len(place) + 1)[:, :-1]  # a class that training lacks has no column
        train, test = (
            ones[columns[self.task(rows)]] for rows in (self.split.train, self.split.test)
        )
        mean = np.average(train, axis=0, weights=self.split.weights)
        cross = self.moments.cross_covariance(self.plan.task_name, ddof=0) / self.unit
        values = {"task_classes": float(len(place))}
        for name, alpha in (
            ("strong", self.plan.alphas[0]),
            ("weak", self.plan.alphas[-1]),
        ):
            head: Float = np.asarray(
                np.linalg.solve(self.gram() + alpha * np.eye(len(cross)), cross).T,
                dtype=np.float64,
            )
            errors = advice.frozen_squared_errors(
                moments, list(self.plan.concepts), self.plan.task_name, head, self.test, test, mean
            )
            values[f"squared_error_{name}"] = errors["SPLINCE"] - errors["LEACE"]
        return values


@dataclass(frozen=True, slots=True, eq=False)
class _Fitted:
    """One head in scaled coordinates; `present` are the codes of its classes."""

    weights: Float
    intercepts: Float
    present: Codes | None
    alpha: float
    converged: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """Heads over alphas and the position of the chosen one."""

    alphas: tuple[float, ...]
    weights: Float
    intercepts: Float
    converged: NDArray[np.bool_]
    present: Codes | None
    chosen: int
    notes: list[str]

    def at(self, j: int) -> _Fitted:
        return _Fitted(
            self.weights[j], self.intercepts[j], self.present, self.alphas[j],
            bool(self.converged[j]),
        )  # fmt: skip

    def best(self) -> _Fitted:
        return self.at(self.chosen)
