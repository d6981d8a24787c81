"""The journal of a run: one fsynced JSON line per finished cell, exact to resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from splince_fast.exceptions import FileFormatError, InputError

_FILE = "cells.jsonl"


class Journal:
    """Finished cells by key, on disk where a folder is given.

    Parameters
    ----------
    folder : path or None
        Made where it is absent.
    fingerprint : str
        Of the data; a folder of other data is refused.

    Raises
    ------
    InputError
        The folder belongs to other data.
    FileFormatError
        A line other than the last is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, fingerprint: str) -> None:
        self.cells: dict[str, Any] = {}
        self.path: Path | None = None
        if folder is None:
            return
        self.path = Path(folder) / _FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = self.path.read_bytes() if self.path.exists() else b""
        whole = known[: known.rfind(b"\n") + 1]
        if len(whole) < len(known):  # a torn last line: the cell is computed again
            with open(self.path, "r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                if number == 1:
                    self._check(entry["data"], fingerprint)
                else:
                    self.cells[entry.pop("key")] = entry
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if isinstance(error, InputError):
                    raise
                raise FileFormatError(
                    f"line {number} of {self.path} is damaged; delete the file to start anew"
                ) from error
        if not whole:
            self._append([{"data": fingerprint}])

    def _check(self, known: str, fingerprint: str) -> None:
        if known != fingerprint:
            raise InputError(
                f"{self.path} holds a run over other data or other labels ({known}, not "
                f"{fingerprint}); name another folder for run="
            )

    def add(self, entries: dict[str, Any]) -> None:
        """Keep finished cells, on disk before this returns."""
        fresh = {key: entry for key, entry in entries.items() if key not in self.cells}
        self._append([{"key": key, **entry} for key, entry in fresh.items()])
        self.cells |= fresh

    def _append(self, entries: list[dict[str, Any]]) -> None:
        if self.path is None or not entries:
            return
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        with open(self.path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
