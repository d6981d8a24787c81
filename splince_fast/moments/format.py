"""Conversion of an accumulator to the tensors of a .moments file and back, bit for bit.

=======================  =====================  ===================================================
tensor                   dtype, shape           content
=======================  =====================  ===================================================
reference                float64 (d,)           reference point r of the sums of x
weight                   float64 (1,)           sum w
deviation                float64 (d,)           sum w (x - r)
scatter                  float64 (d, d)         sum w (x - mean)(x - mean)^T, both triangles
scatter.lower            float64 (d(d+1)/2,)    lower triangle of the scatter by columns; replaces
                                                ``scatter`` in pickles
lost                     float64 (d,)           bound of the rounding error of the diagonal of the
                                                scatter; only after removals that lost precision
variable.<i>.<sum>       see `tensors` of each  sums of variable i of the metadata
                         kind of variable
staged.rows              float32 or float64     buffered rows
                         (n, d)
staged.weight            float64 (n,)           weights of the buffered rows, if not all 1
staged.<i>               int64 (n,) or          labels of the buffered rows for variable i: class
                         float64 (n, k)         codes, -1 if missing; or values, NaN if missing
pairs.<tensor>                                  products of the labels of different variables:
                                                tensors of a `LabelTable`
=======================  =====================  ===================================================

The metadata are the parameters, ``width``, ``n_rows``, ``float32_products``, ``row_eps`` (the
machine epsilon of the rows' dtype), ``feature_names`` if the rows had names, and, for each
variable, ``name``, ``kind`` and ``names``.

With the scatter of a sample of the rows, the file has, in place of the scatter:

=======================  =====================  ===================================================
variances                float64 (d,)           diagonal of the scatter of all rows
sample.<tensor>                                 every tensor of the state of the sampled rows, with
                                                weights w / p; the metadata are in ``sample``
weights.squares          float64 (1,)           sum (w / p)^2
=======================  =====================  ===================================================

The metadata also have ``subsample``, the fraction p, ``seed`` and ``position``, the number
of rows from which the sample was drawn.

With ``covariance_type="diag"``, which is in the metadata, the file has ``variances`` in place of
the scatter.

With a state per class of one variable, the tensors of class i are ``class.<i>.<tensor>``, and the
metadata have two more entries: ``by``, the name of the variable, and ``classes``, a list of the
metadata of these states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from splince_fast._runtime.files import (
    Record,
    Tensors,
    check_tensors,
    read_feature_names,
    refuse_negative,
)
from splince_fast._runtime.rows import check_values
from splince_fast.exceptions import FileFormatError, InputError
from splince_fast.moments.accumulator import KINDS, Accumulator
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.by_class import ClassAccumulator, class_of
from splince_fast.moments.diagonal import DiagonalAccumulator
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.sampled import SampledAccumulator
from splince_fast.moments.state import EPS32, EPS64, Diagonal, Scatter, State

# Version number of the file format: raise it with every change that an older reader misreads.
FORMAT = 1
# Largest number of bytes of a block: a file with larger blocks is rejected as damaged, because the
# next update would allocate a block.
_MOST_BLOCK_BYTES = 1 << 35


def to_tensors(accumulator: Accumulator, *, packed: bool = False) -> Record:
    """Return named tensors and JSON metadata of an accumulator, including buffered rows."""
    # With `packed`, for pickles, only the lower triangle of the scatter is stored.
    parameters = accumulator.parameters
    if isinstance(accumulator, ClassAccumulator):
        return _classes_to_tensors(accumulator, packed)
    metadata: dict[str, Any] = {
        "block_rows": parameters.block_rows,
        "kinds": parameters.kinds,
        "joint": [list(names) for names in parameters.joint],
        "width": accumulator.width,
        "variables": [],
    }
    if accumulator.feature_names is not None:
        metadata["feature_names"] = list(accumulator.feature_names)
    tensors: Tensors = {}
    state = accumulator.state
    sampled = accumulator if isinstance(accumulator, SampledAccumulator) else None
    if parameters.is_diagonal:
        metadata["covariance_type"] = parameters.covariance_type
    if sampled is not None:
        tensors |= _sample_to_tensors(sampled, metadata, packed)
    if state is not None:
        metadata |= {"n_rows": state.n_rows, "float32_products": state.unit_roundoff > EPS64}
        metadata["row_eps"] = state.row_eps
        tensors |= {
            "reference": state.reference,
            "weight": np.array([state.weight]),
            "deviation": state.deviation,
        }
        if isinstance(state.second, Diagonal):
            tensors["variances"] = state.second.diagonal()
        elif packed:
            tensors["scatter.lower"] = state.second.packed()
        else:
            tensors["scatter"] = state.second.full().T
        if state.rounding_bound is not None:
            tensors["lost"] = state.rounding_bound
    for i, (name, variable) in enumerate(accumulator.variables.items()):
        entry = {"name": list(name) if isinstance(name, tuple) else name}
        metadata["variables"].append(entry | variable.metadata())
        tensors |= {f"variable.{i}.{key}": t for key, t in variable.tensors().items()}
    if len(accumulator.label_products.gram):
        order = list(accumulator.variables)
        pairs = accumulator.label_products.tensors(order)
        metadata["pairs"] = sorted(pairs)
        tensors |= {f"pairs.{key}": tensor for key, tensor in pairs.items()}
    if accumulator.buffer is not None and accumulator.buffer.filled:
        tensors |= _buffered_to_tensors(accumulator, accumulator.buffer.contents())
    return tensors, metadata


def _classes_to_tensors(accumulator: ClassAccumulator, packed: bool) -> Record:
    """Return the tensors of the states of all classes, named by class number, and the metadata."""
    tensors: Tensors = {}
    class_metadata = []
    for i, part in enumerate(part for part in accumulator.parts.values() if part.n_rows):
        part_tensors, metadata = to_tensors(part, packed=packed)
        tensors |= {f"class.{i}.{key}": tensor for key, tensor in part_tensors.items()}
        class_metadata.append(metadata)
    empty = Accumulator(accumulator.parameters)
    empty.feature_names = accumulator.feature_names
    _, metadata_without_rows = to_tensors(empty)
    return tensors, {
        **metadata_without_rows,
        "by": accumulator.parameters.by,
        "classes": class_metadata,
    }


def _read_classes(
    tensors: Tensors, metadata: Mapping[str, Any], parameters: Parameters
) -> ClassAccumulator:
    """Return the accumulator that `_classes_to_tensors` stored as `tensors` and `metadata`."""
    result, by = ClassAccumulator(parameters), metadata["by"]
    for i, part_metadata in enumerate(metadata["classes"]):
        part = from_tensors(part_of(tensors, f"class.{i}."), part_metadata)
        if isinstance(part, ClassAccumulator) or result.width not in (None, part.width):
            raise FileFormatError("the state of a class has another number of features")
        part.parameters = parameters
        name = class_of(part, by)
        if name in result.parts:
            raise FileFormatError(f"the class {name!r} has two states")
        result.add_part(name, part)
    result.feature_names = read_feature_names(metadata, result.width)
    return result


def _sample_to_tensors(
    accumulator: SampledAccumulator, metadata: dict[str, Any], packed: bool
) -> Tensors:
    """Return the tensors of a sample; add the metadata of the sample to `metadata`."""
    parameters = accumulator.parameters
    sample_tensors, sample_metadata = to_tensors(accumulator.sample, packed=packed)
    metadata |= {
        "subsample": parameters.subsample,
        "seed": parameters.random_state,
        "position": accumulator.position,
        "sample": sample_metadata,
    }
    tensors: Tensors = {f"sample.{key}": tensor for key, tensor in sample_tensors.items()}
    tensors["weights.squares"] = np.array([accumulator.squares])
    return tensors


def _read_sample(
    tensors: Tensors,
    metadata: Mapping[str, Any],
    accumulator: SampledAccumulator,
) -> None:
    """Set the sample of an accumulator to the sample that `_sample_to_tensors` stored."""
    sample = from_tensors(part_of(tensors, "sample."), metadata["sample"])
    position = metadata["position"]
    if not isinstance(position, int) or not 0 <= position < 1 << 62:
        raise FileFormatError(f"the position of the sample is {position!r}, not a number of rows")
    check_tensors(tensors, {"weights.squares": (np.float64, (1,))})
    refuse_negative(tensors, ("weights.squares",))
    if isinstance(sample, SampledAccumulator) or sample.width not in (None, accumulator.width):
        raise FileFormatError("the sample has another number of features")
    if sample.n_rows > accumulator.n_rows:
        raise FileFormatError("the sample has more rows than the state")
    accumulator.sample, accumulator.position = sample, position
    accumulator.squares = float(tensors["weights.squares"][0])


def part_of(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with a prefix, under names without the prefix."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _buffered_to_tensors(accumulator: Accumulator, block: LabelledRows) -> Tensors:
    tensors: Tensors = {"staged.rows": block.rows}
    if block.weight is not None:
        tensors["staged.weight"] = block.weight
    order = list(accumulator.variables)
    for name, labels in block.labels.items():
        dtype = np.int64 if labels.dtype.kind == "i" else np.float64
        tensors[f"staged.{order.index(name)}"] = labels.astype(dtype, copy=False)
    return tensors


def from_tensors(tensors: Tensors, metadata: Mapping[str, Any]) -> Accumulator:
    """Return the accumulator that `to_tensors` stored; read-only arrays are copied."""
    # Metadata of the wrong form may raise KeyError, TypeError, ValueError or AttributeError.
    tensors = {key: _writable(tensor) for key, tensor in tensors.items()}
    if "scatter" in metadata or "rank" in metadata:
        raise FileFormatError(
            "the moments have a sample or sketch of an earlier version; accumulate the rows again"
        )
    joint = [tuple(names) for names in metadata["joint"]]
    parameters = Parameters.of(
        metadata["block_rows"], metadata["kinds"], joint,
        metadata.get("subsample", 1.0), metadata.get("seed", 0),
        metadata.get("covariance_type", "full"),
        metadata.get("by"),
    )  # fmt: skip
    if parameters.by is not None:
        return _read_classes(tensors, metadata, parameters)
    accumulator = accumulator_of(parameters)
    width = metadata["width"]
    if width is None:
        return accumulator
    if not isinstance(width, int) or width < 1:
        raise FileFormatError(f"the width {width!r} is not a positive integer")
    if parameters.block_rows is not None and parameters.block_rows * width * 8 > _MOST_BLOCK_BYTES:
        raise FileFormatError(
            f"a block of {parameters.block_rows:,} rows of {width:,} features would take more than "
            f"{_MOST_BLOCK_BYTES >> 30} GiB; the file was edited or damaged"
        )
    sampled = accumulator if isinstance(accumulator, SampledAccumulator) else None
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
        missing = set(metadata["pairs"]) - set(pairs)
        if missing:
            raise FileFormatError(f"the tensor {'pairs.' + min(missing)!r} is missing")
        accumulator.label_products = LabelTable.read(pairs, accumulator.variables)
        if not accumulator.label_products.is_compact:
            raise FileFormatError("the table of label pairs has rows that belong to no variable")
    buffered = _read_buffered(tensors, accumulator, width)
    if sampled is not None:
        _read_sample(tensors, metadata, sampled)
    if buffered is not None:
        accumulator.restore(buffered)
    return accumulator


def _writable(tensor: NDArray[Any]) -> NDArray[Any]:
    """Return the array if it is writable, else a copy: pickle buffers may be read-only."""
    return tensor if tensor.flags.writeable else tensor.copy(order="K")


def _read_state(
    tensors: Tensors,
    metadata: Mapping[str, object],
    width: int,
    parameters: Parameters,
) -> State:
    has_variances = parameters.is_diagonal or parameters.subsample < 1
    real, n_packed = np.float64, width * (width + 1) // 2
    expected: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
        "reference": (real, (width,)),
        "weight": (real, (1,)),
        "deviation": (real, (width,)),
    }
    is_packed = "scatter.lower" in tensors
    if has_variances:
        expected["variances"] = (real, (width,))
    elif is_packed:
        expected["scatter.lower"] = (real, (n_packed,))
    else:
        expected["scatter"] = (real, (width,) * 2)
    if "lost" in tensors:
        expected["lost"] = (real, (width,))
    check_tensors(tensors, expected)
    n_rows = metadata["n_rows"]
    if not isinstance(n_rows, int) or not 0 <= n_rows < 1 << 63:
        raise FileFormatError(f"n_rows is {n_rows!r}, not a number of rows")
    weight = float(tensors["weight"][0])
    if weight < 0 or (weight > 0) != (n_rows > 0):
        raise FileFormatError("the number of rows and their weight contradict each other")
    roundoff = EPS32 if metadata["float32_products"] else EPS64
    second: Scatter
    if has_variances:
        second = Diagonal(tensors["variances"], roundoff)
    elif is_packed:
        second = Scatter.unpacked(tensors["scatter.lower"], width, roundoff)
    else:
        second = Scatter(np.asfortranarray(tensors["scatter"].T), roundoff)
    if (second.diagonal() < 0).any():
        raise FileFormatError("the scatter has a negative variance")
    lost = tensors.get("lost")
    if lost is not None:
        refuse_negative(tensors, ("lost",))
    eps = metadata["row_eps"]
    if not isinstance(eps, float) or not 0.0 <= eps < 1.0:
        raise FileFormatError(f"row_eps is {eps!r}, not a number from 0 to 1")
    return State(tensors["reference"], n_rows, weight, tensors["deviation"], second, lost, eps)


def _read_buffered(tensors: Tensors, accumulator: Accumulator, width: int) -> LabelledRows | None:
    """Return the buffered rows of a file, with labels encoded by the variables of `accumulator`."""
    rows = tensors.get("staged.rows")
    if rows is None:
        return None
    n = len(rows) if rows.ndim else 0
    dtype = np.float32 if rows.dtype == np.float32 else np.float64
    check_tensors(tensors, {"staged.rows": (dtype, (n, width))})
    if n > accumulator.parameters.capacity(width, rows.itemsize):
        raise FileFormatError("the buffer has more rows than a block")
    try:
        check_values(rows, "staged.rows")
    except InputError as error:
        raise FileFormatError(str(error)) from error
    block = LabelledRows(rows, None)
    if "staged.weight" in tensors:
        check_tensors(tensors, {"staged.weight": (np.float64, (n,))})
        block.weight = tensors["staged.weight"]
        if (block.weight <= 0).any():
            raise FileFormatError("the tensor 'staged.weight' holds weights that are not positive")
    for i, (name, variable) in enumerate(accumulator.variables.items()):
        key = f"staged.{i}"
        if key in tensors:
            block.labels[name] = variable.read_labels(tensors[key], n, key)
    return block


def accumulator_of(parameters: Parameters) -> Accumulator:
    """Return an empty accumulator of the class that holds moments with these parameters."""
    if parameters.by is not None:
        return ClassAccumulator(parameters)
    if parameters.is_diagonal:
        return DiagonalAccumulator(parameters)
    return SampledAccumulator(parameters) if parameters.subsample < 1 else Accumulator(parameters)
