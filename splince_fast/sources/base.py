"""Base classes of sources, sources of iterables of blocks, and reading ahead in a thread."""

from __future__ import annotations

import itertools
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from splince_fast._runtime.arguments import described_type
from splince_fast.exceptions import InputError

T = TypeVar("T")

_PAGE_BYTES = 4096


class Block(NamedTuple):
    """Consecutive rows with their labels and weights.

    Attributes
    ----------
    X : array of shape (n, d)
        Rows. They may be a view of the data of the source: do not change them.
    labels, sample_weight
        Labels and weights of n rows, in containers like those passed to the source, or None.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> sf.sources.Block(np.ones((2, 3)), {"z": [0, 1]}).labels
    {'z': [0, 1]}
    """

    X: Any
    labels: Any = None
    sample_weight: Any = None


@dataclass(eq=False, repr=False)
class Source(ABC):
    """Rows in blocks, with the same block boundaries in every pass.

    A subclass defines :meth:`iter_from`. All parameters are attributes.

    Parameters
    ----------
    name : str
        Name of the source in messages and checkpoints.
    n_rows, n_features : int or None
        Numbers of rows and of features; None if unknown before reading.
    nbytes : int or None
        Size of all rows in bytes; None if unknown.

    Attributes
    ----------
    files : tuple of str
        Paths of the files to read, labels and weights included; a checkpoint is refused if the size
        or the modification time of one of them differs.
    refills : bool
        Whether the arrays of a block are refilled for the next block, so that a thread that reads
        ahead must copy each block. False by default.
    shuffled : bool
        Whether the order of the rows differs between passes, so that a run cannot be resumed and
        labels in an array of their own do not match. False by default.

    Examples
    --------
    A source that computes its rows:

    >>> import numpy as np
    >>> import splince_fast as sf
    >>> class Drawn(sf.sources.Source):
    ...     def iter_from(self, first_block=0):
    ...         for seed in range(first_block, 3):
    ...             X = np.random.default_rng(seed).normal(size=(100, 4))
    ...             yield sf.sources.Block(X, {"z": X[:, 0] > 0})
    >>> sf.Moments.from_blocks(Drawn("three draws", n_rows=300, n_features=4)).n_rows
    300
    """

    name: str
    _: KW_ONLY
    n_rows: int | None = None
    n_features: int | None = None
    nbytes: int | None = None
    files: tuple[str, ...] = field(default=(), init=False)
    refills: bool = field(default=False, init=False)
    shuffled: bool = field(default=False, init=False)

    @abstractmethod
    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Yield the blocks from number `first_block` onwards.

        Parameters
        ----------
        first_block : int
            Index of the first block, counted from 0.

        Raises
        ------
        InputError
            The source has fewer than `first_block` blocks, or its data cannot be read.
        """

    def block_sizes(self) -> Iterator[int | None] | None:
        """Return an iterator over the numbers of rows of the blocks; None is an unknown number.

        The result itself is None if the blocks can only be read in order, by one process.
        """
        return None

    def __iter__(self) -> Iterator[Block]:
        return self.iter_from(0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: shape ({self.n_rows}, {self.n_features})>"


class PieceSource(Source):
    """Source of pieces of known length, such as shards or row groups; no block spans two pieces.

    ``read(piece, row)`` yields the blocks of a piece from row `row` onwards. A block has
    `block_rows` rows, or fewer at the end of a piece. Resuming does not read earlier pieces.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[int, int], Iterator[Block]],
        piece_rows: Sequence[int],
        block_rows: int,
        *,
        n_features: int | None,
        nbytes: int | None,
    ) -> None:
        name = f"{name} in blocks of {block_rows} rows"
        super().__init__(name, n_rows=sum(piece_rows), n_features=n_features, nbytes=nbytes)
        self._read = read
        self._piece_rows = piece_rows
        self._block_rows = block_rows

    def block_sizes(self) -> Iterator[int | None]:
        """Yield the number of rows of each block."""
        for rows in self._piece_rows:
            for start in range(0, rows, self._block_rows):
                yield min(self._block_rows, rows - start)

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Yield the blocks from number `first_block` onwards; see :meth:`Source.iter_from`."""
        remaining = first_block
        for piece, rows in enumerate(self._piece_rows):
            blocks = -(-rows // self._block_rows)
            if remaining < blocks:
                yield from self._read(piece, remaining * self._block_rows)
            remaining = max(0, remaining - blocks)
        if remaining:
            raise too_few_blocks(self.name, first_block, first_block - remaining)


class StreamSource(Source):
    """Source of the blocks ``read(items)``, in order; resuming discards the earlier blocks.

    An iterator of items can be read once only. With `per_item`, ``read(item)`` is the block of each
    item, and resuming does not call it for the earlier items.
    """

    def __init__(
        self,
        name: str,
        items: Iterable[T],
        read: Callable[[Any], Any],
        *,
        n_features: int | None = None,
        shuffled: bool = False,
        refills: bool = False,
        per_item: bool = False,
    ) -> None:
        super().__init__(name, n_features=n_features)
        self._items, self._read, self._per_item = items, read, per_item
        self.once = isinstance(items, Iterator)
        self._was_read = False
        self.shuffled = shuffled
        self.refills = refills

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Yield the blocks from number `first_block` onwards; see :meth:`Source.iter_from`."""
        if first_block and self.shuffled:
            raise InputError(
                f"{self.name} shuffles, so resuming would miss rows; pass shuffle=False to it"
            )
        if self.once and self._was_read:
            raise InputError(
                f"the {self.name} was read before and can be read only once; make a new generator"
            )
        self._was_read = True
        items: Iterator[Any] = iter(self._items if self._per_item else self._read(self._items))
        n_skipped = sum(1 for _ in itertools.islice(items, first_block))
        if n_skipped < first_block:
            raise too_few_blocks(self.name, first_block, n_skipped)
        yield from map(self._read, items) if self._per_item else items


def as_source(blocks: object, *, argument: str = "blocks") -> Source:
    """Convert an iterable of blocks to a source.

    Parameters
    ----------
    blocks : Source or iterable
        A source is returned unchanged. The items of any other iterable, such as a DataLoader of
        torch, are ``(X, labels)``, ``(X, labels, sample_weight)`` or X alone. A generator can be
        read only once; a DataLoader that shuffles cannot be resumed.
    argument : str
        Name of the argument in error messages.

    Returns
    -------
    Source
        A resumed run reads the earlier blocks and discards them. An iterator may refill one array
        for every block: blocks are copied when they are read ahead, unless they are in a list.

    Raises
    ------
    InputError
        `blocks` is no iterable of blocks. During reading: an item is no block, or a generator is
        read a second time.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import sources
    >>> source = sources.as_source([(np.ones((4, 2)), [0, 1, 0, 1]), (np.ones((3, 2)), [1, 1, 0])])
    >>> [block.X.shape for block in source]
    [(4, 2), (3, 2)]
    """
    if isinstance(blocks, Source):
        return blocks
    is_data = hasattr(blocks, "shape") or hasattr(blocks, "column_names")
    is_data = is_data or isinstance(blocks, str | bytes | os.PathLike | Mapping)
    if is_data or not isinstance(blocks, Iterable):
        raise InputError(
            f"{argument} is {describe(blocks)}, not blocks; pass an iterable of (X, labels), or a "
            "source: sources.from_arrays(X, labels), from_npy(path), from_parquet(path, ...)"
        )
    return StreamSource(
        f"{type(blocks).__name__} of blocks",
        blocks,
        lambda items: itertools.starmap(_as_block, enumerate(items)),
        shuffled=shuffles(blocks),
        refills=not isinstance(blocks, list | tuple),
    )


def shuffles(items: object) -> bool:
    """Return whether a DataLoader of torch has a random sampler, perhaps in its batch sampler."""
    owners = items, getattr(items, "batch_sampler", None)
    return any("Random" in type(getattr(owner, "sampler", None)).__name__ for owner in owners)


def _as_block(number: int, item: object) -> Block:
    block = Block(*item) if isinstance(item, tuple | list) and 1 <= len(item) <= 3 else Block(item)
    if not is_matrix(block.X):
        raise InputError(
            f"block {number} is {describe(item)}; each block must be (X, labels), (X, labels, "
            "sample_weight) or X of shape (n, d); convert mappings by a generator"
        )
    return block


def describe(item: object) -> str:
    if isinstance(item, tuple | list):
        return f"{described_type(item)} of ({', '.join(map(describe, item[:4]))})"
    shape = getattr(item, "shape", None)
    return f"{described_type(item)}{'' if shape is None else f' of shape {tuple(shape)}'}"


def is_matrix(X: object) -> bool:
    """Return whether X has two dimensions."""
    return len(getattr(X, "shape", ())) == 2


def too_few_blocks(name: str, first_block: int, n_blocks: int) -> InputError:
    """Return the error for a source that ends before the block at which to resume."""
    return InputError(
        f"{name} has only {n_blocks} blocks, so it cannot resume at block {first_block}; pass the "
        "data of the first run, or delete the checkpoint"
    )


def as_paths(paths: Any, name: str) -> list[str]:
    """Convert one path or several to a list of strings; raise InputError for other values."""
    several = isinstance(paths, Iterable) and not hasattr(paths, "shape")
    items = [paths] if isinstance(paths, str | os.PathLike) else list(paths) if several else []
    if not items or not all(isinstance(path, str | os.PathLike) for path in items):
        raise InputError(f"{name} is {paths!r:.80}; pass a path, or a non-empty sequence of paths")
    return [os.fsdecode(path) for path in items]


def describe_files(paths: Sequence[str]) -> str:
    """Return the name of files in messages: the path of one, or the number and the first path."""
    return repr(paths[0]) if len(paths) == 1 else f"{len(paths)} files from {paths[0]!r}"


# -- reading ahead -------------------------------------------------------------------------------


@contextmanager
def prefetched(source: Source, first_block: int = 0) -> Iterator[Iterator[Block]]:
    """Iterate over the blocks of a source from `first_block` on; a thread reads one block ahead."""
    # At most two blocks are in memory. An exception of the source follows the earlier blocks.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="splince_fast reader") as reader,
        closing(_read_ahead(reader, source, first_block)) as blocks,
    ):
        yield blocks


def _read_ahead(
    reader: ThreadPoolExecutor, source: Source, first_block: int
) -> Generator[Block, None, None]:
    blocks = source.iter_from(first_block)

    def read() -> Block | None:
        block = next(blocks, None)
        if block is None:
            return None
        return Block(*map(_copied, block)) if source.refills else _load_rows(block)

    pending = reader.submit(read)
    while (block := pending.result()) is not None:
        pending = reader.submit(read)
        yield block
        del block  # so that at most two blocks are in memory


def _copied(value: Any) -> Any:
    """Copy an array, tensor, frame or list, or the columns of a mapping."""
    if isinstance(value, Mapping):
        return {name: _copied(column) for name, column in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    copy = getattr(value, "copy", None) or getattr(value, "clone", None)
    return value if copy is None else copy()


def _load_rows(block: Block) -> Block:
    """Return the block with its rows in memory; a memory map is copied, as its file may change."""
    rows = block.X
    # np.array would drop the mask of a masked array. An array with one axis is an object array of
    # vectors.
    if not isinstance(rows, np.ndarray) or rows.ndim < 2 or np.ma.isMaskedArray(rows):
        return block
    owner: object = rows
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        return block._replace(X=np.array(rows, order="K"))
    # A library such as Arrow may have memory-mapped the rows, which cannot be detected. Reading one
    # number per memory page loads the pages from the disk.
    step = max(1, _PAGE_BYTES // rows.itemsize)
    (rows[:, ::step] if abs(rows.strides[1]) <= abs(rows.strides[0]) else rows[::step]).copy()
    return block
