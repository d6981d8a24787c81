"""Merging of erasers into weights, with a verification on an example.

Let ``P x + offset`` be the eraser of a site. If only linear layers read the output of the site, the
eraser is folded into these layers: each layer ``W x + b`` becomes ``(W P) x + (b + W offset)``. If
the site is itself a linear layer ``W x + b``, it becomes ``(P W) x + (P b + offset)``. If the site
is an embedding, the eraser is applied to each embedding vector. Other operations, such as a
residual connection, may also read the output of a site. Therefore the outputs with hooks at the
sites are compared with the outputs with hooks at the inputs of the layers, and with the outputs of
the folded model. The fold is undone if the outputs differ.
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
from splince_fast.labels.names import listed
from splince_fast.nn import running, sites
from splince_fast.nn.erasers import Erasers, linear_part, read_erasers
from splince_fast.nn.layer_weights import Layer, WeightReplacement, layer_of, to_numpy
from splince_fast.nn.sites import Placement
from splince_fast.nn.verification import (
    HookPoint,
    attended,
    channel_axis,
    check_activations,
    differences,
    erasing_hooks,
    installed_outputs,
    outputs_of,
    tolerance,
)
from splince_fast.projection import Projection

# Layers to change for a site, with their roles: "in" for a layer that reads the erased activations,
# "out" for a layer that returns them.
Changes = list[tuple[Layer, str]]

# Largest difference between the folded model and the model with hooks that counts as rounding error
# in 32 bits, relative to the range of an output.
_OUTPUT_TOLERANCE = 1e-4
# Largest difference between hooks at the sites and hooks at the inputs of the layers, relative to
# the change by the erasers. The two are equal, bit for bit, if only these layers read the sites and
# the layers read the complete tensors.
_READER_TOLERANCE = 0.1
# Modules that return their input in evaluation mode.
_IDENTITIES = (torch.nn.Identity, torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d)


@dataclass(frozen=True)
class Folded:
    """Result of :func:`fold`.

    Attributes
    ----------
    layers : dict of str to tuple of str
        Names of the layers whose weights changed, by site.
    difference : float
        Largest difference between the outputs of the folded model and of the model with hooks, on
        the example and relative to the range of an output, without entries that are constants such
        as -1e9. These hooks erase all tokens, and they leave out the means that the fold leaves out
        (``bias="drop"``).
    from_installed : float or None
        Largest difference between the outputs of the folded model and of ``install(model,
        erasers)``, which may select tokens and keeps all means; relative to the range of an output,
        and over attended tokens if the example has an attention mask. None if `install` needs
        `tokens`, or arguments that the example does not have.
    shift : dict of str to float
        Norm of the vector that ``bias="drop"`` leaves out of the output of a layer, by site: the
        largest norm of all changed layers of the site, or 0 if no mean was dropped.
    untied : tuple of str
        Names of the layers whose weights were tied to weights of other layers before the fold.
    """

    layers: dict[str, tuple[str, ...]]
    difference: float
    from_installed: float | None
    shift: dict[str, float]
    untied: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            "folded; largest difference of the outputs, relative to their range:",
            f"  {self.difference:.1e} from hooks at every token",
        ]
        if self.from_installed is None:
            lines += [
                "  not compared with install(model, erasers), because its token rule cannot be "
                "applied to the example"
            ]
        else:
            lines += [f"  {self.from_installed:.1e} from install(model, erasers)"]
        lines += [f"  {site} -> {', '.join(layers)}" for site, layers in self.layers.items()]
        lines += [f"  untied: {name}" for name in self.untied]
        lines += [
            f"  {site}: outputs shifted by {size:.3g}, because bias='drop' leaves the mean out"
            for site, size in self.shift.items()
            if size
        ]
        return "\n".join(lines)


def _readers(
    model: Module, example: Any, site_modules: Mapping[str, Module]
) -> dict[str, list[str]]:
    """Return, by site, the names of the innermost modules that read the output of the site."""
    modules = sites.named_modules(model)
    called: set[str] = set()
    outputs: dict[str, Tensor] = {}
    readers: dict[str, list[str]] = {name: [] for name in site_modules}

    def store_output(name: str, module: Module, args: object, output: object) -> None:
        outputs[name], _ = sites.pick(name, output, None)

    def find_readers(name: str, module: Module, args: Any, kwargs: Any) -> None:
        called.add(name)
        inputs = [v for v in (*args, *kwargs.values()) if sites.is_row_tensor(v)]
        for site, tensor in outputs.items():
            if any(_share_memory(tensor, v) for v in inputs) and name != site:
                readers[site].append(name)

    with ExitStack() as stack:
        for name, module in site_modules.items():
            hook = partial(store_output, name)
            stack.callback(module.register_forward_hook(hook, prepend=True).remove)
        for name, module in modules.items():
            # TorchScript modules take no hooks. Parametrisations run inside a layer that reads.
            is_inner = isinstance(module, torch.jit.ScriptModule) or ".parametrizations." in name
            if name and not is_inner:
                hook = partial(find_readers, name)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        outputs_of(model, example)
    # A module is innermost if none of its submodules ran. A quantised layer may be innermost: its
    # submodules hold weights and do not run.
    parents = {name[:i] for name in called for i, character in enumerate(name) if character == "."}
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
        The model, which is changed in place; unchanged after an error.
    erasers : Erasers, path, or mapping of str to Projection
        Erasers by site.
    example : mapping, tuple or tensor
        Arguments of one call, on which the folded model is compared with the model with hooks. The
        erasers must change a floating tensor in the output of this call.
    tokens : "all"
        Must be "all" if the erasers are for other tokens: folded weights erase at every token,
        because weights do not depend on positions.
    bias : {"error", "add", "drop"}
        Action if a layer lacks the bias that the mean of an eraser needs. "error" raises an error.
        "add" adds a bias, which ``from_pretrained`` drops if the configuration of the model has no
        bias. "drop" leaves the mean out: the concept is erased as exactly at this site, but the
        output is shifted, which changes the activations at later sites. For several sites use
        ``fit_layers(..., bias="drop")``, whose erasers need no bias.

    Returns
    -------
    Folded
        Changed layers, and the differences of the outputs from the model with hooks.

    Raises
    ------
    FoldError
        Other operations than linear layers read a site, such as those of the residual stream;
        weights are quantised, offloaded, distributed, computed from other parameters or shared by
        modules; the outputs differ, or hold no floating tensor that the erasers change; or a
        dropped mean changes the activations at a later site. All parameters are then unchanged, bit
        for bit.
    InputError
        `tokens` or `bias` is invalid.

    Warns
    -----
    SplinceWarning
        A tied weight was untied, or a bias was added that the configuration does not have.
    OtherTokensWarning
        The erasers of several sites were fitted by :func:`fit_layers` with other tokens than "all"
        erased.

    Examples
    --------
    >>> import numpy as np, torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))
    >>> z = np.arange(300) % 2
    >>> x = torch.randn(300, 6) + torch.from_numpy(z)[:, None] * torch.arange(6)
    >>> collected = snn.collect(model, [{"input": x, "z": z}], "0", labels="z")
    >>> folded = snn.fold(model, collected.erasers(sf.leace, erase="z"), x)
    >>> folded.layers, folded.difference < 1e-5
    ({'0': ('1',)}, True)
    """
    model = running.unwrap(model)
    if bias not in ("error", "add", "drop"):
        raise InputError(f"bias is {bias!r}; it must be 'error', 'add' or 'drop'")
    if example is None:
        raise InputError(
            "example is None; pass the arguments of one call of the model, such as a batch"
        )
    erasers, spec = read_erasers(erasers)
    if tokens not in (None, "all"):
        raise InputError(f"tokens is {tokens!r}; a fold erases at every token: pass 'all'")
    if isinstance(erasers, Erasers):
        if erasers.apply_to != "all" and tokens != "all":
            raise InputError(
                f"these erasers are for tokens={erasers.apply_to!r}, and folded weights erase at "
                "every token, because weights do not depend on positions; pass tokens='all' to "
                "accept this, or use install"
            )
        if tokens == "all":
            erasers._check_tokens(tokens)
        if erasers.placement.output is not None:
            raise FoldError(
                f"these erasers are for the element {erasers.placement.output!r} of outputs, and "
                "only inputs and complete outputs of modules can be folded; use install"
            )
    site_modules: dict[str, Module] = {}
    projections: dict[str, Projection] = {}
    for pattern, projection in erasers.items():
        for name, module in sites.find(model, pattern).items():
            site_modules[name] = module
            projections[name] = (
                projection @ projections[name] if name in projections else projection
            )
    if not projections:
        raise InputError("erasers is empty; pass at least one projection by the name of a site")
    example = running.batch_to(example, running.device_of(model))
    replacement = WeightReplacement(model)
    placement = spec.placement if isinstance(erasers, Erasers) else None
    with running.evaluating(model):
        at_input = spec.placement.side == "input"
        readers = None if at_input else _readers(model, example, site_modules)
        changes = _changes(model, site_modules, projections, readers)
        drop_mean = {
            name: bias == "drop" and bool(_layers_without_bias(site_changes, projections[name]))
            for name, site_changes in changes.items()
        }
        applied = {n: linear_part(p) if drop_mean[n] else p for n, p in projections.items()}
        points = [HookPoint.of(n, m, applied[n], placement) for n, m in site_modules.items()]
        with erasing_hooks(model, points) as without_means:
            expected = outputs_of(model, example)
        without_erasers = outputs_of(model, example)
        compare = partial(differences, expected, without_erasers=without_erasers)
        effects = compare(without_erasers)
        if not any(effects) and any(p.rank for p in applied.values()):
            raise FoldError(
                "the erasers change no floating tensor in the outputs of the model on the "
                "example, so the fold cannot be verified. Likely causes: the model returns token "
                "ids or classes only, or the example does not run the sites. Fold a model that "
                "returns floating outputs, such as logits, pass another example, or use install"
            )
        if not at_input:
            with erasing_hooks(model, _layer_points(points, changes)):
                _check_readers(compare(outputs_of(model, example)), effects, site_modules)
        if any(drop_mean.values()) and len(site_modules) > 1:
            full_points = [point._replace(projection=projections[point.name]) for point in points]
            with erasing_hooks(model, full_points) as with_means:
                outputs_of(model, example)
            for name in site_modules:
                check_activations(name, with_means[name], without_means[name], example)
        outputs_installed = installed_outputs(model, erasers, example)
        try:
            shift = {
                name: _fold_site(
                    name, projections[name], site_changes, replacement, bias, drop_mean[name]
                )
                for name, site_changes in changes.items()
            }
            outputs = outputs_of(model, example)
            distance = float(np.max(compare(outputs), initial=0.0))  # NaN if any is NaN
            limit = max(
                tolerance(layer.module.weight.dtype, _OUTPUT_TOLERANCE)
                for site_changes in changes.values()
                for layer, _ in site_changes
            )
            if not math.isfinite(distance):
                raise FoldError(
                    "the outputs of the folded model on the example cannot be compared: they hold "
                    "NaN or infinity. Pass another example; weights that overflow need bfloat16 or "
                    "float32"
                )
            if not distance <= limit:
                raise FoldError(
                    f"the outputs of the folded model differ by {distance:.1e} of their range from "
                    f"those of the model with hooks (at most {limit:.0e} is rounding error). The "
                    f"likely cause is that the layers of {listed(site_modules)} compute another "
                    "function of their weights than a linear one, or that other code reads their "
                    "weights without calling them. Erase at other sites, or use install"
                )
        except BaseException:
            replacement.undo()
            raise
    layers = {name: tuple(layer.name for layer, _ in pairs) for name, pairs in changes.items()}
    from_installed = None
    if outputs_installed is not None:
        compared = (outputs_installed, outputs, without_erasers)
        from_installed = float(
            np.max(
                differences(*([attended(example, t) for t in tensors] for tensors in compared)),
                initial=0.0,
            )
        )
    _warn(replacement)
    return Folded(layers, distance, from_installed, shift, tuple(replacement.untied))


def _layer_points(points: list[HookPoint], changes: Mapping[str, Changes]) -> list[HookPoint]:
    """Return the hooks that erase the inputs of the layers, in place of the outputs of the sites.

    A site that is itself a layer keeps its hook.
    """
    layer_points = []
    for point in points:
        for layer, role in changes[point.name]:
            axis = channel_axis(layer.module)
            at_layer = HookPoint(
                layer.name, layer.module, point.projection, Placement("input", axis)
            )
            layer_points.append(at_layer if role == "in" else point)
    return layer_points


def _check_readers(
    distances: list[float], effects: list[float], site_modules: Mapping[str, Module]
) -> None:
    """Raise FoldError if other operations than the layers to change read the sites.

    `distances` are the differences between hooks at the layers and hooks at the sites, `effects`
    those between the model without erasers and hooks at the sites, by output tensor.
    """
    for distance, effect in zip(distances, effects, strict=True):
        if distance > _READER_TOLERANCE * effect or math.isnan(distance):
            raise FoldError(
                f"erasure at the inputs of the linear layers that read {listed(site_modules)} is "
                f"not erasure at these sites: the outputs differ by {distance:.1e} of their range, "
                f"and the erasers change them by {effect:.1e} of it. The likely cause "
                "is that other operations than linear layers, such as a residual connection, also "
                "read a site. Erase the outputs of norms that only linear layers read, or use "
                "install"
            )


def _changes(
    model: Module,
    site_modules: Mapping[str, Module],
    projections: Mapping[str, Projection],
    readers: Mapping[str, list[str]] | None,
) -> dict[str, Changes]:
    """Return the layers to change, by site.

    `readers` names the modules that read the output of each site, or is None if the erasers apply
    to the inputs of the sites. Raises FoldError if a site has no layer to change, or if a reader is
    not linear or has another width.
    """
    modules = sites.named_modules(model)
    n_occurrences = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    changes: dict[str, Changes] = {}
    for name, module in site_modules.items():
        site_layer = layer_of(name, module)
        if readers is None:
            if site_layer is None or site_layer.kind == "embedding":
                raise FoldError(
                    f"{name!r}, a {type(module).__name__}, is not linear, and only the inputs of "
                    "linear layers can be folded; use install"
                )
            site_changes = [(site_layer, "in")]
        elif site_layer is not None:
            site_changes = [(site_layer, "out")]
        else:
            site_changes = []
            for reader in dict.fromkeys(readers[name]):
                if isinstance(modules[reader], _IDENTITIES):
                    continue
                layer = layer_of(reader, modules[reader])
                if layer is None or layer.kind == "embedding":
                    raise FoldError(
                        f"{name!r} is read by {reader!r}, a {type(modules[reader]).__name__}, "
                        "which is not linear; fold the outputs of norms that only linear layers "
                        "read, or use install"
                    )
                site_changes.append((layer, "in"))
        if not site_changes:
            raise FoldError(
                f"no linear layer reads the output of {name!r}: a residual stream cannot be "
                "folded, because other terms are added before it is read; erase the outputs of "
                "the norms after it, or use install"
            )
        for layer, role in site_changes:
            if layer.shape[role == "in"] != projections[name].n_features:
                raise FoldError(
                    f"{layer.name!r} has a matrix {layer.shape}, and the eraser of {name!r} has "
                    f"width {projections[name].n_features}"
                )
            if n_occurrences[id(layer.module)] > 1:
                raise FoldError(
                    f"{layer.name!r} occurs {n_occurrences[id(layer.module)]} times in the model, "
                    "and a fold would change all occurrences; use install"
                )
        changes[name] = site_changes
    return changes


def _layers_without_bias(changes: Changes, projection: Projection) -> list[str]:
    """Return the names of the layers that lack a bias for the offset of a projection.

    The list is empty if the offset is 0.
    """
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
    drop_mean: bool,
) -> float:
    """Fold the eraser of one site into its layers.

    Returns the largest norm of the vector that is left out of the output of a layer; 0 if the mean
    is not dropped.
    """
    without_bias = _layers_without_bias(changes, projection)
    if without_bias and bias == "error":
        raise FoldError(
            f"the layers {without_bias} have no bias, which the mean of {name!r} needs. Pass "
            "bias='drop' to leave the mean out: the concept is erased as exactly at one site; fit "
            "erasers of several sites with fit_layers(..., bias='drop'). Or pass bias='add' to add "
            "biases"
        )
    left, right = projection.left, projection.right
    offset = np.zeros(len(left)) if drop_mean else np.asarray(projection.offset)
    largest = 0.0
    for layer, role in changes:
        matrix = layer.matrix()
        if role == "in":
            folded = matrix - (matrix @ left) @ right.T
            bias_change = matrix @ offset
        else:
            folded = matrix - left @ (right.T @ matrix)
            old_bias = getattr(layer.module, "bias", None)
            bias_values = np.zeros(len(matrix)) if old_bias is None else to_numpy(old_bias)
            bias_change = offset - left @ (right.T @ bias_values)
        if layer.kind == "embedding":  # the columns are embedding vectors
            folded += offset[:, None]
        if drop_mean:
            mean = np.asarray(projection.offset)
            largest = max(largest, float(np.linalg.norm(matrix @ mean if role == "in" else mean)))
        no_bias = _lacks_bias(layer) and not bias_change.any()
        replacement.replace(layer, folded, None if no_bias else bias_change)
    return largest


def _warn(replacement: WeightReplacement) -> None:
    """Warn about untied weights, and about biases that the configuration does not record."""
    if replacement.untied:
        warn(
            f"the weights of {replacement.untied} were tied to weights of other layers and are "
            "separate now: the model has more parameters, and tie_word_embeddings in its "
            "configurations, if it has any, is False",
            SplinceWarning,
        )
    if replacement.with_added_bias:
        warn(
            f"biases were added to the layers {replacement.with_added_bias}, and the configuration "
            "of the model has no biases: from_pretrained and other inference engines drop the "
            "added biases. Save the erasers and install them after loading, or fold with "
            "bias='drop'",
            SplinceWarning,
        )
