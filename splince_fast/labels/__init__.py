"""Encoding of label columns from any container as classes or numbers.

:func:`encode` converts each variable of a block, in a list, an array, a data frame or a tensor, to
:class:`ClassCodes` (strings, booleans, integers and categoricals) or :class:`Columns` (floats, and
variables with several columns). Class names are Python's ``str``, ``bool`` and ``int``, whatever
the container. ``True`` and ``1`` are different classes, although they are equal in Python
(:func:`class_key`); a column that contains booleans and integers raises LabelError. A missing label
(None, NaN, NA, NaT, null, masked) is never a class. Encoded arrays own their memory, so that the
caller may reuse the buffers of the labels.
"""

from __future__ import annotations

from splince_fast._runtime.names import (
    ClassName,
    VariableName,
    class_key,
    names_array,
    names_from_json,
    names_to_json,
)
from splince_fast.labels.encode import KINDS, encode, encode_one
from splince_fast.labels.encoded import ClassCodes, Columns, Encoded, kind_of

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
