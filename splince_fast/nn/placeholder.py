"""Placeholders: tensors without values, which stand for the outputs of skipped modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class PlaceholderError(RuntimeError):
    """The values of a skipped output are needed."""


class Placeholder(Tensor):  # type: ignore[misc]
    """Tensor without values, which has the shape, dtype and device of the output of a module.

    The result of an operation with a placeholder is a placeholder. Raises PlaceholderError for an
    operation that returns a number, returns a tensor whose shape depends on values, or changes a
    tensor in place.
    """

    _values: Tensor  # zeros, from which operations compute the shapes of their results
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor: Tensor) -> Placeholder:
        """Return a placeholder with the shape, dtype and device of a tensor."""
        if isinstance(tensor, Placeholder):
            return tensor
        # A tensor on the device "meta", which has no memory: if `x.data = placeholder` makes it a
        # plain tensor, an operation with x raises an error.
        new: Placeholder = Tensor._make_subclass(
            cls,
            torch.empty_like(tensor, device="meta"),
            dispatch_device=True,
            device_for_backend_keys=tensor.device,
        )
        new._values = tensor.new_zeros(()).expand(tensor.shape)  # stores a single number
        return new

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the result of an operation as a placeholder."""
        if func is torch.ops.prim.device.default:
            return args[0]._values.device
        if not (func._schema.is_mutable or torch.Tag.dynamic_output_shape in func.tags):
            args, kwargs = tree_map_only(cls, lambda p: p._values, (args, kwargs or {}))
            result = func(*args, **kwargs)
            if holds_tensors(result):
                return tree_map_only(Tensor, cls, result)
        raise PlaceholderError(f"{func} needs the values of the output of a skipped module")


def holds_tensors(value: object) -> bool:
    """Return whether a value is a tensor or None, or a container of such values."""
    return all(leaf is None or isinstance(leaf, Tensor) for leaf in tree_leaves(value))
