"""Accumulation of a source in blocks, with prefetching, progress and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from splince_fast._runtime.files import as_path
from splince_fast._runtime.lock import Deferred
from splince_fast._runtime.progress import Progress
from splince_fast._solve.options import is_number
from splince_fast.exceptions import FileFormatError, InputError
from splince_fast.sources.base import Block, Source, prefetched


def accumulate(
    source: Source,
    empty: Any,  # `splince_fast.Moments` or `Folds`, whose module imports this one
    *,
    progress: bool | None,
    checkpoint: str | os.PathLike[str] | None,
    checkpoint_seconds: float,
) -> Any:
    """Add a source to `empty` and return the sum; see :meth:`splince_fast.Moments.from_blocks`."""
    if not is_number(checkpoint_seconds) or not checkpoint_seconds >= 0:
        raise InputError(
            f"checkpoint_seconds is {checkpoint_seconds!r}; it must be a number of at least 0"
        )
    run = Run(source, empty, checkpoint)
    last_write = time.monotonic()
    with Progress(source.n_rows, show=progress) as bar:
        bar.skip(run.target.n_rows)
        try:
            with prefetched(source, run.position) as blocks:
                for block in blocks:
                    run.add(block)
                    bar.advance(int(block.X.shape[0]), getattr(block.X, "nbytes", 0))
                    if time.monotonic() - last_write >= checkpoint_seconds:
                        run.write()
                        last_write = time.monotonic()
        except BaseException as error:
            # After an error of the source or Ctrl-C, write a checkpoint.
            try:
                if run.position:
                    run.write()
            except OSError as failure:
                error.add_note(f"the checkpoint could not be written either: {failure}")
            raise
    run.write()
    return run.target


class Run:
    """The sums of the blocks of a source before a position, and their checkpoint."""

    def __init__(
        self, source: Source, empty: Any, checkpoint: str | os.PathLike[str] | None
    ) -> None:
        self.target = empty
        self.position = 0  # number of blocks that were added to the target
        self._written: int | None = None  # position of the checkpoint
        # The variables of the checkpoint, until the first block after it has the same ones.
        self._expected: set[Any] = set()
        self._path = None if checkpoint is None else os.fspath(as_path(checkpoint))
        if self._path is None:
            return
        # Read the stamps before the data, so that a later change of a file is detected.
        shape = {name: getattr(source, name) for name in ("name", "n_rows", "n_features")}
        self._origin = {"source": shape, "files": _file_stamps(source.files)}
        if os.path.exists(self._path):
            self._resume(self._path)

    def _resume(self, path: str) -> None:
        """Set the target and the position to those of a checkpoint of the same data."""
        target, stream = self.target._read_checkpoint(path)
        if not isinstance(stream, dict) or target._arguments() != self.target._arguments():
            raise _mismatch(path, "it was written with other parameters, or without a source")
        position, stored = stream.get("position"), stream.get("files")
        if type(position) is not int or position < 0 or not isinstance(stored, list):
            raise _mismatch(path, "it has no valid position in a source")
        if stream.get("source") != self._origin["source"]:
            raise _mismatch(path, f"it was written for {stream.get('source')}")
        for then, now in zip(stored, self._origin["files"], strict=False):
            if then != now and isinstance(then, list) and then[:1] == now[:1]:
                raise _mismatch(path, f"the file {now[0]} has changed since")
        if stored != self._origin["files"]:
            raise _mismatch(path, "it was written for other files, or for another order of files")
        self.target, self.position, self._written = target, position, position
        self._expected = set(target.variables)

    def add(self, block: Block) -> None:
        """Add a block to the target and advance the position; Ctrl-C is deferred to the end."""
        with Deferred():
            self.target.update(block.X, block.labels, sample_weight=block.sample_weight)
            if self._expected and (added := self.target.variables.keys() - self._expected):
                raise FileFormatError(
                    f"the checkpoint {self._path} has the variables {list(self._expected)}, and "
                    f"the data also have {list(added)}; pass the same labels, delete the "
                    "checkpoint, or pass another path"
                )
            self._expected = set()
            self.position += 1

    def write(self) -> None:
        if self._path is None or self.position == self._written:
            return
        self._written = self.position  # a write that fails is not repeated after the error
        stream = {**self._origin, "position": self.position}
        self.target._write_checkpoint(self._path, stream)


def _mismatch(path: str, reason: str) -> FileFormatError:
    return FileFormatError(
        f"the checkpoint {path} belongs to another source, other data or other parameters: "
        f"{reason}; delete the checkpoint, or pass another path"
    )


def _file_stamps(paths: Iterable[str]) -> list[list[str | int]]:
    """Return the path, the size (bytes) and the modification time (ns) of each file."""
    stats = ((os.fspath(path), os.stat(path)) for path in paths)
    return [[path, status.st_size, status.st_mtime_ns] for path, status in stats]
