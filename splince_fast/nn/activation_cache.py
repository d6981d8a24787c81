"""Cache of module outputs, so that a pass over the data need not run the first modules again.

`fit_layers` runs the same batches once per site. The modules that run before a fitted site return
the same outputs in all later passes. A cache point is one of these modules, together with its
earlier siblings: the modules with the same parent that run before it. One pass caches the output of
the module for each batch, before hooks change the output. In the next pass the module returns the
cached output. The earlier siblings are skipped: each returns NaN in the shapes of its output. All
hooks, and the ancestors of the module, run as usual.

Two checks make the cache safe for any model. First, a cache point is used only if the activations
at the next site, on the first batch, are the same with and without the cache. Second, a module that
reads the output of a skipped module receives NaN. If NaN reaches the site in a later batch,
`fit_layers` repeats the pass without the cache.
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

# Default size limit of the cache, as a fraction of the free memory of the device.
_MEMORY_FRACTION = 0.25
# Integer dtypes that read the bits of floats, by item size in bytes.
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CachePoint:
    """Module with a cached output, and the earlier siblings of the module, which are skipped."""

    module: Module
    skipped: tuple[Module, ...]


@dataclass
class _ModuleRun:
    """Record of the calls of one module in a trace.

    `start` is the time at the start of the first call, and `stop` the time at the end of the last
    call. The time is the number of calls, of any module, that have ended. `cacheable` is whether
    all outputs of the module can be cached.
    """

    start: int
    stop: float = math.inf
    calls: int = 0
    cacheable: bool = True


@dataclass
class Trace:
    """Order in which the modules and the sites of a model run on one batch.

    Attributes
    ----------
    order : list of str
        Sites in the order of their first calls.
    calls : dict of str to int
        Number of calls of each site.
    """

    order: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    _site_starts: dict[str, int] = field(default_factory=dict)  # time of the first call, by site
    _checksums: dict[str, tuple[Tensor, Tensor] | None] = field(default_factory=dict)
    _runs: dict[int, _ModuleRun] = field(default_factory=dict)  # runs by id of the module

    @classmethod
    def of(
        cls, model: Module, call: Call, modules: Mapping[str, Module], placement: Placement
    ) -> Trace:
        """Trace one call of a model with temporary hooks on all modules."""
        trace, time = cls(calls=dict.fromkeys(modules, 0)), 0

        def record_start(module: Module, args: object) -> None:
            trace._runs.setdefault(id(module), _ModuleRun(time))

        def record_end(module: Module, args: object, output: object) -> None:
            nonlocal time
            time += 1
            run = trace._runs[id(module)]
            run.stop, run.calls = time, run.calls + 1
            run.cacheable &= _tensors(output) is not None

        def record_site(name: str, value: object) -> None:
            trace.calls[name] += 1
            if name not in trace._site_starts:
                trace.order.append(name)
                trace._site_starts[name] = time
                trace._checksums[name] = _checksums(sites.pick_rows(name, value, placement)[0])

        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, torch.jit.ScriptModule):  # ScriptModules take no hooks
                    continue
                stack.callback(module.register_forward_pre_hook(record_start).remove)
                stack.callback(module.register_forward_hook(record_end).remove)
            for name, module in modules.items():
                hook = sites.add_hook(name, module, placement.side, partial(record_site, name))
                stack.callback(hook.remove)
            call()
        return trace

    def matches(self, name: str, value: Tensor) -> bool:
        """Return whether a tensor has the checksums of the traced activations at a site.

        If a site ran several times in the trace, the activations of the first call count.
        """
        expected, checksums = self._checksums[name], _checksums(value)
        if expected is None or checksums is None:
            return False
        return all(torch.equal(a, b) for a, b in zip(expected, checksums, strict=True))

    def cache_points(self, modules: Mapping[str, Module], name: str) -> list[CachePoint]:
        """Return the cache points before a site, in descending order of saved module calls."""
        points = []
        name_parts = name.split(".")
        for depth in range(len(name_parts), 0, -1):
            parent = modules.get(".".join(name_parts[: depth - 1]))
            if parent is None:
                continue
            siblings = [
                (run, child)
                for child in parent.children()
                if (run := self._runs.get(id(child))) is not None
                and run.stop <= self._site_starts[name]
                and run.calls == 1
                and run.cacheable
            ]
            if siblings:
                siblings.sort(key=lambda pair: pair[0].stop)
                n_saved = sum(run.stop - run.start for run, _ in siblings)
                *skipped, last = (child for _, child in siblings)
                points.append((n_saved, CachePoint(last, tuple(skipped))))
        return [point for _, point in sorted(points, key=lambda pair: -pair[0])]


# -- cached outputs -------------------------------------------------------------------------


@dataclass
class _CachedOutput:
    """The output of a cache point for one batch."""

    point: CachePoint
    output: object
    nbytes: int
    versions: list[int]  # version counters of the tensors at the time of caching

    @property
    def unchanged(self) -> bool:
        """Whether no tensor of the output has been modified in place."""
        return [t._version for t in _tensors(self.output) or []] == self.versions


class ActivationCache:
    """Cached outputs, at most one per batch, with a total size of at most `limit` bytes.

    For a batch without a cached output, all modules run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._outputs: dict[int, _CachedOutput] = {}  # by index of the batch
        self._placeholders: dict[tuple[int, int], Any] = {}  # by batch and id of the module
        self._batch = 0

    def number_batches(self, batches: Iterable[object]) -> Iterator[Any]:
        """Yield the batches, and record the index of the current batch."""
        for self._batch, batch in enumerate(batches):
            yield batch

    @contextmanager
    def pass_scope(
        self, start_point: CachePoint | None, store_point: CachePoint | None
    ) -> Iterator[None]:
        """Use the cached outputs of `start_point`, and cache the outputs of `store_point`.

        Both apply to the calls of the model inside the ``with`` block.
        """
        points = [point for point in (start_point, store_point) if point is not None]
        modules = {id(m): m for point in points for m in (*point.skipped, point.module)}
        forwards = [(module, module.__dict__.get("forward")) for module in modules.values()]
        try:
            for module, _ in forwards:
                module.forward = self._forward(module, start_point, store_point)
            yield
        finally:
            for module, forward in forwards:
                if forward is not None:
                    module.forward = forward
                elif "forward" in module.__dict__:
                    del module.forward

    def _forward(
        self, module: Module, start_point: CachePoint | None, store_point: CachePoint | None
    ) -> Call:
        """Return the function that replaces the forward method of a module during one pass.

        If the output of `start_point` is cached for the batch, the function returns this output for
        the module of `start_point`, and NaN for a skipped module. Otherwise it runs the module.
        """
        original = module.forward
        is_start = start_point is not None and module is start_point.module
        is_skipped = start_point is not None and any(m is module for m in start_point.skipped)

        def forward(*args: object, **kwargs: object) -> Any:
            cached = self._outputs.get(self._batch) if is_start or is_skipped else None
            key = self._batch, id(module)
            if cached is None or cached.point is not start_point or not cached.unchanged:
                output = original(*args, **kwargs)
                self._placeholders[key] = _placeholder(output)
            else:
                output = self._placeholders[key] if is_skipped else cached.output
            if store_point is not None and module is store_point.module:
                self._store(store_point, output)
            return output

        return forward

    def _store(self, point: CachePoint, output: object) -> None:
        """Replace the cached output of the current batch by a new output.

        If the new output is too large or cannot be cached, the batch has no cached output.
        """
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
    """Return a copy of an output with NaN as every entry; each tensor stores a single number."""
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
    """Return the tensors of an output; None if a value is neither a tensor of floats nor None."""
    if output is None:
        return []
    if type(output) is Tensor:
        return [output] if output.is_floating_point() else None
    if type(output) not in (tuple, list):
        return None
    nested = [_tensors(element) for element in output]
    return None if None in nested else [t for tensors in nested for t in tensors or ()]


def _checksums(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return column and row sums of the bits of a tensor, read as integers.

    Returns None for scalars and for subclasses of Tensor.
    """
    if type(x) is not Tensor or x.ndim == 0:
        return None
    bits = x.detach().contiguous().view(_INTEGER_DTYPES[x.dtype.itemsize]).reshape(-1, x.shape[-1])
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


# -- choice of cache points -------------------------------------------------------------------


def choose_cache_points(
    model: Module,
    call: Call,
    trace: Trace,
    site_modules: Mapping[str, Module],
    placement: Placement,
    limit: int,
) -> list[CachePoint | None]:
    """Return, for the pass of each site but the first, the cache point at which the pass starts.

    The candidates for a pass are tried on one batch. The first candidate that reproduces the traced
    activations at the site is chosen. An entry is None if no candidate does: the pass then runs all
    modules.
    """
    modules = sites.named_modules(model)

    def reproduces(
        name: str, candidate: Candidate | None, next_candidates: Sequence[Candidate]
    ) -> bool:
        """Return whether a pass that starts at `candidate` reproduces the traced activations.

        `name` is the site. The pass also fills the caches of `next_candidates`, the candidates for
        the pass of the next site.
        """
        results = []

        def check(value: object) -> None:
            results.append(trace.matches(name, sites.pick_rows(name, value, placement)[0]))
            raise StopForward

        with ExitStack() as stack:
            if candidate is not None:
                stack.enter_context(candidate[1].pass_scope(candidate[0], None))
            for point, cache in next_candidates:
                stack.enter_context(cache.pass_scope(None, point))
            stack.callback(sites.add_hook(name, site_modules[name], placement.side, check).remove)
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
            except Exception:  # modules that receive NaN may raise any error
                if candidate is None:
                    raise
        points.append(None if candidate is None else candidate[0])
        candidates = next_candidates
    return points
