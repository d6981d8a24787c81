"""Which tokens are meant: read from the call of the model, not from the shape at a site.

A site sees a tensor (B, T, d) and cannot know which rows are padding, or, in decoding with a
cache, which position they have. The call of the model knows: `attention_mask`, `input_ids`,
`past_key_values` and `position_ids`. Hooks on the model, and on the modules around a site that
take `input_ids` themselves, compute the selection of a call once, for all sites.

Gradient checkpointing runs a part of the model again in the backward pass, without that call.
What was selected is then found by the memory of the part's input, which the checkpoint keeps. The
parts around sites get hooks for that in the first call that records gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from splince_fast.exceptions import SiteError
from splince_fast.nn.sites import in_backward, is_row_tensor, named
from splince_fast.nn.tokens import EVERYTHING, Selection, Tokens, parameters_of, select

Tensor = Any
Module = Any


class _Calls(threading.local):
    """The calls of one thread that are under way."""

    def __init__(self) -> None:
        # Each with the module that began it; None in a backward pass where the call is not known.
        self.stack: list[tuple[Module, Selection | None]] = []
        self.recording = False  # whether inputs of parts are remembered


_attaching = threading.Lock()  # of the hooks that a first call with gradients sets


class Positions:
    """The selection of each call that is under way, per thread.

    Attributes
    ----------
    spec : Tokens
        What is selected in each call.
    ran : int
        Calls of the model so far; in compiled code only `ran_compiled` is set.
    """

    def __init__(self, spec: Tokens) -> None:
        self.spec = spec
        self.ran = 0
        self.ran_compiled = False
        # What compiled code reads: the selection of a call and those of the calls around it.
        self._plain: tuple[Selection, Any] | None = None
        self._masked = False  # whether a call that records gradients selected by a mask
        self._local = _Calls()
        self._inputs: dict[int, tuple[StorageWeakRef, Selection]] = {}
        self._handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "ran": self.ran, "ran_compiled": self.ran_compiled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["spec"])  # type: ignore[misc]
        self.ran, self.ran_compiled = state["ran"], state["ran_compiled"]

    # -- what sites ask --------------------------------------------------------------------

    def selection(self, name: str) -> Selection:
        """What is selected in the call that is under way.

        Raises
        ------
        SiteError
            There is no such call, and the rule needs one.
        """
        current = self._current()
        if current is not None:
            return current
        if self.spec.rule in (None, "all") and not (self._masked and in_backward()):
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

    def _current(self) -> Selection | None:
        if torch.compiler.is_compiling():
            return None if self._plain is None else self._plain[0]
        return self.eager()

    def eager(self) -> Selection | None:
        """What is selected in the call that is under way in eager code, if there is one."""
        stack = self._local.stack
        return stack[-1][1] if stack else None

    # -- hooks -----------------------------------------------------------------------------

    def attach(self, model: Module, names: list[str]) -> list[Any]:
        """Set the hooks for sites of these names; returns the list of their handles.

        It grows by those of parts in the first call that records gradients.
        """
        modules = named(model)
        around = sorted(
            {".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 2)}
        )
        self._handles = []
        calls = {"": model}  # the model's own call, and those inside it that have tokens
        for name in around:
            module = modules.get(name)
            if module is not None and "input_ids" in parameters_of(module)[0]:
                calls[name] = module
        for name, module in calls.items():
            prefix = f"{name}." if name else ""
            parts = tuple(
                part.removeprefix(prefix)
                for part in around
                if part.startswith(prefix) and part not in calls
            )
            self._hook(module, Enter(self, parameters_of(module)[0], parts, is_root=not name))
        return self._handles

    def _hook(self, module: Module, enter: EnterPart) -> None:
        leave = Leave(self, is_call=isinstance(enter, Enter))
        self._handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _attach_parts(self, module: Module, hook: Enter) -> None:
        """Set the hooks of parts of a module, each once."""
        if not hook.parts:
            return
        modules = named(module)
        with _attaching:
            for part in filter(None, map(modules.get, hook.parts)):
                there = part._forward_pre_hooks.values()
                if not any(type(h) is EnterPart and h.positions is self for h in there):
                    self._hook(part, EnterPart(self))
            hook.parts = ()

    def enter(self, module: Module, bound: Mapping[str, Any], hook: Enter) -> None:
        """A call begins, with these arguments by name."""
        outer = self._current()
        own = any(bound.get(key) is not None for key in ("input_ids", "inputs_embeds"))
        found = outer if outer is not None and not own else select(self.spec, bound)
        self._plain = (found, None if hook.is_root else self._plain)
        if torch.compiler.is_compiling():
            return
        self._local.stack.append((module, found))
        if hook.is_root:
            self._local.recording = False
        if torch.is_grad_enabled() and (found.mask is not None or found.lacks):
            # Of the whole call: reentrant checkpoints run their part without gradients.
            self._masked = self._local.recording = True
            self._inputs = {k: v for k, v in self._inputs.items() if not v[0].expired()}
            self._attach_parts(module, hook)

    def enter_part(self, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module around a site begins: remember its input, or find the call by it."""
        current = self._current()
        if self._masked and in_backward() if current is None else self._local.recording:
            tensor = next((v for v in (*args, *kwargs.values()) if is_row_tensor(v)), None)
            if current is None:
                known = None if tensor is None else self._inputs.get(_key(tensor))
                current = None if known is None or known[0].expired() else known[1]
            elif tensor is not None:
                self._inputs[_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), current)
        self._local.stack.append((module, current))

    def leave(self, module: Module, *, is_call: bool) -> None:
        """What this module began is over; it began nothing if it got its hooks while it ran."""
        if is_call and self._plain is not None:
            self._plain = self._plain[1]
        if not torch.compiler.is_compiling():
            stack = self._local.stack
            if stack and stack[-1][0] is module:
                stack.pop()


class EnterPart:
    """Pre-hook of a module around a site."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.positions.enter_part(module, args, kwargs)


class Enter(EnterPart):
    """The same where a call begins: at the model, and at modules in it that take tokens."""

    def __init__(
        self,
        positions: Positions,
        parameters: tuple[str, ...],
        parts: tuple[str, ...],
        *,
        is_root: bool,
    ) -> None:
        super().__init__(positions)
        self.parameters, self.parts, self.is_root = parameters, parts, is_root

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compiling = torch.compiler.is_compiling()
        if self.is_root:
            if compiling:  # a counter would be a guard, and every call another compilation
                self.positions.ran_compiled = True
            else:
                self.positions.ran += 1
        if compiling or not in_backward():
            bound = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
            self.positions.enter(module, bound, self)
        else:
            self.positions.enter_part(module, args, kwargs)


class Leave:
    """Hook of a module around a site; runs after errors, too."""

    def __init__(self, positions: Positions, *, is_call: bool) -> None:
        self.positions, self.is_call = positions, is_call

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        self.positions.leave(module, is_call=self.is_call)


def _key(tensor: Tensor) -> int:
    return int(tensor.data_ptr())
