"""Erasers of a comparison: fitting by name, function of moments or estimator, and application.

A job holds its rows in scaled coordinates, (x - mean) / scale with one scale for all features.
Estimators, and the baselines INLP and R-LACE, are fitted to scaled rows, all other erasers to
unscaled rows or their moments. The fitted projection applies to unscaled rows in either case.

The solver of the library's heads takes unerased training rows and the left and right factors of an
affine eraser, P = I - left^T right. An eraser that needs labels is applied to the training,
validation and test rows, with the labels of each row.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast.conditional import ConditionalEraser
from splince_fast.evaluation.data import labels_of
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassCodes, Encoded
from splince_fast.methods.isotropic import isotropic
from splince_fast.methods.quadratic import quadratic
from splince_fast.methods.repair import repair
from splince_fast.methods.table import METHODS, key_of
from splince_fast.moments import Folds, Moments
from splince_fast.moments.snapshot import Factored
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Codes = NDArray[np.intp]
FittedEraser: TypeAlias = Projection | ConditionalEraser
# Joint class codes (n,) of the concepts; values (n, k) if all concepts are quantities; a mapping of
# columns by concept if only some are.
ConceptLabels: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]

_FOLD_ERASERS: dict[str, Callable[..., FittedEraser]] = {
    "quadratic": quadratic, "isotropic": isotropic,
}  # fmt: skip
_BASELINES = ("INLP", "RLACE")
_REPAIR_SUFFIX = "+repair"
ERASERS = (
    *(method.label for method in METHODS.values()), *_FOLD_ERASERS, "random", *_BASELINES,
    *(name + _REPAIR_SUFFIX for name in ("SAL", *_BASELINES)),
)  # fmt: skip


def parse_partial(name: str) -> tuple[str, float] | None:
    """Return base name and alpha of a partial eraser such as "LEACE*0.9"; None if no "*" occurs.

    Raises
    ------
    InputError
        The text after "*" is not a number from 0 to 1.
    """
    base, star, text = name.rpartition("*")
    if not star:
        return None
    try:
        intensity = float(text)
    except ValueError:
        intensity = math.nan
    if not 0.0 <= intensity <= 1.0:
        raise InputError(f"{name!r} has no number between 0 and 1 after the '*'")
    return base.strip(), intensity


@dataclass(frozen=True, slots=True, eq=False)
class SplitPart:
    """Scaled rows of one part of a split (training, validation or test), with labels.

    `task` holds class codes (n,), or values (n, k) of a quantity. `cells` holds codes (n,) of the
    cells, the joint classes of task and concepts; None if the task or a concept is a quantity.
    `labels` holds the labels of the task and of each concept, by their names in the moments.
    """

    rows: Float
    task: NDArray[Any]
    concept: ConceptLabels
    cells: Codes | None
    groups: Codes | None
    weights: Float | None
    labels: Mapping[str, Encoded]

    @property
    def strata(self) -> Codes:
        """Codes (n,) of the cells, or of the classes of the task if a concept is a quantity."""
        return self.task if self.cells is None else self.cells


@dataclass(frozen=True, slots=True, eq=False)
class ScaledCoordinates:
    """Scaled coordinates (x - mean) / scale, with conversion of rows and projections."""

    mean: Float
    scale: float

    def to_scaled(self, rows: Float) -> Float:
        """Convert rows to scaled coordinates in place, and return them."""
        rows -= self.mean
        rows /= self.scale
        return rows

    def to_data(self, rows: Float) -> Float:
        """Return a copy of scaled rows in unscaled coordinates."""
        return rows * self.scale + self.mean

    def projection(self, scaled: Projection) -> Projection:
        """Convert a projection of scaled rows to a projection of unscaled rows."""
        centre = self.mean + self.scale * scaled.mean
        return Projection(scaled.left, scaled.right, centre, method=scaled.method)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMap:
    """Affine eraser of scaled rows: row x becomes x - ((x - centre) right^T) left.

    `left` and `right` are (r, d), and `offset`, (d,), is centre right^T left.
    """

    left: Float
    right: Float
    offset: Float

    @classmethod
    def identity(cls, d: int) -> ScaledMap:
        """Return the identity map of rows with d features."""
        return cls(np.zeros((0, d)), np.zeros((0, d)), np.zeros(d))

    @classmethod
    def of(cls, projection: Projection, coordinates: ScaledCoordinates) -> ScaledMap:
        """Convert a projection of unscaled rows to a map of scaled rows."""
        left = np.ascontiguousarray(projection.left.T)
        right = np.ascontiguousarray(projection.right.T)
        centre = (projection.mean - coordinates.mean) / coordinates.scale
        return cls(left, right, (right @ centre) @ left)

    def __call__(self, rows: Float) -> Float:
        return rows - (rows @ self.right.T) @ self.left + self.offset

    @property
    def factors(self) -> tuple[Float, Float] | None:
        """Left and right factors for the solver; None for the identity."""
        return (self.left, self.right) if len(self.left) else None

    def scores(self, rows: Float, w: Float, b: Float) -> Float:
        """Return the scores (n, C) of a linear head on erased rows, without computing erased rows.

        `rows` are unerased, and `w` is (C, d). `b`, (C,), must include w @ offset, as do the
        intercepts of heads that were fitted to rows erased by this map.
        """
        effective = w - (w @ self.left.T) @ self.right
        return np.asarray(rows @ effective.T + b)


@dataclass(frozen=True, slots=True, eq=False)
class FitData:
    """Data to which the erasers of one seed and level are fitted."""

    moments: Moments
    factored: Factored  # snapshot of `moments`, factorised once for all erasers and the advice
    concepts: tuple[str, ...]
    task: str  # name of the task in the moments
    train: SplitPart
    validation: SplitPart
    seed: int
    coordinates: ScaledCoordinates

    def training_moments(self, rows: Float) -> Moments:
        """Return the moments of `rows`, the training rows before or after erasure."""
        return Moments().update(rows, dict(self.train.labels), sample_weight=self.train.weights)


class LabelEraser(NamedTuple):
    """Eraser that needs labels. `scaled` is True if it maps scaled rows, as for an estimator."""

    eraser: ConditionalEraser
    scaled: bool

    def erase(self, part: SplitPart, coordinates: ScaledCoordinates) -> Float:
        """Return the scaled erased rows of a part; the eraser receives the labels of the part."""
        if not len(part.rows):
            return part.rows
        if self.scaled:
            return np.asarray(self.eraser(part.rows, part.concept, progress=False))
        rows = coordinates.to_data(part.rows)
        return coordinates.to_scaled(self.eraser(rows, dict(part.labels), progress=False))


def fit_eraser(spec: object, data: FitData) -> Projection | LabelEraser:
    """Fit the eraser that a name, a function of moments, or an estimator specifies.

    The result is a projection of unscaled rows, or a `LabelEraser` if the eraser needs labels.

    Raises
    ------
    SplinceError
        The eraser cannot be fitted; for example InfeasibleError.
    """
    if isinstance(spec, str) and (partial := parse_partial(spec)) is not None:
        fitted = fit_eraser(partial[0], data)
        if isinstance(fitted, LabelEraser):
            raise InputError(f"{spec!r}: an eraser that uses labels cannot be applied partially")
        return fitted.scaled(partial[1])
    if isinstance(spec, str) and spec.endswith(_REPAIR_SUFFIX):
        return _fit_repaired(spec.removesuffix(_REPAIR_SUFFIX), data)
    estimator = hasattr(spec, "get_params") or spec in _BASELINES
    eraser = _fit_estimator(spec, data) if estimator else _fit_to_moments(spec, data)
    if isinstance(eraser, ConditionalEraser):
        return LabelEraser(eraser, scaled=estimator)
    return data.coordinates.projection(eraser) if estimator else eraser


def _fit_to_moments(spec: Any, data: FitData) -> FittedEraser:
    """Fit the eraser that a name or a function of moments specifies."""
    if isinstance(spec, str):
        if spec in _FOLD_ERASERS:
            return _fit_to_folds(spec, data)
        key = key_of(spec)
        return _random_projection(data) if key is None else _fit_method(key, data)
    eraser: FittedEraser = spec(data.moments.copy())  # a copy: the function may change it
    if not isinstance(eraser, FittedEraser):
        raise InputError(
            f"the eraser function returned {type(eraser).__name__}; it must return a Projection or "
            "a ConditionalEraser"
        )
    return eraser


def _fit_method(key: str, data: FitData) -> FittedEraser:
    """Fit the method of the library with the key `key` of `METHODS`."""
    method = METHODS[key]
    options: dict[str, Any] = {}
    if method.needs_task or (method.needs_labels and method.keeps):
        options["keep"] = data.task
    if "missing" in method.parameters:
        options["missing"] = "raise"  # every row of the split has its labels
    eraser: FittedEraser = method.function(data.factored, erase=list(data.concepts), **options)
    return eraser


def _fit_to_folds(name: str, data: FitData) -> FittedEraser:
    """Fit "quadratic" or "isotropic", which keep the task, to two folds of the training rows.

    Raises
    ------
    InputError
        There are several concepts, or the concept is a quantity.
    """
    train, concept = data.train, data.concepts[0]
    if len(data.concepts) > 1 or not isinstance(train.labels[concept], ClassCodes):
        raise InputError(
            f"{name!r} erases one concept of classes; combine several concepts to one column of "
            "their joint classes, and divide a quantity into classes"
        )
    labels, groups = dict(train.labels), None
    if train.groups is not None:
        groups = f"groups of {data.task} and {concept}"  # no variable has this name
        codes = ClassCodes(tuple(range(int(train.groups.max(initial=-1)) + 1)), train.groups)
        labels[groups] = labels_of(codes, np.arange(len(train.groups)))
    rows = data.coordinates.to_data(train.rows)
    folds = Folds(2, groups=groups, by=concept).update(rows, labels, sample_weight=train.weights)
    return _FOLD_ERASERS[name](folds, erase=concept, keep=data.task)


def _fit_repaired(name: str, data: FitData) -> Projection:
    """Fit an affine eraser, and compose it with the repair that restores Cov(x, task)."""
    eraser = fit_eraser(name, data)
    assert isinstance(eraser, Projection)
    before = data.training_moments(data.train.rows)
    after = data.training_moments(ScaledMap.of(eraser, data.coordinates)(data.train.rows))
    repairing = repair(after, before=before, keep=data.task)
    return data.coordinates.projection(repairing) @ eraser


def _random_projection(data: FitData) -> Projection:
    """Return a projection that removes a random subspace with the dimension of the concepts.

    A concept of k classes adds the dimension k - 1, and a quantity of k columns the dimension k.
    """
    moments = data.moments
    count = sum(
        max(1, len(moments.classes(name)) - 1)
        if moments.variables[name] == "classes"
        else moments.cross_covariance(name).shape[1]
        for name in data.concepts
    )
    d = len(moments.mean)
    Q, _ = np.linalg.qr(np.random.default_rng(data.seed).normal(size=(d, min(count, d))))
    return Projection(Q, Q, moments.mean, method="random")


def _fit_estimator(spec: object, data: FitData) -> FittedEraser:
    """Fit an estimator, or a baseline by its name, to scaled rows; return its ``projection_``."""
    from splince_fast.baselines._erasing import IterativeEraser

    if isinstance(spec, str):
        spec = getattr(import_module("splince_fast.baselines"), spec)()
    model = clone_with_seed(spec, data.seed)
    train, validation = data.train, data.validation
    validation_data: object = (validation.rows, validation.concept)
    if isinstance(model, IterativeEraser):
        train, validation_data = join_validation(train, validation)
    optional = {
        "concept": train.concept,
        "task": train.task,
        "validation": validation_data,
        "X_validation": validation.rows,
        "concept_validation": validation.concept,
    }
    accepted = inspect.signature(model.fit).parameters
    arguments = {name: value for name, value in optional.items() if name in accepted}
    arguments |= weight_argument(model, train.weights)
    rows, task, arguments = copy_arguments(model, (train.rows, train.task, arguments))
    model.fit(rows, task, **arguments)
    projection = getattr(model, "projection_", None)
    if not isinstance(projection, FittedEraser):
        raise InputError(
            f"{type(model).__name__} has no projection_ after fit; an eraser must be an estimator "
            "that sets projection_ to a Projection, or a function of moments"
        )
    return projection


def join_validation(
    train: SplitPart, validation: SplitPart
) -> tuple[SplitPart, NDArray[np.bool_] | None]:
    """Join training and validation rows; return the joint part and a mask of its validation rows.

    The estimators of the library accept weights of validation rows only in this form. The joint
    part has no groups. If the split has no validation rows, the mask is None, and the estimator
    draws validation rows itself.
    """
    if not len(validation.rows):
        return train, None

    def joined(first: Any, second: Any) -> Any:
        if isinstance(first, dict):
            return {name: np.concatenate([first[name], second[name]]) for name in first}
        return None if first is None else np.concatenate([first, second])

    columns = ("rows", "task", "concept", "cells", "weights")
    parts = {name: joined(getattr(train, name), getattr(validation, name)) for name in columns}
    n, n_train = len(parts["rows"]), len(train.rows)
    return SplitPart(**parts, groups=None, labels={}), np.arange(n) >= n_train


def copy_arguments(estimator: object, values: Any) -> Any:
    """Return the arguments of an estimator, copied unless the estimator is of this library.

    Other estimators may overwrite their arguments, as do those of scikit-learn with
    ``copy_X=False``.
    """
    of_library = type(estimator).__module__.partition(".")[0] == "splince_fast"
    return values if of_library else copy.deepcopy(values)


def clone_with_seed(estimator: object, seed: int) -> Any:
    """Return a clone of an estimator, with `seed` for each ``random_state`` that is None."""
    from sklearn.base import clone

    model = clone(estimator)
    params = model.get_params().items()
    unset = [k for k, v in params if k.rpartition("__")[2] == "random_state" and v is None]
    return model.set_params(**dict.fromkeys(unset, seed))


def weight_argument(model: Any, weights: Float | None) -> dict[str, Float]:
    """Return the keyword argument of ``fit`` for training weights; {} if `weights` is None.

    Raises
    ------
    InputError
        ``fit`` has no parameter ``sample_weight``.
    """
    if weights is None:
        return {}
    if "sample_weight" not in inspect.signature(model.fit).parameters:
        raise InputError(
            f"{type(model).__name__}.fit has no parameter sample_weight, which "
            "association_method='weights' needs; pass association_method='subsample'"
        )
    return {"sample_weight": weights}
