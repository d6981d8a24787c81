"""Fits of erasers layer by layer, each on activations with all earlier erasers installed."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from splince_fast._runtime.arguments import warn
from splince_fast.exceptions import InputError, NothingErasedWarning, OnePassWarning, SiteError
from splince_fast.methods.table import Function
from splince_fast.nn import calls
from splince_fast.nn.calls import TokenRule
from splince_fast.nn.collection import (
    MIXED_RULES,
    Collector,
    Labels,
    label_array,
    label_keys,
    read_labels,
)
from splince_fast.nn.eraser import Erasers
from splince_fast.nn.installed import install
from splince_fast.nn.sites import Placement, Site
from splince_fast.projection import Projection

_SEVERAL_CALLS = (
    "the site {!r} runs several times per batch: if its later activations depend on its earlier "
    "ones, the eraser may leave part of the concept. Measure it by collect with the erasers "
    "installed, or choose sites that run once"
)


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

    In the order in which the sites run, each eraser is fitted in a pass over the data with all
    earlier erasers installed. Afterwards no eraser is installed.

    Parameters
    ----------
    model, batches, at
        As for :func:`collect`; `batches` is read once per site and must yield the same rows in
        each pass.
    method, erase, keep
        As for :func:`splince_fast.erase`.
    labels, tokens
        As for :func:`collect`; by default `labels` are the variables in `erase` and `keep`.
    apply_to : {"body", "all", "first", "last"} or function, optional
        Tokens that the erasers change during the fit and, by default, in :func:`install`; None
        for `tokens`. The paper fits on ``tokens="last"`` and erases at all tokens.
    side, feature_dim, output, heads, forward, weight, skip_ids, device, progress
        As for :func:`collect`.
    on_infeasible : {"raise", "drop"}, optional
        Passed to the method.
    for_fold : bool
        Choose ``apply_to="all"`` and ``bias="drop"``, for :func:`fold`.
    bias : {"keep", "drop"}
        "drop" leaves the mean out of every eraser, ``x - left right^T x``.
    **moments
        ``kinds`` and ``joint``, as for :class:`Moments`.

    Returns
    -------
    Erasers
        A mapping from names of sites to projections, in the order in which the sites run.

    Raises
    ------
    InputError
        An argument is invalid, or a later pass has other batches than the first one.
    InfeasibleError, SiteError, NeverCalledError, NotEnoughMemoryError, NonFiniteError, LabelError
        As for the method, and for :func:`collect`; the message names the site.

    Warns
    -----
    OnePassWarning
        A site runs several times per batch: its eraser is inexact if the runs are dependent.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    >>> z = torch.arange(80) % 2
    >>> batches = [{"input": torch.randn(80, 6) + z[:, None], "z": z}]
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
    calls.check_inputs(batches, forward)
    if iter(batches) is batches:
        raise InputError(
            "batches is an iterator, and every site needs its own pass; pass a list, or a "
            "DataLoader without shuffling"
        )
    inner = calls.unwrap(model)
    options = {} if on_infeasible is None else {"on_infeasible": on_infeasible}
    if labels is None:
        labels = list(dict.fromkeys((*_variables(erase), *_variables(keep))))
    placement = Placement(side, feature_dim, output, heads)
    collector = Collector(inner, at, labels, tokens, weight, skip_ids, device, placement, moments)
    if apply_to is not None:
        TokenRule.of(apply_to)
    modules, passes = collector.modules, _Passes(batches, labels)
    may_stop = calls.may_stop_early(inner, forward)
    projections: dict[str, Projection] = {}
    fitted_sites: list[Site] = []
    applied_rule: object = None
    with ExitStack() as counting, ExitStack() as installed:
        for name, module in modules.items():
            hook = module.register_forward_hook(partial(passes.count, name))
            counting.callback(hook.remove)
        with calls.evaluating(inner):
            for batch in batches:  # a call on the first batch determines the order of the sites
                inputs = calls.batch_to(batch, calls.device_of(inner))
                calls.call(inner, inputs, label_keys(labels), forward)
                break
        for name in dict.fromkeys([*passes.calls, *modules]):
            stops = may_stop and passes.first is not None and name not in passes.repeating
            collector.start({name: modules[name]}, stops)
            collected = collector.run(inner, passes, forward, progress)
            applied_rule = applied_rule or collected.tokens
            if apply_to is None and collected.tokens != applied_rule:
                raise SiteError(MIXED_RULES.format(name, collected.tokens, applied_rule))
            erased_before = any(p.rank for p in projections.values())
            ((site, projection),) = collected._fit(method, erase, keep, options, erased_before)
            if bias == "drop":
                zero = np.zeros(projection.n_features)
                projection = Projection(
                    projection.left, projection.right, zero, method=projection.method,
                    report=projection.report,
                )  # fmt: skip
            projections[site.name] = projection
            fitted_sites.append(site)
            if projection.rank and name in passes.repeating:
                warn(_SEVERAL_CALLS.format(name), OnePassWarning)
            spec = replace(collected.recipe, apply_to=apply_to, bias=bias)
            erasers = Erasers(projections, fitted_sites, spec, sequential=True)
            installed.close()
            with warnings.catch_warnings():  # the fit has warned of erasers of rank 0
                warnings.simplefilter("ignore", NothingErasedWarning)
                installed.callback(install(inner, erasers).remove)
    return erasers


def _variables(names: object) -> list[str]:
    """Return the names of variables in ``erase=`` or ``keep=``, and those in joint variables."""
    if isinstance(names, str):
        return [names]
    nested = names if isinstance(names, list | tuple) else ()
    return [name for entry in nested for name in _variables(entry)]


class _Passes:
    """Batches that are read once per site, and the sites that run several times in one of them."""

    def __init__(self, batches: Iterable[Any], labels: Labels) -> None:
        self._batches, self._labels = batches, labels
        self.calls: Counter[str] = Counter()  # of the sites in the current batch
        self.repeating: set[str] = set()
        # Number of batches and labels of the first batch, in the first pass.
        self.first: tuple[int, bytes] | None = None

    def count(self, name: str, *_: object) -> None:
        self.calls[name] += 1

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; raise InputError if they differ from those of the first pass."""
        n, labels = 0, b""
        for n, batch in enumerate(self._batches, 1):
            if n == 1:
                columns = read_labels(batch, self._labels)
                labels = pickle.dumps({k: label_array(v).tolist() for k, v in columns.items()})
            self.calls.clear()
            yield batch
            self.repeating |= {name for name, calls in self.calls.items() if calls > 1}
        self.first = self.first or (n, labels)
        if self.first != (n, labels):
            change = f"{n} batches instead of {self.first[0]}"
            raise InputError(
                "batches yielded other data in a later pass than in the first pass: "
                f"{change if n != self.first[0] else 'other labels in the first batch'}. Every "
                "site must be fitted on the same rows: disable shuffling, or fix its seed"
            )
