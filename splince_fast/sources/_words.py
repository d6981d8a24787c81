"""Word vectors in text files (GloVe, fastText, word2vec) and binary files (word2vec), in blocks."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import require
from splince_fast._runtime.rows import cause_text, choose_block_rows
from splince_fast.exceptions import InputError
from splince_fast.sources.base import Block, Source, as_paths, describe_files, too_few_blocks

Words = tuple[list[str], NDArray[np.float32]]  # the words and the vectors of a block
Labels = Mapping[str, Mapping[str, Any]]  # for each variable, the labels by word

_CHUNK_BYTES = 1 << 20  # binary files are read in chunks of this size
_LINE_END = b" \r\n"  # word2vec and fastText write a space after the last number


def from_word_vectors(
    paths: object, labels: Labels | None = None, *, block_rows: int | None = None
) -> Source:
    """Return a source of the word vectors of text files or binary files.

    Parameters
    ----------
    paths : path or sequence of paths
        Files, read in this order: ``.txt`` (GloVe; a header "n d" is optional), ``.vec`` (fastText
        and word2vec as text, with a header) and ``.bin`` (word2vec), each also with ``.gz``. Text
        needs polars, from the extra "words". Blocks do not cross files.
    labels : mapping of str to mapping, optional
        For each variable, the labels by word; of a pandas frame whose index are the words,
        ``frame.to_dict()`` makes it. Labels of words without one are missing: their rows count for
        the covariance of the rows.
    block_rows : int, optional
        As for :func:`from_arrays`.

    Returns
    -------
    Source
        Blocks are float32. The number of rows is unknown for a file without a header. Resuming
        skips earlier rows without parsing them.

    Raises
    ------
    InputError
        A file has no valid header or first row, files differ in width, or `labels` is of another
        form. During reading: a row is not a word in UTF-8 without spaces and d finite numbers (the
        message names the line), or a file has another number of rows than in its header.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from splince_fast import sources
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "vectors.txt"
    >>> _ = path.write_text("king 1 0.5\\nqueen -1 0.5\\nand 0 0.25\\n")
    >>> (block,) = sources.from_word_vectors(path, {"gender": {"king": "m", "queen": "f"}})
    >>> block.X.tolist(), block.labels["gender"]
    ([[1.0, 0.5], [-1.0, 0.5], [0.0, 0.25]], ['m', 'f', None])
    """
    columns = labels.values() if isinstance(labels, Mapping) else [labels]
    if labels is not None and not all(isinstance(column, Mapping) for column in columns):
        raise InputError(
            "labels of word vectors are {variable: {word: label}}; frame.to_dict() makes this of a "
            "pandas frame whose index are the words"
        )
    return _WordSource([WordFile(path) for path in as_paths(paths, "paths")], labels, block_rows)


class _WordSource(Source):
    def __init__(
        self, word_files: Sequence[WordFile], labels: Labels | None, block_rows: int | None
    ) -> None:
        d, counts = word_files[0].width, [file.n_rows for file in word_files]
        for file in word_files:
            if file.width != d:
                raise InputError(
                    f"{file.path!r} has {file.width} numbers per word and {word_files[0].path!r} "
                    f"has {d}; all must agree"
                )
        self._size, self._labels = choose_block_rows(block_rows, d, 4), labels
        self._word_files = word_files
        n = None if None in counts else sum(filter(None, counts))
        files = tuple(file.path for file in word_files)
        name = f"{describe_files(files)} in blocks of {self._size} rows"
        super().__init__(name, n_rows=n, n_features=d, nbytes=None if n is None else 4 * n * d)
        self.files = files

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Yield the blocks from number `first_block` onwards; see :meth:`Source.iter_from`."""
        blocks = ((f, block) for f in self._word_files for block in f.unparsed(self._size))
        for number in range(first_block):
            if next(blocks, None) is None:
                raise too_few_blocks(self.name, first_block, number)
        for file, block in blocks:
            words, X = file.parse(*block)
            yield Block(X, labels_of(words, self._labels))


def labels_of(words: Sequence[str], labels: Labels | None) -> dict[str, list[Any]] | None:
    """Return the column of each variable; a missing label is NaN among floats, and None else."""
    columns = {}
    for name, by_word in (labels or {}).items():
        label = next((label for label in by_word.values() if label is not None), None)
        # A column of None alone would be one of classes.
        missing = np.nan if isinstance(label, float | np.floating) else None
        columns[name] = [by_word.get(word, missing) for word in words]
    return columns or None


class WordFile:
    """A file of word vectors, whose header or first row has been read."""

    def __init__(self, path: str) -> None:
        self.path = path
        suffix = Path(path.removesuffix(".gz")).suffix
        self.is_binary = suffix == ".bin"
        with self._opened() as file:
            line = file.readline().rstrip(_LINE_END)
        header = re.fullmatch(rb"(\d{1,15}) ([1-9]\d{0,8})", line)
        self.n_rows = int(header[1]) if header else None
        self.width = int(header[2]) if header else line.count(b" ")
        if not self.width or (header is None and suffix != ".txt"):
            expected = "a word and its numbers" if suffix == ".txt" else "the header 'n d'"
            raise InputError(
                f"line 1 of {path!r} is {line[:20]!r}, and should be {expected}; the file may be "
                "empty or of another format"
            )

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        try:
            with (gzip.open if self.path.endswith(".gz") else open)(self.path, "rb") as file:
                yield file  # type: ignore[misc]
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{self.path!r} cannot be read: {cause_text(error)}") from error

    def _row_name(self, row: int) -> str:
        """Name a row in messages; lines of text count from 1, and include the header."""
        number = row if self.is_binary else row + 1 + (self.n_rows is not None)
        return f"{'row' if self.is_binary else 'line'} {number} of {self.path!r}"

    def unparsed(self, block_rows: int | None = None) -> Iterator[tuple[int, list[bytes]]]:
        """Yield blocks as the number of the first row, and the bytes of each row."""
        n, size = 0, choose_block_rows(block_rows, self.width, 4)
        with self._opened() as file:
            if self.n_rows is not None:
                file.readline()
            rows = self._binary_rows(file) if self.is_binary else iter(file)
            while block := list(islice(rows, size)):
                yield n, block
                n += len(block)
        if self.n_rows not in (None, n):
            raise InputError(
                f"{self.path!r} has {n:,} rows, and {self.n_rows:,} in its header; copy the file "
                "again, or correct the header"
            )

    def _binary_rows(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the word, a space and the vector of each row."""
        buffer, position, row = b"", 0, 0
        while True:
            space = buffer.find(b" ", position)
            stop = space + 1 + 4 * self.width
            if space >= 0 and stop <= len(buffer):
                yield buffer[position + (buffer[position] == 10) : stop]  # after a line feed
                position, row = stop, row + 1
                continue
            if not (chunk := file.read(_CHUNK_BYTES)):
                break
            buffer, position = buffer[position:] + chunk, 0
        if buffer[position:].strip(b"\n"):
            raise InputError(f"{self._row_name(row)} is truncated; copy the file again")

    def end_blocks(self) -> list[Words]:
        """Return the first and the last block; the only one once."""
        blocks = self.unparsed()
        return [self.parse(*block) for block in (*islice(blocks, 1), *deque(blocks, 1))]

    def parse(self, start: int, rows: list[bytes]) -> Words:
        """Return the words and vectors of rows from number `start` on; all must be finite."""
        try:
            words, X = (_parse_binary if self.is_binary else _parse_text)(rows, self.width)
            if len(X) == len(rows) and np.isfinite(X).all():
                return words, X
        except ValueError:  # of the decoding or of polars: the search below names the row
            pass
        if middle := len(rows) // 2:
            self.parse(start, rows[:middle])
            self.parse(start + middle, rows[middle:])
        fields = "" if self.is_binary else f" (of {rows[0].count(b' ') + 1} fields)"
        raise InputError(
            f"{self._row_name(start)}, {rows[0][:20]!r}...{fields}, is not a word (UTF-8, no "
            f"spaces) before {self.width} finite numbers; remove it, or write the file again"
        )


def _parse_binary(rows: list[bytes], width: int) -> Words:
    vectors = np.frombuffer(b"".join([row[-4 * width :] for row in rows]), "<f4")
    return [row[: -4 * width - 1].decode() for row in rows], vectors.reshape(-1, width)


def _parse_text(rows: list[bytes], width: int) -> Words:
    polars = require("polars", "words")
    if any(row.endswith((b" \n", b"\r\n", b" ", b"\r")) for row in rows):
        rows = [row.rstrip(_LINE_END) + b"\n" for row in rows]
    try:
        frame = polars.read_csv(
            b"".join(rows),
            schema={"word": polars.String, **dict.fromkeys(map(str, range(width)), polars.Float32)},
            has_header=False, separator=" ", quote_char=None,
        )  # fmt: skip
    except polars.exceptions.PolarsError as error:
        raise ValueError(str(error)) from error
    # A missing number is NaN.
    return frame["word"].fill_null("").to_list(), frame.drop("word").to_numpy(order="c")


def write_words(path: Path, blocks: Iterable[Words], layout: WordFile, *, compressed: bool) -> int:
    """Write a file in the layout of another one, and return its number of rows."""
    n = 0
    with gzip.open(path, "wb", 6) if compressed else open(path, "wb") as file:
        if layout.n_rows is not None:
            file.write(b"%d %d\n" % (layout.n_rows, layout.width))
        for words, X in blocks:
            if layout.is_binary:
                pairs = zip(words, X.astype("<f4", copy=False), strict=True)
                file.write(b"".join([word.encode() + b" " + row.tobytes() for word, row in pairs]))
            else:  # the digits of a number are the fewest that give the same float32
                polars = require("polars", "words")
                frame = polars.from_numpy(X).insert_column(0, polars.Series("word", words))
                frame.write_csv(file, include_header=False, separator=" ", quote_style="never")
            n += len(words)
    return n
