"""Rules that select tokens, and what they select in one call of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from splince_fast.exceptions import InputError, SiteError

Tensor = Any
Module = Any

RULES = ("body", "all", "first", "last", "mean")
# Arguments that carry states of recurrent models; before the first token there are none.
_STATES = ("state", "mems")
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
    lacks: str = ""  # what the rule needs, and the call has not

    def over(self, name: str, x: Tensor) -> Tensor | None:
        """The mask in the shape of `x` (..., d) less its last axis; None for all rows.

        Raises
        ------
        SiteError
            The rows of `x` are not the tokens of the call, or the call lacks what the rule needs.
        """
        mask = self.mask
        if self.lacks:
            if self.rule != "first" or x.ndim < 3:
                raise SiteError(f"the site {name!r} runs in a call that lacks tokens: {self.lacks}")
            mask = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
            mask[:, 0] = True
            return mask
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
        # A copy to the host that does not block may be read before it has arrived.
        return mask if mask.device == x.device else mask.to(x.device, non_blocking=x.is_cuda)


EVERYTHING = Selection(None, "all")


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
    """Number of tokens in the cache: an int, or a tensor where the cache says no more.

    1 stands for "some" where a state shows only that there were tokens; None where a cache does
    not tell.
    """
    caches = {key: value for key, value in bound.items() if _is_cache(key, value)}
    found = [int(bool(len(c))) if key in _STATES else _length_of(c) for key, c in caches.items()]
    known = next((n for n in found if n is not None), None)
    if known is not None:
        return known
    place = bound.get("cache_position")
    if isinstance(place, torch.Tensor) and place.numel():
        first = place.reshape(-1)[0]
        on_host = first.device.type == "cpu" and not torch.compiler.is_compiling()
        return int(first) if on_host else first
    return None if caches else 0


def _is_cache(key: str, value: Any) -> bool:
    """Whether an argument carries what a model keeps of earlier tokens."""
    if value is None or isinstance(value, bool | int | str):
        return False
    if key in _STATES:
        return True
    return ("cache" in key or "past" in key) and not isinstance(value, torch.Tensor)


def _length_of(cache: Any) -> Any:
    """Number of tokens that a cache has seen; 1 for some, None if it does not tell."""
    if hasattr(cache, "get_seq_length"):
        with suppress(ValueError):  # a cache of states only counts nothing
            return cache.get_seq_length()
    if hasattr(cache, "has_previous_state"):
        before = cache.has_previous_state
        return int(bool(before() if callable(before) else before))
    if hasattr(cache, "seqlen_offset"):
        return cache.seqlen_offset
    if isinstance(cache, tuple | list):
        if not cache:
            return 0
        keys = cache[0][0] if isinstance(cache[0], tuple | list) and cache[0] else None
        return int(keys.shape[-2]) if isinstance(keys, torch.Tensor) else None
    return None


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
        # A call inside this one may have them: an encoder takes sounds, and its decoder ids.
        lacks = (
            f"tokens={rule!r} needs a call with input_ids (B, T), inputs_embeds or "
            "attention_mask; pass tokens='all', or a function of the call's inputs"
        )
        return Selection(None, str(rule), lacks=lacks)
    rule = "body" if rule is None else rule
    if spec.skip_ids and rule == "body" and ids is None:
        raise SiteError("skip_ids needs a call with input_ids, and it has only embeddings")
    past = _past(bound)
    length = tokens.shape[1]
    if past is None:
        whole = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > length
        if rule in ("body", "first") and not whole:
            names = [key for key, value in bound.items() if _is_cache(key, value)]
            raise SiteError(
                f"the call carries earlier tokens in {names}, which does not tell how many, so "
                f"tokens={rule!r} cannot know which token is the first; pass an attention_mask "
                "over all tokens so far, tokens='all', or a function of the call's inputs"
            )
        past = 0
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
        if full.shape[1] == length:  # it has no entries for the tokens in the cache
            count = count + past
        return full[:, -length:], count[:, -length:], count[:, -1:]
    place = torch.arange(length, device=tokens.device) + past  # a static cache has room behind
    return full[:, place], count[:, place], count[:, -1:]
