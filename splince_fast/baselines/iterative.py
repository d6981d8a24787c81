"""Base class of INLP and R-LACE: validation of inputs, probes, the projection and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.linear_model import LogisticRegression

from splince_fast._runtime.arguments import warn
from splince_fast._runtime.names import listed, names_array
from splince_fast._solve.options import is_number
from splince_fast._solve.tolerances import EPS
from splince_fast.baselines.inputs import (
    ClassRows,
    Float,
    RandomState,
    Validation,
    append_validation,
    as_generator,
    float_rows,
    normalised_weights,
    observed_classes,
    validation_mask,
)
from splince_fast.exceptions import (
    InputError,
    LabelError,
    NotEnoughDataError,
    NothingErasedWarning,
)
from splince_fast.labels.containers import check_index
from splince_fast.projection import Projection
from splince_fast.transformer import ErasingTransformer, columns_by_name


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """Report of an iterative eraser: the rounds of the fit, and the remaining association.

    The selection rows, on which probes are evaluated, are the validation rows, or the training rows
    if the fit has no validation rows.
    """

    method: str
    n_rows: int  # training rows
    n_validation: int
    n_features: int
    rank: int  # number of removed dimensions
    rounds: int  # probes (INLP) or steps (R-LACE)
    stop: str  # reason for the stop
    majority: float  # weighted fraction of the most frequent class in the selection rows
    # Accuracy of each probe on the selection rows (with `by_task`, on those of one task class),
    # including the probe at which the fit stops.
    accuracies: tuple[float, ...]
    # |P S_xz|_F / |S_xz|_F over the training rows, P the matrix of the eraser and S_xz the
    # covariance of x with the class indicators: 1 without erasure, 0 for LEACE.
    residual: float
    # E|r(x) - x|^2 of the training rows for the eraser r, divided by their total variance.
    distortion: float
    # Smallest cosine of the principal angles between the removed subspace and the column space of
    # S_xz, which SAL removes: 1 if one contains the other, 0 if nothing is removed.
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
class ErasureData:
    """Validated inputs of one fit: centred rows, classes of the concept, and task."""

    train: ClassRows
    validation: ClassRows
    mean: Float
    rng: np.random.Generator

    @property
    def selection(self) -> ClassRows:
        """The validation rows, or the training rows if there are none."""
        return self.validation if len(self.validation) else self.train


@dataclass(frozen=True, slots=True)
class ErasureRun:
    """Result of the rounds of an iterative eraser."""

    basis: Float  # (d, r), orthonormal basis of the r removed dimensions
    rounds: int
    stop: str
    accuracies: list[float]


class IterativeEraser(ErasingTransformer):
    """Base class of transformers that project out the directions of linear probes."""

    validation_share: float
    random_state: RandomState
    by_task: bool = False  # whether the fit needs the labels y of the task
    classes_: NDArray[Any]
    report_: ErasureReport

    # With metadata routing, scikit-learn passes these arguments without `set_fit_request`.
    __metadata_request__fit: ClassVar = {"concept": True, "validation": True}

    def fit(
        self,
        X: object,
        y: object = None,
        *,
        concept: object = None,
        sample_weight: ArrayLike | None = None,
        validation: Validation = None,
    ) -> Self:
        """Fit to all rows at once, and discard any earlier fit.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Copied to float64.
        y : array-like of shape (n_samples,), optional
            Labels of the task. Used only with ``by_task=True`` (INLP), or as the concept with
            ``concept_from="y"``; otherwise ignored.
        concept : array-like of shape (n_samples,), mapping or frame with one column
            Classes to erase. Rows without a label (None or NaN) contribute to the mean only.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies; rows of weight 0 are left out.
        validation : array-like of bool, shape (n_samples,), or tuple (X, concept), optional
            Mask of the validation rows, or separate validation rows. Separate rows have weight 1.
            Probes are evaluated on these rows, but never trained on them. By default the fraction
            ``validation_share`` of each class is drawn at random.

        Returns
        -------
        object
            The estimator itself; unchanged after an error or KeyboardInterrupt.

        Raises
        ------
        InputError, NonFiniteError, LabelError, NotEnoughDataError
            The rows, labels or parameters are invalid, or a class has no training row.
        """
        with self._restored_on_error():
            self._check_parameters()
            data = self._read(X, y, concept, sample_weight, validation)
            self._set_results(data, self._erase(data))
        return self

    def _erase(self, data: ErasureData) -> ErasureRun:
        raise NotImplementedError

    def _check_parameters(self) -> None:
        """Raise InputError for an invalid parameter; called before any row is read."""
        self._check_concept_from()
        if not is_number(self.validation_share) or not 0 <= self.validation_share < 1:
            raise InputError(
                f"validation_share is {self.validation_share!r}; it must be a number in [0, 1)"
            )

    def _read(
        self, X: Any, y: Any, concept: Any, sample_weight: ArrayLike | None, validation: Validation
    ) -> ErasureData:
        """Validate the inputs, split off the validation rows, and subtract the training mean."""
        columns = self._concept_columns(y, concept)
        if len(columns) != 1:
            raise LabelError(
                f"the concept holds the variables {listed(sorted(columns))}; "
                f"{type(self).__name__} erases one variable: pass one column, or joint cells as one"
            )
        mask = None if isinstance(validation, tuple) else validation
        for column, role in (
            (y, "y"), (concept, "concept"), (sample_weight, "sample_weight"), (mask, "validation")
        ):  # fmt: skip
            check_index(X, column, role)
        rows = self._rows(X, reset=True, min_rows=2)
        ((name, values),) = columns.items()
        inputs = [rows, values, y] if self.by_task else [rows, values]
        if isinstance(validation, tuple):
            if len(validation) > 1:
                # The concept may also be a frame or mapping with one column.
                concept_columns = columns_by_name(validation[1], "concept")
                if len(concept_columns) == 1:
                    validation = (validation[0], *concept_columns.values(), *validation[2:])
            inputs, sample_weight, validation = append_validation(
                validation, inputs, sample_weight, lambda X: self._rows(X, reset=False, min_rows=1)
            )
        rows, values, *task_columns = inputs
        classes, codes = observed_classes(values, len(rows), str(name), "the concept")
        weight = normalised_weights(sample_weight, len(rows))
        task = None
        if task_columns:
            if task_columns[0] is None:
                self._refuse_missing_y("by_task draws a class of y per round")
            _, task = observed_classes(task_columns[0], len(rows), "task", "the task")
        usable = (codes >= 0) & (weight > 0)
        rng = as_generator(self.random_state)
        mask = validation_mask(validation, self.validation_share, codes, usable, rng)
        in_mean = ~mask & (weight > 0)
        rows = float_rows(rows)
        mean = weight[in_mean] @ rows[in_mean] / weight[in_mean].sum()
        rows -= mean
        labelled = ClassRows(rows, codes, weight, task)
        train, validation_rows = (labelled.take(usable & part) for part in (~mask, mask))
        if len(np.unique(train.codes)) < len(classes):
            raise NotEnoughDataError(
                "a class of the concept has no training row; mark other rows for validation, or "
                "leave the class out"
            )
        if len(validation_rows) and len(np.unique(validation_rows.codes)) < 2:
            raise LabelError(
                "the validation rows hold a single class of the concept; mark other rows for "
                "validation"
            )
        self.classes_ = names_array(classes)
        return ErasureData(train, validation_rows, mean, rng)

    def _set_results(self, data: ErasureData, run: ErasureRun) -> None:
        """Set `projection_` and `report_`."""
        train, basis = data.train, run.basis
        cross_covariance = _cross_covariance(train, len(self.classes_))
        removed, total = (
            float(train.weight @ np.einsum("ij,ij->i", rows, rows))
            for rows in (train.rows @ basis, train.rows)
        )
        erased_covariance = cross_covariance - basis @ (basis.T @ cross_covariance)
        norm = float(np.linalg.norm(cross_covariance))
        warnings: tuple[str, ...] = ()
        if not basis.shape[1]:
            accuracies = ", ".join(f"{accuracy:.3f}" for accuracy in run.accuracies[:3])
            text = f"nothing was erased, so the eraser is the identity: {run.stop}"
            if accuracies:
                text += (
                    f" (probe accuracy on the selection rows {accuracies}; always predicting the "
                    f"most frequent class gives {data.selection.majority():.3f})"
                )
            warn(text, NothingErasedWarning)
            warnings = (text,)
        self._projection = Projection(basis, basis, data.mean, method=type(self).__name__)
        self.report_ = ErasureReport(
            method=type(self).__name__,
            n_rows=len(train),
            n_validation=len(data.validation),
            n_features=len(data.mean),
            rank=basis.shape[1],
            rounds=run.rounds,
            stop=run.stop,
            majority=data.selection.majority(),
            accuracies=tuple(run.accuracies),
            residual=float(np.linalg.norm(erased_covariance)) / norm if norm else 0.0,
            distortion=removed / total if total else 0.0,
            cosine_sal=_smallest_cosine(cross_covariance, basis),
            warnings=warnings,
        )


def _cross_covariance(train: ClassRows, n_classes: int) -> Float:
    """Return the (d, K) covariance of x with the indicators of the K classes."""
    weight, indicators = train.weight / train.weight.sum(), np.eye(n_classes)[train.codes]
    return np.asarray((weight[:, None] * train.rows).T @ (indicators - weight @ indicators))


def _smallest_cosine(cross_covariance: Float, basis: Float) -> float:
    """Return the smallest cosine of the principal angles between two column spaces, or 0."""
    cross_basis = orthonormal_basis(cross_covariance)
    if not cross_basis.shape[1] or not basis.shape[1]:
        return 0.0
    return float(min(1.0, np.linalg.svd(basis.T @ cross_basis, compute_uv=False).min()))


def orthonormal_basis(columns: Float, orthogonal_to: Float | None = None) -> Float:
    """Return an orthonormal basis of the span of (I - A A^T) `columns`, A the second argument."""
    if orthogonal_to is None:
        orthogonal_to = np.empty((len(columns), 0))
    largest_norm = np.linalg.norm(columns, axis=0).max(initial=0.0)
    residual = columns
    for _ in range(2):  # one projection leaves rounding errors in the span of A
        residual = residual - orthogonal_to @ (orthogonal_to.T @ residual)
    left, values, _ = np.linalg.svd(residual, full_matrices=False)
    basis = left[:, values > max(columns.shape) * EPS * largest_norm]
    if orthogonal_to.shape[1] and basis.shape[1]:
        basis = np.linalg.qr(basis - orthogonal_to @ (orthogonal_to.T @ basis)).Q
    return np.asarray(basis)


def fit_probe(part: ClassRows, alpha: float) -> LogisticRegression:
    """Fit a logistic probe, which minimises mean log-loss + alpha / 2 |w|^2."""
    d, k = part.rows.shape[1], len(np.unique(part.codes))
    # Newton's method needs fewer passes over the rows; its steps are cheap for few coefficients.
    newton = d * (k if k > 2 else 1) <= 2000
    model = LogisticRegression(
        C=1.0 / (alpha * part.weight.sum()),
        solver="newton-cholesky" if newton else "lbfgs",
        tol=1e-6 if newton else 1e-5,
        max_iter=1000,
    )
    return model.fit(part.rows, part.codes, sample_weight=part.weight)
