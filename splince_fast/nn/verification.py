"""How a folded model is compared: with hooks that do the same, and with installed erasers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from splince_fast.exceptions import FoldError, InputError, NothingErasedWarning, SiteError
from splince_fast.nn import sites
from splince_fast.nn.eraser import Eraser
from splince_fast.nn.installed import install
from splince_fast.nn.recipe import Placement
from splince_fast.projection import Projection

Tensor = Any
Module = Any

# Largest change of the states at a site that is rounding, in units of their deviation.
_SAME_STATES = {torch.float64: 1e-5, torch.float32: 1e-5}
LOW_PRECISION = 2e-2


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


def outputs_of(model: Module, example: Any) -> list[Tensor]:
    """Outputs of a model on the example, in float64 on the CPU."""
    result = sites.call(model, example, (), None)
    return [_double(t) for t in _outputs(result)]


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def attended(example: Any, tensor: Tensor) -> Tensor:
    """The rows of a tensor (B, T, ...) at attended tokens; all where the example has no mask."""
    mask = example.get("attention_mask") if isinstance(example, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or tensor.shape[:2] != mask.shape:
        return tensor
    return tensor[mask.cpu() != 0]


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Largest difference, in units of each tensor's range."""
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if a.numel():
            scale = float(a.max() - a.min()) or 1.0
            worst = max(worst, float((a - b).abs().max()) / scale)
    return worst


@contextmanager
def hooked(
    model: Module,
    chosen: Mapping[str, Module],
    projections: Mapping[str, Projection],
    placement: Placement | None,
) -> Iterator[dict[str, list[Tensor]]]:
    """The model with hooks that erase as weights do: at every position, pads included.

    Yields
    ------
    dict of str to list of Tensor
        By site, the states (..., d) that reached the eraser, filled while the model runs.
    """
    handles = []
    states: dict[str, list[Tensor]] = {name: [] for name in chosen}
    try:
        for name, module in chosen.items():
            channels = isinstance(module, torch.nn.Conv2d | torch.nn.BatchNorm2d)
            axis = placement.feature_dim if placement is not None else 1 if channels else -1
            eraser = Eraser(projections[name]).to(sites.device_of(model))
            if placement is not None and placement.side == "input":
                before = _inputs_everywhere(name, eraser, axis, states[name])
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            else:
                hook = _everywhere(name, eraser, axis, states[name])
                handles.append(module.register_forward_hook(hook))
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _everywhere(name: str, eraser: Eraser, axis: int, states: list[Tensor]) -> Any:
    """A forward hook that erases at every position, and notes what it erases."""

    def hook(module: Module, args: Any, output: Any) -> Any:
        x, where = sites.pick(name, output, None, axis)
        sites.check_width(name, x, axis, eraser.n_features)
        rows = x.movedim(axis, -1)
        states.append(rows)
        return sites.put(output, where, eraser(rows).movedim(-1, axis))

    return hook


def _inputs_everywhere(name: str, eraser: Eraser, axis: int, states: list[Tensor]) -> Any:
    """The same before a module runs, for its input."""
    erase = _everywhere(name, eraser, axis, states)

    def hook(module: Module, args: Any, kwargs: Any) -> Any:
        key = sites.pick_input(name, args, kwargs)
        if isinstance(key, int):
            return (erase(module, (), args[key]), *args[key + 1 :]), kwargs
        return args, {**kwargs, key: erase(module, (), kwargs[key])}

    return hook


def check_states(name: str, kept: list[Tensor], dropped: list[Tensor], example: Any) -> None:
    """Raise FoldError if means that are dropped at other sites change the states of a site.

    A shift of all rows alike changes no covariance and is left out.
    """
    if not kept:  # the example does not reach it
        return
    before, after = (
        torch.cat([attended(example, _double(x)).reshape(-1, x.shape[-1]) for x in states])
        for states in (kept, dropped)
    )
    change = after - before
    if len(change) > 1:
        before, change = before - before.mean(0), change - change.mean(0)
    size = float(before.norm())
    moved = float(change.norm()) / size if size else 0.0
    if not moved <= _SAME_STATES.get(kept[0].dtype, LOW_PRECISION):
        raise FoldError(
            f"without the means of the sites before it, the states at {name!r} change by "
            f"{moved:.1e} of their deviation: its eraser was fitted on other states and would "
            "leave part of the concept. Fit the erasers with fit_layers(..., bias='drop') and "
            "fold those, or use install"
        )


def installed_outputs(model: Module, erasers: Any, example: Any) -> list[Tensor] | None:
    """Outputs with the erasers installed by default; None where tokens cannot be selected."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingErasedWarning)
            installed = install(model, erasers)
        try:
            return outputs_of(model, example)
        finally:
            installed.remove()
    except (SiteError, InputError):
        return None
