"""Which tokens are meant: read from the call of the model, not from the shape at a site.

A site sees a tensor (B, T, d) and cannot know which rows are padding, or, in decoding with a
cache, which position they have. The call of the model knows: `attention_mask`, `input_ids`,
`past_key_values` and `position_ids`. Hooks on the model, and on the modules around a site that
take `input_ids` themselves, compute the selections of a call once, for all sites.

Gradient checkpointing runs a part of the model again in the backward pass, without that call.
What was selected is then found by the memory of the part's input, which the checkpoint keeps.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from splince_fast.exceptions import InputError, SiteError
from splince_fast.nn.sites import in_backward, is_row_tensor, named

Tensor = Any
Module = Any

RULES = ("body", "all", "first", "last", "mean")
Rule = str | Callable[[Mapping[str, Any]], Tensor] | None


@dataclass(frozen=True)
class Tokens:
    """A rule that selects tokens; None is "body" where the call has tokens, else "all"."""

    rule: Rule = None
    skip_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, rule: Any, skip_ids: Any = (), *, mean: bool = False) -> Tokens:
        """A checked rule.

        Raises
        ------
        InputError
            An unknown rule, or ids that are not integers.
        """
        known = [r for r in RULES if mean or r != "mean"]
        if not (rule is None or callable(rule) or rule in known):
            raise InputError(
                f"tokens is {rule!r}; it is one of {known} or a function of the call's inputs "
                "that returns a bool tensor (B, T)"
            )
        try:
            return cls(rule, tuple(int(i) for i in skip_ids))
        except (TypeError, ValueError) as error:
            raise InputError(f"skip_ids is {skip_ids!r}; it must hold token ids") from error


@dataclass(frozen=True)
class Selection:
    """The tokens of one call that a rule selects: a bool tensor (B, T), or None for all rows."""

    mask: Tensor | None
    rule: str
    everything: bool = False  # the mask is known to select every token

    def over(self, name: str, x: Tensor) -> Tensor | None:
        """The mask in the shape of `x` (..., d) less its last axis; None for all rows.

        Raises
        ------
        SiteError
            The rows of `x` are not the tokens of the call.
        """
        mask = self.mask
        if mask is None or (self.everything and tuple(mask.shape) == tuple(x.shape[:-1])):
            return None
        if tuple(mask.shape) != tuple(x.shape[:-1]):
            if x.ndim == 2 and x.shape[0] == mask.numel():
                mask = mask.reshape(-1)
            elif self.rule == "all":
                return None
            else:
                raise SiteError(
                    f"the site {name!r} has shape {tuple(x.shape)}, and the call has tokens of "
                    f"shape {tuple(mask.shape)}; pass tokens='all', or a function that returns a "
                    "mask of the site's own shape"
                )
        return mask if mask.device == x.device else mask.to(x.device, non_blocking=True)


EVERYTHING = Selection(None, "all")


class _Calls(threading.local):
    """The calls of one thread that are under way."""

    def __init__(self) -> None:
        self.stack: list[dict[Tokens, Selection] | None] = []
        self.recording = False  # whether inputs of parts are remembered


class Positions:
    """The selections of the calls that are under way, per thread.

    Attributes
    ----------
    specs : tuple of Tokens
        What is selected for each call.
    ran : int
        Calls of the model so far; in compiled code only `ran_compiled` is set.
    """

    def __init__(self, specs: tuple[Tokens, ...]) -> None:
        self.specs = specs
        self.ran = 0
        self.ran_compiled = False
        # What compiled code reads: the selections of a call and those of the call around it.
        self._plain: tuple[dict[Tokens, Selection], Any] | None = None
        self._masked = False  # whether a call that records gradients selected by a mask
        self._local = _Calls()
        self._inputs: dict[int, tuple[StorageWeakRef, dict[Tokens, Selection]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"specs": self.specs, "ran": self.ran, "ran_compiled": self.ran_compiled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["specs"])  # type: ignore[misc]
        self.ran, self.ran_compiled = state["ran"], state["ran_compiled"]

    # -- what sites ask --------------------------------------------------------------------

    def selection(self, name: str, spec: Tokens) -> Selection:
        """What is selected in the call that is under way.

        Raises
        ------
        SiteError
            There is no such call, and the rule needs one.
        """
        current = self._current()
        if current is not None:
            return current[spec]
        if spec.rule in (None, "all") and not (self._masked and in_backward()):
            return EVERYTHING
        if in_backward():
            raise SiteError(
                f"the site {name!r} runs again in a backward pass, and its call is not known; "
                "checkpoint whole modules (not functions that call parts of them), or pass "
                "tokens='all'"
            )
        raise SiteError(
            f"the site {name!r} runs outside of a call that tells its tokens; call the model "
            "with input_ids or attention_mask, or pass tokens='all'"
        )

    def _current(self) -> dict[Tokens, Selection] | None:
        if torch.compiler.is_compiling():
            return None if self._plain is None else self._plain[0]
        stack = self._local.stack
        return stack[-1] if stack else None

    # -- hooks -----------------------------------------------------------------------------

    def attach(self, model: Module, names: list[str]) -> list[Any]:
        """Set the hooks for sites of these names; returns their handles."""
        modules = named(model)
        around = {""} | {
            ".".join(name.split(".")[:i])
            for name in names
            for i in range(1, len(name.split(".")) + 1)
        }
        handles = []
        for name in sorted(around, key=lambda n: n.count(".") if n else -1):
            module = model if not name else modules.get(name)
            if module is None or not callable(getattr(module, "forward", None)):
                continue
            parameters = parameters_of(module)[0]
            # A model's own call, or one inside it that has tokens of its own.
            is_call = module is model or "input_ids" in parameters
            enter = Enter(self, parameters, is_call=is_call, is_root=module is model)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            leave = Leave(self, is_call=is_call)
            handles.append(module.register_forward_hook(leave, always_call=True))
        return handles

    def enter(self, bound: Mapping[str, Any], *, is_root: bool) -> None:
        """A call begins, with these arguments by name."""
        outer = self._current()
        own = any(bound.get(key) is not None for key in ("input_ids", "inputs_embeds"))
        if outer is not None and not own:
            found = outer
        else:
            found = {spec: select(spec, bound) for spec in self.specs}
        self._plain = (found, None if is_root else self._plain)
        if torch.compiler.is_compiling():
            return
        self._local.stack.append(found)
        if is_root:
            self._local.recording = False
        if torch.is_grad_enabled() and any(s.mask is not None for s in found.values()):
            # Of the whole call: reentrant checkpoints run their part without gradients.
            self._masked = self._local.recording = True
            self._inputs = {k: v for k, v in self._inputs.items() if not v[0].expired()}

    def enter_part(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module around a site begins: remember its input, or find the call by it."""
        current = self._current()
        if not (self._masked and in_backward() if current is None else self._local.recording):
            self._local.stack.append(current)
            return
        tensor = next((v for v in (*args, *kwargs.values()) if is_row_tensor(v)), None)
        if current is None:
            known = None if tensor is None else self._inputs.get(_key(tensor))
            self._local.stack.append(None if known is None or known[0].expired() else known[1])
            return
        if tensor is not None:
            self._inputs[_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), current)
        self._local.stack.append(current)

    def leave(self, *, is_call: bool) -> None:
        """What began last is over."""
        if is_call and self._plain is not None:
            self._plain = self._plain[1]
        if not torch.compiler.is_compiling() and self._local.stack:
            self._local.stack.pop()


class Enter:
    """Pre-hook of a module around a site."""

    def __init__(
        self, positions: Positions, parameters: tuple[str, ...], *, is_call: bool, is_root: bool
    ) -> None:
        self.positions, self.parameters = positions, parameters
        self.is_call, self.is_root = is_call, is_root

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compiling = torch.compiler.is_compiling()
        if self.is_root:
            if compiling:  # a counter would be a guard, and every call another compilation
                self.positions.ran_compiled = True
            else:
                self.positions.ran += 1
        if self.is_call and (compiling or not in_backward()):
            bound = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
            self.positions.enter(bound, is_root=self.is_root)
        elif not compiling:
            self.positions.enter_part(args, kwargs)


class Leave:
    """Hook of a module around a site; runs after errors, too."""

    def __init__(self, positions: Positions, *, is_call: bool) -> None:
        self.positions, self.is_call = positions, is_call

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        self.positions.leave(is_call=self.is_call)


def _key(tensor: Tensor) -> int:
    return int(tensor.data_ptr())


# -- calls ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _parameters(forward: Any) -> tuple[tuple[str, ...], bool]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return (), True
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return tuple(names[1:]), any(p.kind is p.VAR_KEYWORD for p in parameters)


def parameters_of(module: Module) -> tuple[tuple[str, ...], bool]:
    """Names of the parameters of a module's forward, and whether it takes any keyword."""
    return _parameters(type(module).forward)  # of the class: accelerate wraps the bound one


def _past(bound: Mapping[str, Any]) -> Any:
    """Number of tokens in the cache: an int, or a tensor where the cache says no more."""
    cache = bound.get("past_key_values")
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        return cache.get_seq_length()
    try:
        return int(cache[0][0].shape[-2])
    except (TypeError, IndexError, AttributeError):
        return 0


def select(spec: Tokens, bound: Mapping[str, Any]) -> Selection:
    """The tokens of one call that a rule selects.

    Parameters
    ----------
    spec : Tokens
    bound : mapping
        Arguments of the call by name.

    Raises
    ------
    SiteError
        The call lacks what the rule needs.
    """
    rule = spec.rule
    if callable(rule):
        mask = rule(bound)
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise SiteError("the function tokens= must return a bool tensor, such as (B, T)")
        return Selection(mask, "a function")
    ids, mask = bound.get("input_ids"), bound.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    tokens = ids if ids is not None else bound.get("inputs_embeds")
    if tokens is None and mask is not None and mask.ndim == 2:
        tokens = mask
    if tokens is None or tokens.ndim < 2:
        if rule in (None, "all"):
            return EVERYTHING
        raise SiteError(
            f"tokens={rule!r} needs a call with input_ids (B, T), inputs_embeds or "
            "attention_mask; pass tokens='all', or a function of the call's inputs"
        )
    rule = "body" if rule is None else rule
    if spec.skip_ids and rule == "body" and ids is None:
        raise SiteError("skip_ids needs a call with input_ids, and it has only embeddings")
    past = _past(bound)
    length = tokens.shape[1]
    if length == 1 and isinstance(past, int) and past > 0:
        if rule == "first":
            return Selection(_constant(tokens, False), rule)
        if not (spec.skip_ids and rule == "body"):
            return Selection(None, rule)
    attended, rank, total = _attended(tokens, mask, past)
    if rule in ("all", "mean"):
        if mask is None:
            return Selection(None, rule)
        return Selection(attended, rule, _all_here(attended))
    first = rank == 1
    ids_of_place = bound.get("position_ids")
    if ids_of_place is not None and ids_of_place.shape[-1] == length and ids_of_place.ndim == 2:
        first = first | (ids_of_place == 0)
    if rule == "first":
        return Selection(attended & first, rule)
    if rule == "last":
        return Selection(attended & (rank == total), rule)
    body = attended & ~first
    for skipped in spec.skip_ids:
        body = body & (ids != skipped)
    return Selection(body, rule)


def _all_here(mask: Tensor) -> bool:
    """Whether a mask selects every row, where to look costs nothing: sites need no mask then."""
    known = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return known and bool(mask.all())


def _constant(tokens: Tensor, value: bool) -> Tensor:
    return torch.full(tokens.shape[:2], value, dtype=torch.bool, device=tokens.device)


def _attended(tokens: Tensor, mask: Tensor | None, past: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the tokens of a call are no padding, their rank from 1 on, and the largest rank.

    Raises
    ------
    SiteError
        The mask is shorter than the tokens.
    """
    length = tokens.shape[1]
    if mask is None:
        place = torch.arange(length, device=tokens.device) + past
        rank = (place + 1).expand(tokens.shape[0], length)
        return _constant(tokens, True), rank, rank[:, -1:]
    if mask.ndim == 2:
        full = mask != 0
    else:
        # (B, heads, queries, keys): what the last query sees are the tokens so far.
        seen = mask[:, 0, -1, :]
        full = seen if seen.dtype == torch.bool else seen == 0
    if full.shape[1] < length:
        raise SiteError(
            f"attention_mask has length {full.shape[1]} for {length} tokens; pass one entry per "
            "token, the cached ones included"
        )
    count = full.cumsum(1)
    if mask.ndim == 2:
        return full[:, -length:], count[:, -length:], count[:, -1:]
    place = torch.arange(length, device=tokens.device) + past  # a static cache has room behind
    return full[:, place], count[:, place], count[:, -1:]
