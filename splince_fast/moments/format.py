"""Conversion of an accumulator to the tensors of a .moments file and back, bit for bit.

The ``TENSORS`` of a class list the names, dtypes and shapes of its tensors. An accumulator has the
tensors of its state, those of its scatter, and:

=======================  =====================  ===================================================
tensor                   dtype, shape           content
=======================  =====================  ===================================================
lost                     float64 (d,)           bound of the rounding error of the diagonal of the
                                                scatter; only after removals that lost precision
variable.<i>.<tensor>                           sums of variable i of the metadata
pairs.<tensor>                                  `LabelTable` of the labels of different variables
staged.rows              float32 or float64     buffered rows
                         (n, d)
staged.weight            float64 (n,)           weights of the buffered rows, if not all 1
staged.<i>               int64 (n,) or          labels of the buffered rows for variable i: class
                         float64 (n, k)         codes, -1 if missing; or values, NaN if missing
sample.<tensor>                                 state of the sampled rows, with weights w / p
weights.squares          float64 (1,)           sum (w / p)^2
=======================  =====================  ===================================================

The metadata are the parameters, ``width``, ``feature_names``, ``n_rows``, ``float32_products``,
``row_eps`` (the machine epsilon of the rows' dtype), and, for each variable, ``name``, ``kind`` and
``names``. With a sample, they also have ``position``, the number of rows from which it was drawn,
and ``sample``, the metadata of the sampled rows.

With a state per class of one variable, the tensors of class i are ``class.<i>.<tensor>``, and the
metadata have two more entries: ``by``, the name of the variable, and ``classes``, a list of the
metadata of these states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from splince_fast._runtime.files import (
    Layout,
    Record,
    Tensors,
    check_tensors,
    read_feature_names,
)
from splince_fast._runtime.rows import check_values
from splince_fast.exceptions import FileFormatError, InputError
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.block import Block
from splince_fast.moments.by_class import ClassAccumulator, class_of
from splince_fast.moments.diagonal import DiagonalAccumulator
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.sampled import SampledAccumulator
from splince_fast.moments.state import EPS32, EPS64, Diagonal, Scatter, State
from splince_fast.moments.variable import KINDS

# Version number of the file format: raise it with every change that an older reader misreads.
FORMAT = 1
# Largest number of bytes of a block: a file with larger blocks is rejected as damaged, because the
# next update would allocate a block.
_MOST_BLOCK_BYTES = 1 << 35
# Name of each parameter in the metadata.
_PARAMETERS = {
    "block_rows": "block_rows", "kinds": "kinds", "joint": "joint", "subsample": "subsample",
    "random_state": "seed", "covariance_type": "covariance_type",
}  # fmt: skip
_LOST: Layout = {"lost": (np.float64, ("d",), 0)}
_SQUARES: Layout = {"weights.squares": (np.float64, (1,), 0)}


def accumulator_of(parameters: Parameters) -> Accumulator:
    """Return an empty accumulator of the class that holds moments with these parameters."""
    if parameters.by is not None:
        return ClassAccumulator(parameters)
    if parameters.is_diagonal:
        return DiagonalAccumulator(parameters)
    return SampledAccumulator(parameters) if parameters.subsample < 1 else Accumulator(parameters)


# -- writing -------------------------------------------------------------------------------


def to_tensors(accumulator: Accumulator, *, packed: bool = False) -> Record:
    """Return named tensors and JSON metadata of an accumulator, including buffered rows."""
    # With `packed`, for pickles, only the lower triangle of the scatter is stored.
    parameters = accumulator.parameters
    tensors: Tensors = {}
    metadata = {key: getattr(parameters, name) for name, key in _PARAMETERS.items()}
    metadata |= {"width": accumulator.width, "feature_names": accumulator.feature_names}
    if isinstance(accumulator, ClassAccumulator):
        parts = (part for part in accumulator.parts.values() if part.n_rows)
        records = [to_tensors(part, packed=packed) for part in parts]
        for i, (part_tensors, _) in enumerate(records):
            tensors |= _prefixed(f"class.{i}.", part_tensors)
        return tensors, {**metadata, "by": parameters.by, "classes": [m for _, m in records]}
    if (state := accumulator.state) is not None:
        sums = (state.reference, np.array([state.weight]), state.deviation)
        tensors |= dict(zip(State.TENSORS, sums, strict=True)) | state.second.tensors(packed)
        if state.rounding_bound is not None:
            tensors["lost"] = state.rounding_bound
        metadata |= {"n_rows": state.n_rows, "float32_products": state.unit_roundoff > EPS64}
        metadata["row_eps"] = state.row_eps
    order, metadata["variables"] = list(accumulator.variables), []
    for i, (name, variable) in enumerate(accumulator.variables.items()):
        metadata["variables"].append({"name": name, **variable.metadata()})
        tensors |= _prefixed(f"variable.{i}.", variable.tensors())
    if len(accumulator.label_products.gram):
        pairs = accumulator.label_products.tensors(order)
        metadata["pairs"] = sorted(pairs)
        tensors |= _prefixed("pairs.", pairs)
    if accumulator.buffer is not None and accumulator.buffer.filled:
        tensors |= _prefixed("staged.", _rows_to_tensors(accumulator.buffer.contents(), order))
    if isinstance(accumulator, SampledAccumulator):
        rows, metadata["sample"] = to_tensors(accumulator.sample, packed=packed)
        metadata["position"] = accumulator.position
        tensors |= _prefixed("sample.", rows)
        tensors["weights.squares"] = np.array([accumulator.squares])
    return tensors, metadata


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _rows_to_tensors(block: Block, order: list[Any]) -> Tensors:
    tensors: Tensors = {"rows": block.rows}
    if block.weight is not None:
        tensors["weight"] = block.weight
    for name, labels in block.labels.items():
        dtype = np.int64 if labels.dtype.kind == "i" else np.float64
        tensors[str(order.index(name))] = labels.astype(dtype, copy=False)
    return tensors


# -- reading -------------------------------------------------------------------------------


def part_of(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with a prefix, under names without the prefix."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def from_tensors(tensors: Tensors, metadata: Mapping[str, Any]) -> Accumulator:
    """Return the accumulator that `to_tensors` stored; read-only arrays are copied."""
    # Metadata of the wrong form may raise KeyError, TypeError, ValueError or AttributeError.
    # Pickle buffers may be read-only.
    tensors = {k: t if t.flags.writeable else t.copy(order="K") for k, t in tensors.items()}
    if "scatter" in metadata or "rank" in metadata:
        raise FileFormatError(
            "the moments have a sample or sketch of an earlier version; accumulate the rows again"
        )
    arguments = {name: metadata[key] for name, key in _PARAMETERS.items() if key in metadata}
    parameters = Parameters.of(**arguments, by=metadata.get("by"))
    if parameters.by is not None:
        return _read_classes(tensors, metadata, parameters)
    accumulator, width = accumulator_of(parameters), metadata["width"]
    if width is None:
        return accumulator
    _check_width(width, parameters)
    accumulator.state = _read_state(tensors, metadata, width, parameters)
    accumulator.feature_names = read_feature_names(metadata, width)
    for i, entry in enumerate(metadata["variables"]):
        sums = part_of(tensors, f"variable.{i}.")
        name = tuple(entry["name"]) if isinstance(entry["name"], list) else entry["name"]
        accumulator.variables[name] = KINDS[entry["kind"]].read(width, entry, sums)
        if accumulator.variables[name].n_rows > accumulator.state.n_rows:
            raise FileFormatError(f"{name!r} labels more rows than the state has")
    if "pairs" in metadata:
        pairs = part_of(tensors, "pairs.")
        if missing := set(metadata["pairs"]) - set(pairs):
            raise FileFormatError(f"the tensor {'pairs.' + min(missing)!r} is missing")
        accumulator.label_products = LabelTable.read(pairs, accumulator.variables)
    buffered = _read_rows(part_of(tensors, "staged."), accumulator, width)
    if isinstance(accumulator, SampledAccumulator):
        _read_sample(tensors, metadata, accumulator)
    if buffered is not None:
        accumulator.restore(buffered)
    return accumulator


def _read_classes(
    tensors: Tensors, metadata: Mapping[str, Any], parameters: Parameters
) -> ClassAccumulator:
    result = ClassAccumulator(parameters)
    for i, part_metadata in enumerate(metadata["classes"]):
        part = from_tensors(part_of(tensors, f"class.{i}."), part_metadata)
        if isinstance(part, ClassAccumulator) or result.width not in (None, part.width):
            raise FileFormatError("the state of a class has another number of features")
        part.parameters = parameters
        name = class_of(part, metadata["by"])
        if name in result.parts:
            raise FileFormatError(f"the class {name!r} has two states")
        result.add_part(name, part)
    result.feature_names = read_feature_names(metadata, result.width)
    return result


def _check_width(width: object, parameters: Parameters) -> None:
    if not isinstance(width, int) or width < 1:
        raise FileFormatError(f"the width {width!r} is not a positive integer")
    if parameters.block_rows is not None and parameters.block_rows * width * 8 > _MOST_BLOCK_BYTES:
        raise FileFormatError(
            f"a block of {parameters.block_rows:,} rows of {width:,} features would take more than "
            f"{_MOST_BLOCK_BYTES >> 30} GiB; the file was edited or damaged"
        )


def _read_count(metadata: Mapping[str, Any], name: str) -> int:
    count = metadata[name]
    if not isinstance(count, int) or not 0 <= count < 1 << 62:
        raise FileFormatError(f"{name} is {count!r}, not a number of rows")
    return count


def _read_state(
    tensors: Tensors, metadata: Mapping[str, Any], width: int, parameters: Parameters
) -> State:
    reference, weights, deviation = check_tensors(tensors, State.TENSORS, {"d": width})
    n_rows, weight, eps = _read_count(metadata, "n_rows"), float(weights[0]), metadata["row_eps"]
    if (weight > 0) != (n_rows > 0):
        raise FileFormatError("the number of rows and their weight contradict each other")
    if not isinstance(eps, float) or not 0.0 <= eps < 1.0:
        raise FileFormatError(f"row_eps is {eps!r}, not a number from 0 to 1")
    second = _read_scatter(tensors, width, parameters)
    second.unit_roundoff = EPS32 if metadata["float32_products"] else EPS64
    if (second.diagonal() < 0).any():
        raise FileFormatError("the scatter has a negative variance")
    lost = None
    if "lost" in tensors:
        (lost,) = check_tensors(tensors, _LOST, {"d": width})
    return State(reference, n_rows, weight, deviation, second, lost, eps)


def _read_scatter(tensors: Tensors, width: int, parameters: Parameters) -> Scatter:
    if parameters.is_diagonal or parameters.subsample < 1:
        (variances,) = check_tensors(tensors, Diagonal.TENSORS, {"d": width})
        return Diagonal(variances)
    packed = "scatter.lower" in tensors
    layout = Scatter.PACKED_TENSORS if packed else Scatter.TENSORS
    sizes = {"d": width, "d(d+1)/2": width * (width + 1) // 2}
    (scatter,) = check_tensors(tensors, layout, sizes)
    return Scatter.unpacked(scatter, width) if packed else Scatter(np.asfortranarray(scatter.T))


def _read_sample(
    tensors: Tensors, metadata: Mapping[str, Any], accumulator: SampledAccumulator
) -> None:
    sample = from_tensors(part_of(tensors, "sample."), metadata["sample"])
    if isinstance(sample, SampledAccumulator) or sample.width not in (None, accumulator.width):
        raise FileFormatError("the sample has another number of features")
    if sample.n_rows > accumulator.n_rows:
        raise FileFormatError("the sample has more rows than the state")
    (squares,) = check_tensors(tensors, _SQUARES)
    accumulator.sample, accumulator.squares = sample, float(squares[0])
    accumulator.position = _read_count(metadata, "position")


def _read_rows(tensors: Tensors, accumulator: Accumulator, width: int) -> Block | None:
    """Return the buffered rows of a file, with labels encoded by the variables of `accumulator`."""
    rows = tensors.get("rows")
    if rows is None:
        return None
    n = len(rows) if rows.ndim else 0
    dtype = np.float32 if rows.dtype == np.float32 else np.float64
    check_tensors(tensors, {"rows": (dtype, (n, width))})
    if n > accumulator.parameters.capacity(width, rows.itemsize):
        raise FileFormatError("the buffer has more rows than a block")
    try:
        check_values(rows, "the buffered rows")
    except InputError as error:
        raise FileFormatError(str(error)) from error
    block = Block(n, rows, None)
    if "weight" in tensors:
        (block.weight,) = check_tensors(tensors, {"weight": (np.float64, (n,))})
        if (block.weight <= 0).any():
            raise FileFormatError("buffered rows have weights that are not positive")
    for i, (name, variable) in enumerate(accumulator.variables.items()):
        if (labels := tensors.get(str(i))) is not None:
            block.labels[name] = variable.read_labels(labels, n, f"staged.{i}")
    return block
