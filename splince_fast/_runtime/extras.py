"""Import of optional dependencies."""

from __future__ import annotations

import importlib
from typing import Any

from splince_fast.exceptions import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; raise MissingExtraError if this fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{package} could not be imported ({error}); it comes with the extra {extra!r}: pip "
            f'install "splince_fast[{extra}]"'
        ) from error
