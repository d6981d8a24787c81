"""Rows in torch tensors: the kernel where they are plain memory of the CPU, else one expression."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads

try:
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode
except ImportError:  # without it nobody knows who watches: torch does all the work

    def is_in_torch_dispatch_mode() -> bool:
        return True


Tensor = Any
Array = NDArray[Any]

# Numbers below which a second thread costs more than it saves.
_GRAIN = 1 << 17
# Directions that are taken one by one, with matrix-vector products, which no mode rounds.
_MOST_ONE_BY_ONE = 4
# 2^13 + 1 splits a float32 into two numbers of at most 12 bits (Dekker 1971); TF32 keeps 11.
_SPLITTER = 8193.0

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is nothing but memory, and nobody watches operations on it.

    Gradients, tangents, transforms, modes and traces need torch's own operations, and so do
    subclasses.
    """
    if type(x) not in _PLAIN or (x.requires_grad and torch.is_grad_enabled()):
        return False
    if has_torch_function((x,)) or is_in_torch_dispatch_mode() or torch.jit.is_tracing():
        return False
    if x.is_neg() or forward_ad.unpack_dual(x).tangent is not None:
        return False
    try:
        return bool(x.data_ptr() != 0)  # 0 where a transform stands for it, or nothing is allocated
    except RuntimeError:  # a tensor within a transform
        return False


def erased_in_memory(factors: row_kernels.PackedFactors, x: Tensor) -> Tensor | None:
    """A new tensor with the rows of a plain tensor (..., d) of the CPU erased; None for others.

    Results that leave the range of float16 are infinite, as torch rounds them.
    """
    if not (is_plain(x) and x.is_cpu and x.dtype in _FLOATS):
        return None
    x = x.detach() if x.requires_grad else x
    in_order = torch.contiguous_format  # so that the rows can be viewed as a matrix
    if x.dtype == torch.bfloat16:  # which NumPy does not know
        wide = x.to(torch.float32, memory_format=in_order)
        _erase(factors, wide.numpy(), wide.numpy())
        return wide.to(x.dtype)
    result = torch.empty_like(x) if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
    _erase(factors, x.numpy(), result.numpy())
    return result


def _erase(factors: row_kernels.PackedFactors, rows: Array, out: Array) -> None:
    """Write erased rows (..., d) to `out`, which is in C order."""
    d = rows.shape[-1]
    rows, out = rows.reshape(-1, d), out.reshape(-1, d)
    if rows.size < 2 * _GRAIN:
        row_kernels.apply_rows(factors, rows, out, 0, len(rows))
    else:
        erase = partial(row_kernels.apply_rows, factors, rows, out)
        threads.split(erase, len(rows), grain=_GRAIN // d)


def erased_by_torch(
    rows: Tensor,
    left: Tensor,
    right: Tensor,
    neg_bias: Tensor,
    *,
    mean: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """The expression rows - gate ((rows - mean) right^T + neg_bias) left.

    Parameters
    ----------
    rows : (n, d), of the dtype of the factors
    left, right : (r, d)
    neg_bias : (r,)
    mean, gate : (d,) and (), optional
        0 and 1 unless given.
    """
    centred = rows if mean is None else rows - mean
    if len(left) > _MOST_ONE_BY_ONE:
        # On a GPU float32 is split, since a mode may round the operands of a product to TF32.
        products = _products if rows.is_cuda and rows.dtype == torch.float32 else _product
        coefficients = neg_bias
        for a, b in products(centred, right.T):
            coefficients = torch.addmm(coefficients, a, b)
        coefficients = coefficients if gate is None else coefficients * gate
        result = rows
        for a, b in products(coefficients, left):
            result = torch.addmm(result, a, b, alpha=-1)
        return result
    result = rows if len(left) else rows.clone()
    for bias_k, right_k, left_k in zip(
        neg_bias.unbind(), right.unbind(), left.unbind(), strict=True
    ):
        coefficient = torch.addmv(bias_k.expand(rows.shape[0]), centred, right_k)
        coefficient = coefficient if gate is None else coefficient * gate
        result = torch.addr(result, coefficient, left_k, alpha=-1)
    return result


def _product(a: Tensor, b: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    return ((a, b),)


def _products(a: Tensor, b: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Pairs whose products add up to a b, exactly but for 2^-22, of parts of at most 12 bits."""
    a_high, b_high = _high(a), _high(b)
    return (a_high, b_high), (a - a_high, b_high), (a_high, b - b_high)


def _high(x: Tensor) -> Tensor:
    """The leading bits of a float32 tensor."""
    scaled = x * _SPLITTER
    return scaled - (scaled - x)
