"""Safetensors files: tensors and JSON metadata, no pickle; atomic to write, checked when read."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import FileFormatError

_LIBRARY = "splince_fast"


def library_version() -> str:
    """Version of the installed package."""
    try:
        return version("splince-fast")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0+source"


def write(
    path: str | os.PathLike[str],
    kind: str,
    format_version: int,
    tensors: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, Any],
) -> None:
    """Write `tensors` and `metadata` so that `path` holds either the old or the whole new file."""
    from safetensors.numpy import save_file

    target = Path(path)
    header = {
        "library": _LIBRARY,
        "kind": kind,
        "format_version": str(format_version),
        "library_version": library_version(),
        "metadata": json.dumps(metadata, sort_keys=True, allow_nan=False),
    }
    own = f"{os.getpid()}.{threading.get_ident()}"
    partial = target.with_name(f".{target.name}.{own}.partial")
    try:
        # An empty file has the permissions that the user's umask gives; the writer's are narrower.
        partial.touch()
        mode = partial.stat().st_mode
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, partial, header)
        partial.chmod(mode)
        with open(partial, "rb+") as file:
            _sort_metadata(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if type(error).__name__ == "SafetensorError":
            raise OSError(f"could not write {target}: {error}") from error
        raise


def _sort_metadata(file: IO[bytes]) -> None:
    """Put the metadata in order, which the writer leaves to chance: equal states, equal bytes."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) <= length:  # the same text but for its order, unless the writer's style changes
        file.seek(8)
        file.write(text.ljust(length))


def read(
    path: str | os.PathLike[str], kind: str, format_version: int
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Tensors and metadata of a file of the given kind.

    Raises
    ------
    FileFormatError
        The file is truncated, foreign, of another kind, or of a newer format.
    FileNotFoundError, PermissionError
        There is no such file, or no right to read it.
    """
    from safetensors import SafetensorError, safe_open

    target = Path(path)
    if not target.exists():
        raise FileNotFoundError(f"there is no file {target}")
    if not os.access(target, os.R_OK):
        raise PermissionError(f"this user may not read {target}; ask its owner for the right to")
    try:
        with safe_open(target, framework="numpy") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise FileFormatError(
            f"{target} cannot be read: {error}. It is truncated, damaged, or no safetensors file; "
            "write it again"
        ) from error
    if header.get("library") != _LIBRARY:
        raise FileFormatError(
            f"{target} was not written by {_LIBRARY}: its header names no such file"
        )
    if header.get("kind") != kind:
        raise FileFormatError(f"{target} holds {header.get('kind')!r}, and {kind!r} was expected")
    found = header.get("format_version", "")
    if not found.isdecimal():
        raise FileFormatError(f"{target} has no legible format version ({found!r})")
    if int(found) > format_version:
        raise FileFormatError(
            f"{target} has format {found}, and this version of {_LIBRARY} ({library_version()}) "
            f"reads up to {format_version}: upgrade {_LIBRARY} (the file was written by "
            f"{header.get('library_version')})"
        )
    try:
        metadata = json.loads(header["metadata"])
    except (KeyError, json.JSONDecodeError) as error:
        raise FileFormatError(f"{target} has no legible metadata: {error}") from error
    if not isinstance(metadata, dict):
        raise FileFormatError(f"{target} has metadata that are not a JSON object")
    return tensors, metadata


def check_tensors(
    tensors: Mapping[str, NDArray[Any]], expected: Mapping[str, tuple[Any, tuple[int, ...]]]
) -> None:
    """Raise FileFormatError unless every expected tensor is there with its dtype and shape."""
    for name, (dtype, shape) in expected.items():
        if name not in tensors:
            raise FileFormatError(f"the tensor {name!r} is missing")
        found = tensors[name]
        if found.dtype != dtype or found.shape != shape:
            raise FileFormatError(
                f"the tensor {name!r} is {found.dtype} of shape {found.shape}, and should be "
                f"{np.dtype(dtype)} of shape {shape}"
            )
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise FileFormatError(f"the tensor {name!r} holds NaN or infinity")
