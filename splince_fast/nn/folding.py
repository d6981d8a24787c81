"""Erasers merged into the weights: no cost at inference, verified on an example.

A site can be folded where its output is read by linear layers only: their ``W x + b`` becomes
``(W P) x + (b + W offset)``; or where the site is itself a linear layer, ``(P W) x + (P b +
offset)``, or an embedding, whose rows are mapped. Nobody promises that nothing else reads the
output, such as a residual connection: so the folded model is run beside the hooked one, and what
differs is taken back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from splince_fast.exceptions import FoldError, InputError, SplinceWarning
from splince_fast.nn import sites
from splince_fast.nn.collection import moved, quiet, unwrapped
from splince_fast.nn.eraser import Eraser
from splince_fast.nn.erasers import Erasers
from splince_fast.nn.surgery import Layer, Surgery, layer_of, numbers
from splince_fast.projection import Projection

Tensor = Any
Module = Any

# Largest difference from the hooked model, in units of the range of an output.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_LOW_PRECISION = 2e-2
# What returns its input in evaluation.
_PASSING = (torch.nn.Identity, torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d)


@dataclass(frozen=True)
class Folded:
    """What was folded, made by :func:`fold`.

    Attributes
    ----------
    layers : dict of str to tuple of str
        By site, the layers whose weights changed.
    difference : float
        Largest difference from the hooked model on the example, in units of an output's range.
    shift : dict of str to float
        By site, the length of the vector that ``bias="drop"`` leaves out of the outputs of its
        layers (the largest), in their units; 0 where nothing was left out.
    untied : tuple of str
        Layers whose weights were tied to others and are their own now.
    """

    layers: dict[str, tuple[str, ...]]
    difference: float
    shift: dict[str, float]
    untied: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"folded; differs from hooks by {self.difference:.1e} of the range"]
        lines += [f"  {site} -> {', '.join(layers)}" for site, layers in self.layers.items()]
        lines += [f"  untied: {name}" for name in self.untied]
        lines += [
            f"  {site}: mean shifted by {size:.3g} (no bias to hold it)"
            for site, size in self.shift.items()
            if size
        ]
        return "\n".join(lines)


def _outputs(value: Any) -> Iterator[Tensor]:
    """Floating tensors in what a model returns."""
    if sites.is_row_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _outputs(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _outputs(one)


def _run(model: Module, example: Any) -> list[Tensor]:
    """Outputs of a model on the example, in float64 on the CPU."""
    result = sites.call(model, example, (), None)
    return [t.detach().to("cpu", torch.float64) for t in _outputs(result)]


def _difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Largest difference, in units of each tensor's range."""
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if a.numel():
            scale = float(a.max() - a.min()) or 1.0
            worst = max(worst, float((a - b).abs().max()) / scale)
    return worst


def _readers(model: Module, example: Any, chosen: Mapping[str, Module]) -> dict[str, list[str]]:
    """Per site, names of the modules without children whose input is the site's output."""
    modules = sites.named(model)
    leaves = {n: m for n, m in modules.items() if n and not any(True for _ in m.children())}
    produced: dict[str, Tensor] = {}
    found: dict[str, list[str]] = {name: [] for name in chosen}

    def produce(name: str) -> Any:
        def hook(module: Module, args: Any, output: Any) -> None:
            produced[name], _ = sites.pick(name, output, None)

        return hook

    def read(name: str) -> Any:
        def hook(module: Module, args: Any, kwargs: Any) -> None:
            inputs = [v for v in (*args, *kwargs.values()) if sites.is_row_tensor(v)]
            for site, tensor in produced.items():
                if any(_same(tensor, v) for v in inputs) and name != site:
                    found[site].append(name)

        return hook

    handles = [m.register_forward_hook(produce(n), prepend=True) for n, m in chosen.items()]
    handles += [m.register_forward_pre_hook(read(n), with_kwargs=True) for n, m in leaves.items()]
    try:
        _run(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    ours, theirs = first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()
    return bool(ours == theirs and ours != 0 and first.device == second.device)


def fold(
    model: Any, erasers: Any, example: Any, *, tokens: Any = None, bias: str = "error"
) -> Folded:
    """Merge erasers into the weights of the layers that read, or make, their sites.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place, or not at all.
    erasers : Erasers, path, or mapping of str to Projection
        What to erase where.
    example : mapping, tuple or tensor
        Arguments of one call, on which the folded model is compared with the hooked one.
    tokens : "all"
        Weights cannot know positions: a fold erases at every token. Must be given where the
        erasers are for other tokens.
    bias : {"error", "add", "drop"}
        Where a layer has no bias to hold the mean: raise; add one, which ``from_pretrained``
        drops for models whose configuration has none; or leave the mean out, which erases as
        exactly and shifts the mean.

    Returns
    -------
    Folded
        What was changed, and how far the outputs are from those of the hooked model.

    Raises
    ------
    FoldError
        A site is read by something else than linear layers (the residual stream is), weights are
        quantised, elsewhere, or shared by modules, or the outputs differ. Every parameter is
        what it was, bit for bit.
    InputError
        `tokens` or `bias` is wrong.

    Warns
    -----
    SplinceWarning
        A tied weight was untied, or a bias was added that a configuration does not know.

    Examples
    --------
    >>> import numpy as np, torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))
    >>> z = np.arange(300) % 2
    >>> x = torch.randn(300, 6) + torch.from_numpy(z)[:, None] * torch.arange(6)
    >>> found = snn.collect(model, [{"input": x, "z": z}], "0", labels="z")
    >>> folded = snn.fold(model, found.erasers(sf.leace, erase="z"), x)
    >>> folded.layers, folded.difference < 1e-5
    ({'0': ('1',)}, True)
    """
    model = unwrapped(model)
    if bias not in ("error", "add", "drop"):
        raise InputError(f"bias is {bias!r}; it is 'error', 'add' or 'drop'")
    if not isinstance(erasers, Mapping):
        erasers = Erasers.load(erasers)
    if isinstance(erasers, Erasers):
        if erasers.apply_to != "all" and tokens != "all":
            raise InputError(
                f"these erasers are for tokens={erasers.apply_to!r}, and weights cannot know "
                "positions; pass tokens='all' to erase at every token"
            )
        if erasers.placement.side == "input" or erasers.placement.output is not None:
            raise FoldError("only whole outputs of modules are folded; use install for this site")
    elif tokens not in (None, "all"):
        raise InputError(f"tokens is {tokens!r}; a fold erases at every token: pass 'all'")
    chosen: dict[str, Module] = {}
    projections: dict[str, Projection] = {}
    for wanted, projection in erasers.items():
        for name, module in sites.find(model, wanted).items():
            chosen[name] = module
            projections[name] = (
                projection @ projections[name] if name in projections else projection
            )
    example = moved(example, sites.device_of(model))
    surgery = Surgery(model, bias)
    with quiet(model):
        plans = _plans(model, example, chosen)
        drops = {
            name: bias == "drop" and any(_lacks_bias(layer) for layer, _ in plan)
            for name, plan in plans.items()
        }
        axis = erasers.placement.feature_dim if isinstance(erasers, Erasers) else None
        with _hooked(model, chosen, projections, drops, axis):
            expected = _run(model, example)
        try:
            shift = {
                name: _fold_site(name, projections[name], plans[name], surgery, drops[name])
                for name in chosen
            }
            difference = _difference(expected, _run(model, example))
            limit = max(
                _TOLERANCE.get(layer.module.weight.dtype, _LOW_PRECISION)
                for plan in plans.values()
                for layer, _ in plan
            )
            if not difference <= limit:
                raise FoldError(
                    f"the folded model differs from the hooked one by {difference:.1e} of the "
                    f"range of its output (at most {limit:.0e} is rounding): something else than "
                    f"the linear layers reads {list(chosen)}, such as a residual connection. "
                    "Erase the outputs of norms that feed linear layers only, or use install"
                )
        except BaseException:
            surgery.undo()
            raise
    layers = {name: tuple(layer.name for layer, _ in plan) for name, plan in plans.items()}
    _tell(surgery)
    return Folded(layers, difference, shift, tuple(surgery.untied))


@contextmanager
def _hooked(
    model: Module,
    chosen: Mapping[str, Module],
    projections: Mapping[str, Projection],
    drops: Mapping[str, bool],
    feature_dim: int | None,
) -> Iterator[None]:
    """The model with hooks that do what the fold will do: at every position, pads included."""
    handles = []
    try:
        for name, module in chosen.items():
            projection = projections[name]
            if drops[name]:
                projection = Projection(
                    projection.left, projection.right, np.zeros(projection.n_features)
                )
            channels = isinstance(module, torch.nn.Conv2d | torch.nn.BatchNorm2d)
            axis = feature_dim if feature_dim is not None else 1 if channels else -1
            hook = _everywhere(name, Eraser(projection).to(sites.device_of(model)), axis)
            handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _everywhere(name: str, eraser: Eraser, axis: int) -> Any:
    """A forward hook that erases at every position."""

    def hook(module: Module, args: Any, output: Any) -> Any:
        x, where = sites.pick(name, output, None)
        sites.check_width(name, x, axis, eraser.n_features)
        return sites.put(output, where, eraser(x.movedim(axis, -1)).movedim(-1, axis))

    return hook


def _plans(
    model: Module, example: Any, chosen: Mapping[str, Module]
) -> dict[str, list[tuple[Layer, str]]]:
    """Per site, the layers to change, and whether they make ("out") or read ("in") it.

    Raises
    ------
    FoldError
        There is nothing linear to fold into.
    """
    readers = _readers(model, example, chosen)
    modules = sites.named(model)
    count: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        count[id(module)] = count.get(id(module), 0) + 1
    plans: dict[str, list[tuple[Layer, str]]] = {}
    for name, module in chosen.items():
        own = layer_of(name, module)
        if own is not None:
            plan = [(own, "out")]
        else:
            plan = []
            for reader in dict.fromkeys(readers[name]):
                if isinstance(modules[reader], _PASSING):
                    continue
                layer = layer_of(reader, modules[reader])
                if layer is None or layer.kind == "embedding":
                    raise FoldError(
                        f"{name!r} is read by {reader!r}, a {type(modules[reader]).__name__}, "
                        "which is not linear; fold the outputs of norms that feed linear layers "
                        "only, or use install"
                    )
                plan.append((layer, "in"))
        if not plan:
            raise FoldError(
                f"no linear layer reads the output of {name!r}: a residual stream is added to "
                "before it is read, and cannot be folded; erase the outputs of the norms behind "
                "it, or use install"
            )
        for layer, _ in plan:
            if count[id(layer.module)] > 1:
                raise FoldError(
                    f"{layer.name!r} stands at {count[id(layer.module)]} places of the model, and "
                    "a fold would change all of them; use install"
                )
        plans[name] = plan
    return plans


def _lacks_bias(layer: Layer) -> bool:
    return layer.kind != "embedding" and getattr(layer.module, "bias", None) is None


def _fold_site(
    name: str,
    projection: Projection,
    plan: list[tuple[Layer, str]],
    surgery: Surgery,
    drop: bool,
) -> float:
    """Fold one site; returns the size of the mean that is left out."""
    missing = [layer.name for layer, _ in plan if _lacks_bias(layer)]
    if missing and surgery.bias == "error":
        raise FoldError(
            f"the layers {missing} have no bias, which would hold the mean of {name!r}; pass "
            "bias='drop' to shift the mean (the erasing is as exact), or bias='add'"
        )
    left, right = projection.left, projection.right
    offset = np.zeros(len(left)) if drop else np.asarray(projection.offset)
    worst = 0.0
    for layer, role in plan:
        matrix = layer.matrix()
        if matrix.shape[0 if role == "out" else 1] != projection.n_features:
            raise FoldError(
                f"{layer.name!r} has a matrix {matrix.shape}, and the eraser of {name!r} has "
                f"width {projection.n_features}"
            )
        if role == "in":
            folded = matrix - (matrix @ left) @ right.T
            shift = matrix @ offset
        else:
            folded = matrix - left @ (right.T @ matrix)
            own = getattr(layer.module, "bias", None)
            values = np.zeros(len(matrix)) if own is None else numbers(own)
            shift = offset - left @ (right.T @ values)
        if layer.kind == "embedding":  # rows are outputs: the mean has a place in each
            folded += offset[:, None]
        if drop:
            lost = np.asarray(projection.offset)
            worst = max(worst, float(np.linalg.norm(matrix @ lost if role == "in" else lost)))
        surgery.replace(layer, folded, shift, drop=drop and _lacks_bias(layer))
    return worst


def _tell(surgery: Surgery) -> None:
    """Warn of what the configuration of the model does not know."""
    if surgery.untied:
        warnings.warn(
            f"the weights of {surgery.untied} were tied to others and are their own now "
            "(config.tie_word_embeddings is False): the model has that many parameters more",
            SplinceWarning,
            stacklevel=3,
        )
    if surgery.added:
        warnings.warn(
            f"the biases of {surgery.added} were added, and a configuration does not know them: "
            "from_pretrained drops them, and other engines do, too. Save the erasers and install "
            "them after loading, or fold with bias='drop'",
            SplinceWarning,
            stacklevel=3,
        )
