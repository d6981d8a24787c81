"""Erasers of a comparison: fitted by name, function of moments or estimator, and applied to rows.

Rows of a job are centred and divided by one number; erasers are in units of the data. An affine
map is not applied to training rows: heads take it by its factors. A map that depends on the labels
of the concept is applied to the rows of all parts, each with its own labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast.conditional import ConditionalEraser
from splince_fast.evaluation._data import of_rows
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassCodes, Encoded
from splince_fast.methods.isotropic import isotropic
from splince_fast.methods.quadratic import quadratic
from splince_fast.methods.repair import repair
from splince_fast.methods.table import METHODS, key_of
from splince_fast.moments import Folds, Moments
from splince_fast.moments.factored import Factored
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

_OF_CLASSES: dict[str, Callable[..., Projection | ConditionalEraser]] = {
    "quadratic": quadratic, "isotropic": isotropic,
}  # fmt: skip
_BASELINES = ("INLP", "RLACE")
_REPAIRED = "+repair"
ERASERS = (
    *(method.label for method in METHODS.values()), *_OF_CLASSES, "random", *_BASELINES,
    *(name + _REPAIRED for name in ("SAL", *_BASELINES)),
)  # fmt: skip


class Part(NamedTuple):
    """Rows of one part of a split, centred and scaled, and their labels."""

    rows: Float
    task: Any  # codes of classes, or (n, k)
    concept: Any  # as `Plan.concept` returns it
    labels: Mapping[str, Encoded]  # of the task and of each concept


@dataclass(frozen=True, slots=True, eq=False)
class FitData:
    """Data that the erasers of one (seed, level) are fitted to."""

    moments: Moments
    factored: Factored  # of the same moments: one factor for all erasers and for the advice
    erase: tuple[str, ...]
    task_name: str  # of the task among the variables of the moments
    train: Part
    validation: Part
    weights: Float | None  # of the training rows, where they are not alike
    groups: Codes | None  # of the training rows
    seed: int
    scale: float

    def training_moments(self, rows: Float) -> Moments:
        """Moments of the training rows after a map, with all labels."""
        return Moments().update(rows, dict(self.train.labels), sample_weight=self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """x -> x - ((x - centre) right^T) left in the scaled coordinates of a job.

    `left` and `right` are (r, d); `offset` (d,) is centre right^T left.
    """

    left: Float
    right: Float
    offset: Float

    @classmethod
    def identity(cls, d: int) -> Map:
        """The map that erases nothing."""
        return cls(np.zeros((0, d)), np.zeros((0, d)), np.zeros(d))

    @classmethod
    def of(cls, projection: Projection, mean: Float, scale: float) -> Map:
        """A projection of the data in scaled coordinates."""
        left = np.ascontiguousarray(projection.left.T)
        right = np.ascontiguousarray(projection.right.T)
        centre = (projection.mean - mean) / scale
        return cls(left, right, (right @ centre) @ left)

    def __call__(self, rows: Float) -> Float:
        return rows - (rows @ self.right.T) @ self.left + self.offset

    @property
    def factors(self) -> tuple[Float, Float] | None:
        """Factors for the solver; None for the identity."""
        return (self.left, self.right) if len(self.left) else None

    def scores(self, rows: Float, w: Float, b: Float) -> Float:
        """(n, C): r(x)^T w + b, without erasing rows; b is that of centred coordinates."""
        through = w - (w @ self.left.T) @ self.right
        return np.asarray(rows @ through.T + b)


@dataclass(frozen=True, slots=True, eq=False)
class ErasedRows:
    """Rows of all parts after an eraser: `eraser_map` of the rows that are held.

    These are the rows of the job for an affine eraser; for one that depends on labels they are
    erased, and the map is the identity.
    """

    train: Float
    validation: Float
    test: Float
    eraser_map: Map
    gram: Float | None  # Cov of `train`; None where it is not computed yet


class LabelEraser(NamedTuple):
    """A map that depends on labels, of the data or, from an estimator, of scaled rows."""

    eraser: ConditionalEraser
    scaled: bool

    def erase(self, part: Part, mean: Float, scale: float) -> Float:
        """Rows of one part, erased with their labels."""
        if not len(part.rows):
            return part.rows
        if self.scaled:
            return np.asarray(self.eraser(part.rows, part.concept, progress=False))
        erased = self.eraser(part.rows * scale + mean, dict(part.labels), progress=False)
        return np.asarray((erased - mean) / scale)


def fit_eraser(spec: Any, data: FitData) -> Projection | LabelEraser:
    """The eraser: a projection in units of the data, or a map that depends on labels.

    Raises
    ------
    SplinceError
        An error of the method, such as InfeasibleError.
    """
    if isinstance(spec, str) and spec.endswith(_REPAIRED):
        return _repaired(fit_eraser(spec.removesuffix(_REPAIRED), data), data)
    estimator = hasattr(spec, "get_params") or spec in _BASELINES
    eraser = _fitted(spec, data) if estimator else _of_moments(spec, data)
    if isinstance(eraser, ConditionalEraser):
        return LabelEraser(eraser, scaled=estimator)
    return _in_units(eraser, data.moments.mean, data.scale) if estimator else eraser


def _of_moments(spec: Any, data: FitData) -> Projection | ConditionalEraser:
    """The eraser of a name or a function of moments, in units of the data."""
    if isinstance(spec, str):
        if spec in _OF_CLASSES:
            return _of_classes(spec, data)
        if (key := key_of(spec)) is not None:
            return _of_table(key, data)
        if spec == "random":
            return _random(data, data.moments.mean)
    eraser: Projection | ConditionalEraser = spec(
        data.moments.copy()
    )  # a function may change them: the others' stay as they are
    if not isinstance(eraser, Projection | ConditionalEraser):
        raise InputError(
            f"the eraser returned {type(eraser).__name__}; it must map moments to a Projection, or "
            "to a ConditionalEraser"
        )
    return eraser


def _of_table(key: str, data: FitData) -> Projection | ConditionalEraser:
    """The eraser of a method of the library."""
    method = METHODS[key]
    options: dict[str, Any] = {}
    if method.needs_task or (method.needs_labels and method.keeps):
        options["keep"] = data.task_name
    if "missing" in method.parameters:
        options["missing"] = "raise"  # every row of a job has its labels
    eraser: Projection | ConditionalEraser = method.function(
        data.factored, erase=list(data.erase), **options
    )
    return eraser


def _of_classes(name: str, data: FitData) -> Projection | ConditionalEraser:
    """An eraser of moments by class, of two folds of the training rows; it keeps the task.

    Raises
    ------
    InputError
        Several concepts, or a quantity.
    """
    concept = data.erase[0]
    if len(data.erase) > 1 or not isinstance(data.train.labels[concept], ClassCodes):
        raise InputError(
            f"{name!r} erases the classes of one concept; make one column of the joint cells of "
            "several, and classes of a quantity"
        )
    labels, groups = dict(data.train.labels), None
    if data.groups is not None:
        groups = f"groups of {data.task_name} and {concept}"  # the name of no variable
        codes = ClassCodes(tuple(range(int(data.groups.max(initial=-1)) + 1)), data.groups)
        labels[groups] = of_rows(codes, np.arange(len(data.groups)))
    rows = data.train.rows * data.scale + data.moments.mean
    folds = Folds(2, groups=groups, by=concept).update(rows, labels, sample_weight=data.weights)
    return _OF_CLASSES[name](folds, erase=concept, keep=data.task_name)


def _repaired(eraser: Projection | LabelEraser, data: FitData) -> Projection:
    """The eraser, and the least change of its rows that keeps Cov(x, task)."""
    assert isinstance(eraser, Projection)
    mean, scale = data.moments.mean, data.scale
    rows = data.train.rows
    before = data.training_moments(rows)
    after = data.training_moments(Map.of(eraser, mean, scale)(rows))
    return _in_units(repair(after, before=before, keep=data.task_name), mean, scale) @ eraser


def _random(data: FitData, mean: Float) -> Projection:
    """A random subspace of as many directions as the concept has."""
    count = sum(
        max(1, len(data.moments.classes(name)) - 1)
        if data.moments.variables[name] == "classes"
        else data.moments.cross_covariance(name).shape[1]
        for name in data.erase
    )
    d = len(mean)
    Q, _ = np.linalg.qr(np.random.default_rng(data.seed).normal(size=(d, min(count, d))))
    return Projection(Q, Q, mean, method="random")


def _fitted(spec: Any, data: FitData) -> Projection | ConditionalEraser:
    """The map of an estimator, or of a baseline by its name, fitted on the scaled rows."""
    if isinstance(spec, str):
        spec = getattr(import_module("splince_fast.baselines"), spec)()
    model = cloned(spec, data.seed)
    accepted = inspect.signature(model.fit).parameters
    X_validation, z_validation = data.validation.rows, data.validation.concept
    optional = {
        "concept": data.train.concept,
        "task": data.train.task,
        "validation": (X_validation, z_validation),
        "X_validation": X_validation,
        "concept_validation": z_validation,
    }
    passed = {name: value for name, value in optional.items() if name in accepted}
    passed |= weight_of(model, data.weights)
    model.fit(data.train.rows, data.train.task, **passed)
    projection = getattr(model, "projection_", None)
    if not isinstance(projection, Projection | ConditionalEraser):
        raise InputError(
            f"{type(model).__name__} has no projection_ after fit; erasers must be affine maps: an "
            "estimator with a Projection in projection_, or a function of moments"
        )
    return projection


def cloned(estimator: Any, seed: int) -> Any:
    """A clone of an estimator, with a random state where it has none."""
    from sklearn.base import clone

    model = clone(estimator)
    params = model.get_params()
    if "random_state" in params and params["random_state"] is None:
        model.set_params(random_state=seed)
    return model


def weight_of(model: Any, weights: Float | None) -> dict[str, Float]:
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


def _in_units(scaled: Projection, mean: Float, scale: float) -> Projection:
    """A map of scaled coordinates (x - mean) / scale as one of the data."""
    return Projection(scaled.left, scaled.right, mean + scale * scaled.mean, method=scaled.method)
