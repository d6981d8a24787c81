"""Fits of erasers layer by layer, each on activations with all earlier erasers installed."""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map_only

from splince_fast._runtime.progress import is_interactive
from splince_fast._runtime.warn import warn
from splince_fast.exceptions import InputError, NothingErasedWarning, OnePassWarning, SiteError
from splince_fast.methods.table import Function
from splince_fast.nn import running, sites
from splince_fast.nn.accumulate import free_memory
from splince_fast.nn.collection import Collected, Collector, Labels, label_keys, read_labels
from splince_fast.nn.erasers import Erasers, linear_part
from splince_fast.nn.installed import Installed, install
from splince_fast.nn.sites import Site
from splince_fast.nn.tokens import TokenRule
from splince_fast.projection import Projection

# A fit that takes longer is forecast after its first pass.
_FORECAST_SECONDS = 60.0


class _Batches:
    """Batches that are read once per site, with the number of the batch that is being read."""

    def __init__(self, batches: Iterable[object], labels: Labels) -> None:
        if iter(batches) is batches:
            raise InputError(
                "batches is an iterator, and every site needs its own pass; pass a list, or a "
                "DataLoader without shuffling"
            )
        self.number = 0
        self._batches, self._labels = batches, labels
        self._first_pass: tuple[int, bytes] | None = None  # number of batches, labels of the first

    def __iter__(self) -> Iterator[Any]:
        count, labels = 0, b""
        for batch in self._batches:
            self.number = count
            if not count:
                labels = _pickled(read_labels(batch, self._labels))
                if self._first_pass is not None and labels != self._first_pass[1]:
                    self._raise_changed("other labels in the first batch")
            count += 1
            yield batch
        if self._first_pass is not None and count != self._first_pass[0]:
            self._raise_changed(f"{count} batches instead of {self._first_pass[0]}")
        self._first_pass = (count, labels)

    def first(self) -> Any:
        """Return the first batch."""
        self.number = 0
        for batch in self._batches:
            return batch
        raise InputError("batches is empty; a generator is empty when it is read a second time")

    def _raise_changed(self, change: str) -> NoReturn:
        raise InputError(
            f"batches yielded other data in a later pass than in the first pass: {change}. Every "
            "site must be fitted on the same rows: disable shuffling, or fix its seed"
        )


def _pickled(labels: dict[str, Any]) -> bytes:
    arrays = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in labels.items()}
    return pickle.dumps({name: np.asarray(values).tolist() for name, values in arrays.items()})


def _variables(names: object) -> list[str]:
    """Return the names of variables in ``erase=`` or ``keep=``, and those in joint variables."""
    if isinstance(names, str):
        return [names]
    nested = names if isinstance(names, list | tuple) else ()
    return [name for entry in nested for name in _variables(entry)]


class _Sequence:
    """Blocks of a model that are a plain sequence: each reads the output of the one before it.

    A copy of the output of one block is kept for every batch in which the first pass saw this, and
    the next pass begins there: the blocks up to it return the kept output and do not run. Outputs
    take at most a quarter of the free memory; other batches run from the beginning.
    """

    def __init__(self, model: Module, batches: _Batches, names: Iterable[str]) -> None:
        """Choose the list of blocks with most of the sites `names`; without sites, no blocks."""
        self._batches = batches
        modules = sites.named_modules(model)
        n_inside: dict[str, int] = {}
        for name, module in modules.items():
            if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
                prefix = f"{name}." if name else ""
                n_inside[prefix] = sum(site.startswith(prefix) for site in names)
        self._prefix = max(n_inside, key=lambda prefix: n_inside[prefix], default="")
        parent = modules[self._prefix[:-1]]
        blocks = list(parent.children()) if n_inside.get(self._prefix) else []
        is_scripted = any(isinstance(block, torch.jit.ScriptModule) for block in blocks)
        # A module that occurs twice has no place in a sequence; a scripted one keeps its forward.
        self._blocks = [] if is_scripted or len(blocks) < len(parent._modules) else blocks
        self._keep: int | None = None  # index of the block whose output this pass keeps
        self._is_first_pass = True
        self._ran: list[int] = []  # blocks that ran in this batch
        self._last_output: Tensor | None = None
        self._is_chain = True
        self._is_sequence: set[int] = set()  # numbers of batches
        self.kept: dict[int, tuple[int, Any]] = {}  # by number of a batch: a block and its output
        self._budget = (free_memory(running.device_of(model)) or 0) // 4

    def block_of(self, name: str, side: str) -> int | None:
        """Return the last block whose own output no eraser of the site `name` changes."""
        index = name.removeprefix(self._prefix).partition(".")
        if not name.startswith(self._prefix) or not index[0].isdigit():
            return None
        is_output = not index[2] and side == "output"
        return int(index[0]) - (not is_output)

    @contextmanager
    def passing(self, keep: int | None) -> Iterator[None]:
        """Replace the forward methods of the blocks for a pass that keeps the output of one."""
        self._keep = keep
        originals = [(block, block.__dict__.get("forward")) for block in self._blocks]
        try:
            for i, block in enumerate(self._blocks):
                block.forward = partial(self._run, i, block.forward)
            yield
        finally:
            for block, original in originals:
                del block.forward
                if original is not None:
                    block.forward = original
        self._is_first_pass = False

    def begin_batch(self) -> None:
        self._ran, self._last_output, self._is_chain = [], None, True

    def end_batch(self) -> None:
        """Record whether the blocks of a complete call were a plain sequence."""
        if self._is_chain and self._ran == list(range(len(self._blocks))):
            self._is_sequence.add(self._batches.number)
        else:
            self.kept.pop(self._batches.number, None)

    def forget(self) -> None:
        """Let every pass begin at the beginning."""
        self.kept, self._is_sequence, self._is_first_pass = {}, set(), False

    def _run(self, i: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block, unless the output that is kept for the batch stands for its own."""
        number = self._batches.number
        if number in self.kept and i <= self.kept[number][0]:
            return _copy(self.kept[number][1])
        if self._is_first_pass:
            self._ran.append(i)
            with suppress(SiteError):
                key = sites.pick_input("", args, kwargs)
                value = args[key] if isinstance(key, int) else kwargs[key]
                self._is_chain &= i == 0 or value is self._last_output
        output = forward(*args, **kwargs)
        if self._is_first_pass:
            self._last_output = None
            with suppress(SiteError):
                self._last_output = sites.pick("", output, None)[0]
        if i == self._keep and (self._is_first_pass or number in self._is_sequence):
            self._store(number, i, output)
        return output

    def _store(self, number: int, i: int, output: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(output) if leaf is not None]
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            used = sum(leaf.nbytes for leaf in leaves) if number not in self.kept else 0
            if used <= self._budget:
                self._budget -= used
                self.kept[number] = i, _copy(output)


def _copy(output: Any) -> Any:
    """Return an output with copies of its tensors, which a model may change in place."""
    return tree_map_only(Tensor, torch.clone, output)


def fit_layers(
    model: object,
    batches: Iterable[object],
    at: object,
    method: str | Function | None = None,
    *,
    erase: object,
    keep: object = None,
    labels: Labels | None = None,
    tokens: object = "body",
    apply_to: object = None,
    side: str = "output",
    feature_dim: int = -1,
    output: int | str | None = None,
    heads: int | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    weight: str = "token",
    skip_ids: Iterable[int] = (),
    device: object = "model",
    progress: bool | None = None,
    on_infeasible: str | None = None,
    for_fold: bool = False,
    bias: str = "keep",
    **moments: object,
) -> Erasers:
    """Fit erasers at several sites that remain exact when all are installed.

    In the order in which the sites run, each eraser is fitted on activations with all earlier
    erasers installed. Each site takes one pass over the data. Where the model is a plain sequence
    of modules, a pass ends at its site, and begins at the module where the last one ended, whose
    outputs are kept in at most a quarter of the free memory of the device; other hooks inside of
    the modules before it do not run. Afterwards no eraser is installed.

    Parameters
    ----------
    model, batches, at
        As for :func:`collect`; `batches` is read once per site and must yield the same rows in
        each pass.
    method : str or callable, optional
        As for :func:`splince_fast.erase`.
    erase, keep
        Variables to erase and to keep, as for the method.
    labels, tokens
        As for :func:`collect`; by default `labels` are the variables in `erase` and `keep`.
    apply_to : {"body", "all", "first", "last"} or function, optional
        Tokens that the erasers change during the fit and, by default, in :func:`install`; None
        for the same tokens as `tokens`. The paper fits on ``tokens="last"`` and erases at all
        tokens: the last token at a later site depends on earlier tokens, so that the fit must erase
        earlier tokens, too.
    side, feature_dim, output, heads, forward, weight, skip_ids, device, progress
        As for :func:`collect`.
    on_infeasible : {"raise", "drop"}, optional
        Passed to the method.
    for_fold : bool
        Choose ``apply_to="all"`` and ``bias="drop"``, with which :func:`fold` can merge the erasers
        into layers without a bias.
    bias : {"keep", "drop"}
        "drop" leaves the mean out of every eraser, ``x - left right^T x``, so that :func:`fold` can
        be used for linear layers without a bias. Later sites are fitted with these erasers
        installed.
    **moments
        ``kinds`` and ``joint``, as for :class:`Moments`.

    Returns
    -------
    Erasers
        A mapping from names of sites to projections, in the order in which the sites run.

    Raises
    ------
    InputError
        `batches` can be read only once, or a later pass has another number of batches or other
        labels in the first batch; `apply_to`, `bias` or `for_fold` is invalid.
    InfeasibleError
        As for the method; the message names the site.
    SiteError, NeverCalledError, NotEnoughMemoryError, NonFiniteError, LabelError
        As for :func:`collect`.

    Warns
    -----
    OnePassWarning
        A site runs several times per batch. The eraser is fitted on activations without itself, so
        that it is inexact if later runs depend on the outputs of earlier ones, as in layers with
        shared weights.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> g = torch.Generator().manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    >>> z = torch.arange(80) % 2
    >>> batches = [{"input": torch.randn(80, 6, generator=g) + z[:, None], "z": z}]
    >>> erasers = snn.fit_layers(model, batches, ["0", "2"], sf.leace, erase="z")
    >>> list(erasers), erasers.sequential
    (['0', '2'], True)
    """
    if for_fold:
        if apply_to not in (None, "all"):
            raise InputError(
                f"for_fold=True erases at every token, and apply_to is {apply_to!r}: folded "
                "weights do not depend on positions. Leave one of the two out"
            )
        apply_to, bias = "all", "drop"
    if bias not in ("keep", "drop"):
        raise InputError(f"bias is {bias!r}; it must be 'keep' or 'drop'")
    running.check_inputs(batches, forward)
    inner = running.unwrap(model)
    options = {} if on_infeasible is None else {"on_infeasible": on_infeasible}
    if labels is None:
        labels = list(dict.fromkeys((*_variables(erase), *_variables(keep))))
    repeated = _Batches(batches, labels)
    collector = Collector.of(
        inner, at, labels=labels, tokens=tokens, side=side, feature_dim=feature_dim, output=output,
        heads=heads, weight=weight, skip_ids=skip_ids, device=device, options=moments,
    )  # fmt: skip
    if apply_to is not None:
        TokenRule.of(apply_to)
    passes = _Passes(inner, repeated, collector, forward, progress)
    projections: dict[str, Projection] = {}
    fitted_sites: list[Site] = []
    installed: Installed | None = None
    applied_rule: object = None
    try:
        for name in passes.order:
            collected = passes.collect(name)
            applied_rule = collected.tokens if applied_rule is None else applied_rule
            if apply_to is None and collected.tokens != applied_rule:
                raise SiteError(
                    f"the site {name!r} runs in a call with the token rule {collected.tokens!r}, "
                    f"and earlier sites had {applied_rule!r}: only some calls have tokens. Fit "
                    "such sites separately, or pass tokens='all'"
                )
            erased_before = any(p.rank for p in projections.values())
            ((site, projection),) = collected._fit(method, erase, keep, options, erased_before)
            projections[site.name] = linear_part(projection) if bias == "drop" else projection
            fitted_sites.append(site)
            if projection.rank and name in passes.repeating:
                warn(
                    f"the site {name!r} runs several times per batch. If its later activations "
                    "depend on its earlier ones, as in layers with shared weights, the eraser may "
                    "leave part of the concept when it is installed: call collect with the erasers "
                    "installed to measure it, or choose sites that run once",
                    OnePassWarning,
                )
            spec = replace(collected.recipe, apply_to=apply_to, bias=bias)
            erasers = Erasers(projections, fitted_sites, spec, sequential=True)
            if installed is not None:
                installed.remove()
            with warnings.catch_warnings():  # the fit has warned of erasers of rank 0
                warnings.simplefilter("ignore", NothingErasedWarning)
                installed = install(inner, erasers)
    finally:
        if installed is not None:
            installed.remove()
    return erasers


class _Passes:
    """Passes over the data, one per site.

    The first pass runs every batch to its end, and counts the calls of all sites. Later passes end
    at their site if it ran at most once per batch.
    """

    def __init__(
        self,
        model: Module,
        batches: _Batches,
        collector: Collector,
        forward: Any,
        progress: bool | None,
    ) -> None:
        self._model, self._batches, self._collector = model, batches, collector
        self._forward, self._progress = forward, progress
        self._calls: dict[str, int] = {}  # number of calls of the sites in this batch
        self.repeating: set[str] = set()  # sites that run several times per batch
        self._is_first = True
        self._may_stop = running.may_stop_early(model, forward)
        self._sequence = _Sequence(model, batches, collector.modules if self._may_stop else ())
        with running.evaluating(model), self._counting():
            self._call(batches.first())
        # The sites, in the order in which they run on the first batch.
        self.order = list(dict.fromkeys([*self._calls, *collector.modules]))

    def _call(self, batch: object) -> None:
        inputs = running.batch_to(batch, running.device_of(self._model))
        running.call(self._model, inputs, label_keys(self._collector.labels), self._forward)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the calls of all sites inside a ``with`` block."""

        def count(name: str, *_: object) -> None:
            self._calls[name] = self._calls.get(name, 0) + 1

        with ExitStack() as stack:
            for name, module in self._collector.modules.items():
                stack.callback(module.register_forward_hook(partial(count, name)).remove)
            yield

    def _pass(self) -> Iterator[Any]:
        for batch in self._batches:
            self._calls = {}
            self._sequence.begin_batch()
            yield batch
            if self._is_first:
                self._sequence.end_batch()
                self.repeating |= {name for name, n in self._calls.items() if n > 1}

    def collect(self, name: str) -> Collected:
        """Return the moments of a site."""
        start = time.monotonic()
        may_stop = not self._is_first and self._may_stop and name not in self.repeating
        if not self._is_first and (name in self.repeating or not self._may_begin_later(name)):
            self._sequence.forget()
        modules = {name: self._collector.modules[name]}
        collector = replace(self._collector, modules=modules, stops=may_stop)
        keep = self._sequence.block_of(name, collector.placement.side)
        with self._sequence.passing(keep), self._counting() if self._is_first else nullcontext():
            collected = collector.run(self._model, self._pass(), self._forward, self._progress)
        seconds = (time.monotonic() - start) * len(self.order)
        is_log = self._progress is None and sys.stderr is not None and not is_interactive()
        if self._is_first and is_log and seconds > _FORECAST_SECONDS:
            text = f"fit_layers: at most {seconds / 60:.0f} minutes for {len(self.order)} sites"
            print(text, file=sys.stderr, flush=True)
        self._is_first = False
        return collected

    def _may_begin_later(self, name: str) -> bool:
        """Return whether a site has the same rows if the first batch begins at the kept output."""
        if not self._sequence.kept:
            return True
        batch = self._batches.first()
        self._sequence.begin_batch()
        rows: list[Tensor] = []

        def stop(value: object) -> None:
            rows.append(sites.pick_rows(name, value, self._collector.placement)[0].clone())
            raise running.StopForward

        module, side = self._collector.modules[name], self._collector.placement.side
        with running.evaluating(self._model), ExitStack() as stack:
            stack.callback(sites.add_hook(name, module, side, stop).remove)
            # A module that exchanges values with skipped ones may raise any error.
            with suppress(running.StopForward):
                self._call(batch)
            with suppress(Exception), self._sequence.passing(None):
                self._call(batch)
        return len(rows) == 2 and torch.equal(*rows)
