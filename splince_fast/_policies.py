"""The options of the methods, checked once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splince_fast.exceptions import InputError


@dataclass(frozen=True, slots=True)
class Policies:
    """The options of the methods, checked."""

    max_amplification: float | None
    on_infeasible: str
    null_space: str
    shrinkage: float | str | None
    rank_tol: float | str
    solver: str

    def __post_init__(self) -> None:
        _one_of("on_infeasible", self.on_infeasible, ("raise", "drop"))
        _one_of("null_space", self.null_space, ("keep", "drop"))
        _one_of("solver", self.solver, ("auto", "cholesky", "eigh"))
        a = self.max_amplification
        if a is not None and not (isinstance(a, (int, float, np.number)) and a >= 1):
            raise InputError(f"max_amplification is {a!r}; it must be a number of at least 1")
        tol = self.rank_tol
        if tol != "auto" and not (isinstance(tol, (int, float, np.number)) and 0 <= tol < 1):
            raise InputError(f"rank_tol is {tol!r}; it must be 'auto' or a number in [0, 1)")
        s = self.shrinkage
        if (
            s is not None
            and s not in ("oas", "ledoit-wolf")
            and not (isinstance(s, (int, float, np.number)) and 0 <= s <= 1)
        ):
            raise InputError(
                f"shrinkage is {s!r}; it must be None, 'oas', 'ledoit-wolf' or a number in [0, 1]"
            )


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
