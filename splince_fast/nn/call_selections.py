"""Token selection of each call of a model, computed from the arguments of the call.

The activations (B, T, d) at a site do not show which tokens are padding. During decoding with a
cache, the activations do not show the positions of the tokens either. The arguments of the call
show both: `attention_mask`, `input_ids`, the cache and `position_ids`. The ancestors of a site are
the modules that contain the site. Hooks on the model, and on ancestors that take `input_ids`,
compute the selection once per call, for all sites. A module of embeddings, which takes `input_ids`
but no attention mask, has the selection of the call around it.

Gradient checkpointing runs ancestors of a site again in the backward pass, outside of a call of the
model. Hooks on these ancestors then look up the selection by the memory address of their
input, because checkpointing keeps this tensor. If several calls with different selections have the
same input, the lookup is an error. The hooks for the lookup are added in the first call that
records gradients and needs a mask.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from splince_fast.exceptions import SiteError
from splince_fast.nn.sites import (
    clean_names,
    in_backward,
    is_row_tensor,
    named_modules,
    prefixes,
)
from splince_fast.nn.tokens import ALL_ROWS, Selection, TokenRule, parameters_of, select


class _ThreadState(threading.local):
    """Modules that are running in one thread."""

    def __init__(self) -> None:
        # Running modules with their selections, innermost module last. A selection is None if the
        # call to which the module belongs is unknown.
        self.stack: list[tuple[Module, Selection | None]] = []
        self.store_inputs = False


@dataclass
class _StoredInput:
    """Input of an ancestor: its storage, and the selection of the call with this input."""

    storage: StorageWeakRef
    selection: Selection
    looked_up: bool = False  # whether a backward pass ran the ancestor again


_AMBIGUOUS = Selection(
    None,
    "",
    error=(
        "runs again in a backward pass, and several calls that select other tokens had the same "
        "input tensor; pass a copy of the tensor to each call (x.clone()), or run the backward "
        "pass of each call before the next call"
    ),
)
_lock = threading.Lock()  # guards the hooks of ancestors and the stored inputs


class CallSelections:
    """Token selections of the running calls of a model, separate for each thread.

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
        # Selections of the running calls for compiled code: a linked list, innermost call first.
        self._compiled_stack: tuple[Selection, Any] | None = None
        self._needs_lookup = False  # whether any call recorded gradients and needed a mask
        self._thread = _ThreadState()
        # By module and address of its input.
        self._by_input: dict[tuple[Module, int], _StoredInput] = {}
        self._handles: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        names = "token_rule", "n_calls", "ran_compiled"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["token_rule"])  # type: ignore[misc]
        self.__dict__.update(state)

    # -- for sites -------------------------------------------------------------------------

    def current(self, name: str) -> Selection:
        """Return the selection of the running call; error messages name the site `name`.

        Outside of a call, returns the selection of all rows, or raises SiteError if the token rule
        needs the arguments of a call.
        """
        selection = self._running_selection()
        if selection is not None:
            return selection
        if self.token_rule.rule in (None, "all") and not (self._needs_lookup and in_backward()):
            return ALL_ROWS
        if in_backward():
            raise SiteError(
                f"the site {name!r} runs again in a backward pass, and the call of the model to "
                "which this run belongs is unknown. The likely cause is the checkpoint of a "
                "function that calls parts of a module: checkpoint complete modules, or pass "
                "tokens='all'"
            )
        raise SiteError(
            f"the site {name!r} runs outside of a call of the model, so its tokens are unknown; "
            "call the model with input_ids or attention_mask, or pass tokens='all'"
        )

    def _running_selection(self) -> Selection | None:
        if torch.compiler.is_compiling():
            return None if self._compiled_stack is None else self._compiled_stack[0]
        stack = self._thread.stack
        return stack[-1][1] if stack else None

    # -- hooks -----------------------------------------------------------------------------

    def attach(self, model: Module, names: Iterable[str]) -> None:
        """Add hooks to a model and to ancestors of the sites `names`."""
        ancestors = sorted({"", *(ancestor for name in names for ancestor in prefixes(name))})
        # The modules whose calls compute a selection: the model, and each ancestor of a site that
        # takes tokens, such as the language model inside a wrapper.
        token_modules = [
            (name, module)
            for name, module in clean_names(model)
            if name in ancestors and (module is model or "input_ids" in parameters_of(module).names)
        ]
        others = [ancestor for ancestor in ancestors if ancestor not in dict(token_modules)]
        for name, module in token_modules:
            prefix = f"{name}." if name else ""
            inner = tuple(
                other.removeprefix(prefix) for other in others if other.startswith(prefix)
            )
            enter = EnterCall(self, parameters_of(module).names, inner, is_root=module is model)
            self._add_hooks(module, enter, self.leave_call)

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _add_hooks(self, module: Module, enter: Any, leave: Any) -> None:
        self._handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def attach_ancestors(self, module: Module, names: Iterable[str]) -> None:
        """Add hooks to the submodules `names` of a module, unless they already have the hooks.

        `names`, relative to the module, are those of ancestors of sites.
        """
        modules = named_modules(module)
        with _lock:
            for ancestor in map(modules.get, names):
                if ancestor is not None and (
                    self.enter_ancestor not in ancestor._forward_pre_hooks.values()
                ):
                    self._add_hooks(ancestor, self.enter_ancestor, self.leave)

    def enter_call(self, module: Module, arguments: Mapping[str, object], hook: EnterCall) -> None:
        """Select the tokens of a call, and make it the running call."""
        # A call of the model has no outer call: an entry on the stack is then the remainder of a
        # call that a KeyboardInterrupt ended.
        selection = None if hook.is_root else self._running_selection()
        if selection is None or not selection.holds_in(arguments, hook.parameters):
            selection = select(self.token_rule, arguments, hook.parameters)
        self._compiled_stack = (selection, None if hook.is_root else self._compiled_stack)
        if torch.compiler.is_compiling():
            return
        self._thread.stack.append((module, selection))
        if hook.is_root:
            self._thread.store_inputs = False
        if torch.is_grad_enabled() and (selection.mask is not None or selection.error):
            # Inputs are stored until the call ends, even while gradients are disabled, because
            # reentrant checkpoints disable gradients when they first run a module.
            self._needs_lookup = self._thread.store_inputs = True
            with _lock:
                self._by_input = {
                    k: v for k, v in self._by_input.items() if not v.storage.expired()
                }
            if hook.inner_ancestors:
                self.attach_ancestors(module, hook.inner_ancestors)
                hook.inner_ancestors = ()

    def enter_ancestor(
        self, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Store the selection of the running call by the memory address of a module's input.

        In a backward pass, look up the stored selection. In both cases the module becomes the
        innermost running module.
        """
        if torch.compiler.is_compiling():
            return
        selection = self._running_selection()
        tensor = next((v for v in (*args, *kwargs.values()) if is_row_tensor(v)), None)
        if tensor is not None and self._needs_lookup and in_backward():
            stored = self._by_input.get((module, tensor.data_ptr()))
            if stored is not None and not stored.storage.expired():
                selection, stored.looked_up = stored.selection, True
        elif tensor is not None and self._thread.store_inputs and selection is not None:
            self._store(module, tensor, selection)
        self._thread.stack.append((module, selection))

    def _store(self, module: Module, tensor: Tensor, selection: Selection) -> None:
        """Store the selection of the running call by a module and the address of its input.

        If an earlier call, whose backward pass has not run, had the same input and another
        selection, the stored selection is an error.
        """
        key, storage = (module, tensor.data_ptr()), StorageWeakRef(tensor.untyped_storage())
        with _lock:
            stored = self._by_input.get(key)
            is_pending = stored and not stored.looked_up and not stored.storage.expired()
            if stored and is_pending and not stored.selection.selects_same(selection):
                selection = _AMBIGUOUS
            self._by_input[key] = _StoredInput(storage, selection)

    # `leave_call` and `leave` also run if the module raises an error (always_call=True).

    def leave_call(self, module: Module, args: object, output: object) -> None:
        """End a call of the model, or of an ancestor that takes tokens."""
        if self._compiled_stack is not None:
            self._compiled_stack = self._compiled_stack[1]
        self.leave(module, args, output)

    def leave(self, module: Module, args: object, output: object) -> None:
        """Remove a module from the running modules if it is the innermost one.

        A running module is not recorded if its hooks were added during its call.
        """
        if not torch.compiler.is_compiling():
            stack = self._thread.stack
            if stack and stack[-1][0] is module:
                stack.pop()


class EnterCall:
    """Pre-hook of the model, and of each ancestor of a site that takes tokens.

    `parameters` are the parameter names of the module's forward method. `inner_ancestors`
    are the names, relative to the module, of the other ancestors of sites inside the module.
    """

    def __init__(
        self,
        selections: CallSelections,
        parameters: tuple[str, ...],
        inner_ancestors: tuple[str, ...],
        *,
        is_root: bool,
    ) -> None:
        self.selections, self.parameters = selections, parameters
        self.inner_ancestors, self.is_root = inner_ancestors, is_root

    def __call__(self, module: Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        compiling = torch.compiler.is_compiling()
        if self.is_root:
            # Compiled code treats a counter as a constant: each call would compile again.
            if compiling:
                self.selections.ran_compiled = True
            else:
                self.selections.n_calls += 1
        if compiling or not in_backward():
            arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
            self.selections.enter_call(module, arguments, self)
        else:
            self.selections.enter_ancestor(module, args, kwargs)
