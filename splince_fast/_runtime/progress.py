"""One line on stderr: how far, how fast, how long."""

from __future__ import annotations

import shutil
import sys
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

_SECONDS_BETWEEN_LINES = 0.2


class Progress:
    """Show rows, rows/s, bytes/s and the time left in one line that rewrites itself.

    Parameters
    ----------
    total_rows, total_bytes : int, optional
        What there is to do; without either, no share and no time left is shown.
    label : str
        Begins the line.
    enabled : bool
        False shows nothing.
    stream : text stream, optional
        The default is ``sys.stderr``.
    force : bool
        Show also where the stream is no terminal, such as a log file.

    Examples
    --------
    >>> with Progress(1000, label="reading") as bar:
    ...     for _ in range(10):
    ...         bar.advance(100, 4096)
    """

    def __init__(
        self,
        total_rows: int | None = None,
        total_bytes: int | None = None,
        label: str = "",
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        force: bool = False,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled and self._stream is not None and (force or self._stream.isatty())
        self._total_rows = total_rows
        self._total_bytes = total_bytes
        self._label = f"{label}: " if label else ""
        self._skipped = 0
        self._rows = 0
        self._bytes = 0
        self._started = self._shown = monotonic()
        self._length = 0

    def __enter__(self) -> Self:
        self._started = self._shown = monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._enabled:
            self._show(monotonic(), ended=True)
            self._stream.write("\n")
            self._stream.flush()

    def skip(self, rows: int) -> None:
        """Count rows that were done earlier: they are part of the share but not of the speed.

        Parameters
        ----------
        rows : int
            Their number.
        """
        self._skipped += rows

    def advance(self, rows: int, nbytes: int = 0) -> None:
        """Count rows that are done now.

        Parameters
        ----------
        rows, nbytes : int
            Their number, and the bytes that were read for them.
        """
        self._rows += rows
        self._bytes += nbytes
        now = monotonic()
        if self._enabled and now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._show(now, ended=False)

    def _show(self, now: float, *, ended: bool) -> None:
        """Rewrite the line."""
        self._shown = now
        text = self._line(now - self._started, ended=ended)
        if self._stream.isatty():
            text = text[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r{text:<{self._length}}")
        self._stream.flush()
        self._length = len(text)

    def _line(self, seconds: float, *, ended: bool) -> str:
        """Write out where things stand."""
        done = self._skipped + self._rows
        text = f"{self._label}{done:,}"
        share = self._share(done)
        if self._total_rows is not None:
            text += f" / {self._total_rows:,}"
        text += " rows"
        if share is not None:
            text += f" ({share:.0%})"
        if seconds > 0:
            text += f", {self._rows / seconds:,.0f} rows/s, {_scaled(self._bytes / seconds)}/s"
        if ended:
            return f"{text}, {_clock(seconds)}"
        left = self._seconds_left(seconds)
        return text if left is None else f"{text}, {_clock(left)} left"

    def _share(self, done: int) -> float | None:
        """Fraction that is done, by rows if their number is known, else by bytes."""
        if self._total_rows is not None:
            return min(1.0, done / self._total_rows) if self._total_rows else 1.0
        return min(1.0, self._bytes / self._total_bytes) if self._total_bytes else None

    def _seconds_left(self, seconds: float) -> float | None:
        """Time left at the speed so far."""
        if self._total_rows is not None:
            left, speed = self._total_rows - self._skipped - self._rows, self._rows
        elif self._total_bytes is not None:
            left, speed = self._total_bytes - self._bytes, self._bytes
        else:
            return None
        return max(0, left) * seconds / speed if speed else None


def _scaled(nbytes: float) -> str:
    """Write bytes with a unit of 1000, as disks and networks are rated."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"


def _clock(seconds: float) -> str:
    """Write a duration as minutes and seconds, with hours where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
