"""Activations kept between passes: a pass begins where the output of a module is cached.

`fit_layers` runs the same batches once per site, and all that precedes a fitted site is the same
in later passes. A cache point is a module that has run before a site is reached, with the siblings
that ran before it. For each batch the output of the module's forward, without hooks, is cached. In
the next pass its forward returns that output, its siblings return NaN of the recorded shapes, and
hooks and the surrounding modules run as usual. Two safeguards replace knowledge of the model's
code. A cache point is used only if the next site has the same bits on the first batch with it and
without it; and any reader of a skipped module on another batch gets NaN, which accumulation
refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from splince_fast.nn import sites
from splince_fast.nn.memory import free_memory
from splince_fast.nn.recipe import Placement

Tensor = Any
Module = Any
Call = Callable[[], Any]
Trial = tuple["CachePoint", "ActivationCache"]

# Share of the free memory of a device that kept outputs may take.
_SHARE = 0.25
# Integers that hold the bits of a number of so many bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Reached(Exception):
    """Ends a forward pass at a site."""


@dataclass(frozen=True)
class CachePoint:
    """A module whose output is cached, and the siblings that are skipped in its place."""

    module: Module
    before: tuple[Module, ...]


@dataclass
class _Run:
    """When a module began and ended in a trace, how often it ran, and whether it can be skipped."""

    start: int
    stop: float = math.inf
    calls: int = 0
    simple: bool = True


@dataclass
class Trace:
    """What ran on one batch.

    Attributes
    ----------
    order : list of str
        Sites in the order in which they first ran.
    calls : dict of str to int
        How often each of them ran.
    """

    order: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)
    _sums: dict[str, tuple[Tensor, Tensor] | None] = field(default_factory=dict)
    _runs: dict[int, _Run] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Module, call: Call, chosen: Mapping[str, Module], placement: Placement
    ) -> Trace:
        """Run a model once, with hooks on all modules that are gone afterwards."""
        trace, ticks = cls(calls=dict.fromkeys(chosen, 0)), 0

        def begins(module: Module, args: Any) -> None:
            trace._runs.setdefault(id(module), _Run(ticks))

        def ends(module: Module, args: Any, output: Any) -> None:
            nonlocal ticks
            ticks += 1
            run = trace._runs[id(module)]
            run.stop, run.calls = ticks, run.calls + 1
            run.simple &= _tensors(output) is not None

        def reached(name: str, value: Any) -> None:
            trace.calls[name] += 1
            if name not in trace._first:
                trace.order.append(name)
                trace._first[name] = ticks
                trace._sums[name] = _checksums(value)

        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                stack.callback(module.register_forward_pre_hook(begins).remove)
                stack.callback(module.register_forward_hook(ends).remove)
            for name, module in chosen.items():
                stack.enter_context(_watched(name, module, placement, reached))
            call()
        return trace

    def same(self, name: str, value: Any) -> bool:
        """Whether a tensor has the bits that the site had when it first ran."""
        first, now = self._sums[name], _checksums(value)
        if first is None or now is None:
            return False
        return all(torch.equal(a, b) for a, b in zip(first, now, strict=True))

    def points(self, modules: Mapping[str, Module], name: str) -> list[CachePoint]:
        """Where a pass behind a site may begin, those that skip most first."""
        found = []
        parts = name.split(".")
        for depth in range(len(parts), 0, -1):
            parent = modules.get(".".join(parts[: depth - 1]))
            if parent is None:
                continue
            ran = [
                (run, child)
                for child in parent.children()
                if (run := self._runs.get(id(child))) is not None
                and run.stop <= self._first[name]
                and run.calls == 1
                and run.simple
            ]
            if ran:
                ran.sort(key=lambda one: one[0].stop)
                skipped = sum(run.stop - run.start for run, _ in ran)
                *before, last = (child for _, child in ran)
                found.append((skipped, CachePoint(last, tuple(before))))
        return [point for _, point in sorted(found, key=lambda one: -one[0])]


@contextmanager
def _watched(
    name: str, module: Module, placement: Placement, seen: Callable[[str, Any], None]
) -> Iterator[None]:
    """Show the tensor of a site each time it runs."""

    def at_input(module: Module, args: Any, kwargs: Any) -> None:
        key = sites.pick_input(name, args, kwargs)
        seen(name, args[key] if isinstance(key, int) else kwargs[key])

    def at_output(module: Module, args: Any, output: Any) -> None:
        seen(name, sites.pick(name, output, placement.output, placement.feature_dim)[0])

    if placement.side == "input":
        handle = module.register_forward_pre_hook(at_input, with_kwargs=True)
    else:
        handle = module.register_forward_hook(at_output)
    try:
        yield
    finally:
        handle.remove()


# -- cached outputs -------------------------------------------------------------------------


@dataclass
class _Kept:
    """The output of a point for one batch."""

    point: CachePoint
    output: Any
    nbytes: int
    versions: list[int]

    @property
    def unchanged(self) -> bool:
        """Whether nothing wrote into it since."""
        return [t._version for t in _tensors(self.output) or []] == self.versions


class ActivationCache:
    """Outputs kept between the passes of one fit, one per batch, within a limit of bytes.

    Parameters
    ----------
    limit : int
        Bytes; batches beyond it run from the beginning of the model.

    Attributes
    ----------
    nbytes, most_bytes : int
        Bytes kept now, and the most so far.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = self.most_bytes = 0
        self._kept: dict[int, _Kept] = {}
        self._placeholders: dict[tuple[int, int], Any] = {}  # by batch and module
        self._alike: dict[Any, Any] = {}  # one placeholder for all outputs of the same shapes
        self._batch = 0

    def numbered(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, each noted as the one under way."""
        for self._batch, batch in enumerate(batches):
            yield batch

    @contextmanager
    def one_pass(self, begin: CachePoint | None, keep: CachePoint | None) -> Iterator[None]:
        """A pass that begins behind `begin` where its output was kept, and keeps that of `keep`."""
        points = [point for point in (begin, keep) if point is not None]
        modules = {id(m): m for point in points for m in (*point.before, point.module)}
        own = [(module, module.__dict__.get("forward")) for module in modules.values()]
        try:
            for module, _ in own:
                module.forward = self._forward(module, begin, keep)
            yield
        finally:
            for module, forward in own:
                if forward is not None:
                    module.forward = forward
                elif "forward" in module.__dict__:
                    del module.forward

    def _forward(self, module: Module, begin: CachePoint | None, keep: CachePoint | None) -> Any:
        """The forward of a module for one pass."""
        run = module.forward
        is_begin = begin is not None and module is begin.module
        skipped = begin is not None and any(module is one for one in begin.before)

        def forward(*args: Any, **kwargs: Any) -> Any:
            kept = self._kept.get(self._batch) if is_begin or skipped else None
            place = self._batch, id(module)
            if kept is None or kept.point is not begin or not kept.unchanged:
                output = run(*args, **kwargs)
                self._placeholders[place] = self._placeholder(output)
            else:
                output = self._placeholders[place] if skipped else kept.output
            if keep is not None and module is keep.module:
                self._keep(keep, output)
            return output

        return forward

    def _keep(self, point: CachePoint, output: Any) -> None:
        """Keep the output of a point in place of an earlier one of the same batch, if it fits."""
        tensors = _tensors(output)
        before = self._kept.pop(self._batch, None)
        if before is not None:
            self.nbytes -= before.nbytes
        if tensors is None or any(t.is_inference() for t in tensors):
            return
        nbytes = sum(t.untyped_storage().nbytes() for t in tensors)
        if self.nbytes + nbytes <= self.limit:
            versions = [t._version for t in tensors]
            self._kept[self._batch] = _Kept(point, output, nbytes, versions)
            self.nbytes += nbytes
            self.most_bytes = max(self.most_bytes, self.nbytes)

    def _placeholder(self, output: Any) -> Any:
        """NaN in the shapes of an output, without memory of that size."""
        if isinstance(output, torch.Tensor):
            key = (tuple(output.shape), output.dtype, output.device)
            if key not in self._alike:
                one = torch.full((), torch.nan, dtype=output.dtype, device=output.device)
                self._alike[key] = one.expand(output.shape)
            return self._alike[key]
        return None if output is None else type(output)(self._placeholder(one) for one in output)


def limit_of(memory: int | None, device: Any) -> int:
    """Bytes that may be kept: `memory`, or a quarter of what is free on the device."""
    return int(_SHARE * (free_memory(device) or 0)) if memory is None else memory


def _tensors(output: Any) -> list[Tensor] | None:
    """The tensors of an output; None if it holds what NaN cannot stand for."""
    if output is None:
        return []
    if type(output) is torch.Tensor:
        return [output] if output.is_floating_point() else None
    if type(output) not in (tuple, list):
        return None
    parts = [_tensors(one) for one in output]
    return None if None in parts else [t for part in parts for t in part or ()]


def _checksums(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Sums of the bits of a tensor over rows and over columns; None for distributed tensors."""
    if type(x) is not torch.Tensor or x.ndim == 0:
        return None
    bits = x.detach().contiguous().view(_BITS[x.dtype.itemsize]).reshape(-1, x.shape[-1])
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


# -- valid cache points -----------------------------------------------------------------------


def choose(
    model: Module,
    call: Call,
    trace: Trace,
    chosen: Mapping[str, Module],
    placement: Placement,
    limit: int,
) -> list[CachePoint | None]:
    """For each site but the last, the cache point at which the next site's pass begins, or None.

    All passes run on one batch, each from the point of the last. A point is valid if the next
    site has the bits of the trace.
    """
    modules = sites.named(model)

    def same(name: str, tried: Trial | None, further: Sequence[Trial]) -> bool:
        """Run to a site from a point, and keep what the points behind it would keep."""
        found = []

        def seen(name: str, value: Any) -> None:
            found.append(trace.same(name, value))
            raise _Reached

        with ExitStack() as stack:
            if tried is not None:
                stack.enter_context(tried[1].one_pass(tried[0], None))
            for point, kept in further:
                stack.enter_context(kept.one_pass(None, point))
            stack.enter_context(_watched(name, chosen[name], placement, seen))
            with suppress(_Reached):
                call()
        return found == [True]

    def trials(name: str) -> list[Trial]:
        return [(point, ActivationCache(limit)) for point in trace.points(modules, name)]

    kept = trials(trace.order[0])
    same(trace.order[0], None, kept)
    found: list[CachePoint | None] = []
    for name in trace.order[1:]:
        for tried in [*kept, None]:
            further = trials(name)
            try:
                if same(name, tried, further):
                    break
            except Exception:  # whatever the code of a model does when it meets NaN
                if tried is None:
                    raise
        found.append(None if tried is None else tried[0])
        kept = further
    return found
