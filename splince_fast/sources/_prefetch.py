"""Prefetching: a thread reads the next block while the caller uses the current one."""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.sources.base import Block, Source

_PAGE_BYTES = 4096


@contextmanager
def prefetched(source: Source, first_block: int = 0) -> Iterator[Iterator[Block]]:
    """Iterate over the blocks of a source from `first_block` on; a thread reads one block ahead.

    The thread copies rows of a memory map. The disk is thus read while the caller uses the current
    block, and a block remains valid if its file changes. It also copies the blocks of a source with
    ``refills``. At most two blocks are in memory, besides the arrays that are refilled. If the
    source raises an exception, the caller first gets all earlier blocks, then the exception with
    its original traceback. On exit, the context waits until the thread has read its current block.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import sources
    >>> with prefetched(sources.from_arrays(np.ones((5, 2)), block_rows=2)) as blocks:
    ...     [len(block.X) for block in blocks]
    [2, 2, 1]
    """
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
    """Return the block with its rows in memory; a memory map is copied."""
    rows = block.X
    # np.array would drop the mask of a masked array. An array with one axis is an object array of
    # vectors.
    if not isinstance(rows, np.ndarray) or rows.ndim < 2 or np.ma.isMaskedArray(rows):
        return block
    if _is_mapped(rows):
        return block._replace(X=np.array(rows, order="K"))
    # A library such as Arrow may have memory-mapped the rows, which cannot be detected. Reading one
    # number per memory page loads the pages from the disk.
    step = max(1, _PAGE_BYTES // rows.itemsize)
    (rows[:, ::step] if abs(rows.strides[1]) <= abs(rows.strides[0]) else rows[::step]).copy()
    return block


def _is_mapped(array: NDArray[np.generic]) -> bool:
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, mmap.mmap)
