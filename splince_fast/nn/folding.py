"""Merging of erasers into the weights of linear layers, compared with hooks on an example.

Let P x + c be the eraser of a site. A linear layer W x + b that reads the site becomes
(W P) x + (b + W c). A site that is itself a linear layer becomes (P W) x + (P b + c), and every
vector of an embedding is erased.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

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
# Operations of torch, and of transformers, that multiply the rows of an argument by a matrix.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback")
_FOR_FOLD = "erasers = fit_layers(..., for_fold=True), then fold(model, erasers, example=batch)"
_NOT_RUN = (
    "the example does not run {}, so the fold cannot be verified; pass an example that does, or "
    "use install"
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
        All linear layers that read a site; by default the site itself if it is linear or an
        embedding, and else the layers, routers and experts that multiply its rows in the example.
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
        Other operations than linear layers, or layers that `into` leaves out, read a site; a weight
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
    >>> folded = snn.fold(model, erasers, example=x)
    >>> folded.layers, folded.difference < 1e-5
    ({'0': ('1',)}, True)
    """
    model = calls.unwrap(model)
    if bias not in ("error", "add"):
        raise InputError(f"bias is {bias!r}; it must be 'error' or 'add'")
    if example is None:
        raise InputError("example is None; pass the arguments of one call, such as a batch")
    inputs = calls.batch_to(example, calls.device_of(model))
    at_sites, changes = _changes(model, erasers, into or {}, inputs)
    names = listed(c.name for c in changes)
    without_bias = [
        c.name for c in changes if c.projection.offset.any() and getattr(c.layer, "bias", 0) is None
    ]
    if without_bias and bias == "error":
        raise FoldError(
            f"{listed(without_bias)} have no bias, which the means of the erasers need: {_FOR_FOLD}"
        )
    outputs = partial(_outputs, model, inputs)
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
                    "readers by into=, or use install if one is a residual connection"
                )
        untied = [c.name for c in changes if _untie(model, getattr(c.layer, c.parameter), undo)]
        for change in changes:
            _merge(change, undo)
        folded = outputs()
        difference = _difference(plain, expected, folded)
        is_narrow = any(getattr(c.layer, c.parameter).dtype.itemsize < 4 for c in changes)
        is_equal = difference <= (_TOLERANCE_16 if is_narrow else _TOLERANCE)
        if not is_narrow and any(_axis(c.layer, c.placement.side) is None for c in changes):
            # Experts and routers may read their input by other code, too.
            pairs = zip(map(_distance, expected, folded), effects, strict=True)
            is_equal &= all(distance <= _READER_TOLERANCE * effect for distance, effect in pairs)
        if not is_equal:
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
    axis: Any = None  # of the features in the weight; None if the layer is not linear
    parameter: str = "weight"


def _changes(
    model: Module, erasers: Any, into: Mapping[str, Any], example: object
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
    others = [own for own in at_sites.values() if own.site not in into]
    others = [own for own in others if _axis(own.layer, own.placement.side) is None]
    traced = _readers(model, others, example) if others else {}
    modules, changes = sites.named_modules(model), []
    for site, own in at_sites.items():
        layers = sites.find(model, into[site]) if site in into else {site: own.layer}
        named = {(name, "weight"): None for name in layers}
        for (name, parameter), axis in traced.get(site, named).items():
            layer = modules[name]
            own_input = Placement("input", 1 if _is_conv2d(layer) else -1)
            placement = own.placement if layer is own.layer else own_input
            axis = _axis(layer, placement.side) if axis is None else axis
            changes.append(_Change(site, name, layer, placement, own.projection, axis, parameter))
            _check_layer(changes[-1])
    return list(at_sites.values()), changes


class _Products(TorchDispatchMode):  # type: ignore[misc]
    """Mode that finds the parameters by which rows of sites are multiplied."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.rows: dict[str, set[bytes]] = defaultdict(set)  # by site
        self.axes: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)  # layer, parameter
        self.idle = sites.named_modules(model)  # modules whose parameters are in no product
        self.parameters = {
            parameter.untyped_storage().data_ptr(): (parameter, name, key)
            for name, module in self.idle.items()
            for key, parameter in module._parameters.items()
            if type(parameter) is torch.nn.Parameter and not isinstance(module, torch.nn.Embedding)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "overloadpacket", func).__name__
        if name in ("linear", "matmul", "einsum"):  # whole in inference mode, products else
            with self:
                return func.decompose(*args, **kwargs or {})
        pairs = [args["add" in name :][:2]] if name in _PRODUCTS else []
        for x, w in [*pairs, *((w.mT, x.mT) for x, w in pairs)]:  # x w = (w^T x^T)^T
            address = w.untyped_storage().data_ptr()
            if address in self.parameters and x.numel():
                parameter, layer, key = self.parameters[address]
                self.idle.pop(layer, None)
                rows, features = _row_bytes(x), (x.shape[-1], w.stride(-2))
                axes = list(zip(parameter.shape, parameter.stride(), strict=True))
                for site in self.rows if features in axes else ():
                    if rows and rows <= self.rows[site]:
                        self.axes[site][layer, key] = axes.index(features)
        return func(*args, **kwargs or {})


def _row_bytes(x: Tensor) -> set[bytes]:
    rows = x.detach().to("cpu", torch.float64).reshape(-1, x.shape[-1])
    return {row.tobytes() for row in rows[rows.any(dim=1)].numpy()}  # zeros are equal at all sites


def _readers(model: Module, at: list[_Change], example: object) -> Any:
    """Return the parameters, with axes, by which a call multiplies the rows of each site."""
    products, modules = _Products(model), sites.named_modules(model)

    def scale(own: _Change, factor: float, value: object) -> Any:
        """Scale the rows of a site, so that no other layer has equal ones."""
        width = own.projection.n_features
        new = sites.replace_rows(own.site, value, own.placement, width, lambda rows: rows * factor)
        products.rows[own.site] |= _row_bytes(sites.pick_rows(own.site, new, own.placement)[0])
        return new

    with calls.evaluating(model), ExitStack() as hooks, products:
        for i, own in enumerate(at, 1):
            change = partial(scale, own, 1 + i / (2 * len(at)))
            hook = sites.add_hook(own.site, own.layer, own.placement.side, change)
            hooks.callback(hook.remove)
        calls.call(model, example, (), None)
    for site in (own.site for own in at):
        if not (axes := products.axes[site]):
            raise FoldError(
                f"no linear layer reads {site!r} in the example; norms and residual connections do "
                "not commute with erasers. Erase the outputs of the norms that read it, name the "
                f"layers, into={{{site!r}: [...]}}, or use install"
            )
        # Experts that the example does not reach, perhaps of another site, may read this one.
        kinds = {(re.sub(r"\d+", "", name), type(modules[name])) for name, _ in axes}
        idle = [k for k, v in products.idle.items() if (re.sub(r"\d+", "", k), type(v)) in kinds]
        if idle:
            raise FoldError(_NOT_RUN.format(listed(idle)))
    return products.axes


def _check_layer(change: _Change) -> None:
    """Raise FoldError unless a layer is W x + b with plain parameters and the eraser's width."""
    layer, kind = change.layer, type(change.layer)
    weight: Any = getattr(layer, change.parameter, None)
    bases = torch.nn.Linear, torch.nn.Embedding  # subclasses of convolutions often only add padding
    reason = ""
    if change.axis is None:
        reason = (
            "is not linear; name the linear layers that read it, "
            f"into={{{change.site!r}: [...]}}, or use install"
        )
    elif not (
        (not isinstance(layer, bases) or kind.forward in [base.forward for base in bases])
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
    elif change.projection.offset.any() and _axis(layer, change.placement.side) is None:
        reason = f"takes no means of erasers: {_FOR_FOLD}"
    elif weight.shape[change.axis] != change.projection.n_features:
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
        raise FoldError(_NOT_RUN.format(listed(idle)))
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
        size = float(changed.abs().max()) if len(changed) else 0.0
        relative.append(_distance(b, c) / (size or 1.0))
    return float(np.max(relative))  # NaN stays


# -- weights -------------------------------------------------------------------------------


def _is_conv2d(layer: Any) -> bool:
    """Return whether a layer is a convolution of one pixel, which is linear in the channels."""
    is_conv = isinstance(layer, torch.nn.Conv2d)
    return is_conv and layer.kernel_size == (1, 1) and layer.groups == 1


def _axis(layer: Any, side: str) -> int | None:
    """Return the axis of the weight for the features on a side; None if a layer is not linear."""
    reads = side == "input"
    if isinstance(layer, torch.nn.Linear) or _is_conv2d(layer):
        return int(reads)
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):  # of transformers
        return int(not reads)
    return 1 if isinstance(layer, torch.nn.Embedding) and not reads else None


def _merge(change: _Change, undo: ExitStack) -> None:
    """Merge an eraser into the current weight and bias of a layer."""
    layer, old = change.layer, getattr(change.layer, "bias", None)
    left, right, offset = (getattr(change.projection, k) for k in ("left", "right", "offset"))
    weight = getattr(layer, change.parameter)
    matrix = weight.detach().to("cpu", torch.float64).movedim(change.axis, -1).numpy()
    bias: Any = 0.0 if old is None else old.detach().to("cpu", torch.float64).numpy()
    if change.placement.side == "input":
        new = matrix - (matrix @ left) @ right.T
        bias = bias + (matrix @ offset).reshape(-1) if offset.any() else bias
    else:
        new = matrix - (matrix @ right) @ left.T
        bias = (bias if old is None else bias - left @ (right.T @ bias)) + offset
    values = {}
    if isinstance(layer, torch.nn.Embedding):
        new += offset
    elif old is not None or np.any(bias):
        values["bias"] = bias
    values[change.parameter] = np.moveaxis(new, -1, change.axis)
    for name, array in values.items():
        like = old if name == "bias" and old is not None else weight
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
