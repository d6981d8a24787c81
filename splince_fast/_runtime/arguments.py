"""Checks of arguments, optional packages, names imported on first use, and warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from splince_fast.exceptions import InputError, MissingExtraError

# A warning points to the innermost line outside these packages: pipelines and searches of
# scikit-learn call estimators of this package.
_PACKAGES = ("splince_fast", "sklearn")


def described_type(value: object) -> str:
    """Return the type of a value with an article, such as "an int"; "None" for None."""
    name = type(value).__name__
    article = "an" if name[0] in "aeioAEIO" or name.startswith("nd") else "a"
    return "None" if value is None else f"{article} {name}"


def as_names(value: Any, argument: str) -> tuple[str, ...]:
    """Return one name or several as a tuple; raise InputError unless all are strings."""
    single = isinstance(value, str | Mapping) or not isinstance(value, Iterable)
    names = (value,) if single else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{argument} is {value!r}; pass a name, or a sequence of names")
    return names


def as_values(value: Any) -> list[Any]:
    """Return the items of a sequence or array as a list; return [value] for any other value."""
    several = isinstance(value, Sequence) or getattr(value, "ndim", 0) != 0
    return list(value) if several else [value]


def check_names(names: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raise InputError for a name that is not valid; the message suggests the nearest valid one."""
    from difflib import get_close_matches

    valid_names = list(valid)
    for name in names:
        if name not in valid_names:
            nearest = get_close_matches(name, valid_names, n=1)
            hint = f"; did you mean {nearest[0]}=?" if nearest else ""
            raise InputError(f"{where} takes no {name}={hint} (it takes {', '.join(valid_names)})")


def check_keywords(
    names: Iterable[str],
    function: Callable[..., object],
    *,
    without: Container[str] = (),
    where: str | None = None,
) -> None:
    """Raise InputError for a name that is no parameter of a function, or is in `without`."""
    from inspect import signature

    # A function with ``**kwargs`` takes all names.
    parameters = signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        valid = [p.name for p in parameters if p.name not in without]
        unwrapped: Any = getattr(function, "func", function)  # `func` exists for functools.partial
        check_names(names, valid, unwrapped.__name__ if where is None else where)


def warn(text: str, category: type[Warning]) -> None:
    """Issue a warning that points to the innermost frame outside this package and scikit-learn."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


# -- packages ------------------------------------------------------------------------------------


@cache
def library_version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version  # late: 4 % of the first use

    try:
        return version("splince-fast")
    except PackageNotFoundError:  # the source tree is not installed
        return "0+source"


def require(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; raise MissingExtraError if this fails."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{package} could not be imported ({error}); it comes with the extra {extra!r}: pip "
            f'install "splince_fast[{extra}]"'
        ) from error


def lazy_names(
    package: str, modules: Mapping[str, str], extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its public names late."""
    # The package defines them under ``if not TYPE_CHECKING``, so that type checkers see the imports
    # themselves and report misspelt names. A name whose module has the same name denotes that
    # module. `extra` is the optional dependency of the modules, and the extra that installs it.

    def get(name: str) -> Any:
        namespace = sys.modules[package]
        if name not in modules:
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=namespace)
        try:
            module = import_module(f"{package}.{modules[name]}")
        except ModuleNotFoundError as error:
            if extra is not None and error.name == extra:
                require(extra, extra)
            raise
        value = module if modules[name] == name else getattr(module, name)
        setattr(namespace, name, value)
        return value

    def names() -> list[str]:
        namespace = vars(sys.modules[package])
        return sorted({*(n for n in namespace if n.startswith("__")), *namespace["__all__"]})

    return get, names
