"""Calls of a model on batches, and the tokens that a rule selects by the arguments of a call.

Activations (B, T, d) show neither padding nor the positions of decoded tokens; the arguments show
both. Hooks on the model, and on modules around a site that take token ids, compute the selection
once per call. The innermost call counts: the encoder and the decoder of a model have their own
tokens.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from splince_fast._runtime.names import listed
from splince_fast.exceptions import InputError, SiteError
from splince_fast.nn.sites import clean_names, in_backward, prefixes

# Integer label that means "no label", as in the losses of torch.
MISSING_LABEL = -100

_FSDP = ("FSDPModule", "FullyShardedDataParallel")
RULES = ("body", "all", "first", "last")


@dataclass(frozen=True)
class TokenRule:
    """Rule that selects tokens; None is "body" in a call with tokens, and "all" in other calls."""

    rule: str | Callable[[Mapping[str, Any]], Tensor] | None = None
    skip_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, rule: Any, skip_ids: Any = ()) -> TokenRule:
        """Return a validated rule; raise InputError for an unknown rule or non-integer ids."""
        if not (rule is None or callable(rule) or rule in RULES):
            raise InputError(
                f"tokens is {rule!r}; it must be one of {listed(RULES)}, or a function of the "
                "call's inputs that returns a bool tensor (B, T)"
            )
        try:
            return cls(rule, tuple(operator.index(i) for i in skip_ids))
        except (TypeError, ValueError) as error:
            raise InputError(f"skip_ids is {skip_ids!r}; it must hold token ids") from error


@dataclass(frozen=True, eq=False)
class Selection:
    """Tokens that a rule selects in one call."""

    mask: Tensor | None  # bool tensor (B, T), None for all tokens
    rule: str
    all_selected: bool = False  # whether the mask is known to select every token
    only_mask: bool = False  # whether only an attention mask shows the tokens
    tokens: Tensor | None = None  # ids or embeddings of the call
    error: str = ""  # predicate of an error message if the selected tokens are unknown

    def mask_for(self, name: str, x: Tensor) -> Tensor | None:
        """Return the mask of the selected rows of `x` (..., d), or None if all are selected."""
        mask, shape = self.mask, tuple(x.shape[:-1])
        if self.error:
            if self.rule != "first" or x.ndim < 3:
                raise SiteError(f"the site {name!r} {self.error}")
            mask = torch.zeros(shape, dtype=torch.bool, device=x.device)
            mask[:, 0] = True
        if mask is None:
            return None
        token_shape = tuple(mask.shape)
        # Equal sizes come first: comparing other sizes would fix the batch size of an export.
        if token_shape == shape:
            if self.all_selected:
                return None
        elif len(shape) == 1 and shape[0] == mask.numel():
            mask = mask.reshape(-1)
        else:
            # The rows are the same tokens in another form: downsampled, or with the tokens first.
            is_other_form = len(shape) > 1 and (self.only_mask or shape == token_shape[::-1])
            if self.rule != "all" or is_other_form:
                hint = "" if is_other_form else "tokens='all', or "
                raise SiteError(
                    f"the site {name!r} has shape {tuple(x.shape)}, and the call has tokens of "
                    f"shape {token_shape}; pass {hint}a function that returns a mask of the site's "
                    "own shape"
                )
            if shape[: mask.ndim] != token_shape:
                return None  # without tokens, such as a pooled state or a module of a vision tower
            # The rows of a token are those of its heads.
            mask = mask[(..., *[None] * (len(shape) - mask.ndim))].expand(shape)
        # Only copies to a GPU are asynchronous, because the host may read its copy at once.
        return mask if mask.device == x.device else mask.to(x.device, non_blocking=x.is_cuda)


ALL_ROWS = Selection(None, "all")


# -- arguments of a call -------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _parameters(forward: Any) -> tuple[Parameter, ...]:
    return tuple(inspect.signature(forward).parameters.values())[1:]  # without self


def parameters_of(module: Module) -> tuple[Parameter, ...]:
    """Return the parameters of the forward method of a module."""
    # accelerate replaces the method `forward` of the instance, but not that of the class.
    return _parameters(type(module).forward)


def _past_length(
    caches: Iterable[Any], position: object, length: int, mask: Tensor | None
) -> int | Tensor | None:
    """Return the number of tokens before those of a call; None if no argument shows it."""
    n_masked = 0 if mask is None else max(0, mask.shape[-1] - length)
    for cache in caches:
        if hasattr(cache, "get_seq_length"):
            with suppress(ValueError):  # raised by a cache that holds recurrent states only
                return cache.get_seq_length()
        if hasattr(cache, "has_previous_state"):
            has_previous = cache.has_previous_state
            has_previous = has_previous() if callable(has_previous) else has_previous
            return max(1, n_masked) * bool(has_previous)
        if isinstance(cache, tuple | list) and (not cache or isinstance(cache[0], tuple | list)):
            # The axis of the tokens depends on the model, so that the mask is the better source.
            return n_masked or (int(cache[0][0].shape[-2]) if cache else 0)
    if isinstance(position, Tensor) and position.numel():
        return position.reshape(-1)[0]
    covers_past = mask is not None and mask.ndim == 2 and n_masked > 0
    return n_masked if covers_past or not caches else None


def select(
    token_rule: TokenRule, arguments: Mapping[str, Any], parameters: tuple[str, ...] = ()
) -> Selection:
    """Return the tokens that a rule selects for the arguments of a call."""
    rule, skip_ids = token_rule.rule, token_rule.skip_ids
    # In an encoder-decoder model, modules outside of both, such as the head, have the tokens of the
    # decoder; the encoder and the decoder have nested calls.
    prefix = "decoder_" if {"input_ids", "decoder_input_ids"} <= set(parameters) else ""
    ids, embeds, mask = (
        arguments.get(prefix + key) for key in ("input_ids", "inputs_embeds", "attention_mask")
    )
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    candidates = ((ids, 2), (embeds, 3), (mask, 2))
    tokens = next((t for t, ndim in candidates if t is not None and t.ndim == ndim), None)
    selection_of = functools.partial(Selection, only_mask=tokens is mask, tokens=tokens)
    if callable(rule):
        selected = rule(arguments)
        if not isinstance(selected, Tensor) or selected.dtype != torch.bool:
            raise SiteError(
                "the function tokens= must return a bool tensor, for instance of shape (B, T)"
            )
        return selection_of(selected, "a function")
    if tokens is None:
        if rule in (None, "all"):
            return ALL_ROWS
        # The error is raised only if a site needs this selection, because a nested call may have
        # tokens, for instance of the decoder of a speech model.
        error = (
            f"runs in a call without tokens: tokens={rule!r} needs a call with input_ids (B, T), "
            "inputs_embeds or attention_mask; pass tokens='all', or a function of the call's inputs"
        )
        return Selection(None, str(rule), error=error)
    rule = "body" if rule is None else rule
    if skip_ids and rule == "body" and tokens is not ids:
        raise SiteError("skip_ids needs a call with input_ids, and this call has none")
    length = tokens.shape[1]
    caches = {
        key: value
        for key, value in arguments.items()
        if ("cache" in key or "past" in key or key in ("state", "mems"))
        and not (value is None or isinstance(value, bool | int | str | Tensor))
    }
    n_past = _past_length(caches.values(), arguments.get("cache_position"), length, mask)
    if n_past is None:
        if rule != "all":
            raise SiteError(
                f"the number of earlier tokens in {list(caches)} is unknown, so tokens={rule!r} "
                "cannot find its tokens; pass an attention_mask over all tokens so far, "
                "tokens='all', or a function of the call's inputs"
            )
        n_past, mask = 0, mask if mask is not None and mask.ndim == 2 else None
    is_step = length == 1 and isinstance(n_past, int) and n_past > 0
    if mask is None and (rule == "all" or (is_step and rule != "first" and not skip_ids)):
        return selection_of(None, rule)
    if mask is None:
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    positions = arguments.get("position_ids")
    if positions is not None and (positions.ndim != 2 or positions.shape[-1] != length):
        positions = None
    selected = _selected(rule, length, mask, n_past, positions)
    if selected.shape[0] == 1:  # a mask of all sequences
        selected = selected.expand(tokens.shape[:2])
    if rule == "body":
        for skip_id in skip_ids:
            selected = selected & (ids != skip_id)
    on_host = selected.device.type == "cpu" and not torch.compiler.is_compiling()
    return selection_of(selected, rule, on_host and bool(selected.all()))


def _selected(
    rule: str, length: int, mask: Tensor, n_past: Any, positions: Tensor | None
) -> Tensor:
    """Return the mask (B, T), or (1, T) for all rows, of the attended tokens of a rule."""
    n_keys = mask.shape[-1]
    if n_keys < length:
        raise SiteError(
            f"attention_mask has length {n_keys} for {length} tokens; pass one entry "
            "per token, cached tokens included"
        )
    mask = mask[:, 0] if mask.ndim == 4 else mask  # (B, heads, queries, keys)
    attended = mask != 0
    if mask.ndim > 2:  # (B, queries, keys)
        if mask.is_floating_point():
            # Floats are added to attention scores, so that 0 marks an attended key, unless some are
            # positive: a mask of zeros and ones. The test stays on the device.
            attended = (mask > 0) | (~attended & ~(mask > 0).any())
        attended = attended.any(1)
    # A mask may have no entries for cached tokens, or for those outside of a window. The mask of a
    # static cache also has entries for later tokens.
    latest = n_keys - length
    start = n_past.clamp(max=latest) if isinstance(n_past, Tensor) else min(n_past, latest)
    selected = _columns(attended, start, length)
    if rule == "all":
        return selected
    rank = _columns(attended.cumsum(1), start, length)  # number of tokens up to and including each
    if rule == "last":
        return selected & (rank == rank[:, -1:])
    is_first = rank == 1 - (n_past - start)
    if positions is not None:  # a row of several sequences has several first tokens
        is_first = is_first | (positions == 0)
    return selected & (is_first if rule == "first" else ~is_first)


def _columns(x: Tensor, start: int | Tensor, length: int) -> Tensor:
    """Return `length` columns of a matrix; a start on a device is not copied to the host."""
    if isinstance(start, Tensor):
        return x.index_select(1, torch.arange(length, device=x.device) + start)
    return x[:, start : start + length]


# -- running calls -------------------------------------------------------------------------


class CallSelections:
    """Token selections of the running calls of a model, separate for each thread."""

    def __init__(self, token_rule: TokenRule) -> None:
        self.token_rule = token_rule
        self.n_calls = 0  # without compiled calls
        self.ran_compiled = False
        # The innermost running call of each thread: its selection, and the call around it.
        self._calls: dict[int, Any] = {}
        self._compiled_call: tuple[Selection, Any] | None = None  # compiled code reads no threads
        # Whether a call that recorded gradients selected only some rows; a tensor on a device.
        self._is_partial: bool | Tensor = False
        self._handles: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        names = "token_rule", "n_calls", "ran_compiled"  # a copy is of no running call
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["token_rule"])  # type: ignore[misc]
        self.__dict__.update(state)

    def current(self, name: str) -> Selection:
        """Return the selection of the running call; error messages name the site `name`."""
        call = self._call()
        if call is not None:
            return call[0]
        is_all = self.token_rule.rule in (None, "all")
        # Gradient checkpointing runs modules again in the backward pass, outside of a call.
        if not is_all or (in_backward() and bool(self._is_partial)):
            raise SiteError(
                f"the site {name!r} runs outside of a call of the model, or again in a backward "
                "pass (gradient checkpointing), so its tokens are unknown; pass tokens='all' and "
                "batches without padding, call the model itself, or disable gradient checkpointing"
            )
        return ALL_ROWS

    def _call(self) -> tuple[Selection, Any] | None:
        if torch.compiler.is_compiling():
            return self._compiled_call
        return self._calls.get(threading.get_ident())

    def attach(self, model: Module, names: Iterable[str]) -> None:
        """Add hooks to a model, and to modules around the sites `names` that take tokens."""
        ancestors = {"", *(ancestor for name in names for ancestor in prefixes(name))}
        for _, name, module in clean_names(model):
            if name not in ancestors:
                continue
            kinds = Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL
            parameters = tuple(p.name for p in parameters_of(module) if p.kind not in kinds)
            if module is model or "input_ids" in parameters:
                enter = functools.partial(self._enter, parameters, module is model)
                self._handles += [
                    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ]

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(
        self, parameters: tuple[str, ...], is_root: bool, module: Module, args: Any, kwargs: Any
    ) -> None:
        """Select the tokens of a call; a nested call of the same tokens has the same selection."""
        compiling = torch.compiler.is_compiling()
        if is_root:
            # Compiled code treats a counter as a constant: each call would compile again.
            if compiling:
                self.ran_compiled = True
            else:
                self.n_calls += 1
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        outer = self._call()
        ids, embeds, mask = map(arguments.get, ("input_ids", "inputs_embeds", "attention_mask"))
        tokens = embeds if ids is None else ids
        # A module of embeddings has the tokens of the call around it, and no attention mask.
        is_same = outer and (tokens is None or (tokens is outer[0].tokens and mask is None))
        if outer and is_same and not is_root:
            selection = outer[0]
        else:
            selection = select(self.token_rule, arguments, parameters)
        self._compiled_call = selection, self._compiled_call
        if compiling:
            return
        self._calls[threading.get_ident()] = selection, outer
        mask = selection.mask
        if torch.is_grad_enabled() and (mask is not None or selection.error):
            is_padded = mask is None or selection.rule != "all" or ~mask.all()
            self._is_partial = self._is_partial | is_padded

    def _leave(self, module: Module, args: object, output: object) -> None:
        """End a call; also runs if the module raises an error."""
        call = self._call()
        if self._compiled_call is not None:
            self._compiled_call = self._compiled_call[1]
        if not torch.compiler.is_compiling() and call is not None:
            self._calls[threading.get_ident()] = call[1]


# -- batches --------------------------------------------------------------------------------


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
    if not is_iterable or isinstance(batches, str | bytes | Mapping):
        raise InputError(
            f"{name} is {batches!r:.80}; pass the batches themselves, such as a list or a "
            "DataLoader"
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
