"""Erasing few rows on the CPU by one compiled call: what a decoding step has at every site.

Between two sites the weights of a layer go through the processor's caches, so each operation of
torch on one token costs some ten microseconds there. Tensors that are nothing but memory are
therefore read and written directly; all others go through torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import (
    _are_functorch_transforms_active,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad

from splince_fast._kernels.rows import MOST_DIRECTIONS, FewRows
from splince_fast.nn.eraser import Eraser
from splince_fast.nn.tokens import Selection

Tensor = Any

# Above this product of rows, features and directions torch's own operations are faster.
_MOST_PRODUCTS = 1 << 16

# Names of this module: each look-up in another one costs as much as what it finds.
_TENSOR, _SINGLE, _NARROW = torch.Tensor, torch.float32, (torch.bfloat16, torch.float16)
_empty_like = torch.empty_like


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is nothing but memory on the CPU, and nobody watches operations on it."""
    return (
        type(x) is _TENSOR  # no FakeTensor, DTensor or other subclass
        and x.is_cpu
        and x.is_contiguous()
        and not x.requires_grad
        and not x.is_neg()  # a view that stands for minus its memory
        and forward_ad._current_level < 0  # no tangent goes with it
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and not _are_functorch_transforms_active()
        and not _is_tracing()
    )


class Short:
    """An eraser that takes few rows of plain tensors.

    Parameters
    ----------
    name : str
        Of the site, for errors.
    eraser : Eraser
        On the CPU, with float32 factors.
    """

    def __init__(self, name: str, eraser: Eraser) -> None:
        self._name, self._width = name, eraser.n_features
        self._most = _MOST_PRODUCTS // max(eraser.rank, 1)
        self._rows = None
        if eraser.rank <= MOST_DIRECTIONS:
            self._rows = FewRows(eraser.neg_bias.numpy(), eraser.right.numpy(), eraser.left.numpy())

    def __call__(self, x: Tensor, selection: Selection) -> Tensor | None:
        """A new tensor with the selected rows of a plain tensor (..., d) erased.

        None where torch has to do it: too many rows or directions, another dtype or width.
        """
        width, n_entries, dtype = self._width, x.numel(), x.dtype
        single = dtype is _SINGLE
        if (
            n_entries > self._most
            or not (single or dtype in _NARROW)
            or x.shape[-1:] != (width,)
            or self._rows is None
        ):
            return None
        source, chosen = x.data_ptr(), 0
        if not source:
            return None
        if selection.mask is not None and not selection.everything:
            mask = selection.over(self._name, x)
            if mask is not None:
                mask = mask.contiguous()
                chosen = mask.data_ptr()
        n = n_entries // width
        if single:
            result = _empty_like(x)
            self._rows.erase(source, result.data_ptr(), n, chosen)
            return result
        wide = x.to(_SINGLE)
        self._rows.erase(wide.data_ptr(), wide.data_ptr(), n, chosen)
        return wide.to(dtype)
