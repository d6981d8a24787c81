"""Safetensors files with JSON metadata: atomic writing, validated reading, no pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from splince_fast._runtime.arguments import library_version
from splince_fast._runtime.rows import cause_text
from splince_fast.exceptions import FileFormatError, InputError

Tensors = dict[str, NDArray[Any]]
Record = tuple[Tensors, dict[str, Any]]  # contents of a file: tensors and JSON metadata
# For each tensor, the dtype, the shape (an axis is a size or the name of a size), and 0 if all
# numbers must be non-negative.
Layout = Mapping[str, tuple[DTypeLike, tuple[int | str, ...]] | tuple[DTypeLike, Any, int]]

_LIBRARY = "splince_fast"
# For each kind of file, the function that loads it, for error messages.
_LOADERS = dict(projection="Projection.load", conditional="load_eraser", moments="Moments.load")
_WRITERS = "pass a file that Projection.save or Moments.save has written"
_DAMAGED = "it is truncated or damaged; write it again"
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)


def write(
    path: str | os.PathLike[str],
    kind: str,
    format_version: int,
    tensors: Mapping[str, NDArray[np.generic]],
    metadata: Mapping[str, object],
) -> None:
    """Write tensors and metadata to `path`; an existing file is replaced atomically."""
    # Symbolic links are followed, and an existing file keeps its permissions.
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    target = writable_path(path)
    text = json.dumps(metadata, sort_keys=True, allow_nan=False)
    header = {
        "library": _LIBRARY,
        "kind": kind,
        "format_version": str(format_version),
        "library_version": library_version(),
        "metadata": text,
        "sha256": _digest(tensors, text),
    }
    arrays = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    with replacing(target) as partial:
        try:
            save_file(arrays, partial, header)
        except SafetensorError as error:
            raise OSError(f"could not write {target}: {error}") from error
        _sort_metadata(partial)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata in the header of a file, so that equal contents give equal bytes."""
    with open(path, "rb+") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:  # false if safetensors writes a shorter format
            file.seek(8)
            file.write(text.ljust(length))


def eraser_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file for an eraser; raise InputError for another format's suffix."""
    target = as_path(path)
    if target.suffix not in ("", ".safetensors"):
        raise InputError(
            f"{os.fspath(target)!r} names another format; erasers are saved as .safetensors, or "
            "without a suffix. For ONNX, pass splince_fast.nn.Eraser(eraser) to torch.onnx.export"
        )
    return target


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text in UTF-8 to `path`, with the guarantees and errors of :func:`write`."""
    with replacing(writable_path(path)) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `target` unless an error occurs."""
    writer = f"{os.getpid()}.{threading.get_ident()}"
    partial = target.with_name(f"{_partial_prefix(target)}{writer}.partial")
    try:
        # A new file has the permissions of the user's umask; save_file may set narrower ones.
        partial.touch()
        mode = (target if target.exists() else partial).stat().st_mode
        yield partial
        partial.chmod(mode)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _partial_prefix(target: Path) -> str:
    # Many file systems allow names of at most 255 bytes.
    return f".{os.fsencode(target.name)[:200].decode(errors='ignore')}."


def partial_files(targets: Iterable[Path]) -> list[Path]:
    """Return the temporary files of :func:`replacing` that killed processes left beside targets."""
    prefixes = {target.parent / _partial_prefix(target) for target in targets}
    found = []
    for folder in {prefix.parent for prefix in prefixes}:
        for path in folder.glob(".*.partial"):
            match = re.fullmatch(r"(.*\.)\d+\.\d+\.partial", path.name, re.DOTALL)
            if match and folder / match[1] in prefixes:
                found.append(path)
    return found


def as_path(path: object) -> Path:
    """Convert a path; raise InputError for an empty path or another type."""
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(f"the path is {path!r}; pass the name of a file") from error
    if not text:
        raise InputError("the path is empty; name a file")
    return Path(text)


def writable_path(path: str | os.PathLike[str]) -> Path:
    """Return the path with symbolic links resolved."""
    name = os.fspath(as_path(path))
    target = Path(os.path.realpath(name))
    if target.is_dir():
        raise InputError(f"{name!r} is a folder; name a file in it")
    if not target.parent.exists():
        raise FileNotFoundError(f"there is no folder for {name!r}; make it first")
    return target


def _digest(tensors: Mapping[str, NDArray[np.generic]], text: str) -> str:
    """Return the SHA-256 of the metadata and of the tensors' names, dtypes, shapes and bytes."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def read(path: str | os.PathLike[str], kind: str, format_version: int) -> Record:
    """Return the tensors and the metadata of a file of kind `kind`."""
    target = as_path(path)
    if target.is_dir():
        raise FileFormatError(f"{target} is a folder; pass the path of a file")
    with open(target, "rb") as file:
        start = file.read(9)
    if len(start) == 9 and start[8:] != b"{":  # the JSON header follows its length, 8 bytes
        raise FileFormatError(f"{target} is not a safetensors file; {_WRITERS}")
    metadata: Any = None
    try:
        header, tensors = _load(target)
        found, version = header.get("kind"), header.get("format_version", "")
        reason = "has metadata that are not a JSON object"
        if header.get("library") != _LIBRARY:
            reason = f"was not written by {_LIBRARY}: its header does not say so; {_WRITERS}"
        elif found != kind:
            loader = _LOADERS.get(str(found), "the class that saved it")
            reason = f"holds {found!r}, and {kind!r} was expected; load it with {loader}"
        elif not re.fullmatch("[1-9][0-9]{0,5}", version):
            reason = f"has no valid format version ({version[:20]!r})"
        elif int(version) > format_version:
            reason = (
                f"has format {version}, and this {_LIBRARY} ({library_version()}) reads up to "
                f"{format_version}: upgrade to version {header['library_version']}, which wrote it"
            )
        elif header.get("sha256") != _digest(tensors, header.get("metadata", "")):
            reason = f"does not match its checksum; {_DAMAGED}"
        else:
            text = header["metadata"]
            metadata = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (*_UNREADABLE, RecursionError) as error:
        raise FileFormatError(
            f"{target} cannot be read: {cause_text(error)}; {_DAMAGED}"
        ) from error
    if not isinstance(metadata, dict):
        raise FileFormatError(f"{target} {reason}")
    return tensors, metadata


def _load(path: Path, *, only_header: bool = False) -> tuple[dict[str, str], Tensors]:
    """Return the header and the tensors of a safetensors file; `_UNREADABLE` if it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = [] if only_header else file.keys()
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(str(error)) from error


@contextmanager
def consistent(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Context manager that converts errors due to inconsistent contents to FileFormatError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        cause = str(error)
        if not isinstance(error, FileFormatError):
            cause = f"{type(error).__name__}: {error}; it was edited or damaged"
        raise FileFormatError(f"{os.fspath(path)} is inconsistent ({cause}): {remedy}") from error


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Return the kind of a file of this library; None for another file or a missing one."""
    try:
        return _load(as_path(path), only_header=True)[0].get("kind")
    except _UNREADABLE:
        return None  # a later call of `read` raises the error


def _finite(text: str) -> float:
    """Parse a number of the metadata; raise ValueError for NaN, infinity and overflow."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def check_tensors(
    tensors: Tensors, layout: Layout, sizes: Mapping[str, int] | None = None
) -> list[NDArray[Any]]:
    """Return the tensors of a layout; raise FileFormatError unless they match it and are finite."""
    for name, (dtype, axes, *least) in layout.items():
        if name not in tensors:
            raise FileFormatError(f"the tensor {name!r} is missing")
        tensor = tensors[name]
        shape = tuple(axis if isinstance(axis, int) else (sizes or {})[axis] for axis in axes)
        if tensor.dtype != dtype or tensor.shape != shape:
            raise FileFormatError(
                f"the tensor {name!r} is {tensor.dtype} of shape {tensor.shape}, and should be "
                f"{np.dtype(dtype)} of shape {shape}"
            )
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise FileFormatError(f"the tensor {name!r} holds NaN or infinity")
        if least and (tensor < least[0]).any():
            raise FileFormatError(f"the tensor {name!r} holds negative numbers")
    return [tensors[name] for name in layout]


def read_feature_names(metadata: Mapping[str, Any], width: int | None) -> tuple[str, ...] | None:
    """Return the feature names in the metadata of a file; None if there are none."""
    names = metadata.get("feature_names")  # absent if the rows had no names
    if names is not None and len(names) != width:
        raise FileFormatError(f"{len(names)} names of {width} features")
    return None if names is None else tuple(map(str, names))
