"""Moments of activations at many sites of a model, in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import InputError
from splince_fast.moments.parameters import Parameters
from splince_fast.nn import running, sites
from splince_fast.nn.collected import Collected
from splince_fast.nn.collector import Collector, Labels, label_keys
from splince_fast.nn.spec import CollectionSpec, Placement
from splince_fast.nn.tokens import TokenRule


def run(
    model: Module,
    batches: Iterable[object],
    collector: Collector,
    forward: Callable[..., object] | None,
    progress: bool | None,
    recipe: CollectionSpec,
) -> Collected:
    """Run a model on all batches with the hooks of a collector, and return the moments."""
    running.check_inputs(batches, forward)
    device = running.device_of(model)
    keys = label_keys(collector.labels)
    collector.may_stop = running.may_stop_early(model, forward)
    with (
        collector.attached(model),
        running.evaluating(model),
        Progress(unit="sequences", show=progress) as bar,
    ):
        for batch in batches:
            before = collector.n_sequences
            with collector.one_batch(batch):
                running.call(model, running.batch_to(batch, device), keys, forward)
            bar.advance(collector.n_sequences - before)
    if not collector.n_batches:
        raise InputError("batches is empty; a generator is empty when it is read a second time")
    rule = collector.token_rule.rule
    return collector.result(
        replace(recipe, tokens=rule if callable(rule) else collector.applied_rule)
    )


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"device is {device!r}; it must be 'model' or a torch.device") from error


def collector_for(
    model: Module,
    at: object,
    *,
    labels: Labels,
    tokens: object,
    placement: Placement,
    weight: str,
    skip_ids: Iterable[int],
    device: object,
    options: Mapping[str, object],
) -> Collector:
    """Validate the arguments of :func:`collect` and return a collector."""
    unknown = set(options) - {"kinds", "joint"}
    if unknown:
        raise InputError(
            f"collect takes no {sorted(unknown)}; of the parameters of Moments it knows kinds "
            "and joint"
        )
    if not (callable(labels) or isinstance(labels, Iterable)):
        raise InputError(
            f"labels is {labels!r}; it must be a key of the batches, a list of keys, or a function"
        )
    if weight not in ("token", "sequence"):
        raise InputError(f"weight is {weight!r}; it is 'token' or 'sequence'")
    return Collector(
        modules=sites.find(model, at),
        token_rule=TokenRule.of(None if tokens == "body" else tokens, skip_ids, allow_mean=True),
        placement=placement,
        labels=labels,
        by_sequence=weight == "sequence",
        device=None if device == "model" else _device(device),
        parameters=Parameters.of(None, options.get("kinds"), options.get("joint") or (), False),
    )


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

    Activations are not stored: the state of a site is a float64 matrix of d x d numbers. The model
    runs in evaluation mode; its mode and hooks are restored afterwards.

    Parameters
    ----------
    model : torch.nn.Module
        The model, with its installed erasers. Compiled models run eagerly.
    batches : iterable
        Mappings of arguments (keys that are no parameters of the model's forward are left out),
        pairs (inputs, labels), tuples of positional arguments, or single arguments. Tensors are
        copied to the model's device.
    at : str, Module, or a list of them
        Sites: dotted names, patterns (see :func:`install`), or modules.
    labels : str, list of str, or function
        Keys of a batch, or a function from a batch to a mapping of names to labels. In a pair
        (inputs, labels) the second entry is a mapping with these keys, or the labels of the only
        key. Labels have shape (B,), one per sequence, or (B, T), one per token. The integer -100
        is a missing label. Strings, integers and bools are classes, floats are continuous.
    tokens : {"body", "all", "first", "last", "mean"} or function
        Rows of a tensor (B, T, d) to accumulate. "body": attended tokens but the first of each
        sequence and `skip_ids`; "all": attended tokens; "last": the last attended one; "mean":
        one row per sequence, the mean of its attended tokens; or a function from the arguments
        of the call to a bool tensor (B, T). In a call without tokens "body" is "all".
    side : {"output", "input"}
        Whether to use the output or the input of the module.
    feature_dim : int
        Axis of the features: 1 for convolutional maps (B, C, H, W).
    output : int or str, optional
        Element of an output that is a tuple or a mapping; by default the first, or
        ``last_hidden_state``.
    heads : int or str, optional
        Number of attention heads, which are equal parts of the last axis or the third axis of a
        tensor (batch, token, heads, width). A string is the name of the number in the model's
        configuration: "num_attention_heads" for ``side="input"`` of an output projection,
        "num_key_value_heads" for outputs of ``k_proj`` and ``v_proj``. Every head has its own
        moments, under the name ``site[head]``, and its own eraser.
    forward : function, optional
        ``forward(model, batch)`` runs the model; by default the model is called.
    weight : {"token", "sequence"}
        Whether each row or each sequence has weight 1.
    skip_ids : iterable of int
        Ids of tokens that "body" leaves out, such as special tokens.
    device : "model" or torch.device
        Device of the states; "model" for that of the activations.
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
        No module has this name, the module is never called, or its output holds no tensor.
    NeverCalledError
        A site did not run.
    NotEnoughMemoryError
        The states do not fit in memory; raised before the first is created.
    NonFiniteError
        An activation is NaN or infinite; the text names site, batch and row.
    LabelError
        Labels are missing or have a wrong length.

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
    placement = Placement.of(side, feature_dim, output, sites.number_of_heads(inner, heads))
    collector = collector_for(
        inner, at, labels=labels, tokens=tokens, placement=placement, weight=weight,
        skip_ids=skip_ids, device=device, options=moments,
    )  # fmt: skip
    recipe = CollectionSpec(placement, tokens, collector.token_rule.skip_ids, weight)
    return run(inner, batches, collector, forward, progress, recipe)
