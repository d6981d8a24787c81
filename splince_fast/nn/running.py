"""Calls of a model on batches: devices, evaluation mode, and arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import Parameter
from typing import Any

import torch
from torch.nn import Module

from splince_fast.exceptions import InputError
from splince_fast.nn.tokens import parameters_of

_FSDP = ("FSDPModule", "FullyShardedDataParallel")


class StopForward(Exception):
    """Exception that ends a forward pass after the last site."""


def unwrap(model: object) -> Module:
    """Return the model inside the wrappers of torch.compile and nn.DataParallel."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, torch.nn.DataParallel) else model


def devices_of(model: Module) -> list[torch.device]:
    """Return the devices of a model's parameters and buffers, except the meta device."""
    tensors = (*model.parameters(), *model.buffers())
    return list(dict.fromkeys(t.device for t in tensors if t.device.type != "meta"))


def device_of(model: Module) -> torch.device:
    """Return the device of the first parameter or buffer; the CPU for a model without them."""
    return next(iter(devices_of(model)), torch.device("cpu"))


def batch_to(batch: object, device: torch.device) -> Any:
    """Copy the tensors of a batch to a device; copies to a GPU are asynchronous."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, Mapping):
        return {key: batch_to(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(batch_to(value, device) for value in batch)
    return batch


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Disable a model's training mode, gradients and compiled code inside a ``with`` block."""
    modes = [(module, module.training) for module in model.modules()]
    # Compiled code does not run new hooks.
    is_compiler_loaded = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiler_loaded else nullcontext()
    with torch.no_grad(), eager:
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def may_stop_early(model: Module, forward: Callable[..., object] | None) -> bool:
    """Return whether a forward pass may end after the last site."""
    if forward is not None:
        return False
    return not any(
        hasattr(module, "_hf_hook") or any(kind.__name__ in _FSDP for kind in type(module).__mro__)
        for module in model.modules()
    )


def check_inputs(batches: object, forward: object, name: str = "batches") -> None:
    """Raise InputError unless `batches` is iterable, and `forward` is a function or None."""
    is_iterable = isinstance(batches, Iterable) or hasattr(type(batches), "__len__")
    if not is_iterable or isinstance(batches, str | bytes):
        raise InputError(
            f"{name} is {batches!r}; pass the batches themselves, such as a list or a DataLoader"
        )
    if forward is not None and not callable(forward):
        raise InputError(f"forward is {forward!r}; it must be a function of model and batch")


def call(
    model: Module, batch: object, label_keys: Sequence[str], forward: Callable[..., object] | None
) -> Any:
    """Return the output of a model for a batch."""
    if forward is not None:
        return forward(model, batch)
    parameters = parameters_of(model)
    if isinstance(batch, Mapping):
        any_key = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keys = batch.keys() if any_key else {p.name for p in parameters}
        return model(**{k: v for k, v in batch.items() if k in keys and k not in label_keys})
    if isinstance(batch, tuple | list):
        positional = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        takes_one = len(positional) == 1 and positional[0].kind is not Parameter.VAR_POSITIONAL
        if label_keys or (len(batch) == 2 and takes_one):  # (inputs, labels)
            return call(model, batch[0], label_keys, None)
        return model(*batch)
    return model(batch)
