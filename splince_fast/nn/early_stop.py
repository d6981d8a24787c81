"""Early stop: whether a forward pass on a batch may end after the last site.

A site may run more often on one batch than on another, for example if a model splits long inputs
into chunks. A pass over a batch may end early only if the sites ran once in complete passes over
batches that are at least as large. Sizes are compared because the values of tensors are unknown
without a synchronisation of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from torch.nn import Module

Sizes = dict[tuple[object, ...], int]


class EarlyStop:
    """Number of calls of each site in complete forward passes, with the sizes of the batches.

    Attributes
    ----------
    calls : dict of str to int
        Number of calls of each site in the current batch.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.calls = dict.fromkeys(modules, 0)
        self._modules = modules
        # Per site, the largest sizes of batches in which the site ran once.
        self._largest: dict[str, Sizes] = {name: {} for name in modules}
        self._repeated: set[str] = set()  # sites that ran more than once in a batch

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of all sites inside a ``with`` block."""
        with ExitStack() as stack:
            for name, module in self._modules.items():
                hook = module.register_forward_hook(partial(self._count, name))
                stack.callback(hook.remove)
            yield

    def _count(self, name: str, module: Module, args: object, output: object) -> None:
        self.calls[name] += 1

    def start_batch(self, batch: object, names: Iterable[str]) -> bool:
        """Set the counts to 0; return whether a pass over `batch` may end after the sites `names`.

        The result is True if each of these sites ran once in complete passes over batches whose
        sizes, one by one, are at least those of `batch`.
        """
        self.calls = dict.fromkeys(self._modules, 0)
        sizes = sizes_of(batch)
        return sizes is not None and all(
            name not in self._repeated
            and all(n <= self._largest[name].get(key, -1) for key, n in sizes.items())
            for name in names
        )

    def record(self, batch: object, calls: Mapping[str, int]) -> None:
        """Record the number of calls of sites in a complete pass over `batch`."""
        sizes = sizes_of(batch) or {}
        for name, n_calls in calls.items():
            if n_calls > 1:
                self._repeated.add(name)
            elif n_calls == 1:
                largest = self._largest[name]
                largest |= {key: max(n, largest.get(key, n)) for key, n in sizes.items()}


def sizes_of(batch: object) -> Sizes | None:
    """Return the sizes in a batch that may determine the number of calls of a module.

    These are the sizes of the axes of tensors and arrays, the lengths of lists, tuples, mappings
    and strings, and integers. Returns None if the batch holds an object of another type.
    """
    sizes: Sizes = {}
    return sizes if _add_sizes(batch, (), sizes) else None


def _add_sizes(value: object, key: tuple[object, ...], sizes: Sizes) -> bool:
    """Add the sizes in a value; return whether its type is known."""
    dimensions = getattr(value, "shape", None)
    children: Iterable[tuple[object, object]] = ()
    if isinstance(dimensions, tuple):
        pass
    elif isinstance(value, Mapping):
        dimensions, children = (len(value),), value.items()
    elif isinstance(value, list | tuple):
        # Strings and numbers in a list have one size in common: the largest one.
        dimensions = (len(value),)
        children = (
            (str if isinstance(entry, str | int | float | None) else i, entry)
            for i, entry in enumerate(value)
        )
    elif isinstance(value, str | bytes):
        dimensions = (len(value),)
    elif isinstance(value, int):
        dimensions = (value,)
    elif isinstance(value, float | None):
        dimensions = ()
    else:
        return False
    for axis, n in enumerate(dimensions):
        axis_key = (*key, len(dimensions), axis)
        sizes[axis_key] = max(int(n), sizes.get(axis_key, int(n)))
    return all(_add_sizes(child, (*key, name), sizes) for name, child in children)
