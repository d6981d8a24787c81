"""Merging of erasers into weights, with a verification on an example.

A site can be folded if only linear layers read its output: their ``W x + b`` becomes
``(W P) x + (b + W offset)``. It can also be folded if it is a linear layer, ``(P W) x + (P b +
offset)``, or an embedding, whose rows are erased. Other operations may read the output, too, such
as a residual connection. Therefore the outputs of the folded model are compared with those of the
model with hooks, and the fold is undone if they differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from splince_fast._runtime.warn import warn
from splince_fast.exceptions import FoldError, InputError, SplinceWarning
from splince_fast.nn import running, sites
from splince_fast.nn.erasers import Erasers, linear_part, read_erasers
from splince_fast.nn.layer_weights import Layer, WeightReplacement, layer_of, to_numpy
from splince_fast.nn.verification import (
    attended,
    check_activations,
    difference,
    hooked,
    installed_outputs,
    outputs_of,
    tolerance,
)
from splince_fast.projection import Projection

# Layers to change for a site: "in" for layers that read the site, "out" for the site itself.
Changes = list[tuple[Layer, str]]

# Largest difference from the model with hooks, relative to the range of an output, in 32 bits.
_TOLERANCE = 1e-4
# Modules that return their input in evaluation mode.
_IDENTITIES = (torch.nn.Identity, torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d)


@dataclass(frozen=True)
class Folded:
    """Result of :func:`fold`.

    Attributes
    ----------
    layers : dict of str to tuple of str
        By site, the layers whose weights changed.
    difference : float
        Largest difference of the outputs, on the example, from hooks that erase all tokens, without
        the means that were dropped; relative to the range of an output.
    from_installed : float or None
        Largest difference from ``install(model, erasers)``, which may select tokens and keeps the
        mean; at attended tokens if the example has an attention mask. None if `install` needs
        `tokens`, or arguments that the example does not have.
    shift : dict of str to float
        By site, the largest norm of the vectors that ``bias="drop"`` leaves out of the outputs of
        its layers; 0 if none was left out.
    untied : tuple of str
        Layers whose weights were tied to those of others before the fold.
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
    """Return, per site, the names of the modules that read its output and call no other module."""
    modules = sites.named_modules(model)
    ran: set[str] = set()
    outputs: dict[str, Tensor] = {}
    readers: dict[str, list[str]] = {name: [] for name in chosen}

    def store_output(name: str, module: Module, args: object, output: object) -> None:
        outputs[name], _ = sites.pick(name, output, None)

    def find_readers(name: str, module: Module, args: Any, kwargs: Any) -> None:
        ran.add(name)
        inputs = [v for v in (*args, *kwargs.values()) if sites.is_row_tensor(v)]
        for site, tensor in outputs.items():
            if any(_share_memory(tensor, v) for v in inputs) and name != site:
                readers[site].append(name)

    with ExitStack() as stack:
        for name, module in chosen.items():
            hook = partial(store_output, name)
            stack.callback(module.register_forward_hook(hook, prepend=True).remove)
        for name, module in modules.items():
            if name and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                hook = partial(find_readers, name)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        outputs_of(model, example)
    # Submodules that do not run, such as the weights of quantised layers, do not count.
    parents = {name[:i] for name in ran for i, letter in enumerate(name) if letter == "."}
    return {site: [n for n in names if n not in parents] for site, names in readers.items()}


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are views of the same memory."""
    a, b = first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()
    return bool(a == b and a != 0 and first.device == second.device)


def fold(
    model: Any, erasers: Any, example: Any, *, tokens: object = None, bias: str = "error"
) -> Folded:
    """Merge erasers into the weights of their sites, or of the layers that read the sites.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is changed in place. After an error it is unchanged.
    erasers : Erasers, path, or mapping of str to Projection
        Erasers by site.
    example : mapping, tuple or tensor
        Arguments of one call, on which the folded model is compared with the model with hooks.
    tokens : "all"
        A fold erases at every token, because weights do not depend on positions. Required if the
        erasers are for other tokens.
    bias : {"error", "add", "drop"}
        What to do for a layer without a bias for the mean: raise an error; add a bias, which
        ``from_pretrained`` drops for models whose configuration has none; or leave the mean out,
        which erases as exactly at this site and shifts the mean. Later sites then have other
        activations: with several sites use ``fit_layers(..., bias="drop")``, whose erasers need no
        bias.

    Returns
    -------
    Folded
        Changed layers, and the difference of the outputs from those with hooks.

    Raises
    ------
    FoldError
        Other operations than linear layers read a site, such as those of the residual stream;
        weights are quantised, offloaded, distributed or shared by modules; the outputs differ; or a
        dropped mean changes the activations at a later site. All parameters are unchanged, bit for
        bit.
    InputError
        `tokens` or `bias` is invalid.

    Warns
    -----
    SplinceWarning
        A tied weight was untied, or a bias was added that the configuration does not have.
    OtherTokensWarning
        :func:`fit_layers` changed other tokens than all, at several sites.

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
    model = running.unwrap(model)
    if bias not in ("error", "add", "drop"):
        raise InputError(f"bias is {bias!r}; it is 'error', 'add' or 'drop'")
    erasers, recipe = read_erasers(erasers)
    if tokens not in (None, "all"):
        raise InputError(f"tokens is {tokens!r}; a fold erases at every token: pass 'all'")
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
    chosen: dict[str, Module] = {}
    projections: dict[str, Projection] = {}
    for at, projection in erasers.items():
        for name, module in sites.find(model, at).items():
            chosen[name] = module
            projections[name] = (
                projection @ projections[name] if name in projections else projection
            )
    if not projections:
        raise InputError("erasers is empty; pass at least one projection by the name of a site")
    example = running.batch_to(example, running.device_of(model))
    replacement = WeightReplacement(model)
    placement = recipe.placement if isinstance(erasers, Erasers) else None
    with running.evaluating(model):
        at_input = recipe.placement.side == "input"
        changes = _changes(model, chosen, None if at_input else _readers(model, example, chosen))
        drops = {
            name: bias == "drop" and bool(_layers_without_bias(of_site, projections[name]))
            for name, of_site in changes.items()
        }
        folded = {n: linear_part(p) if drops[n] else p for n, p in projections.items()}
        with hooked(model, chosen, folded, placement) as without_means:
            expected = outputs_of(model, example)
        if any(drops.values()) and len(chosen) > 1:
            with hooked(model, chosen, projections, placement) as with_means:
                outputs_of(model, example)
            for name in chosen:
                check_activations(name, with_means[name], without_means[name], example)
        installed = installed_outputs(model, erasers, example)
        try:
            shift = {
                name: _fold_site(name, projections[name], of_site, replacement, bias, drops[name])
                for name, of_site in changes.items()
            }
            outputs = outputs_of(model, example)
            distance = difference(expected, outputs)
            largest = max(
                tolerance(layer.module.weight.dtype, _TOLERANCE)
                for of_site in changes.values()
                for layer, _ in of_site
            )
            if not math.isfinite(distance):
                raise FoldError(
                    "the outputs of the folded model on the example cannot be compared: they hold "
                    "NaN or infinity. Pass another example; weights that overflow need bfloat16 or "
                    "float32"
                )
            if not distance <= largest:
                raise FoldError(
                    f"the folded model differs from the hooked one by {distance:.1e} of the range "
                    f"of its output (at most {largest:.0e} is rounding): other operations than "
                    f"the linear layers read {list(chosen)}, such as a residual connection. "
                    "Erase the outputs of norms that feed linear layers only, or use install"
                )
        except BaseException:
            replacement.undo()
            raise
    layers = {name: tuple(layer.name for layer, _ in pairs) for name, pairs in changes.items()}
    from_installed = None
    if installed is not None:
        from_installed = difference(
            *([attended(example, t) for t in tensors] for tensors in (installed, outputs))
        )
    _warn(replacement)
    return Folded(layers, distance, from_installed, shift, tuple(replacement.untied))


def _changes(
    model: Module, chosen: Mapping[str, Module], readers: Mapping[str, list[str]] | None
) -> dict[str, Changes]:
    """Return the layers to change per site; FoldError if there is none, or if one is not linear.

    `readers` are the modules that read each output, None if the sites are inputs.
    """
    modules = sites.named_modules(model)
    count = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    changes: dict[str, Changes] = {}
    for name, module in chosen.items():
        site_layer = layer_of(name, module)
        if readers is None:
            if site_layer is None or site_layer.kind == "embedding":
                raise FoldError(
                    f"{name!r}, a {type(module).__name__}, is not linear, and only the inputs of "
                    "linear layers are folded; use install"
                )
            of_site = [(site_layer, "in")]
        elif site_layer is not None:
            of_site = [(site_layer, "out")]
        else:
            of_site = []
            for reader in dict.fromkeys(readers[name]):
                if isinstance(modules[reader], _IDENTITIES):
                    continue
                layer = layer_of(reader, modules[reader])
                if layer is None or layer.kind == "embedding":
                    raise FoldError(
                        f"{name!r} is read by {reader!r}, a {type(modules[reader]).__name__}, "
                        "which is not linear; fold the outputs of norms that feed linear layers "
                        "only, or use install"
                    )
                of_site.append((layer, "in"))
        if not of_site:
            raise FoldError(
                f"no linear layer reads the output of {name!r}: a residual stream cannot be "
                "folded, because other terms are added before it is read; erase the outputs of "
                "the norms after it, or use install"
            )
        for layer, _ in of_site:
            if count[id(layer.module)] > 1:
                raise FoldError(
                    f"{layer.name!r} occurs {count[id(layer.module)]} times in the model, and a "
                    "fold would change all occurrences; use install"
                )
        changes[name] = of_site
    return changes


def _layers_without_bias(changes: Changes, projection: Projection) -> list[str]:
    """Return the names of layers that need a bias for the offset of the map and have none."""
    if not projection.offset.any():
        return []
    return [layer.name for layer, _ in changes if _lacks_bias(layer)]


def _lacks_bias(layer: Layer) -> bool:
    return layer.kind != "embedding" and getattr(layer.module, "bias", None) is None


def _fold_site(
    name: str,
    projection: Projection,
    changes: Changes,
    replacement: WeightReplacement,
    bias: str,
    drop: bool,
) -> float:
    """Fold one site; return the norm of the mean that is left out, the largest of all layers."""
    missing = _layers_without_bias(changes, projection)
    if missing and bias == "error":
        raise FoldError(
            f"the layers {missing} have no bias for the mean of {name!r}; pass "
            "bias='drop' to shift the mean (at one site the erasing is as exact; fit several by "
            "fit_layers(..., bias='drop')), or bias='add'"
        )
    left, right = projection.left, projection.right
    offset = np.zeros(len(left)) if drop else np.asarray(projection.offset)
    largest = 0.0
    for layer, role in changes:
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
            old_bias = getattr(layer.module, "bias", None)
            values = np.zeros(len(matrix)) if old_bias is None else to_numpy(old_bias)
            shift = offset - left @ (right.T @ values)
        if layer.kind == "embedding":  # columns of the matrix are outputs: each gets the offset
            folded += offset[:, None]
        if drop:
            mean = np.asarray(projection.offset)
            largest = max(largest, float(np.linalg.norm(matrix @ mean if role == "in" else mean)))
        no_bias = _lacks_bias(layer) and not shift.any()
        replacement.replace(layer, folded, None if no_bias else shift)
    return largest


def _warn(replacement: WeightReplacement) -> None:
    """Warn about changes that the configuration of the model does not record."""
    if replacement.untied:
        warn(
            f"the weights of {replacement.untied} were tied to others and are separate now "
            "(config.tie_word_embeddings is False): the model has that many parameters more",
            SplinceWarning,
        )
    if replacement.added:
        warn(
            f"the biases of {replacement.added} were added, and the configuration has none: "
            "from_pretrained drops them, and other engines do, too. Save the erasers and install "
            "them after loading, or fold with bias='drop'",
            SplinceWarning,
        )
