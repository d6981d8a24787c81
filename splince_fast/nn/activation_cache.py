"""Outputs of modules, cached between passes so that a pass can start after a module.

`fit_layers` runs the same batches once per site, and the modules before a fitted site return the
same outputs in later passes. A cache point is a module that runs before a site, together with the
siblings that run before it. Its output, without hooks, is cached for each batch. In the next pass
the forward of the module returns the cached output, the forwards of the siblings return NaN of the
recorded shapes, and hooks and ancestors run as usual. Two checks make this safe for any model. A
cache point is used only if, on the first batch, the next site has the same bits with and without
it. On other batches, a module that reads a skipped output gets NaN, which is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from splince_fast._solve.options import is_number
from splince_fast.exceptions import InputError
from splince_fast.nn import sites
from splince_fast.nn.memory import free_memory
from splince_fast.nn.running import StopForward
from splince_fast.nn.spec import Placement

Call = Callable[[], object]
Candidate = tuple["CachePoint", "ActivationCache"]

# Fraction of the free memory of a device that the cache may use by default.
_MEMORY_FRACTION = 0.25
# Integer type with the item size of a float type, to read its bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CachePoint:
    """A module whose output is cached, and the siblings before it, which are skipped."""

    module: Module
    skipped: tuple[Module, ...]


@dataclass
class _ModuleRun:
    """Start and end of a module in a trace, its number of calls, and whether it can be skipped."""

    start: int
    stop: float = math.inf
    calls: int = 0
    cacheable: bool = True


@dataclass
class Trace:
    """The order of modules and sites in one batch.

    Attributes
    ----------
    order : list of str
        Sites in the order of their first calls.
    calls : dict of str to int
        Number of calls of each site.
    """

    order: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    _start: dict[str, int] = field(default_factory=dict)  # time of the first call of a site
    _checksums: dict[str, tuple[Tensor, Tensor] | None] = field(default_factory=dict)
    _runs: dict[int, _ModuleRun] = field(default_factory=dict)  # by id of the module

    @classmethod
    def of(
        cls, model: Module, call: Call, modules: Mapping[str, Module], placement: Placement
    ) -> Trace:
        """Trace one call of a model by temporary hooks on all modules."""
        trace, time = cls(calls=dict.fromkeys(modules, 0)), 0

        def enter(module: Module, args: object) -> None:
            trace._runs.setdefault(id(module), _ModuleRun(time))

        def leave(module: Module, args: object, output: object) -> None:
            nonlocal time
            time += 1
            run = trace._runs[id(module)]
            run.stop, run.calls = time, run.calls + 1
            run.cacheable &= _tensors(output) is not None

        def reach(name: str, value: object) -> None:
            trace.calls[name] += 1
            if name not in trace._start:
                trace.order.append(name)
                trace._start[name] = time
                trace._checksums[name] = _checksums(sites.pick_rows(name, value, placement)[0])

        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            for name, module in modules.items():
                hook = sites.add_hook(name, module, placement.side, partial(reach, name))
                stack.callback(hook.remove)
            call()
        return trace

    def matches(self, name: str, value: Tensor) -> bool:
        """Return whether a tensor has the bits of the first call of a site."""
        expected, checksums = self._checksums[name], _checksums(value)
        if expected is None or checksums is None:
            return False
        return all(torch.equal(a, b) for a, b in zip(expected, checksums, strict=True))

    def cache_points(self, modules: Mapping[str, Module], name: str) -> list[CachePoint]:
        """Return the cache points before a site, ordered by how much they skip, largest first."""
        points = []
        parts = name.split(".")
        for depth in range(len(parts), 0, -1):
            parent = modules.get(".".join(parts[: depth - 1]))
            if parent is None:
                continue
            earlier = [
                (run, child)
                for child in parent.children()
                if (run := self._runs.get(id(child))) is not None
                and run.stop <= self._start[name]
                and run.calls == 1
                and run.cacheable
            ]
            if earlier:
                earlier.sort(key=lambda pair: pair[0].stop)
                saved = sum(run.stop - run.start for run, _ in earlier)
                *skipped, last = (child for _, child in earlier)
                points.append((saved, CachePoint(last, tuple(skipped))))
        return [point for _, point in sorted(points, key=lambda pair: -pair[0])]


# -- cached outputs -------------------------------------------------------------------------


@dataclass
class _CachedOutput:
    """The output of a cache point for one batch."""

    point: CachePoint
    output: object
    nbytes: int
    versions: list[int]

    @property
    def unchanged(self) -> bool:
        """Whether no operation has modified its tensors in place."""
        return [t._version for t in _tensors(self.output) or []] == self.versions


class ActivationCache:
    """Cached outputs, at most one per batch, of `limit` bytes in all.

    Batches beyond the limit run from the start of the model.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._outputs: dict[int, _CachedOutput] = {}  # by batch
        self._placeholders: dict[tuple[int, int], Any] = {}  # by batch and module
        self._batch = 0

    def number_batches(self, batches: Iterable[object]) -> Iterator[Any]:
        """Yield the batches and record the number of the current one."""
        for self._batch, batch in enumerate(batches):
            yield batch

    @contextmanager
    def one_pass(self, start: CachePoint | None, store: CachePoint | None) -> Iterator[None]:
        """Start at the cached outputs of `start` and cache those of `store` inside the block."""
        points = [point for point in (start, store) if point is not None]
        modules = {id(m): m for point in points for m in (*point.skipped, point.module)}
        forwards = [(module, module.__dict__.get("forward")) for module in modules.values()]
        try:
            for module, _ in forwards:
                module.forward = self._forward(module, start, store)
            yield
        finally:
            for module, forward in forwards:
                if forward is not None:
                    module.forward = forward
                elif "forward" in module.__dict__:
                    del module.forward

    def _forward(self, module: Module, start: CachePoint | None, store: CachePoint | None) -> Call:
        """Return the forward of a module for one pass."""
        original = module.forward
        is_start = start is not None and module is start.module
        is_skipped = start is not None and any(module is other for other in start.skipped)

        def forward(*args: object, **kwargs: object) -> Any:
            cached = self._outputs.get(self._batch) if is_start or is_skipped else None
            key = self._batch, id(module)
            if cached is None or cached.point is not start or not cached.unchanged:
                output = original(*args, **kwargs)
                self._placeholders[key] = _placeholder(output)
            else:
                output = self._placeholders[key] if is_skipped else cached.output
            if store is not None and module is store.module:
                self._store(store, output)
            return output

        return forward

    def _store(self, point: CachePoint, output: object) -> None:
        """Replace the cached output of the batch, if the new one fits."""
        tensors = _tensors(output)
        previous = self._outputs.pop(self._batch, None)
        if previous is not None:
            self.nbytes -= previous.nbytes
        if tensors is None or any(t.is_inference() for t in tensors):
            return
        nbytes = sum(t.untyped_storage().nbytes() for t in tensors)
        if self.nbytes + nbytes <= self.limit:
            versions = [t._version for t in tensors]
            self._outputs[self._batch] = _CachedOutput(point, output, nbytes, versions)
            self.nbytes += nbytes


def _placeholder(output: Any) -> Any:
    """Return NaN in the shapes of an output, as views of single numbers."""
    if isinstance(output, Tensor):
        return output.new_full((), torch.nan).expand(output.shape)
    return None if output is None else type(output)(map(_placeholder, output))


def cache_limit(memory: int | None, device: torch.device) -> int:
    """Return the size limit of a cache in bytes; InputError if `memory` is no such number."""
    if memory is None:
        return int(_MEMORY_FRACTION * (free_memory(device) or 0))
    if not is_number(memory) or not memory >= 0:
        raise InputError(f"memory is {memory!r}; it must be a number of bytes of at least 0")
    return int(min(memory, 1 << 62))


def _tensors(output: Any) -> list[Tensor] | None:
    """Return the tensors of an output; None if it holds other values than floats."""
    if output is None:
        return []
    if type(output) is Tensor:
        return [output] if output.is_floating_point() else None
    if type(output) not in (tuple, list):
        return None
    parts = [_tensors(part) for part in output]
    return None if None in parts else [t for part in parts for t in part or ()]


def _checksums(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the sums of the bits of a plain tensor over rows and columns; None for subclasses."""
    if type(x) is not Tensor or x.ndim == 0:
        return None
    bits = x.detach().contiguous().view(_BITS[x.dtype.itemsize]).reshape(-1, x.shape[-1])
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


# -- choice of cache points -------------------------------------------------------------------


def choose_cache_points(
    model: Module,
    call: Call,
    trace: Trace,
    selected: Mapping[str, Module],
    placement: Placement,
    limit: int,
) -> list[CachePoint | None]:
    """Return, for each site but the last, the cache point for the pass of the next site, or None.

    All passes run on one batch, each from the cache point of the previous one. A cache point is
    valid if the next site has the bits of the trace.
    """
    modules = sites.named_modules(model)

    def reproduces(
        name: str, candidate: Candidate | None, next_candidates: Sequence[Candidate]
    ) -> bool:
        """Return whether a pass from a candidate gives a site its bits in the trace.

        The pass also fills the caches of the next candidates.
        """
        results = []

        def reach(value: object) -> None:
            results.append(trace.matches(name, sites.pick_rows(name, value, placement)[0]))
            raise StopForward

        with ExitStack() as stack:
            if candidate is not None:
                stack.enter_context(candidate[1].one_pass(candidate[0], None))
            for point, cache in next_candidates:
                stack.enter_context(cache.one_pass(None, point))
            stack.callback(sites.add_hook(name, selected[name], placement.side, reach).remove)
            with suppress(StopForward):
                call()
        return results == [True]

    def candidates_after(name: str) -> list[Candidate]:
        return [(point, ActivationCache(limit)) for point in trace.cache_points(modules, name)]

    candidates = candidates_after(trace.order[0])
    reproduces(trace.order[0], None, candidates)
    points: list[CachePoint | None] = []
    for name in trace.order[1:]:
        for candidate in [*candidates, None]:
            next_candidates = candidates_after(name)
            try:
                if reproduces(name, candidate, next_candidates):
                    break
            except Exception:  # a model may raise any error for NaN
                if candidate is None:
                    raise
        points.append(None if candidate is None else candidate[0])
        candidates = next_candidates
    return points
