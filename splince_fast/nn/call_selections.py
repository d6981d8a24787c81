"""Token selection of each call of a model, computed from the arguments of the call.

A tensor (B, T, d) at a site does not show which rows are padding or, during decoding with a cache,
which positions the rows have. The arguments of the call show both: `attention_mask`, `input_ids`,
the cache and `position_ids`. The ancestors of a site are the modules that contain it. Hooks on the
model, and on ancestors that take `input_ids`, compute the selection once per call, for all sites.

Gradient checkpointing runs ancestors again in the backward pass, outside of a call of the model.
The selection is then looked up by the memory address of the input of the ancestor, which the
checkpoint keeps. The hooks for this lookup are added in the first call that records gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from splince_fast.exceptions import SiteError
from splince_fast.nn.sites import (
    in_backward,
    is_row_tensor,
    named_modules,
    prefixes,
    without_infixes,
)
from splince_fast.nn.tokens import ALL_ROWS, Selection, TokenRule, parameters_of, select


class _ThreadState(threading.local):
    """The running calls of one thread."""

    def __init__(self) -> None:
        # Running modules with their selections; None if a backward pass runs a module of an unknown
        # call.
        self.stack: list[tuple[Module, Selection | None]] = []
        self.store_inputs = False


_lock = threading.Lock()  # guards the hooks of ancestors and the stored inputs


class CallSelections:
    """Token selections of the running calls, per thread.

    Attributes
    ----------
    token_rule : TokenRule
    n_calls : int
        Number of calls of the model, compiled calls excluded.
    ran_compiled : bool
        Whether the model ran in compiled code.
    """

    def __init__(self, token_rule: TokenRule) -> None:
        self.token_rule = token_rule
        self.n_calls = 0
        self.ran_compiled = False
        # Compiled code reads this linked list of selections, innermost call first.
        self._compiled_stack: tuple[Selection, Any] | None = None
        self._checkpointed = False  # whether a call that records gradients needed a mask
        self._thread = _ThreadState()
        self._by_input: dict[int, tuple[StorageWeakRef, Selection]] = {}  # by memory address
        self._handles: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        names = "token_rule", "n_calls", "ran_compiled"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["token_rule"])  # type: ignore[misc]
        self.__dict__.update(state)

    # -- for sites -------------------------------------------------------------------------

    def current(self, name: str) -> Selection:
        """Return the selection of the running call; errors name the site `name`.

        Outside of a call all rows are selected; raises SiteError if the rule needs a call.
        """
        selection = self._current()
        if selection is not None:
            return selection
        if self.token_rule.rule in (None, "all") and not (self._checkpointed and in_backward()):
            return ALL_ROWS
        if in_backward():
            raise SiteError(
                f"the site {name!r} runs again in a backward pass, and its call is not known; "
                "checkpoint whole modules (not functions that call parts of them), or pass "
                "tokens='all'"
            )
        raise SiteError(
            f"the site {name!r} runs outside of a call that shows its tokens; call the model "
            "with input_ids or attention_mask, or pass tokens='all'"
        )

    def _current(self) -> Selection | None:
        if torch.compiler.is_compiling():
            return None if self._compiled_stack is None else self._compiled_stack[0]
        stack = self._thread.stack
        return stack[-1][1] if stack else None

    # -- hooks -----------------------------------------------------------------------------

    def attach(self, model: Module, names: Iterable[str]) -> None:
        """Add the hooks to a model for the sites `names`."""
        ancestors = sorted({"", *(ancestor for name in names for ancestor in prefixes(name))})
        # The model, the model inside a wrapper, and nested modules that take tokens.
        entries = [
            (name, module)
            for raw_name, module in model.named_modules(remove_duplicate=False)
            if (name := without_infixes(raw_name)) in ancestors
            and (module is model or "input_ids" in parameters_of(module).names)
        ]
        inner = [part for part in ancestors if part not in dict(entries)]
        for name, module in entries:
            prefix = f"{name}." if name else ""
            parts = tuple(part.removeprefix(prefix) for part in inner if part.startswith(prefix))
            enter = EnterCall(self, parameters_of(module).names, parts, is_root=module is model)
            self._hook(module, enter, self.leave_call)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, module: Module, enter: Any, leave: Any) -> None:
        self._handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def attach_parts(self, module: Module, parts: Iterable[str]) -> None:
        """Add hooks to the submodules `parts` of a module, which contain sites, once each."""
        modules = named_modules(module)
        with _lock:
            for part in filter(None, map(modules.get, parts)):
                if self.enter_part not in part._forward_pre_hooks.values():
                    self._hook(part, self.enter_part, self.leave)

    def enter_call(self, module: Module, arguments: Mapping[str, object], hook: EnterCall) -> None:
        """Select the tokens of a call, and make it the running call."""
        has_tokens = any(arguments.get(key) is not None for key in ("input_ids", "inputs_embeds"))
        # A call of the root has no outer call, although the stack may still hold an interrupted
        # call (KeyboardInterrupt).
        outer = None if hook.is_root else self._current()
        if outer is not None and not has_tokens:
            selection = outer
        else:
            selection = select(self.token_rule, arguments, hook.parameters)
        self._compiled_stack = (selection, None if hook.is_root else self._compiled_stack)
        if torch.compiler.is_compiling():
            return
        self._thread.stack.append((module, selection))
        if hook.is_root:
            self._thread.store_inputs = False
        if torch.is_grad_enabled() and (selection.mask is not None or selection.error):
            # Inputs are stored during the whole call, also while gradients are disabled:
            # reentrant checkpoints run a module without gradients.
            self._checkpointed = self._thread.store_inputs = True
            with _lock:
                self._by_input = {k: v for k, v in self._by_input.items() if not v[0].expired()}
            if hook.parts:
                self.attach_parts(module, hook.parts)
                hook.parts = ()

    def enter_part(self, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Store the selection by the address of the input; a backward pass looks it up."""
        if torch.compiler.is_compiling():
            return
        selection = self._current()
        tensor = next((v for v in (*args, *kwargs.values()) if is_row_tensor(v)), None)
        if tensor is not None and self._checkpointed and in_backward():
            stored = self._by_input.get(tensor.data_ptr())
            if stored is not None and not stored[0].expired():
                selection = stored[1]
        elif tensor is not None and self._thread.store_inputs and selection is not None:
            reference = StorageWeakRef(tensor.untyped_storage())
            with _lock:
                self._by_input[tensor.data_ptr()] = (reference, selection)
        self._thread.stack.append((module, selection))

    # The following hooks run after errors, too.

    def leave_call(self, module: Module, args: object, output: object) -> None:
        """Remove a call of the model, or of a module that takes tokens, from the running calls."""
        if self._compiled_stack is not None:
            self._compiled_stack = self._compiled_stack[1]
        self.leave(module, args, output)

    def leave(self, module: Module, args: object, output: object) -> None:
        """Remove a module from the running calls, unless its hooks were added during its call."""
        if not torch.compiler.is_compiling():
            stack = self._thread.stack
            if stack and stack[-1][0] is module:
                stack.pop()


class EnterCall:
    """Pre-hook of the model, and of ancestors of a site that take tokens.

    `parameters` are the parameter names of the forward method of the module; `parts` are the names,
    relative to the module, of ancestors of sites inside the module.
    """

    def __init__(
        self,
        selections: CallSelections,
        parameters: tuple[str, ...],
        parts: tuple[str, ...],
        *,
        is_root: bool,
    ) -> None:
        self.selections, self.parameters, self.parts = selections, parameters, parts
        self.is_root = is_root

    def __call__(self, module: Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        compiling = torch.compiler.is_compiling()
        if self.is_root:
            if compiling:  # torch.compile guards on counters: each call would compile again
                self.selections.ran_compiled = True
            else:
                self.selections.n_calls += 1
        if compiling or not in_backward():
            arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
            self.selections.enter_call(module, arguments, self)
        else:
            self.selections.enter_part(module, args, kwargs)
