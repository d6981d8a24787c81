"""How activations were collected, and values by site that know it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from splince_fast.exceptions import InputError


@dataclass(frozen=True)
class Placement:
    """Which tensor of a module is meant."""

    side: str = "output"
    feature_dim: int = -1
    output: int | str | None = None

    @classmethod
    def of(cls, side: str, feature_dim: int, output: int | str | None) -> Placement:
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
        return cls(side, feature_dim, output)


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
    """How activations were collected, and which tokens erasers fitted on them change.

    `apply_to` is None where these are the same tokens.
    """

    placement: Placement = Placement()
    tokens: Any = "all"
    skip_ids: tuple[int, ...] = ()
    weight: str = "token"
    apply_to: Any = None

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
        )


class BySite(Mapping[str, Any]):
    """What both records share: values by site, in the order in which the sites ran."""

    def __init__(self, values: Mapping[str, Any], sites: Iterable[Site], recipe: Recipe) -> None:
        self._values = dict(values)
        self._sites = tuple(sites)
        self._recipe = recipe

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in the order in which they ran."""
        return self._sites

    @property
    def recipe(self) -> Recipe:
        """How the activations were collected."""
        return self._recipe

    @property
    def placement(self) -> Placement:
        """Which tensor of each module is meant."""
        return self._recipe.placement

    @property
    def tokens(self) -> Any:
        """The rule by which tokens were selected, as it was applied."""
        return self._recipe.tokens

    @property
    def skip_ids(self) -> tuple[int, ...]:
        """Ids of tokens that were left out."""
        return self._recipe.skip_ids

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(f"no site {name!r}; the sites are {list(self._values)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def table(heading: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Lines of text in columns, numbers to the right."""
    rows = list(rows)
    wide = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [heading]
    for cells in (columns, *rows):
        first, *others = zip(cells, wide, strict=True)
        padded = [f"{first[0]:<{first[1]}}", *(f"{cell:>{size}}" for cell, size in others)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
