"""How activations were collected: sites, tensors, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from splince_fast.exceptions import InputError


@dataclass(frozen=True)
class Placement:
    """Which tensor of a module is meant."""

    side: str = "output"
    feature_dim: int = -1
    output: int | str | None = None
    heads: int | None = None  # parts of equal width, each with an eraser of its own

    @classmethod
    def of(
        cls, side: str, feature_dim: int, output: int | str | None, heads: int | None = None
    ) -> Placement:
        """A checked placement.

        Raises
        ------
        InputError
            Something else than the arguments of `collect` take.
        """
        if side not in ("input", "output"):
            raise InputError(f"side is {side!r}; it is 'input' or 'output'")
        if isinstance(feature_dim, bool) or not isinstance(feature_dim, int):
            raise InputError(f"feature_dim is {feature_dim!r}; it is the number of an axis")
        if output is not None and (side == "input" or not isinstance(output, int | str)):
            raise InputError(
                f"output is {output!r}; it is the index or the name of an element of what the "
                "module returns, for side='output'"
            )
        if heads is not None and feature_dim != -1:
            raise InputError("heads= splits the last axis; leave feature_dim at -1")
        return cls(side, feature_dim, output, heads)


def head_name(site: str, head: int) -> str:
    """The name of the moments of one head."""
    return f"{site}[{head}]"


@dataclass(frozen=True)
class Site:
    """A module at which activations were collected.

    Attributes
    ----------
    name : str
        Dotted name without the infixes of wrappers.
    module_class : str
    width : int
        Number of features; 0 where no row was seen.
    calls : int
        How often it ran.
    """

    name: str
    module_class: str
    width: int
    calls: int


@dataclass(frozen=True)
class Recipe:
    """How activations were collected, and what erasers fitted on them change.

    `apply_to` is None where they change the tokens of the fit. `bias` is "drop" where they leave
    the mean out.
    """

    placement: Placement = Placement()
    tokens: Any = "all"
    skip_ids: tuple[int, ...] = ()
    weight: str = "token"
    apply_to: Any = None
    bias: str = "keep"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; a function has no better name than that."""
        rules = {"tokens": self.tokens, "apply_to": self.apply_to}
        named = {k: "a function" if callable(rule) else rule for k, rule in rules.items()}
        return {**asdict(self), **named}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The inverse of `to_dict`."""
        return cls(
            Placement.of(**values["placement"]),
            str(values["tokens"]),
            tuple(map(int, values["skip_ids"])),
            str(values["weight"]),
            values.get("apply_to"),
            str(values.get("bias", "keep")),
        )
