"""Moments of activations at many sites of a model, in one pass over the data."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import InputError
from splince_fast.moments.parameters import Parameters
from splince_fast.nn import sites
from splince_fast.nn.collected import Collected
from splince_fast.nn.collector import Collector, Labels, label_keys
from splince_fast.nn.recipe import Placement, Recipe
from splince_fast.nn.tokens import Tokens

Module = Any

_FSDP = ("FSDPModule", "FullyShardedDataParallel")


def moved(batch: Any, device: Any) -> Any:
    """A batch with its tensors on a device; the host does not wait for copies to a GPU."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(moved(value, device) for value in batch)
    return batch


@contextmanager
def quiet(model: Module) -> Iterator[None]:
    """Evaluation mode, no gradients, nothing compiled; all restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # compiled code would not run the hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def unwrapped(model: Any) -> Module:
    """The model whose hooks run: inside torch.compile and nn.DataParallel."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, torch.nn.DataParallel) else model


def may_stop(model: Module, forward: Any) -> bool:
    """Whether a pass may end behind the last site: nothing must wait for its end."""
    if forward is not None:
        return False
    return not any(
        hasattr(module, "_hf_hook") or any(kind.__name__ in _FSDP for kind in type(module).__mro__)
        for module in model.modules()
    )


def run(
    model: Module,
    batches: Iterable[Any],
    collector: Collector,
    forward: Any,
    progress: bool | None,
    recipe: Recipe,
) -> Collected:
    """One pass with the hooks of a collector; they are gone afterwards."""
    device = sites.device_of(model)
    keys = label_keys(collector.labels)
    collector.may_stop = may_stop(model, forward)
    handles = collector.attach(model)
    try:
        with quiet(model), Progress(unit="sequences", show=progress) as bar:
            for batch in batches:
                seen = collector.n_sequences
                with collector.one_batch(batch):
                    sites.call(model, moved(batch, device), keys, forward)
                bar.advance(collector.n_sequences - seen, 0)
    finally:
        for handle in handles:
            handle.remove()
    if not collector.batch:
        raise InputError(
            "batches gave nothing; a generator that was used up gives nothing the second time"
        )
    rule = collector.spec.rule if callable(collector.spec.rule) else collector.rule
    return collector.result(replace(recipe, tokens=rule))


def collector_for(
    model: Module,
    at: Any,
    *,
    labels: Labels,
    tokens: Any,
    placement: Placement,
    weight: str,
    skip_ids: Iterable[int],
    device: Any,
    options: Mapping[str, Any],
) -> Collector:
    """A collector from checked arguments.

    Raises
    ------
    SiteError, InputError
        An argument is wrong.
    """
    unknown = set(options) - {"kinds", "joint"}
    if unknown:
        raise InputError(
            f"collect takes no {sorted(unknown)}; of the parameters of Moments it knows kinds "
            "and joint"
        )
    if weight not in ("token", "sequence"):
        raise InputError(f"weight is {weight!r}; it is 'token' or 'sequence'")
    spec = Tokens.of(None if tokens == "body" else tokens, tuple(skip_ids), mean=True)
    parameters = Parameters.of(None, options.get("kinds"), options.get("joint") or (), False)
    home = None if device == "model" else torch.device(device)
    chosen = sites.find(model, at)
    return Collector(chosen, spec, placement, labels, weight, home, parameters)


def collect(
    model: Any,
    batches: Iterable[Any],
    at: Any,
    *,
    labels: Labels,
    tokens: Any = "body",
    side: str = "output",
    feature_dim: int = -1,
    output: int | str | None = None,
    heads: int | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    weight: str = "token",
    skip_ids: Iterable[int] = (),
    device: Any = "model",
    progress: bool | None = None,
    **moments: Any,
) -> Collected:
    """Run a model over data once and accumulate the moments of activations at all sites.

    Activations are never stored: a site keeps a float64 state of d x d numbers. The model is in
    evaluation mode meanwhile, and everything is restored afterwards.

    Parameters
    ----------
    model : torch.nn.Module
        Run as it is, erasers that are installed included; compiled models run eagerly.
    batches : iterable
        Mappings of arguments (keys that the model's forward does not take are left out), pairs
        (inputs, labels), tuples of positional arguments, or single arguments. Tensors are moved
        to the model's device.
    at : str, Module, or a list of them
        Sites: dotted names, patterns (see :func:`install`), or modules.
    labels : str, list of str, or function
        Keys of a batch, or a function from a batch to a mapping of names to labels. In a pair
        (inputs, labels) the second entry has these keys, or is the one that is named. Labels have
        shape (B,), one per sequence, or (B, T), one per token. Integers equal to -100 are
        missing labels. Strings, integers and bools are classes, floats are continuous.
    tokens : {"body", "all", "first", "last", "mean"} or function
        Rows of a tensor (B, T, d) that count. "body": attended tokens but the first of each
        sequence and `skip_ids`; "all": attended tokens; "last": the last attended one; "mean":
        one row per sequence, the mean of its attended tokens; or a function from the arguments
        of the call to a bool tensor (B, T). Where a call has no tokens, "body" is "all".
    side : {"output", "input"}
        What the module returns or what it takes.
    feature_dim : int
        Axis of the features: 1 for convolutional maps (B, C, H, W).
    output : int or str, optional
        Element of an output that is a tuple or a mapping; by default the first, or
        ``last_hidden_state``.
    heads : int or str, optional
        Split the last axis into so many parts of equal width, the heads of an attention, or a
        number by its name in the model's configuration: ``side="input"`` of an output projection
        has "num_attention_heads", outputs of ``k_proj`` and ``v_proj`` "num_key_value_heads".
        Tensors (batch, token, heads, width) have an axis for them. Every head has moments of its
        own, under the name ``site[head]``, and its own eraser.
    forward : function, optional
        ``forward(model, batch)`` runs the model, where calling it is not enough.
    weight : {"token", "sequence"}
        Whether every row weighs 1, or every sequence.
    skip_ids : iterable of int
        Ids of tokens that "body" leaves out, such as special tokens.
    device : "model" or torch.device
        Where states live.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.
    **moments
        kinds and joint, as for :class:`Moments`.

    Returns
    -------
    Collected
        A mapping from names of sites to :class:`Moments`, in the order in which the sites ran.

    Raises
    ------
    SiteError
        A name that no module has, a module that is never called, or an output without a tensor.
    NeverCalledError
        A site did not run.
    NotEnoughMemoryError
        The states do not fit; raised before any is made.
    NonFiniteError
        An activation is NaN or infinite; the text names site, batch and row.
    LabelError
        Labels are missing, or have another length.

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
    inner = unwrapped(model)
    placement = Placement.of(side, feature_dim, output, sites.number_of_heads(inner, heads))
    collector = collector_for(
        inner, at, labels=labels, tokens=tokens, placement=placement, weight=weight,
        skip_ids=skip_ids, device=device, options=moments,
    )  # fmt: skip
    recipe = Recipe(placement, tokens, collector.spec.skip_ids, weight)
    return run(inner, batches, collector, forward, progress, recipe)


def first_batches(batches: Iterable[Any], n: int) -> list[Any]:
    """The first `n` batches."""
    return list(itertools.islice(batches, n))
