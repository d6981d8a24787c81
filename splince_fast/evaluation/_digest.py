"""Digests of erasers, heads and metrics.

A record is computed again if the digest of its eraser, its head or a metric has changed.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import importlib
import json
import sys
import types
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

# Functions that can read any variable by its name.
_NAME_READERS = (globals, eval, exec, __import__, import_module)
# Attributes of a class that are not part of its definition.
_NOT_DEFINITIONS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl",
     "__firstlineno__", "__static_attributes__", "__annotations__", "__annotate__",
     "__orig_bases__", "__parameters__"}
)  # fmt: skip
_FUNCTIONS_OF_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, np.ufunc,
)  # fmt: skip


# Pairs (index, object) of the objects visited so far, by id. The reference to an object prevents
# the reuse of its id.
Visited = dict[int, tuple[int, object]]


class UnreadableError(Exception):
    """The content of a value cannot be read, and so changes of the value cannot be detected."""


def digest_of(value: object) -> str:
    """Return the digest of a function, estimator or other value, and of all values it refers to.

    The digest covers the code, defaults, closures and globals of functions and methods, including
    those of other modules of the caller; all entries of arrays; and the state of objects. The
    version of a library represents its globals and classes. Equal values have equal digests in all
    processes.

    Raises
    ------
    UnreadableError
        The value, or a value that it refers to, cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for piece in _bytes_of(value, {}):
            digest.update(len(piece).to_bytes(8, "little") + piece)
    except UnreadableError:
        raise
    except Exception as error:  # the methods of the value may raise any exception
        raise UnreadableError(f"{type(error).__name__}: {error}") from error
    return digest.hexdigest()


def hash_settings(**settings: object) -> str:
    """Return a hash of the settings on which a record depends."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _bytes_of(value: Any, visited: Visited) -> Iterator[bytes]:
    """Yield bytes that represent a value."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes, type(...)):
        yield f"{kind.__name__}:{value!r}".encode(errors="surrogatepass")
        return
    # Tuples, frozensets and code are not marked as visited: the compiler decides whether
    # equal constants are one object, and the digest must not depend on this decision.
    if kind not in (tuple, frozenset, types.CodeType):
        if id(value) in visited:
            yield f"again:{visited[id(value)][0]}".encode()
            return
        visited[id(value)] = len(visited), value
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        yield f"{value.dtype.descr}{value.shape}".encode()
        if value.dtype.hasobject:
            yield from _items(value.ravel().tolist(), visited)
        else:
            yield np.ascontiguousarray(value).tobytes()
    elif kind in (list, tuple):
        yield from _items(value, visited)
    elif kind in (set, frozenset):
        yield from sorted(digest_of(item).encode() for item in value)
    elif kind in (dict, types.MappingProxyType):
        yield from _items([part for item in value.items() for part in item], visited)
    elif isinstance(value, types.ModuleType):
        yield _version(value.__name__).encode()
    elif isinstance(value, types.CodeType):
        yield from _code(value, visited)
    elif isinstance(value, types.FunctionType):
        yield from _function(value, visited)
    elif isinstance(value, types.MethodType):
        yield from _items([value.__self__, value.__func__], visited)
    elif isinstance(value, staticmethod | classmethod):
        yield from _bytes_of(value.__func__, visited)
    elif isinstance(value, property):
        yield from _items([value.fget, value.fset, value.fdel], visited)
    elif isinstance(value, functools.cached_property):
        yield from _bytes_of(value.func, visited)
    elif isinstance(value, type):
        yield from _class(value, visited)
    elif isinstance(value, _FUNCTIONS_OF_C) or kind.__name__ == "cython_function_or_method":
        yield _c_function(value)
    elif callable(getattr(value, "py_func", None)):  # function compiled by Numba
        yield from _bytes_of(value.py_func, visited)
    elif hasattr(value, "__wrapped__"):  # function with functools.lru_cache
        yield from _bytes_of(value.__wrapped__, visited)
    else:
        yield from _object(value, visited)


def _items(values: Collection[object], visited: Visited) -> Iterator[bytes]:
    yield str(len(values)).encode()
    for value in values:
        yield from _bytes_of(value, visited)


def _function(function: types.FunctionType, visited: Visited) -> Iterator[bytes]:
    """Yield bytes of the code, defaults and closure of a function, and of globals it may read.

    For a function of a library, the version of the library replaces the globals.
    """
    module = function.__globals__.get("__name__")
    if _is_library(module):
        yield _version(str(module)).encode()
    yield from _code(function.__code__, visited)
    yield from _bytes_of(function.__defaults__, visited)
    yield from _bytes_of(function.__kwdefaults__, visited)
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # the variable of the closure is not yet assigned
            yield b"empty"
            continue
        yield from _bytes_of(content, visited)
    if _is_library(module):
        return
    names = sorted(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name, getattr(builtins, name, None))
        if any(value is reader for reader in _NAME_READERS):
            raise UnreadableError(f"{function.__qualname__} reads variables by {name}()")
        if name in function.__globals__:
            yield name.encode()
            yield from _bytes_of(value, visited)
            yield from _attributes(value, names, visited)
    for name in sorted(_imports(function)):
        try:
            imported = import_module(name)
        except ImportError:
            yield f"absent:{name}".encode()
            continue
        yield from _bytes_of(imported, visited)
        yield from _attributes(imported, names, visited)


def _attributes(value: object, names: list[str], visited: Visited) -> Iterator[bytes]:
    """Yield bytes of the attributes `names` of a Python module of the caller's code.

    Nothing is yielded if `value` is not a module, or a module of an installed library."""
    if not isinstance(value, types.ModuleType):
        return
    if value is importlib and "import_module" in names:
        raise UnreadableError("the function reads variables by importlib.import_module()")
    if _is_library(value.__name__):
        return
    for name in names:
        if name in vars(value):
            yield f"{value.__name__}.{name}".encode()
            yield from _bytes_of(vars(value)[name], visited)
            yield from _attributes(vars(value)[name], names, visited)


def _code(code: types.CodeType, visited: Visited) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode()
    yield repr((code.co_flags, code.co_argcount, code.co_kwonlyargcount)).encode()
    yield getattr(code, "co_exceptiontable", b"")
    yield from _items(code.co_consts, visited)


def _nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and the code objects of all functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_code(constant)


def _names(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that a function and its inner functions may read.

    String constants are included, because getattr(module, "name") reads a variable by a string.
    """
    parts = list(_nested_code(code))
    texts = {text for part in parts for text in part.co_consts if isinstance(text, str)}
    return texts.union(*(part.co_names for part in parts))


def _imports(function: types.FunctionType) -> set[str]:
    """Return the names of the modules that a function imports when it is called."""
    return {
        str(step.argval)
        for part in _nested_code(function.__code__)
        for step in dis.get_instructions(part)
        if step.opname == "IMPORT_NAME" and step.argval
    }


def _class(value: type, visited: Visited) -> Iterator[bytes]:
    """Yield bytes of the definition of a class; for a class of a library, of name and version."""
    yield f"{value.__module__}.{value.__qualname__}".encode()
    if _is_library(value.__module__):
        yield _version(value.__module__).encode()
        return
    yield from _items(value.__bases__, visited)
    for name in sorted(set(vars(value)) - _NOT_DEFINITIONS):
        yield name.encode()
        yield from _bytes_of(vars(value)[name], visited)


def _c_function(value: object) -> bytes:
    """Return bytes that represent a compiled function.

    The bytes hold its name and the version of its library; for a method bound to an object, its
    name and the digest of the object. Raises UnreadableError if the function belongs to no
    installed library.
    """
    owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
    module = getattr(value, "__module__", None) or getattr(type(owner), "__module__", "builtins")
    name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
    elif owner is not None and not isinstance(owner, type):
        return f"{name}:{digest_of(owner)}".encode()
    if not _is_library(module):
        if isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType):
            return f"slot:{name}".encode()
        raise UnreadableError(f"{name} is compiled, and {module} is not an installed library")
    return f"{name}:{_version(str(module))}".encode()


def _object(value: object, visited: Visited) -> Iterator[bytes]:
    """Yield bytes of the class of an object, and of the state that pickle stores."""
    yield from _bytes_of(type(value), visited)
    try:
        state = value.__reduce_ex__(4)
    except Exception as error:  # the methods of the value may raise any exception
        raise UnreadableError(f"the content of a {type(value).__name__} cannot be read") from error
    if isinstance(state, str):  # `state` is the name of a global variable
        if not _is_library(getattr(value, "__module__", None)):
            raise UnreadableError(f"the content of {state} cannot be read")
        yield state.encode()
        return
    constructor, args, *others = state
    parts = [constructor, list(args), *others[:1]]
    parts += [None if part is None else list(part) for part in others[1:3]]
    # The reference to `parts` prevents the reuse of the ids of its elements.
    visited[id(parts)] = len(visited), parts
    yield from _items(parts, visited)


def _is_library(module: object) -> bool:
    """Whether a module belongs to splince_fast, the standard library, or an installed package."""
    top = module.partition(".")[0] if isinstance(module, str) else ""
    if top in sys.stdlib_module_names or top == "splince_fast":
        return True
    package = sys.modules.get(top)
    file = getattr(package, "__file__", None) or next(iter(getattr(package, "__path__", ())), "")
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file or "").parts)


def _version(module: str) -> str:
    """Return the name of a module and the version of its library."""
    top = sys.modules.get(module.partition(".")[0])
    return f"{module} {getattr(top, '__version__', '')}"
