"""Fits of erasers layer by layer, each on activations with all earlier erasers installed."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from splince_fast._runtime.warn import warn
from splince_fast.exceptions import (
    InputError,
    NothingErasedWarning,
    OnePassWarning,
    SiteError,
    SplinceError,
)
from splince_fast.methods.table import Function
from splince_fast.nn import running, sites
from splince_fast.nn.activation_cache import (
    ActivationCache,
    CachePoint,
    Trace,
    cache_limit,
    checksums,
    choose_cache_points,
    equal_checksums,
)  # fmt: skip
from splince_fast.nn.collected import Collected
from splince_fast.nn.collection import Collector, Labels, label_keys, read_labels
from splince_fast.nn.erasers import Erasers, linear_part
from splince_fast.nn.installed import Installed, install
from splince_fast.nn.spec import Site
from splince_fast.nn.tokens import TokenRule
from splince_fast.projection import Projection


class _RepeatedBatches:
    """Batches that are read once per site.

    Raises InputError if a later pass has another number of batches, or other labels in the first
    batch.
    """

    def __init__(self, batches: Iterable[object], labels: Labels) -> None:
        if iter(batches) is batches:
            raise InputError(
                "batches is an iterator, and every site needs its own pass; pass a list, a "
                "DataLoader without shuffling, or text_batches(...)"
            )
        self._batches, self._labels = batches, labels
        # number of batches, and digest of the labels of the first batch
        self._first_pass: tuple[int, str] | None = None

    def __iter__(self) -> Iterator[Any]:
        count, digest = 0, ""
        for batch in self._batches:
            if not count:
                digest = _digest(read_labels(batch, self._labels))
                if self._first_pass is not None and digest != self._first_pass[1]:
                    self._raise_changed("other labels in the first batch")
            count += 1
            yield batch
        if self._first_pass is not None and count != self._first_pass[0]:
            self._raise_changed(f"{count} batches instead of {self._first_pass[0]}")
        self._first_pass = (count, digest)

    def _raise_changed(self, change: str) -> NoReturn:
        raise InputError(
            f"batches yielded other data in a later pass than in the first pass: {change}. Every "
            "site must be fitted on the same rows: disable shuffling, or fix its seed"
        )


def _digest(labels: dict[str, Any]) -> str:
    """Return a SHA-256 hash of the labels of a batch."""
    digest = hashlib.sha256()
    for name, values in labels.items():
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
        digest.update(name.encode())
        digest.update(pickle.dumps(np.asarray(array).tolist()))
    return digest.hexdigest()


def _variables(names: object) -> list[str]:
    """Return the names of the variables in ``erase=`` or ``keep=``.

    A joint variable, a tuple of names, contributes each of its names.
    """
    if isinstance(names, str):
        return [names]
    nested = names if isinstance(names, list | tuple) else ()
    return [name for entry in nested for name in _variables(entry)]


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
    heads: int | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    weight: str = "token",
    skip_ids: Iterable[int] = (),
    device: object = "model",
    progress: bool | None = None,
    on_infeasible: str | None = None,
    memory: int | None = None,
    bias: str = "keep",
    **moments: object,
) -> Erasers:
    """Fit erasers at several sites that remain exact when all are installed.

    In the order in which the sites run, each eraser is fitted on activations with all earlier
    erasers installed. Each site takes one pass over the data, which ends at this site and, as far
    as `memory` allows, starts at the previous site. Afterwards no eraser is installed.

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
    memory : int, optional
        Memory in bytes for cached outputs of the module at which the next pass starts; by default a
        quarter of the free memory of the device. Batches that do not fit run from the start of the
        model; with 0 all batches do. The result does not depend on `memory`. Other hooks on
        skipped modules receive tensors without values or do not run: pass 0 if the model has such
        hooks, or if its modules exchange values by objects other than inputs, outputs and
        attributes that are tensors, numbers or strings.
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
        labels in the first batch; `apply_to` is invalid, or is missing for ``tokens="mean"``;
        `bias` is invalid.
    InfeasibleError
        As for the method; the message names the site.
    SiteError, NeverCalledError, NotEnoughMemoryError, NonFiniteError, LabelError
        As for :func:`collect`.

    Warns
    -----
    OnePassWarning
        A site runs several times per batch, and later runs depend on the outputs of earlier ones,
        as in layers with shared weights. The eraser is fitted on activations without itself, so
        that it may be inexact when it is installed.

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
    if bias not in ("keep", "drop"):
        raise InputError(f"bias is {bias!r}; it must be 'keep' or 'drop'")
    running.check_inputs(batches, forward)
    inner = running.unwrap(model)
    options = {} if on_infeasible is None else {"on_infeasible": on_infeasible}
    if labels is None:
        labels = list(dict.fromkeys((*_variables(erase), *_variables(keep))))
    repeated = _RepeatedBatches(batches, labels)
    collector = Collector.of(
        inner, at, labels=labels, tokens=tokens, side=side, feature_dim=feature_dim, output=output,
        heads=heads, weight=weight, skip_ids=skip_ids, device=device, options=moments,
    )  # fmt: skip
    if apply_to is not None:
        TokenRule.of(apply_to)
    plan = _plan_passes(inner, batches, collector, forward, memory)
    if tokens == "mean" and apply_to is None:
        raise InputError(
            "tokens='mean' selects no token that an eraser could change; pass apply_to=, the "
            "rule for the tokens to change ('all' is the usual choice), or choose other tokens"
        )
    cache = ActivationCache(plan.cache_limit)

    repeating_batches: dict[str, Any] = {}  # by site, a batch in which the site runs repeatedly

    def watched_batches(name: str) -> Iterator[Any]:
        for batch in cache.number_batches(repeated):
            yield batch
            if collector.early_stop.calls[name] > 1:
                repeating_batches.setdefault(name, batch)

    def collect_site(
        name: str, start_point: CachePoint | None, store_point: CachePoint | None
    ) -> Collected:
        site_collector = replace(collector, modules={name: collector.modules[name]})

        def check_site(value: object) -> None:
            cache.check_site(sites.pick_rows(name, value, collector.placement)[0])

        with ExitStack() as stack:
            if plan.cache_limit:
                hook = sites.add_hook(
                    name, collector.modules[name], collector.placement.side, check_site
                )
                stack.callback(hook.remove)
                stack.enter_context(cache.pass_scope(start_point, store_point))
            return site_collector.run(inner, watched_batches(name), forward, progress)

    projections: dict[str, Projection] = {}
    fitted_sites: list[Site] = []
    installed: Installed | None = None
    start_point: CachePoint | None = None
    applied_rule: object = None
    try:
        for name, store_point in zip(plan.order, [*plan.cache_points, None], strict=True):
            try:
                collected = collect_site(name, start_point, store_point)
            except Exception as error:
                if start_point is None or isinstance(error, SplinceError):
                    raise
                # Code that receives placeholders may raise any error. Without the cache no module
                # is skipped, so that a second error has another cause.
                cache = ActivationCache(0)
                collected = collect_site(name, None, None)
            start_point = store_point
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
            if projection.rank and name in repeating_batches:
                _check_repetition(inner, name, repeating_batches[name], collector, forward)
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


def _check_repetition(
    model: Module, name: str, batch: object, collector: Collector, forward: Any
) -> None:
    """Warn if a site, on a batch in which it runs repeatedly, depends on its own earlier outputs.

    The model runs on the batch twice, the second time with zeros as activations at the site. The
    activations before they are replaced are compared.
    """
    inputs = running.batch_to(batch, running.device_of(model))
    module, placement = collector.modules[name], collector.placement
    runs: list[list[Any]] = []

    def observe(value: object) -> object:
        rows = sites.pick_rows(name, value, placement)[0]
        runs[-1].append(checksums(rows))
        if len(runs) == 1:
            return None
        return sites.replace_rows(name, value, placement, rows.shape[-1], torch.zeros_like)

    with running.evaluating(model), ExitStack() as stack:
        stack.callback(sites.add_hook(name, module, placement.side, observe).remove)
        with suppress(Exception):  # a model may raise any error for activations of zero
            for _ in range(2):
                runs.append([])
                running.call(model, inputs, label_keys(collector.labels), forward)
            if len(runs[0]) == len(runs[1]) and all(map(equal_checksums, *runs)):
                return
    warn(
        f"the site {name!r} runs several times per batch, and its later activations depend on its "
        "earlier ones, as in layers with shared weights. The eraser was fitted on activations "
        "without itself and may leave part of the concept when it is installed: call collect with "
        "the erasers installed to measure it, or choose sites that run once",
        OnePassWarning,
    )


class _PassPlan(NamedTuple):
    """Sites in the order in which they run, and the cache points at which passes start."""

    order: list[str]
    cache_points: list[CachePoint | None]  # one per site but the first
    cache_limit: int


def _plan_passes(
    model: Module, batches: Iterable[Any], collector: Collector, forward: Any, memory: int | None
) -> _PassPlan:
    """Return the plan of all passes; the model runs on the first batch to make it."""
    device = running.device_of(model)
    modules, placement = collector.modules, collector.placement
    no_points: list[CachePoint | None] = [None] * (len(modules) - 1)
    first_batches = list(itertools.islice(batches, 1))
    if not first_batches:  # empty batches: the pass of the first site raises the error
        return _PassPlan(list(modules), no_points, 0)
    batch = running.batch_to(first_batches[0], device)

    def call() -> object:
        return running.call(model, batch, label_keys(collector.labels), forward)

    limit = cache_limit(memory, device) if running.may_stop_early(model, forward) else 0
    with running.evaluating(model):
        trace = Trace.of(model, call, modules, placement)
        collector.early_stop.record(first_batches[0], trace.calls)
        points = no_points
        if limit and len(trace.order) == len(modules) > 1 and not trace.changes_state:
            points = choose_cache_points(model, call, trace, modules, placement, limit)
    order = trace.order + [name for name in modules if name not in trace.order]
    return _PassPlan(order, points, limit)
