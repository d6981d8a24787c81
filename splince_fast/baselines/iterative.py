"""Base of INLP and R-LACE: rows and classes of a fit, probes, the projection and its report."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.linear_model import LogisticRegression

from splince_fast._runtime.arguments import warn
from splince_fast._runtime.names import listed, names_array
from splince_fast._runtime.rows import check_values
from splince_fast._solve.options import Option
from splince_fast._solve.tolerances import EPS
from splince_fast.exceptions import (
    InputError,
    LabelError,
    NotEnoughDataError,
    NothingErasedWarning,
)
from splince_fast.labels import encode_one
from splince_fast.labels.encoded import observed
from splince_fast.projection import Projection
from splince_fast.report import as_text, shortened
from splince_fast.transformer import ErasingTransformer, read_weights

Float = NDArray[np.float64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]
RandomState = int | np.random.Generator | np.random.RandomState | None

# Type and interval of the numbers that each parameter accepts.
_NUMBERS: dict[str, tuple[type[float] | type[int], str]] = {
    **dict.fromkeys(("alpha", "step_size"), (float, "(0, inf)")),
    **dict.fromkeys(("tol", "weight_decay"), (float, "[0, inf)")),
    **dict.fromkeys(("momentum", "validation_share"), (float, "[0, 1)")),
    **dict.fromkeys(("rank", "max_rank", "batch_size"), (int, "[1, inf)")),
    **dict.fromkeys(("max_steps", "check_every", "patience"), (int, "[1, inf)")),
}


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """Report of an iterative eraser: the rounds of the fit, and the remaining association.

    Probes are evaluated on the selection rows: the validation rows, or else the training rows.
    """

    method: str
    n_rows: int  # training rows
    n_validation: int
    n_features: int
    rank: int  # number of removed dimensions
    rounds: int  # probes (INLP) or steps (R-LACE)
    stop: str  # reason for the stop
    majority: float  # weighted fraction of the most frequent class in the selection rows
    accuracies: tuple[float, ...]  # of all probes on the selection rows
    # |P S_xz|_F / |S_xz|_F over the training rows, P the matrix of the eraser and S_xz the
    # covariance of x with the class indicators: 1 without erasure, 0 for LEACE.
    residual: float
    # E|r(x) - x|^2 of the training rows for the eraser r, divided by their total variance.
    distortion: float
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        facts = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        facts["accuracies"] = shortened((f"{a:.3f}" for a in self.accuracies), 3)
        facts["warnings"] = "; ".join(self.warnings)
        return as_text(
            self.method,
            [(k, f"{v:.3g}" if isinstance(v, float) else str(v)) for k, v in facts.items()],
        )


@dataclass(frozen=True, slots=True)
class ClassRows:
    """Centred rows of a fit, with a class code and a weight for each row."""

    rows: Float  # (n, d)
    codes: Index
    weight: Float

    def __len__(self) -> int:
        return len(self.codes)

    def fraction(self, mask: Mask) -> float:
        """Return the weighted fraction of the rows that `mask` marks."""
        return float(self.weight @ mask / self.weight.sum())

    def majority(self) -> float:
        """Return the weighted fraction of the rows in the most frequent class."""
        return float(np.bincount(self.codes, self.weight).max() / self.weight.sum())


class ErasureData(NamedTuple):
    """Validated inputs of one fit."""

    train: ClassRows
    selection: ClassRows  # validation rows, or the training rows if there are none
    mean: Float  # of the training rows
    rng: np.random.Generator


class ErasureRun(NamedTuple):
    """Result of the rounds of an iterative eraser."""

    basis: Float  # (d, r), orthonormal basis of the r removed dimensions
    rounds: int
    stop: str
    accuracies: list[float]


@dataclass(kw_only=True, eq=False, repr=False)
class IterativeEraser(ErasingTransformer):
    """Base class of transformers that project out the directions of linear probes."""

    alpha: float = 1e-4
    validation_share: float = 0.2
    concept_from: str | None = None
    random_state: RandomState = None
    progress: bool | None = None

    # With metadata routing, scikit-learn passes these arguments without `set_fit_request`.
    __metadata_request__fit: ClassVar = {"concept": True, "validation": True}

    def fit(
        self,
        X: object,
        y: object = None,
        *,
        concept: object = None,
        sample_weight: ArrayLike | None = None,
        validation: ArrayLike | None = None,
    ) -> Self:
        """Fit to all rows at once, and discard any earlier fit.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Copied to float64.
        y : array-like of shape (n_samples,), optional
            The concept with ``concept_from="y"``; otherwise ignored.
        concept : array-like of shape (n_samples,), mapping or frame with one column
            Classes to erase. Rows without a label (None or NaN) contribute to the mean only.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies; rows of weight 0 are left out.
        validation : array-like of bool, shape (n_samples,), optional
            Mask of the validation rows, on which probes are evaluated, but never trained. By
            default the fraction ``validation_share`` of each class is drawn at random.

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
            columns = self._concept_columns(y, concept)
            if len(columns) != 1:
                raise LabelError(
                    f"the concept holds the variables {listed(sorted(columns))}; "
                    f"{type(self).__name__} erases one variable: pass one column, or joint cells "
                    "as one"
                )
            rows = self._rows(
                X, reset=True, min_rows=2, y=y, concept=concept, sample_weight=sample_weight,
                validation=validation,
            )  # fmt: skip
            ((name, values),) = columns.items()
            data = self._data(rows, str(name), values, sample_weight, validation)
            self._set_results(data, self._erase(data))
        return self

    def _erase(self, data: ErasureData) -> ErasureRun:
        raise NotImplementedError

    def _check_parameters(self) -> None:
        """Raise InputError for an invalid parameter; called before any row is read."""
        self._check_concept_from()
        for field in fields(self):
            if field.name in _NUMBERS:
                number, interval = _NUMBERS[field.name]
                default = None if "None" in str(field.type) else field.default
                option = Option(field.name, default, "", number=number, interval=interval)
                option.check(getattr(self, field.name))

    def _data(
        self, X: NDArray[Any], name: str, values: Any, sample_weight: Any, validation: Any
    ) -> ErasureData:
        """Validate classes and weights, split off the validation rows, subtract the mean."""
        column = observed(encode_one(values, len(X), name=name, kind="classes"))
        codes, classes = column.codes, column.classes
        if len(classes) < 2:
            raise LabelError(
                f"the concept has only {len(classes)} class(es) among its labels; pass at least two"
            )
        weight = read_weights(sample_weight, len(X))
        weight = np.ones(len(X)) if weight is None else weight / weight[weight > 0].mean()
        usable, rng = (codes >= 0) & (weight > 0), _generator(self.random_state)
        mask = _validation_mask(validation, self.validation_share, codes, usable, rng)
        in_mean = ~mask & (weight > 0)
        check_values(X)
        rows = np.array(X, dtype=np.float64, order="C")
        mean = weight[in_mean] @ rows[in_mean] / weight[in_mean].sum()
        rows -= mean
        train, selection = (
            ClassRows(rows[part], codes[part], weight[part])
            for part in (usable & ~mask, usable & mask)
        )
        if len(np.unique(train.codes)) < len(classes):
            raise NotEnoughDataError(
                "a class of the concept has no training row; mark other rows for validation, or "
                "leave the class out"
            )
        if len(selection) and len(np.unique(selection.codes)) < 2:
            raise LabelError(
                "the validation rows hold a single class of the concept; mark other rows for "
                "validation"
            )
        self.classes_ = names_array(classes)
        return ErasureData(train, selection if len(selection) else train, mean, rng)

    def _set_results(self, data: ErasureData, run: ErasureRun) -> None:
        """Set `projection_` and `report_`."""
        train, basis, name = data.train, run.basis, type(self).__name__
        indicators, fraction = np.eye(len(self.classes_))[train.codes], train.weight[:, None]
        fraction = fraction / fraction.sum()
        cross_covariance = (fraction * train.rows).T @ (indicators - fraction.T @ indicators)
        removed, total = (
            float(train.weight @ np.einsum("ij,ij->i", rows, rows))
            for rows in (train.rows @ basis, train.rows)
        )
        remaining = cross_covariance - basis @ (basis.T @ cross_covariance)
        norm = float(np.linalg.norm(cross_covariance))
        warnings: tuple[str, ...] = ()
        majority = data.selection.majority()
        if not basis.shape[1]:
            # The first probe of INLP ended the fit.
            warnings = (
                f"nothing was erased, so the eraser is the identity: {run.stop} (probe accuracy on "
                f"the selection rows {run.accuracies[0]:.3f}; always predicting the most frequent "
                f"class gives {majority:.3f})",
            )
            warn(warnings[0], NothingErasedWarning)
        self._projection = Projection(basis, basis, data.mean, method=name)
        self.report_ = ErasureReport(
            method=name,
            n_rows=len(train),
            n_validation=0 if data.selection is train else len(data.selection),
            n_features=len(data.mean),
            rank=basis.shape[1],
            rounds=run.rounds,
            stop=run.stop,
            majority=majority,
            accuracies=tuple(run.accuracies),
            residual=float(np.linalg.norm(remaining)) / norm if norm else 0.0,
            distortion=removed / total if total else 0.0,
            warnings=warnings,
        )


def _generator(random_state: RandomState) -> np.random.Generator:
    """Return a Generator; a RandomState draws its seed."""
    if isinstance(random_state, np.random.RandomState):
        random_state = int(random_state.randint(2**31 - 1))
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"random_state is {random_state!r}; it must be None, a non-negative integer, a "
            "Generator or a RandomState"
        ) from error


def _validation_mask(
    validation: ArrayLike | None,
    fraction: float,
    codes: Index,
    usable: Mask,
    rng: np.random.Generator,
) -> Mask:
    """Return the mask of the validation rows: `validation`, or a random fraction of each class.

    Of the n rows of a class that are `usable`, ``min(round(fraction * n), n - 1)`` are drawn. The
    mask is all False if fewer than two classes would have a validation row.
    """
    if validation is not None:
        mask = np.asarray(validation)
        if mask.dtype != np.bool_ or mask.shape != codes.shape:
            raise InputError(
                f"validation is {mask.dtype} of shape {mask.shape}; pass one boolean per row, True "
                "where the row is for validation"
            )
        if not (mask & usable).any() or not (~mask & usable).any():
            raise InputError(
                "validation marks all of the usable rows (labelled, of positive weight), or none; "
                "mark some of them, and leave others for training"
            )
        return mask
    mask = np.zeros(len(codes), dtype=np.bool_)
    n_classes = 0
    for code in np.unique(codes[usable]) if fraction else ():
        members = np.flatnonzero(usable & (codes == code))
        n_drawn = min(round(fraction * len(members)), len(members) - 1)
        mask[rng.permutation(members)[:n_drawn]] = True
        n_classes += n_drawn > 0
    return mask if n_classes > 1 else np.zeros_like(mask)


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
