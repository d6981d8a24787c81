"""Erasure of rows of torch tensors, by the kernel in CPU memory and by torch elsewhere.

Rows x become x - ((x - mean) right^T - shift) left, with the factors left and right (r, d).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from splince_fast._kernels import row_kernels
from splince_fast._runtime import erase_rows, threads
from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.erase_rows import Factors
from splince_fast._runtime.rows import as_mask
from splince_fast.exceptions import InputError

try:
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode
except ImportError:  # dispatch modes cannot be detected: use torch operations for all tensors

    def is_in_torch_dispatch_mode() -> bool:
        return True


# Minimum number of elements per thread: one thread erases smaller tensors faster.
_GRAIN = 1 << 17
# Maximum number of elements in one torch expression, which limits temporary memory.
_PIECE = 1 << 24
# Up to this rank, rows are erased by matrix-vector products, which are never rounded to TF32.
_MAX_VECTOR_RANK = 4
# A product with 2^13 + 1 splits a float32 number into parts of 11 and 12 significant bits (Dekker
# 1971). TF32 has 11 bits.
_SPLITTER = 8193.0

_PLAIN = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_plain(x: Tensor) -> bool:
    """Return whether the kernel may process the memory of a tensor, in place of torch operations.

    False if autograd, forward AD, a transform, a dispatch mode or tracing records operations.
    """
    if type(x) not in _PLAIN or (x.requires_grad and torch.is_grad_enabled()):
        return False
    if has_torch_function((x,)) or is_in_torch_dispatch_mode() or torch.jit.is_tracing():
        return False
    if x.is_neg() or forward_ad.unpack_dual(x).tangent is not None:
        return False
    try:
        return bool(x.data_ptr() != 0)  # the address is 0 within some transforms, or without memory
    except RuntimeError:  # raised within other transforms
        return False


def erased_in_memory(factors: row_kernels.PackedFactors, x: Tensor) -> Tensor | None:
    """Return a copy of a plain CPU tensor (..., d) with erased rows; None for other tensors."""
    # Results out of range of float16 become infinite, as in torch.
    if not (is_plain(x) and x.is_cpu and x.dtype in _FLOATS):
        return None
    source = x.detach().float() if x.dtype == torch.bfloat16 else x.detach()  # unknown to NumPy
    result = torch.empty(x.shape, dtype=source.dtype)
    rows, out = (tensor.numpy().reshape(-1, x.shape[-1]) for tensor in (source, result))
    erase = partial(row_kernels.apply_rows, factors, rows, out)
    threads.split(erase, len(rows), grain=_GRAIN // x.shape[-1])
    return result.to(x.dtype)


def erased_by_torch(
    rows: Tensor,
    left: Tensor,
    right: Tensor,
    neg_bias: Tensor,
    *,
    mean: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Return rows - ((rows - mean) @ right.T + neg_bias) @ left, differentiably.

    `rows` are (n, d), `left` and `right` (r, d), `neg_bias` (r,), `mean` (d,), all of one dtype. If
    `gate`, a tensor of shape (), is 0, the rows are copied.
    """
    centred = rows if mean is None else rows - mean
    # A selection, because the product of 0 with coefficients that are not finite would be NaN.
    is_on = None if gate is None else gate != 0
    if len(left) > _MAX_VECTOR_RANK:
        # On a GPU, float32 operands are split, because torch may round them to TF32.
        products = _products if rows.is_cuda and rows.dtype == torch.float32 else _product
        coefficients = neg_bias
        for a, b in products(centred, right.T):
            coefficients = torch.addmm(coefficients, a, b)
        coefficients = coefficients if is_on is None else torch.where(is_on, coefficients, 0.0)
        result = rows
        for a, b in products(coefficients, left):
            result = torch.addmm(result, a, b, alpha=-1)
        return result
    result = rows if len(left) else rows.clone()
    for bias_k, right_k, left_k in zip(
        neg_bias.unbind(), right.unbind(), left.unbind(), strict=True
    ):
        coefficient = torch.addmv(bias_k.expand(rows.shape[0]), centred, right_k)
        coefficient = coefficient if is_on is None else torch.where(is_on, coefficient, 0.0)
        result = torch.addr(result, coefficient, left_k, alpha=-1)
    return result


def _product(a: Tensor, b: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    return ((a, b),)


def _products(a: Tensor, b: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return three pairs of tensors whose products sum to a b, with relative error 2^-22."""
    a_high, b_high = _high(a), _high(b)
    return (a_high, b_high), (a - a_high, b_high), (a_high, b - b_high)


def _high(x: Tensor) -> Tensor:
    """Round a float32 tensor to 11 significant bits."""
    scaled = x * _SPLITTER
    return scaled - (scaled - x)


# -- erasers called with a tensor --------------------------------------------------------------


def erase_tensor(
    factors: Factors, X: Tensor, *, out: Any, mask: Any, progress: bool | None
) -> Tensor:
    """Erase the rows of a tensor (..., d), on its device and in its dtype, differentiably."""
    width = factors.left.shape[1]
    _check_rows(X, width)
    target_dtype = X.dtype if X.dtype.is_floating_point else torch.float64
    if out is not None:
        _check_out(out, X, target_dtype)
    X = X.resolve_neg()
    plain = is_plain(X)
    if plain and X.is_cpu and X.dtype != torch.bfloat16:
        target = None if out is None else out.detach().numpy()
        arrays = erase_rows.rows_mask_and_out(X.detach().numpy(), width, None, mask, target)
        rows, mask, target = arrays
        erase_rows.erase(factors, rows, target, mask, progress, out is None)
        return torch.from_numpy(target) if out is None else out
    if out is not None:
        _check_memory(out, X)
    dtype = torch.float64 if X.is_cpu or X.dtype == torch.float64 else torch.float32
    left, right, shift, mean = _factors_as(factors, X.device, dtype)
    if mask is not None:
        mask = torch.from_numpy(as_mask(mask, tuple(X.shape[:-1])).copy()).to(X.device)

    def erased(part: slice) -> Tensor:
        rows = X[part].to(dtype)
        flat = erased_by_torch(rows.reshape(-1, width), left, right, shift, mean=mean)
        result = flat.reshape(rows.shape)
        if mask is not None:
            result = torch.where(mask[part][..., None], result, rows)
        return result.to(target_dtype)

    if out is None and not plain:
        return erased(slice(None))
    result = torch.empty(X.shape, dtype=target_dtype, device=X.device) if out is None else out
    step = max(1, _PIECE * len(X) // max(1, X.numel()))
    for start in range(0, len(X), step):
        result[start : start + step] = erased(slice(start, start + step))
    return result


def _check_rows(X: Tensor, width: int) -> None:
    """Raise InputError unless X is a dense tensor (..., width) of real numbers."""
    is_dense = not (X.is_nested or X.is_quantized) and X.layout == torch.strided
    is_real = X.dtype in _FLOATS or not (X.dtype.is_floating_point or X.dtype.is_complex)
    if not (is_dense and is_real) or X.device.type == "meta":
        kind = "nested" if X.is_nested else f"{X.dtype}, {X.layout}, on {X.device}"
        raise InputError(
            f"X is {kind}; pass a dense tensor of real numbers, such as X.to_dense() or X.float()"
        )
    if X.ndim < 2 or X.shape[-1] != width:
        hint = "; for a single row pass it as X[None, :]" if X.ndim == 1 else ""
        raise InputError(f"X has shape {tuple(X.shape)}; (..., {width}) is expected{hint}")


def _check_out(out: object, X: Tensor, dtype: torch.dtype) -> None:
    """Raise InputError unless the result for X can be written to `out`."""
    expected = X.shape, dtype, X.device, X.layout
    if not isinstance(out, Tensor) or (out.shape, out.dtype, out.device, out.layout) != expected:
        raise InputError(
            f"out is {described_type(out)} of shape {tuple(getattr(out, 'shape', ()))}; it must be "
            f"a tensor of {dtype} of shape {tuple(X.shape)} on {X.device}"
        )
    if out.is_neg() or ((X.requires_grad or out.requires_grad) and torch.is_grad_enabled()):
        raise InputError(
            "out= cannot record gradients, nor be a negated view; leave it out, or use "
            "torch.no_grad()"
        )


def _check_memory(out: Tensor, X: Tensor) -> None:
    """Raise InputError if entries of `out` share memory with each other or with other ones of X."""
    same_view = out.data_ptr() == X.data_ptr() and out.stride() == X.stride()
    same_memory = out.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
    overlaps = erase_rows.self_overlaps(tuple(out.shape), out.stride(), 1)
    if overlaps or (same_memory and not same_view):
        raise InputError("out overlaps X, or its own entries share memory; pass X or new memory")


def _factors_as(
    factors: Factors, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return left, right, -shift and mean in `dtype`; shift corrects the rounding of the mean."""
    mean = torch.from_numpy(factors.mean.copy()).to(dtype)
    error = factors.mean - mean.to(torch.float64).numpy()
    shift = factors.shift + factors.right @ error
    arrays = (torch.from_numpy(a.copy()) for a in (factors.left, factors.right, -shift))
    left, right, neg_bias = (a.to(device, dtype) for a in arrays)
    return left, right, neg_bias, mean.to(device)


def tensor_like(tensor: Tensor, values: NDArray[np.float64]) -> Tensor:
    """Convert `values` to the device of `tensor`, and to its dtype if this is a float dtype."""
    result = torch.from_numpy(np.ascontiguousarray(values))
    return result.to(
        tensor.device, tensor.dtype if tensor.dtype.is_floating_point else result.dtype
    )
