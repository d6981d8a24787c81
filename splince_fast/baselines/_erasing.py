"""Base class of INLP and R-LACE: validation of inputs, probes, the projection and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.linear_model import LogisticRegression

from splince_fast._runtime.warn import warn
from splince_fast.baselines._inputs import (
    ClassRows,
    Float,
    RandomState,
    Validation,
    append_validation,
    as_generator,
    check_validation_share,
    float_rows,
    normalised_weights,
    observed_classes,
    validation_mask,
)
from splince_fast.estimators.base import ErasingTransformer, columns_by_name
from splince_fast.exceptions import LabelError, NotEnoughDataError, NothingErasedWarning
from splince_fast.labels.names import ClassName, listed, names_array
from splince_fast.labels.positions import check_index
from splince_fast.projection import Projection

_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """Report of an iterative eraser: the rounds of the fit, and the remaining association.

    The selection rows are the rows on which probes are evaluated: the validation rows, or the
    training rows if the fit has no validation rows.

    Attributes
    ----------
    method : str
    n_rows, n_validation, n_features : int
        Number of training rows, of validation rows and of features.
    rank : int
        Number of removed dimensions.
    rounds : int
        Number of probes (INLP) or steps (R-LACE).
    stop : str
        Reason for the stop.
    majority : float
        Weighted fraction of the most frequent class in the selection rows.
    accuracies : tuple of float
        Accuracy of each probe on the selection rows, including the probe at which the fit stops.
        With ``by_task`` of INLP: on the selection rows of one task class.
    residual : float
        |P S_xz|_F / |S_xz|_F over the training rows, where P is the matrix of the eraser and S_xz
        the covariance of x with the class indicators; 1 without erasure, 0 for LEACE.
    distortion : float
        Mean squared change E|r(x) - x|^2 of a training row by the eraser r, divided by the total
        variance of the training rows.
    cosine_sal : float
        Smallest cosine of the principal angles between the removed subspace and the column space
        of S_xz. SAL removes this column space. 1 if one subspace contains the other, 0 if nothing
        is removed.
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
class ErasureData:
    """Validated inputs of one fit: centred rows, classes of the concept, and task."""

    train: ClassRows
    selection: ClassRows  # the validation rows, or the training rows without validation rows
    n_validation: int
    mean: Float
    sum_of_squares: float  # weighted sum of squares of the centred training rows
    cross_covariance: Float  # (d, K), covariance of x with the indicators of the K classes
    classes: tuple[ClassName, ...]
    task: NDArray[np.intp] | None
    selection_task: NDArray[np.intp] | None
    rng: np.random.Generator


@dataclass(frozen=True, slots=True)
class ErasureRun:
    """Result of the rounds of an iterative eraser."""

    basis: Float  # (d, r), orthonormal basis of the r removed dimensions
    rounds: int
    stop: str
    accuracies: list[float]
    # Weighted sum of squares of the training rows, projected onto the basis.
    removed_sum_of_squares: float


class IterativeEraser(ErasingTransformer):
    """Base class of transformers that project out the directions of linear probes."""

    validation_share: float
    random_state: RandomState
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

    def _check_parameters(self) -> None:
        """Raise InputError for an invalid parameter; called before any row is read."""
        raise NotImplementedError

    def _erase(self, data: ErasureData) -> ErasureRun:
        """Return the subspace to remove; may overwrite the rows of `data`."""
        raise NotImplementedError

    def _uses_task(self) -> bool:
        """Return whether the fit needs the labels y of the task."""
        return False

    def _check_common(self) -> None:
        self._check_concept_from()
        check_validation_share(self.validation_share)

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
        inputs, names = [rows, values], "X, concept"
        if self._uses_task():
            inputs, names = [rows, values, y], "X, concept, y"
        if isinstance(validation, tuple) and len(validation) > 1:
            # The concept may also be a frame or mapping with one column.
            concept_columns = columns_by_name(validation[1], "concept")
            if len(concept_columns) == 1:
                validation = (validation[0], *concept_columns.values(), *validation[2:])
        inputs, sample_weight, validation = append_validation(
            validation, inputs, names, sample_weight,
            lambda X: self._rows(X, reset=False, min_rows=1),
        )  # fmt: skip
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
        in_train, in_validation = usable & ~mask, usable & mask
        for role_mask, role in ((in_train, "training"), (in_validation, "validation")):
            if role_mask.any() and len(np.unique(codes[role_mask])) < 2:
                raise LabelError(
                    f"the {role} rows hold a single class of the concept; mark other rows for "
                    "validation"
                )
        train = ClassRows(rows[in_train], codes[in_train], weight[in_train])
        if len(train) < 2 or len(np.unique(train.codes)) < len(classes):
            raise NotEnoughDataError(
                "a class of the concept has no training row; mark other rows for validation, or "
                "leave the class out"
            )
        n_validation = int(in_validation.sum())
        selection, in_selection = train, in_train
        if n_validation:
            in_selection = in_validation
            selection = ClassRows(rows[in_validation], codes[in_validation], weight[in_validation])
        self.classes_ = names_array(classes)
        return ErasureData(
            train,
            selection,
            n_validation,
            mean,
            sum_of_squares(train, train.rows),
            _cross_covariance(train, len(classes)),
            classes,
            None if task is None else task[in_train],
            None if task is None else task[in_selection],
            rng,
        )

    def _set_results(self, data: ErasureData, run: ErasureRun) -> None:
        """Set `projection_` and `report_`."""
        cross_covariance, basis, total = data.cross_covariance, run.basis, data.sum_of_squares
        erased_covariance = cross_covariance - basis @ (basis.T @ cross_covariance)
        norm = float(np.linalg.norm(cross_covariance))
        warning_texts = []
        if not basis.shape[1]:
            accuracies = ", ".join(f"{accuracy:.3f}" for accuracy in run.accuracies[:3])
            figures = (
                f" (probe accuracy on the selection rows {accuracies}; always predicting the most "
                f"frequent class gives {data.selection.majority():.3f})"
            )
            warning_texts.append(
                f"nothing was erased, so the eraser is the identity: {run.stop}"
                + (figures if accuracies else "")
            )
            warn(warning_texts[-1], NothingErasedWarning)
        self._projection = Projection(basis, basis, data.mean, method=type(self).__name__)
        self.report_ = ErasureReport(
            method=type(self).__name__,
            n_rows=len(data.train),
            n_validation=data.n_validation,
            n_features=len(data.mean),
            rank=basis.shape[1],
            rounds=run.rounds,
            stop=run.stop,
            majority=data.selection.majority(),
            accuracies=tuple(run.accuracies),
            residual=float(np.linalg.norm(erased_covariance)) / norm if norm else 0.0,
            distortion=run.removed_sum_of_squares / total if total else 0.0,
            cosine_sal=_smallest_cosine(cross_covariance, basis),
            warnings=tuple(warning_texts),
        )


def sum_of_squares(part: ClassRows, rows: Float) -> float:
    """Return the sum of squares of `rows`, (n, r), weighted by the row weights of `part`."""
    return float(part.weight @ np.einsum("ij,ij->i", rows, rows))


def _cross_covariance(train: ClassRows, n_classes: int) -> Float:
    """Return the (d, K) covariance of x with the indicators of the K classes."""
    fractions = np.bincount(train.codes, train.weight, n_classes) / train.weight.sum()
    weighted = train.weight[:, None] * train.rows
    sums = np.stack([weighted[train.codes == c].sum(axis=0) for c in range(n_classes)], axis=1)
    total = train.weight.sum()
    return np.asarray(sums / total - np.outer(weighted.sum(axis=0) / total, fractions))


def _smallest_cosine(cross_covariance: Float, basis: Float) -> float:
    """Return the smallest cosine of the principal angles between two column spaces.

    The spaces are those of `cross_covariance` and `basis`. The cosine is 0 if one space has
    dimension 0.
    """
    cross_basis = orthonormal_basis(cross_covariance)
    if not cross_basis.shape[1] or not basis.shape[1]:
        return 0.0
    if cross_basis.shape[1] > basis.shape[1]:
        return float(np.linalg.svd(cross_basis.T @ basis, compute_uv=False).min())
    return float(min(1.0, np.linalg.svd(basis.T @ cross_basis, compute_uv=False).min()))


def orthonormal_basis(columns: Float, orthogonal_to: Float | None = None) -> Float:
    """Return an orthonormal basis of the span of (I - A A^T) `columns`, with A = `orthogonal_to`.

    `columns` has shape (d, k), and A has orthonormal columns. Singular values of the projected
    columns below ``max(d, k) eps`` times the largest norm of a column count as zero. The projection
    is applied twice, because one projection leaves rounding errors in the span of A.
    """
    if orthogonal_to is None:
        orthogonal_to = np.empty((len(columns), 0))
    largest_norm = np.linalg.norm(columns, axis=0).max(initial=0.0)
    residual = columns
    for _ in range(2):
        residual = residual - orthogonal_to @ (orthogonal_to.T @ residual)
    left, values, _ = np.linalg.svd(residual, full_matrices=False)
    basis = left[:, values > max(columns.shape) * _EPS * largest_norm]
    if orthogonal_to.shape[1] and basis.shape[1]:
        basis = np.linalg.qr(basis - orthogonal_to @ (orthogonal_to.T @ basis)).Q
    return np.asarray(basis)


def fit_probe(part: ClassRows, alpha: float) -> LogisticRegression:
    """Fit a logistic probe, which minimises mean log-loss + alpha / 2 |w|^2.

    The number of coefficients is d, or d K for K > 2 classes. The solver is Newton's method, which
    needs fewer passes over the rows, for at most 2000 coefficients, and L-BFGS for more.
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
