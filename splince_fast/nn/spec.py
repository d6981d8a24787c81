"""Specification of a collection, and the base class of results by site."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from splince_fast._runtime import files
from splince_fast._solve.options import is_integer
from splince_fast.exceptions import InputError
from splince_fast.labels.names import listed


@dataclass(frozen=True)
class Placement:
    """Side, feature axis and element that select the tensor of a module to collect or to erase."""

    side: str = "output"
    feature_dim: int = -1
    output: int | str | None = None
    heads: int | None = None  # number of attention heads, each with its own eraser

    @classmethod
    def of(
        cls, side: str, feature_dim: int, output: int | str | None, heads: int | None = None
    ) -> Placement:
        """Return the placement for arguments of :func:`collect`; raise InputError if invalid."""
        if side not in ("input", "output"):
            raise InputError(f"side is {side!r}; it must be 'input' or 'output'")
        if not is_integer(feature_dim):
            raise InputError(f"feature_dim is {feature_dim!r}; it must be the number of an axis")
        if output is not None and (
            side == "input" or not (is_integer(output) or isinstance(output, str))
        ):
            raise InputError(
                f"output is {output!r}; it must be the index or the name of an element of the "
                "module's output, and side must be 'output'"
            )
        if heads is not None and feature_dim != -1:
            raise InputError("heads= splits the last axis; leave feature_dim at -1")
        return cls(side, feature_dim, output, heads)


@dataclass(frozen=True)
class Site:
    """A module at which activations were collected.

    Attributes
    ----------
    name : str
        Dotted name without the infixes of wrappers.
    module_class : str
        Class name of the module.
    width : int
        Number of features; 0 if no row was collected.
    calls : int
        Number of calls of the module.
    """

    name: str
    module_class: str
    width: int
    calls: int


@dataclass(frozen=True)
class CollectionSpec:
    """Placement, tokens and weights of a collection, and the tokens that its erasers change.

    `tokens` is the rule for the collected tokens. `apply_to` is the rule for the tokens that the
    erasers change, or None for the same rule. `bias` is "drop" if the erasers leave out the mean,
    otherwise "keep". `weight` is "token" or "sequence", as for :func:`collect`.
    """

    placement: Placement = Placement()
    tokens: Any = "all"
    skip_ids: tuple[int, ...] = ()
    weight: str = "token"
    apply_to: Any = None
    bias: str = "keep"

    @property
    def applied(self) -> Any:
        """The rule for the tokens that erasers change."""
        return self.tokens if self.apply_to is None else self.apply_to

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; a function becomes the text "a function"."""
        rules = {"tokens": self.tokens, "apply_to": self.apply_to}
        names = {k: "a function" if callable(rule) else rule for k, rule in rules.items()}
        return {**asdict(self), **names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CollectionSpec:
        """Return the specification with the values that :meth:`to_dict` returned."""
        return cls(
            Placement.of(**values["placement"]),
            str(values["tokens"]),
            tuple(map(int, values["skip_ids"])),
            str(values["weight"]),
            values.get("apply_to"),
            str(values.get("bias", "keep")),
        )


class BySite(Mapping[str, Any]):
    """Base class of Collected and Erasers: a mapping from sites to values that can be saved.

    The sites are in the order in which they ran. A subclass defines how values are converted to
    records of a file, and which further attributes are saved.
    """

    _KIND: ClassVar[str]  # name of this kind of object in files
    # Two functions: one converts a value to a record of a file, the other a record to a value.
    _CONVERTERS: ClassVar[tuple[Callable[[Any], files.Record], Callable[[Any, Any], Any]]]
    # Types, by name, of the further attributes that are saved. Each attribute is also an argument
    # of the constructor.
    _EXTRA_ATTRIBUTES: ClassVar[Mapping[str, type]]

    def __init__(
        self, values: Mapping[str, object], sites: Iterable[Site], recipe: CollectionSpec
    ) -> None:
        self._values = dict(values)
        self._sites = tuple(sites)
        self._recipe = recipe

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in the order in which they ran."""
        return self._sites

    @property
    def recipe(self) -> CollectionSpec:
        """The specification of the collection."""
        return self._recipe

    @property
    def placement(self) -> Placement:
        """Side, axis and element of the tensor of each module."""
        return self._recipe.placement

    @property
    def tokens(self) -> Any:
        """The rule that selected the tokens."""
        return self._recipe.tokens

    @property
    def skip_ids(self) -> tuple[int, ...]:
        """Ids of tokens that the collection left out."""
        return self._recipe.skip_ids

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(f"no site {name!r}; the sites are {listed(self._values)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file.

        Parameters
        ----------
        path : path
            The file, which is replaced atomically.
        """
        tensors: files.Tensors = {}
        records = {}
        for i, (name, value) in enumerate(self._values.items()):
            site_tensors, records[name] = self._CONVERTERS[0](value)
            tensors |= {f"{i}.{key}": tensor for key, tensor in site_tensors.items()}
        metadata = {
            "order": list(records),  # `records` is written with sorted keys
            "records": records,
            "sites": [asdict(site) for site in self._sites],
            "recipe": self._recipe.to_dict(),
            **{name: getattr(self, name) for name in self._EXTRA_ATTRIBUTES},
        }
        files.write(path, self._KIND, 1, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file written by :meth:`save`; values are equal bit for bit.

        Parameters
        ----------
        path : path
            The file.

        Returns
        -------
        Collected or Erasers
            An object of this class. A token rule that was a function is replaced by the text
            "a function".

        Raises
        ------
        FileFormatError
            The file is damaged, holds another kind of object, or was written by another program
            or a newer version.
        FileNotFoundError
            The file does not exist.
        """
        tensors, metadata = files.read(path, cls._KIND, 1)
        with files.consistent(path, "make it again"):
            values = {}
            for i, name in enumerate(metadata["order"]):
                prefix = f"{i}."
                site_tensors = {
                    k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)
                }
                values[name] = cls._CONVERTERS[1](site_tensors, metadata["records"][name])
            sites = [Site(**site) for site in metadata["sites"]]
            spec = CollectionSpec.from_dict(metadata["recipe"])
            extra = {
                name: convert(metadata[name]) for name, convert in cls._EXTRA_ATTRIBUTES.items()
            }
            return cls(values, sites, spec, **extra)


def format_table(heading: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Format a table as text; the first column is aligned to the left, the others to the right."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [heading]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(text)
