"""Targets of accumulation: rates, streams of few rows, accuracy, files."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import _memory, _peers, _reference
from benchmarks._data import Problem, problem
from benchmarks._rows import Row, at_least, at_most, exactly
from benchmarks._sizes import pick, smoke
from benchmarks._timing import Contender, Timing, interleave, ratio

BLOCK = 4096
SYRK = "bare SYRK"


def _problem(d: int, dtype: str, classes: int = 2) -> Problem:
    """Four blocks, two where rows are wide; more than the caches hold."""
    return problem(pick(4 if d < 4096 else 2, 1) * _block(), d, dtype, classes=classes)


def _block() -> int:
    return pick(BLOCK, 128)


def rates() -> Iterator[Row]:
    """`Moments.update` against the floor and against its peers."""
    for dtype in ("float32", "float64"):
        for d in pick([768, 2048, 4096], [24, 32]):
            data = _problem(d, dtype)
            contenders: dict[str, Contender | _peers.Absent] = {
                _peers.OURS: _peers.accumulate_ours(data, _block()),
                SYRK: _peers.accumulate_syrk(data, _block()),
                "oneDAL": _peers.accumulate_onedal(data, _block()),
            }
            if dtype == "float32":
                contenders |= _concept_erasure(data)
            present, missing = _peers.split(contenders)
            timings = interleave(present)
            where = f"d = {d}, {dtype}"
            yield _against(
                f"rate against bare SYRK, {where}", 0.75 if d == 768 else 0.85, timings, SYRK
            )
            if dtype == "float32":
                yield _against(
                    f"against concept-erasure, {where}", 2.0, timings, "CE float32", missing
                )
                yield _against(
                    f"against concept-erasure with float64 statistics, {where}",
                    3.5, timings, "CE float64", missing,
                )  # fmt: skip
            yield _against(f"against oneDAL, {where}", 1.2, timings, "oneDAL", missing)


def wide_rates(unavailable: str | None = None) -> Iterator[Row]:
    """The same with the host's widest kernels, in a process that may load them."""
    if unavailable is None:
        from splince_fast._kernels import provider

        choice = provider.ensure()
        unavailable = choice.reason if choice.name == "scipy" else None
    for dtype in ("float32", "float64"):
        for d in pick([2048, 4096], [32]):
            names = [(f"wide kernels: rate against bare SciPy SYRK, d = {d}, {dtype}", 1.4, SYRK)]
            if dtype == "float32":
                names += [
                    (f"wide kernels: against concept-erasure, d = {d}", 3.0, "CE float32"),
                    (
                        "wide kernels: against concept-erasure with float64 statistics, "
                        f"d = {d}", 5.5, "CE float64",
                    ),
                ]  # fmt: skip
            if unavailable is not None:
                yield from (at_least(what, goal, None, unavailable) for what, goal, _ in names)
                continue
            data = _problem(d, dtype)
            contenders: dict[str, Contender | _peers.Absent] = {
                _peers.OURS: _peers.accumulate_ours(data, _block()),
                SYRK: _peers.accumulate_syrk(data, _block()),
            }
            if dtype == "float32":
                contenders |= _concept_erasure(data)
            present, missing = _peers.split(contenders)
            timings = interleave(present)
            for what, goal, peer in names:
                yield _against(what, goal, timings, peer, missing)


def _concept_erasure(data: Problem) -> dict[str, Contender | _peers.Absent]:
    return {
        f"CE {dtype}": _peers.accumulate_concept_erasure(data, _block(), dtype=dtype)
        for dtype in ("float32", "float64")
    }


def _against(
    what: str, target: float, timings: dict[str, Timing], peer: str,
    missing: dict[str, str] | None = None,
) -> Row:  # fmt: skip
    """How many times faster than a peer."""
    if peer in (missing or {}):
        return at_least(what, target, None, (missing or {})[peer])
    return at_least(what, target, ratio(timings[peer], timings[_peers.OURS]))


def streams() -> Iterator[Row]:
    """Single rows, many classes, small blocks."""
    d = pick(3072, 32)
    data = problem(_block(), d)
    present, missing = _peers.split(
        {
            _peers.OURS: _peers.accumulate_ours(data, 1),
            "CE": _peers.accumulate_concept_erasure(data, 1, dtype="float32", only=64),
        }
    )
    timings = interleave(present)
    yield _against(f"one-row updates against concept-erasure, d = {d}", 50, timings, "CE", missing)
    for d in pick([768, 2048], [32]):
        for dtype in ("float32", "float64"):
            few = _problem(d, dtype)
            codes = np.random.default_rng(2).integers(0, 1000, len(few.X))
            many = Problem(few.X, codes, few.y)
            timings = interleave(
                {
                    "2": _peers.accumulate_ours(few, _block()),
                    "1000": _peers.accumulate_ours(many, _block()),
                }
            )
            yield at_most(
                f"1,000 classes against 2, d = {d}, {dtype}",
                1.25, ratio(timings["1000"], timings["2"]),
            )  # fmt: skip
    d = pick(2048, 32)
    for dtype in ("float32", "float64"):
        data = _problem(d, dtype)
        timings = interleave(
            {
                "large": _peers.accumulate_ours(data, _block()),
                "small": _peers.accumulate_ours(data, pick(64, 8)),
            }
        )
        yield at_most(
            f"updates of 64 rows against 4096, d = {d}, {dtype}",
            1.5, ratio(timings["small"], timings["large"]),
        )  # fmt: skip


def accuracy() -> Iterator[Row]:
    """The worst entry of S over offsets, orders and sizes of blocks and updates."""
    n, d = pick((10_000, 128), (300, 8))
    for dtype, goal in (("float32", 1e-6), ("float64", 1e-12)):
        worst, where = 0.0, ""
        for offset in (0.0, 1e2, 1e4):
            for order in ("shuffled", "sorted"):
                data = problem(n, d, dtype, offset=offset)
                X = data.X[np.argsort(data.X[:, 0])] if order == "sorted" else data.X
                truth = _reference.two_pass_covariance(X)
                for block, update in ((None, n), (None, 1), (4096, n), (64, n), (1, n)):
                    error = _reference.covariance_error(_streamed(X, block, update), truth)
                    if error >= worst:
                        worst = error
                        where = f"worst at offset {offset:g}, {order}, blocks of {block}"
        yield at_most(f"relative error of S, {dtype}", goal, exactly(worst), where)


def _streamed(X: NDArray[Any], block: int | None, update: int) -> NDArray[np.float64]:
    moments = sf.Moments(block_rows=block)
    for start in range(0, len(X), update):
        moments.update(X[start : start + update])
    return moments.covariance()


def files() -> Iterator[Row]:
    """A memory-mapped file: memory beyond it, and time against the floors."""
    d = pick(1024, 16)
    with tempfile.TemporaryDirectory() as folder:
        n = pick(1_000_000, 12_288)
        path = _write_rows(Path(folder), n, d)
        extra = _memory.extra_bytes("benchmarks._jobs:accumulate_file", path=str(path))
        allowed = 3 * 8 * d**2 + 3 * 4 * d * BLOCK
        yield at_most(
            f"peak memory beyond a mapped file over 3 d^2 doubles + 3 blocks, n = {n}, d = {d}",
            1.0, exactly(extra / allowed), f"{extra / 2**20:.1f} of {allowed / 2**20:.1f} MiB",
        )  # fmt: skip
        path.unlink()
        yield _time_of_file(Path(folder), pick(262_144, 8192), d)


def _write_rows(folder: Path, n: int, d: int) -> Path:
    """A .npy file of float32 rows; leaves it in the page cache."""
    path = folder / "rows.npy"
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n, d))
    piece = problem(min(n, 16_384), d).X
    for start in range(0, n, len(piece)):
        rows[start : start + len(piece)] = piece[: n - start]
    rows.flush()
    return path


def _time_of_file(folder: Path, n: int, d: int) -> Row:
    path = _write_rows(folder, n, d)
    labels = {name: np.arange(n) % 2 for name in ("z", "y")}
    source = sf.sources.from_npy(path, labels)
    resident = problem(4 * BLOCK if not smoke() else 512, d)
    buffer = memoryview(bytearray(4 * d * BLOCK))

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    timings = interleave(
        {
            _peers.OURS: Contender(lambda: sf.Moments.from_blocks(source), units=n),
            SYRK: _peers.accumulate_syrk(resident, BLOCK),
            "read": Contender(read, units=n),
        }
    )
    floors = zip(timings[SYRK].seconds, timings["read"].seconds, strict=False)
    floor = Timing(tuple(max(pair) for pair in floors))
    rows_per_second = {name: math.floor(1 / t.median) for name, t in timings.items()}
    return at_most(
        f"time for a mapped file over max(bare SYRK, bare read), n = {n}, d = {d}",
        1.3, ratio(timings[_peers.OURS], floor),
        ", ".join(f"{name} {rate:,} rows/s" for name, rate in rows_per_second.items()),
    )  # fmt: skip
