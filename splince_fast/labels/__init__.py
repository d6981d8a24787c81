"""Encoding of label columns from any container as classes or numbers.

:func:`encode` converts each variable of a block, in a list, an array, a data frame or a tensor, to
:class:`ClassCodes` (strings, booleans, integers and categoricals) or :class:`Columns` (floats, and
variables with several columns). Class names are Python's ``str``, ``bool`` and ``int``, whatever
the container. ``True`` and ``1`` are different classes, although they are equal in Python; a column
that contains booleans and integers raises LabelError. A missing label (None, NaN, NA, NaT, null,
masked) is never a class. Encoded arrays own their memory, so that the caller may reuse the buffers
of the labels.
"""

from __future__ import annotations

from splince_fast._runtime.names import ClassName, VariableName
from splince_fast._runtime.names import class_key as class_key
from splince_fast._runtime.names import names_array as names_array
from splince_fast._runtime.names import names_from_json as names_from_json
from splince_fast._runtime.names import names_to_json as names_to_json
from splince_fast.labels.encode import KINDS, encode, encode_one
from splince_fast.labels.encoded import ClassCodes, Columns, Encoded
from splince_fast.labels.encoded import kind_of as kind_of

__all__ = [
    "KINDS",
    "ClassCodes",
    "ClassName",
    "Columns",
    "Encoded",
    "VariableName",
    "encode",
    "encode_one",
]
