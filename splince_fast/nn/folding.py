"""Merging of erasers into the weights of linear layers, compared with hooks on an example.

Let P x + c be the eraser of a site. A linear layer W x + b that reads the site becomes
(W P) x + (b + W c). A site that is itself a linear layer becomes (P W) x + (P b + c), and every
vector of an embedding is erased.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from splince_fast._runtime.arguments import warn
from splince_fast._runtime.names import listed
from splince_fast.exceptions import FoldError, InputError, SplinceWarning
from splince_fast.nn import calls, sites
from splince_fast.nn.calls import CallSelections, TokenRule
from splince_fast.nn.eraser import check_projection, eraser_for, read_erasers
from splince_fast.nn.installed import SiteHook
from splince_fast.nn.sites import Placement
from splince_fast.projection import Projection

# Largest difference of outputs, relative to their size, that is rounding of 32 and of 16 bits.
_TOLERANCE, _TOLERANCE_16 = 1e-4, 2e-2
# Hooks at the layers equal hooks at the sites bit for bit if these layers alone read the sites. A
# reader that is not named makes a difference of the order of the erasers' effect, which can be
# below the rounding of folded weights of 16 bits.
_READER_TOLERANCE = 0.1
_FOR_FOLD = (
    "erasers = fit_layers(..., for_fold=True), then fold(model, erasers, into={site: layers}, "
    "example=batch)"
)


@dataclass(frozen=True)
class Folded:
    """Result of :func:`fold`.

    Attributes
    ----------
    layers : dict of str to tuple of str
        Names of the layers whose weights changed, by site.
    difference : float
        Largest difference of the outputs from those with hooks at every token, on the example and
        relative to their size.
    untied : tuple of str
        Names of the layers whose weights were tied to weights of other layers before the fold.
    """

    layers: dict[str, tuple[str, ...]]
    difference: float
    untied: tuple[str, ...]


def fold(
    model: Any,
    erasers: Any,
    into: Mapping[str, Any] | None = None,
    *,
    example: Any,
    bias: str = "error",
) -> Folded:
    """Merge erasers into the weights of the linear layers that read their sites.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is changed in place; unchanged after an error.
    erasers : Erasers, path, or mapping of str to Projection
        Erasers by site for all tokens, as of ``fit_layers(..., for_fold=True)``.
    into : mapping of str to str, Module, or a list of them, optional
        All linear layers that read each site, unless it is itself linear or an embedding.
    example : mapping, tuple or tensor
        Arguments of one call with a floating output, on which the model is compared with hooks.
    bias : {"error", "add"}
        Action if a layer lacks the bias that the mean of an eraser needs.

    Returns
    -------
    Folded
        Changed layers, and the difference of the outputs from the model with hooks.

    Raises
    ------
    FoldError
        Other operations than the layers of `into` read a site; a layer is not linear, or its weight
        is quantised, offloaded, distributed or computed from other parameters; erasers are
        installed; or the outputs differ. All parameters are then unchanged, bit for bit.
    InputError
        An argument is invalid, or the erasers are not for all tokens.

    Warns
    -----
    SplinceWarning
        A tied weight was untied, or a bias was added, which ``from_pretrained`` would drop.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))
    >>> z = torch.arange(300) % 2
    >>> x = torch.randn(300, 6) + z[:, None] * torch.arange(6)
    >>> erasers = snn.fit_layers(model, [{"input": x, "z": z}], "0", sf.leace, erase="z")
    >>> folded = snn.fold(model, erasers, into={"0": "1"}, example=x)
    >>> folded.layers, folded.difference < 1e-5
    ({'0': ('1',)}, True)
    """
    model = calls.unwrap(model)
    if bias not in ("error", "add"):
        raise InputError(f"bias is {bias!r}; it must be 'error' or 'add'")
    if example is None:
        raise InputError("example is None; pass the arguments of one call, such as a batch")
    at_sites, changes = _changes(model, erasers, into or {})
    names = listed(c.name for c in changes)
    without_bias = [
        c.name for c in changes if c.projection.offset.any() and getattr(c.layer, "bias", 0) is None
    ]
    if without_bias and bias == "error":
        raise FoldError(
            f"{listed(without_bias)} have no bias, which the means of the erasers need: {_FOR_FOLD}"
        )
    outputs = partial(_outputs, model, calls.batch_to(example, calls.device_of(model)))
    with calls.evaluating(model), ExitStack() as undo:
        plain, expected = outputs(), outputs(at_sites)
        effects = list(map(_distance, plain, expected))
        if not any(effects) and any(change.projection.rank for change in changes):
            raise FoldError(
                "the erasers change no floating tensor in the output of the model on the example, "
                "so the fold cannot be verified; fold a model that returns logits, or use install"
            )
        distances = map(_distance, expected, outputs(changes))
        for distance, effect in zip(distances, effects, strict=True):
            if not distance <= _READER_TOLERANCE * effect:
                raise FoldError(
                    f"other layers or operations than {names} read the sites (outputs differ by "
                    f"{distance:.1e}, and the erasers change them by {effect:.1e}): name all "
                    "readers, or use install if one is a residual connection"
                )
        untied = [c.name for c in changes if _untie(model, c.layer.weight, undo)]
        for change in changes:
            _merge(change, undo)
        difference = _difference(plain, expected, outputs())
        is_narrow = any(c.layer.weight.dtype.itemsize < 4 for c in changes)
        if not difference <= (_TOLERANCE_16 if is_narrow else _TOLERANCE):
            raise FoldError(
                f"the outputs of the folded model differ from hooks by {difference:.1e} of their "
                f"size: a weight of {names} overflows, or other code reads it; use install"
            )
        undo.pop_all()
    if untied:
        warn(
            f"the weights of {listed(untied)} were tied to weights of other layers and are "
            "separate now; tie_word_embeddings in the configuration, if there is one, is False",
            SplinceWarning,
        )
    if without_bias:
        warn(
            f"biases were added to {listed(without_bias)}, which from_pretrained drops: fold "
            "erasers of fit_layers(..., for_fold=True), or save and install the erasers",
            SplinceWarning,
        )
    layers = {c.site: tuple(d.name for d in changes if d.site == c.site) for c in changes}
    return Folded(layers, difference, tuple(untied))


# -- arguments -----------------------------------------------------------------------------


class _Change(NamedTuple):
    """A site, or a layer that takes over its eraser, and the tensor of the layer to erase."""

    site: str
    name: str
    layer: Any
    placement: Placement
    projection: Projection


def _changes(
    model: Module, erasers: Any, into: Mapping[str, Any]
) -> tuple[list[_Change], list[_Change]]:
    """Return the sites, and the layers to change."""
    for name, module in sites.named_modules(model).items():
        if SiteHook.of(module, "input") or SiteHook.of(module, "output"):
            raise FoldError(
                f"erasers are installed in this model, at {name!r}; call remove() of their handle, "
                "then fold"
            )
    erasers, spec = read_erasers(erasers)
    if spec.applied not in ("all", None):
        raise InputError(
            f"these erasers are for tokens={spec.applied!r}, and weights erase every token: "
            f"{_FOR_FOLD}"
        )
    at_sites: dict[str, _Change] = {}
    for at, projection in erasers.items():
        check_projection(projection)
        for site, module in sites.find(model, at).items():
            both = projection @ at_sites[site].projection if site in at_sites else projection
            at_sites[site] = _Change(site, site, module, spec.placement, both)
    if not at_sites:
        raise InputError("erasers is empty; pass at least one projection by the name of a site")
    if unknown := sorted(set(into) - set(at_sites)):
        raise InputError(f"into= names {listed(unknown)}; the sites are {listed(at_sites)}")
    changes = []
    for site, own in at_sites.items():
        layers = sites.find(model, into[site]) if site in into else {site: own.layer}
        for name, layer in layers.items():
            own_input = Placement("input", 1 if _is_conv2d(layer) else -1)
            placement = own.placement if layer is own.layer else own_input
            changes.append(_Change(site, name, layer, placement, own.projection))
            _check_layer(changes[-1])
    return list(at_sites.values()), changes


def _check_layer(change: _Change) -> None:
    """Raise FoldError unless a layer is W x + b with plain parameters and the eraser's width."""
    layer, kind = change.layer, type(change.layer)
    weight: Any = getattr(layer, "weight", None)
    reads = change.placement.side == "input"
    bases = (torch.nn.Linear,) if reads else (torch.nn.Linear, torch.nn.Embedding)
    # Subclasses of convolutions often only add padding.
    is_conv = (kind.__name__ == "Conv1D" and hasattr(layer, "nf")) or _is_conv2d(layer)
    reason = ""
    if not is_conv and not isinstance(layer, bases):
        reason = (
            "is not linear; name the linear layers that read it, "
            f"into={{{change.site!r}: [...]}}, or use install"
        )
    elif not (
        (is_conv or any(kind.forward is base.forward for base in bases))
        and all(k in layer._parameters for k in ("weight", "bias") if hasattr(layer, k))
        and type(weight) is torch.nn.Parameter
        and weight.is_floating_point()
        and weight.dtype.itemsize >= 2
        and not weight.is_meta
    ):
        reason = (
            "is no plain layer: its weight or bias is quantised, offloaded, distributed, or "
            "computed from other parameters; make it plain, or use install"
        )
    elif weight.shape[int(reads != _is_transposed(layer))] != change.projection.n_features:
        reason = (
            f"has a weight of shape {tuple(weight.shape)}, and the eraser of {change.site!r} has "
            f"width {change.projection.n_features}"
        )
    if reason:
        raise FoldError(f"{change.name!r}, a {kind.__name__}, {reason}")


# -- comparison ----------------------------------------------------------------------------


def _outputs(model: Module, example: object, erased: Iterable[_Change] = ()) -> list[Tensor]:
    """Return the floating tensors in the output of a model in float64, with every token erased."""
    selections = CallSelections(TokenRule("all"))  # not attached, so that padding is erased
    hooks: list[SiteHook] = []
    with ExitStack() as stack:
        for point in erased:
            eraser = eraser_for(point.projection, point.layer, model)
            hooks.append(SiteHook(point.name, eraser, selections, point.placement))
            stack.callback(hooks[-1].register(point.layer).remove)
        output = calls.call(model, example, (), None)
    if idle := [hook.name for hook in hooks if not hook.n_calls]:
        raise FoldError(
            f"the example does not run {listed(idle)}, so the fold cannot be verified; pass an "
            "example that does, or use install"
        )
    return [tensor.detach().to("cpu", torch.float64) for tensor in _tensors(output)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if sites.is_row_tensor(value):
        yield value
    for entry in sites.elements(value).values():
        yield from _tensors(entry)


def _distance(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two entries; it is not finite if only one of them is."""
    differ = (first != second) & ~(first.isnan() & second.isnan())
    return float((first - second)[differ].abs().max()) if differ.any() else 0.0


def _difference(plain: list[Tensor], expected: list[Tensor], found: list[Tensor]) -> float:
    """Return the largest difference from `expected`, relative to the size of changed outputs."""
    relative = []
    for a, b, c in zip(plain, expected, found, strict=True):
        # Constants, such as -1e9 at suppressed tokens, do not tell the size of the outputs.
        changed = b[(a != b) & b.isfinite()]
        relative.append(_distance(b, c) / (float(changed.abs().max()) if len(changed) else 1.0))
    return float(np.max(relative))  # NaN stays


# -- weights -------------------------------------------------------------------------------


def _is_conv2d(layer: Any) -> bool:
    """Return whether a layer is a convolution of one pixel, which is linear in the channels."""
    is_conv = isinstance(layer, torch.nn.Conv2d)
    return is_conv and layer.kernel_size == (1, 1) and layer.groups == 1


def _is_transposed(layer: Module) -> bool:
    """Return whether the weight has a row per input: Conv1D of transformers, and embeddings."""
    return not isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)


def _merge(change: _Change, undo: ExitStack) -> None:
    """Merge an eraser into the current weight and bias of a layer."""
    layer, old = change.layer, getattr(change.layer, "bias", None)
    left, right, offset = (getattr(change.projection, k) for k in ("left", "right", "offset"))
    matrix = layer.weight.detach().to("cpu", torch.float64).numpy()  # with a row per output
    matrix = matrix.T if _is_transposed(layer) else matrix.reshape(matrix.shape[:2])
    bias = np.zeros(len(matrix)) if old is None else old.detach().to("cpu", torch.float64).numpy()
    if change.placement.side == "input":
        new, bias = matrix - (matrix @ left) @ right.T, bias + matrix @ offset
    else:
        new, bias = matrix - left @ (right.T @ matrix), bias - left @ (right.T @ bias) + offset
    values = {"weight": new, "bias": bias}
    if isinstance(layer, torch.nn.Embedding):
        new += offset[:, None]
        del values["bias"]
    elif old is None and not bias.any():
        del values["bias"]
    values["weight"] = new.T if _is_transposed(layer) else new.reshape(layer.weight.shape)
    for name, array in values.items():
        like = layer.weight if name == "weight" or old is None else old
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(like.device, like.dtype)
        _set(layer, name, torch.nn.Parameter(tensor, like.requires_grad), undo)


def _set(owner: Any, name: str, value: object, undo: ExitStack) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _untie(model: Module, weight: Tensor, undo: ExitStack) -> bool:
    """Untie a weight in the configurations of the modules that hold it; return if it was tied."""
    n_owners = sum(any(weight is p for p in m._parameters.values()) for m in model.modules())
    for module in model.modules() if n_owners > 1 else ():
        config: Any = getattr(module, "config", None)
        if config is None or all(weight is not p for p in module.parameters()):
            continue
        is_nested = hasattr(config, "get_text_config")
        for tied in (config, config.get_text_config(decoder=True) if is_nested else None):
            if getattr(tied, "tie_word_embeddings", None):
                _set(tied, "tie_word_embeddings", False, undo)
    return n_owners > 1
