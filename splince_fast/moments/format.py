"""The accumulator as named tensors and JSON metadata, and back; bit for bit, nothing left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import check_tensors
from splince_fast.exceptions import FileFormatError
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.buffer import Stage
from splince_fast.moments.fourth_moment import FourthMoment
from splince_fast.moments.state import EPS32, EPS64, State
from splince_fast.moments.variable import ClassSums, ColumnSums

_KINDS: dict[str, type[ClassSums] | type[ColumnSums]] = {
    "classes": ClassSums,
    "continuous": ColumnSums,
}


def to_tensors(accumulator: Accumulator) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Named tensors and JSON metadata that hold the whole accumulator, rows that wait included."""
    from splince_fast._kernels import blas

    metadata: dict[str, Any] = {
        "block_rows": accumulator.block_rows,
        "ledoit_wolf": accumulator.ledoit_wolf,
        "width": accumulator.width,
        "variables": [],
    }
    tensors: dict[str, NDArray[Any]] = {}
    state = accumulator.state
    if state is not None:
        blas.mirror_lower(state.scatter)
        metadata |= {"n_rows": state.n_rows, "float32_products": state.unit_roundoff > EPS64}
        tensors |= {
            "reference": state.reference,
            "weight": np.array([state.weight]),
            "deviation": state.deviation,
            "scatter": state.scatter.T,
        }
        if state.fourth is not None:
            tensors |= {"quartic": np.array([state.fourth.quartic]), "cubic": state.fourth.cubic}
    for i, (name, variable) in enumerate(accumulator.variables.items()):
        if isinstance(variable, ClassSums):
            variable.allocate()
        entry = {"name": list(name) if isinstance(name, tuple) else name}
        metadata["variables"].append(entry | variable.metadata())
        tensors |= {f"variable.{i}.{key}": t for key, t in variable.tensors().items()}
    if accumulator.stage is not None:
        tensors |= accumulator.stage.tensors(list(accumulator.variables))
    return tensors, metadata


def from_tensors(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> Accumulator:
    """The inverse of `to_tensors`.

    Raises
    ------
    FileFormatError
        A tensor is missing, of the wrong dtype or shape, or holds impossible numbers. Metadata of
        the wrong form may raise KeyError, TypeError, ValueError or AttributeError instead.
    """
    accumulator = Accumulator(metadata["block_rows"], ledoit_wolf=bool(metadata["ledoit_wolf"]))
    width = accumulator.width = metadata["width"]
    if width is None:
        return accumulator
    if not isinstance(width, int) or width < 1:
        raise FileFormatError(f"the width {width!r} is not a positive integer")
    real = np.float64
    check_tensors(
        tensors, {"reference": (real, (width,)), "weight": (real, (1,)),
                  "deviation": (real, (width,)), "scatter": (real, (width, width))}
    )  # fmt: skip
    fourth = None
    if accumulator.ledoit_wolf:
        check_tensors(tensors, {"quartic": (real, (1,)), "cubic": (real, (width,))})
        fourth = FourthMoment(float(tensors["quartic"][0]), tensors["cubic"])
    n_rows = metadata["n_rows"]
    if not isinstance(n_rows, int) or not 0 <= n_rows < 1 << 63:
        raise FileFormatError("the number of rows is negative or no number")
    if tensors["weight"][0] < 0 or (tensors["weight"][0] > 0) != (n_rows > 0):
        raise FileFormatError("the number of rows and their weight contradict each other")
    accumulator.state = State(
        tensors["reference"], n_rows, float(tensors["weight"][0]), tensors["deviation"],
        np.asfortranarray(tensors["scatter"].T),
        EPS32 if metadata["float32_products"] else EPS64,
        fourth,
    )  # fmt: skip
    if (np.einsum("ii->i", accumulator.state.scatter) < 0).any():
        raise FileFormatError("the scatter has a negative variance")
    for i, entry in enumerate(metadata["variables"]):
        prefix = f"variable.{i}."
        own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        name = tuple(entry["name"]) if isinstance(entry["name"], list) else entry["name"]
        accumulator.variables[name] = _KINDS[entry["kind"]].read(width, entry, own)
        if accumulator.variables[name].n_rows > n_rows:
            raise FileFormatError(f"more rows carry the variable {name!r} than there are")
    sizes = {name: v.n_columns for name, v in accumulator.variables.items()}
    coded = frozenset(n for n, v in accumulator.variables.items() if isinstance(v, ClassSums))
    staged = Stage.read(tensors, width, sizes, coded)
    if staged is not None:
        if len(staged) > accumulator.capacity(width):
            raise FileFormatError("more rows are staged than a block holds")
        accumulator.restage(staged)
    return accumulator
