"""Conversion of an accumulator or a split to the tensors of a .moments file and back, bit for bit.

The ``TENSORS`` of a class list the names, dtypes and shapes of its tensors. An accumulator has the
tensors of its state, those of its scatter, and:

=======================  =====================  ===================================================
tensor                   dtype, shape           content
=======================  =====================  ===================================================
lost                     float64 (d,)           bound of the rounding error of the diagonal of the
                                                scatter; only after removals that lost precision
variable.<i>.<tensor>                           sums of variable i of the metadata
pairs.<i>.<j>            float64 (k_i, k_j)     `LabelTable` of the labels of variables i and j
pairs.origin.<i>         float64 (k,)           origin of the continuous variable i in this table
staged.rows              float32 or float64     buffered rows
                         (n, d)
staged.weight            float64 (n,)           weights of the buffered rows, if not all 1
staged.<i>               int64 (n,) or          labels of the buffered rows for variable i: class
                         float64 (n, k)         codes, -1 if missing; or values, NaN if missing
sample.<tensor>                                 state of the sampled rows, with weights w / p
weights.squares          float64 (1,)           sum (w / p)^2
part.<i>.<tensor>                               part i of a split
=======================  =====================  ===================================================

The metadata are ``parameters`` and ``feature_names``, and, for an accumulator, ``width``,
``n_rows``, ``float32_products``, ``row_eps`` (the machine epsilon of the rows' dtype), the names
``pairs``, and ``name``, ``kind`` and ``names`` of each of the ``variables``; with a sample,
``position``, the number of rows from which it was drawn, and ``sample``, its metadata. A split has
the metadata ``part.<i>`` of its parts; with classes, their names ``classes``, and ``unlabelled``,
whether the last part has the rows without a label; with folds, ``folds``, ``groups`` and
``position``, the number of rows so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from splince_fast._kernels.row_kernels import add
from splince_fast._runtime.files import Record, Tensors, check_tensors, read_feature_names
from splince_fast._runtime.rows import check_values
from splince_fast.exceptions import FileFormatError
from splince_fast.labels import names_from_json, names_to_json
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.block import Block, Buffer
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.scatters import Sampled
from splince_fast.moments.split import Part, Split, accumulator_of
from splince_fast.moments.state import EPS32, EPS64, State
from splince_fast.moments.variables import KINDS, LabelTable

# Version number of the file format: raise it with every change that an older reader misreads.
FORMAT = 1
# Largest number of bytes of a block: a file with larger blocks is rejected as damaged, because the
# next update would allocate a block.
_MOST_BLOCK_BYTES = 1 << 35


# -- writing -------------------------------------------------------------------------------


def to_tensors(moments: Part, *, packed: bool = False) -> Record:
    """Return named tensors and JSON metadata of moments, including buffered rows."""
    # With `packed`, for pickles, only the lower triangle of the scatter is stored.
    tensors, metadata = _record_of(moments, packed)
    return tensors, {**metadata, "parameters": asdict(moments.parameters)}


def _record_of(moments: Part, packed: bool) -> Record:
    tensors, metadata = (
        ({}, _keys_of(moments)) if isinstance(moments, Split) else _sums_of(moments, packed)
    )
    for name, child in _children(moments).items():
        of_child, metadata[name] = _record_of(child, packed)
        tensors |= _prefixed(f"{name}.", of_child)
    return tensors, {**metadata, "feature_names": moments.feature_names}


def _children(moments: Part) -> dict[str, Part]:
    """Return the moments of which others consist, by prefix of their tensors."""
    if isinstance(moments, Split):  # rows without a label are last
        keys = sorted(moments.parts, key=lambda key: key is None)
        return {f"part.{i}": moments.parts[key] for i, key in enumerate(keys)}
    second = None if moments.state is None else moments.state.second
    return {"sample": second.sample} if isinstance(second, Sampled) else {}


def _keys_of(split: Split) -> dict[str, Any]:
    if split.n_folds is not None:
        return {"folds": split.n_folds, "groups": split.groups, "position": split.position}
    classes = [key for key in split.parts if key is not None]
    return {"classes": names_to_json(classes), "unlabelled": None in split.parts}


def _sums_of(accumulator: Accumulator, packed: bool) -> Record:
    state, variables = accumulator.state, accumulator.variables
    if state is None:
        return {}, {"width": None, "variables": []}
    tensors = {name: np.atleast_1d(getattr(state, name)) for name in State.TENSORS}
    tensors |= state.second.tensors(packed)
    if isinstance(state.rounding_bound, np.ndarray):
        tensors["lost"] = state.rounding_bound
    for i, variable in enumerate(variables.values()):
        tensors |= _prefixed(f"variable.{i}.", variable.tensors())
    pairs = accumulator.label_products.tensors(variables)
    tensors |= _prefixed("pairs.", pairs)
    if accumulator.buffer is not None and accumulator.buffer.filled:
        block = accumulator.buffer.contents()
        tensors["staged.rows"] = block.rows
        if block.weight is not None:
            tensors["staged.weight"] = block.weight
        for i, name in enumerate(variables):
            if (labels := block.labels.get(name)) is not None:
                dtype = np.int64 if labels.dtype.kind == "i" else np.float64
                tensors[f"staged.{i}"] = labels.astype(dtype, copy=False)
    metadata = {
        "width": state.width, "n_rows": state.n_rows, "row_eps": state.row_eps,
        "float32_products": state.second.unit_roundoff > EPS64, "pairs": sorted(pairs),
        "variables": [{"name": n, **variable.metadata()} for n, variable in variables.items()],
    }  # fmt: skip
    if isinstance(state.second, Sampled):
        tensors["weights.squares"] = np.array([state.second.squares])
        metadata["position"] = state.second.position
    return tensors, metadata


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


# -- reading -------------------------------------------------------------------------------


def from_tensors(tensors: Tensors, metadata: Mapping[str, Any], *, folds: bool = False) -> Part:
    """Return the moments that `to_tensors` stored; read-only arrays are copied."""
    # Metadata of the wrong form may raise KeyError, TypeError, ValueError or AttributeError.
    # Pickle buffers may be read-only.
    tensors = {k: t if t.flags.writeable else t.copy(order="K") for k, t in tensors.items()}
    given = metadata["parameters"]
    parameters = Parameters.of(**{field.name: given[field.name] for field in fields(Parameters)})
    moments = accumulator_of(parameters)
    if folds:
        position = _read_count(metadata, "position")
        moments = Split(parameters, metadata["folds"], metadata["groups"], position)
    _fill(moments, tensors, metadata)
    return moments


def _fill(moments: Part, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    """Set the sums and buffered rows of empty moments, whose parameters are those of the file."""
    if not isinstance(moments, Split):
        if metadata["width"] is not None:
            _fill_sums(moments, tensors, metadata)
    elif moments.n_folds is None:
        unlabelled = (None,) if metadata["unlabelled"] else ()
        keys = *names_from_json(metadata["classes"]), *unlabelled
        moments.put({key: moments.new_part() for key in keys})
    widths = {moments.width, None}
    for name, child in _children(moments).items():
        _fill(child, _part_of(tensors, f"{name}."), metadata[name])
        widths.add(child.width)
    if len(widths) > 2:
        raise FileFormatError("the parts have different numbers of features")
    moments.feature_names = read_feature_names(metadata, moments.width)
    if isinstance(moments, Split) or moments.state is None:
        return
    second = moments.state.second
    if isinstance(second, Sampled) and second.sample.n_rows > moments.n_rows:
        raise FileFormatError("the sample has more rows than the state")
    _fill_buffer(moments, _part_of(tensors, "staged."))


def _fill_sums(accumulator: Accumulator, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    width, block_rows = metadata["width"], accumulator.parameters.block_rows or 1
    if type(width) is not int or not 0 < 8 * width * block_rows <= _MOST_BLOCK_BYTES:
        raise FileFormatError(
            f"blocks of {block_rows} rows of {width!r} features are invalid or take more than "
            f"{_MOST_BLOCK_BYTES >> 30} GiB; the file was edited or damaged"
        )
    state = accumulator.state = accumulator._empty_state(0)
    sums = check_tensors(tensors, State.TENSORS, {"d": width})
    for attribute, tensor in zip(State.TENSORS, sums, strict=True):
        setattr(state, attribute, tensor)
    state.weight, state.n_rows = float(tensors["weight"][0]), _read_count(metadata, "n_rows")
    state.row_eps = metadata["row_eps"]
    if (state.weight > 0) != (state.n_rows > 0):
        raise FileFormatError("the number of rows and their weight contradict each other")
    if not isinstance(state.row_eps, float) or not 0.0 <= state.row_eps < 1.0:
        raise FileFormatError(f"row_eps is {state.row_eps!r}, not a number from 0 to 1")
    state.second.read(tensors, width)
    state.second.unit_roundoff = EPS32 if metadata["float32_products"] else EPS64
    if (state.second.diagonal() < 0).any():
        raise FileFormatError("the scatter has a negative variance")
    if "lost" in tensors:
        (state.rounding_bound,) = check_tensors(tensors, {"lost": (np.float64, (width,), 0)})
    for i, entry in enumerate(metadata["variables"]):
        of_variable = _part_of(tensors, f"variable.{i}.")
        name = tuple(entry["name"]) if isinstance(entry["name"], list) else entry["name"]
        variable = accumulator.variables[name] = KINDS[entry["kind"]].read(
            width, entry, of_variable
        )
        if variable.n_rows > state.n_rows:
            raise FileFormatError(f"{name!r} labels more rows than the state has")
    accumulator.label_products = LabelTable.read(
        _part_of(tensors, "pairs."), metadata.get("pairs", ()), accumulator.variables
    )
    if isinstance(state.second, Sampled):
        squares = check_tensors(tensors, {"weights.squares": (np.float64, (1,), 0)})[0]
        state.second.squares = float(squares[0])
        state.second.position = _read_count(metadata, "position")


def _part_of(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with a prefix, under names without the prefix."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _read_count(metadata: Mapping[str, Any], name: str) -> int:
    count = metadata[name]
    if not isinstance(count, int) or not 0 <= count < 1 << 62:
        raise FileFormatError(f"{name} is {count!r}, not a number of rows")
    return count


def _fill_buffer(accumulator: Accumulator, tensors: Tensors) -> None:
    """Set the buffered rows, with labels encoded by the variables of the accumulator."""
    rows, width = tensors.get("rows"), accumulator.width
    if rows is None or width is None:
        return
    n = len(rows) if rows.ndim else 0
    dtype = np.float32 if rows.dtype == np.float32 else np.float64
    check_tensors(tensors, {"rows": (dtype, (n, width))})
    if n >= accumulator.parameters.capacity(width, rows.itemsize):
        raise FileFormatError("the buffered rows fill a block")
    check_values(rows, "the buffered rows")
    block = Block(n, rows, None)
    if "weight" in tensors:
        (block.weight,) = check_tensors(tensors, {"weight": (np.float64, (n,))})
        if (block.weight <= 0).any():
            raise FileFormatError("buffered rows have weights that are not positive")
    for i, (name, variable) in enumerate(accumulator.variables.items()):
        if (labels := tensors.get(str(i))) is not None:
            block.labels[name] = variable.read_labels(labels, n, f"staged.{i}")
    accumulator.buffer = Buffer(accumulator.parameters.capacity(width, rows.itemsize), width, dtype)
    add(accumulator.buffer.appended(block, 0))
