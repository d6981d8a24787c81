"""Encoding of label columns from any container as classes or numbers.

The labels of a block of rows are in some container: a list, an array, a data frame, a tensor.
:func:`encode` converts each variable to one of two forms, which hide the container:

- :class:`ClassCodes` for strings, booleans, integers and categoricals: class names, and the index
  of each row's class;
- :class:`Columns` for floats and for several columns at once: an ``(n, k)`` float64 matrix.

The name of a class does not depend on the container: NumPy, pandas, polars, Arrow and torch
scalars become Python's ``str``, ``bool`` and ``int``. ``True`` and ``1`` are different classes
although Python calls them equal (:func:`class_key`); a column that mixes them is refused. A
missing label (None, NaN, NA, NaT, null, masked) is never a class. Encoded arrays own their
memory, so that the caller may reuse buffers.
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
