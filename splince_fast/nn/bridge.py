"""What this package needs of the others beyond their public names, in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import files as _files
from splince_fast.exceptions import FileFormatError
from splince_fast.labels import (
    ClassCodes,
    ClassName,
    Columns,
    Encoded,
    VariableName,
    class_key,
    encode,
    names_to_json,
)
from splince_fast.moments import Moments
from splince_fast.projection import Projection
from splince_fast.report import Report

__all__ = [
    "ClassCodes",
    "ClassName",
    "Columns",
    "Encoded",
    "VariableName",
    "class_key",
    "encode",
    "factors",
    "moments_from_record",
    "moments_from_sums",
    "moments_record",
    "projection_from",
    "projection_from_record",
    "projection_record",
    "read_file",
    "write_file",
]

Float = NDArray[np.float64]
Tensors = dict[str, NDArray[Any]]


# -- projections ---------------------------------------------------------------------------


def factors(projection: Projection) -> tuple[Float, Float, Float]:
    """left (r, d), right (r, d) and bias (r,): r(x) = x - left^T (right x - bias)."""
    return projection.left.T, projection.right.T, projection._bias


def projection_from(left: Float, right: Float, bias: Float, method: str) -> Projection:
    """The map x - left^T (right x - bias); its mean is the shortest point that it leaves alone."""
    mean: Float = np.linalg.pinv(right) @ bias
    return Projection._make(left.copy(), right.copy(), mean, bias.copy(), method)


def projection_record(projection: Projection) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and JSON metadata of a projection."""
    left, right, bias = factors(projection)
    report = projection.report
    tensors = {"left": left, "right": right, "mean": projection.mean, "bias": bias}
    return tensors, {
        "method": projection.method,
        "report": None if report is None else report.to_dict(),
    }


def projection_from_record(tensors: Tensors, metadata: Mapping[str, Any]) -> Projection:
    """The inverse of `projection_record`, bit for bit.

    Raises
    ------
    FileFormatError
        A tensor is missing or has another dtype or shape.
    """
    if "left" not in tensors or tensors["left"].ndim != 2:
        raise FileFormatError("the factors of a projection are missing")
    r, d = tensors["left"].shape
    real = np.float64
    _files.check_tensors(
        tensors,
        {"left": (real, (r, d)), "right": (real, (r, d)), "mean": (real, (d,)),
         "bias": (real, (r,))},
    )  # fmt: skip
    report = metadata["report"]
    return Projection._make(
        tensors["left"], tensors["right"], tensors["mean"], tensors["bias"],
        str(metadata["method"]), None if report is None else Report.from_dict(report),
    )  # fmt: skip


# -- moments -------------------------------------------------------------------------------


def moments_from_sums(
    *,
    n_rows: int,
    weight: float,
    reference: Float,
    deviation: Float,
    scatter: Float,
    variables: Mapping[VariableName, tuple[dict[str, Any], Tensors]],
    kinds: Mapping[str, str],
    joint: Sequence[tuple[str, ...]],
    float32_products: bool,
) -> Moments:
    """Moments whose sums were taken elsewhere.

    Parameters
    ----------
    n_rows, weight : int, float
    reference : (d,) float64: the point that deviations are taken from
    deviation : (d,) float64: sum of w (x - reference)
    scatter : (d, d) float64, symmetric: sum of w (x - mean)(x - mean)^T; taken over
    variables : per variable its metadata and its tensors, sums about `reference`
    """
    tensors: Tensors = {
        "reference": reference,
        "weight": np.array([weight]),
        "deviation": deviation,
        "scatter": scatter,
    }
    entries = []
    for i, (name, (entry, own)) in enumerate(variables.items()):
        entries.append({"name": list(name) if isinstance(name, tuple) else name} | entry)
        tensors |= {f"variable.{i}.{key}": tensor for key, tensor in own.items()}
    metadata = {
        "block_rows": None,
        "ledoit_wolf": False,
        "kinds": dict(kinds),
        "joint": [list(names) for names in joint],
        "width": len(reference),
        "n_rows": n_rows,
        "float32_products": float32_products,
        "variables": entries,
    }
    return moments_from_record(tensors, metadata)


def class_entry(
    names: Sequence[ClassName], rows: NDArray[np.int64], weights: Float, sums: Float
) -> tuple[dict[str, Any], Tensors]:
    """A class-coded variable for `moments_from_sums`; `sums` is (k, d)."""
    entry = {"kind": "classes", "names": names_to_json(tuple(names))}
    return entry, {"rows": rows, "weights": weights, "sums": sums}


def column_entry(
    names: Sequence[str], n_rows: int, weight: float, reference: Float, x_sum: Float, z_sum: Float,
    products: Float, squares: Float,
) -> tuple[dict[str, Any], Tensors]:  # fmt: skip
    """A continuous variable for `moments_from_sums`; `products` is (k, d)."""
    entry = {"kind": "continuous", "names": list(names)}
    return entry, {
        "counts": np.array([n_rows], np.int64),
        "weight": np.array([weight]),
        "reference": reference,
        "x_sum": x_sum,
        "z_sum": z_sum,
        "products": products,
        "squares": squares,
    }


def moments_record(moments: Moments) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and JSON metadata of moments."""
    state = moments.__getstate__()
    return state["tensors"], state["metadata"]


def moments_from_record(tensors: Tensors, metadata: Mapping[str, Any]) -> Moments:
    """The inverse of `moments_record`.

    Raises
    ------
    FileFormatError
        The record is inconsistent.
    """
    moments = Moments()
    moments.__setstate__({"tensors": tensors, "metadata": dict(metadata)})
    return moments


# -- files ---------------------------------------------------------------------------------


def write_file(
    path: str | os.PathLike[str],
    kind: str,
    format_version: int,
    records: Mapping[str, tuple[Tensors, dict[str, Any]]],
    metadata: Mapping[str, Any],
) -> None:
    """Write one record per site into one safetensors file."""
    tensors: Tensors = {}
    entries = {}
    for i, (name, (own, entry)) in enumerate(records.items()):
        tensors |= {f"{i}.{key}": tensor for key, tensor in own.items()}
        entries[name] = entry
    # Metadata are written in sorted order, and the order of sites matters.
    content = {**metadata, "order": list(entries), "records": entries}
    _files.write(path, kind, format_version, tensors, content)


def read_file(
    path: str | os.PathLike[str], kind: str, format_version: int
) -> tuple[dict[str, tuple[Tensors, dict[str, Any]]], dict[str, Any]]:
    """The inverse of `write_file`.

    Raises
    ------
    FileFormatError
        Truncated, foreign, inconsistent, or written by a newer version.
    """
    tensors, metadata = _files.read(path, kind, format_version)
    try:
        records = {}
        for i, name in enumerate(metadata["order"]):
            prefix = f"{i}."
            own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
            records[name] = (own, metadata["records"][name])
    except (KeyError, TypeError) as error:
        raise inconsistent(path, error) from error
    return records, metadata


def inconsistent(path: str | os.PathLike[str], error: Exception) -> FileFormatError:
    """What to raise where the content of a file contradicts itself."""
    return FileFormatError(
        f"{os.fspath(path)} is inconsistent ({type(error).__name__}: {error}); it was edited or "
        "damaged: make it again"
    )
