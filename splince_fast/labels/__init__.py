"""The meaning of a column of labels: classes or numbers, from any container.

A block of rows comes with labels in some container: a list, an array, a data frame, a tensor.
:func:`encode` reads them into two forms only, so that nothing downstream knows containers:

- :class:`ClassCodes` for strings, booleans, integers and categoricals: names and positions;
- :class:`Columns` for floats and for several columns at once: a ``(n, k)`` float64 matrix.

The name of a class does not depend on the container: NumPy, pandas, polars, Arrow and torch
scalars become Python's ``str``, ``bool`` and ``int``. ``True`` and ``1`` are different classes
although Python calls them equal (:func:`class_key`); a column that mixes them is refused. A
missing label (None, NaN, NA, NaT, null, masked) is never a class. What is returned owns its
memory: the caller may reuse buffers.
"""

from __future__ import annotations

from splince_fast.labels.encode import KINDS, encode, encode_one
from splince_fast.labels.encoded import ClassCodes, Columns, Encoded, kind_of
from splince_fast.labels.names import (
    ClassName,
    VariableName,
    class_key,
    names_array,
    names_from_json,
    names_to_json,
)

__all__ = [
    "KINDS",
    "ClassCodes",
    "ClassName",
    "Columns",
    "Encoded",
    "VariableName",
    "class_key",
    "encode",
    "encode_one",
    "kind_of",
    "names_array",
    "names_from_json",
    "names_to_json",
]
