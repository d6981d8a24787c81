"""Hooks of an erased site: its erasers, in order, on their tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from splince_fast._kernels.row_kernels import PackedFactors
from splince_fast._runtime.torch_rows import erased_in_memory
from splince_fast.nn import sites
from splince_fast.nn.eraser import Eraser
from splince_fast.nn.positions import Positions
from splince_fast.nn.recipe import Placement

Tensor = Any
Module = Any


class Entry:
    """One eraser at one site: the module, one copy per device, and which rows it is for."""

    def __init__(self, name: str, eraser: Eraser, positions: Positions, place: Placement) -> None:
        self.name, self.positions, self.place = name, positions, place
        self.width = eraser.n_features
        self.count = 0
        self.ran_compiled = False
        self._copies = {torch.device("cpu"): eraser}
        self._open = True  # state of the gates
        self._usual = place.output is None and place.feature_dim == -1
        self._packed: PackedFactors | None = None  # for the CPU, made on use

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    def on(self, device: Any) -> Eraser:
        """The eraser on a device."""
        found = self._copies.get(device)
        if found is None:
            found = copy.deepcopy(self._copies[torch.device("cpu")]).to(device)
            if not torch.compiler.is_compiling():
                self._copies[device] = found
        return found

    def prepare(self, devices: Iterable[Any]) -> None:
        """Copy the eraser to devices now, not in the first call, which may be compiled."""
        for device in devices:
            self.on(device)

    def set_gate(self, value: float) -> float:
        """Open (1) or close (0) the gate of every copy; returns what it was."""
        before = float(self._copies[torch.device("cpu")].gate)
        self._open = value == 1.0
        for eraser in self._copies.values():
            eraser.gate.fill_(value)
        return before

    def erase(self, value: Any) -> Any:
        """The same output, or input, with its rows erased."""
        if is_dynamo_compiling():  # a counter would be a guard, and so would what a tensor is
            self.ran_compiled = True
        else:
            self.count += 1
            erased = self._at_once(value)
            if erased is not None:
                return erased
        axis = self.place.feature_dim
        given, where = sites.pick(self.name, value, self.place.output, axis)
        heads = self.place.heads
        x = given if heads is None else sites.joined_heads(self.name, given, heads)
        sites.check_width(self.name, x, axis, self.width)
        last = axis in (-1, x.ndim - 1)
        rows = x if last else x.movedim(axis, -1)
        selection = self.positions.selection(self.name)
        mask = None if selection.everything else selection.over(self.name, rows)
        erased = self.on(rows.device).forward(rows)
        if mask is not None:
            erased = torch.where(mask.unsqueeze(-1), erased, rows)
        erased = erased if last else erased.movedim(-1, axis)
        return sites.put(value, where, erased if heads is None else erased.reshape(given.shape))

    def _at_once(self, value: Any) -> Any:
        """The same for memory of the CPU, by the kernel; None where that cannot be."""
        x = value[0] if type(value) is tuple and value else value
        selection = self.positions.eager()
        if not (self._open and self._usual) or selection is None or selection.lacks:
            return None
        if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.size(-1) != self.width:
            return None
        if self.place.heads is not None and x.dim() == 4:
            return None
        if self._packed is None:
            self._packed = self._pack()
        erased = erased_in_memory(self._packed, x)
        if erased is None:
            return None
        mask = None if selection.everything else selection.over(self.name, x)
        if mask is not None:
            erased = torch.where(mask.unsqueeze(-1), erased, x)
        return erased if x is value else (erased, *value[1:])

    def _pack(self) -> PackedFactors:
        eraser = self.on(torch.device("cpu"))
        left, right, neg_bias = (
            t.double().numpy() for t in (eraser.left, eraser.right, eraser.neg_bias)
        )
        return PackedFactors(left, right, np.zeros(self.width), -neg_bias)


class OutputHook:
    """The forward hook of a site: its erasers in the order in which they were installed."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.handle: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"entries": self.entries, "handle": None}

    def __call__(self, module: Module, args: Any, output: Any) -> Any:
        for entry in self.entries:
            output = entry.erase(output)
        return output

    def register(self, module: Module) -> None:
        """Set the hook before those that record outputs."""
        self.handle = module.register_forward_hook(self, prepend=True)

    @staticmethod
    def table(module: Module) -> Mapping[Any, Any]:
        """Where torch keeps hooks of this kind."""
        hooks: Mapping[Any, Any] = module._forward_hooks
        return hooks


class InputHook(OutputHook):
    """The same for the input of a module."""

    def __call__(self, module: Module, args: Any, kwargs: Any) -> Any:
        for entry in self.entries:
            key = sites.pick_input(entry.name, args, kwargs)
            if isinstance(key, int):
                args = (entry.erase(args[key]), *args[key + 1 :])
            else:
                kwargs = {**kwargs, key: entry.erase(kwargs[key])}
        return args, kwargs

    def register(self, module: Module) -> None:
        """Set the hook behind those that others set, which may change the input."""
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)

    @staticmethod
    def table(module: Module) -> Mapping[Any, Any]:
        """Where torch keeps hooks of this kind."""
        hooks: Mapping[Any, Any] = module._forward_pre_hooks
        return hooks
