"""Erasers of a comparison: from a name, a function or a transformer to a map of rows.

Transformers, INLP and R-LACE take scaled rows; functions and methods take the units of the data.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast import baselines
from splince_fast._runtime.rows import check_values
from splince_fast.conditional import ConditionalEraser
from splince_fast.evaluation.data import Codes, Float
from splince_fast.evaluation.records import ERASER_ROW, PATH, PartLabels
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassCodes, Encoded, names_array
from splince_fast.methods.quadratic import quadratic
from splince_fast.methods.table import METHODS, key_of
from splince_fast.moments import Moments
from splince_fast.moments.statistics import Factored
from splince_fast.projection import Projection

# Joint class codes (n,) of the concepts; values (n, k) if all concepts are quantities; a mapping of
# columns by concept if only some are.
ConceptLabels: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Component:
    """An eraser, head, probe or metric of a comparison."""

    name: str
    spec: Any  # a name of the library, a function, or an object with the interface of scikit-learn

    @property
    def role(self) -> str:
        """Name in the library; "" for a function or object."""
        return self.spec if isinstance(self.spec, str) else ""


def named_components(specs: object, choices: Sequence[str], kind: str) -> tuple[Component, ...]:
    """Return erasers, heads or probes with their names; only an eraser may be a function."""
    if isinstance(specs, str) or not isinstance(specs, Sequence | Mapping):
        specs = (specs,)
    pairs = list(specs.items()) if isinstance(specs, Mapping) else [(None, spec) for spec in specs]
    components: dict[str, Component] = {}
    for key, spec in pairs:
        if isinstance(spec, str):
            method = key_of(spec) if kind == "eraser" else None
            labels = {label.lower(): label for label in choices}
            label = labels.get(spec.lower()) if method is None else METHODS[method].label
            if label is None:
                raise InputError(f"there is no {kind} {spec!r}; choose from {', '.join(choices)}")
            spec = default_name = label
        elif hasattr(spec, "get_params") and hasattr(spec, "fit"):
            default_name = type(spec).__name__
        elif kind == "eraser" and callable(spec):
            default_name = getattr(spec, "__name__", type(spec).__name__)
        else:
            raise InputError(
                f"{spec!r} is not a valid {kind}: pass one of {', '.join(choices)}, or "
                + ("a transformer or function" if kind == "eraser" else "a classifier")
            )
        name = default_name if key is None else str(key)
        if name in (*components, ERASER_ROW, PATH):
            raise InputError(
                f"the {kind} name {name!r} is reserved, or that of two {kind}s; pass a dict"
            )
        components[name] = Component(name, spec)
    if not components and kind != "probe":  # the caller may want no probe
        raise InputError(f"{kind}s= is empty; choose from {', '.join(choices)}")
    return tuple(components.values())


@dataclass(frozen=True, slots=True, eq=False)
class SplitPart:
    """Rows of one part of a split (training, validation or test), with labels."""

    rows: Float
    codes: PartLabels
    concept: ConceptLabels
    labels: Mapping[str, Encoded]  # of the task and of each concept, by name in the moments

    @property
    def strata(self) -> Codes:
        """Codes (n,) of the cells, or of the classes of the task if a concept is a quantity."""
        return self.codes.task if self.codes.cells is None else self.codes.cells


@dataclass(frozen=True, slots=True, eq=False)
class ScaledCoordinates:
    """Scaled coordinates (x - mean) / scale."""

    mean: Float
    scale: float

    def to_scaled(self, rows: Float) -> Float:
        """Return a copy of rows in scaled coordinates."""
        return (rows - self.mean) / self.scale

    def to_data(self, rows: Float) -> Float:
        """Return a copy of scaled rows in the units of the data."""
        return rows * self.scale + self.mean


@dataclass(frozen=True, slots=True, eq=False)
class FitData:
    """Data to which the erasers of one seed and level are fitted."""

    factored: Factored  # moments of the training rows, factorised once for all erasers
    concepts: tuple[str, ...]
    task: str  # name of the task in the moments
    train: SplitPart
    validation: SplitPart
    seed: int
    coordinates: ScaledCoordinates


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """A fitted eraser: maps the scaled rows of a part."""

    apply: Callable[[Float, Mapping[str, Encoded]], Any]  # of rows and their labels
    coordinates: ScaledCoordinates | None = None  # None if `apply` takes scaled rows
    rank: int | None = None  # of I - P if the map is affine with the projection P
    uses_labels: bool = False

    def __call__(self, part: SplitPart) -> Float:
        """Return the erased rows; their number and width are those of the part."""
        if not len(part.rows):
            return part.rows
        to_data = np.copy if self.coordinates is None else self.coordinates.to_data
        erased = np.asarray(self.apply(to_data(part.rows), part.labels), dtype=np.float64)
        if erased.shape != part.rows.shape:
            raise InputError(
                f"the eraser returned rows of shape {erased.shape} for {part.rows.shape}; an "
                "eraser keeps the number of rows and of features"
            )
        check_values(erased, "the erased rows")
        return erased if self.coordinates is None else self.coordinates.to_scaled(erased)


def fit_eraser(spec: Any, data: FitData) -> RowMap:
    """Fit the eraser that a name, a function or a transformer specifies."""
    coordinates = data.coordinates
    eraser: Any
    if isinstance(spec, str):
        eraser = ERASERS[spec](data)
    elif hasattr(spec, "fit"):
        return _fit_transformer(spec, data)
    else:
        labels = {name: _values(column) for name, column in data.train.labels.items()}
        eraser = spec(coordinates.to_data(data.train.rows), labels)
        if not callable(eraser):
            raise InputError(
                f"the eraser function returned {type(eraser).__name__}; it must return a map of "
                "rows, a function that takes rows and returns the erased rows"
            )
    if isinstance(eraser, RowMap):
        return eraser
    if isinstance(eraser, ConditionalEraser):
        erase = partial(eraser, progress=False)
        return RowMap(lambda rows, labels: erase(rows, dict(labels)), coordinates, uses_labels=True)
    if isinstance(eraser, Projection):
        erase = partial(eraser, progress=False)
        return RowMap(lambda rows, labels: erase(rows), coordinates, eraser.rank)
    return RowMap(lambda rows, labels: eraser(rows), coordinates)


def _values(column: Encoded) -> NDArray[Any]:
    """Return the labels of a function of rows: names of classes, or values of a quantity."""
    if isinstance(column, ClassCodes):
        return np.asarray(names_array(column.classes)[column.codes])
    return column.values[:, 0].copy() if column.values.shape[1] == 1 else column.values.copy()


def _fit_transformer(spec: object, data: FitData) -> RowMap:
    """Fit a transformer to scaled training rows, with the concept if ``fit`` takes it."""
    model, train, validation = clone_with_seed(spec, data.seed), data.train, data.validation
    accepted = inspect.signature(model.fit).parameters
    arguments: dict[str, Any] = {}
    rows, task, concept = train.rows, train.codes.task, train.concept
    # INLP and R-LACE stop by the validation rows, which a mask marks.
    if "validation" in accepted and len(validation.rows):
        arguments["validation"] = np.arange(len(rows) + len(validation.rows)) >= len(rows)
        rows = np.concatenate([rows, validation.rows])
        task = np.concatenate([task, validation.codes.task])
        if isinstance(concept, dict):
            held_out: Any = validation.concept
            concept = {k: np.concatenate([v, held_out[k]]) for k, v in concept.items()}
        else:
            concept = np.concatenate([concept, validation.concept])
    if "concept" in accepted:
        arguments["concept"] = concept
    # Copies: estimators may overwrite their arguments, as with ``copy_X=False``.
    model.fit(*copy.deepcopy((rows, task)), **copy.deepcopy(arguments))
    projection = getattr(model, "projection_", None)
    rank = projection.rank if isinstance(projection, Projection) else None
    return RowMap(lambda rows, labels: model.transform(rows), rank=rank)


def _fit_method(key: str, data: FitData) -> object:
    """Fit the method of the library with the key `key` of `METHODS`."""
    method = METHODS[key]
    options: dict[str, Any] = {}
    if method.needs_task or (method.needs_labels and method.keeps):
        options["keep"] = data.task
    if "missing" in method.parameters:
        options["missing"] = "raise"  # every row of the split has its labels
    return method.function(data.factored, erase=list(data.concepts), **options)


def _fit_quadratic(data: FitData) -> object:
    """Fit the quadratic eraser, which keeps the task, to the training rows."""
    train, concept = data.train, data.concepts[0]
    if len(data.concepts) > 1 or not isinstance(train.labels[concept], ClassCodes):
        raise InputError(
            "'quadratic' erases one concept of classes; combine several concepts to one column of "
            "their joint classes, and divide a quantity into classes"
        )
    rows = data.coordinates.to_data(train.rows)
    moments = Moments(by=concept).update(rows, dict(train.labels))
    return quadratic(moments, erase=concept, keep=data.task, shrinkage=None)


def _fit_random(data: FitData) -> Projection:
    """Return the projection that removes a random subspace of the dimension of the concepts."""
    # The dimension is k - 1 for a concept of k classes, and k for a quantity of k columns.
    columns = (data.train.labels[name] for name in data.concepts)
    count = sum(
        max(1, len(c.classes) - 1) if isinstance(c, ClassCodes) else c.values.shape[1]
        for c in columns
    )
    mean = data.coordinates.mean
    size = (len(mean), min(count, len(mean)))
    Q, _ = np.linalg.qr(np.random.default_rng(data.seed).normal(size=size))
    return Projection(Q, Q, mean, method="random")


# The erasers that have a name.
ERASERS: dict[str, Callable[[FitData], object]] = {
    **{method.label: partial(_fit_method, key) for key, method in METHODS.items()},
    "quadratic": _fit_quadratic,
    "random": _fit_random,
    "INLP": lambda data: _fit_transformer(baselines.INLP(), data),
    "RLACE": lambda data: _fit_transformer(baselines.RLACE(), data),
}


def clone_with_seed(estimator: object, seed: int) -> Any:
    """Return a clone of an estimator, with `seed` for each ``random_state`` that is None."""
    from sklearn.base import clone

    model = clone(estimator)
    params = model.get_params().items()
    unset = [k for k, v in params if k.rpartition("__")[2] == "random_state" and v is None]
    return model.set_params(**dict.fromkeys(unset, seed))
