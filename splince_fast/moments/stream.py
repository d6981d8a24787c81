"""Accumulation of a source in blocks, with prefetching, progress and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

from splince_fast._runtime.files import as_path
from splince_fast._runtime.lock import Deferred
from splince_fast._runtime.progress import Progress
from splince_fast._solve.options import is_number
from splince_fast.exceptions import FileFormatError, InputError
from splince_fast.labels import VariableName, encode
from splince_fast.moments.digest import block_digest, file_stamps
from splince_fast.moments.parameters import Parameters
from splince_fast.sources._prefetch import prefetched
from splince_fast.sources.base import Block, Source, StreamSource, as_source

Path = str | os.PathLike[str]


class Target(Protocol):
    """The object to which a stream is added: `Moments` or `Folds`."""

    @property
    def n_rows(self) -> int: ...

    @property
    def parameters(self) -> Parameters: ...

    @property
    def variables(self) -> Mapping[VariableName, str]: ...

    def update(self, X: object, labels: object = None, *, sample_weight: object = None) -> Any: ...

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of an empty target with the same parameters, as JSON values."""

    def _write_checkpoint(self, path: Path, stream: dict[str, object]) -> None: ...

    def _read_checkpoint(self, path: Path) -> tuple[Any, Any]:
        """Return the target and the entry `stream` of a checkpoint, or raise FileFormatError."""


T = TypeVar("T", bound=Target)


def accumulate(
    blocks: Any,
    empty: T,
    *,
    progress: bool | None,
    checkpoint: Path | None,
    checkpoint_seconds: float,
    client: object = None,
) -> T:
    """Add a source to `empty` and return the sum; see :meth:`splince_fast.Moments.from_blocks`."""
    if not is_number(checkpoint_seconds) or not checkpoint_seconds >= 0:
        raise InputError(
            f"checkpoint_seconds is {checkpoint_seconds!r}; it must be a number of at least 0"
        )
    source = as_source(blocks)
    if client is not None:
        from splince_fast.moments import cluster

        cluster.check(client, source)
    if checkpoint is None:
        run = Run(source, empty, None, None)
    else:
        checkpoint = as_path(checkpoint)
        run = Run(source, *_resumed(source, empty, checkpoint), os.fspath(checkpoint))
    last_write = time.monotonic()

    def write_if_due() -> None:
        nonlocal last_write
        if checkpoint is not None and time.monotonic() - last_write >= checkpoint_seconds:
            run.write()
            last_write = time.monotonic()

    with Progress(source.n_rows, show=progress) as bar:
        bar.skip(run.target.n_rows)
        try:
            if client is not None:
                run.check_position()
                cluster.add_remaining(run, source, client, bar, write_if_due)
            else:
                with prefetched(source, run.first_block) as reader:
                    for block in run.remaining(reader):
                        run.add(block)
                        bar.advance(int(block.X.shape[0]), getattr(block.X, "nbytes", 0))
                        write_if_due()
        except BaseException as error:
            # After an error of the source or Ctrl-C, write a checkpoint.
            if checkpoint is not None and run.unwritten:
                try:
                    run.write()
                except OSError as failure:
                    error.add_note(f"the checkpoint could not be written either: {failure}")
            raise
    if checkpoint is not None and (run.unwritten or not run.position):
        run.write()
    return cast(T, run.target)


def _identity(source: Source) -> dict[str, Any]:
    return {"name": source.name, "n_rows": source.n_rows, "n_features": source.n_features}


def _resumed(source: Source, empty: T, checkpoint: Path) -> tuple[T, dict[str, Any] | None]:
    """Return the target and the entry `stream` of a checkpoint; `empty` and None without a file."""
    path = os.fspath(checkpoint)
    if not os.path.exists(path):
        return empty, None
    target, stream = empty._read_checkpoint(path)
    if stream is None or target._arguments() != empty._arguments():
        raise _mismatch(path, "it was written with other parameters, or without a source")
    _check_stream(path, stream)
    if stream["source"] != _identity(source):
        raise _mismatch(path, f"it was written for {stream['source']}")
    stamps, stored = file_stamps(source.files), stream.get("files", [])
    if [name for name, *_ in stored] != [name for name, *_ in stamps]:
        raise _mismatch(path, "it was written for other files, or for another order of files")
    for before, now in zip(stored, stamps, strict=True):
        if before != now:
            raise _mismatch(path, f"the file {now[0]} has changed since")
    return target, stream


def _mismatch(path: str, reason: str) -> FileFormatError:
    return FileFormatError(
        f"the checkpoint {path} belongs to another source, other data or other parameters: "
        f"{reason}; delete the checkpoint, or pass another path"
    )


def _check_stream(path: str, stream: Any) -> None:
    """Raise FileFormatError unless `stream` has the form that `Run.write` writes."""
    valid = isinstance(stream, dict) and isinstance(stream.get("source"), dict)
    if valid:
        position = stream.get("position")
        valid = isinstance(position, int) and not isinstance(position, bool) and position >= 0
        digests = (stream.get("first", ""), stream.get("last", ""))
        valid = valid and all(isinstance(digest, str) for digest in digests)
        files = stream.get("files", [])
        valid = valid and isinstance(files, list)
        valid = valid and all(isinstance(stamp, list) and stamp for stamp in files)
    if not valid:
        raise FileFormatError(
            f"the checkpoint {path} has no valid position in its source: the file was edited, "
            "damaged, or written by an earlier version; delete the file"
        )


class Run:
    """Accumulation of a stream up to a position, and its checkpoint."""

    def __init__(
        self, source: Source, target: Any, stream: dict[str, Any] | None, checkpoint: str | None
    ) -> None:
        self.target = target
        self._source = source
        self._checkpoint = checkpoint
        # Read the stamps before the data, so that a later change of a file is detected.
        self._files = [] if checkpoint is None else file_stamps(source.files)
        stream = stream or {"position": 0}
        self.position: int = stream["position"]  # number of blocks that were added to the target
        self._written_position = self.position if self.position else -1
        self._first_digest: str = stream.get("first", "")
        self._last_digest: str = stream.get("last", "")
        self._last_block: Block | None = None
        self._variables = set(target.variables)
        # The variable `groups` of `Folds` is in the labels, but is not accumulated.
        self._not_accumulated = {target._arguments().get("groups")}
        is_stream = isinstance(source, StreamSource)
        # Number of the first block to read. A resumed run reads the last added block again, to
        # compare it with the checkpoint. A `StreamSource` is read from its beginning.
        self.first_block = 0 if is_stream else max(0, self.position - 1)
        if self.position > 1 and not is_stream and self._first_digest:
            self._compare(next(iter(source.iter_from(0)), None), self._first_digest, 0)

    @property
    def unwritten(self) -> bool:
        return self.position > max(0, self._written_position)

    def remaining(self, reader: Iterator[Block]) -> Iterator[Block]:
        """Yield the blocks from `position` on."""
        # The last block before `position`, and block 0 if `reader` yields it, are compared with
        # their digests in the checkpoint.
        number = self.first_block
        for block in reader:
            if number == 0 and self.position:
                self._compare(block, self._first_digest, 0)
            if number == self.position - 1:
                self._compare(block, self._last_digest, number)
            if number == self.position and number and self._variables:
                self._check_variables(block)
            number += 1
            if number > self.position:
                yield block
        if number < self.position:
            raise InputError(
                f"{self._source.name} has only {number} blocks, and the checkpoint resumes at "
                f"block {self.position}: the data or the number of rows per block have changed; "
                "pass the source of the first run, or delete the checkpoint"
            )

    def add(self, block: Block) -> None:
        """Add a block to the target and advance the position; Ctrl-C is deferred to the end."""
        with Deferred():
            self.target.update(block.X, block.labels, sample_weight=block.sample_weight)
            if not self.position and self._checkpoint is not None:
                self._first_digest = self._digest(block)
            self.position += 1
            self._last_block = block

    def add_state(self, state: Any, position: int, first: str, last: str) -> None:
        """Add the state of the blocks before `position`; `first` and `last` are block digests."""
        with Deferred():
            self.target += state
            self.position, self._last_digest, self._last_block = position, last, None
            self._first_digest = self._first_digest or first

    def check_position(self) -> None:
        """Raise FileFormatError if the blocks next to the position contradict the checkpoint."""
        if self.position:
            next(self.remaining(islice(self._source.iter_from(self.first_block), 2)), None)

    @property
    def writes_checkpoint(self) -> bool:
        return self._checkpoint is not None

    def write(self) -> None:
        """Write the target and the position to the checkpoint, if there is one."""
        if self._checkpoint is None:
            return
        if self._last_block is not None:
            self._last_digest = self._digest(self._last_block)
        self._written_position = self.position
        self.target._write_checkpoint(
            self._checkpoint,
            {
                "source": _identity(self._source),
                "position": self.position,
                "first": self._first_digest,
                "last": self._last_digest,
                "files": self._files,
            },
        )

    def _digest(self, block: Block) -> str:
        return block_digest(block.X, block.labels, block.sample_weight, self.target.parameters)

    def _compare(self, block: Block | None, digest: str, number: int) -> None:
        """Raise FileFormatError unless a block has the digest that the checkpoint states."""
        if block is not None and self._variables:
            self._check_variables(block)
        if digest and (block is None or self._digest(block) != digest):
            raise _mismatch(
                str(self._checkpoint), f"block {number} differs from the block that was accumulated"
            )

    def _check_variables(self, block: Block) -> None:
        """Raise FileFormatError if a block has a variable that the checkpoint does not have."""
        parameters = self.target.parameters
        variables = encode(
            block.labels,
            int(block.X.shape[0]),
            kinds=parameters.kinds or None,
            joint=parameters.joint,
        )
        expected = self._variables | self._not_accumulated
        unexpected = [name for name in variables if name not in expected]
        if unexpected:
            raise FileFormatError(
                f"the checkpoint {self._checkpoint} has the variables {list(self._variables)}, and "
                f"the data also have {unexpected}; pass the same labels, delete the checkpoint, or "
                "pass another path"
            )
