"""Values by site that know how they were made: a mapping, a file, a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Self

from numpy.typing import NDArray

from splince_fast._runtime import files
from splince_fast.nn.recipe import Placement, Recipe, Site

Tensors = dict[str, NDArray[Any]]
Record = tuple[Tensors, dict[str, Any]]


class BySite(Mapping[str, Any]):
    """Base of both records: values by site in the order in which the sites ran, and files.

    A subclass says how one value is written and read, and which arguments of its constructor
    come besides.
    """

    _KIND: ClassVar[str]
    _FORMAT: ClassVar[int] = 1
    # How a value is written and read.
    _AS_RECORD: ClassVar[tuple[Callable[[Any], Record], Callable[[Any, Any], Any]]]
    # Further arguments of the constructor, which are attributes, and their types.
    _FURTHER: ClassVar[Mapping[str, type]]

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

    # -- files -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file.

        Parameters
        ----------
        path : path
            The file; whatever happens, it holds either what it held before or everything.
        """
        tensors: Tensors = {}
        records = {}
        for i, (name, value) in enumerate(self._values.items()):
            own, records[name] = self._AS_RECORD[0](value)
            tensors |= {f"{i}.{key}": tensor for key, tensor in own.items()}
        metadata = {
            "order": list(records),  # metadata are written sorted, and the order matters
            "records": records,
            "sites": [asdict(site) for site in self._sites],
            "recipe": self._recipe.to_dict(),
            **{name: getattr(self, name) for name in self._FURTHER},
        }
        files.write(path, self._KIND, self._FORMAT, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote, bit for bit.

        Parameters
        ----------
        path : path
            The file.

        Returns
        -------
        Collected or Erasers
            Of the class on which it is called; a rule for tokens that was a function is only
            called so.

        Raises
        ------
        FileFormatError
            Truncated, foreign, of another kind, inconsistent, or written by a newer version.
        FileNotFoundError
            There is no such file.
        """
        tensors, metadata = files.read(path, cls._KIND, cls._FORMAT)
        with files.consistent(path, "make it again"):
            values = {}
            for i, name in enumerate(metadata["order"]):
                prefix = f"{i}."
                own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
                values[name] = cls._AS_RECORD[1](own, metadata["records"][name])
            sites = [Site(**site) for site in metadata["sites"]]
            recipe = Recipe.from_dict(metadata["recipe"])
            further = {name: kind(metadata[name]) for name, kind in cls._FURTHER.items()}
            return cls(values, sites, recipe, **further)


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
