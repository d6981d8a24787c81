"""Sites of a model: modules by name, tensors in their inputs and outputs, and results by site."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from splince_fast._runtime import files
from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.names import listed
from splince_fast._solve.options import is_integer
from splince_fast.exceptions import InputError, SiteError

Key = int | str | None

# Submodules that wrappers of torch insert. Other modules also have a submodule called "module".
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
# Names of the input of a module that receives its input by keyword, in order of preference.
_INPUT_KEYWORDS = ("hidden_states", "input", "x")
_WILDCARDS = {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}


# -- modules -------------------------------------------------------------------------------


def clean_names(model: Module) -> Iterator[tuple[str, str, Module]]:
    """Yield each module with its name, and its name without the parts that wrappers insert."""
    modules: dict[str, Module] = {}
    clean = {"": ""}
    for name, module in model.named_modules(remove_duplicate=False):
        outer, _, part = name.rpartition(".")
        if name:
            is_part = not _is_wrapped(modules[outer], part, not clean[outer])
            clean[name] = f"{clean[outer]}.{part}".lstrip(".") if is_part else clean[outer]
        modules[name] = module
        yield name, clean[name], module


def _is_wrapped(outer: Module, part: str, is_outermost: bool) -> bool:
    """Return whether the submodule `part` of `outer` is inserted by a wrapper."""
    # `is_outermost`: all modules around `outer` are wrappers.
    if part == "module":
        return isinstance(outer, _PARALLEL) or (is_outermost and len(outer._modules) == 1)
    is_peft = is_outermost and type(outer).__module__.startswith("peft.")
    return part in _WRAPPED or (is_peft and part in ("base_model", "model"))


def named_modules(model: Module) -> dict[str, Module]:
    """Return modules by clean name; a shared module has several, and a wrapper hides its module."""
    modules: dict[str, Module] = {}
    for _, name, module in clean_names(model):
        modules.setdefault(name, module)
    return modules


def find(model: Module, at: str | Module | Iterable[str | Module]) -> dict[str, Module]:
    """Return the modules that names, patterns or modules select, each once, in their order."""
    if not isinstance(model, Module):
        raise SiteError(f"model is {described_type(model)}; it must be a torch.nn.Module")
    modules = named_modules(model)
    clean = {name: new for name, new, _ in clean_names(model)}
    entries = list(at) if isinstance(at, Iterable) and not isinstance(at, str | Module) else [at]
    if not entries:
        raise SiteError("at names no site; pass a dotted name, a pattern, or a list of them")
    selected: set[str] = set()
    for entry in entries:
        found = [name for name, module in modules.items() if module is entry][:1]
        if isinstance(entry, str):
            pattern = _pattern(entry)
            found = [name for name in modules if pattern.fullmatch(name)]
            found = found or [new for name, new in clean.items() if pattern.fullmatch(name)]
        if not found:
            shown = described_type(entry) if isinstance(entry, Module) else repr(entry)
            raise SiteError(
                f"at holds {shown}: no module of this model has this name or pattern, or is this "
                "module; model.named_modules() has all names"
            )
        selected.update(found)
    unique: dict[int, str] = {}
    for name, module in modules.items():
        if name in selected:
            _check_called(model, modules, name)
            unique.setdefault(id(module), name)
    return {name: modules[name] for name in unique.values()}


def _pattern(site: str) -> re.Pattern[str]:
    """Compile a pattern of names; only ``**`` matches beyond one part of a name."""
    pieces = re.split(r"(\*\*\.?|\*|\?|\[[^\]]*\])", site)
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [_WILDCARDS.get(piece, piece.replace("[!", "[^")) for piece in pieces[1::2]]
    has_numbers = re.search(r"\[[^\]]*(\d\d-|-\d\d)", site)  # would select other names
    with suppress(re.error):
        if not has_numbers:
            return re.compile("".join(pieces))
    raise SiteError(
        f"{site!r} is no pattern: brackets stand for one character, as in '[2-5]'; pass numbers of "
        "several digits as a list of names"
    )


def _check_called(model: Module, modules: Mapping[str, Module], name: str) -> None:
    """Raise SiteError for a module whose hooks would never run."""
    around = [modules[p] for p in ("", *prefixes(name)) if p in modules]
    kind, parent = type(modules[name]), modules.get(name.rpartition(".")[0])
    reason = ""
    if any(isinstance(m, torch.jit.ScriptModule | torch.fx.GraphModule) for m in (model, *around)):
        reason = (
            "inside a ScriptModule or an exported graph, which run no hooks that are added later; "
            "pass the model before it is scripted, traced or exported"
        )
    elif kind.forward is Module.forward:
        reason = (
            f"a {kind.__name__} without a forward method, so that it is never called; name the "
            f"modules in it ({name + '.*'!r})"
        )
    elif name and isinstance(parent, torch.nn.MultiheadAttention):
        reason = (
            "never called: nn.MultiheadAttention reads its weights without calling it; use the "
            f"output of {name.rpartition('.')[0]!r}"
        )
    if reason:
        raise SiteError(f"{name!r} is {reason}")


def prefixes(name: str) -> Iterator[str]:
    """Yield the names of the ancestors of the module `name`, outermost first, and then `name`."""
    yield from itertools.accumulate(name.split("."), "{}.{}".format)


# -- tensors -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Side, feature axis and element that select the tensor of a module to collect or to erase."""

    side: str = "output"
    feature_dim: int = -1
    output: int | str | None = None
    heads: int | None = None  # number of attention heads, each with its own eraser

    def __post_init__(self) -> None:
        """Raise InputError for invalid arguments of :func:`collect`."""
        output, heads = self.output, self.heads
        is_key = is_integer(output) or isinstance(output, str)
        for name, is_valid, valid in (
            ("side", self.side in ("input", "output"), "'input' or 'output'"),
            ("feature_dim", is_integer(self.feature_dim), "the number of an axis"),
            ("output", output is None or (is_key and self.side == "output"),
             "the index or the name of an element of an output, with side='output'"),
            ("heads", heads is None or (is_integer(heads) and heads > 0),
             "a positive integer, such as model.config.num_attention_heads or "
             "model.config.num_key_value_heads"),
            ("feature_dim", heads is None or self.feature_dim == -1,
             "-1 with heads=, which splits the last axis"),
        ):  # fmt: skip
            if not is_valid:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be {valid}")


def is_row_tensor(value: object) -> bool:
    """Return whether a value is a tensor of floats."""
    return isinstance(value, Tensor) and value.is_floating_point()


def pick(name: str, output: object, key: Key, feature_dim: int = -1) -> tuple[Tensor, Key]:
    """Return the tensor of a site in the output of its module, and its index or field."""
    if key is None and is_row_tensor(output):
        return output, None
    parts, is_mapping = elements(output), isinstance(output, Mapping)
    keys, floating = list(parts), [k for k, value in parts.items() if is_row_tensor(value)]
    found = key
    if key is None and is_mapping:
        found = "last_hidden_state" if "last_hidden_state" in parts else [*floating, None][0]
    elif not isinstance(key, str):
        found = next(iter(keys[key or 0 :]), None) if -len(keys) <= (key or 0) else None
    tensor: Any = parts.get(found, getattr(output, str(found), None))
    if not is_row_tensor(tensor):
        hint = f"; output= can be {listed(floating)}" if floating else ""
        element = f"element {key!r} of " if key is not None else ""
        raise SiteError(
            f"the site {name!r} has no floating tensor: {element}{describe(output)}{hint}"
        )
    if key is None and is_mapping and found != "last_hidden_state":
        width = tensor.shape[feature_dim:][:1]
        fields = [k for k in floating if parts[k].shape[feature_dim:][:1] == width]
        if len(fields) > 1:
            raise SiteError(
                f"the site {name!r} returns several tensors of the same width, {listed(fields)}: "
                "select one of them by output="
            )
    return tensor, found


def elements(output: object) -> dict[Key, Any]:
    """Return the elements of a mapping or a sequence by field or index."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, Sequence) and not isinstance(output, str):
        return dict(enumerate(output))
    return {}


def put(output: Any, key: Key, tensor: Tensor) -> Any:
    """Return a copy of an output, of the same type, with `tensor` at the index or field `key`."""
    if key is None:
        return tensor
    if isinstance(output, tuple | list):
        fields = getattr(type(output), "__match_args__", ())  # of a named tuple
        i = fields.index(key) if key in fields else key
        items = [tensor if j == i else item for j, item in enumerate(output)]
        return type(output)._make(items) if hasattr(output, "_make") else type(output)(items)
    new = copy.copy(output)
    if isinstance(output, Mapping):
        new[key] = tensor
    else:
        object.__setattr__(new, str(key), tensor)  # also of a frozen dataclass
    return new


def pick_input(name: str, args: tuple[object, ...], kwargs: Mapping[str, Any]) -> int | str:
    """Return the position or keyword of the argument that is the input of a module."""
    if args and is_row_tensor(args[0]):
        return 0
    floating = [key for key, value in kwargs.items() if is_row_tensor(value)]
    for keyword in _INPUT_KEYWORDS:
        if keyword in floating:
            return keyword
    if not args and len(floating) == 1:
        return floating[0]
    raise SiteError(
        f"the site {name!r} has no unambiguous input: positional "
        f"{[describe(a) for a in args]}, keywords { ({k: describe(v) for k, v in kwargs.items()}) }"
    )


def on_input(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call a function with the input of a module, and replace the input by its result."""
    key = pick_input(name, args, kwargs)
    value = function(args[key] if isinstance(key, int) else kwargs[key])
    if value is None:
        return None
    if isinstance(key, int):
        return (value, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: value}


def add_hook(
    name: str, module: Module, side: str, function: Callable[[Any], Any]
) -> RemovableHandle:
    """Add a hook that calls a function with the output or the input of a module."""
    if side == "input":
        return module.register_forward_pre_hook(
            lambda module, args, kwargs: on_input(name, args, kwargs, function), with_kwargs=True
        )
    return module.register_forward_hook(lambda module, args, output: function(output))


# -- rows ----------------------------------------------------------------------------------


def pick_rows(
    name: str, value: object, placement: Placement, width: int | None = None
) -> tuple[Tensor, Tensor, Key]:
    """Return the rows (..., d) of a site, their tensor in `value`, and its index or field."""
    axis, heads = placement.feature_dim, placement.heads
    tensor, key = pick(name, value, placement.output, axis)
    rows = tensor if heads is None else merge_heads(name, tensor, heads)
    check_width(name, rows, axis, width)
    return rows if axis in (-1, rows.ndim - 1) else rows.movedim(axis, -1), tensor, key


def replace_rows(
    name: str, value: object, placement: Placement, width: int, function: Callable[[Tensor], Tensor]
) -> Any:
    """Return a copy of an output or input of a module in which a function has mapped the rows."""
    rows, tensor, key = pick_rows(name, value, placement, width)
    new, axis = function(rows), placement.feature_dim
    if placement.heads is not None:
        new = new.reshape(tensor.shape)
    elif axis not in (-1, new.ndim - 1):
        new = new.movedim(-1, axis)
    return put(value, key, new)


def check_width(name: str, x: Tensor, feature_dim: int, width: int | None) -> None:
    """Raise SiteError unless the axis `feature_dim` exists and has size `width`."""
    if x.is_nested:
        raise SiteError(
            f"the site {name!r} has a nested tensor, which has no shape. The likely cause is "
            "nn.TransformerEncoder in evaluation mode with a padding mask: set its attribute "
            "use_nested_tensor to False, or pass enable_nested_tensor=False to its constructor"
        )
    if not -x.ndim <= feature_dim < x.ndim:
        raise SiteError(f"the site {name!r} has shape {tuple(x.shape)}, without axis {feature_dim}")
    if width not in (None, x.shape[feature_dim]):
        axes = [axis for axis, size in enumerate(x.shape) if size == width]
        hint = f"; axis {listed(axes)} has this width: pass feature_dim" if axes else ""
        raise SiteError(
            f"the site {name!r} has shape {tuple(x.shape)}, and axis {feature_dim} must have "
            f"width {width}, as the eraser or earlier activations{hint}"
        )


def merge_heads(name: str, x: Tensor, heads: int) -> Tensor:
    """Reshape a tensor (B, T, heads, width) to (B, T, heads * width)."""
    if x.ndim == 4 and x.shape[-2] == heads:
        return x.reshape(*x.shape[:-2], -1)
    if x.ndim == 4 or x.ndim == 0 or x.shape[-1] % heads:
        raise SiteError(
            f"the site {name!r} has shape {tuple(x.shape)}, which does not split into {heads} "
            "heads: it must be (batch, token, heads, width), or have a last axis that is a "
            "multiple of heads (keys and values of grouped attention have num_key_value_heads)"
        )
    return x


def describe(value: object) -> str:
    """Return a description of a value by types and shapes, for error messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    parts = ", ".join(f"{key}: {describe(part)}" for key, part in elements(value).items())
    return f"{type(value).__name__}({parts})" if parts else type(value).__name__


def in_backward() -> bool:
    """Return whether a backward pass is running, during which checkpoints run modules again."""
    return bool(torch._C._current_graph_task_id() != -1)


# -- results by site -----------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A module at which activations were collected.

    Attributes
    ----------
    name : str
        Dotted name without the infixes of wrappers.
    module_class : str
        Class name of the module.
    width : int
        Number of features; 0 if no row was collected.
    calls : int
        Number of calls of the module.
    """

    name: str
    module_class: str
    width: int
    calls: int


@dataclass(frozen=True)
class CollectionSpec:
    """Placement, tokens and weights of a collection, and the tokens that its erasers change."""

    placement: Placement = Placement()
    tokens: Any = "all"  # rule for the collected tokens
    skip_ids: tuple[int, ...] = ()
    weight: str = "token"  # or "sequence"
    apply_to: Any = None  # rule for the tokens that the erasers change; None for `tokens`
    bias: str = "keep"  # "drop" if the erasers leave out the mean

    @property
    def applied(self) -> Any:
        """The rule for the tokens that erasers change."""
        return self.tokens if self.apply_to is None else self.apply_to

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; a function becomes the text "a function"."""
        rules = {"tokens": self.tokens, "apply_to": self.apply_to}
        names = {k: "a function" if callable(rule) else rule for k, rule in rules.items()}
        return {**asdict(self), **names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CollectionSpec:
        """Return the specification with the values that :meth:`to_dict` returned."""
        placement, skip_ids = Placement(**values["placement"]), map(int, values["skip_ids"])
        return cls(**{**values, "placement": placement, "skip_ids": tuple(skip_ids)})


class BySite(dict[str, Any]):
    """Base class of Collected and Erasers: values by site that can be saved."""

    _KIND: ClassVar[str]  # name of this kind of object in files
    # Two functions: one converts a value to a record of a file, the other a record to a value.
    _CONVERTERS: ClassVar[tuple[Callable[[Any], files.Record], Callable[[Any, Any], Any]]]
    _EXTRA: ClassVar[str]  # name of the further argument of the constructor, an attribute
    _PATH: staticmethod[[Any], Any] = staticmethod(files.as_path)

    def __init__(
        self, values: Mapping[str, Any], sites: Iterable[Site], recipe: CollectionSpec, **extra: Any
    ) -> None:
        super().__init__(values)
        self.sites, self.recipe = tuple(sites), recipe
        self.placement, self.tokens = recipe.placement, recipe.tokens
        vars(self).update(extra)

    def __missing__(self, name: object) -> Any:
        raise KeyError(f"no site {name!r}; the sites are {listed(self)}")

    def __repr__(self) -> str:
        tokens = self.recipe.to_dict()["tokens"]
        return f"{type(self).__name__}({len(self.sites)} sites, tokens {tokens})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file.

        Parameters
        ----------
        path : path
            The file, replaced atomically; its suffix for Erasers is ``.safetensors`` or empty.
        """
        target = self._PATH(path)
        tensors: files.Tensors = {}
        records = {}
        for i, (name, value) in enumerate(self.items()):
            site_tensors, records[name] = self._CONVERTERS[0](value)
            tensors |= {f"{i}.{key}": tensor for key, tensor in site_tensors.items()}
        metadata = {
            "order": list(records),  # `records` is written with sorted keys
            "records": records,
            "sites": [asdict(site) for site in self.sites],
            "recipe": self.recipe.to_dict(),
            self._EXTRA: getattr(self, self._EXTRA),
        }
        files.write(target, self._KIND, 1, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file written by :meth:`save`; values are equal bit for bit.

        Parameters
        ----------
        path : path
            The file.

        Returns
        -------
        Collected or Erasers
            An object of this class. A token rule that was a function is replaced by the text
            "a function".

        Raises
        ------
        FileFormatError
            The file is damaged, holds another kind of object, or was written by another program
            or a newer version.
        FileNotFoundError
            The file does not exist.
        """
        tensors, metadata = files.read(path, cls._KIND, 1)
        with files.consistent(path, "make it again"):
            values = {}
            for i, name in enumerate(metadata["order"]):
                own = {k[len(f"{i}.") :]: t for k, t in tensors.items() if k.startswith(f"{i}.")}
                values[name] = cls._CONVERTERS[1](own, metadata["records"][name])
            sites = [Site(**site) for site in metadata["sites"]]
            spec = CollectionSpec.from_dict(metadata["recipe"])
            return cls(values, sites, spec, **{cls._EXTRA: metadata[cls._EXTRA]})
