"""Ctrl-C between two steps that belong together waits until both are done."""

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
    # The C functions beneath, which turn no numbers into enumerations: every update, of a single
    # row too, passes here.
    _raw: Any = importlib.import_module("_signal")
    _set, _get = _raw.signal, _raw.getsignal
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread().ident


def _note_main_thread() -> None:
    """The thread that forked is the main thread of the child."""
    global _main
    _main = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_main_thread)


class Deferred:
    """Hold back KeyboardInterrupt inside a ``with`` block and deliver it afterwards.

    Python raises it in the main thread alone; elsewhere, and where the host program handles
    SIGINT outside Python, there is nothing to hold back. From the replacement of the handler to
    its restoration nothing is raised between two steps, so that a lock which is taken and released
    inside the block is never left behind.
    """

    __slots__ = ("_caught", "_handler")

    def __enter__(self) -> None:
        self._caught: tuple[int, FrameType | None] | None = None
        self._handler: Callable[..., Any] | None = None
        if threading.get_ident() == _main:
            handler = _get(_SIGINT)
            if callable(handler):
                # Known before it is replaced: an interrupt between the two finds it.
                self._handler = handler
                _set(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            _set(_SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)
