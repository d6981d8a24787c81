"""What INLP and R-LACE share: reading the fit's rows, the probe, the orthogonal map, the report."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from splince_fast.baselines._options import check_share, generator
from splince_fast.baselines._rows import (
    Float,
    Part,
    appended,
    class_codes,
    float_rows,
    seen_classes,
    validation_rows,
    weights_of,
)
from splince_fast.estimators.base import ErasingTransformer
from splince_fast.exceptions import LabelError, NotEnoughDataError, NothingErasedWarning
from splince_fast.labels.names import ClassName, names_array
from splince_fast.projection import Projection

_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """Course of an iterative eraser, and the remaining association.

    Attributes
    ----------
    method : str
    n_rows, n_validation, n_features : int
        Training rows, validation rows (0: selection used the training rows), features.
    rank : int
        Dimensions removed.
    rounds : int
        Probes (INLP) or steps (R-LACE) that were run.
    stop : str
        Why it ended, in words.
    majority : float
        Share of the most frequent class among the rows of selection.
    accuracies : tuple of float
        Of each probe on the rows of selection, the one that ended the run included.
    residual : float
        |P S_xz|_F / |S_xz|_F over the training rows, S_xz the covariance of x with the class
        indicators. 1 is untouched. Iterative erasure does not make it 0: LEACE does.
    distortion : float
        E|r(x) - x|^2 as a share of the total variance of the training rows.
    cosine_sal : float
        Smallest cosine of the principal angles between span(S_xz), which SAL removes, and what
        was removed; 1 where SAL's directions are among them, 0 where nothing was removed.
    warnings : tuple of str
    """

    method: str
    n_rows: int
    n_validation: int
    n_features: int
    rank: int
    rounds: int
    stop: str
    majority: float
    accuracies: tuple[float, ...]
    residual: float
    distortion: float
    cosine_sal: float
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        last = f"{self.accuracies[-1]:.3f}" if self.accuracies else "-"
        lines = [
            self.method,
            f"  data        {self.n_rows:,} rows, {self.n_validation:,} for validation, "
            f"d = {self.n_features}",
            f"  removed     {self.rank} of {self.n_features} dimensions in {self.rounds:,} rounds",
            f"  stopped     {self.stop}",
            f"  probe       accuracy {last}, majority {self.majority:.3f}",
            f"  residual    |P Sxz| / |Sxz| = {self.residual:.3g}",
            f"  distortion  {100 * self.distortion:.3g} % of the variance",
            f"  SAL         smallest principal cosine {self.cosine_sal:.4f}",
        ]
        return "\n".join(lines + [f"  warning     {text}" for text in self.warnings])


@dataclass(slots=True)
class Problem:
    """One fit, read: centred training rows, rows of selection, classes, task."""

    train: Part
    selection: Part
    n_validation: int
    mean: Float
    squares: float  # weighted sum of squares of the training rows
    cross: Float  # (d, K), covariance with the class indicators
    classes: tuple[ClassName, ...]
    task: NDArray[np.intp] | None
    selection_task: NDArray[np.intp] | None
    rng: np.random.Generator


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an erasing run: an orthonormal (d, r) basis, and its course."""

    basis: Float
    rounds: int
    stop: str
    accuracies: list[float]
    removed: float  # weighted sum of squares that the basis takes from the training rows


class IterativeEraser(ErasingTransformer):
    """A transformer that erases what probes find, by an orthogonal projection about the mean."""

    validation_share: float
    random_state: Any
    classes_: NDArray[Any]
    report_: ErasureReport

    # Every fit needs the concept, so routers pass it on without being told to.
    __metadata_request__fit: ClassVar = {"concept": True, "validation": True}

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        concept: Any = None,
        sample_weight: Any = None,
        validation: Any = None,
    ) -> Self:
        """Fit to all the data at once, forgetting what was seen before.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Copied to float64.
        y : array-like of shape (n_samples,), optional
            The task; ignored unless a parameter asks for it.
        concept : array-like of shape (n_samples,), mapping or frame with one column
            Classes to erase. A row without a label (None or NaN) counts for the mean alone.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies; rows of weight 0 are left out.
        validation : array-like of bool, shape (n_samples,), or tuple (X, concept), optional
            True for the rows that decide when to stop, or further rows that do; they train
            nothing. Without it a share of each class is set aside at random.

        Returns
        -------
        object
            The estimator itself; as it was if this raises, KeyboardInterrupt included.

        Raises
        ------
        InputError, NonFiniteError, LabelError, NotEnoughDataError
            The data, labels or parameters cannot be used; a class is missing where it is needed.
        """
        with self._restored_on_error():
            self._check_parameters()
            problem = self._read(X, y, concept, sample_weight, validation)
            self._conclude(problem, self._erase(problem))
        return self

    def _check_parameters(self) -> None:
        """Refuse parameters before any row is read."""
        raise NotImplementedError

    def _erase(self, problem: Problem) -> Outcome:
        """What to remove; may overwrite the rows of the problem."""
        raise NotImplementedError

    def _reads_task(self) -> bool:
        """Whether y is needed."""
        return False

    def _task_codes(self, y: Any, n: int) -> NDArray[np.intp] | None:
        """Codes of the task where it is needed."""
        return None

    def _check_common(self) -> None:
        """Refuse parameters that all iterative erasers have."""
        self._check_concept_from()
        check_share(self.validation_share)

    def _read(self, X: Any, y: Any, concept: Any, sample_weight: Any, validation: Any) -> Problem:
        """Check everything, split off the validation rows, centre by the training mean."""
        columns = self._concept(y, concept)
        if len(columns) != 1:
            raise LabelError(
                f"the concept holds the variables {sorted(columns)}; {type(self).__name__} erases "
                "one variable: pass one column, or joint cells as one"
            )
        rows = self._rows(X, reset=True, least=2)
        ((name, values),) = columns.items()
        given = [rows, values] if not self._reads_task() else [rows, values, y]
        names = "X, concept, y" if self._reads_task() else "X, concept"
        if (more := appended(validation, given, names, sample_weight)) is not None:
            (rows, values, *rest), sample_weight, validation = more
            y = rest[0] if rest else y
        classes, codes = seen_classes(class_codes(values, len(rows), str(name)), "concept")
        weight = weights_of(sample_weight, len(rows))
        task = self._task_codes(y, len(rows))
        usable = (codes >= 0) & (weight > 0)
        rng = generator(self.random_state)
        held_out = validation_rows(validation, self.validation_share, codes, usable, rng)
        used = ~held_out & (weight > 0)
        wide = float_rows(rows)
        mean = weight[used] @ wide[used] / weight[used].sum()
        wide -= mean
        trained, chosen = usable & ~held_out, usable & held_out
        train = Part(wide[trained], codes[trained], weight[trained])
        for part, role in ((train, "training"), (codes[chosen], "validation")):
            found = part.codes if isinstance(part, Part) else part
            if len(found) and len(np.unique(found)) < 2:
                raise LabelError(f"the {role} rows hold a single class of the concept; mark others")
        if len(train) < 2 or len(np.unique(train.codes)) < len(classes):
            raise NotEnoughDataError("a class of the concept has no training row; mark others")
        selection = Part(wide[chosen], codes[chosen], weight[chosen]) if chosen.any() else train
        self.classes_ = names_array(classes)
        return Problem(
            train,
            selection,
            int(chosen.sum()),
            mean,
            squares_of(train, train.rows),
            _cross_covariance(train, len(classes)),
            classes,
            None if task is None else task[trained],
            None if task is None else task[chosen if chosen.any() else trained],
            rng,
        )

    def _conclude(self, problem: Problem, outcome: Outcome) -> None:
        """Projection and report."""
        cross, basis, accuracies = problem.cross, outcome.basis, outcome.accuracies
        size = float(np.linalg.norm(cross))
        residual = float(np.linalg.norm(cross - basis @ (basis.T @ cross)))
        notes = []
        if not basis.shape[1]:
            notes.append(
                "nothing was erased: no probe reads the concept from the rows of selection "
                f"(accuracies {', '.join(f'{a:.3f}' for a in accuracies[:3])}; majority "
                f"{problem.selection.majority():.3f}), so the eraser is the identity"
            )
            warnings.warn(notes[-1], NothingErasedWarning, stacklevel=3)
        self._projection = Projection(basis, basis, problem.mean, method=type(self).__name__)
        self.report_ = ErasureReport(
            method=type(self).__name__,
            n_rows=len(problem.train),
            n_validation=problem.n_validation,
            n_features=len(problem.mean),
            rank=basis.shape[1],
            rounds=outcome.rounds,
            stop=outcome.stop,
            majority=problem.selection.majority(),
            accuracies=tuple(accuracies),
            residual=residual / size if size else 0.0,
            distortion=outcome.removed / problem.squares if problem.squares else 0.0,
            cosine_sal=_smallest_cosine(cross, basis),
            warnings=tuple(notes),
        )


def squares_of(part: Part, rows: Float) -> float:
    """Weighted sum of squares of some (n, r) rows of a part."""
    return float(part.weight @ np.einsum("ij,ij->i", rows, rows))


def _cross_covariance(train: Part, k: int) -> Float:
    """(d, K) covariance of x with the class indicators, by class sums."""
    share = np.bincount(train.codes, train.weight, k) / train.weight.sum()
    weighted = train.weight[:, None] * train.rows
    sums = np.stack([weighted[train.codes == c].sum(axis=0) for c in range(k)], axis=1)
    total = train.weight.sum()
    return np.asarray(sums / total - np.outer(weighted.sum(axis=0) / total, share))


def _smallest_cosine(cross: Float, basis: Float) -> float:
    """Smallest cosine between span(cross) and span(basis); 0 where either is empty."""
    span = orthonormal(cross)
    if not span.shape[1] or not basis.shape[1]:
        return 0.0
    if span.shape[1] > basis.shape[1]:
        return float(np.linalg.svd(span.T @ basis, compute_uv=False).min())
    return float(min(1.0, np.linalg.svd(basis.T @ span, compute_uv=False).min()))


def orthonormal(columns: Float, against: Float | None = None) -> Float:
    """Orthonormal basis of the columns, less what `against` (orthonormal) spans.

    A direction counts as absent below ``max(d, k) eps`` of the longest column. Two rounds of
    Gram-Schmidt leave it orthogonal to `against` at rounding level ("twice is enough").
    """
    rest, size = columns, np.linalg.norm(columns, axis=0).max(initial=0.0)
    for _ in range(2 if against is not None and against.shape[1] else 0):
        assert against is not None
        rest = rest - against @ (against.T @ rest)
    left, values, _ = np.linalg.svd(rest, full_matrices=False)
    found = left[:, values > max(columns.shape) * _EPS * size]
    if against is not None and against.shape[1] and found.shape[1]:
        found = found - against @ (against.T @ found)
        found = np.linalg.qr(found).Q
    return np.asarray(found)


def probe(part: Part, alpha: float) -> Any:
    """Logistic probe: mean log-loss + alpha / 2 |w|^2, at its minimum.

    Newton steps reach it in a few sweeps where their d x d (times K^2) systems are small; L-BFGS
    is used elsewhere.
    """
    d, k = part.rows.shape[1], len(np.unique(part.codes))
    newton = d * (k if k > 2 else 1) <= 2000
    model = LogisticRegression(
        C=1.0 / (alpha * part.weight.sum()),
        solver="newton-cholesky" if newton else "lbfgs",
        tol=1e-6 if newton else 1e-5,
        max_iter=1000,
    )
    return model.fit(part.rows, part.codes, sample_weight=part.weight)
