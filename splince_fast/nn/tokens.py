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
    token_shape: tuple[int, ...] | None = None  # (B, T); None if unknown, or of two kinds of tokens
    has_cache: bool = False  # whether the call has a cache or a state of earlier tokens
    only_mask: bool = False  # whether only an attention mask shows the tokens
    error: str = ""  # predicate of an error message if the selected tokens are unknown

    def mask_for(self, name: str, x: Tensor) -> Tensor | None:
        """Return the mask of the selected rows of `x` (..., d), or None if all are selected.

        Raises SiteError if the rows do not have the shape of the tokens, or if the selected tokens
        are unknown.
        """
        mask, shape = self.mask, tuple(x.shape[:-1])
        if self.error:
            if self.rule != "first" or x.ndim < 3:
                raise SiteError(f"the site {name!r} {self.error}")
            mask = torch.zeros(shape, dtype=torch.bool, device=x.device)
            mask[:, 0] = True
            return mask
        if mask is None:
            return None
        token_shape = tuple(mask.shape)
        # The rows are the same tokens in another form: downsampled, or with the tokens first.
        is_other_form = len(shape) > 1 and (self.only_mask or shape == token_shape[::-1])
        if token_shape == shape:
            if self.all_selected:
                return None
        elif len(shape) == 1 and shape[0] == mask.numel():
            mask = mask.reshape(-1)
        elif self.rule != "all" or is_other_form:
            hint = "" if is_other_form else "tokens='all', or "
            raise SiteError(
                f"the site {name!r} has shape {tuple(x.shape)}, and the call has tokens of "
                f"shape {token_shape}; pass {hint}a function that returns a mask of the site's own "
                "shape"
            )
        elif len(shape) > len(token_shape) and shape[: len(token_shape)] == token_shape:
            # The rows of a token are those of its heads.
            n_more = len(shape) - len(token_shape)
            mask = mask.reshape(*token_shape, *[1] * n_more).expand(shape)
        else:  # a site without tokens, such as a pooled state or a module of a vision tower
            return None
        # Only copies to a GPU are asynchronous, because the host may read its copy at once.
        return mask if mask.device == x.device else mask.to(x.device, non_blocking=x.is_cuda)

    def selects_same(self, other: Selection) -> bool:
        """Return whether another selection is equal; synchronises with the device of the masks."""
        mask, other_mask = self.mask, other.mask
        if self is other or mask is None or other_mask is None:
            return self is other or (mask is other_mask and self.error == other.error)
        return mask.device == other_mask.device and bool(torch.equal(mask, other_mask))

    def holds_in(self, arguments: Mapping[str, Any], parameters: tuple[str, ...]) -> bool:
        """Return whether the selection also holds in a nested call.

        It holds in a call without tokens, and in a call of as many tokens that shows less of them
        than the outer call, as that of a module of embeddings, which takes no attention mask.
        """
        keys = "input_ids", "inputs_embeds"
        tokens = next((t for key in keys if (t := arguments.get(key)) is not None), None)
        if tokens is None:
            return True
        return (
            self.token_shape is not None
            and tuple(tokens.shape[:2]) == self.token_shape
            and "attention_mask" not in {*parameters, *arguments}
            and (self.has_cache or not _caches(arguments))
        )


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


def _past_length(
    arguments: Mapping[str, Any], caches: Mapping[str, Any], n_masked: int
) -> int | Tensor | None:
    """Return the number of earlier tokens, as an int or a tensor; None if no argument shows it.

    `n_masked` is the number of entries of the attention mask, less the number of tokens. If the
    arguments show only that earlier tokens exist, as for recurrent models, their number is
    `n_masked`, or 1 if the mask has no entries for them.
    """
    lengths = [
        max(1, n_masked) * bool(len(c)) if key in _STATES else _length_of(c, n_masked)
        for key, c in caches.items()
    ]
    length = next((n for n in lengths if n is not None), None)
    if length is not None:
        return length
    position = arguments.get("cache_position")
    if isinstance(position, Tensor) and position.numel():
        first = position.reshape(-1)[0]
        on_host = first.device.type == "cpu" and not torch.compiler.is_compiling()
        return int(first) if on_host else first
    return None


def _caches(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are caches or states of earlier tokens."""
    return {key: value for key, value in arguments.items() if _is_cache(key, value)}


def _is_cache(key: str, value: object) -> bool:
    """Return whether an argument is a cache or a state of earlier tokens."""
    if value is None or isinstance(value, bool | int | str):
        return False
    if key in _STATES:
        return True
    return ("cache" in key or "past" in key) and not isinstance(value, Tensor)


def _length_of(cache: object, n_masked: int) -> int | Tensor | None:
    """Return the number of tokens in a cache, None if the cache shows nothing."""
    if hasattr(cache, "get_seq_length"):
        with suppress(ValueError):  # raised by a cache that holds recurrent states only
            return cache.get_seq_length()
    if hasattr(cache, "has_previous_state"):
        has_previous = cache.has_previous_state
        return max(1, n_masked) * bool(has_previous() if callable(has_previous) else has_previous)
    if hasattr(cache, "seqlen_offset"):
        return cache.seqlen_offset
    if isinstance(cache, tuple | list):
        if not cache:
            return 0
        keys = cache[0][0] if isinstance(cache[0], tuple | list) and cache[0] else None
        # The axis of the tokens depends on the model, so that the mask is the better source.
        return n_masked or int(keys.shape[-2]) if isinstance(keys, Tensor) else None
    return None


def select(
    token_rule: TokenRule, arguments: Mapping[str, Any], parameters: tuple[str, ...] = ()
) -> Selection:
    """Return the tokens that a rule selects for the arguments of a call.

    `parameters` are the names of all parameters of the called module. Raises SiteError if the
    arguments do not determine the selection.
    """
    rule, skip_ids = token_rule.rule, token_rule.skip_ids
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
    caches = _caches(arguments)
    selection_of = functools.partial(
        Selection,
        token_shape=None if tokens is None or prefix else tuple(tokens.shape[:2]),
        has_cache=bool(caches),
        only_mask=tokens is mask,
    )
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
    n_masked = 0 if mask is None else max(0, mask.shape[-1] - length)
    n_past = _past_length(arguments, caches, n_masked)
    if n_past is None:
        n_past = n_masked
        covers_past = mask is not None and mask.ndim == 2 and n_masked > 0
        if caches and rule in ("body", "first") and not covers_past:
            raise SiteError(
                f"the number of earlier tokens in {list(caches)} is unknown, so tokens={rule!r} "
                "cannot find the first token; pass an attention_mask over all tokens so far, "
                "tokens='all', or a function of the call's inputs"
            )
    if mask is None and rule in ("all", "mean"):
        return selection_of(None, rule)
    if mask is None and length == 1 and isinstance(n_past, int) and n_past > 0:
        if rule == "first":
            return selection_of(_constant(tokens, False), rule)
        if not (skip_ids and rule == "body"):
            return selection_of(None, rule)
    if mask is None:
        mask = _constant(tokens, True)
    selected = _selected(rule, tokens, mask, n_past, arguments.get("position_ids"))
    if len(selected) == 1:  # a mask of all sequences
        selected = selected.expand(tokens.shape[:2])
    if rule == "body":
        for skip_id in skip_ids:
            selected = selected & (ids != skip_id)
    return selection_of(selected, rule, _selects_all(selected))


def _selects_all(mask: Tensor) -> bool:
    """Return whether a mask on the CPU selects every row; False for other devices."""
    on_host = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_host and bool(mask.all())


def _constant(tokens: Tensor, value: bool) -> Tensor:
    return torch.full(tokens.shape[:2], value, dtype=torch.bool, device=tokens.device)


def _selected(
    rule: str, tokens: Tensor, mask: Tensor, n_past: Any, position_ids: Tensor | None
) -> Tensor:
    """Return the mask (B, T) of the attended tokens that a rule selects; B can be 1 for all rows.

    Each of several sequences that a mask with queries separates has a first token; the last token
    is that of the row. Raises SiteError if the attention mask is shorter than the tokens.
    """
    # The mask has shape (B, keys), (B, queries, keys) or (B, heads, queries, keys).
    length, n_keys = tokens.shape[1], mask.shape[-1]
    if n_keys < length:
        raise SiteError(
            f"attention_mask has length {n_keys} for {length} tokens; pass one entry "
            "per token, cached tokens included"
        )
    allowed = None if mask.ndim == 2 else _allowed(mask[:, 0] if mask.ndim == 4 else mask)
    attended = mask != 0 if allowed is None else allowed.any(1)
    # A mask may have no entries for cached tokens, or for those outside of a window. The mask of a
    # static cache also has entries for later tokens.
    latest = n_keys - length
    start = n_past.clamp(max=latest) if isinstance(n_past, Tensor) else min(n_past, latest)
    selected = _columns(attended, start, length)
    if rule in ("all", "mean"):
        return selected
    # The rank of a token is the number of tokens of its sequence up to and including the token.
    rank = _columns(attended.cumsum(1), start, length)
    if rule == "last":
        return selected & (rank == rank[:, -1:])
    if allowed is not None:
        positions = torch.arange(length, device=mask.device) + start
        is_earlier = torch.arange(n_keys, device=mask.device) <= positions.unsqueeze(1)
        rank = (allowed[:, -length:] & is_earlier).sum(-1)
    is_first = rank == 1 - (n_past - start)
    if position_ids is not None and position_ids.shape[-1] == length and position_ids.ndim == 2:
        is_first = is_first | (position_ids == 0)
    return selected & (is_first if rule == "first" else ~is_first)


def _columns(x: Tensor, start: int | Tensor, length: int) -> Tensor:
    """Return `length` columns of a matrix; a start on a device is not copied to the host."""
    if isinstance(start, Tensor):
        return x.index_select(1, torch.arange(length, device=x.device) + start)
    return x[:, start : start + length]


def _allowed(mask: Tensor) -> Tensor:
    """Return which keys each query attends to, for a mask (B, queries, keys)."""
    if not mask.is_floating_point():
        return mask != 0
    # A float mask is added to attention scores, so that 0 marks an attended key, unless it has
    # positive entries: it is then a mask of zeros and ones. The test stays on the device.
    return (mask > 0) | ((mask == 0) & ~(mask > 0).any())
