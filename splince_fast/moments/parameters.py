"""Validated arguments of `Moments`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splince_fast._runtime.rows import check_block_rows, choose_block_rows
from splince_fast._solve.options import check_moment_options, is_integer
from splince_fast.exceptions import IncompatibleMomentsError, InputError


@dataclass(frozen=True, slots=True)
class Parameters:
    """Validated arguments of `Moments`."""

    block_rows: int | None = None  # None for a number that depends on width and dtype
    kinds: dict[str, str] = field(default_factory=dict)
    joint: tuple[tuple[str, ...], ...] = ()
    subsample: float = 1.0
    random_state: int = 0
    covariance_type: str = "full"
    by: str | None = None

    @classmethod
    def of(cls, *arguments: Any, **named: Any) -> Parameters:
        """Return validated arguments of `Moments`; raise InputError if one is invalid."""
        given: Any = cls(*arguments, **named)
        block_rows, kinds, joint, by = given.block_rows, given.kinds, given.joint, given.by
        if block_rows is not None:
            block_rows = check_block_rows(block_rows)
        if kinds is not None and not isinstance(kinds, Mapping):
            raise InputError(
                f"kinds is {kinds!r}; it must map names of variables to 'classes' or 'continuous'"
            )
        for name, kind in (kinds or {}).items():
            if kind not in ("classes", "continuous"):
                raise InputError(
                    f"kinds has {kind!r} for {name!r}; it must be 'classes' or 'continuous'"
                )
        if not isinstance(joint, list | tuple) or not all(map(_are_names, joint)):
            raise InputError(
                f"joint is {joint!r}; it must be a list of tuples of names, such as "
                "[('gender', 'race')]"
            )
        check_moment_options(given.subsample, given.covariance_type)
        if isinstance(given.subsample, str):
            raise InputError(
                "subsample='auto' needs the number of rows, which is unknown here; pass a number "
                "above 0 and at most 1, or call Moments.from_blocks or fit with a source"
            )
        if by is not None and not isinstance(by, str):
            raise InputError(f"by is {by!r}; it must be the name of a class-coded variable")
        if by is not None and (given.is_diagonal or given.subsample != 1):
            raise InputError(
                "by= keeps the d x d scatter of every class; omit subsample= and covariance_type="
            )
        return cls(
            block_rows, dict(kinds or {}), tuple(map(tuple, joint)), float(given.subsample),
            check_random_state(given.random_state), given.covariance_type, by,
        )  # fmt: skip

    @property
    def is_diagonal(self) -> bool:
        return self.covariance_type == "diag"

    def capacity(self, width: int, itemsize: int) -> int:
        """Return the number of rows per block, for rows of `width` numbers of `itemsize` bytes."""
        return choose_block_rows(self.block_rows, width, itemsize)

    def check_compatible(self, other: Parameters) -> None:
        """Raise IncompatibleMomentsError unless moments of these and `other` parameters combine."""
        for name in ("by", "covariance_type", "subsample"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs and not (name == "subsample" and max(ours, theirs) < 1):
                raise IncompatibleMomentsError(
                    f"one side has {name}={ours!r} and the other {name}={theirs!r}; accumulate "
                    f"both with the same {name}="
                )


def _are_names(names: object) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)


def check_random_state(random_state: Any, bits: int = 63) -> int:
    """Return `random_state` as int; raise InputError unless it is from 0 to 2**bits - 1."""
    if not is_integer(random_state) or not 0 <= random_state < 1 << bits:
        raise InputError(
            f"random_state is {random_state!r}; it must be an integer from 0 to 2**{bits} - 1"
        )
    return int(random_state)
