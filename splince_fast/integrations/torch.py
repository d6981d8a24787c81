"""Torch tensors: on the CPU through the memory they share with NumPy, elsewhere by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from splince_fast.projection import Projection


def apply_to_tensor(projection: Projection, X: Any, *, out: Any, progress: bool) -> Any:
    """r(X) for a tensor (n, d), on its device and in its dtype.

    A tensor that records gradients is mapped by torch operations, so that they flow through.
    """
    import torch

    if X.ndim != 2 or X.shape[1] != projection.n_features:
        raise InputError(
            f"X has shape {tuple(X.shape)}; (n, {projection.n_features}) is expected: flatten "
            "leading dimensions with X.reshape(-1, X.shape[-1])"
        )
    target_dtype = X.dtype if X.dtype.is_floating_point else torch.float64
    if out is not None and (
        out.shape != X.shape or out.dtype != target_dtype or out.device != X.device
    ):
        raise InputError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}; it must be "
            f"{target_dtype} of shape {tuple(X.shape)} on {X.device}"
        )
    if out is not None and (X.requires_grad or out.requires_grad) and torch.is_grad_enabled():
        raise InputError("out= cannot record gradients; leave it out, or use torch.no_grad()")
    if out is not None and out is not X and _overlap(out, X):
        raise InputError("out overlaps X without being the same tensor; pass X or new memory")
    numpy_can = X.device.type == "cpu" and X.dtype != torch.bfloat16
    records = X.requires_grad and torch.is_grad_enabled()
    if not numpy_can or records:
        wide = (
            torch.float64 if X.device.type == "cpu" or X.dtype == torch.float64 else torch.float32
        )
        left, right, bias = (
            torch.from_numpy(a.copy()).to(X.device, wide)
            for a in (projection._left, projection._right, projection._bias)
        )
        result = out if out is not None else torch.empty_like(X, dtype=target_dtype)
        if records:
            return (X.to(wide) - (X.to(wide) @ right.T - bias) @ left).to(target_dtype)
        step = max(1, (1 << 24) // X.shape[1])
        for start in range(0, len(X), step):
            rows = X[start : start + step].to(wide)
            result[start : start + step] = rows - (rows @ right.T - bias) @ left
        return result
    result = out if out is not None else torch.empty(X.shape, dtype=target_dtype)
    projection(X.detach().numpy(), out=result.detach().numpy(), progress=progress)
    return result


def _overlap(a: Any, b: Any) -> bool:
    """Whether two tensors share memory without being the same view of it."""
    same_view = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    storages = {t.untyped_storage().data_ptr() for t in (a, b)}
    if same_view or len(storages) == 2:
        return False
    if a.device.type != "cpu" or str(a.dtype) == "torch.bfloat16":
        return True
    return bool(np.shares_memory(a.detach().numpy(), b.detach().numpy()))


def like(tensor: Any, values: NDArray[np.float64]) -> Any:
    """`values` as a tensor of the dtype and device of `tensor`."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).to(tensor.device, tensor.dtype)
