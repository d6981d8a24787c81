"""Texts that tell whether a cell of a comparison has to be computed again."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from importlib import import_module
from typing import Any


def source_of(function: Any) -> str:
    """A text that changes when a function does, or what it closes over, or its defaults."""
    if isinstance(function, functools.partial):
        bound = [_digest(value) for value in (function.args, sorted(function.keywords.items()))]
        return f"partial{bound}{source_of(function.func)}"
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        text = repr(function) if code is None else repr((code.co_code, code.co_consts))
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    values = [*cells, *(getattr(function, "__defaults__", None) or ())]
    values += sorted((getattr(function, "__kwdefaults__", None) or {}).items())
    return text + "".join(_digest(value) for value in values)


def _digest(value: Any) -> str:
    """A hash of a value, of all entries of an array; its repr where it cannot be pickled."""
    joblib: Any = import_module("joblib")
    try:
        return str(joblib.hash(value))
    except Exception:  # whatever a foreign object raises while it is pickled
        return repr(value)


def key(**settings: Any) -> str:
    """Hash of everything that a cell of the comparison depends on."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
