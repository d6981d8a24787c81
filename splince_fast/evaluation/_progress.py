"""Finished jobs and the time left, on stderr."""

from __future__ import annotations

import sys
import time


class Bar:
    """Finished jobs and the time left, on stderr."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self.total, self.done = total, 0
        self.enabled = enabled and total > 0
        self.started = time.monotonic()

    def __enter__(self) -> Bar:
        self._show()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.enabled:
            sys.stderr.write("\n")
            sys.stderr.flush()

    def advance(self) -> None:
        """Count a job."""
        self.done += 1
        self._show()

    def _show(self) -> None:
        if not self.enabled:
            return
        seconds = time.monotonic() - self.started
        text = f"\r{self.done} / {self.total} jobs, {seconds:.0f} s"
        if 0 < self.done < self.total:
            text += f", {seconds * (self.total - self.done) / self.done:.0f} s left"
        sys.stderr.write(f"{text:<50}")
        sys.stderr.flush()
