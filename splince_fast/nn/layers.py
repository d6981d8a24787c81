"""Erasers that hold together: fitted layer by layer, each behind all earlier ones."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from splince_fast.exceptions import InputError, NonFiniteError, SiteError
from splince_fast.methods.table import Function
from splince_fast.nn import sites
from splince_fast.nn.activation_cache import ActivationCache, CachePoint, Trace, choose, limit_of
from splince_fast.nn.collected import Collected
from splince_fast.nn.collection import (
    collector_for,
    first_batches,
    may_stop,
    moved,
    quiet,
    run,
    unwrapped,
)
from splince_fast.nn.collector import Collector, Labels, label_keys, read_labels
from splince_fast.nn.erasers import Erasers, linear_part
from splince_fast.nn.installed import Installed, install
from splince_fast.nn.recipe import Placement, Recipe, Site
from splince_fast.nn.tokens import Tokens
from splince_fast.projection import Projection


class _Repeated:
    """Batches that are read once per site and must be the same each time."""

    def __init__(self, batches: Iterable[Any], labels: Labels) -> None:
        if iter(batches) is batches:
            raise InputError(
                "batches is an iterator, and every site needs its own pass; pass a list, a "
                "DataLoader without shuffling, or text_batches(...)"
            )
        self._batches, self._labels = batches, labels
        self._known: tuple[int, str] | None = None

    def __iter__(self) -> Iterator[Any]:
        count, first = 0, ""
        for batch in self._batches:
            if not count:
                first = _digest(read_labels(batch, self._labels))
                if self._known is not None and first != self._known[1]:
                    self._refuse("the labels of the first batch are others")
            count += 1
            yield batch
        if self._known is not None and count != self._known[0]:
            self._refuse(f"there are {count} batches after {self._known[0]}")
        self._known = (count, first)

    def _refuse(self, what: str) -> None:
        raise InputError(
            f"batches gave other data in the second pass: {what}; every site must be fitted on "
            "the same rows: switch shuffling off, or fix its seed"
        )


def _digest(labels: dict[str, Any]) -> str:
    """A hash of labels."""
    digest = hashlib.sha256()
    for name, values in labels.items():
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
        digest.update(name.encode())
        digest.update(pickle.dumps(np.asarray(array).tolist()))
    return digest.hexdigest()


def _named(asked: Any) -> list[str]:
    """Variables that an argument of a method names, those of joint cells one by one."""
    if isinstance(asked, str):
        return [asked]
    nested = asked if isinstance(asked, list | tuple) else ()
    return [name for one in nested for name in _named(one)]


def fit_layers(
    model: Any,
    batches: Iterable[Any],
    at: Any,
    method: str | Function | None = None,
    *,
    erase: Any,
    keep: Any = None,
    labels: Labels | None = None,
    tokens: Any = "body",
    apply_to: Any = None,
    side: str = "output",
    feature_dim: int = -1,
    output: int | str | None = None,
    heads: int | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    weight: str = "token",
    skip_ids: Iterable[int] = (),
    device: Any = "model",
    progress: bool | None = None,
    on_infeasible: str | None = None,
    memory: int | None = None,
    bias: str = "keep",
    **moments: Any,
) -> Erasers:
    """Fit erasers at several sites that hold when all are installed.

    In the order in which the sites run, each is fitted on activations behind all earlier erasers:
    one pass per site, which ends at that site and begins, as far as `memory` allows, at the one
    before. Nothing stays installed.

    Parameters
    ----------
    model, batches, at
        As for :func:`collect`; `batches` is read once per site and must give the same rows each
        time.
    method : str or callable, optional
        As for :func:`splince_fast.erase`.
    erase, keep
        Variables, as the method takes them.
    labels, tokens
        As for :func:`collect`; without `labels`, the variables that `erase` and `keep` name.
    apply_to : {"body", "all", "first", "last"} or function, optional
        Tokens that the erasers change, during the fit and by default in :func:`install`; those
        of the fit if None. The paper fits on ``tokens="last"`` and erases at all tokens: at a
        later site the last token has read the earlier ones, so the fit must see them erased.
    side, feature_dim, output, heads, forward, weight, skip_ids, device, progress
        As for :func:`collect`.
    on_infeasible : {"raise", "drop"}, optional
        Passed to the method.
    memory : int, optional
        Bytes that outputs of one module may take between two passes, so that the next pass need
        not run what lies before it; by default a quarter of what is free on the device. Batches
        beyond it run from the beginning, with 0 all of them. It changes the time, not the result,
        but hooks of others on modules that are skipped see NaN, or do not run: pass 0 for those.
    bias : {"keep", "drop"}
        "drop" leaves the mean out of every eraser, ``x - left right^T x``, so that :func:`fold`
        needs no bias to hold it: for models whose linear layers have none. Each site is then
        fitted behind sites that drop their mean.
    **moments
        kinds and joint, as for :class:`Moments`.

    Returns
    -------
    Erasers
        A mapping from names of sites to projections, in running order.

    Raises
    ------
    InputError
        `batches` can be read only once, or gives other rows the second time; `apply_to` is no
        rule, or is missing for ``tokens="mean"``; `bias` is something else.
    InfeasibleError
        As the method raises it; the text names the site.
    SiteError, NeverCalledError, NotEnoughMemoryError, NonFiniteError, LabelError
        As :func:`collect` raises them.

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
        raise InputError(f"bias is {bias!r}; it is 'keep' or 'drop'")
    inner = unwrapped(model)
    placement = Placement.of(side, feature_dim, output, sites.number_of_heads(inner, heads))
    options = {} if on_infeasible is None else {"on_infeasible": on_infeasible}
    named = list(dict.fromkeys((*_named(erase), *_named(keep))))
    variables: Labels = named if labels is None else labels
    repeated = _Repeated(batches, variables)

    def collector(where: Any) -> Collector:
        return collector_for(
            inner, where, labels=variables, tokens=tokens, placement=placement, weight=weight,
            skip_ids=skip_ids, device=device, options=moments,
        )  # fmt: skip

    whole = collector(at)
    if apply_to is not None:
        Tokens.of(apply_to, whole.spec.skip_ids)
    order, once, points, limit = _plan(inner, batches, whole, forward, memory)
    recipe = Recipe(placement, tokens, whole.spec.skip_ids, weight, apply_to, bias)
    if tokens == "mean" and apply_to is None:
        raise InputError(
            "tokens='mean' selects no token that an eraser could change; say by apply_to= which "
            "tokens are changed ('all' is the usual choice), or choose other tokens"
        )
    fitted: dict[str, Projection] = {}
    made: list[Site] = []
    earlier: Installed | None = None
    kept = ActivationCache(limit)
    begin: CachePoint | None = None
    rule: Any = None

    def collected(name: str, begin: CachePoint | None, behind: CachePoint | None) -> Collected:
        at_site = collector(whole.chosen[name])
        at_site.once = once[name]
        with kept.one_pass(begin, behind):
            return run(inner, kept.numbered(repeated), at_site, forward, progress, recipe)

    try:
        for name, behind in zip(order, [*points, None], strict=True):
            try:
                found = collected(name, begin, behind)
            except NonFiniteError:
                if begin is None:
                    raise
                # A batch read what was skipped on it, or it is the model's own doing.
                kept = ActivationCache(0)
                found = collected(name, None, None)
            begin = behind
            rule = found.tokens if rule is None else rule
            if apply_to is None and found.tokens != rule:
                raise SiteError(
                    f"the site {name!r} runs in a call whose tokens are {found.tokens!r}, "
                    f"and at earlier sites they were {rule!r}: only some calls have "
                    "tokens. Fit such sites apart, or pass tokens='all'"
                )
            ((site, one),) = found._fitted(method, erase, keep, options)
            fitted[site.name] = linear_part(one) if bias == "drop" else one
            made.append(site)
            erasers = Erasers(fitted, made, found.recipe, sequential=True)
            if earlier is not None:
                earlier.remove()
            earlier = install(inner, erasers)
    finally:
        if earlier is not None:
            earlier.remove()
    return erasers


def _plan(
    model: Any, batches: Iterable[Any], collector: Collector, forward: Any, memory: int | None
) -> tuple[list[str], dict[str, bool], list[CachePoint | None], int]:
    """What the first batch tells.

    Returns
    -------
    order : list of str
        Sites in the order in which they run.
    once : dict of str to bool
        Whether each ran once.
    points : list of CachePoint or None
        Between two sites, where the pass to the second one begins.
    limit : int
        Bytes that may be kept between passes.
    """
    device = sites.device_of(model)
    chosen, placement = collector.chosen, collector.placement
    first = first_batches(batches, 1)
    if not first:  # the pass itself says so
        return list(chosen), dict.fromkeys(chosen, False), [None] * (len(chosen) - 1), 0
    batch = moved(first[0], device)

    def call() -> Any:
        return sites.call(model, batch, label_keys(collector.labels), forward)

    limit = limit_of(memory, device) if may_stop(model, forward) else 0
    with quiet(model):
        trace = Trace.of(model, call, chosen, placement)
        points: list[CachePoint | None] = [None] * (len(chosen) - 1)
        if limit and len(trace.order) == len(chosen) > 1:
            points = choose(model, call, trace, chosen, placement, limit)
    order = trace.order + [name for name in chosen if name not in trace.order]
    return order, {name: n == 1 for name, n in trace.calls.items()}, points, limit
