"""Erasers merged into the weights: no cost at inference, verified on an example.

A site can be folded where its output is read by linear layers only: their ``W x + b`` becomes
``(W P) x + (b + W offset)``; or where the site is itself a linear layer, ``(P W) x + (P b +
offset)``, or an embedding, whose rows are mapped. Nobody promises that nothing else reads the
output, such as a residual connection: so the folded model is run beside the hooked one, and what
differs is taken back.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from splince_fast.exceptions import FoldError, InputError, SplinceWarning
from splince_fast.nn import sites
from splince_fast.nn.collection import moved, quiet, unwrapped
from splince_fast.nn.erasers import Erasers, linear_part
from splince_fast.nn.surgery import Layer, Surgery, layer_of, numbers
from splince_fast.nn.verification import (
    LOW_PRECISION,
    attended,
    check_states,
    difference,
    hooked,
    installed_outputs,
    outputs_of,
)
from splince_fast.projection import Projection

Tensor = Any
Module = Any

# Largest difference from the hooked model, in units of the range of an output.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
# Modules that return their input in evaluation.
_PASSING = (torch.nn.Identity, torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d)


@dataclass(frozen=True)
class Folded:
    """Result of :func:`fold`.

    Attributes
    ----------
    layers : dict of str to tuple of str
        By site, the layers whose weights changed.
    difference : float
        Largest difference on the example from hooks that do what the weights do: erase every
        token, without the mean where it was dropped. In units of an output's range.
    from_installed : float or None
        The same from ``install(model, erasers)``, which may leave tokens alone and keeps the
        mean; where the example has an attention mask, at attended tokens. None where `install`
        needs `tokens`, or other arguments of the model than the example has.
    shift : dict of str to float
        By site, the length of the vector that ``bias="drop"`` leaves out of the outputs of its
        layers (the largest), in their units; 0 where nothing was left out.
    untied : tuple of str
        Layers whose weights were tied to others and are their own now.
    """

    layers: dict[str, tuple[str, ...]]
    difference: float
    from_installed: float | None
    shift: dict[str, float]
    untied: tuple[str, ...]

    def __str__(self) -> str:
        installed = "not compared with install(model, erasers), which cannot select tokens here"
        if self.from_installed is not None:
            installed = f"{self.from_installed:.1e} from install(model, erasers)"
        lines = [
            f"folded; differs by {self.difference:.1e} of the range from hooks at every token, "
            f"{installed}"
        ]
        lines += [f"  {site} -> {', '.join(layers)}" for site, layers in self.layers.items()]
        lines += [f"  untied: {name}" for name in self.untied]
        lines += [
            f"  {site}: mean shifted by {size:.3g} (no bias to hold it)"
            for site, size in self.shift.items()
            if size
        ]
        return "\n".join(lines)


def _readers(model: Module, example: Any, chosen: Mapping[str, Module]) -> dict[str, list[str]]:
    """Per site, names of the modules that read its output and call no module for it."""
    modules = sites.named(model)
    ran: set[str] = set()
    produced: dict[str, Tensor] = {}
    found: dict[str, list[str]] = {name: [] for name in chosen}

    def produce(name: str) -> Any:
        def hook(module: Module, args: Any, output: Any) -> None:
            produced[name], _ = sites.pick(name, output, None)

        return hook

    def read(name: str) -> Any:
        def hook(module: Module, args: Any, kwargs: Any) -> None:
            ran.add(name)
            inputs = [v for v in (*args, *kwargs.values()) if sites.is_row_tensor(v)]
            for site, tensor in produced.items():
                if any(_same(tensor, v) for v in inputs) and name != site:
                    found[site].append(name)

        return hook

    handles = [m.register_forward_hook(produce(n), prepend=True) for n, m in chosen.items()]
    handles += [
        m.register_forward_pre_hook(read(n), with_kwargs=True)
        for n, m in modules.items()
        if n and not isinstance(m, torch.jit.ScriptModule)  # takes no hooks
    ]
    try:
        outputs_of(model, example)
    finally:
        for handle in handles:
            handle.remove()
    # By what ran, not by who has children: quantised layers keep their weights in a module.
    calling = {name[:i] for name in ran for i, letter in enumerate(name) if letter == "."}
    return {site: [n for n in names if n not in calling] for site, names in found.items()}


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
        Erasers by site.
    example : mapping, tuple or tensor
        Arguments of one call, on which the folded model is compared with the hooked one.
    tokens : "all"
        Weights cannot know positions: a fold erases at every token. Must be given where the
        erasers are for other tokens.
    bias : {"error", "add", "drop"}
        Where a layer has no bias to hold the mean: raise; add one, which ``from_pretrained``
        drops for models whose configuration has none; or leave the mean out, which erases as
        exactly at this site and shifts the mean. Later sites then read other states: with
        several sites, fit them by ``fit_layers(..., bias="drop")``, whose erasers need no bias.

    Returns
    -------
    Folded
        Changed layers, and the distance of the outputs from those of the hooked model.

    Raises
    ------
    FoldError
        A site is read by something else than linear layers (the residual stream is), weights are
        quantised, elsewhere, or shared by modules, the outputs differ, or a mean that is dropped
        changes the states at a later site. Every parameter is what it was, bit for bit.
    InputError
        `tokens` or `bias` is wrong.

    Warns
    -----
    SplinceWarning
        A tied weight was untied, or a bias was added that a configuration does not know.
    OtherTokensWarning
        :func:`fit_layers` changed other tokens than all of them, at several sites.

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
        if tokens == "all":
            erasers._check_tokens(tokens)
        if erasers.placement.output is not None:
            raise FoldError(
                "only inputs and whole outputs of modules are folded; use install for this site"
            )
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
    placement = erasers.placement if isinstance(erasers, Erasers) else None
    with quiet(model):
        at_input = placement is not None and placement.side == "input"
        plans = _plans(model, chosen, None if at_input else _readers(model, example, chosen))
        drops = {
            name: bias == "drop" and bool(_short_of_bias(plan, projections[name]))
            for name, plan in plans.items()
        }
        dropped = {n: linear_part(p) if drops[n] else p for n, p in projections.items()}
        with hooked(model, chosen, dropped, placement) as states:
            expected = outputs_of(model, example)
        if any(drops.values()) and len(chosen) > 1:
            with hooked(model, chosen, projections, placement) as kept:
                outputs_of(model, example)
            for name in chosen:
                check_states(name, kept[name], states[name], example)
        installed = installed_outputs(model, erasers, example)
        try:
            shift = {
                name: _fold_site(name, projections[name], plans[name], surgery, drops[name])
                for name in chosen
            }
            found = outputs_of(model, example)
            gap = difference(expected, found)
            limit = max(
                _TOLERANCE.get(layer.module.weight.dtype, LOW_PRECISION)
                for plan in plans.values()
                for layer, _ in plan
            )
            if not gap <= limit:
                raise FoldError(
                    f"the folded model differs from the hooked one by {gap:.1e} of the "
                    f"range of its output (at most {limit:.0e} is rounding): something else than "
                    f"the linear layers reads {list(chosen)}, such as a residual connection. "
                    "Erase the outputs of norms that feed linear layers only, or use install"
                )
        except BaseException:
            surgery.undo()
            raise
    layers = {name: tuple(layer.name for layer, _ in plan) for name, plan in plans.items()}
    from_installed = None
    if installed is not None:
        pairs = [[attended(example, t) for t in outputs] for outputs in (installed, found)]
        from_installed = difference(*pairs)
    _tell(surgery)
    return Folded(layers, gap, from_installed, shift, tuple(surgery.untied))


def _plans(
    model: Module, chosen: Mapping[str, Module], readers: Mapping[str, list[str]] | None
) -> dict[str, list[tuple[Layer, str]]]:
    """Per site, the layers to change, and whether they make ("out") or read ("in") it.

    `readers` has the modules that read each output; None where sites are inputs.

    Raises
    ------
    FoldError
        There is nothing linear to fold into.
    """
    modules = sites.named(model)
    count: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        count[id(module)] = count.get(id(module), 0) + 1
    plans: dict[str, list[tuple[Layer, str]]] = {}
    for name, module in chosen.items():
        own = layer_of(name, module)
        if readers is None:
            if own is None or own.kind == "embedding":
                raise FoldError(
                    f"{name!r}, a {type(module).__name__}, is not linear, and only the inputs of "
                    "linear layers are folded; use install"
                )
            plan = [(own, "in")]
        elif own is not None:
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


def _short_of_bias(plan: list[tuple[Layer, str]], projection: Projection) -> list[str]:
    """Names of the layers that have no bias for the mean; none are needed where it is 0."""
    if not projection.offset.any():
        return []
    return [layer.name for layer, _ in plan if _lacks_bias(layer)]


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
    missing = _short_of_bias(plan, projection)
    if missing and surgery.bias == "error":
        raise FoldError(
            f"the layers {missing} have no bias, which would hold the mean of {name!r}; pass "
            "bias='drop' to shift the mean (at one site the erasing is as exact; fit several by "
            "fit_layers(..., bias='drop')), or bias='add'"
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
        surgery.replace(layer, folded, None if _lacks_bias(layer) and not shift.any() else shift)
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
