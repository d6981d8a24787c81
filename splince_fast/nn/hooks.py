"""Hook of a site, which applies an eraser to the selected tokens."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from splince_fast._kernels.row_kernels import PackedFactors
from splince_fast._runtime.torch_rows import erased_in_memory
from splince_fast.nn import sites
from splince_fast.nn.eraser import Eraser
from splince_fast.nn.sites import Placement
from splince_fast.nn.tokens import CallSelections

_CPU = torch.device("cpu")


class SiteHook:
    """Hook that erases the selected tokens at one site, with a copy of the eraser per device."""

    def __init__(
        self, name: str, eraser: Eraser, selections: CallSelections, placement: Placement
    ) -> None:
        self.name, self.selections, self.placement = name, selections, placement
        self.width = eraser.n_features
        self.n_calls = 0  # without calls of compiled code
        self.ran_compiled = False
        self._copies = {_CPU: eraser}
        self._enabled = True  # whether the gate of all copies is 1
        self._packed: PackedFactors | None = None  # factors for the C kernel, made on first use

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; the copy erases, because no handle could enable it again."""
        self.__dict__.update(state)
        self.set_gate(1.0)

    @classmethod
    def of(cls, module: Module, side: str) -> list[SiteHook]:
        """Return the erasing hooks on a side of a module, in the order in which they run."""
        return [hook for hook in _hooks(module, side).values() if type(hook) is cls]

    def register(self, module: Module) -> RemovableHandle:
        """Add the hook to a module, after earlier erasers and nearer to it than other hooks."""
        if self.placement.side == "input":
            return module.register_forward_pre_hook(self, with_kwargs=True)
        handle = module.register_forward_hook(self)
        hooks = _hooks(module, "output")
        for key in [key for key, hook in hooks.items() if type(hook) is not SiteHook]:
            hooks.move_to_end(key)
        return handle

    def copy_on(self, device: torch.device) -> Eraser:
        """Return the copy of the eraser on a device; make it on first use."""
        eraser = self._copies.get(device)
        if eraser is None:
            eraser = copy.deepcopy(self._copies[_CPU]).to(device)
            if not torch.compiler.is_compiling():
                self._copies[device] = eraser
        return eraser

    def set_gate(self, value: float) -> float:
        """Set the gate of every copy to 0 or 1; return the previous value."""
        previous = float(self._copies[_CPU].gate)
        self._enabled = value == 1.0
        for eraser in self._copies.values():
            eraser.gate.fill_(value)
        return previous

    def __call__(self, module: Module, args: Any, kwargs_or_output: Any) -> Any:
        if self.placement.side == "output":
            return self._erase(kwargs_or_output)
        return sites.on_input(self.name, args, kwargs_or_output, self._erase)

    def _erase(self, value: object) -> Any:
        """Return an output or input of the module with the selected rows erased."""
        # Compiled code treats a counter as a constant: each call would compile again.
        if torch.compiler.is_compiling():
            self.ran_compiled = True
        else:
            self.n_calls += 1
        return sites.replace_rows(self.name, value, self.placement, self.width, self._erase_rows)

    def _erase_rows(self, rows: Tensor) -> Tensor:
        """Erase the selected rows of a tensor (..., d) by the C kernel if possible, or by torch."""
        is_eager = not torch.compiler.is_compiling()
        if is_eager and not self._enabled:
            return rows
        mask = self.selections.current(self.name).mask_for(self.name, rows)
        erased = None
        if is_eager:
            if self._packed is None:
                self._packed = self._pack()
            erased = erased_in_memory(self._packed, rows)
        if erased is None:
            erased = self.copy_on(rows.device).forward(rows)
        return erased if mask is None else torch.where(mask.unsqueeze(-1), erased, rows)

    def _pack(self) -> PackedFactors:
        eraser = self.copy_on(_CPU)
        left, right, neg_bias = (
            t.double().numpy() for t in (eraser.left, eraser.right, eraser.neg_bias)
        )
        return PackedFactors(left, right, np.zeros(self.width), -neg_bias)


def _hooks(module: Module, side: str) -> Any:
    return module._forward_pre_hooks if side == "input" else module._forward_hooks
