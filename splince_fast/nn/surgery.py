"""Layers whose weights can be folded, and how their weights are exchanged and put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splince_fast.exceptions import FoldError

Tensor = Any
Module = Any
Float = NDArray[np.float64]


# Bytes of the narrowest floats that are weights as they are; narrower ones go with scales.
_NARROWEST = 2
_QUANTISED = (
    "the weights of {name!r}, a {kind}, are quantised or packed; dequantise them first, or use "
    "install, which needs no weights"
)


@dataclass(frozen=True)
class Layer:
    """A layer with weights that can be folded: how its matrix (outputs, inputs) is stored."""

    name: str
    module: Module
    kind: str  # "linear", "conv1d" (transposed), "conv2d" (1 x 1), "embedding" (rows)

    def matrix(self) -> Float:
        weight = self.module.weight.detach().to("cpu", torch.float64).numpy()
        if self.kind == "conv2d":
            weight = weight[:, :, 0, 0]
        return np.array(weight if self.kind in ("linear", "conv2d") else weight.T)

    def stored(self, matrix: Float) -> Tensor:
        values = matrix if self.kind in ("linear", "conv2d") else matrix.T
        like = self.module.weight
        new = torch.from_numpy(np.ascontiguousarray(values)).to(like.device, like.dtype)
        return new.reshape(like.shape)


def layer_of(name: str, module: Module) -> Layer | None:
    """The layer as one that can be folded; None if it is of another kind.

    Raises
    ------
    FoldError
        It is linear, but its weights are not plain numbers here.
    """
    kind = type(module)
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, torch.nn.Linear):
        found = "linear"
    elif kind.__name__ == "Conv1D" and hasattr(module, "nf"):
        found = "conv1d"
    elif isinstance(module, torch.nn.Conv2d):
        plain = module.kernel_size == (1, 1) and module.groups == 1
        if not plain:
            return None
        found = "conv2d"
    elif isinstance(module, torch.nn.Embedding):
        found = "embedding"
    elif callable(weight) or hasattr(module, "qweight"):
        raise FoldError(_QUANTISED.format(name=name, kind=kind.__name__))
    else:
        return None
    # Convolutions are often subclassed to pad; how the fold acts on them is verified anyway.
    usual = {torch.nn.Linear, torch.nn.Embedding}
    own = any(isinstance(module, k) and kind.forward is k.forward for k in usual)
    if not (own or found in ("conv1d", "conv2d")):
        raise FoldError(
            f"{name!r} is a {kind.__name__}, which changes what its weights mean (quantised, or "
            "with an adapter); merge or dequantise it first, or use install"
        )
    if hasattr(weight, "device_mesh") or getattr(weight, "is_meta", False):
        raise FoldError(
            f"the weights of {name!r} are not here (offloaded, on the meta device, or "
            "distributed); load the whole model on one device first"
        )
    # Quantisers replace the tensor by one of a class of their own.
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_floating_point()
    if not plain or weight.dtype.itemsize < _NARROWEST:
        raise FoldError(_QUANTISED.format(name=name, kind=kind.__name__))
    return Layer(name, module, found)


class Surgery:
    """New parameters for layers, and how to take every change back."""

    def __init__(self, model: Module, bias: str) -> None:
        self.model, self.bias = model, bias
        self.untied: list[str] = []
        self.added: list[str] = []
        self._before: list[tuple[Module, Any, Any]] = []
        self._tie: Any = None
        self._owners: dict[int, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owners[id(parameter)] = self._owners.get(id(parameter), 0) + 1

    def replace(self, layer: Layer, matrix: Float, shift: Float | None) -> None:
        """Give a layer the matrix (outputs, inputs), and add `shift` to its bias, if any."""
        module = layer.module
        before = getattr(module, "bias", None)
        self._before.append((module, module.weight, before))
        if self._owners[id(module.weight)] > 1:
            self.untied.append(layer.name)
            config: Any = getattr(self.model, "config", None)
            if self._tie is None and getattr(config, "tie_word_embeddings", None):
                self._tie = config
                self._tie.tie_word_embeddings = False
        new = torch.nn.Parameter(layer.stored(matrix), module.weight.requires_grad)
        module.weight = new
        self._owners[id(new)] = 1
        if layer.kind == "embedding" or shift is None:
            return
        if before is None:
            self.added.append(layer.name)
        old = np.zeros(len(shift)) if before is None else numbers(before)
        values = torch.from_numpy(old + shift).to(new.device, new.dtype)
        module.bias = torch.nn.Parameter(values, new.requires_grad)

    def undo(self) -> None:
        """Put every parameter back, bit for bit."""
        for module, weight, bias in reversed(self._before):
            module.weight = weight
            if hasattr(module, "bias"):
                module.bias = bias
        if self._tie is not None:
            self._tie.tie_word_embeddings = True


def numbers(tensor: Tensor) -> Float:
    values: Float = tensor.detach().to("cpu", torch.float64).numpy()
    return values
