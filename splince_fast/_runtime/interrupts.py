"""Deferral of KeyboardInterrupt until a block of code has finished."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_set: Callable[[int, Any], Any] = signal.signal
_get: Callable[[int], Any] = signal.getsignal
with contextlib.suppress(ImportError, AttributeError):
    # The C functions create no enumeration members. This is measurable in updates of single rows.
    _raw: Any = importlib.import_module("_signal")
    _set, _get = _raw.signal, _raw.getsignal
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread().ident


def _note_main_thread() -> None:
    """Record the main thread of a forked child, which is the thread that forked."""
    global _main
    _main = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_main_thread)


class Deferred:
    """Defer KeyboardInterrupt inside a ``with`` block and raise it when the block ends.

    Python raises it in the main thread only. In other threads, and where the host program handles
    SIGINT outside Python, the block runs unchanged. A lock that is acquired and released inside
    the block is never left locked.
    """

    __slots__ = ("_caught", "_handler")

    def __enter__(self) -> None:
        self._caught: tuple[int, FrameType | None] | None = None
        self._handler: Callable[..., Any] | None = None
        if threading.get_ident() == _main:
            handler = _get(_SIGINT)
            if callable(handler):
                # Stored before the replacement, because an interrupt may come between the two.
                self._handler = handler
                _set(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            _set(_SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)
