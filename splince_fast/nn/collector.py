"""Hooks that accumulate the selected rows of all sites, with their labels, during one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from splince_fast._runtime.keywords import as_names
from splince_fast.exceptions import LabelError, NeverCalledError, SiteError
from splince_fast.labels import encode
from splince_fast.moments import Moments
from splince_fast.moments.block import Workspace
from splince_fast.moments.parameters import Parameters
from splince_fast.nn import sites
from splince_fast.nn.accumulate import RowLabels, SiteSums, accumulation_device
from splince_fast.nn.call_selections import CallSelections
from splince_fast.nn.collected import Collected
from splince_fast.nn.memory import check_memory, to_device
from splince_fast.nn.running import StopForward
from splince_fast.nn.spec import CollectionSpec, Placement, Site, head_name
from splince_fast.nn.tokens import MISSING_LABEL, Selection, TokenRule

Labels = str | list[str] | tuple[str, ...] | Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class SelectedRows:
    """Positions and labels of the rows that one call selects; sites of equal shape share them."""

    labels: RowLabels
    index: Tensor | None  # positions among the rows of a site, on the host; None for all
    n_sequences: int
    _copies: dict[torch.device, Tensor] = field(default_factory=dict)

    def select(self, flat: Tensor) -> Tensor:
        """Select rows of a tensor (n, d); the index is copied to each device once."""
        if self.index is None:
            return flat
        index = self._copies.get(flat.device)
        if index is None:
            index = self._copies[flat.device] = to_device(self.index, flat.device)
        return flat.index_select(0, index)


@dataclass(eq=False)
class Collector:
    """Hooks of one pass, and the sums that they accumulate.

    Attributes
    ----------
    modules : mapping of str to Module
        By site.
    token_rule, placement, labels, parameters
        Arguments of :func:`collect` after validation.
    by_sequence : bool
        Whether the rows of each sequence have total weight 1.
    device : torch.device or None
        Device of the sums; None for that of the activations.
    sums : dict of str to SiteSums
        By site or head, in the order of their first calls.
    calls, widths : dict of str to int
        By site.
    applied_rule : str or None
        The rule that was applied, after the first call.
    once_per_batch : bool or None
        Whether each site runs once per batch, after the first batch. If so, and if `may_stop`, a
        pass ends after the last site.
    n_batches, n_sequences : int
    """

    modules: Mapping[str, Module]
    token_rule: TokenRule
    placement: Placement
    labels: Labels
    by_sequence: bool
    device: torch.device | None
    parameters: Parameters
    may_stop: bool = False
    once_per_batch: bool | None = None

    def __post_init__(self) -> None:
        self.selections = CallSelections(self.token_rule)
        self.sums: dict[str, SiteSums] = {}
        self.calls = dict.fromkeys(self.modules, 0)
        self.widths: dict[str, int] = {}
        self.applied_rule: str | None = None
        self.n_batches = self.n_sequences = 0
        self._work = Workspace()
        # Of the current batch:
        self._batch_labels: dict[str, object] = {}
        self._selected: dict[object, SelectedRows] = {}  # by selection and shape
        self._reached: set[str] = set()
        self._stopped = False

    def for_site(self, name: str, *, once_per_batch: bool) -> Collector:
        """Return a new collector for one of the sites."""
        return replace(self, modules={name: self.modules[name]}, once_per_batch=once_per_batch)

    @contextmanager
    def attached(self, model: Module) -> Iterator[None]:
        """Attach all hooks inside a ``with`` block."""
        handles = []
        try:
            for name, module in self.modules.items():
                add = partial(self.add, name)
                handles.append(sites.add_hook(name, module, self.placement.side, add))
            # Last: if a site takes tokens itself, its hook runs before its call is left.
            handles += self.selections.attach(model, self.modules)
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def one_batch(self, batch: object) -> Iterator[None]:
        """Prepare for a batch, which the ``with`` block runs."""
        self._batch_labels = read_labels(batch, self.labels)
        self._selected, self._reached, self._stopped = {}, set(), False
        before = dict(self.calls)
        with suppress(StopForward):
            yield
        if self.once_per_batch is None:
            self.once_per_batch = all(self.calls[name] == before[name] + 1 for name in self.calls)
        self._selected = {}
        self.n_batches += 1

    def add(self, name: str, value: object) -> None:
        """Add the selected rows of a site, whose module returned or received `value`."""
        if self._stopped or sites.in_backward():
            return
        axis, heads = self.placement.feature_dim, self.placement.heads
        x, _ = sites.pick(name, value, self.placement.output, axis)
        if not -x.ndim <= axis < x.ndim:
            sites.check_width(name, x, axis, -1)
        rows = x.detach()
        rows = rows if axis in (-1, x.ndim - 1) else rows.movedim(axis, -1)
        if heads is not None:
            rows = sites.merge_heads(name, rows, heads)
        self.calls[name] += 1
        selection = self.selections.current(name)
        if self.applied_rule is None:
            self.applied_rule = selection.rule
        elif self.applied_rule != selection.rule:
            raise SiteError(
                f"the site {name!r} runs in a call whose tokens are {selection.rule!r}, and they "
                f"were {self.applied_rule!r} before: only some calls have tokens. Collect at sites "
                "of such calls one by one, or pass tokens='all'"
            )
        flat, labels = self._select(name, rows, selection)
        if labels.n and heads is None:
            self._sums_of(name, flat).add(flat, labels)
        elif labels.n:
            for i, part in enumerate(flat.split(flat.shape[1] // heads, dim=1)):
                key = head_name(name, i)
                self._sums_of(key, part).add(part, labels)
        self.widths[name] = int(rows.shape[-1])
        self._reached.add(name)
        if self.may_stop and self.once_per_batch and len(self._reached) == len(self.modules):
            self._stopped = True
            raise StopForward

    def _select(self, name: str, rows: Tensor, selection: Selection) -> tuple[Tensor, RowLabels]:
        """Return the selected rows (n, d) of a tensor (..., d), and their labels."""
        mask = selection.mask_for(name, rows)
        tokens = selection.mask
        if mask is not None and tokens is not None and mask.ndim < tokens.ndim:
            rows, mask = rows.unflatten(0, tokens.shape), mask.view(tokens.shape)
        means = selection.rule == "mean"
        key = (None if mask is None else selection, tuple(rows.shape[:-1]))
        selected = self._selected.get(key)
        if selected is None:
            selected = self._index(tuple(rows.shape[:-1]), mask, selection)
            if not self._selected:
                self.n_sequences += selected.n_sequences
            self._selected[key] = selected
        flat = _means(rows, mask) if means else rows.reshape(-1, rows.shape[-1])
        return selected.select(flat), selected.labels

    def _index(
        self, shape: tuple[int, ...], mask: Tensor | None, selection: Selection
    ) -> SelectedRows:
        """Return positions and labels of the selected rows, or of the means over sequences."""
        if selection.rule == "mean":
            shape, mask = shape[:1], None if mask is None else mask.any(1)
        index = None if mask is None else mask.cpu().reshape(-1).nonzero().squeeze(1)
        positions = np.arange(int(np.prod(shape))) if index is None else index.numpy()
        shape, n = shape or (1,), len(positions)
        sequence = positions // max(1, int(np.prod(shape[1:])))
        columns = {
            name: _label_rows(name, values, shape, positions, sequence)
            for name, values in self._batch_labels.items()
        }
        counts = np.bincount(sequence, minlength=1)
        weight = 1.0 / counts[sequence] if self.by_sequence else None
        kinds, joint = self.parameters.kinds or None, self.parameters.joint
        encoded = encode(columns, n, kinds=kinds, joint=joint)
        labels = RowLabels(n, self.n_batches, weight, encoded, sequence)
        return SelectedRows(labels, index, int(np.count_nonzero(counts)))

    def _sums_of(self, name: str, rows: Tensor) -> SiteSums:
        """Return the sums of a site or head; the first call creates them."""
        sums = self.sums.get(name)
        if sums is None:
            device = accumulation_device(rows.device if self.device is None else self.device)
            width = int(rows.shape[1])
            n_sites = len(self.modules) * (self.placement.heads or 1)
            check_memory(device, n_sites - len(self.sums), width)
            sums = self.sums[name] = SiteSums(
                name, width, rows.dtype, device, self.parameters, self._work
            )
        if rows.shape[1] != sums.width:
            sites.check_width(name, rows, -1, sums.width)
        return sums

    def check_called(self) -> None:
        """Raise NeverCalledError if a site never ran."""
        silent = [name for name, count in self.calls.items() if not count]
        if silent:
            raise NeverCalledError(
                f"the model ran {self.n_batches} batches and the sites {silent} never ran; choose "
                "the module around them, or another path through the model"
            )

    def result(self, recipe: CollectionSpec) -> Collected:
        """Return the moments of all sites, which uses up the sums.

        Raises NeverCalledError if a site never ran.
        """
        self.check_called()
        heads = self.placement.heads
        parts = {
            key: name
            for name in self.widths
            for key in ([name] if heads is None else [head_name(name, i) for i in range(heads)])
        }
        collected, moments = [], {}
        for key in dict.fromkeys((*self.sums, *parts)):
            sums, name = self.sums.pop(key, None), parts[key]
            moments[key] = (  # no sums if no token was selected
                Moments(kinds=self.parameters.kinds, joint=self.parameters.joint)
                if sums is None
                else sums.result()
            )
            kind, width = type(self.modules[name]).__name__, self.widths[name] // (heads or 1)
            collected.append(Site(key, kind, width, self.calls[name]))
        return Collected(moments, collected, recipe, self.n_sequences)


def _means(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the selected tokens of each sequence, 0 if there is none."""
    wide = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    if mask is None:
        return wide.reshape(len(rows), -1, rows.shape[-1]).mean(1)
    selected = mask.unsqueeze(-1)
    return (wide * selected).sum(1) / selected.sum(1).clamp(min=1)


# -- labels --------------------------------------------------------------------------------


def label_keys(labels: Labels) -> tuple[str, ...]:
    """Return the keys of labels in a batch, which are not passed to the model."""
    if callable(labels):
        return ()
    return as_names(labels, "labels")


def read_labels(batch: Any, labels: Labels) -> dict[str, Any]:
    """Return the labels of a batch by variable; LabelError if they are missing."""
    if callable(labels):
        columns = labels(batch)
        if not isinstance(columns, Mapping):
            raise LabelError(
                f"the function labels= returned {type(columns).__name__}; it must return a mapping "
                "of names to labels"
            )
        return dict(columns)
    keys = label_keys(labels)
    if keys and isinstance(batch, tuple | list) and len(batch) == 2:  # (inputs, labels)
        if len(keys) == 1 and not isinstance(batch[1], Mapping):
            return {keys[0]: batch[1]}
        batch = batch[1]
    if keys and not isinstance(batch, Mapping):
        raise LabelError(
            f"labels= names {list(keys)}, and labels come as {type(batch).__name__}; batches are "
            "mappings, or pairs (inputs, labels) whose second entry is a mapping of names to "
            "labels, or the labels themselves where there is one name; or pass a function of "
            "the batch that returns such a mapping"
        )
    missing = [key for key in keys if key not in batch]
    if missing:
        raise LabelError(f"the batch has no labels {missing}; it has the keys {list(batch)}")
    return {key: batch[key] for key in keys}


def _label_rows(
    name: str,
    values: Any,
    shape: tuple[int, ...],
    positions: NDArray[np.intp],
    sequence: NDArray[np.intp],
) -> object:
    """Return the labels of the rows at `positions`, from one label per token or per sequence."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    array = np.asarray(array)
    per_token = array.ndim >= 1 and len(shape) > 1 and array.shape == shape
    per_sequence = array.shape == shape[:1] or (
        array.ndim >= 1
        and array.shape[0] == shape[0]
        and array.shape[1:] != shape[1:]
        # A matrix of integers with a wrong number of columns was meant as one label per token.
        and not (array.ndim == 2 and len(shape) == 2 and array.dtype.kind in "iub")
    )
    if not per_token and not per_sequence:
        raise LabelError(
            f"the labels {name!r} have shape {array.shape}, and the site's rows are {shape}; pass "
            f"one label per sequence, ({shape[0]},), or one per token, {shape}"
        )
    column = array.reshape(-1)[positions] if per_token else array[sequence]
    if column.dtype.kind in "iu" and (column == MISSING_LABEL).any():
        return np.ma.masked_array(column, column == MISSING_LABEL)
    return column
