"""Erasers of a comparison: from a name, a function of moments or an estimator to an affine map."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError
from splince_fast.methods.repair import repair
from splince_fast.methods.table import METHODS, key_of
from splince_fast.moments import Moments
from splince_fast.moments.factored import Factored
from splince_fast.projection import Projection

Float = NDArray[np.float64]

REPAIRED = "+repair"


@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """x -> x - ((x - centre) right^T) left in the scaled coordinates of a job.

    `left` and `right` are (r, d); `offset` (d,) is centre right^T left.
    """

    left: Float
    right: Float
    offset: Float

    def __call__(self, rows: Float) -> Float:
        return rows - (rows @ self.right.T) @ self.left + self.offset

    @property
    def factors(self) -> tuple[Float, Float] | None:
        """Factors for the solver; None for the identity."""
        return (self.left, self.right) if len(self.left) else None


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Data that the erasers of one (seed, level) are fitted to."""

    moments: Moments
    factored: Factored  # of the same moments: one factor for all erasers and for the advice
    erase: list[str]
    rows: Float  # scaled training rows
    task: Any  # labels of the training rows
    concept: Any
    weights: Float | None  # of the training rows, where they are not alike
    validation: tuple[Float, Any, Any]
    seed: int
    unit: float
    task_name: str  # of the task among the variables of the moments


def make(what: Any, context: Context) -> Projection:
    """The eraser, in units of the data.

    Raises
    ------
    SplinceError
        Whatever the method says, such as InfeasibleError.
    """
    if isinstance(what, str) and what.endswith(REPAIRED):
        return _repaired(make(what.removesuffix(REPAIRED), context), context)
    if isinstance(what, str) and (key := key_of(what)) is not None:
        method = METHODS[key]
        kept = {"keep": context.task_name} if method.needs_task else {}
        return cast(Projection, method.function(context.factored, erase=context.erase, **kept))
    mean = context.moments.mean
    if what == "random":
        return _random(context, mean)
    if what in ("INLP", "RLACE"):
        what = getattr(import_module("splince_fast.baselines"), what)()
    if hasattr(what, "get_params"):
        return _in_units(_fitted(what, context), mean, context.unit)
    projection = what(context.moments.copy())  # whatever it does to them, the others' are theirs
    if not isinstance(projection, Projection):
        raise InputError(
            f"the eraser returned {type(projection).__name__}; it must map moments to a Projection"
        )
    return projection


def _repaired(eraser: Projection, context: Context) -> Projection:
    """The eraser, and the least change of its rows that keeps Cov(x, task)."""
    mean, unit, name = context.moments.mean, context.unit, context.task_name
    before, after = (
        Moments(kinds={name: context.moments.variables[name]}).update(
            rows, {name: context.task}, sample_weight=context.weights
        )
        for rows in (context.rows, to_map(eraser, mean, unit)(context.rows))
    )
    return _in_units(repair(after, before=before, keep=name), mean, unit) @ eraser


def _random(context: Context, mean: Float) -> Projection:
    """A random subspace of as many directions as the concept has."""
    count = sum(
        max(1, len(context.moments.classes(name)) - 1)
        if context.moments.variables[name] == "classes"
        else context.moments.cross_covariance(name).shape[1]
        for name in context.erase
    )
    d = len(mean)
    Q, _ = np.linalg.qr(np.random.default_rng(context.seed).normal(size=(d, min(count, d))))
    return Projection(Q, Q, mean, method="random")


def _fitted(estimator: Any, context: Context) -> Projection:
    """The projection of an estimator fitted on the scaled training rows."""
    from sklearn.base import clone

    model = clone(estimator)
    if "random_state" in model.get_params() and model.get_params()["random_state"] is None:
        model.set_params(random_state=context.seed)
    accepted = inspect.signature(model.fit).parameters
    X_validation, _, z_validation = context.validation
    optional = {
        "concept": context.concept,
        "task": context.task,
        "validation": (X_validation, z_validation),
        "X_validation": X_validation,
        "concept_validation": z_validation,
    }
    passed = {name: value for name, value in optional.items() if name in accepted}
    passed |= weight_of(model, context.weights)
    model.fit(context.rows, context.task, **passed)
    projection = getattr(model, "projection_", None)
    if not isinstance(projection, Projection):
        raise InputError(
            f"{type(model).__name__} has no projection_ after fit; erasers must be affine maps: an "
            "estimator with a Projection in projection_, or a function of moments"
        )
    return projection


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


def _in_units(scaled: Projection, mean: Float, unit: float) -> Projection:
    """A map of scaled coordinates (x - mean) / unit as one of the data."""
    return Projection(scaled.left, scaled.right, mean + unit * scaled.mean, method=scaled.method)


def to_map(projection: Projection, mean: Float, unit: float) -> Map:
    """A map of the data as one of scaled coordinates."""
    left, right = np.ascontiguousarray(projection.left.T), np.ascontiguousarray(projection.right.T)
    centre = (projection.mean - mean) / unit
    return Map(left, right, (right @ centre) @ left)


def identity(d: int) -> Map:
    """The eraser that erases nothing."""
    return Map(np.zeros((0, d)), np.zeros((0, d)), np.zeros(d))
