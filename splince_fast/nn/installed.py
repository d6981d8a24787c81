"""Erasers inside a live model: one hook per site, and a handle that takes them out again."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from splince_fast.exceptions import (
    InputError,
    NeverCalledError,
    NothingErasedWarning,
    SiteError,
)
from splince_fast.nn import sites
from splince_fast.nn.eraser import Eraser, check_projection
from splince_fast.nn.erasers import Erasers
from splince_fast.nn.hooks import Entry, InputHook, OutputHook
from splince_fast.nn.positions import Positions
from splince_fast.nn.recipe import Placement
from splince_fast.nn.tokens import Tokens
from splince_fast.projection import Projection

Tensor = Any
Module = Any


# How many frames had been compiled when compiled code was last forgotten.
_frames_forgotten: dict[str, int] = {}


class Installed:
    """Erasers in a model: a handle, and a context manager that takes them out at its end.

    Made by :func:`install`. Leaving the context raises :class:`NeverCalledError` as
    :meth:`check` does. It may be entered again.

    Parameters
    ----------
    model : torch.nn.Module
        Where the hooks are.
    sited : list of (Module, Entry)
        Every site with its eraser.
    strength : float
        Fraction of the change that is made; below 1 this steers and does not erase.

    Examples
    --------
    >>> import torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    >>> first = sf.Projection([[1.0], [0.0]], [[1.0], [0.0]], [5.0, 0.0])  # the first feature is 5
    >>> installed = snn.install(model, first, at="0")
    >>> x = torch.randn(4, 3)
    >>> model(x)[:, 0]
    tensor([5., 5., 5., 5.], grad_fn=<SelectBackward0>)
    >>> with installed.disabled():
    ...     bool((model(x)[:, 0] == 5).any())
    False
    >>> installed.counts
    {'0': 2}
    >>> installed.remove()
    """

    def __init__(
        self, model: Module, sited: list[tuple[Module, Entry]], strength: float = 1.0
    ) -> None:
        self._model, self._sited, self._strength = model, sited, strength
        self._handles: list[Any] = []
        self._attached = False
        self._depth = 0
        self._attach()

    def __repr__(self) -> str:
        state = "installed" if self._attached else "removed"
        steering = "" if self._strength == 1 else f", steering at strength {self._strength:g}"
        return f"Installed({len(self._sited)} sites, {state}{steering})"

    @property
    def strength(self) -> float:
        """Fraction of the change that is made; below 1 a linear probe still reads the concept."""
        return self._strength

    @property
    def counts(self) -> dict[str, int]:
        """Calls of each site so far, those of compiled code not counted."""
        found: dict[str, int] = {}
        for _, entry in self._sited:
            found[entry.name] = found.get(entry.name, 0) + entry.count
        return found

    def _attach(self) -> None:
        if self._attached:
            return
        try:
            for module, entry in self._sited:
                kind = InputHook if entry.place.side == "input" else OutputHook
                hook = next((h for h in kind.table(module).values() if type(h) is kind), None)
                if hook is None:
                    hook = kind()
                    hook.register(module)
                hook.entries.append(entry)
            if self._sited:
                positions = self._sited[0][1].positions
                self._handles = positions.attach(self._model, [e.name for _, e in self._sited])
        except BaseException:
            self._detach()
            raise
        self._attached = True
        _forget_compiled_code()

    def _detach(self) -> None:
        for module, entry in self._sited:
            for kind in (InputHook, OutputHook):
                for hook in [h for h in kind.table(module).values() if type(h) is kind]:
                    hook.entries = [e for e in hook.entries if e is not entry]
                    if not hook.entries and hook.handle is not None:
                        hook.handle.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._attached:
            self._attached = False
            _forget_compiled_code()

    def remove(self) -> None:
        """Take the erasers out; only what was set here is taken. Twice does no harm."""
        self._detach()

    def check(self) -> None:
        """Raise NeverCalledError if the model ran and a site did not, or a hook is gone."""
        if not self._sited:
            return
        for module, entry in self._sited:
            kind = InputHook if entry.place.side == "input" else OutputHook
            there = any(type(h) is kind and entry in h.entries for h in kind.table(module).values())
            if self._attached and not there:
                raise NeverCalledError(
                    f"the hook at {entry.name!r} was removed by others, so nothing is erased "
                    "there; install the erasers again, after what removes hooks"
                )
        positions = self._sited[0][1].positions
        silent = [e.name for _, e in self._sited if not (e.count or e.ran_compiled)]
        if silent and (positions.ran or positions.ran_compiled):
            raise NeverCalledError(
                f"the model ran {positions.ran} times and the sites {silent} never did, so "
                "nothing was erased there: their weights are read without calling them, or "
                "another path through the model was taken; choose the module around them"
            )

    @contextmanager
    def disabled(self) -> Iterator[Installed]:
        """Let every site return what it would without erasers, exactly; nothing is recompiled.

        Yields
        ------
        Installed
            The object itself.
        """
        before = [entry.set_gate(0.0) for _, entry in self._sited]
        try:
            yield self
        finally:
            for (_, entry), gate in zip(self._sited, before, strict=True):
                entry.set_gate(gate)

    def __enter__(self) -> Installed:
        self._attach()
        self._depth += 1
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            if kind is None:
                self.check()
        finally:
            self._detach()


def _forget_compiled_code() -> None:
    """Compiled code does not look for new hooks: let it be compiled again at the next call."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    frames = dynamo.utils.counters["frames"]["total"]
    if frames != _frames_forgotten.get("total", 0):  # something was compiled since
        torch.compiler.reset()
        _frames_forgotten["total"] = frames


def install(
    model: Any,
    erasers: Any,
    *,
    at: Any = None,
    tokens: Any = None,
    side: str = "output",
    feature_dim: int = -1,
    output: int | str | None = None,
    strength: float = 1.0,
) -> Installed:
    """Erase inside a model from now on, at the sites of `erasers`.

    Parameters
    ----------
    model : torch.nn.Module
        Any; also compiled, quantised or spread over devices. Its parameters and its `state_dict`
        are left alone.
    erasers : Erasers, path, mapping of str to Projection, or Projection
        Erasers by site. A mapping goes from names or patterns of modules to projections.
    at : str, Module, or a list of them, optional
        Where, for a single projection: names or patterns (see Notes) or modules.
    tokens : {"body", "all", "first", "last"} or function, optional
        Which tokens are changed; by default those that the erasers are for (`apply_to` of
        :func:`fit_layers`, or else those of the fit), and "body" for projections where the call
        has tokens, otherwise "all". "body" is every attended token except the first of each
        sequence and the ids that were skipped in the fit. A function takes the arguments of the
        model's call by name and returns a bool tensor (B, T).
    side, feature_dim, output
        Which tensor of a module is meant, for projections; as for :func:`collect`. `Erasers`
        know it themselves.
    strength : float
        Fraction of the change that is made, above 0 and at most 1. Below 1 this is steering, not
        erasing: class means move by that fraction, and a linear probe that is fitted afterwards
        reads the concept as well as before (:meth:`splince_fast.Projection.scaled`). At several
        sites later erasers then see states that the fit did not see.

    Returns
    -------
    Installed
        A context manager and a handle: ``with install(model, erasers): ...``, or
        ``installed = install(model, erasers)`` and later ``installed.remove()``.

    Raises
    ------
    SiteError
        A name that no module has, a module that is never called, or another width. The model is
        left as it was. While the model runs: an output without a fitting tensor.
    InputError
        An argument that is none of the above.

    Warns
    -----
    NothingErasedWarning
        An eraser of rank 0, which does nothing.
    OtherTokensWarning
        `tokens` are others than those that :func:`fit_layers` changed at several sites.

    Notes
    -----
    In patterns ``*``, ``?`` and ``[2-5]`` stay within one part of a dotted name and ``**`` goes
    across dots. A second install at a site acts behind the first. If anything was compiled in
    this process, installing and removing make it compile again, because compiled code does not
    notice hooks. ``output_hidden_states`` may show states from before the erasers; look at erased
    states with :func:`collect`.

    Examples
    --------
    >>> import numpy as np, torch
    >>> import splince_fast as sf
    >>> from splince_fast import nn as snn
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
    >>> z = np.arange(200) % 2
    >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> x[:, 0] += torch.from_numpy(z)
    >>> moments = snn.collect(model, [{"input": x, "z": z}], "0", labels="z")
    >>> with snn.install(model, moments.erasers(sf.leace, erase="z")):
    ...     after = snn.collect(model, [{"input": x, "z": z}], "0", labels="z")
    >>> bool(np.abs(after["0"].cross_covariance("z")).max() < 1e-6)
    True
    """
    number = isinstance(strength, int | float) and not isinstance(strength, bool)
    if not number or not 0 < strength <= 1:
        raise InputError(
            f"strength is {strength!r}; it must be a number above 0 and at most 1: 1 erases, and a "
            "fraction steers"
        )
    model = getattr(model, "_orig_mod", model)
    if isinstance(erasers, str | os.PathLike):
        erasers = Erasers.load(erasers)
    if isinstance(erasers, Projection):
        if at is None:
            raise InputError("a single Projection needs at=, the names of the sites it is for")
        wanted = [at] if isinstance(at, str | torch.nn.Module) else list(at)
        pairs: list[tuple[Any, Projection]] = [(one, erasers) for one in wanted]
    elif isinstance(erasers, Mapping):
        if at is not None:
            raise InputError("at= is for a single Projection; these erasers name their sites")
        pairs = list(erasers.items())
    else:
        if hasattr(erasers, "label_kinds"):
            check_projection(erasers)
        raise InputError(
            f"erasers is {type(erasers).__name__}; pass Erasers, the path of their file, a "
            "mapping of names to projections, or a projection with at="
        )
    if isinstance(erasers, Erasers):
        place, applied, skip_ids = erasers.placement, erasers.apply_to, erasers.skip_ids
        tokens = applied if tokens is None else tokens
        erasers._check_tokens(tokens)
        if tokens == "mean":
            raise InputError(
                "these erasers were fitted on the mean over tokens, which is no token; say by "
                "tokens= which ones they are for ('all' is the usual choice)"
            )
    else:
        place, skip_ids = Placement.of(side, feature_dim, output), ()
    spec = Tokens.of(tokens, skip_ids)
    positions = Positions(spec)
    sited: list[tuple[Module, Entry]] = []
    idle = []
    for wanted_site, projection in pairs:
        for name, module in sites.find(model, wanted_site).items():
            check_projection(projection)
            eraser = Eraser(projection if strength == 1 else projection.scaled(strength))
            _check_weights(name, module, eraser.n_features, place.heads or 1)
            entry = Entry(name, eraser, positions, place)
            entry.prepare(sites.devices_of(module) or sites.devices_of(model))
            sited.append((module, entry))
            idle += [] if eraser.rank else [name]
    if idle:
        warnings.warn(
            f"the erasers at {idle} have rank 0 and change nothing",
            NothingErasedWarning,
            stacklevel=2,
        )
    return Installed(model, sited, float(strength))


def _check_weights(name: str, module: Module, width: int, heads: int) -> None:
    """Raise SiteError if the weights of a module show that it has another width."""
    shapes = [tuple(p.shape) for p in module.parameters() if p.is_floating_point()]
    plain = shapes and all(
        type(p).__name__ == "Parameter" and p.numel() for p in module.parameters()
    )
    fits = {width, width // heads}
    if shapes and plain and not any(fits & set(shape) for shape in shapes):
        raise SiteError(
            f"the eraser for {name!r} has width {width}, and no weight of this "
            f"{type(module).__name__} does (shapes {sorted(set(shapes))[:4]}): it was fitted for "
            "another model"
        )
