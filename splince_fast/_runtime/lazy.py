"""Public names of a package that are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from splince_fast._runtime.arguments import require


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
