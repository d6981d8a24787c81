"""Targets of fuzzing: each takes bytes and returns "result" or "refused"; all else is a bug."""

from __future__ import annotations

import contextlib
import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from splince_fast import ConditionalEraser, Moments, Projection, SplinceError, labels, leace
from splince_fast._runtime import files
from splince_fast.exceptions import SplinceWarning

Target = Callable[[bytes, Path], str]


def sealed(data: bytes) -> bytes:
    """The same file with the digest of its content, which would refuse all else beforehand."""
    try:
        tensors = safetensors.numpy.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        old, text = header["sha256"], header["metadata"]
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, AttributeError):
        return data
    return data.replace(old.encode(), files._digest(tensors, text).encode(), 1)


def _loaded(load: Callable[[Path], Any], use: Callable[[Any], Any]) -> Target:
    """Load the bytes as a file; what can be loaded must be usable and survive another file."""

    def target(data: bytes, folder: Path) -> str:
        path = folder / "fuzzed.safetensors"
        path.write_bytes(sealed(data))
        with warnings.catch_warnings():
            # Numbers at the ends of float64 are legal in a file; NumPy may say so when used.
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", SplinceWarning)
            try:
                found = load(path)
            except SplinceError:
                return "refused"
            again = folder / "again.safetensors"
            found.save(again)
            first = again.read_bytes()
            load(again).save(again)
            if again.read_bytes() != first:
                raise AssertionError("a second round trip changed the file")
            with contextlib.suppress(SplinceError):
                use(found)
        return "result"

    return target


def _use_moments(moments: Moments) -> None:
    if moments.n_features is not None and moments.n_features < 100:
        moments.update(np.ones((2, moments.n_features)))
        moments.covariance(ddof=0)
        for name in moments.variables:
            moments.cross_covariance(name, ddof=0)
            leace(moments, erase=name)


def _use_projection(projection: Projection) -> None:
    projection(np.ones((2, projection.n_features)))
    str(projection.report)


def _use_conditional(eraser: ConditionalEraser) -> None:
    columns = {
        shift.name: np.ones((2, len(shift.mean)))
        if shift.classes is None
        else shift.classes[:1] * 2
        for shift in eraser.shifts
    }
    eraser(np.ones((2, eraser.n_features)), columns)
    str(eraser.report)


def _columns(value: Any) -> Any:
    """JSON as labels; an object {"dtype": ..., "values": [...]} becomes an array of that dtype."""
    if isinstance(value, dict) and set(value) == {"dtype", "values"}:
        try:
            return np.array(value["values"], dtype=str(value["dtype"]))
        except (ValueError, TypeError, OverflowError, SyntaxError, KeyError, MemoryError):
            return None
    if isinstance(value, dict):
        return {name: _columns(v) for name, v in value.items()}
    return value


def read_labels(data: bytes, folder: Path) -> str:
    """Labels from JSON: [n_rows, labels, kinds, joint]; what is read must fit the rows."""
    try:
        n_rows, given, kinds, joint = json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return "refused"
    if not isinstance(n_rows, int) or not 0 <= n_rows < 1000:
        return "refused"
    with warnings.catch_warnings():
        # Comparisons and casts of what a user hands over must not warn: only this package may.
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", SplinceWarning)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            columns = _columns(given)
        try:
            Moments(kinds=kinds, joint=joint)
            found = labels.encode(columns, n_rows, kinds=kinds, joint=[tuple(j) for j in joint])
        except SplinceError:
            return "refused"
    for column in found.values():
        if isinstance(column, labels.ClassCodes):
            assert column.codes.shape == (n_rows,)
            assert column.codes.size == 0 or column.codes.min() >= -1
            assert column.codes.size == 0 or column.codes.max() < max(len(column.classes), 0)
            names = labels.names_to_json(column.classes)
            assert labels.names_from_json(json.loads(json.dumps(names))) == column.classes
        else:
            assert column.values.shape == (n_rows, len(column.columns))
            assert np.isfinite(column.values).all()
    return "result"


TARGETS: dict[str, Target] = {
    "moments": _loaded(Moments.load, _use_moments),
    "projection": _loaded(Projection.load, _use_projection),
    "conditional": _loaded(ConditionalEraser.load, _use_conditional),
    "labels": read_labels,
}


def repaired(data: bytes) -> bytes:
    """The same file with a length of the header that fits, so that mutations reach the reader."""
    try:
        _, end = json.JSONDecoder().raw_decode(data[8:].decode("latin-1"))
    except (ValueError, RecursionError):
        return data
    return struct.pack("<Q", end) + data[8:]
