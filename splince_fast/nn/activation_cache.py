"""Cache of module outputs, so that a pass over the data need not run the first modules again.

`fit_layers` runs the same batches once per site. The modules that run before a fitted site return
the same outputs in all later passes. A cache point is one of these modules, together with its
earlier siblings: the modules with the same parent that run before it. One pass caches the output of
the module for each batch, before hooks change the output. In the next pass the first call of the
module returns the cached output. Until then the earlier siblings are skipped: each returns a
:class:`~splince_fast.nn.placeholder.Placeholder`. Later calls of these modules run. All hooks, and
the ancestors of the module, run as usual.

Three rules make the cached pass equal to a full pass. A cache point is used only if the activations
at the next site, on the first batch, are the same with and without the cache. An output is cached
only if the module runs once in the batch, before the site. The result of an operation with a
placeholder is a placeholder, whatever its values would be: if a placeholder reaches the site, or
would give a number, a shape or a change of another tensor, the pass fails, and `fit_layers` repeats
it without the cache. Nothing is cached for a model whose modules store other tensors, numbers or
strings after a call than before. Other objects by which modules exchange values, besides their
inputs and outputs, are not traced.
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
from torch.utils._pytree import tree_leaves, tree_map_only

from splince_fast._solve.options import is_number
from splince_fast.exceptions import InputError
from splince_fast.nn import sites
from splince_fast.nn.memory import free_memory
from splince_fast.nn.placeholder import Placeholder, PlaceholderError, holds_tensors
from splince_fast.nn.running import StopForward
from splince_fast.nn.spec import Placement

Call = Callable[[], object]
Candidate = tuple["CachePoint", "ActivationCache"]
Checksums = tuple[Tensor, Tensor] | None

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
    changes_state : bool
        Whether the call changed tensors, numbers or strings that modules store, such as buffers.
    """

    order: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    changes_state: bool = False
    _site_starts: dict[str, int] = field(default_factory=dict)  # time of the first call, by site
    _checksums: dict[str, Checksums] = field(default_factory=dict)
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
                trace._checksums[name] = checksums(sites.pick_rows(name, value, placement)[0])

        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, torch.jit.ScriptModule):  # ScriptModules take no hooks
                    continue
                stack.callback(module.register_forward_pre_hook(record_start).remove)
                stack.callback(module.register_forward_hook(record_end).remove)
            for name, module in modules.items():
                hook = sites.add_hook(name, module, placement.side, partial(record_site, name))
                stack.callback(hook.remove)
            before = _stored_values(model)
            call()
            after = _stored_values(model)
        trace.changes_state = len(before) != len(after) or any(
            value is not new or version != new_version
            for (value, version), (new, new_version) in zip(before, after, strict=True)
        )
        return trace

    def matches(self, name: str, value: Tensor) -> bool:
        """Return whether a tensor has the checksums of the traced activations at a site.

        If a site ran several times in the trace, the activations of the first call count.
        """
        return equal_checksums(self._checksums[name], checksums(value))

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
        self._start_batch(0)

    def _start_batch(self, batch: int) -> None:
        self._batch = batch
        self._started = False  # whether the start module has returned its cached output
        self._ended = False  # whether the store module or the site has run

    def number_batches(self, batches: Iterable[object]) -> Iterator[Any]:
        """Yield the batches, and record the index of the current batch."""
        for i, batch in enumerate(batches):
            self._start_batch(i)
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
        self._start_batch(0)
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

        If the output of `start_point` is cached for the batch, the first call of the module of
        `start_point` returns this output, and earlier calls of skipped modules return placeholders.
        Otherwise the function runs the module.
        """
        original = module.forward
        is_start = start_point is not None and module is start_point.module
        is_skipped = start_point is not None and any(m is module for m in start_point.skipped)

        def forward(*args: object, **kwargs: object) -> Any:
            key = self._batch, id(module)
            cached = None if self._started else self._outputs.get(self._batch)
            if cached is not None and (cached.point is not start_point or not cached.unchanged):
                cached = None
            if cached is not None and is_start:
                self._started = True
                output = cached.output
            elif cached is not None and is_skipped and key in self._placeholders:
                output = self._placeholders[key]
            else:
                output = original(*args, **kwargs)
                self._placeholders.pop(key, None)
                if holds_tensors(output):
                    self._placeholders[key] = tree_map_only(Tensor, Placeholder, output)
            if store_point is not None and module is store_point.module:
                self._store(store_point, output)
            return output

        return forward

    def check_site(self, value: Tensor) -> None:
        """Raise PlaceholderError if activations at the fitted site depend on a skipped output.

        Also records that the site has run: the eraser of the site may change all later outputs in
        the batch.
        """
        self._ended = True
        if isinstance(value, Placeholder):
            raise PlaceholderError("the activations at the site depend on a skipped output")

    def _store(self, point: CachePoint, output: object) -> None:
        """Replace the cached output of the current batch by a new output.

        The batch has no cached output if the module has run before in the batch or the site has
        run, or if the new output is too large or cannot be cached.
        """
        tensors = _tensors(output)
        previous = self._outputs.pop(self._batch, None)
        if previous is not None:
            self.nbytes -= previous.nbytes
        ended, self._ended = self._ended, True
        if ended or tensors is None or any(t.is_inference() for t in tensors):
            return
        nbytes = sum(t.untyped_storage().nbytes() for t in tensors)
        if self.nbytes + nbytes <= self.limit:
            versions = [t._version for t in tensors]
            self._outputs[self._batch] = _CachedOutput(point, output, nbytes, versions)
            self.nbytes += nbytes


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


def _stored_values(model: Module) -> list[tuple[object, int]]:
    """Return the tensors, numbers and strings in the attributes of all modules.

    Each has a version: the version counter of a tensor, which in-place operations increase.
    """
    values: list[tuple[object, int]] = []
    for module in model.modules():
        for attribute in module.__dict__.values():
            leaves = [attribute]
            if isinstance(attribute, dict | list | tuple):
                leaves = tree_leaves(attribute) if attribute else []
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    values.append((leaf, 0 if leaf.is_inference() else leaf._version))
                elif isinstance(leaf, int | float | str):
                    values.append((leaf, 0))
    return values


def checksums(x: Tensor) -> Checksums:
    """Return column and row sums of the bits of a tensor, read as integers.

    Returns None for scalars and for subclasses of Tensor.
    """
    if type(x) is not Tensor or x.ndim == 0:
        return None
    bits = x.detach().contiguous().view(_INTEGER_DTYPES[x.dtype.itemsize]).reshape(-1, x.shape[-1])
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


def equal_checksums(first: Checksums, second: Checksums) -> bool:
    """Return whether the checksums of two tensors are equal; False if one has no checksums."""
    if first is None or second is None:
        return False
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
            except Exception:  # code that receives placeholders may raise any error
                if candidate is None:
                    raise
        points.append(None if candidate is None else candidate[0])
        candidates = next_candidates
    return points
