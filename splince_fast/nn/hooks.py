"""Hooks of a site, which apply its erasers to the selected tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from splince_fast._kernels.row_kernels import PackedFactors
from splince_fast._runtime.torch_rows import erased_in_memory
from splince_fast.nn import sites
from splince_fast.nn.call_selections import CallSelections
from splince_fast.nn.eraser import Eraser
from splince_fast.nn.spec import Placement

_CPU = torch.device("cpu")


class SiteEraser:
    """An eraser at one site, with a copy per device and the selection of its tokens."""

    def __init__(
        self, name: str, eraser: Eraser, selections: CallSelections, placement: Placement
    ) -> None:
        self.name, self.selections, self.placement = name, selections, placement
        self.width = eraser.n_features
        self.n_calls = 0  # compiled calls are not counted
        self.ran_compiled = False
        self._copies = {_CPU: eraser}
        self._enabled = True  # whether the gate of each copy is 1, which applies the eraser
        self._plain_placement = placement.output is None and placement.feature_dim == -1
        self._packed: PackedFactors | None = None  # factors for the kernel, packed on first use

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    def on(self, device: torch.device) -> Eraser:
        """Return the eraser on a device."""
        eraser = self._copies.get(device)
        if eraser is None:
            eraser = copy.deepcopy(self._copies[_CPU]).to(device)
            if not torch.compiler.is_compiling():
                self._copies[device] = eraser
        return eraser

    def copy_to(self, devices: Iterable[torch.device]) -> None:
        """Copy the eraser to devices before the first call, which may be compiled."""
        for device in devices:
            self.on(device)

    def set_gate(self, value: float) -> float:
        """Set the gate of every copy to 0 or 1; return its earlier value."""
        before = float(self._copies[_CPU].gate)
        self._enabled = value == 1.0
        for eraser in self._copies.values():
            eraser.gate.fill_(value)
        return before

    def erase(self, value: object) -> Any:
        """Return an output or input of the module with erased rows."""
        if is_dynamo_compiling():  # counters and types of tensors would be guards
            self.ran_compiled = True
        else:
            self.n_calls += 1
            erased = self._erase_by_kernel(value)
            if erased is not None:
                return erased
        axis, heads = self.placement.feature_dim, self.placement.heads
        tensor, key = sites.pick(self.name, value, self.placement.output, axis)
        x = tensor if heads is None else sites.merge_heads(self.name, tensor, heads)
        sites.check_width(self.name, x, axis, self.width)
        last = axis in (-1, x.ndim - 1)
        rows = x if last else x.movedim(axis, -1)
        selection = self.selections.current(self.name)
        mask = None if selection.all_selected else selection.mask_for(self.name, rows)
        erased = self.on(rows.device).forward(rows)
        if mask is not None:
            erased = torch.where(mask.unsqueeze(-1), erased, rows)
        erased = erased if last else erased.movedim(-1, axis)
        return sites.put(value, key, erased if heads is None else erased.reshape(tensor.shape))

    def _erase_by_kernel(self, value: Any) -> Any:
        """Erase a plain CPU tensor, or one in a tuple, by the kernel; return None for others."""
        x = value[0] if type(value) is tuple and value else value
        selection = self.selections.eager()
        if not (self._enabled and self._plain_placement) or selection is None or selection.error:
            return None
        if not isinstance(x, Tensor) or x.dim() == 0 or x.size(-1) != self.width:
            return None
        if self.placement.heads is not None and x.dim() == 4:
            return None
        if self._packed is None:
            self._packed = self._pack()
        erased = erased_in_memory(self._packed, x)
        if erased is None:
            return None
        mask = None if selection.all_selected else selection.mask_for(self.name, x)
        if mask is not None:
            erased = torch.where(mask.unsqueeze(-1), erased, x)
        return erased if x is value else (erased, *value[1:])

    def _pack(self) -> PackedFactors:
        eraser = self.on(_CPU)
        left, right, neg_bias = (
            t.double().numpy() for t in (eraser.left, eraser.right, eraser.neg_bias)
        )
        return PackedFactors(left, right, np.zeros(self.width), -neg_bias)


class SiteHook:
    """Hook of a module, which applies its erasers in the order of their installation."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.erasers: list[SiteEraser] = []
        self.handle: RemovableHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}

    def __call__(self, module: Module, args: Any, kwargs_or_output: Any) -> Any:
        if self.side == "output":
            for eraser in self.erasers:
                kwargs_or_output = eraser.erase(kwargs_or_output)
            return kwargs_or_output
        kwargs = kwargs_or_output
        for eraser in self.erasers:
            key = sites.pick_input(eraser.name, args, kwargs)
            x = args[key] if isinstance(key, int) else kwargs[key]
            args, kwargs = sites.replace_input(args, kwargs, key, eraser.erase(x))
        return args, kwargs

    def register(self, module: Module) -> None:
        """Add the hook after other hooks of the input, or before other hooks of the output."""
        if self.side == "input":
            self.handle = module.register_forward_pre_hook(self, with_kwargs=True)
        else:
            self.handle = module.register_forward_hook(self, prepend=True)

    @classmethod
    def of(cls, module: Module, side: str) -> SiteHook | None:
        """Return the hook on a side of a module, None if there is none."""
        hooks = module._forward_pre_hooks if side == "input" else module._forward_hooks
        return next((hook for hook in hooks.values() if type(hook) is cls), None)
