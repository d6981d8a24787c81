"""Hooks that erase the selected tokens of a site, and the handle that removes them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from splince_fast._kernels.row_kernels import PackedFactors
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.names import listed
from splince_fast._runtime.torch_rows import erased_in_memory
from splince_fast._solve.options import is_number
from splince_fast.exceptions import InputError, NeverCalledError, NothingErasedWarning
from splince_fast.nn import calls, sites
from splince_fast.nn.calls import CallSelections, TokenRule
from splince_fast.nn.eraser import Eraser, Erasers, check_projection, eraser_for, read_erasers
from splince_fast.nn.sites import CollectionSpec, Placement
from splince_fast.projection import Projection

_CPU = torch.device("cpu")


class SiteHook:
    """Hook that erases the selected tokens at one site, with a copy of the eraser per device."""

    def __init__(
        self, name: str, eraser: Eraser, selections: CallSelections, placement: Placement
    ) -> None:
        self.name, self.selections, self.placement = name, selections, placement
        self.width = eraser.n_features
        self.n_calls = 0  # without calls of compiled code
        self.ran_compiled = False
        self._copies = {_CPU: eraser}
        self._enabled = True  # whether the gate of all copies is 1
        self._packed: PackedFactors | None = None  # factors for the C kernel, made on first use

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; the copy erases, because no handle could enable it again."""
        self.__dict__.update(state)
        self.set_gate(1.0)

    @classmethod
    def of(cls, module: Module, side: str) -> list[SiteHook]:
        """Return the erasing hooks on a side of a module, in the order in which they run."""
        return [hook for hook in _hooks(module, side).values() if type(hook) is cls]

    def register(self, module: Module) -> RemovableHandle:
        """Add the hook to a module, after earlier erasers and nearer to it than other hooks."""
        if self.placement.side == "input":
            return module.register_forward_pre_hook(self, with_kwargs=True)
        handle = module.register_forward_hook(self)
        hooks = _hooks(module, "output")
        for key in [key for key, hook in hooks.items() if type(hook) is not SiteHook]:
            hooks.move_to_end(key)
        return handle

    def copy_on(self, device: torch.device) -> Eraser:
        """Return the copy of the eraser on a device; make it on first use."""
        eraser = self._copies.get(device)
        if eraser is None:
            eraser = copy.deepcopy(self._copies[_CPU]).to(device)
            if not torch.compiler.is_compiling():
                self._copies[device] = eraser
        return eraser

    def set_gate(self, value: float) -> float:
        """Set the gate of every copy to 0 or 1; return the previous value."""
        previous = float(self._copies[_CPU].gate)
        self._enabled = value == 1.0
        for eraser in self._copies.values():
            eraser.gate.fill_(value)
        return previous

    def __call__(self, module: Module, args: Any, kwargs_or_output: Any) -> Any:
        if self.placement.side == "output":
            return self._erase(kwargs_or_output)
        return sites.on_input(self.name, args, kwargs_or_output, self._erase)

    def _erase(self, value: object) -> Any:
        """Return an output or input of the module with the selected rows erased."""
        # Compiled code treats a counter as a constant: each call would compile again.
        if torch.compiler.is_compiling():
            self.ran_compiled = True
        else:
            self.n_calls += 1
        return sites.replace_rows(self.name, value, self.placement, self.width, self._erase_rows)

    def _erase_rows(self, rows: Tensor) -> Tensor:
        """Erase the selected rows of a tensor (..., d) by the C kernel if possible, or by torch."""
        is_eager = not torch.compiler.is_compiling()
        if is_eager and not self._enabled:
            return rows
        mask = self.selections.current(self.name).mask_for(self.name, rows)
        erased = None
        if is_eager:
            if self._packed is None:
                self._packed = self._pack()
            erased = erased_in_memory(self._packed, rows)
        if erased is None:
            erased = self.copy_on(rows.device).forward(rows)
        return erased if mask is None else torch.where(mask.unsqueeze(-1), erased, rows)

    def _pack(self) -> PackedFactors:
        eraser = self.copy_on(_CPU)
        left, right, neg_bias = (
            t.double().numpy() for t in (eraser.left, eraser.right, eraser.neg_bias)
        )
        return PackedFactors(left, right, np.zeros(self.width), -neg_bias)


def _hooks(module: Module, side: str) -> Any:
    return module._forward_pre_hooks if side == "input" else module._forward_hooks


class Installed:
    """Handle of installed erasers, and context manager, which may be entered again.

    Made by :func:`install`. The end of the context calls :meth:`check` and :meth:`remove`.

    Parameters
    ----------
    model : torch.nn.Module
        The model with the hooks.
    hooks : list of (Module, SiteHook)
        Modules with the hooks that erase there.
    strength : float
        Fraction of the erasure that is applied; a value below 1 steers and does not erase.

    Examples
    --------
    See :func:`install`.
    """

    def __init__(
        self, model: Module, hooks: list[tuple[Module, SiteHook]], strength: float = 1.0
    ) -> None:
        self._model, self._hooks, self.strength = model, hooks, strength
        self._handles: list[RemovableHandle] = []
        self._depth = 0
        self._attach()

    def __repr__(self) -> str:
        state = "installed" if self._handles else "removed"
        steering = "" if self.strength == 1 else f", steering at strength {self.strength:g}"
        return f"Installed({len(self._hooks)} sites, {state}{steering})"

    @property
    def counts(self) -> dict[str, int]:
        """Number of calls of each site, compiled calls excluded."""
        counts = dict.fromkeys((hook.name for _, hook in self._hooks), 0)
        for _, hook in self._hooks:
            counts[hook.name] += hook.n_calls
        return counts

    def _attach(self) -> None:
        if self._handles or not self._hooks:
            return
        self._handles = [hook.register(module) for module, hook in self._hooks]
        self._hooks[0][1].selections.attach(self._model, [hook.name for _, hook in self._hooks])
        discard_compiled_code()

    def remove(self) -> None:
        """Remove the erasers of this installation; a second call does nothing."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooks[0][1].selections.detach()
        discard_compiled_code()

    def check(self) -> None:
        """Raise NeverCalledError if a site did not run in a call, or other code removed a hook."""
        for module, hook in self._hooks:
            if self._handles and hook not in SiteHook.of(module, hook.placement.side):
                raise NeverCalledError(
                    f"other code removed the hook at {hook.name!r}, so nothing is erased there; "
                    "install the erasers again, after that code"
                )
        never_called = [h.name for _, h in self._hooks if not (h.n_calls or h.ran_compiled)]
        selections = self._hooks[0][1].selections if never_called else None
        if selections and (selections.n_calls or selections.ran_compiled):
            raise NeverCalledError(
                f"the model ran, but the sites {listed(never_called)} never did, so nothing was "
                "erased there: the calls take another path, other code reads their weights, or it "
                "removed the hooks; choose the modules that contain them"
            )

    @contextmanager
    def disabled(self) -> Iterator[Installed]:
        """Disable the erasers inside a ``with`` block, exactly and without recompilation.

        Yields
        ------
        Installed
            This handle.
        """
        gates = [hook.set_gate(0.0) for _, hook in self._hooks]
        try:
            yield self
        finally:
            for (_, hook), gate in zip(self._hooks, gates, strict=True):
                hook.set_gate(gate)

    def __enter__(self) -> Installed:
        self._attach()
        self._depth += 1
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            if error_type is None:
                self.check()
        finally:
            self.remove()


def discard_compiled_code() -> None:
    """Discard compiled code, which runs no hooks that it was compiled without."""
    # Torch counts no frames of ``fullgraph=True``. Without code the reset takes 0.02 milliseconds.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def install(
    model: Any,
    erasers: Any,
    *,
    at: Any = None,
    tokens: object = None,
    side: str = "output",
    feature_dim: int = -1,
    output: int | str | None = None,
    strength: float = 1.0,
) -> Installed:
    """Install erasers in a model.

    Parameters
    ----------
    model : torch.nn.Module
        The model; its parameters and `state_dict` do not change.
    erasers : Erasers, path, mapping of str to Projection, or Projection
        Erasers by site. The keys of a mapping are names or patterns of modules.
    at : str, Module, or a list of them, optional
        Sites of a single projection: names, patterns (see Notes) or modules.
    tokens : {"body", "all", "first", "last"} or function, optional
        Tokens that the erasers change, as for :func:`collect`. By default `apply_to` of
        :func:`fit_layers`, or else the tokens of the fit; for projections "body".
    side, feature_dim, output
        As for :func:`collect`; for projections only, because `Erasers` store these arguments.
    strength : float
        Fraction of the erasure, in (0, 1]; below 1 it only steers (:meth:`Projection.scaled`).

    Returns
    -------
    Installed
        A context manager, and a handle with ``remove()``.

    Raises
    ------
    SiteError
        A name matches no module, or a module is never called; the model is then unchanged. In a
        call of the model: an output holds no tensor of the width of the eraser.
    InputError
        An argument is invalid.

    Warns
    -----
    NothingErasedWarning
        An eraser has rank 0 and changes nothing.
    OtherTokensWarning
        `tokens` differ from the tokens that were erased at several sites in :func:`fit_layers`.

    Notes
    -----
    In patterns ``*``, ``?`` and ``[2-5]`` match within one part of a dotted name, ``**`` across
    dots. A second installation at a site is applied after the first.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model, z = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU()), torch.arange(80) % 2
    >>> batches = [{"input": torch.randn(80, 4) + z[:, None], "z": z}]
    >>> moments = snn.collect(model, batches, "0", labels="z")
    >>> with snn.install(model, moments.erasers(sf.leace, erase="z")) as installed:
    ...     after = snn.collect(model, batches, "0", labels="z")
    >>> after.trace("z")["0"] < 1e-5 < moments.trace("z")["0"], installed.counts
    (True, {'0': 1})
    """
    if not is_number(strength) or not 0 < strength <= 1:
        raise InputError(
            f"strength is {strength!r}; it must be a number above 0 and at most 1: 1 erases, and a "
            "fraction steers"
        )
    model = calls.unwrap(model)
    if isinstance(erasers, Projection):
        if at is None:
            raise InputError("a single Projection needs at=, the names of the sites to erase")
        pairs, spec = [(at, erasers)], CollectionSpec(tokens=None)
    else:
        erasers, spec = read_erasers(erasers)
        if at is not None:
            raise InputError("at= is for a single Projection; these erasers name their sites")
        pairs = list(erasers.items())
    placement = Placement(side, feature_dim, output)
    tokens = spec.applied if tokens is None else tokens
    if isinstance(erasers, Erasers):
        if placement != Placement():
            raise InputError(
                "side=, feature_dim= and output= are for projections; Erasers store the values of "
                f"their fit: {spec.placement}"
            )
        placement = spec.placement
        erasers._check_tokens(tokens)
    selections = CallSelections(TokenRule.of(tokens, spec.skip_ids))
    hooks: list[tuple[Module, SiteHook]] = []
    rank_zero = []
    for at_site, projection in pairs:
        for name, module in sites.find(model, at_site).items():
            check_projection(projection)
            with torch.inference_mode(False):  # inference tensors take no gradients
                eraser = eraser_for(
                    projection if strength == 1 else projection.scaled(strength), module, model
                )
            hook = SiteHook(name, eraser, selections, placement)
            for device in calls.devices_of(module) or calls.devices_of(model):
                hook.copy_on(device)  # compiled calls do not keep copies that they make
            hooks.append((module, hook))
            rank_zero += [] if eraser.rank else [name]
    if rank_zero:
        warn(
            f"the erasers at {listed(rank_zero)} have rank 0 and change nothing",
            NothingErasedWarning,
        )
    return Installed(model, hooks, float(strength))
