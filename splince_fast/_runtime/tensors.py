"""Torch tensors: on the CPU through the memory they share with NumPy, elsewhere by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import sweep
from splince_fast._runtime.sweep import Factors
from splince_fast.exceptions import InputError

# Numbers that torch works on at once.
_PIECE = 1 << 24


def is_tensor(X: Any) -> bool:
    """Whether X is a torch tensor, without importing torch."""
    return hasattr(X, "detach") and hasattr(X, "device")


def erase_tensor(factors: Factors, X: Any, *, out: Any, mask: Any, progress: bool | None) -> Any:
    """r(X) for a tensor (..., d), on its device and in its dtype.

    A tensor that records gradients is mapped by torch operations, so that they flow through.

    Raises
    ------
    InputError
        Shapes, dtypes or memory that do not fit; ``out=`` where gradients are recorded.
    """
    import torch

    from splince_fast._runtime.torch_rows import is_plain

    _check_rows(X, factors.left.shape[1])
    target_dtype = X.dtype if X.dtype.is_floating_point else torch.float64
    if out is not None:
        _check_out(out, X, target_dtype)
    chosen = sweep.as_mask(mask, tuple(X.shape[:-1]))
    X = X.resolve_neg()
    plain = is_plain(X)
    if plain and X.device.type == "cpu" and X.dtype != torch.bfloat16:
        result = torch.empty(X.shape, dtype=target_dtype) if out is None else out
        rows = X.detach().numpy()
        sweep.erase(factors, rows, result.detach().numpy(), chosen, progress, out is None)
        return result
    wide = torch.float64 if X.device.type == "cpu" or X.dtype == torch.float64 else torch.float32
    tensors = _factors_as(factors, X.device, wide)
    where = None if chosen is None else torch.from_numpy(chosen.copy()).to(X.device)
    if out is None and not plain:
        return _mapped(tensors, X, wide, where).to(target_dtype)
    result = torch.empty(X.shape, dtype=target_dtype, device=X.device) if out is None else out
    _write(tensors, X, result, wide, where)
    return result


def _check_rows(X: Any, width: int) -> None:
    """Refuse tensors that are no rows of numbers."""
    import torch

    if X.layout != torch.strided or X.device.type == "meta":
        found = "on the meta device, and holds nothing" if X.device.type == "meta" else "sparse"
        raise InputError(f"X is {found}; pass a dense tensor that holds values: X.to_dense()")
    known = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if X.dtype.is_complex or (X.dtype.is_floating_point and X.dtype not in known):
        raise InputError(f"X has dtype {X.dtype}; cast it to real numbers, with X.float()")
    if X.ndim < 2 or X.shape[-1] != width:
        hint = "; for a single row pass it as X[None, :]" if X.ndim == 1 else ""
        raise InputError(f"X has shape {tuple(X.shape)}; (..., {width}) is expected{hint}")


def _check_out(out: Any, X: Any, dtype: Any) -> None:
    """Refuse an `out` to which the result for X cannot be written."""
    import torch

    if not isinstance(out, torch.Tensor):
        raise InputError(f"out is a {type(out).__name__}; it must be a tensor, as X is")
    if (out.shape, out.dtype, out.device, out.layout) != (X.shape, dtype, X.device, X.layout):
        raise InputError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}; it must be "
            f"{dtype} of shape {tuple(X.shape)} on {X.device}"
        )
    if (X.requires_grad or out.requires_grad) and torch.is_grad_enabled():
        raise InputError("out= cannot record gradients; leave it out, or use torch.no_grad()")
    if out.is_neg() or sweep.meets_itself(tuple(out.shape), out.stride(), 1):
        raise InputError(
            "several entries of out share memory, or it is a negated view; pass new memory, or "
            "out.contiguous()"
        )
    if out is not X and _overlap(out, X):
        raise InputError("out overlaps X without being the same tensor; pass X or new memory")


def _factors_as(factors: Factors, device: Any, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """left, right, minus the shift, and mean; the shift makes up for the mean's rounding."""
    import torch

    mean = torch.from_numpy(factors.mean.copy()).to(dtype)
    rest = factors.mean - mean.to(torch.float64).numpy()
    shift = factors.shift + factors.right @ rest
    arrays = (torch.from_numpy(a.copy()) for a in (factors.left, factors.right, -shift))
    left, right, neg_bias = (a.to(device, dtype) for a in arrays)
    return left, right, neg_bias, mean.to(device)


def _mapped(tensors: tuple[Any, Any, Any, Any], X: Any, dtype: Any, mask: Any) -> Any:
    """r(X) as one expression of torch."""
    import torch

    from splince_fast._runtime.torch_rows import erased_by_torch

    *linear, mean = tensors
    rows = X.to(dtype)
    erased = erased_by_torch(rows.reshape(-1, rows.shape[-1]), *linear, mean=mean)
    erased = erased.reshape(rows.shape)
    return erased if mask is None else torch.where(mask[..., None], erased, rows)


def _write(tensors: Any, X: Any, result: Any, dtype: Any, mask: Any) -> None:
    """Write r(X) in pieces; leading axes are gone through where they cannot be merged."""
    if X.ndim > 2:
        if X.is_contiguous() and result.is_contiguous():
            X, result = X.view(-1, X.shape[-1]), result.view(-1, X.shape[-1])
            mask = None if mask is None else mask.reshape(-1)
        else:
            for i in range(len(X)):
                _write(tensors, X[i], result[i], dtype, None if mask is None else mask[i])
            return
    step = max(1, _PIECE // X.shape[1])
    for start in range(0, len(X), step):
        piece = slice(start, start + step)
        chosen = None if mask is None else mask[piece]
        result[piece] = _mapped(tensors, X[piece], dtype, chosen).to(result.dtype)


def _overlap(a: Any, b: Any) -> bool:
    """Whether two tensors share memory without being the same view of it."""
    same_view = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    storages = {t.untyped_storage().data_ptr() for t in (a, b)}
    if same_view or len(storages) == 2:
        return False
    if a.device.type != "cpu" or str(a.dtype) == "torch.bfloat16":
        return True
    return bool(np.shares_memory(a.detach().numpy(), b.detach().resolve_neg().numpy()))


def like(tensor: Any, values: NDArray[np.float64]) -> Any:
    """`values` as a tensor on the device of `tensor`: in its dtype, integers as `values` come."""
    import torch

    found = torch.from_numpy(np.ascontiguousarray(values))
    return found.to(tensor.device, tensor.dtype if tensor.dtype.is_floating_point else found.dtype)
