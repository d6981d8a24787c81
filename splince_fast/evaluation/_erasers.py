"""Erasers of a comparison: fitted by name, function of moments or estimator, and applied to rows.

A job holds its rows in scaled coordinates, (x - mean) / scale with one number as the scale; erasers
are maps of the data. An affine map is not applied to training rows: heads take it by its factors. A
map that depends on the labels of the concept is applied to the rows of all parts, each with its own
labels.
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
from splince_fast.evaluation._data import labels_of
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
# Joint codes of classes, columns of quantities, or a mapping of columns for both.
ConceptLabels: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]

_OF_FOLDS: dict[str, Callable[..., FittedEraser]] = {"quadratic": quadratic, "isotropic": isotropic}
_BASELINES = ("INLP", "RLACE")
_REPAIRED = "+repair"
ERASERS = (
    *(method.label for method in METHODS.values()), *_OF_FOLDS, "random", *_BASELINES,
    *(name + _REPAIRED for name in ("SAL", *_BASELINES)),
)  # fmt: skip


def partial_of(name: str) -> tuple[str, float] | None:
    """Eraser and alpha of a name such as "LEACE*0.9"; None without a "*".

    Raises
    ------
    InputError
        The text after it is no number between 0 and 1.
    """
    base, star, text = name.rpartition("*")
    if not star:
        return None
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not 0.0 <= alpha <= 1.0:
        raise InputError(f"{name!r} has no number between 0 and 1 behind the '*'")
    return base.strip(), alpha


@dataclass(frozen=True, slots=True, eq=False)
class SplitPart:
    """Scaled rows of one part of a split, and their labels.

    `task` holds codes of classes or (n, k) values; `cells` codes of the cells of task and concepts,
    None where one is a quantity; `labels` all variables of the moments.
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
        """Cells of a task of classes; its classes where a concept is a quantity."""
        return self.task if self.cells is None else self.cells


@dataclass(frozen=True, slots=True, eq=False)
class ScaledCoordinates:
    """Scaled coordinates (x - mean) / scale."""

    mean: Float
    scale: float

    def to_scaled(self, rows: Float) -> Float:
        """Scale rows in place, and return them."""
        rows -= self.mean
        rows /= self.scale
        return rows

    def to_data(self, rows: Float) -> Float:
        """Undo the scaling of rows; returns a copy."""
        return rows * self.scale + self.mean

    def projection(self, scaled: Projection) -> Projection:
        """Convert a projection of scaled rows to one of the rows of the data."""
        centre = self.mean + self.scale * scaled.mean
        return Projection(scaled.left, scaled.right, centre, method=scaled.method)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMap:
    """x -> x - ((x - centre) right^T) left in scaled coordinates.

    `left` and `right` are (r, d); `offset` (d,) is centre right^T left.
    """

    left: Float
    right: Float
    offset: Float

    @classmethod
    def identity(cls, d: int) -> ScaledMap:
        """The map that erases nothing."""
        return cls(np.zeros((0, d)), np.zeros((0, d)), np.zeros(d))

    @classmethod
    def of(cls, projection: Projection, coordinates: ScaledCoordinates) -> ScaledMap:
        """Convert a projection of the rows of the data to scaled coordinates."""
        left = np.ascontiguousarray(projection.left.T)
        right = np.ascontiguousarray(projection.right.T)
        centre = (projection.mean - coordinates.mean) / coordinates.scale
        return cls(left, right, (right @ centre) @ left)

    def __call__(self, rows: Float) -> Float:
        return rows - (rows @ self.right.T) @ self.left + self.offset

    @property
    def factors(self) -> tuple[Float, Float] | None:
        """Factors for the solver; None for the identity."""
        return (self.left, self.right) if len(self.left) else None

    def scores(self, rows: Float, w: Float, b: Float) -> Float:
        """(n, C): r(x)^T w + b, without erasing rows; b is that of centred coordinates."""
        effective = w - (w @ self.left.T) @ self.right
        return np.asarray(rows @ effective.T + b)


@dataclass(frozen=True, slots=True, eq=False)
class FitData:
    """Data that the erasers of one (seed, level) are fitted to."""

    moments: Moments
    factored: Factored  # snapshot of `moments`: one factor for all erasers and for the advice
    concepts: tuple[str, ...]
    task: str  # variable of the moments
    train: SplitPart
    validation: SplitPart
    seed: int
    coordinates: ScaledCoordinates

    def training_moments(self, rows: Float) -> Moments:
        """Moments of mapped training rows, with all labels."""
        return Moments().update(rows, dict(self.train.labels), sample_weight=self.train.weights)


class LabelEraser(NamedTuple):
    """A map that depends on labels; `scaled` if it maps scaled rows, as an estimator's do."""

    eraser: ConditionalEraser
    scaled: bool

    def erase(self, part: SplitPart, coordinates: ScaledCoordinates) -> Float:
        """Scaled rows of one part, erased with their labels."""
        if not len(part.rows):
            return part.rows
        if self.scaled:
            return np.asarray(self.eraser(part.rows, part.concept, progress=False))
        rows = coordinates.to_data(part.rows)
        return coordinates.to_scaled(self.eraser(rows, dict(part.labels), progress=False))


def fit_eraser(spec: object, data: FitData) -> Projection | LabelEraser:
    """The eraser of a name, function or estimator: a projection of the data, or a `LabelEraser`.

    Raises
    ------
    SplinceError
        An error of the method, such as InfeasibleError.
    """
    if isinstance(spec, str) and (partial := partial_of(spec)) is not None:
        whole = fit_eraser(partial[0], data)
        if isinstance(whole, LabelEraser):
            raise InputError(f"{spec!r}: an eraser that depends on labels has no fraction")
        return whole.scaled(partial[1])
    if isinstance(spec, str) and spec.endswith(_REPAIRED):
        return _repaired(spec.removesuffix(_REPAIRED), data)
    estimator = hasattr(spec, "get_params") or spec in _BASELINES
    eraser = _of_estimator(spec, data) if estimator else _of_moments(spec, data)
    if isinstance(eraser, ConditionalEraser):
        return LabelEraser(eraser, scaled=estimator)
    return data.coordinates.projection(eraser) if estimator else eraser


def _of_moments(spec: Any, data: FitData) -> FittedEraser:
    """The eraser of a name, or of a function of moments."""
    if isinstance(spec, str):
        if spec in _OF_FOLDS:
            return _of_folds(spec, data)
        key = key_of(spec)
        return _random(data) if key is None else _of_table(key, data)
    eraser: FittedEraser = spec(data.moments.copy())  # which the function may change
    if not isinstance(eraser, FittedEraser):
        raise InputError(
            f"the eraser returned {type(eraser).__name__}; it must map moments to a Projection, or "
            "to a ConditionalEraser"
        )
    return eraser


def _of_table(key: str, data: FitData) -> FittedEraser:
    """The eraser of a method of the library."""
    method = METHODS[key]
    options: dict[str, Any] = {}
    if method.needs_task or (method.needs_labels and method.keeps):
        options["keep"] = data.task
    if "missing" in method.parameters:
        options["missing"] = "raise"  # every row of a job has its labels
    eraser: FittedEraser = method.function(data.factored, erase=list(data.concepts), **options)
    return eraser


def _of_folds(name: str, data: FitData) -> FittedEraser:
    """An eraser of class covariances, from two folds of the training rows; it keeps the task.

    Raises
    ------
    InputError
        Several concepts, or a quantity.
    """
    train, concept = data.train, data.concepts[0]
    if len(data.concepts) > 1 or not isinstance(train.labels[concept], ClassCodes):
        raise InputError(
            f"{name!r} erases the classes of one concept; make one column of the joint cells of "
            "several, and classes of a quantity"
        )
    labels, groups = dict(train.labels), None
    if train.groups is not None:
        groups = f"groups of {data.task} and {concept}"  # a name that no variable has
        codes = ClassCodes(tuple(range(int(train.groups.max(initial=-1)) + 1)), train.groups)
        labels[groups] = labels_of(codes, np.arange(len(train.groups)))
    rows = data.coordinates.to_data(train.rows)
    folds = Folds(2, groups=groups, by=concept).update(rows, labels, sample_weight=train.weights)
    return _OF_FOLDS[name](folds, erase=concept, keep=data.task)


def _repaired(name: str, data: FitData) -> Projection:
    """An affine eraser, followed by the least change of its rows that restores Cov(x, task)."""
    eraser = fit_eraser(name, data)
    assert isinstance(eraser, Projection)
    before = data.training_moments(data.train.rows)
    after = data.training_moments(ScaledMap.of(eraser, data.coordinates)(data.train.rows))
    repairing = repair(after, before=before, keep=data.task)
    return data.coordinates.projection(repairing) @ eraser


def _random(data: FitData) -> Projection:
    """Projection off a random subspace of as many dimensions as the concept has."""
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


def _of_estimator(spec: object, data: FitData) -> FittedEraser:
    """The map of an estimator, or of a baseline by its name, fitted on the scaled rows."""
    from splince_fast.baselines._erasing import IterativeEraser

    if isinstance(spec, str):
        spec = getattr(import_module("splince_fast.baselines"), spec)()
    model = cloned(spec, data.seed)
    train, validation = data.train, data.validation
    held_out: object = (validation.rows, validation.concept)
    if isinstance(model, IterativeEraser):
        train, held_out = with_validation(train, validation)
    optional = {
        "concept": train.concept,
        "task": train.task,
        "validation": held_out,
        "X_validation": validation.rows,
        "concept_validation": validation.concept,
    }
    accepted = inspect.signature(model.fit).parameters
    arguments = {name: value for name, value in optional.items() if name in accepted}
    arguments |= weight_argument(model, train.weights)
    rows, task, arguments = writable(model, (train.rows, train.task, arguments))
    model.fit(rows, task, **arguments)
    projection = getattr(model, "projection_", None)
    if not isinstance(projection, FittedEraser):
        raise InputError(
            f"{type(model).__name__} has no projection_ after fit; erasers must be affine maps: an "
            "estimator with a Projection in projection_, or a function of moments"
        )
    return projection


def with_validation(
    train: SplitPart, validation: SplitPart
) -> tuple[SplitPart, NDArray[np.bool_] | None]:
    """Training and validation rows as one part, without groups, and the mask of the latter.

    The library's estimators take validation rows so: as a tuple they would have no weights. None
    where there are none, so that the estimator draws its own.
    """
    if not len(validation.rows):
        return train, None

    def both(first: Any, second: Any) -> Any:
        if isinstance(first, dict):
            return {name: np.concatenate([first[name], second[name]]) for name in first}
        return None if first is None else np.concatenate([first, second])

    columns = ("rows", "task", "concept", "cells", "weights")
    parts = {name: both(getattr(train, name), getattr(validation, name)) for name in columns}
    n, n_train = len(parts["rows"]), len(train.rows)
    return SplitPart(**parts, groups=None, labels={}), np.arange(n) >= n_train


def writable(estimator: object, values: Any) -> Any:
    """Arguments that an estimator may overwrite: copies, but for those of the library.

    Other estimators may write to their arguments, as scikit-learn's do with ``copy_X=False``.
    """
    of_library = type(estimator).__module__.partition(".")[0] == "splince_fast"
    return values if of_library else copy.deepcopy(values)


def cloned(estimator: object, seed: int) -> Any:
    """A clone of an estimator, with `seed` as every random state in it that is None."""
    from sklearn.base import clone

    model = clone(estimator)
    params = model.get_params().items()
    unset = [k for k, v in params if k.rpartition("__")[2] == "random_state" and v is None]
    return model.set_params(**dict.fromkeys(unset, seed))


def weight_argument(model: Any, weights: Float | None) -> dict[str, Float]:
    """Keyword that passes weights of the training rows to `fit`; none for equal weights.

    Raises
    ------
    InputError
        The estimator takes none.
    """
    if weights is None:
        return {}
    if "sample_weight" not in inspect.signature(model.fit).parameters:
        raise InputError(
            f"{type(model).__name__}.fit takes no sample_weight, so that "
            "association_method='weights' cannot give it the association; compare it with "
            "association_method='subsample'"
        )
    return {"sample_weight": weights}
