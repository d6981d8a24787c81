"""What a caller decides of the state when it is made, checked and kept once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splince_fast._runtime.blocks import check_block_rows, choose_block_rows
from splince_fast.exceptions import IncompatibleMomentsError, InputError


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments of `Moments`, checked.

    Attributes
    ----------
    block_rows : int or None
    kinds : dict of str to str
    joint : tuple of tuples of str
    ledoit_wolf : bool
    """

    block_rows: int | None
    kinds: dict[str, str]
    joint: tuple[tuple[str, ...], ...]
    ledoit_wolf: bool

    @classmethod
    def of(cls, block_rows: Any, kinds: Any, joint: Any, ledoit_wolf: Any) -> Parameters:
        """Check what was passed; InputError where it is out of range."""
        if block_rows is not None:
            block_rows = check_block_rows(block_rows)
        if kinds is not None and not isinstance(kinds, Mapping):
            raise InputError(
                f"kinds is {kinds!r}; it must map names of variables to 'classes' or 'continuous'"
            )
        if not isinstance(joint, list | tuple) or not all(
            isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
            for names in joint
        ):
            raise InputError(
                f"joint is {joint!r}; it must be a list of tuples of names, such as "
                "[('gender', 'race')]"
            )
        return cls(block_rows, dict(kinds or {}), tuple(map(tuple, joint)), bool(ledoit_wolf))

    def as_arguments(self) -> dict[str, Any]:
        """The keyword arguments that make an empty object alike."""
        return {
            "block_rows": self.block_rows,
            "kinds": dict(self.kinds),
            "joint": self.joint,
            "ledoit_wolf": self.ledoit_wolf,
        }

    def capacity(self, width: int, itemsize: int) -> int:
        """Rows of a block of numbers of this size."""
        return choose_block_rows(self.block_rows, width, itemsize)

    def refuse_unlike(self, other: Parameters) -> None:
        """Raise IncompatibleMomentsError where two states cannot be combined."""
        clash = {k for k in self.kinds.keys() & other.kinds if self.kinds[k] != other.kinds[k]}
        if clash:
            raise IncompatibleMomentsError(
                f"the two sides read {sorted(clash)} by different kinds=; accumulate both alike"
            )
