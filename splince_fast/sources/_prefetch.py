"""Read ahead: a thread reads the next block while the current one is used."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError
from splince_fast.sources.base import Block, Source

# Item of the queue: a block, an exception of the reader, or None at the end.
_Message: TypeAlias = Block | BaseException | None

_PAGE_BYTES = 4096


@contextmanager
def prefetched(source: Source, first_block: int = 0, depth: int = 1) -> Iterator[Iterator[Block]]:
    """Give the blocks of a source, read `depth` blocks ahead by a thread.

    Rows that lie in a memory-mapped file are copied by that thread, so that the disk is read
    while the current block is used, and a block stays valid whatever happens to its file.

    Parameters
    ----------
    source : Source
        Where the rows come from.
    first_block : int
        Number of the block to begin with.
    depth : int
        Blocks read ahead; with the one in use, at most ``depth + 1`` are alive.

    Yields
    ------
    iterator of Block
        In order. An exception of the source is raised here, with its own traceback. Leaving the
        context stops the thread and waits until the block that it is reading is done.

    Raises
    ------
    InputError
        `depth` is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import sources
    >>> with prefetched(sources.from_arrays(np.ones((5, 2)), block_rows=2)) as blocks:
    ...     [len(block.X) for block in blocks]
    [2, 2, 1]
    """
    if not isinstance(depth, int) or depth < 1:
        raise InputError(f"depth is {depth!r}; at least 1 block must be read ahead")
    ready: SimpleQueue[_Message] = SimpleQueue()
    room = threading.Semaphore(depth)
    stop = threading.Event()
    reader = threading.Thread(
        target=_read,
        args=(source, first_block, ready, room, stop),
        name="splince_fast reader",
        daemon=True,
    )
    reader.start()
    try:
        yield _received(ready, room)
    finally:
        stop.set()
        room.release()
        reader.join()


def _read(
    source: Source,
    first_block: int,
    ready: SimpleQueue[_Message],
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    """Read blocks, each when there is room for it; the body of the thread."""
    try:
        blocks = source.iter_from(first_block)
        while True:
            room.acquire()
            if stop.is_set():
                return
            block = next(blocks, None)
            ready.put(None if block is None else _in_memory(block))
            if block is None:
                return
            del block  # else it would stay alive while the next one is read
    except BaseException as error:
        ready.put(error)


def _received(ready: SimpleQueue[_Message], room: threading.Semaphore) -> Iterator[Block]:
    """Yield what the thread has read."""
    while isinstance(message := ready.get(), Block):
        room.release()
        yield message
        del message
    if message is not None:
        raise message


def _in_memory(block: Block) -> Block:
    """Copy rows that are mapped from a file; touch the pages of others, which may be mapped too."""
    rows = block.X
    if not isinstance(rows, np.ndarray):
        return block
    if _is_mapped(rows):
        return block._replace(X=np.array(rows, order="K"))
    # A library's own map, such as Arrow's, cannot be told from memory; this costs little for both.
    step = max(1, _PAGE_BYTES // rows.itemsize)
    (rows[:, ::step] if abs(rows.strides[1]) <= abs(rows.strides[0]) else rows[::step]).copy()
    return block


def _is_mapped(array: NDArray[np.generic]) -> bool:
    """Say whether an array is a view of a map that Python made."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, mmap.mmap)
