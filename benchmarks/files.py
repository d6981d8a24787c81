"""Files: states, erasers, and rows that are read from disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks import _asv, _data
from benchmarks._sizes import pick


class _InFolder(_asv.Suite):
    """A folder of its own for every combination of parameters."""

    def setup(self, *parameters: Any) -> None:
        super().setup(*parameters)
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "file"

    def teardown(self, *parameters: Any) -> None:
        self.folder.cleanup()


class RoundTrip(_InFolder):
    """Save and load of moments and of erasers."""

    params = (pick([768, 4096], [16]), ["moments", "eraser"])
    param_names = ("d", "kind")

    def setup(self, d: int, kind: str) -> None:
        super().setup()
        moments = _data.problem(pick(8192, 128), d).moments()
        self.thing: Any = moments if kind == "moments" else sf.leace(moments, erase="z")
        self.thing.save(self.path)

    def time_save(self, d: int, kind: str) -> None:
        self.thing.save(self.path)

    def time_load(self, d: int, kind: str) -> None:
        type(self.thing).load(self.path)

    def track_bytes(self, d: int, kind: str) -> int:
        return self.path.stat().st_size

    track_bytes.unit = "bytes"  # type: ignore[attr-defined]


class Sources(_InFolder):
    """`Moments.from_blocks` over a mapped file and over an array."""

    params = (["npy", "array"],)
    param_names = ("source",)

    def setup(self, source: str) -> None:
        super().setup()
        data = _data.problem(pick(32_768, 256), pick(1024, 16))
        path = self.path.with_suffix(".npy")
        np.save(path, data.X)
        self.source = (
            sf.sources.from_npy(path, data.labels)
            if source == "npy"
            else sf.sources.from_arrays(data.X, data.labels)
        )
        self.time_from_blocks(source)

    def time_from_blocks(self, source: str) -> None:
        sf.Moments.from_blocks(self.source)

    def peakmem_from_blocks(self, source: str) -> None:
        sf.Moments.from_blocks(self.source)
