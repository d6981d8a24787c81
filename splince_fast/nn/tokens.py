"""Rules that select tokens, and the tokens that a rule selects in one call of a model."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from splince_fast.exceptions import InputError, SiteError
from splince_fast.labels.names import listed

# Integer label that means "no label", as in the losses of torch.
MISSING_LABEL = -100

RULES = ("body", "all", "first", "last", "mean")
# Names of arguments that hold the states of recurrent models. States are empty before the first
# token.
_STATES = ("state", "mems")
Rule = str | Callable[[Mapping[str, Any]], Tensor] | None


@dataclass(frozen=True)
class TokenRule:
    """Rule that selects tokens.

    The rule None stands for "body" in a call with tokens, and for "all" in a call without tokens.
    """

    rule: Rule = None
    skip_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, rule: Any, skip_ids: Any = (), *, allow_mean: bool = False) -> TokenRule:
        """Return a validated rule; raise InputError for an unknown rule or non-integer ids."""
        rules = [r for r in RULES if allow_mean or r != "mean"]
        if not (rule is None or callable(rule) or rule in rules):
            raise InputError(
                f"tokens is {rule!r}; it must be one of {listed(rules)}, or a function of the "
                "call's inputs that returns a bool tensor (B, T)"
            )
        try:
            return cls(rule, tuple(operator.index(i) for i in skip_ids))
        except (TypeError, ValueError) as error:
            raise InputError(f"skip_ids is {skip_ids!r}; it must hold token ids") from error


@dataclass(frozen=True, eq=False)
class Selection:
    """Tokens that a rule selects in one call; `mask` is a bool tensor (B, T), or None for all."""

    mask: Tensor | None
    rule: str
    all_selected: bool = False  # whether the mask selects every token
    error: str = ""  # error message if the call lacks arguments that the rule needs

    def mask_for(self, name: str, x: Tensor) -> Tensor | None:
        """Return the mask of the selected rows of `x` (..., d), or None if all are selected.

        Raises SiteError if the rows do not have the shape of the tokens, or if the rule needs
        tokens that the call does not have.
        """
        mask = self.mask
        if self.error:
            if self.rule != "first" or x.ndim < 3:
                raise SiteError(f"the site {name!r} runs in a call without tokens: {self.error}")
            mask = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
            mask[:, 0] = True
            return mask
        if mask is None or (self.all_selected and tuple(mask.shape) == tuple(x.shape[:-1])):
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
        # Only copies to a GPU are asynchronous, because the host may read its copy at once.
        return mask if mask.device == x.device else mask.to(x.device, non_blocking=x.is_cuda)


ALL_ROWS = Selection(None, "all")


# -- calls ---------------------------------------------------------------------------------


class ForwardParameters(NamedTuple):
    """Parameters of a forward method."""

    names: tuple[str, ...]
    any_keyword: bool
    n_positional: float  # number of positional parameters, infinite for *args


@functools.lru_cache(maxsize=1024)
def _parameters(forward: Any) -> ForwardParameters:
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
    except (TypeError, ValueError):
        return ForwardParameters((), True, math.inf)
    kinds = [p.kind for p in parameters]
    any_keyword, any_number = Parameter.VAR_KEYWORD in kinds, Parameter.VAR_POSITIONAL in kinds
    n_positional = len(kinds) - kinds.count(Parameter.KEYWORD_ONLY) - any_keyword
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return ForwardParameters(tuple(names), any_keyword, math.inf if any_number else n_positional)


def parameters_of(module: Module) -> ForwardParameters:
    """Return the parameters of the forward method of a module."""
    # accelerate replaces the method `forward` of the instance, but not that of the class.
    return _parameters(type(module).forward)


def _past_length(arguments: Mapping[str, Any]) -> int | Tensor | None:
    """Return the number of earlier tokens, as an int or a tensor; None if it is unknown.

    The result is 1 if the arguments show only that earlier tokens exist, as for recurrent models.
    """
    caches = {key: value for key, value in arguments.items() if _is_cache(key, value)}
    lengths = [int(bool(len(c))) if key in _STATES else _length_of(c) for key, c in caches.items()]
    length = next((n for n in lengths if n is not None), None)
    if length is not None:
        return length
    position = arguments.get("cache_position")
    if isinstance(position, Tensor) and position.numel():
        first = position.reshape(-1)[0]
        on_host = first.device.type == "cpu" and not torch.compiler.is_compiling()
        return int(first) if on_host else first
    return None if caches else 0


def _is_cache(key: str, value: object) -> bool:
    """Return whether an argument is a cache or a state of earlier tokens."""
    if value is None or isinstance(value, bool | int | str):
        return False
    if key in _STATES:
        return True
    return ("cache" in key or "past" in key) and not isinstance(value, Tensor)


def _length_of(cache: object) -> int | Tensor | None:
    """Return the number of tokens in a cache.

    Returns 1 if the cache shows only that the number is positive, and None if it shows nothing.
    """
    if hasattr(cache, "get_seq_length"):
        with suppress(ValueError):  # raised by a cache that holds recurrent states only
            return cache.get_seq_length()
    if hasattr(cache, "has_previous_state"):
        has_previous = cache.has_previous_state
        return int(bool(has_previous() if callable(has_previous) else has_previous))
    if hasattr(cache, "seqlen_offset"):
        return cache.seqlen_offset
    if isinstance(cache, tuple | list):
        if not cache:
            return 0
        keys = cache[0][0] if isinstance(cache[0], tuple | list) and cache[0] else None
        return int(keys.shape[-2]) if isinstance(keys, Tensor) else None
    return None


def select(
    token_rule: TokenRule, arguments: Mapping[str, Any], parameters: tuple[str, ...] = ()
) -> Selection:
    """Return the tokens that a rule selects for the arguments of a call.

    `parameters` are the names of all parameters of the called module. Raises SiteError if the
    arguments do not determine the selection.
    """
    rule, skip_ids = token_rule.rule, token_rule.skip_ids
    if callable(rule):
        mask = rule(arguments)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise SiteError(
                "the function tokens= must return a bool tensor, for instance of shape (B, T)"
            )
        return Selection(mask, "a function")
    # In an encoder-decoder model, the encoder and the decoder have nested calls with their own
    # tokens; all other modules, such as the head, have the tokens of the decoder.
    prefix = "decoder_" if {"input_ids", "decoder_input_ids"} <= set(parameters) else ""
    ids, embeds, mask = (
        arguments.get(prefix + key) for key in ("input_ids", "inputs_embeds", "attention_mask")
    )
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    candidates = ((ids, 2), (embeds, 3), (mask, 2))
    tokens = next((t for t, ndim in candidates if t is not None and t.ndim == ndim), None)
    if tokens is None:
        if rule in (None, "all"):
            return ALL_ROWS
        # The error is raised only if a site needs this selection, because a nested call may have
        # tokens, for instance of the decoder of a speech model.
        error = (
            f"tokens={rule!r} needs a call with input_ids (B, T), inputs_embeds or "
            "attention_mask; pass tokens='all', or a function of the call's inputs"
        )
        return Selection(None, str(rule), error=error)
    rule = "body" if rule is None else rule
    if skip_ids and rule == "body" and tokens is not ids:
        raise SiteError("skip_ids needs a call with input_ids, and this call has none")
    n_past = _past_length(arguments)
    length = tokens.shape[1]
    if n_past is None:
        covers_past = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > length
        if rule in ("body", "first") and not covers_past:
            names = [key for key, value in arguments.items() if _is_cache(key, value)]
            raise SiteError(
                f"the number of earlier tokens in {names} is unknown, so tokens={rule!r} cannot "
                "find the first token; pass an attention_mask over all tokens so far, "
                "tokens='all', or a function of the call's inputs"
            )
        n_past = 0
    if length == 1 and isinstance(n_past, int) and n_past > 0:
        if rule == "first":
            return Selection(_constant(tokens, False), rule)
        if not (skip_ids and rule == "body"):
            return Selection(None, rule)
    attended, rank, largest_rank = _attended(tokens, mask, n_past)
    if rule in ("all", "mean"):
        if mask is None:
            return Selection(None, rule)
        return Selection(attended, rule, _selects_all(attended))
    is_first = rank == 1
    position_ids = arguments.get("position_ids")
    if position_ids is not None and position_ids.shape[-1] == length and position_ids.ndim == 2:
        is_first = is_first | (position_ids == 0)
    if rule == "first":
        return Selection(attended & is_first, rule)
    if rule == "last":
        return Selection(attended & (rank == largest_rank), rule)
    body = attended & ~is_first
    for skip_id in skip_ids:
        body = body & (ids != skip_id)
    return Selection(body, rule)


def _selects_all(mask: Tensor) -> bool:
    """Return whether a mask on the CPU selects every row; False for other devices."""
    on_host = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_host and bool(mask.all())


def _constant(tokens: Tensor, value: bool) -> Tensor:
    return torch.full(tokens.shape[:2], value, dtype=torch.bool, device=tokens.device)


def _attended(tokens: Tensor, mask: Tensor | None, n_past: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask of attended tokens, the rank of each token, and the largest ranks.

    The rank of a token is the number of attended tokens of its sequence up to and including the
    token; cached tokens count. The mask and the ranks have shape (B, T), and the largest rank of
    each sequence has shape (B, 1). Raises SiteError if the attention mask is shorter than the
    tokens.
    """
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device) + n_past
    if mask is None:
        rank = (positions + 1).expand(tokens.shape[0], length)
        return _constant(tokens, True), rank, rank[:, -1:]
    if mask.ndim == 2:
        attended = mask != 0
    else:
        # The mask has shape (B, queries, keys) or (B, heads, queries, keys), and the last query
        # attends to all tokens so far. A float mask is added to attention scores: 0 marks an
        # attended token.
        last_query = (mask[:, 0] if mask.ndim == 4 else mask)[:, -1]
        attended = last_query == 0 if last_query.is_floating_point() else last_query != 0
    if attended.shape[1] < length:
        raise SiteError(
            f"attention_mask has length {attended.shape[1]} for {length} tokens; pass one entry "
            "per token, cached tokens included"
        )
    ranks = attended.cumsum(1)
    if mask.ndim == 2:
        if attended.shape[1] == length:  # the mask has no entries for cached tokens
            ranks = ranks + n_past
        return attended[:, -length:], ranks[:, -length:], ranks[:, -1:]
    # The mask of a static cache also has entries for later tokens, so that the tokens of this call
    # are not the last ones.
    return attended[:, positions], ranks[:, positions], ranks[:, -1:]
