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
        if a is not None and not (_is_number(a) and a >= 1):
            raise InputError(f"max_amplification is {a!r}; it must be a number of at least 1")
        tol = self.rank_tol
        named = isinstance(tol, str) and tol == "auto"
        if not named and not (_is_number(tol) and 0 <= float(tol) < 1):
            raise InputError(f"rank_tol is {tol!r}; it must be 'auto' or a number in [0, 1)")
        s = self.shrinkage
        named = s is None or (isinstance(s, str) and s in ("oas", "ledoit-wolf"))
        if not named and not (_is_number(s) and 0 <= float(s) <= 1):  # type: ignore[arg-type]
            raise InputError(
                f"shrinkage is {s!r}; it must be None, 'oas', 'ledoit-wolf' or a number in [0, 1]"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating))


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in choices):
        raise InputError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
