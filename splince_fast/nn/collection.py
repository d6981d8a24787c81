"""Moments of activations at many sites of a model, and the activations of one as a source."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import block_diag
from torch import Tensor
from torch.nn import Module

from splince_fast._runtime.arguments import (
    as_names,
    check_keywords,
    check_names,
    described_type,
    warn,
)
from splince_fast._runtime.names import listed
from splince_fast._runtime.progress import Progress
from splince_fast._runtime.rows import torch_to_numpy
from splince_fast.exceptions import (
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NeverCalledError,
    NothingErasedWarning,
    OnePassWarning,
    SiteError,
    SplinceError,
)
from splince_fast.labels import encode
from splince_fast.methods.table import Function, method_of
from splince_fast.moments import Moments
from splince_fast.moments.block import Workspace
from splince_fast.moments.moments import from_record, to_record
from splince_fast.moments.parameters import Parameters
from splince_fast.nn import calls, sites
from splince_fast.nn.accumulate import SelectedRows, SiteSums, check_memory
from splince_fast.nn.calls import MISSING_LABEL, CallSelections, Selection, TokenRule
from splince_fast.nn.eraser import Erasers
from splince_fast.nn.sites import BySite, CollectionSpec, Placement, Site
from splince_fast.projection import Projection
from splince_fast.sources.base import Block, Source, StreamSource, shuffles

Labels = str | list[str] | tuple[str, ...] | Callable[[Any], Mapping[str, Any]]


MIXED_RULES = (
    "the site {!r} runs in a call with the token rule {!r}, and earlier calls had {!r}: only some "
    "calls have tokens. Take such sites one by one, or pass tokens='all'"
)


class Collected(BySite):
    """Moments by site, made by :func:`collect`; a mapping from names to :class:`Moments`.

    Parameters
    ----------
    values : mapping of str to Moments
        Moments by site, in the order in which the sites ran.
    sites : iterable of Site
        Names, classes and widths of the modules, in the same order.
    recipe : CollectionSpec
        The specification of the collection; `placement` and `tokens` are attributes, too.
    **extra
        ``n_sequences``, the number of sequences with selected tokens: of independent observations.

    Examples
    --------
    See :func:`collect`.
    """

    _KIND = "collected"
    _CONVERTERS = (to_record, from_record)
    _EXTRA = "n_sequences"
    n_sequences: int

    def erasers(
        self, method: str | Function, *, erase: object, keep: object = None, **options: object
    ) -> Erasers:
        """Fit an eraser at every site.

        Parameters
        ----------
        method, erase, keep
            As for :func:`splince_fast.erase`.
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
            There are several sites: installed together, their erasers are inexact.
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
        projections = {site.name: eraser for site, eraser in fitted}
        return Erasers(projections, [site for site, _ in fitted], self.recipe, sequential=False)

    def _fit(self, *arguments: Any) -> list[tuple[Site, Projection]]:
        """Fit one eraser per module, which is block-diagonal if the module has heads."""
        fitted, n_heads = [], self.placement.heads or 1
        for i in range(0, len(self.sites), n_heads):
            heads = self.sites[i : i + n_heads]
            erasers = [fit_site(site.name, self[site.name], *arguments) for site in heads]
            name, width = heads[0].name, sum(site.width for site in heads)
            name = name if self.placement.heads is None else name.rpartition("[")[0]
            fitted.append((replace(heads[0], name=name, width=width), block_diagonal(erasers)))
        return fitted

    def __add__(self, other: Collected) -> Collected:
        """Return the moments of the rows of two collections, for instance from two workers."""
        if not isinstance(other, Collected):
            raise InputError(
                f"a Collected can be added only to a Collected, not to {described_type(other)}"
            )
        return self._sum([self._header(), other._header()], lambda name: [self[name], other[name]])

    def all_reduce(self, group: object = None) -> Collected:
        """Sum the moments over the processes of a group, one site at a time.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            The group; by default all processes.

        Returns
        -------
        Collected
            The sum, which is equal in all processes, bit for bit.

        Raises
        ------
        IncompatibleMomentsError
            Sites or arguments of the collections differ; raised in all processes.
        """
        import torch.distributed as dist

        def gather(value: object) -> list[Any]:
            values: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(values, value, group)
            return values

        return self._sum(gather(self._header()), lambda name: gather(self[name]))

    def _header(self) -> tuple[dict[str, Site], dict[str, Any], int]:
        return {site.name: site for site in self.sites}, self.recipe.to_dict(), self.n_sequences

    def _sum(self, headers: list[Any], moments_of: Callable[[str], list[Moments]]) -> Collected:
        """Add collections with these headers, in the order of the sites of the first."""
        own, *others = (
            (sorted((name, site.module_class) for name, site in found.items()), recipe)
            for found, recipe, _ in (self._header(), *headers)
        )
        for other in others:
            if other != own:
                raise IncompatibleMomentsError(
                    f"the two collections have different sites or arguments: {own} and {other}; "
                    "use the same sites, tokens, side, output and weight for both"
                )
        values, summed = {}, []
        for name, site in headers[0][0].items():
            same = [found[name] for found, _, _ in headers]
            width, calls = max(s.width for s in same), sum(s.calls for s in same)
            summed.append(replace(site, width=width, calls=calls))
            values[name] = functools.reduce(operator.add, moments_of(name))
        return Collected(values, summed, self.recipe, n_sequences=sum(n for _, _, n in headers))

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


def block_diagonal(projections: Sequence[Projection]) -> Projection:
    """Return the projection of concatenated features, with one diagonal block per projection."""
    if len(projections) == 1:
        return projections[0]
    left = block_diag(*(p.left for p in projections))
    right = block_diag(*(p.right for p in projections))
    mean = np.concatenate([p.mean for p in projections])
    return Projection(left, right, mean, method=projections[0].method)


def fit_site(
    name: str,
    moments: Moments,
    method: str | Function | None,
    erase: object,
    keep: object,
    options: Mapping[str, object],
    erased_before: bool = False,
) -> Projection:
    """Fit the eraser of one site; errors and warnings name the site."""
    entry = method_of(method, keep)
    if entry.needs_labels:
        raise InputError(
            f"the erasers of {entry.label} need labels, which a running model does not have; use "
            "'leace' or 'splince'"
        )
    check_keywords(options, entry.function, without=("moments", "erase", "keep"))
    if keep is not None:
        options = {**options, "keep": keep}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            projection = cast(Projection, entry.function(moments, erase=erase, **options))
    except SplinceError as error:
        error.args = (f"at the site {name!r}: {error}", *error.args[1:])
        raise
    for warning in caught:
        text = warning.message
        if erased_before and issubclass(warning.category, NothingErasedWarning):
            text = (
                "nothing was erased, and the eraser is the identity; the erasers of the sites "
                "before it probably removed the association"
            )
        warn(f"at the site {name!r}: {text}", warning.category)
    return projection


@contextmanager
def watching(
    model: Module,
    modules: Mapping[str, Module],
    placement: Placement,
    selections: CallSelections,
    add: Callable[[str, object], None],
) -> Iterator[None]:
    """Call ``add(name, value)`` with the value of every site inside a ``with`` block."""
    with ExitStack() as stack:
        for name, module in modules.items():
            hook = sites.add_hook(name, module, placement.side, partial(add, name))
            stack.callback(hook.remove)
        # The selections attach their hooks last, because hooks run in order: if a module that takes
        # tokens is a site, the hook of the site must run before the hook that ends the selection of
        # the call.
        stack.callback(selections.detach)
        selections.attach(model, modules)
        yield


def selected_rows(
    name: str, value: object, placement: Placement, selections: CallSelections
) -> tuple[Tensor, Tensor | None, Selection]:
    """Return the rows (..., d) of a site, the mask of the selected ones, and their selection."""
    rows, selection = sites.pick_rows(name, value, placement)[0].detach(), selections.current(name)
    mask, token_mask = selection.mask_for(name, rows), selection.mask
    if mask is not None and token_mask is not None and mask.ndim < token_mask.ndim:
        rows, mask = rows.unflatten(0, token_mask.shape), mask.view(token_mask.shape)
    return rows, mask, selection


class Collector:
    """Hooks of passes over the data, and the sums that the hooks accumulate."""

    def __init__(
        self,
        model: Module,
        at: Any,
        labels: Labels,
        tokens: object,
        weight: str,
        skip_ids: Iterable[int],
        device: object,
        placement: Placement,
        options: Mapping[str, Any],
    ) -> None:
        """Check the arguments of :func:`collect`; raise InputError if one is invalid."""
        check_names(options, ("kinds", "joint"), "collect")
        if weight not in ("token", "sequence"):
            raise InputError(f"weight is {weight!r}; it must be 'token' or 'sequence'")
        self.token_rule = TokenRule.of(None if tokens == "body" else tokens, skip_ids)
        self.placement, self.labels, self.weight = placement, labels, weight
        # Device of the sums; None for the device of the activations.
        self.device = None if device == "model" else _device(device)
        self.parameters = Parameters.of(None, options.get("kinds"), options.get("joint") or ())
        self.start(sites.find(model, at))

    def start(self, modules: Mapping[str, Module], stops: bool = False) -> None:
        """Begin a pass over modules by site; a call may end after the first call of a site."""
        self.modules, self._stops = modules, stops
        self.selections = CallSelections(self.token_rule)
        self.sums: dict[str, SiteSums] = {}  # by site or head, in the order of the first calls
        self.calls: Counter[str] = Counter()
        self.widths: dict[str, int] = {}
        self.applied_rule: str | None = None  # token rule of the calls; None before the first
        self.n_batches = self.n_sequences = 0  # sequences with selected tokens
        self._work = Workspace()

    def run(
        self, model: Module, batches: Iterable[Any], forward: Any, progress: bool | None
    ) -> Collected:
        """Run a model on all batches, and return the moments of all sites."""
        calls.check_inputs(batches, forward)
        device, keys = calls.device_of(model), label_keys(self.labels)
        with (
            watching(model, self.modules, self.placement, self.selections, self._add),
            calls.evaluating(model),
            Progress(unit="sequences", show=progress) as bar,
        ):
            for batch in batches:
                self._batch_labels = read_labels(batch, self.labels)
                self._selected: dict[object, SelectedRows] = {}  # by mask and shape of the rows
                self._counted = np.zeros(0, bool)  # whether a sequence has selected tokens
                self._stopped = False
                with suppress(calls.StopForward):
                    calls.call(model, calls.batch_to(batch, device), keys, forward)
                n = int(np.count_nonzero(self._counted))
                self.n_batches, self.n_sequences = self.n_batches + 1, self.n_sequences + n
                bar.advance(n)
        self._selected = {}
        if not self.n_batches:
            raise InputError("batches is empty; a generator is empty when it is read a second time")
        return self._result()

    def _add(self, name: str, value: object) -> None:
        """Add the selected rows of a site; `value` is the output or the input of its module."""
        if self._stopped or sites.in_backward():
            return
        rows, mask, selection = selected_rows(name, value, self.placement, self.selections)
        self.calls[name] += 1
        self.widths[name] = int(rows.shape[-1])
        self.applied_rule = self.applied_rule or selection.rule
        if self.applied_rule != selection.rule:
            raise SiteError(MIXED_RULES.format(name, selection.rule, self.applied_rule))
        shape = tuple(rows.shape[:-1])
        key = (None if mask is None else selection, shape)
        if key not in self._selected:
            self._selected[key] = self._select(shape or (1,), mask)
        selected = self._selected[key]
        if selected.n:
            flat, keys = selected.rows_of(rows.reshape(-1, rows.shape[-1])), self._keys(name)
            for head, head_rows in zip(keys, flat.chunk(len(keys), dim=1), strict=True):
                self._sums_of(head, head_rows).add(head_rows, selected)
        if self._stops:
            self._stopped = True  # a model may catch the exception and go on
            raise calls.StopForward

    def _select(self, shape: tuple[int, ...], mask: Tensor | None) -> SelectedRows:
        """Return indices, labels and weights of the selected rows of tensors of this shape."""
        index = None if mask is None else mask.cpu().reshape(-1).nonzero().squeeze(1)
        positions = np.arange(math.prod(shape)) if index is None else index.numpy()
        sequence, columns = row_labels(self._batch_labels, shape, positions)
        kinds, joint = self.parameters.kinds or None, self.parameters.joint
        encoded = encode(columns, len(positions), kinds=kinds, joint=joint)
        weight = 1.0 / np.bincount(sequence)[sequence] if self.weight == "sequence" else None
        if not self._selected:
            self._counted = np.zeros(shape[0], bool)
        if len(self._counted) == shape[0]:  # the number of sequences of the first site
            self._counted[sequence] = True
        return SelectedRows(len(positions), self.n_batches, weight, encoded, index)

    def _keys(self, name: str) -> list[str]:
        """Return the keys of a site in `sums`: the name of the site, or one key per head."""
        heads = self.placement.heads
        return [name] if heads is None else [f"{name}[{i}]" for i in range(heads)]

    def _sums_of(self, key: str, rows: Tensor) -> SiteSums:
        """Return the sums of a site or head; create them on first use."""
        if key not in self.sums:
            device = self.device or rows.device
            device = torch.device("cpu") if device.type in ("mps", "meta") else device  # no float64
            n_sites, width = len(self.modules) * (self.placement.heads or 1), int(rows.shape[1])
            check_memory(device, n_sites - len(self.sums), width)
            self.sums[key] = SiteSums(key, width, rows.dtype, device, self.parameters, self._work)
        sites.check_width(key, rows, -1, self.sums[key].width)
        return self.sums[key]

    def _result(self) -> Collected:
        """Return the moments of all sites, and remove the sums."""
        if never_called := [name for name in self.modules if not self.calls[name]]:
            raise NeverCalledError(
                f"the model ran on {self.n_batches} batches, but the sites {listed(never_called)} "
                "never ran: other code reads their weights, or the batches take another path. "
                "Choose the modules that contain these sites"
            )
        collected_sites, moments = [], {}
        kinds, joint = self.parameters.kinds, self.parameters.joint
        for name, width in self.widths.items():
            keys, kind = self._keys(name), type(self.modules[name]).__name__
            for key in keys:
                sums = self.sums.pop(key, None)  # None without selected tokens
                moments[key] = Moments(kinds=kinds, joint=joint) if sums is None else sums.result()
                collected_sites.append(Site(key, kind, width // len(keys), self.calls[name]))
        rule = self.token_rule.rule if callable(self.token_rule.rule) else self.applied_rule
        spec = CollectionSpec(self.placement, rule, self.token_rule.skip_ids, self.weight)
        return Collected(moments, collected_sites, spec, n_sequences=self.n_sequences)


def _device(device: Any) -> torch.device:
    """Return a device; raise InputError if it is invalid, or if torch cannot use it."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (TypeError, RuntimeError, AssertionError) as error:
        raise InputError(
            f"device is {device!r}; it must be 'model', or a torch.device that the installed torch "
            "supports on this machine"
        ) from error


# -- labels --------------------------------------------------------------------------------


def label_keys(labels: Labels) -> tuple[str, ...]:
    """Return the keys of a batch that hold labels and are not passed to the model."""
    return () if callable(labels) else as_names(labels, "labels")


def read_labels(batch: Any, labels: Labels) -> dict[str, Any]:
    """Return the labels of a batch by variable; raise LabelError if labels are missing."""
    if callable(labels):
        columns = labels(batch)
        if not isinstance(columns, Mapping):
            raise LabelError(
                f"the function labels= returned {described_type(columns)}; it must return a "
                "mapping of names to labels"
            )
        return dict(columns)
    keys, columns = label_keys(labels), batch
    if isinstance(batch, tuple | list) and len(batch) == 2:  # (inputs, labels)
        columns = batch[1]
        if len(keys) == 1 and not isinstance(columns, Mapping):
            columns = {keys[0]: columns}
    if keys and not isinstance(columns, Mapping):
        raise LabelError(
            f"labels= names {listed(keys)}, but a batch, or the second entry of a pair, is "
            f"{described_type(columns)}; pass mappings, pairs (inputs, labels) whose second entry "
            "is a mapping or, for a single name, the labels, or a function of the batch"
        )
    if missing := [key for key in keys if key not in columns]:
        raise LabelError(
            f"the batch has no labels {listed(missing)}; it has the keys {listed(columns)}"
        )
    return {key: columns[key] for key in keys}


def label_array(values: Any) -> NDArray[Any]:
    """Return the labels of a batch, a tensor or any sequence, as an array on the host."""
    return torch_to_numpy(values) if isinstance(values, Tensor) else np.asarray(values)


def row_labels(
    labels: Mapping[str, Any], shape: tuple[int, ...], positions: NDArray[np.intp]
) -> tuple[NDArray[np.intp], dict[str, Any]]:
    """Return sequences and labels of the rows at `positions`, from labels per token or sequence."""
    sequence, columns = positions // max(1, math.prod(shape[1:])), {}
    for name, values in labels.items():
        array = label_array(values)
        per_token = len(shape) > 1 and array.shape == shape
        # An integer matrix with another number of columns than tokens is an error, because it is
        # most likely meant as one label per token.
        is_matrix = array.ndim == len(shape) == 2 and array.dtype.kind in "iub"
        if not per_token and (array.shape[:1] != shape[:1] or is_matrix):
            raise LabelError(
                f"the labels {name!r} have shape {array.shape}, and the rows of the site {shape}; "
                f"pass one label per sequence, ({shape[0]},), or one per token, {shape}"
            )
        column = array.reshape(-1)[positions] if per_token else array[sequence]
        if column.dtype.kind in "iu" and (column == MISSING_LABEL).any():
            column = np.ma.masked_equal(column, MISSING_LABEL)
        columns[name] = column
    return sequence, columns


def collect(
    model: object,
    batches: Iterable[object],
    at: object,
    *,
    labels: Labels,
    tokens: object = "body",
    side: str = "output",
    feature_dim: int = -1,
    output: int | str | None = None,
    heads: int | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    weight: str = "token",
    skip_ids: Iterable[int] = (),
    device: object = "model",
    progress: bool | None = None,
    **moments: object,
) -> Collected:
    """Run a model over data once and accumulate the moments of activations at all sites.

    The model runs in evaluation mode; its mode and hooks are restored afterwards.

    Parameters
    ----------
    model : torch.nn.Module
        The model; installed erasers stay active. Compiled models run eagerly.
    batches : iterable
        Mappings of arguments (without those that the model's forward method lacks), pairs (inputs,
        labels), tuples of positional arguments, or single arguments.
    at : str, Module, or a list of them
        Sites: dotted names, patterns (see :func:`install`), or modules.
    labels : str, list of str, or function
        Keys of a batch, or of the second entry of a pair, which for a single key may be the labels
        themselves; or a function from a batch to a mapping of names to labels. Labels have shape
        (B,) or (B, T); the integer -100 is a missing label. Floats are continuous.
    tokens : {"body", "all", "first", "last"} or function
        Attended tokens to accumulate: "body" leaves out the first token of each sequence and
        `skip_ids`, and "first" and "last" select one token; or a function from the arguments of
        the call to a bool tensor (B, T). In a call without tokens, "body" selects all rows.
    side : {"output", "input"}
        Whether to use the output or the input of the module.
    feature_dim : int
        Axis of the features: 1 for convolutional maps (B, C, H, W).
    output : int or str, optional
        Element of an output that is a tuple or a mapping; by default the first element, or
        ``last_hidden_state``.
    heads : int, optional
        Number of attention heads, equal parts of the last axis; a head is named ``site[head]``.
    forward : function, optional
        ``forward(model, batch)`` runs the model. By default the model is called.
    weight : {"token", "sequence"}
        Unit of weight 1: a row, or the rows of a sequence in one call of a site.
    skip_ids : iterable of int
        Ids of tokens that "body" leaves out, such as special tokens.
    device : "model" or torch.device
        Device of the states; "model" for the device of the activations.
    progress : bool, optional
        Whether to show a progress bar; by default in a terminal or notebook, after two seconds.
    **moments
        ``kinds`` and ``joint``, as for :class:`Moments`.

    Returns
    -------
    Collected
        A mapping from names of sites to :class:`Moments`, in the order in which the sites run.

    Raises
    ------
    SiteError, NeverCalledError
        A name matches no module, a module is never called, or its output holds no tensor.
    NotEnoughMemoryError
        The states do not fit in memory; raised before the first state is created.
    NonFiniteError
        An activation is NaN or infinite; the message names site, batch and row.
    LabelError
        Labels are missing or have the wrong length.

    Examples
    --------
    >>> import torch
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5))
    >>> batches = [{"input": torch.randn(50, 3), "z": torch.arange(50) % 2} for _ in range(4)]
    >>> collected = snn.collect(model, batches, ["1", "2"], labels=["z"])
    >>> list(collected), collected["2"].n_rows, collected.n_sequences
    (['1', '2'], 200, 200)
    """
    inner, placement = calls.unwrap(model), Placement(side, feature_dim, output, heads)
    collector = Collector(inner, at, labels, tokens, weight, skip_ids, device, placement, moments)
    return collector.run(inner, batches, forward, progress)


def from_model(
    model: object,
    batches: Iterable[object],
    at: str | Module,
    *,
    tokens: object = "mean",
    labels: Labels = (),
    side: str = "output",
    feature_dim: int = -1,
    output: int | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    skip_ids: Iterable[int] = (),
) -> Source:
    """Return a source of the activations of a model at one site, computed when they are read.

    Parameters
    ----------
    model : torch.nn.Module
        As for :func:`collect`; its mode and hooks are restored after every batch.
    batches : iterable
        As for :func:`collect`; an iterator can be read once only.
    at : str or Module
        One site.
    tokens : {"mean", "body", "all", "first", "last"} or function
        As for :func:`collect`; or "mean", one row per sequence and call, the mean of its "body". A
        sequence without selected tokens has no row.
    labels, side, feature_dim, output, forward, skip_ids
        As for :func:`collect`; without labels, blocks have rows alone.

    Returns
    -------
    Source
        Each batch is a block. Resuming reads earlier batches, but does not run them.

    Raises
    ------
    InputError, SiteError, NeverCalledError, LabelError
        As for :func:`collect`, mostly during reading; the mean takes no labels per token.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    >>> batches = [{"input": torch.randn(50, 3), "z": torch.arange(50) % 2} for _ in range(4)]
    >>> sf.Moments.from_blocks(snn.from_model(model, batches, "1", labels="z")).n_rows
    200
    """
    inner, placement = calls.unwrap(model), Placement(side, feature_dim, output)
    rule = TokenRule.of(None if tokens in ("mean", "body") else tokens, skip_ids)
    modules, keys = sites.find(inner, at), label_keys(labels)
    if len(modules) > 1:
        raise SiteError(f"at names {listed(modules)}; pass one site, and make a source for each")
    calls.check_inputs(batches, forward)

    def read(batch: Any) -> Block:
        columns, selections = read_labels(batch, labels), CallSelections(rule)
        parts: list[tuple[NDArray[Any], dict[str, Any]]] = []  # rows and labels of each call

        def add(name: str, value: object) -> None:
            x, mask, _ = selected_rows(name, value, placement, selections)
            shape = tuple(x.shape[:-1]) or (1,)
            positions = np.flatnonzero(np.ones(shape) if mask is None else mask.cpu().numpy())
            # A copy, because later operations of the model may change the rows in place.
            rows = torch_to_numpy(x.reshape(-1, x.shape[-1])[positions])
            if tokens == "mean":
                if any(label_array(v).shape == shape != shape[:1] for v in columns.values()):
                    raise LabelError("tokens='mean' gives one row per sequence; pass such labels")
                sequence = positions // math.prod(shape[1:])
                _, starts, counts = np.unique(sequence, return_index=True, return_counts=True)
                sums = np.add.reduceat(rows, starts, dtype=np.float64)
                rows, positions = (sums / counts[:, None]).astype(rows.dtype), positions[starts]
            parts.append((rows, row_labels(columns, shape, positions)[1]))

        with watching(inner, modules, placement, selections, add), calls.evaluating(inner):
            calls.call(inner, calls.batch_to(batch, calls.device_of(inner)), keys, forward)
        if not parts:
            raise NeverCalledError(f"a batch does not run {listed(modules)}; choose another site")
        join: Any = np.ma.concatenate
        joined = {key: join([own[key] for _, own in parts]) for key in columns}
        return Block(np.concatenate([rows for rows, _ in parts]), joined or None)

    described = "a function" if callable(tokens) else tokens
    name = f"activations of {type(inner).__name__} at {listed(modules)}, tokens {described}"
    return StreamSource(name, batches, read, per_item=True, shuffled=shuffles(batches))
