"""Comparison of a folded model with the same model before the fold, with erasers as hooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from splince_fast.exceptions import FoldError, InputError, NothingErasedWarning, SiteError
from splince_fast.nn import running, sites
from splince_fast.nn.eraser import Eraser
from splince_fast.nn.installed import install
from splince_fast.nn.spec import Placement
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
    return [_to_float64(t) for t in _floating_tensors(running.call(model, example, (), None))]


def _floating_tensors(value: object) -> Iterator[Tensor]:
    if sites.is_row_tensor(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for element in value.values() if isinstance(value, Mapping) else value:
            yield from _floating_tensors(element)


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


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference between the tensors of two lists, compared pair by pair.

    The difference of a pair is relative to the range of the finite entries of the first tensor.
    Entries that are both NaN, or infinite and equal, do not differ. The result is not finite if
    only one of two entries is finite, or if a first tensor has no finite entry.
    """
    distances = [0.0]
    for a, b in zip(first, second, strict=True):
        if not a.numel():
            continue
        finite = a[a.isfinite()]
        scale = float(finite.max() - finite.min()) if len(finite) else torch.nan
        same = (a == b) | (a.isnan() & b.isnan())
        distances.append(float(torch.where(same, 0.0, (a - b).abs()).max()) / (scale or 1.0))
    return float(np.max(distances))  # NaN if any distance is NaN


@contextmanager
def erasing_hooks(
    model: Module,
    modules: Mapping[str, Module],
    projections: Mapping[str, Projection],
    placement: Placement | None,
) -> Iterator[dict[str, list[Tensor]]]:
    """Erase at all tokens by hooks inside a ``with`` block, as folded weights do.

    Yields one list per site. Each call of a site appends its activations (..., d) before erasure to
    the list of the site.
    """
    activations: dict[str, list[Tensor]] = {name: [] for name in modules}
    with ExitStack() as stack:
        for name, module in modules.items():
            channels_first = isinstance(module, torch.nn.Conv2d | torch.nn.BatchNorm2d)
            location = placement or Placement(feature_dim=1 if channels_first else -1)
            eraser = Eraser(projections[name]).to(running.device_of(model))

            def erase(
                rows: Tensor, eraser: Eraser = eraser, tensors: list[Tensor] = activations[name]
            ) -> Tensor:
                tensors.append(rows)
                return eraser(rows)

            replace = partial(
                sites.replace_rows,
                name,
                placement=location,
                width=eraser.n_features,
                function=erase,
            )
            stack.callback(sites.add_hook(name, module, location.side, replace).remove)
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
