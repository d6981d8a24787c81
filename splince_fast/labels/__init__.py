"""Encoding of label columns from any container as classes or numbers.

The labels of a block of rows may be in any container, such as a list, an array, a data frame or a
tensor. :func:`encode` converts each variable to one of two forms, independent of the container:

- :class:`ClassCodes` for strings, booleans, integers and categoricals: the class names, and for
  each row the index of its class;
- :class:`Columns` for floats and for variables with several columns: an ``(n, k)`` float64 matrix.

The name of a class does not depend on the container: NumPy, pandas, polars, Arrow and torch
scalars become Python's ``str``, ``bool`` and ``int``. ``True`` and ``1`` are different classes,
although they are equal in Python (:func:`class_key`); a column that contains booleans and integers
raises LabelError. A missing label (None, NaN, NA, NaT, null, masked) is never a class. Encoded
arrays own their memory, so that the caller may reuse the buffers of the labels.
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
