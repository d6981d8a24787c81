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

    A pass may end early only if a batch with the same keys, and with sizes that are at least as
    large, had a complete pass.

    Attributes
    ----------
    calls : dict of str to int
        Number of calls of each site in the current batch.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.calls = dict.fromkeys(modules, 0)
        self._modules = modules
        # Per site, the sizes of batches in which the site ran once. None of them covers another.
        self._complete: dict[str, list[Sizes]] = {name: [] for name in modules}
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

        The result is True if each of these sites ran once in a complete pass over a batch that
        covers `batch`.
        """
        self.calls = dict.fromkeys(self._modules, 0)
        sizes = sizes_of(batch)
        return sizes is not None and all(
            name not in self._repeated
            and any(_covers(larger, sizes) for larger in self._complete[name])
            for name in names
        )

    def record(self, batch: object, calls: Mapping[str, int]) -> None:
        """Record the number of calls of sites in a complete pass over `batch`."""
        sizes = sizes_of(batch)
        for name, n_calls in calls.items():
            if n_calls > 1:
                self._repeated.add(name)
            elif n_calls == 1 and sizes is not None:
                others = [other for other in self._complete[name] if not _covers(sizes, other)]
                self._complete[name] = [*others, sizes]


def _covers(larger: Sizes, sizes: Sizes) -> bool:
    """Return whether two batches have the same keys, and `larger` has no smaller size."""
    return larger.keys() == sizes.keys() and all(larger[key] >= n for key, n in sizes.items())


def sizes_of(batch: object) -> Sizes | None:
    """Return the sizes in a batch that may determine the number of calls of a module.

    These are the sizes of the axes of tensors and arrays, the lengths of lists, tuples and
    mappings, and integers. Entries of a list that are strings or numbers have one size in common,
    the largest length or integer. Any other string, float, bool or None is part of a key. Returns
    None if the batch holds an object of another type.
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
    elif isinstance(value, tuple):
        dimensions, children = (len(value),), enumerate(value)
    elif isinstance(value, list):
        texts_and_numbers = [e for e in value if isinstance(e, str | int | float | None)]
        lengths = (len(e) if isinstance(e, str) else e for e in texts_and_numbers)
        largest = max((n for n in lengths if isinstance(n, int)), default=0)
        dimensions = (len(value), largest)
        children = enumerate(e for e in value if not isinstance(e, str | int | float | None))
    elif isinstance(value, int) and not isinstance(value, bool):
        dimensions = (value,)
    elif isinstance(value, str | bytes | float | bool | None):
        dimensions, key = (), (*key, value)
        sizes[key] = 0
    else:
        return False
    for axis, n in enumerate(dimensions):
        sizes[*key, len(dimensions), axis] = int(n)
    return all(_add_sizes(child, (*key, name), sizes) for name, child in children)
