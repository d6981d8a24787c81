"""What a caller decides of the state when it is made, checked and kept once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splince_fast._runtime.blocks import check_block_rows, choose_block_rows
from splince_fast._solve.options import check_reading, is_integer
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
    scatter : float
        Rate at which rows are sampled for the scatter; 1 for all.
    seed : int
    rank : int or None
        Columns of the sketch that stands for the scatter; None for a d x d matrix.
    """

    block_rows: int | None
    kinds: dict[str, str]
    joint: tuple[tuple[str, ...], ...]
    ledoit_wolf: bool
    scatter: float = 1.0
    seed: int = 0
    rank: int | None = None

    @classmethod
    def of(
        cls,
        block_rows: Any,
        kinds: Any,
        joint: Any,
        ledoit_wolf: Any,
        scatter: Any = 1.0,
        seed: Any = 0,
        rank: Any = None,
    ) -> Parameters:
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
        check_reading(scatter, rank)
        if isinstance(scatter, str):
            raise InputError(
                "scatter is 'auto'; it must be a number above 0 and at most 1 here: the number of "
                "rows is known to Moments.from_blocks of a source, and to fit"
            )
        if rank is not None and ledoit_wolf:
            raise InputError(
                f"ledoit_wolf=True needs the whole covariance, and rank={rank} keeps none; leave "
                "it out, and pass a number as shrinkage= if it is needed"
            )
        return cls(
            block_rows, dict(kinds or {}), tuple(map(tuple, joint)), bool(ledoit_wolf),
            float(scatter), _check_seed(seed), None if rank is None else int(rank),
        )  # fmt: skip

    def as_arguments(self) -> dict[str, Any]:
        """The keyword arguments that make an empty object alike."""
        return {
            "block_rows": self.block_rows,
            "kinds": dict(self.kinds),
            "joint": self.joint,
            "ledoit_wolf": self.ledoit_wolf,
            "scatter": self.scatter,
            "seed": self.seed,
            "rank": self.rank,
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
        if (self.scatter < 1) != (other.scatter < 1):
            raise IncompatibleMomentsError(
                "one side has the scatter of all rows (scatter=1) and the other that of a sample; "
                "accumulate both with scatter=1, or both with a rate below 1"
            )
        if self.rank != other.rank:
            raise IncompatibleMomentsError(
                f"one side was made with rank={self.rank} and the other with rank={other.rank}; "
                "accumulate both alike"
            )
        if self.rank and self.seed != other.seed:
            raise IncompatibleMomentsError(
                f"the two sides have products with other random signs (seed {self.seed} and "
                f"{other.seed}); accumulate both with the same seed"
            )


def _check_seed(seed: Any) -> int:
    if not is_integer(seed) or not 0 <= seed < 1 << 63:
        raise InputError(f"seed is {seed!r}; it must be an integer from 0 to 2**63 - 1")
    return int(seed)
