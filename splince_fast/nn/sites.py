"""Which modules of a model are meant, and which tensor of what they take or return."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from splince_fast.exceptions import InputError, SiteError

Tensor = Any
Module = Any
Key = int | str | None

# Names that wrappers put between the parts of a module's own name.
_INFIXES = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PEFT = "base_model.model."
# Where the input of a module is when it has no positional argument.
_INPUTS = ("hidden_states", "input", "x")


def named(model: Module) -> dict[str, Module]:
    """Modules by their names without the infixes of wrappers; a shared one under each name."""
    found: dict[str, Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(_clean(name), module)
    return found


def _clean(name: str) -> str:
    """A dotted name without what wrappers add to it."""
    own = ".".join(part for part in name.split(".") if part not in _INFIXES)
    return own.removeprefix(_PEFT)


def find(model: Module, at: Any) -> dict[str, Module]:
    """The modules that `at` names, by name, each once and in the order of the model.

    Parameters
    ----------
    model : torch.nn.Module
    at : str, Module, or a list of them
        A dotted name; a pattern, in which ``*``, ``?`` and ``[...]`` stay within one part of a
        name and ``**`` goes across dots; or modules of the model.

    Raises
    ------
    SiteError
        Nothing is found, or what is found is never called.
    """
    if not isinstance(model, torch.nn.Module):
        raise SiteError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
    modules = named(model)
    wanted = [at] if isinstance(at, str | torch.nn.Module) else list(at)
    if not wanted:
        raise SiteError("at names no site; pass a dotted name, a pattern, or a list of them")
    chosen: dict[str, Module] = {}
    for one in wanted:
        hits = _matching(modules, one)
        for name in hits:
            _check_called(model, modules, name)
            chosen[name] = modules[name]
    order = {name: i for i, name in enumerate(modules)}
    unique: dict[int, str] = {}
    for name in sorted(chosen, key=order.__getitem__):
        unique.setdefault(id(chosen[name]), name)
    return {name: chosen[name] for name in unique.values()}


def _matching(modules: Mapping[str, Module], wanted: Any) -> list[str]:
    """Names of the modules that one entry of `at` means."""
    if isinstance(wanted, torch.nn.Module):
        hits = [name for name, module in modules.items() if module is wanted][:1]
        if not hits:
            raise SiteError(f"at holds a {type(wanted).__name__} that is no module of this model")
        return hits
    if not isinstance(wanted, str):
        raise SiteError(
            f"at holds {wanted!r}; a site is a dotted name, a pattern, or a module of the model"
        )
    pattern = re.compile(_regex(wanted))
    hits = [name for name in modules if pattern.fullmatch(name)]
    if not hits:
        near = difflib.get_close_matches(wanted, list(modules), n=3, cutoff=0.0)
        raise SiteError(
            f"no module of this model is called {wanted!r}; the nearest names are "
            f"{', '.join(map(repr, near))} (print model.named_modules() for all)"
        )
    return hits


def _regex(pattern: str) -> str:
    """A pattern of names as a regular expression."""
    parts = []
    for token in re.findall(r"\*\*\.?|\*|\?|\[[^\]]*\]|[^*?\[]+|\[", pattern):
        if token == "**.":
            parts.append(r"(?:.*\.)?")
        elif token == "**":
            parts.append(".*")
        elif token == "*":
            parts.append(r"[^.]*")
        elif token == "?":
            parts.append(r"[^.]")
        elif len(token) > 1 and token.startswith("["):
            inner = token[1:-1].replace("\\", r"\\").replace("^", r"\^")
            parts.append(f"[{'^' + inner[1:] if inner.startswith('!') else inner}]")
        else:
            parts.append(re.escape(token))
    return "".join(parts)


def _check_called(model: Module, modules: Mapping[str, Module], name: str) -> None:
    """Raise SiteError for a module whose hooks would never run."""
    module = modules[name]
    kind = type(module).__name__
    above = [model, *(modules[p] for p in _parents(name) if p in modules)]
    for parent in [*above, module]:
        if isinstance(parent, torch.jit.ScriptModule):
            raise SiteError(
                f"{name!r} is inside a ScriptModule, which does not run hooks set from outside; "
                "hook the model before it is scripted or traced"
            )
        if isinstance(parent, torch.fx.GraphModule):
            raise SiteError(
                f"{name!r} is inside an exported or traced graph, which calls no modules; hook "
                "the model before it is exported"
            )
    if type(module).forward is torch.nn.Module.forward or kind in (
        "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"
    ):  # fmt: skip
        raise SiteError(
            f"{name!r} is a {kind}, a container that is never called itself; name what is in it "
            f"({name + '.*'!r})"
        )
    parent_name = name.rpartition(".")[0]
    parent = model if not parent_name else modules.get(parent_name)
    if isinstance(parent, torch.nn.MultiheadAttention):
        raise SiteError(
            f"{name!r} is never called: nn.MultiheadAttention reads its weights without calling "
            f"it; use the output of {parent_name!r}"
        )


def _parents(name: str) -> Iterator[str]:
    """Names of the modules around a module."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i])


# -- tensors -------------------------------------------------------------------------------


def is_row_tensor(value: Any) -> bool:
    """Whether a value is a tensor of floating numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def pick(name: str, output: Any, key: Key, feature_dim: int = -1) -> tuple[Tensor, Key]:
    """The tensor of an output that a site means, and where it stands in it.

    A tensor itself; element 0 of a tuple or list; ``last_hidden_state`` or else the first
    floating field of a mapping. `key`, an index or a field, overrules this.

    Raises
    ------
    SiteError
        There is none, or several fields of a mapping have its width along `feature_dim`; the
        text names the elements that would do.
    """
    if key is None and isinstance(output, torch.Tensor) and output.is_floating_point():
        return output, None
    found, where = _element(output, key)
    if key is None and where != "last_hidden_state" and isinstance(output, Mapping):
        alike = [k for k, v in output.items() if _same_width(v, found, feature_dim)]
        if len(alike) > 1:
            raise SiteError(
                f"the site {name!r} returns several tensors of the same width, {alike}: say by "
                "output= which one is meant"
            )
    if not is_row_tensor(found):
        fitting = [label for label, value in _elements(output) if is_row_tensor(value)]
        hint = f"; pass output= one of {fitting}" if fitting else ""
        shown = f"element {key!r} of " if key is not None else ""
        raise SiteError(
            f"the site {name!r} gave no floating tensor: {shown}{describe(output)}{hint}"
        )
    return found, where


def _element(output: Any, key: Key) -> tuple[Any, Key]:
    if isinstance(key, str):
        if isinstance(output, Mapping):
            return output.get(key), key
        return getattr(output, key, None), key
    if isinstance(output, Mapping):
        names = list(output)
        if key is not None:
            names = names[key : key + 1]
        elif "last_hidden_state" in output:
            names = ["last_hidden_state"]
        for field in names:
            if is_row_tensor(output[field]):
                return output[field], field
        return None, None
    if isinstance(output, Sequence) and not isinstance(output, str):
        place = 0 if key is None else key
        return (output[place], place) if -len(output) <= place < len(output) else (None, place)
    return None, key


def _elements(output: Any) -> list[tuple[int | str, Any]]:
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return list(enumerate(output))
    return []


def _same_width(value: Any, found: Any, axis: int) -> bool:
    """Whether a value is a tensor of floating numbers as wide as another one along an axis."""
    return all(is_row_tensor(v) and -v.ndim <= axis < v.ndim for v in (value, found)) and bool(
        value.shape[axis] == found.shape[axis]
    )


def put(output: Any, key: Key, tensor: Tensor) -> Any:
    """The same output with another tensor; its type is kept and the original is left alone."""
    if key is None:
        return tensor
    if isinstance(output, Mapping) or isinstance(key, str):
        new = copy.copy(output)
        if isinstance(output, Mapping):
            new[key] = tensor
        else:
            setattr(new, str(key), tensor)
        return new
    items = [tensor if i == key % len(output) else item for i, item in enumerate(output)]
    if hasattr(output, "_replace"):
        return type(output)._make(items)
    if isinstance(output, list):
        new = copy.copy(output)
        new[:] = items
        return new
    return type(output)(items)


def pick_input(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    """Where the input of a module is: a position, or a keyword.

    Raises
    ------
    SiteError
        No argument is a floating tensor, or several are and none has a usual name.
    """
    if args and is_row_tensor(args[0]):
        return 0
    floating = [key for key, value in kwargs.items() if is_row_tensor(value)]
    for usual in _INPUTS:
        if usual in floating:
            return usual
    if not args and len(floating) == 1:
        return floating[0]
    raise SiteError(
        f"the site {name!r} has no input that is clearly meant: positional "
        f"{[describe(a) for a in args]}, keywords { ({k: describe(v) for k, v in kwargs.items()}) }"
    )


def check_width(name: str, x: Tensor, feature_dim: int, width: int) -> None:
    """Raise SiteError unless the axis `feature_dim` of a tensor has the width of its eraser."""
    fits = -x.ndim <= feature_dim < x.ndim and x.shape[feature_dim] == width
    if not fits:
        where = [axis for axis, size in enumerate(x.shape) if size == width]
        hint = f"; axis {where} has it: pass feature_dim" if where else ""
        raise SiteError(
            f"the site {name!r} has shape {tuple(x.shape)}, and axis {feature_dim} must have the "
            f"eraser's width {width}{hint}"
        )


def number_of_heads(model: Module, heads: Any) -> int | None:
    """`heads` as a number: an attribute of the model's configuration if it is a name.

    Raises
    ------
    InputError
        No positive integer, or no such attribute.
    """
    found = heads
    if isinstance(heads, str):
        config: Any = getattr(model, "config", None)
        inner = config.get_text_config() if hasattr(config, "get_text_config") else config
        found = getattr(config, heads, getattr(inner, heads, None))
    if found is None and heads is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise InputError(
            f"heads is {heads!r}; it is a positive integer, or the name of one in the model's "
            "configuration, such as 'num_attention_heads' or 'num_key_value_heads'"
        )
    return found


def joined_heads(name: str, x: Tensor, heads: int) -> Tensor:
    """The tensor (B, T, heads, width) as (B, T, heads * width); any other (..., d) as it is.

    Raises
    ------
    SiteError
        The last axis is no multiple of `heads`.
    """
    if x.ndim == 4 and x.shape[-2] == heads:
        return x.reshape(*x.shape[:-2], -1)
    if x.ndim == 4 or x.ndim == 0 or x.shape[-1] % heads:
        raise SiteError(
            f"the site {name!r} has shape {tuple(x.shape)}, which does not split into {heads} "
            "heads: it must be (batch, token, heads, width), or have a last axis that is a "
            "multiple of heads (keys and values of grouped attention have num_key_value_heads)"
        )
    return x


def describe(value: Any) -> str:
    """A value by type and shapes, for messages."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    inner = _elements(value)
    if inner:
        return f"{type(value).__name__}({', '.join(f'{k}: {describe(v)}' for k, v in inner)})"
    return type(value).__name__


def in_backward() -> bool:
    """Whether the call comes from inside a backward pass: gradient checkpointing runs again."""
    return bool(torch._C._current_graph_task_id() != -1)


def devices_of(model: Module) -> list[Any]:
    """Devices of the parameters and buffers that hold numbers, in the order of the model."""
    tensors = (*model.parameters(), *model.buffers())
    return list(dict.fromkeys(t.device for t in tensors if t.device.type != "meta"))


def device_of(model: Module) -> Any:
    """Device of the first parameter or buffer that holds numbers; the CPU without any."""
    return next(iter(devices_of(model)), torch.device("cpu"))


def call(
    model: Module, batch: Any, without: Sequence[str], forward: Callable[..., Any] | None
) -> Any:
    """Run a model on a batch: by `forward`, by keywords, by position, or as a single argument."""
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Mapping):
        from splince_fast.nn.tokens import parameters_of

        accepted, any_keyword = parameters_of(model)
        return model(
            **{
                k: v
                for k, v in batch.items()
                if k not in without and (any_keyword or k in accepted)
            }
        )
    if isinstance(batch, tuple | list):
        if without:  # named labels are in the second of (inputs, labels)
            return call(model, batch[0], without, None)
        return model(*_accepted(model, batch))
    return model(batch)


def _accepted(model: Module, batch: Sequence[Any]) -> Sequence[Any]:
    """The inputs alone of (inputs, labels), where the model takes a single argument.

    Raises
    ------
    InputError
        More entries than the model takes.
    """
    try:
        parameters = inspect.signature(type(model).forward).parameters.values()
    except (TypeError, ValueError):
        return batch
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return batch
    taken = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) - 1
    if len(batch) <= taken:
        return batch
    if (len(batch), taken) == (2, 1):
        return batch[:1]
    raise InputError(
        f"a batch has {len(batch)} entries and {type(model).__name__}.forward takes {taken} "
        "argument(s); pass mappings, pairs (inputs, labels) with the names of the labels, or "
        "forward=lambda model, batch: ..."
    )
