"""Names of classes and variables: dict keys, arrays, lists in messages, and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type
from splince_fast.exceptions import FileFormatError, LabelError, SplinceError

ClassName: TypeAlias = str | bool | int | tuple[str | bool | int, ...]
VariableName: TypeAlias = str | tuple[str, ...]


def class_key(name: ClassName) -> tuple[object, ...]:
    """Return a dict key for a class name; the keys of ``True`` and ``1`` differ."""
    if isinstance(name, tuple):
        return tuple((type(part), part) for part in name)
    return type(name), name


def sort_key(name: ClassName) -> list[tuple[str, Any]]:
    """Return a sort key for a class name; names of one type are sorted by value."""
    return [(type(part).__name__, part) for part in (name if isinstance(name, tuple) else (name,))]


def names_array(classes: Iterable[ClassName]) -> NDArray[Any]:
    """Return class names as an array; of dtype object if another one would change a name."""
    # NumPy converts integers on both sides of 2^63 to floats, and strips trailing NULs of strings.
    names = list(classes)
    if set(map(type, names)) in ({str}, {bool}, {int}):
        plain = np.array(names)
        if plain.tolist() == names:
            return plain
    array = np.empty(len(names), dtype=object)
    for i, name in enumerate(names):  # array[:] = names would unpack tuples
        array[i] = name
    return array


def names_to_json(classes: Iterable[ClassName]) -> list[object]:
    """Convert class names to JSON values; raise LabelError if one is invalid or occurs twice."""
    names = tuple(classes)
    _check_names(names, LabelError)
    return [list(name) if isinstance(name, tuple) else name for name in names]


def names_from_json(obj: object) -> tuple[ClassName, ...]:
    """Invert :func:`names_to_json`; raise FileFormatError for other values."""
    if not isinstance(obj, list):
        raise FileFormatError(f"class names must be a list, not {described_type(obj)}")
    names = tuple(tuple(item) if isinstance(item, list) else item for item in obj)
    _check_names(names, FileFormatError)
    return names


def _check_names(names: tuple[Any, ...], error: type[SplinceError]) -> None:
    """Raise `error` if a class name is invalid or occurs twice."""
    for name in names:
        parts = name if isinstance(name, tuple) else (name,)
        if not parts or any(type(part) not in (str, bool, int) for part in parts):
            raise error(f"{name!r} cannot name a class; use str, bool, int, or a tuple of these")
    if len(set(map(class_key, names))) < len(names):
        raise error(f"a class name occurs twice among {listed(names)}")


def listed(names: Iterable[object]) -> str:
    """Format names for a message: the first twenty names, and the number of further names."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")
