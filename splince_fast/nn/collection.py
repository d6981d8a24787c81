"""Moments of activations at many sites of a model, in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from splince_fast._runtime.keywords import as_names, described_type
from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import InputError, LabelError, NeverCalledError, SiteError
from splince_fast.labels import encode
from splince_fast.labels.names import listed
from splince_fast.moments import Moments
from splince_fast.moments.block import Workspace
from splince_fast.moments.parameters import Parameters
from splince_fast.nn import running, sites
from splince_fast.nn.accumulate import RowLabels, SiteSums, accumulation_device
from splince_fast.nn.call_selections import CallSelections
from splince_fast.nn.collected import Collected
from splince_fast.nn.early_stop import EarlyStop
from splince_fast.nn.memory import check_memory, to_device
from splince_fast.nn.spec import CollectionSpec, Placement, Site
from splince_fast.nn.tokens import MISSING_LABEL, Selection, TokenRule

Labels = str | list[str] | tuple[str, ...] | Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class SelectedRows:
    """Indices and labels of the rows that one call selects, shared by all sites of equal shape."""

    labels: RowLabels
    index: Tensor | None  # indices of the rows, on the host; None for all rows
    _copies: dict[torch.device, Tensor] = field(default_factory=dict)

    def select(self, flat: Tensor) -> Tensor:
        """Return the selected rows of a tensor (n, d)."""
        if self.index is None:
            return flat
        index = self._copies.get(flat.device)
        if index is None:
            index = self._copies[flat.device] = to_device(self.index, flat.device)
        return flat.index_select(0, index)


@dataclass(eq=False)
class Collector:
    """Hooks of one pass over the data, and the sums that the hooks accumulate.

    Attributes
    ----------
    modules : mapping of str to Module
        Modules by site.
    token_rule, placement, labels, parameters
        Validated arguments of :func:`collect`.
    by_sequence : bool
        Whether the rows of each sequence have total weight 1.
    device : torch.device or None
        Device of the sums; None for the device of the activations.
    early_stop : EarlyStop
        Decision, per batch, whether :meth:`run` ends the call after the last site.
    sums : dict of str to SiteSums
        Sums by site or head, in the order of the first calls.
    calls, widths : dict of str to int
        Number of calls and number of features, by site.
    applied_rule : str or None
        Token rule that was applied; None before the first call.
    n_batches, n_sequences : int
        Number of batches, and of sequences with selected tokens.
    """

    modules: Mapping[str, Module]
    token_rule: TokenRule
    placement: Placement
    labels: Labels
    by_sequence: bool
    device: torch.device | None
    parameters: Parameters
    early_stop: EarlyStop

    def __post_init__(self) -> None:
        self.selections = CallSelections(self.token_rule)
        self.sums: dict[str, SiteSums] = {}
        self.calls = dict.fromkeys(self.modules, 0)
        self.widths: dict[str, int] = {}
        self.applied_rule: str | None = None
        self.n_batches = self.n_sequences = 0
        self._work = Workspace()
        self._model_may_stop = False  # whether the model allows calls to end after the last site
        # The attributes below are the state of the current batch.
        self._batch_labels: dict[str, object] = {}
        self._selected: dict[object, SelectedRows] = {}  # by mask and shape of the rows
        self._counted = np.zeros(0, bool)  # whether a sequence has selected tokens
        self._called_sites: set[str] = set()
        self._may_stop = self._stopped = False

    @classmethod
    def of(
        cls,
        model: Module,
        at: Any,
        *,
        labels: Labels,
        tokens: object,
        side: str,
        feature_dim: int,
        output: int | str | None,
        heads: object,
        weight: str,
        skip_ids: Iterable[int],
        device: object,
        options: Mapping[str, Any],
    ) -> Collector:
        """Return a collector for the arguments of :func:`collect`; raise InputError if invalid.

        `options` are the keyword arguments of :class:`Moments`.
        """
        unknown = set(options) - {"kinds", "joint"}
        if unknown:
            raise InputError(
                f"unknown arguments {listed(sorted(unknown))}; of the parameters of Moments, only "
                "kinds and joint can be passed here"
            )
        if not (callable(labels) or isinstance(labels, Iterable)):
            raise InputError(
                f"labels is {labels!r}; it must be a key of the batches, a list of keys, or a "
                "function"
            )
        if weight not in ("token", "sequence"):
            raise InputError(f"weight is {weight!r}; it must be 'token' or 'sequence'")
        modules = sites.find(model, at)
        return cls(
            modules=modules,
            token_rule=TokenRule.of(
                None if tokens == "body" else tokens, skip_ids, allow_mean=True
            ),
            placement=Placement.of(side, feature_dim, output, sites.number_of_heads(model, heads)),
            labels=labels,
            by_sequence=weight == "sequence",
            device=None if device == "model" else _device(device),
            parameters=Parameters.of(None, options.get("kinds"), options.get("joint") or ()),
            early_stop=EarlyStop(modules),
        )

    def run(
        self, model: Module, batches: Iterable[Any], forward: Any, progress: bool | None
    ) -> Collected:
        """Run a model on all batches, and return the moments of all sites."""
        running.check_inputs(batches, forward)
        device, keys = running.device_of(model), label_keys(self.labels)
        self._model_may_stop = running.may_stop_early(model, forward)
        with (
            self.attached(model),
            running.evaluating(model),
            Progress(unit="sequences", show=progress) as bar,
        ):
            for batch in batches:
                n_before = self.n_sequences
                with self.batch_scope(batch):
                    running.call(model, running.batch_to(batch, device), keys, forward)
                bar.advance(self.n_sequences - n_before)
        if not self.n_batches:
            raise InputError("batches is empty; a generator is empty when it is read a second time")
        return self._result()

    @contextmanager
    def attached(self, model: Module) -> Iterator[None]:
        """Attach all hooks inside a ``with`` block."""
        with ExitStack() as stack:
            for name, module in self.modules.items():
                add = partial(self.add, name)
                stack.callback(sites.add_hook(name, module, self.placement.side, add).remove)
            # The selections attach their hooks last, because hooks run in order: if a module that
            # takes tokens is a site, the hook of the site must run before the hook that ends the
            # selection of the call.
            stack.callback(self.selections.detach)
            self.selections.attach(model, self.modules)
            stack.enter_context(self.early_stop.counting())
            yield

    @contextmanager
    def batch_scope(self, batch: object) -> Iterator[None]:
        """Prepare the collector for a batch; the model runs on it inside the ``with`` block."""
        self._batch_labels = read_labels(batch, self.labels)
        self._selected, self._called_sites, self._stopped = {}, set(), False
        covered = self.early_stop.start_batch(batch, self.modules)
        self._may_stop = self._model_may_stop and covered
        with suppress(running.StopForward):
            yield
        if not self._stopped:
            self.early_stop.record(batch, self.early_stop.calls)
        self._selected = {}
        self.n_batches += 1

    def add(self, name: str, value: object) -> None:
        """Add the selected rows of a site; `value` is the output or the input of its module."""
        if self._stopped or sites.in_backward():
            return
        rows = sites.pick_rows(name, value, self.placement)[0].detach()
        self.calls[name] += 1
        selection = self.selections.current(name)
        if self.applied_rule is None:
            self.applied_rule = selection.rule
        elif self.applied_rule != selection.rule:
            raise SiteError(
                f"the site {name!r} runs in a call with the token rule {selection.rule!r}, and "
                f"earlier calls had {self.applied_rule!r}: only some calls have tokens. Collect at "
                "such sites one by one, or pass tokens='all'"
            )
        flat, labels = self._select(name, rows, selection)
        if labels.n:
            keys = self._keys(name)
            for key, head_rows in zip(keys, flat.chunk(len(keys), dim=1), strict=True):
                self._sums_of(key, head_rows).add(head_rows, labels)
        self.widths[name] = int(rows.shape[-1])
        self._called_sites.add(name)
        if self._may_stop and len(self._called_sites) == len(self.modules):
            self._stopped = True
            raise running.StopForward

    def _select(self, name: str, rows: Tensor, selection: Selection) -> tuple[Tensor, RowLabels]:
        """Return the selected rows (n, d) of a tensor (..., d), and the labels of these rows."""
        mask = selection.mask_for(name, rows)
        token_mask = selection.mask
        if mask is not None and token_mask is not None and mask.ndim < token_mask.ndim:
            rows, mask = rows.unflatten(0, token_mask.shape), mask.view(token_mask.shape)
        is_mean = selection.rule == "mean"
        key = (None if mask is None else selection, tuple(rows.shape[:-1]))
        selected = self._selected.get(key)
        if selected is None:
            selected = self._index_rows(tuple(rows.shape[:-1]), mask, selection)
            self._count_sequences(len(rows) if rows.ndim > 1 else 1, selected)
            self._selected[key] = selected
        flat = _sequence_means(rows, mask) if is_mean else rows.reshape(-1, rows.shape[-1])
        return selected.select(flat), selected.labels

    def _count_sequences(self, n_sequences: int, selected: SelectedRows) -> None:
        """Count the sequences of the batch that had no selected tokens in earlier calls.

        Sites with another number of sequences than the first site of the batch do not count.
        """
        if not self._selected:
            self._counted = np.zeros(n_sequences, bool)
        if len(self._counted) == n_sequences:
            before = np.count_nonzero(self._counted)
            self._counted[selected.labels.sequence_index] = True
            self.n_sequences += int(np.count_nonzero(self._counted) - before)

    def _index_rows(
        self, shape: tuple[int, ...], mask: Tensor | None, selection: Selection
    ) -> SelectedRows:
        """Return indices and labels of the selected rows of a tensor with the given `shape`.

        For the rule "mean", the rows are the means of the sequences: one row per sequence.
        """
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
        return SelectedRows(labels, index)

    def _keys(self, name: str) -> list[str]:
        """Return the keys of a site in `sums`: the name of the site, or one key per head."""
        heads = self.placement.heads
        return [name] if heads is None else [f"{name}[{i}]" for i in range(heads)]

    def _sums_of(self, name: str, rows: Tensor) -> SiteSums:
        """Return the sums of a site or head; create them on first use."""
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
        never_called = [name for name, count in self.calls.items() if not count]
        if never_called:
            raise NeverCalledError(
                f"the model ran on {self.n_batches} batches, but the sites {listed(never_called)} "
                "never ran. Likely causes: other code reads their weights without calling them, "
                "or the batches take another path through the model. Choose the modules that "
                "contain these sites"
            )

    def _result(self) -> Collected:
        """Return the moments of all sites, and remove the sums."""
        self.check_called()
        collected_sites, moments = [], {}
        for name, width in self.widths.items():
            keys, kind = self._keys(name), type(self.modules[name]).__name__
            for key in keys:
                sums = self.sums.pop(key, None)
                moments[key] = (  # a site without selected tokens has no sums
                    Moments(kinds=self.parameters.kinds, joint=self.parameters.joint)
                    if sums is None
                    else sums.result()
                )
                collected_sites.append(Site(key, kind, width // len(keys), self.calls[name]))
        rule = self.token_rule.rule
        spec = CollectionSpec(
            self.placement,
            rule if callable(rule) else self.applied_rule,
            self.token_rule.skip_ids,
            "sequence" if self.by_sequence else "token",
        )
        return Collected(moments, collected_sites, spec, self.n_sequences)


def _device(device: Any) -> torch.device:
    """Return a device; raise InputError if it is invalid, or if torch cannot use it."""
    try:
        valid = torch.device(device)
        torch.empty(0, device=valid)
    except (TypeError, RuntimeError, AssertionError) as error:
        raise InputError(
            f"device is {device!r}; it must be 'model', or a torch.device that the installed torch "
            "supports on this machine"
        ) from error
    return valid


def _sequence_means(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the selected tokens of each sequence; 0 if no token is selected."""
    values = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    if mask is None:
        return values.reshape(len(rows), -1, rows.shape[-1]).mean(1)
    selected = mask.unsqueeze(-1)
    return values.masked_fill(~selected, 0).sum(1) / selected.sum(1).clamp(min=1)


# -- labels --------------------------------------------------------------------------------


def label_keys(labels: Labels) -> tuple[str, ...]:
    """Return the keys of a batch that hold labels and are not passed to the model."""
    if callable(labels):
        return ()
    return as_names(labels, "labels")


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
    keys = label_keys(labels)
    if keys and isinstance(batch, tuple | list) and len(batch) == 2:  # (inputs, labels)
        if len(keys) == 1 and not isinstance(batch[1], Mapping):
            return {keys[0]: batch[1]}
        batch = batch[1]
    if keys and not isinstance(batch, Mapping):
        raise LabelError(
            f"labels= names {listed(keys)}, but a batch, or the second entry of a pair, is "
            f"{described_type(batch)}; pass batches that are mappings, or pairs (inputs, labels) "
            "whose second entry is a mapping of names to labels, or for a single name the labels; "
            "or pass a function of the batch that returns such a mapping"
        )
    missing = [key for key in keys if key not in batch]
    if missing:
        raise LabelError(
            f"the batch has no labels {listed(missing)}; it has the keys {listed(batch)}"
        )
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
    per_token = len(shape) > 1 and array.shape == shape
    per_sequence = array.shape == shape[:1] or (
        array.ndim >= 1
        and array.shape[0] == shape[0]
        and array.shape[1:] != shape[1:]
        # An integer matrix with another number of columns than tokens is an error, because it is
        # most likely meant as one label per token.
        and not (array.ndim == 2 and len(shape) == 2 and array.dtype.kind in "iub")
    )
    if not per_token and not per_sequence:
        raise LabelError(
            f"the labels {name!r} have shape {array.shape}, and the rows of the site {shape}; pass "
            f"one label per sequence, ({shape[0]},), or one per token, {shape}"
        )
    column = array.reshape(-1)[positions] if per_token else array[sequence]
    if column.dtype.kind in "iu" and (column == MISSING_LABEL).any():
        return np.ma.masked_array(column, column == MISSING_LABEL)
    return column


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
    heads: int | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    weight: str = "token",
    skip_ids: Iterable[int] = (),
    device: object = "model",
    progress: bool | None = None,
    **moments: object,
) -> Collected:
    """Run a model over data once and accumulate the moments of activations at all sites.

    Activations are not stored: the state of a site is a d x d float64 matrix. The model
    runs in evaluation mode; its mode and hooks are restored afterwards.

    Parameters
    ----------
    model : torch.nn.Module
        The model; installed erasers stay active. Compiled models run eagerly.
    batches : iterable
        Mappings of arguments (keys that are not parameters of the model's forward method are left
        out), pairs (inputs, labels), tuples of positional arguments, or single arguments. Tensors
        are copied to the model's device.
    at : str, Module, or a list of them
        Sites: dotted names, patterns (see :func:`install`), or modules.
    labels : str, list of str, or function
        Keys of a batch, or a function from a batch to a mapping of names to labels. In a pair
        (inputs, labels) the second entry is a mapping with these keys, or, for a single key, the
        labels. Labels have shape (B,), one per sequence, or (B, T), one per token. The integer -100
        is a missing label. Strings, integers and bools are classes, floats are continuous.
    tokens : {"body", "all", "first", "last", "mean"} or function
        Rows of a tensor (B, T, d) to accumulate. "body": attended tokens except the first token of
        each sequence and `skip_ids`; "all": attended tokens; "first", "last": the first or the last
        attended token; "mean": one row per sequence, the mean over its attended tokens; or a
        function from the arguments of the call to a bool tensor (B, T). In a call without tokens
        "body" selects all rows. At a site without the tokens of the call, such as a pooled state or
        a module of a vision tower, "all" selects all rows. Tensors (T, B, d) are an error, but
        cannot be told apart if T equals B. Of several sequences packed into one row, "first" and
        "body" see each first token if the call has position_ids or a mask (B, queries, keys), and
        "last" and "mean" see one sequence.
    side : {"output", "input"}
        Whether to use the output or the input of the module.
    feature_dim : int
        Axis of the features: 1 for convolutional maps (B, C, H, W).
    output : int or str, optional
        Element of an output that is a tuple or a mapping; by default the first element, or
        ``last_hidden_state``.
    heads : int or str, optional
        Number of attention heads, which are equal parts of the last axis or the third axis of a
        tensor (batch, token, heads, width). A string names the attribute of the model's
        configuration that holds the number: "num_attention_heads" for ``side="input"`` of an output
        projection, "num_key_value_heads" for outputs of ``k_proj`` and ``v_proj``. Every head has
        its own moments, under the name ``site[head]``, and its own eraser.
    forward : function, optional
        ``forward(model, batch)`` runs the model. By default the model is called, and a call ends
        after the last site if batches of at least the same sizes ran each site once; pass a
        function if the number of calls of a site depends on values instead of sizes.
    weight : {"token", "sequence"}
        "token": each row has weight 1; "sequence": the rows of each sequence have total weight 1 in
        each call of a site. In a batch that runs a site once, each sequence has weight 1; in steps
        of one token, each token has.
    skip_ids : iterable of int
        Ids of tokens that "body" leaves out, such as special tokens.
    device : "model" or torch.device
        Device of the states; "model" for the device of the activations.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.
    **moments
        ``kinds`` and ``joint``, as for :class:`Moments`.

    Returns
    -------
    Collected
        A mapping from names of sites to :class:`Moments`, in the order in which the sites run.

    Raises
    ------
    SiteError
        A name matches no module, a module is never called, or its output holds no tensor.
    NeverCalledError
        A site did not run.
    NotEnoughMemoryError
        The states do not fit in memory; raised before the first state is created.
    NonFiniteError
        An activation is NaN or infinite; the message names site, batch and row.
    LabelError
        Labels are missing or have the wrong length.

    Examples
    --------
    >>> import numpy as np, torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5))
    >>> batches = [{"input": torch.randn(50, 3), "z": torch.arange(50) % 2} for _ in range(4)]
    >>> collected = snn.collect(model, batches, ["1", "2"], labels=["z"])
    >>> list(collected), collected["2"].n_rows
    (['1', '2'], 200)
    """
    inner = running.unwrap(model)
    collector = Collector.of(
        inner, at, labels=labels, tokens=tokens, side=side, feature_dim=feature_dim, output=output,
        heads=heads, weight=weight, skip_ids=skip_ids, device=device, options=moments,
    )  # fmt: skip
    return collector.run(inner, batches, forward, progress)
