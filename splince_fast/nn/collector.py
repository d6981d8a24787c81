"""The hooks of one collecting pass: which rows are taken at a site, with which labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splince_fast.exceptions import LabelError, NeverCalledError, SiteError
from splince_fast.labels import encode
from splince_fast.moments import Moments
from splince_fast.moments.buffer import Workspace
from splince_fast.moments.parameters import Parameters
from splince_fast.nn import sites
from splince_fast.nn.accumulate import RowLabels, SiteSums, home_of
from splince_fast.nn.collected import Collected
from splince_fast.nn.memory import check_memory, on_device
from splince_fast.nn.positions import Positions
from splince_fast.nn.recipe import Placement, Recipe, Site, head_name
from splince_fast.nn.tokens import Selection, Tokens

Tensor = Any
Module = Any
Labels = str | list[str] | tuple[str, ...] | Callable[[Any], Mapping[str, Any]]

# The label by which torch's losses leave a token out.
_IGNORED = -100


class _Stop(Exception):
    """Ends a forward pass behind the last site."""


@dataclass(frozen=True)
class Plan:
    """Which rows of a tensor are taken in one call, and what is known of them."""

    rows: RowLabels
    index: Tensor | None  # positions in the flattened tensor, on the host; None for all
    n_sequences: int
    _copies: dict[Any, Tensor] = field(default_factory=dict)

    def taken(self, flat: Tensor) -> Tensor:
        """The rows of a flattened tensor (n, d); the index is copied once per device."""
        if self.index is None:
            return flat
        index = self._copies.get(flat.device)
        if index is None:
            index = self._copies[flat.device] = on_device(self.index, flat.device)
        return flat.index_select(0, index)


class Collector:
    """The hooks of one pass, and what they add up.

    Attributes
    ----------
    sums : dict of str to SiteSums
        By site, in the order in which they first ran.
    calls : dict of str to int
    rule : str or None
        How tokens were selected, once known.
    once : bool or None
        Whether each site runs once per batch, once known: then a pass ends behind the last one.
    """

    def __init__(
        self,
        chosen: Mapping[str, Module],
        spec: Tokens,
        placement: Placement,
        labels: Labels,
        weight: str,
        device: Any,
        parameters: Parameters,
    ) -> None:
        self.chosen, self.spec, self.placement = chosen, spec, placement
        self.labels, self.by_sequence = labels, weight == "sequence"
        self.device, self.parameters = device, parameters
        self.positions = Positions(spec)
        self.sums: dict[str, SiteSums] = {}
        self.calls = dict.fromkeys(chosen, 0)
        self.widths: dict[str, int] = {}
        self.rule: str | None = None
        self.n_sequences = 0
        self.batch = 0
        self.may_stop = False
        self._work = Workspace()
        self._labels: dict[str, Any] = {}
        self._plans: dict[Any, Plan] = {}
        self._seen: set[str] = set()
        self.once: bool | None = None
        self._over = False

    def attach(self, model: Module) -> list[Any]:
        """Set all hooks; returns their handles."""
        handles = self.positions.attach(model, list(self.chosen))
        for name, module in self.chosen.items():
            if self.placement.side == "input":
                hook = _InputHook(self, name)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(_OutputHook(self, name)))
        return handles

    @contextmanager
    def one_batch(self, batch: Any) -> Iterator[None]:
        """A batch is run: read its labels before, and close the books after."""
        self._labels = read_labels(batch, self.labels)
        self._plans, self._seen, self._over = {}, set(), False
        before = dict(self.calls)
        with suppress(_Stop):
            yield
        if self.once is None:
            self.once = all(self.calls[name] == before[name] + 1 for name in self.chosen)
        self._plans = {}
        self.batch += 1

    def take(self, name: str, value: Any) -> None:
        """A site ran: add its rows."""
        if self._over or sites.in_backward():
            return
        axis = self.placement.feature_dim
        x, _ = sites.pick(name, value, self.placement.output, axis)
        if not -x.ndim <= axis < x.ndim:
            sites.check_width(name, x, axis, -1)
        rows = x.detach()
        rows = rows if axis in (-1, x.ndim - 1) else rows.movedim(axis, -1)
        if self.placement.heads is not None:
            rows = sites.joined_heads(name, rows, self.placement.heads)
        self.calls[name] += 1
        selection = self.positions.selection(name)
        if self.rule is None:
            self.rule = selection.rule
        elif self.rule != selection.rule:
            raise SiteError(
                f"the site {name!r} runs in a call whose tokens are {selection.rule!r}, and they "
                f"were {self.rule!r} before: only some calls have tokens. Collect at sites of "
                "such calls one by one, or pass tokens='all'"
            )
        flat, plan = self._select(name, rows, selection)
        if plan.rows.n:
            for key, part in self._split(name, flat):
                self._sums_of(key, part).feed(part, plan.rows)
        self.widths[name] = int(rows.shape[-1])
        self._seen.add(name)
        if self.may_stop and self.once and len(self._seen) == len(self.chosen):
            self._over = True
            raise _Stop

    def _split(self, name: str, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The rows under the name of their site, or of each head."""
        heads = self.placement.heads
        if heads is None:
            yield name, flat
            return
        for head, part in enumerate(flat.split(flat.shape[1] // heads, dim=1)):
            yield head_name(name, head), part

    def _select(self, name: str, rows: Tensor, selection: Selection) -> tuple[Tensor, Plan]:
        """The selected rows (n, d), and their labels."""
        mask = selection.over(name, rows)
        key = (None if mask is None else id(selection.mask), tuple(rows.shape[:-1]))
        mean = selection.rule == "mean"
        if key not in self._plans:
            plan = self._plan_of_means(rows, mask) if mean else self._plan(rows, mask)
            if not self._plans:
                self.n_sequences += plan.n_sequences
            self._plans[key] = plan
        plan = self._plans[key]
        flat = _means(rows, mask) if mean else rows.reshape(-1, rows.shape[-1])
        return plan.taken(flat), plan

    def _plan(self, rows: Tensor, mask: Tensor | None) -> Plan:
        shape = tuple(rows.shape[:-1]) if mask is None else tuple(mask.shape)
        if mask is None:
            index = None
            where: NDArray[np.intp] = np.arange(int(np.prod(shape)), dtype=np.intp)
        else:
            index = mask.cpu().reshape(-1).nonzero().squeeze(1)
            where = index.numpy()
        if len(shape) == 1 and mask is not None:  # tokens of all sequences in one axis
            shape = tuple(self.positions.selection("").mask.shape)  # type: ignore[union-attr]
        if not shape:
            shape = (1,)
        return self._labelled(shape, where, index)

    def _plan_of_means(self, rows: Tensor, mask: Tensor | None) -> Plan:
        if mask is None:
            n = rows.shape[0]
            return self._labelled((n,), np.arange(n), None)
        index = mask.cpu().any(1).nonzero().squeeze(1)
        return self._labelled((mask.shape[0],), index.numpy(), index)

    def _labelled(self, shape: tuple[int, ...], where: NDArray[Any], index: Any) -> Plan:
        """Labels and weights of the rows `where` of a tensor of shape (*shape, d)."""
        per_sequence = max(1, int(np.prod(shape[1:])))
        sequence = where // per_sequence
        found = {}
        for name, values in self._labels.items():
            found[name] = _rows_of(name, values, shape, where, sequence)
        counts = np.bincount(sequence, minlength=1)
        weight = 1.0 / counts[sequence] if self.by_sequence else None
        kinds, joint = self.parameters.kinds or None, self.parameters.joint
        encoded = encode(found, len(where), kinds=kinds, joint=joint)
        rows = RowLabels(len(where), self.batch, weight, encoded, sequence)
        return Plan(rows, index, int(np.count_nonzero(counts)))

    def _sums_of(self, name: str, rows: Tensor) -> SiteSums:
        """The sums of a site; made at its first call, if all sites together have room."""
        found = self.sums.get(name)
        if found is None:
            home = home_of(rows.device if self.device is None else self.device)
            width = int(rows.shape[1])
            n_sites = len(self.chosen) * (self.placement.heads or 1)
            check_memory(home, n_sites - len(self.sums), width)
            found = self.sums[name] = SiteSums(
                name, width, rows.dtype, home, self.parameters, self._work
            )
        if rows.shape[1] != found.width:
            sites.check_width(name, rows, -1, found.width)
        return found

    def result(self, recipe: Recipe) -> Collected:
        """Everything added up.

        Raises
        ------
        NeverCalledError
            A site never ran.
        """
        silent = [name for name, count in self.calls.items() if not count]
        if silent:
            raise NeverCalledError(
                f"the model ran {self.batch} batches and the sites {silent} never ran; choose "
                "the module around them, or another path through the model"
            )
        made, moments = [], {}
        heads = self.placement.heads
        parts = {
            key: name
            for name in self.widths
            for key in ([name] if heads is None else [head_name(name, i) for i in range(heads)])
        }
        order = [*self.sums, *(name for name in parts if name not in self.sums)]
        for name in order:
            sums = self.sums.pop(name, None)
            empty = Moments(kinds=self.parameters.kinds, joint=self.parameters.joint)
            moments[name] = empty if sums is None else sums.result()  # no token was selected
            site = parts[name]
            kind = type(self.chosen[site]).__name__
            made.append(Site(name, kind, self.widths[site] // (heads or 1), self.calls[site]))
        return Collected(moments, made, recipe, self.n_sequences)


class _OutputHook:
    def __init__(self, collector: Collector, name: str) -> None:
        self.collector, self.name = collector, name

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        self.collector.take(self.name, output)


class _InputHook(_OutputHook):
    def __call__(self, module: Module, args: Any, kwargs: Any) -> None:
        if not sites.in_backward():
            key = sites.pick_input(self.name, args, kwargs)
            self.collector.take(self.name, args[key] if isinstance(key, int) else kwargs[key])


def _means(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the selected tokens of each sequence; 0 for none."""
    wide = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    if mask is None:
        return wide.reshape(len(rows), -1, rows.shape[-1]).mean(1)
    chosen = mask.unsqueeze(-1)
    return (wide * chosen).sum(1) / chosen.sum(1).clamp(min=1)


# -- labels --------------------------------------------------------------------------------


def label_keys(labels: Labels) -> tuple[str, ...]:
    """Keys of a batch that hold labels, and are no input of the model."""
    if callable(labels):
        return ()
    return (labels,) if isinstance(labels, str) else tuple(labels)


def read_labels(batch: Any, labels: Labels) -> dict[str, Any]:
    """The labels of a batch by variable.

    Raises
    ------
    LabelError
        They are not there.
    """
    if callable(labels):
        found = labels(batch)
        if not isinstance(found, Mapping):
            raise LabelError(
                f"the function labels= returned {type(found).__name__}; it must return a mapping "
                "of names to labels"
            )
        return dict(found)
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


def _rows_of(
    name: str,
    values: Any,
    shape: tuple[int, ...],
    where: NDArray[Any],
    sequence: NDArray[Any],
) -> Any:
    """Labels of the rows `where`: one per sequence, repeated, or one per token."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
    array = np.asarray(array)
    if array.ndim >= 1 and array.shape == shape and len(shape) > 1:
        chosen = array.reshape(-1)[where]
    elif array.ndim >= 1 and array.shape[0] == shape[0] and array.shape[1:] != shape[1:]:
        if array.ndim == 2 and len(shape) == 2 and array.dtype.kind in "iub":
            _refuse_length(name, array.shape, shape)
        chosen = array[sequence]
    elif array.shape == shape[:1]:
        chosen = array[sequence]
    else:
        _refuse_length(name, array.shape, shape)
    if chosen.dtype.kind in "iu" and (chosen == _IGNORED).any():
        return np.ma.masked_array(chosen, chosen == _IGNORED)
    return chosen


def _refuse_length(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    raise LabelError(
        f"the labels {name!r} have shape {found}, and the site's rows are {shape}; pass one label "
        f"per sequence, ({shape[0]},), or one per token, {shape}"
    )
