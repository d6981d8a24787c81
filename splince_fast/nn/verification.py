"""Comparison of a folded model with the same model before the fold, with erasers as hooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from splince_fast.exceptions import FoldError, InputError, NothingErasedWarning, SiteError
from splince_fast.nn import running, sites
from splince_fast.nn.eraser import Eraser
from splince_fast.nn.installed import install
from splince_fast.nn.sites import Placement
from splince_fast.projection import Projection

# Largest relative change of the activations at a site that counts as rounding error in 32 bits.
_ACTIVATION_TOLERANCE = 1e-5


def tolerance(dtype: torch.dtype, float32_tolerance: float) -> float:
    """Return the largest relative difference that counts as rounding error for a dtype.

    `float32_tolerance` is the result for dtypes of at least 32 bits.
    """
    return float32_tolerance if dtype.itemsize >= 4 else 2e-2


def outputs_of(model: Module, example: object) -> list[Tensor]:
    """Return the floating tensors in the output of a model on an example, in float64."""
    output = running.call(model, example, (), None)
    return [_to_float64(tensor) for tensor in _floating_tensors(output, {})]


def _floating_tensors(value: Any, visited: dict[int, object]) -> Iterator[Tensor]:
    """Yield the floating tensors in a value, at any depth of containers, fields and attributes.

    Caches of keys and values are left out: they also hold tokens that are not attended. `visited`
    holds, by id, the objects that were read; each is read once.
    """
    if sites.is_row_tensor(value):
        yield value
    is_atom = isinstance(value, Tensor | Module | type | ModuleType)
    if is_atom or hasattr(value, "get_seq_length") or id(value) in visited:
        return
    visited[id(value)] = value
    elements: Iterable[Any] = ()
    if isinstance(value, Mapping):
        elements = value.values()
    elif isinstance(value, list | tuple):
        elements = value
    elif is_dataclass(value):
        elements = [getattr(value, field.name, None) for field in fields(value)]
    elif hasattr(value, "__dict__"):
        elements = vars(value).values()
    for element in list(elements):
        yield from _floating_tensors(element, visited)


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def attended(example: object, tensor: Tensor) -> Tensor:
    """Return the rows of a tensor (B, T, ...) at the attended tokens of an example.

    Returns the tensor itself if the example has no attention mask of shape (B, T).
    """
    mask = example.get("attention_mask") if isinstance(example, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or tensor.shape[:2] != mask.shape:
        return tensor
    return tensor[mask.cpu() != 0]


def differences(
    first: list[Tensor], second: list[Tensor], without_erasers: list[Tensor]
) -> list[float]:
    """Return the largest difference between two tensors, for each pair of two lists.

    The difference of a pair is relative to the range of the finite entries of the first tensor,
    without entries that equal those of the second tensor and of the output without erasers:
    constants, such as -1e9 at suppressed tokens, do not count. Entries that are both NaN, or
    infinite and equal, do not differ. A result is not finite if only one of two entries is finite.
    """
    distances = []
    for a, b, c in zip(first, second, without_erasers, strict=True):
        differs = _differ(a, b)
        if not differs.any():
            distances.append(0.0)
            continue
        values = a[differs | _differ(a, c)]
        values = values[values.isfinite()]
        scale = float(values.max() - values.min() or values.abs().max()) if len(values) else 1.0
        distances.append(float((a - b)[differs].abs().max()) / (scale or 1.0))
    return distances


def _differ(first: Tensor, second: Tensor) -> Tensor:
    return (first != second) & ~(first.isnan() & second.isnan())


class HookPoint(NamedTuple):
    """A module with the eraser of its output or input."""

    name: str
    module: Module
    projection: Projection
    placement: Placement

    @classmethod
    def of(
        cls, name: str, module: Module, projection: Projection, placement: Placement | None
    ) -> HookPoint:
        """Return the point of a site; `placement` is by default the output of the module."""
        return cls(name, module, projection, placement or Placement("output", channel_axis(module)))


def channel_axis(module: Module) -> int:
    """Return the axis of the features in the input and in the output of a module."""
    return 1 if isinstance(module, torch.nn.Conv2d | torch.nn.BatchNorm2d) else -1


@contextmanager
def erasing_hooks(model: Module, points: Iterable[HookPoint]) -> Iterator[dict[str, list[Tensor]]]:
    """Erase at all tokens by hooks inside a ``with`` block, as folded weights do.

    Yields one list per name of a point. Each call of the module appends its activations (..., d)
    before erasure to the list.
    """
    points = list(points)
    activations: dict[str, list[Tensor]] = {point.name: [] for point in points}
    with ExitStack() as stack:
        for name, module, projection, placement in points:
            eraser = Eraser(projection).to(running.device_of(model))

            def erase(
                rows: Tensor, eraser: Eraser = eraser, tensors: list[Tensor] = activations[name]
            ) -> Tensor:
                tensors.append(rows)
                return eraser(rows)

            replace = partial(
                sites.replace_rows,
                name,
                placement=placement,
                width=eraser.n_features,
                function=erase,
            )
            stack.callback(sites.add_hook(name, module, placement.side, replace).remove)
        yield activations


def check_activations(
    name: str, with_means: list[Tensor], without_means: list[Tensor], example: object
) -> None:
    """Raise FoldError if the activations at a site change because other sites drop their means.

    The mean of the change over the rows is subtracted before the comparison, because a constant
    shift does not change covariances.
    """
    if not with_means:  # the example does not run the site
        return
    before, after = (
        torch.cat([attended(example, _to_float64(x)).reshape(-1, x.shape[-1]) for x in tensors])
        for tensors in (with_means, without_means)
    )
    change = after - before
    if len(change) > 1:
        before, change = before - before.mean(0), change - change.mean(0)
    norm = float(before.norm())
    relative = float(change.norm()) / norm if norm else 0.0
    if not relative <= tolerance(with_means[0].dtype, _ACTIVATION_TOLERANCE):
        raise FoldError(
            f"without the means of earlier sites, the activations at {name!r} change by "
            f"{relative:.1e} of their standard deviation. The eraser of this site was fitted on "
            "activations with these means, and would leave part of the concept. Fit the erasers "
            "with fit_layers(..., bias='drop') before folding, or use install"
        )


def installed_outputs(model: Module, erasers: object, example: object) -> list[Tensor] | None:
    """Return the outputs of a model with installed erasers on an example.

    Returns None if the token rule cannot be applied to the example.
    """
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
