"""Moments of several sites: fitting, addition, plots and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from splince_fast._runtime.extras import require
from splince_fast._runtime.keywords import described_type
from splince_fast._runtime.warn import warn
from splince_fast.exceptions import IncompatibleMomentsError, InputError, OnePassWarning
from splince_fast.methods.table import Function
from splince_fast.moments import Moments
from splince_fast.moments.moments import from_record, to_record
from splince_fast.nn.erasers import Erasers, block_diagonal, fit_site
from splince_fast.nn.spec import BySite, CollectionSpec, Site, format_table
from splince_fast.projection import Projection


class Collected(BySite):
    """Moments by site, made by :func:`collect`; a mapping from names to :class:`Moments`.

    Parameters
    ----------
    moments : mapping of str to Moments
        Moments by site, in the order in which the sites ran.
    sites : iterable of Site
        Names, classes and widths of the modules, in the same order.
    recipe : CollectionSpec
        The specification of the collection.
    n_sequences : int
        Number of sequences with selected tokens. Tokens of one sequence are not independent, so
        this is the number of independent observations.

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
    _CONVERTERS = (to_record, from_record)
    _EXTRA_ATTRIBUTES = {"n_sequences": int}  # noqa: RUF012

    def __init__(
        self,
        moments: Mapping[str, Moments],
        sites: Iterable[Site],
        recipe: CollectionSpec,
        n_sequences: int,
    ) -> None:
        super().__init__(moments, sites, recipe)
        self.n_sequences = n_sequences

    def erasers(
        self, method: str | Function, *, erase: object, keep: object = None, **options: object
    ) -> Erasers:
        """Fit an eraser at every site.

        Parameters
        ----------
        method : str or callable
            ``sf.splince``, ``sf.leace``, ``sf.sal`` or ``sf.mean_projection``, or the name of a
            method.
        erase, keep
            Variables to erase and to keep, as for the method.
        **options
            Further arguments of the method.

        Returns
        -------
        Erasers
            One projection per site.

        Raises
        ------
        SplinceError
            Errors of the method; the message names the site.

        Warns
        -----
        OnePassWarning
            There are several sites. Each eraser is exact if it is installed alone and its site runs
            once per batch. If all erasers are installed, the activations at later sites differ from
            those of the fit. Likewise, at a site that runs several times per batch, such as a layer
            with shared weights, later activations differ; only :func:`fit_layers` warns of this.
        """
        n_sites = len(self) // (self.placement.heads or 1)
        if n_sites > 1:
            warn(
                f"{n_sites} sites were fitted in one pass: each eraser is exact if it is "
                "installed alone. Installed together, the erasers leave part of the concept, "
                "possibly more than without erasers: fit them with fit_layers instead",
                OnePassWarning,
            )
        fitted = self._fit(method, erase, keep, options)
        return Erasers(
            {site.name: eraser for site, eraser in fitted},
            [site for site, _ in fitted],
            self._recipe,
            sequential=False,
        )

    def _fit(
        self,
        method: Any,
        erase: Any,
        keep: Any,
        options: Mapping[str, object],
        erased_before: bool = False,
    ) -> list[tuple[Site, Projection]]:
        """Fit one eraser per site; for sites with heads, a block-diagonal eraser of all heads.

        `erased_before` is whether an eraser of an earlier site was installed.
        """
        fitted = [
            (
                site,
                fit_site(site.name, self[site.name], method, erase, keep, options, erased_before),
            )
            for site in self._sites
        ]
        if self.placement.heads is None:
            return fitted
        by_module: dict[str, list[tuple[Site, Projection]]] = {}
        for site, eraser in fitted:
            by_module.setdefault(site.name.rpartition("[")[0], []).append((site, eraser))
        return [
            (
                replace(heads[0][0], name=name, width=sum(site.width for site, _ in heads)),
                block_diagonal([eraser for _, eraser in heads]),
            )
            for name, heads in by_module.items()
        ]

    # -- algebra ---------------------------------------------------------------------------

    def __add__(self, other: Collected) -> Collected:
        """Return the moments of the rows of two collections, for instance from two workers."""
        if not isinstance(other, Collected):
            raise InputError(
                f"a Collected can be added only to a Collected, not to {described_type(other)}"
            )
        self._check_compatible(other._description())
        other_sites = {site.name: site for site in other._sites}
        return Collected(
            {name: moments + other[name] for name, moments in self.items()},
            [_sum_of_sites(site, other_sites[site.name]) for site in self._sites],
            self._recipe,
            self.n_sequences + other.n_sequences,
        )

    def _description(self) -> tuple[object, ...]:
        """Return the fields that must be equal in two collections that are added."""
        names = sorted((site.name, site.module_class) for site in self._sites)
        return names, self._recipe.to_dict()

    def _check_compatible(self, other_description: tuple[object, ...]) -> None:
        description = self._description()
        if description != other_description:
            raise IncompatibleMomentsError(
                "the two collections have different sites or arguments: "
                f"{description} and {other_description}; use the same sites, tokens, side, output "
                "and weight for both"
            )

    def all_reduce(self, group: object = None) -> Collected:
        """Sum the moments over the processes of a group; the sum is equal in all, bit for bit.

        The moments of each site are reduced along a binary tree and broadcast by the first process.
        A process never stores more than two states of a site.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            The group; by default all processes.

        Returns
        -------
        Collected
            The sum of the moments of all processes.

        Raises
        ------
        IncompatibleMomentsError
            Sites or arguments of the collections differ; raised in all processes.
        """
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        ranks = [dist.get_global_rank(group, r) if group is not None else r for r in range(size)]
        records: list[Any] = [None] * size
        record = (self._description(), self._sites, self.n_sequences)
        dist.all_gather_object(records, record, group=group)
        for description, _, _ in records:
            self._check_compatible(description)
        sites = {site.name: site for site in self._sites}
        for _, other_sites, _ in records[:rank] + records[rank + 1 :]:
            for site in other_sites:
                sites[site.name] = _sum_of_sites(sites[site.name], site)
        totals = {}
        for name in sorted(self):
            total, step = self[name], 1
            while step < size:
                if rank % (2 * step) == step:
                    dist.send_object_list([total], ranks[rank - step], group=group)
                    break
                if rank + step < size:
                    received: list[Any] = [None]
                    dist.recv_object_list(received, ranks[rank + step], group=group)
                    total = total + received[0]
                step *= 2
            received = [total if rank == 0 else None]
            dist.broadcast_object_list(received, ranks[0], group=group)
            totals[name] = received[0]
        ordered = {site.name: totals[site.name] for site in self._sites}
        n_sequences = sum(count for _, _, count in records)
        return Collected(ordered, sites.values(), self._recipe, n_sequences)

    # -- association -----------------------------------------------------------------------

    def trace(self, name: object) -> dict[str, float]:
        """Compute the linear association with a variable at each site.

        Parameters
        ----------
        name : str or tuple of str
            Name of the variable.

        Returns
        -------
        dict
            |Cov(x, z)| / sqrt(tr Cov(x)) by site (Frobenius norm), in units of z.
        """
        associations = {}
        for site, moments in self.items():
            cross = moments.cross_covariance(name, ddof=0)
            total = float(np.trace(moments.covariance(ddof=0)))
            associations[site] = float(np.linalg.norm(cross)) / total**0.5 if total else 0.0
        return associations

    def plot(self, name: object, *, after: Collected | None = None) -> Any:
        """Plot the linear association with a variable at all sites.

        Parameters
        ----------
        name : str or tuple of str
            Name of the variable.
        after : Collected, optional
            Moments of the same sites with erasers installed.

        Returns
        -------
        matplotlib.figure.Figure
            Figure with a logarithmic axis; ``.savefig(path)`` writes it to a file.

        Raises
        ------
        MissingExtraError
            matplotlib is not installed.
        """
        if not isinstance(after, Collected | None):
            raise InputError(f"after is {after!r}; pass the result of collect, or None")
        figures = require("matplotlib.figure", "demo")
        figure = figures.Figure(figsize=(7.5, 4.2), layout="constrained")
        ax = figure.subplots()
        before = self.trace(name)
        positions = range(len(before))
        ax.plot(positions, list(before.values()), marker="o", color="#D55E00", label="no erasers")
        if after is not None:
            erased = after.trace(name)
            values = [erased.get(site, np.nan) for site in before]
            ax.plot(positions, values, marker="s", color="#0072B2", label="erasers installed")
        ax.set_yscale("log")
        ax.set_xticks(positions, list(before), rotation=90, fontsize=7)
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
        columns = ("site", "module", "width", "rows", "calls", "variables")
        return format_table(heading, columns, rows)

    __repr__ = __str__


def _sum_of_sites(first: Site, second: Site) -> Site:
    """Return the record of one site for the sum of two collections."""
    width = first.width or second.width
    return replace(first, width=width, calls=first.calls + second.calls)
