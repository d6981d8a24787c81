"""Table of methods, under the names that functions, estimators and the command line use."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from splince_fast._runtime.arguments import described_type
from splince_fast._solve.options import OPTIONS, Option
from splince_fast._solve.selection import Selection
from splince_fast.exceptions import InputError
from splince_fast.methods.closed_forms import leace, mean_projection, sal, splince
from splince_fast.methods.fair_pca import fair_pca
from splince_fast.methods.oracle import oracle
from splince_fast.moments import Folds, Moments
from splince_fast.moments.statistics import Factored, statistics
from splince_fast.projection import Projection

Function: TypeAlias = Callable[..., Any]  # returns an Eraser


@dataclass(frozen=True)
class Method:
    """Table entry of a method that fits an eraser to moments."""

    label: str  # name of the method in tables and reports, and of its estimator
    # ``function(moments, *, erase, keep, **options)``. A method that keeps nothing has no parameter
    # `keep`.
    function: Function
    whitened: bool = False  # whether the method factors Cov(x)
    classes_only: bool = False  # whether variables to erase are always interpreted as classes
    needs_labels: bool = False  # whether applying the eraser needs the labels of the rows

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @property
    def keeps(self) -> bool:
        kinds = [p.kind for p in self.parameters.values()]
        return "keep" in self.parameters or inspect.Parameter.VAR_KEYWORD in kinds

    @property
    def needs_task(self) -> bool:
        keep = self.parameters.get("keep")
        return keep is not None and keep.default is keep.empty

    @property
    def options(self) -> dict[str, Option]:
        """Options of the solve that `function` accepts, by name."""
        return {name: option for name, option in OPTIONS.items() if name in self.parameters}


def none(moments: Moments | Factored | Folds, *, erase: Selection) -> Projection:
    """Return the identity map, which erases nothing, as a baseline of comparisons."""
    with statistics(moments.total if isinstance(moments, Folds) else moments) as stats:
        empty = np.zeros((len(stats.mean), 0))
        return Projection(empty, empty, stats.mean, method="none")


METHODS = {
    "splince": Method("SPLINCE", splince, whitened=True),
    "leace": Method("LEACE", leace, whitened=True),
    "sal": Method("SAL", sal),
    "mean_projection": Method("MeanProjection", mean_projection, classes_only=True),
    "fair_pca": Method("FairPCA", fair_pca),
    "oracle": Method("oracle", oracle, whitened=True, needs_labels=True),
    "none": Method("none", none),
}


def key_of(name: str) -> str | None:
    """Return the key of a method name, ignoring case, spaces, "-" and "_"; None if unknown."""
    return {_plain(key): key for key in METHODS}.get(_plain(name))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c not in " _-")


def method_of(method: str | Function | None, keep: object = None) -> Method:
    """Return the table entry of a method."""
    # None is SPLINCE with `keep`, and LEACE without; names ignore case.
    if method is None:
        method = "leace" if keep is None else "splince"
    if isinstance(method, str):
        key = key_of(method)
        if key is None:
            similar = difflib.get_close_matches(method.lower(), METHODS, n=1, cutoff=0.4)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise InputError(
                f"method is {method!r}; it must be one of {', '.join(map(repr, METHODS))}, or a "
                f"function of moments{hint}"
            )
        entry = METHODS[key]
    elif callable(method) and not isinstance(method, type):
        entries = (other for other in METHODS.values() if other.function is method)
        name = getattr(method, "__name__", type(method).__name__)
        entry = next(entries, Method(name, method))
    else:
        text = described_type(method)
        if isinstance(method, type):
            text = f"the class {method.__name__}"
        raise InputError(f"method is {text}; it must be a name, or a function of moments")
    if keep is not None and not entry.keeps:
        raise InputError(f"{entry.label} keeps nothing; leave keep= out, or take 'splince'")
    if keep is None and entry.needs_task:
        raise InputError(f"{entry.label} needs keep=, the task; 'leace' keeps nothing")
    return entry
