"""The version of the installed package."""

from __future__ import annotations

from functools import cache


@cache
def library_version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version  # late: 4 % of the first use

    try:
        return version("splince-fast")
    except PackageNotFoundError:  # the source tree is not installed
        return "0+source"
