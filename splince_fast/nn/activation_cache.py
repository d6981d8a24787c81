"""Cache of module outputs between two passes, so that a pass can start after a module.

`fit_layers` runs the same batches once per site, and the modules before a fitted site return the
same outputs in later passes. A cache point is a module that runs before a site, together with the
siblings that run before the module. The output of the module, without hooks, is cached for each
batch. In the next pass the module returns the cached output, the siblings are skipped and return
NaN of the recorded shapes, and hooks and ancestors run as usual. Two checks make the cache safe for
any model. A cache point is used only if, on the first batch, the activations at the next site are
equal with and without the cache. On other batches, a module that reads the output of a skipped
module receives NaN; `fit_layers` then repeats the pass without the cache.
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
# Integer dtype by item size in bytes, to read the bits of floats.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CachePoint:
    """Module with a cached output, and the earlier siblings of the module, which are skipped."""

    module: Module
    skipped: tuple[Module, ...]


@dataclass
class _ModuleRun:
    """Start and end of a module in a trace, number of calls, and whether its output is cacheable.

    Times count the module calls that have ended.
    """

    start: int
    stop: float = math.inf
    calls: int = 0
    cacheable: bool = True


@dataclass
class Trace:
    """Order in which modules and sites run in one batch.

    Attributes
    ----------
    order : list of str
        Sites in the order of their first calls.
    calls : dict of str to int
        Number of calls of each site.
    """

    order: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    _start: dict[str, int] = field(default_factory=dict)  # time of the first call, by site
    _checksums: dict[str, tuple[Tensor, Tensor] | None] = field(default_factory=dict)
    _runs: dict[int, _ModuleRun] = field(default_factory=dict)  # by id of the module

    @classmethod
    def of(
        cls, model: Module, call: Call, modules: Mapping[str, Module], placement: Placement
    ) -> Trace:
        """Trace one call of a model with temporary hooks on all modules."""
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
                if isinstance(module, torch.jit.ScriptModule):  # does not support hooks
                    continue
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            for name, module in modules.items():
                hook = sites.add_hook(name, module, placement.side, partial(reach, name))
                stack.callback(hook.remove)
            call()
        return trace

    def matches(self, name: str, value: Tensor) -> bool:
        """Return whether a tensor has the checksums of the first activations at a site."""
        expected, checksums = self._checksums[name], _checksums(value)
        if expected is None or checksums is None:
            return False
        return all(torch.equal(a, b) for a, b in zip(expected, checksums, strict=True))

    def cache_points(self, modules: Mapping[str, Module], name: str) -> list[CachePoint]:
        """Return the cache points before a site; those that save most module calls come first."""
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
    versions: list[int]  # version counters of the tensors when the output was stored

    @property
    def unchanged(self) -> bool:
        """Whether no tensor of the output has been modified in place."""
        return [t._version for t in _tensors(self.output) or []] == self.versions


class ActivationCache:
    """Cached outputs, at most one per batch, with a total size of at most `limit` bytes.

    Batches without a cached output run from the start of the model.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._outputs: dict[int, _CachedOutput] = {}  # by batch
        self._placeholders: dict[tuple[int, int], Any] = {}  # by batch and module
        self._batch = 0

    def number_batches(self, batches: Iterable[object]) -> Iterator[Any]:
        """Yield the batches, and record the index of the current batch."""
        for self._batch, batch in enumerate(batches):
            yield batch

    @contextmanager
    def one_pass(self, start: CachePoint | None, store: CachePoint | None) -> Iterator[None]:
        """Read cached outputs of `start` and cache outputs of `store` inside a ``with`` block."""
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
        """Return the forward function of a module for one pass."""
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
        """Replace the cached output of the batch; only remove it if the new output does not fit."""
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
    """Return an output of the same shapes that holds NaN, as expanded views of one number."""
    if isinstance(output, Tensor):
        return output.new_full((), torch.nan).expand(output.shape)
    return None if output is None else type(output)(map(_placeholder, output))


def cache_limit(memory: int | None, device: torch.device) -> int:
    """Return the size limit of the cache in bytes; raise InputError for an invalid `memory`."""
    if memory is None:
        return int(_MEMORY_FRACTION * (free_memory(device) or 0))
    if not is_number(memory) or not memory >= 0:
        raise InputError(f"memory is {memory!r}; it must be a number of bytes of at least 0")
    return int(min(memory, 1 << 62))


def _tensors(output: Any) -> list[Tensor] | None:
    """Return the tensors of an output; None if the output holds other values than float tensors."""
    if output is None:
        return []
    if type(output) is Tensor:
        return [output] if output.is_floating_point() else None
    if type(output) not in (tuple, list):
        return None
    parts = [_tensors(part) for part in output]
    return None if None in parts else [t for part in parts for t in part or ()]


def _checksums(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the row and column sums of the bits of a plain tensor; None for other tensors."""
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
    """Return the cache point of each pass but the first; None if no candidate is valid.

    The pass of each site runs on one batch, from the cache point of the previous pass. A cache
    point is valid if the activations at the site have the checksums of the trace.
    """
    modules = sites.named_modules(model)

    def reproduces(
        name: str, candidate: Candidate | None, next_candidates: Sequence[Candidate]
    ) -> bool:
        """Return whether a pass from a candidate reproduces the traced activations at a site.

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
            except Exception:  # a model that receives NaN may raise any error
                if candidate is None:
                    raise
        points.append(None if candidate is None else candidate[0])
        candidates = next_candidates
    return points
