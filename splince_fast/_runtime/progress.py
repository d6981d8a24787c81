"""Progress bars on stderr, drawn by tqdm."""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import Any, Self

# Delay of the bar if show=None; the documentation of `progress` states the same number.
_DELAY_SECONDS = 2.0


class Progress:
    """Progress bar with rate and remaining time.

    With show=None it is shown on terminals and in notebooks, if the work lasts over two seconds.
    """

    def __init__(
        self,
        total: int | None = None,
        label: str = "",
        *,
        show: bool | None = None,
        unit: str = "rows",
    ) -> None:
        self._bar: Any = None
        self._bytes = 0
        if sys.stderr is not None and (is_interactive() if show is None else show):
            self._bar = _bar_class()(
                total=total, desc=label or None, unit=f" {unit}", unit_scale=True, file=sys.stderr,
                dynamic_ncols=True, delay=0 if show else _DELAY_SECONDS,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def skip(self, amount: int) -> None:
        """Count `amount` as work of an earlier run, which does not enter the rate."""
        if self._bar is not None:
            self._bar.initial += amount
            self._bar.n += amount

    def advance(self, amount: int, nbytes: int = 0) -> None:
        """Add finished work, and the bytes that were read for it."""
        if self._bar is None:
            return
        self._bytes += nbytes
        seconds = self._bar.format_dict["elapsed"]
        if nbytes and seconds:
            rate = self._bar.format_sizeof(self._bytes / seconds)
            self._bar.set_postfix_str(f"{rate}B/s", refresh=False)
        self._bar.update(amount)


def is_interactive() -> bool:
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)


@cache
def _bar_class() -> Any:
    """Return a subclass of tqdm without a monitor thread and without a lock across processes."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar
