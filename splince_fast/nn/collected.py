"""Moments of several sites: they add, fit, are drawn and filed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from splince_fast.exceptions import (
    IncompatibleMomentsError,
    InputError,
    OnePassWarning,
)
from splince_fast.methods.table import Function
from splince_fast.moments import Moments
from splince_fast.moments.moments import from_record, to_record
from splince_fast.nn.by_site import BySite, table
from splince_fast.nn.erasers import Erasers, block_diagonal, fit_site
from splince_fast.nn.recipe import Recipe, Site
from splince_fast.projection import Projection


class Collected(BySite):
    """Moments by site, made by :func:`collect`; a mapping from names to :class:`Moments`.

    Parameters
    ----------
    moments : mapping of str to Moments
        By site, in the order in which the sites ran.
    sites : iterable of Site
        The same sites.
    recipe : Recipe
        How the activations were collected.
    n_sequences : int
        Sequences that gave rows. Tokens of one text are not independent: judge chance by these.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    >>> z = torch.arange(60) % 2
    >>> halves = [[{"input": torch.randn(60, 3) + z[:, None], "z": z}] for _ in range(2)]
    >>> first, second = (snn.collect(model, half, "0", labels="z") for half in halves)
    >>> both = first + second
    >>> both["0"].n_rows, both.n_sequences
    (120, 120)
    >>> both.erasers(sf.leace, erase="z")["0"].rank
    1
    """

    _KIND = "collected"
    _AS_RECORD = (to_record, from_record)
    _FURTHER = {"n_sequences": int}  # noqa: RUF012

    def __init__(
        self,
        moments: Mapping[str, Moments],
        sites: Iterable[Site],
        recipe: Recipe,
        n_sequences: int,
    ) -> None:
        super().__init__(moments, sites, recipe)
        self.n_sequences = n_sequences

    def erasers(
        self, method: str | Function, *, erase: Any, keep: Any = None, **options: Any
    ) -> Erasers:
        """Fit an eraser at every site.

        Parameters
        ----------
        method : str or callable
            ``sf.splince``, ``sf.leace``, ``sf.sal`` or ``sf.mean_projection``.
        erase, keep
            As the method takes them; `keep` is left out where it is None.
        **options
            More arguments of the method.

        Returns
        -------
        Erasers
            One projection per site.

        Raises
        ------
        SplinceError
            As the method does; the text names the site.

        Warns
        -----
        OnePassWarning
            There are several sites. Each eraser is right where it stands alone; installed
            together, the first one changes what the next one sees.
        """
        n_sites = len(self) // (self.placement.heads or 1)
        if n_sites > 1:
            warnings.warn(
                f"{n_sites} sites were fitted in one pass: each eraser holds where it is "
                "installed alone; together they leave part of the concept, and can leave more "
                "than there was. Use fit_layers to install them together",
                OnePassWarning,
                stacklevel=2,
            )
        fitted = self._fitted(method, erase, keep, options)
        return Erasers(
            {site.name: eraser for site, eraser in fitted},
            [site for site, _ in fitted],
            self._recipe,
            sequential=False,
        )

    def _fitted(
        self, method: Any, erase: Any, keep: Any, options: Mapping[str, Any]
    ) -> list[tuple[Site, Projection]]:
        """The eraser of every site: of its moments, or block-diagonal from those of its heads."""
        single = [
            (site, fit_site(site.name, self[site.name], method, erase, keep, options))
            for site in self._sites
        ]
        heads = self.placement.heads
        if heads is None:
            return single
        found: dict[str, list[tuple[Site, Projection]]] = {}
        for site, eraser in single:
            found.setdefault(site.name.rpartition("[")[0], []).append((site, eraser))
        return [
            (
                replace(parts[0][0], name=name, width=sum(site.width for site, _ in parts)),
                block_diagonal([eraser for _, eraser in parts]),
            )
            for name, parts in found.items()
        ]

    # -- algebra ---------------------------------------------------------------------------

    def __add__(self, other: Collected) -> Collected:
        """Activations of both passes together, such as those of two workers."""
        if not isinstance(other, Collected):
            raise InputError(f"Collected adds to Collected, not to {type(other).__name__}")
        self._check_same(other._description())
        theirs = {site.name: site for site in other._sites}
        return Collected(
            {name: moments + other[name] for name, moments in self.items()},
            [_joined(site, theirs[site.name]) for site in self._sites],
            self._recipe,
            self.n_sequences + other.n_sequences,
        )

    def _description(self) -> tuple[Any, ...]:
        """Fields that must be equal in both for a sum."""
        names = sorted((site.name, site.module_class) for site in self._sites)
        return names, self._recipe.to_dict()

    def _check_same(self, other: tuple[Any, ...]) -> None:
        own = self._description()
        if own != other:
            raise IncompatibleMomentsError(
                f"these were collected differently: {own} and {other}; use the same sites and "
                "the same tokens, side, output and weight"
            )

    def all_reduce(self, group: Any = None) -> Collected:
        """Add up over the processes of a group; every process gets the same sum, bit for bit.

        Moments go up a binary tree, site by site, and come back from the first process: no
        process ever holds more than two states of a site.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            The default group if left out.

        Returns
        -------
        Collected
            The sum.

        Raises
        ------
        IncompatibleMomentsError
            The processes collected differently; raised in all of them.
        """
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        world = [dist.get_global_rank(group, r) if group is not None else r for r in range(size)]
        gathered: list[Any] = [None] * size
        own = (self._description(), self._sites, self.n_sequences)
        dist.all_gather_object(gathered, own, group=group)
        for description, _, _ in gathered:
            self._check_same(description)
        sites = {site.name: site for site in self._sites}
        for other in (s for i, (_, each, _) in enumerate(gathered) if i != rank for s in each):
            sites[other.name] = _joined(sites[other.name], other)
        totals = {}
        for name in sorted(self):
            total, step = self[name], 1
            while step < size:
                if rank % (2 * step) == step:
                    dist.send_object_list([total], world[rank - step], group=group)
                    break
                if rank + step < size:
                    box: list[Any] = [None]
                    dist.recv_object_list(box, world[rank + step], group=group)
                    total = total + box[0]
                step *= 2
            box = [total if rank == 0 else None]
            dist.broadcast_object_list(box, world[0], group=group)
            totals[name] = box[0]
        ordered = {site.name: totals[site.name] for site in self._sites}
        n_sequences = sum(count for _, _, count in gathered)
        return Collected(ordered, sites.values(), self._recipe, n_sequences)

    # -- looking ---------------------------------------------------------------------------

    def trace(self, name: Any) -> dict[str, float]:
        """Size of the linear trace of a variable at each site.

        Parameters
        ----------
        name : str or tuple of str
            A variable.

        Returns
        -------
        dict
            |Cov(x, z)| / sqrt(tr Cov(x)) by site (Frobenius norm), in units of z.
        """
        found = {}
        for site, moments in self.items():
            cross = moments.cross_covariance(name, ddof=0)
            total = float(np.trace(moments.covariance(ddof=0)))
            found[site] = float(np.linalg.norm(cross)) / total**0.5 if total else 0.0
        return found

    def plot(self, name: Any, *, after: Collected | None = None) -> Any:
        """Draw the trace of a variable over the sites.

        Parameters
        ----------
        name : str or tuple of str
            A variable.
        after : Collected, optional
            The same sites with erasers installed.

        Returns
        -------
        matplotlib.figure.Figure
            With logarithmic axis; ``.savefig(path)`` writes it.

        Raises
        ------
        MissingExtraError
            matplotlib is not installed.
        """
        from splince_fast._runtime.extras import require

        figures = require("matplotlib.figure", "demo")
        figure = figures.Figure(figsize=(7.5, 4.2), layout="constrained")
        ax = figure.subplots()
        before = self.trace(name)
        places = range(len(before))
        ax.plot(places, list(before.values()), marker="o", color="#D55E00", label="as it is")
        if after is not None:
            erased = after.trace(name)
            shown = [erased.get(site, np.nan) for site in before]
            ax.plot(places, shown, marker="s", color="#0072B2", label="erasers installed")
        ax.set_yscale("log")
        ax.set_xticks(places, list(before), rotation=90, fontsize=7)
        ax.set_ylabel(f"|Cov(x, {name})| / sqrt(tr Cov(x))")
        ax.grid(axis="y", color="0.92")
        ax.legend(frameon=False)
        return figure

    def __str__(self) -> str:
        rows = [
            (
                site.name, site.module_class, str(site.width), f"{self[site.name].n_rows:,}",
                str(site.calls), ", ".join(map(str, self[site.name].variables)),
            )
            for site in self._sites
        ]  # fmt: skip
        heading = (
            f"tokens {self._recipe.to_dict()['tokens']}, weight {self._recipe.weight}, "
            f"{self.n_sequences:,} sequences"
        )
        return table(heading, ("site", "module", "width", "rows", "calls", "variables"), rows)

    __repr__ = __str__


def _joined(first: Site, second: Site) -> Site:
    """The same site of two passes."""
    width = first.width or second.width
    return replace(first, width=width, calls=first.calls + second.calls)
