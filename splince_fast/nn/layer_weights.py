"""Weights of layers as matrices, and replacement of weights in a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from splince_fast.exceptions import FoldError

Float = NDArray[np.float64]

# Weights with fewer bytes per number than this are quantised: their values depend on scales.
_MIN_ITEMSIZE = 2
_QUANTISED = (
    "the weights of {name!r}, a {kind}, are quantised or packed; dequantise them first, or use "
    "install, which needs no weights"
)


@dataclass(frozen=True)
class Layer:
    """A linear layer or an embedding, and the layout of its weight."""

    name: str
    module: Module
    kind: str  # "linear", "conv1d" (transposed), "conv2d" (1 x 1), "embedding" (transposed)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and of inputs; of an embedding, width and number of vectors."""
        first, second = self.module.weight.shape[:2]
        return (first, second) if self.kind in ("linear", "conv2d") else (second, first)

    def matrix(self) -> Float:
        """Return the weight as a matrix (outputs, inputs)."""
        weight = to_numpy(self.module.weight)
        if self.kind == "conv2d":
            weight = weight[:, :, 0, 0]
        return np.array(weight if self.kind in ("linear", "conv2d") else weight.T)

    def to_weight(self, matrix: Float) -> Tensor:
        """Convert a matrix (outputs, inputs) to the layout, dtype and device of the weight."""
        values = matrix if self.kind in ("linear", "conv2d") else matrix.T
        weight = self.module.weight
        new = torch.from_numpy(np.ascontiguousarray(values)).to(weight.device, weight.dtype)
        return new.reshape(weight.shape)


def layer_of(name: str, module: Module) -> Layer | None:
    """Return the Layer of a module, or None if it is neither a linear layer nor an embedding.

    Raises FoldError if the weights are quantised, offloaded, distributed or no parameters.
    """
    module_class = type(module)
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, torch.nn.Linear):
        layout = "linear"
    elif module_class.__name__ == "Conv1D" and hasattr(module, "nf"):
        layout = "conv1d"
    elif isinstance(module, torch.nn.Conv2d):
        if module.kernel_size != (1, 1) or module.groups != 1:
            return None
        layout = "conv2d"
    elif isinstance(module, torch.nn.Embedding):
        layout = "embedding"
    elif callable(weight) or hasattr(module, "qweight"):
        raise FoldError(_QUANTISED.format(name=name, kind=module_class.__name__))
    else:
        return None
    # Subclasses with another forward method are accepted for convolutions only. Such subclasses
    # often only add padding, and the fold is verified on the example.
    base_classes = {torch.nn.Linear, torch.nn.Embedding}
    standard_forward = any(
        isinstance(module, base) and module_class.forward is base.forward for base in base_classes
    )
    if not (standard_forward or layout in ("conv1d", "conv2d")):
        raise FoldError(
            f"{name!r} is a {module_class.__name__}, whose forward method differs from that of a "
            "plain layer, for instance because it is quantised or has an adapter; dequantise its "
            "weights or merge the adapter first, or use install"
        )
    if hasattr(weight, "device_mesh") or getattr(weight, "is_meta", False):
        raise FoldError(
            f"the weights of {name!r} are not in the memory of one device: they are offloaded, on "
            "the meta device, or distributed; load the complete model on one device first"
        )
    # Quantisers replace the weight by a tensor of another class.
    is_plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.is_floating_point()
    if not is_plain or weight.dtype.itemsize < _MIN_ITEMSIZE:
        raise FoldError(_QUANTISED.format(name=name, kind=module_class.__name__))
    for attribute in ("weight", "bias"):
        value = getattr(module, attribute, None)
        if value is not None and attribute not in module._parameters:
            raise FoldError(
                f"the {attribute} of {name!r} is no parameter: it is computed from parameters, as "
                "by weight_norm, spectral_norm or pruning, or it is a buffer. Make it a parameter "
                "first, for instance by torch.nn.utils.parametrize.remove_parametrizations, "
                "torch.nn.utils.remove_weight_norm or torch.nn.utils.prune.remove, or use install"
            )
    return Layer(name, module, layout)


class WeightReplacement:
    """Replacement of weights and biases of a model, which can be undone.

    Attributes
    ----------
    untied, with_added_bias : list of str
        Names of the layers whose weights were tied to weights of other layers, and of the layers to
        which a bias was added.
    """

    def __init__(self, model: Module) -> None:
        self.untied: list[str] = []
        self.with_added_bias: list[str] = []
        self._model = model
        self._untied_configs: list[Any] = []
        self._originals: list[tuple[Module, Any, Any]] = []
        self._n_owners: dict[int, int] = {}  # number of owning modules, by id of the parameter
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._n_owners[id(parameter)] = self._n_owners.get(id(parameter), 0) + 1

    def replace(self, layer: Layer, matrix: Float, bias_change: Float | None) -> None:
        """Replace the weight of a layer by a matrix (outputs, inputs), and change the bias.

        `bias_change` is added to the bias. The bias does not change if `bias_change` is None, or if
        the layer is an embedding.
        """
        module = layer.module
        bias = getattr(module, "bias", None)
        self._originals.append((module, module.weight, bias))
        if self._n_owners[id(module.weight)] > 1:
            self.untied.append(layer.name)
            self._untie_configs(module.weight)
        weight = torch.nn.Parameter(layer.to_weight(matrix), module.weight.requires_grad)
        module.weight = weight
        self._n_owners[id(weight)] = 1
        if layer.kind == "embedding" or bias_change is None:
            return
        if bias is None:
            self.with_added_bias.append(layer.name)
        else:
            bias_change = bias_change + to_numpy(bias)
        like = weight if bias is None else bias
        values = torch.from_numpy(bias_change).to(like.device, like.dtype)
        module.bias = torch.nn.Parameter(values, like.requires_grad)

    def _untie_configs(self, weight: Tensor) -> None:
        """Set tie_word_embeddings to False in the configurations of the modules with a weight.

        A model of several parts has a configuration for each part, and one for its text.
        """
        for module in self._model.modules():
            config: Any = getattr(module, "config", None)
            if config is None or all(weight is not p for p in module.parameters()):
                continue
            find_text = getattr(config, "get_text_config", lambda decoder, config=config: config)
            for tied in (config, find_text(decoder=True)):
                if getattr(tied, "tie_word_embeddings", None):
                    tied.tie_word_embeddings = False
                    self._untied_configs.append(tied)

    def undo(self) -> None:
        """Restore all parameters, bit for bit."""
        for module, weight, bias in reversed(self._originals):
            module.weight = weight
            if hasattr(module, "bias"):
                module.bias = bias
        for config in self._untied_configs:
            config.tie_word_embeddings = True


def to_numpy(tensor: Tensor) -> Float:
    """Convert a tensor to a float64 array."""
    values: Float = tensor.detach().to("cpu", torch.float64).numpy()
    return values
