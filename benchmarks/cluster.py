"""A dask cluster on this machine beside one process and beside what dask's users take today.

    python -m benchmarks.cluster [--rows 200000] [--width 1024] [--workers 2] [--rounds 3] [--smoke]

All read the same memory-mapped file of float32 rows in chunks of the same size, in turns. Ours also
accumulates the sums of a concept. Printed are rows per second, and ratios to one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks import machine


def ways(
    path: Path, width: int, chunk: int, labels: Any, client: Any
) -> dict[str, Callable[[], Any]]:
    """What is compared, by name."""
    import dask.array as da
    from dask import delayed

    def source() -> Any:
        return sf.sources.from_npy(path, {"z": labels}, block_rows=chunk)

    def read(start: int) -> Any:
        return np.load(path, mmap_mode="r")[start : start + chunk]

    def lazy() -> Any:
        """The file as a dask array whose chunks the workers read."""
        rows, later = len(labels), delayed(read)
        shapes = {start: (min(chunk, rows - start), width) for start in range(0, rows, chunk)}
        parts = [da.from_delayed(later(i), shape, np.float32) for i, shape in shapes.items()]
        return da.concatenate(parts)

    found: dict[str, Callable[[], Any]] = {
        "one process": lambda: sf.Moments.from_blocks(source()).covariance(),
        "cluster": lambda: sf.Moments.from_blocks(source(), client=client).covariance(),
        "dask.array.cov": lambda: client.compute(da.cov(lazy(), rowvar=False)).result(),
    }
    if find_spec("dask_ml"):
        from dask_ml.decomposition import IncrementalPCA

        found["dask-ml IncrementalPCA"] = lambda: IncrementalPCA(
            min(64, width), batch_size=chunk
        ).fit(lazy())
    return found


def measure(rows: int, width: int, workers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way, one number per round."""
    from dask.distributed import Client, LocalCluster

    rng = np.random.default_rng(0)
    chunk = min(4096, rows // 8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        table = np.lib.format.open_memmap(path, "w+", np.float32, (rows, width))
        for start in range(0, rows, chunk):
            part = table[start : start + chunk]
            part[:] = rng.normal(size=part.shape)
        table.flush()
        labels = rng.integers(0, 2, size=rows)
        with (
            LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as local,
            Client(local) as client,
        ):
            contenders = ways(path, width, chunk, labels, client)
            answers = {name: run() for name, run in contenders.items()}
            for name in ("cluster", "dask.array.cov"):
                gap = np.abs(answers[name] - answers["one process"]).max()
                if not gap < 1e-3:
                    raise SystemExit(f"{name} differs from one process by {gap:.1e}")
            seconds: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(rounds):
                for name, run in contenders.items():
                    start_time = perf_counter()
                    run()
                    seconds[name].append(perf_counter() - start_time)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny; no number means anything")
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.width, args.rounds = 4000, 32, 1
    found = measure(args.rows, args.width, args.workers, args.rounds)
    print(f"{args.rows} rows of {args.width} features, {args.workers} workers; ", end="")
    print(machine.short_name(machine.processor()))
    serial = statistics.median(found["one process"])
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{name:24} {args.rows / middle:10.0f} rows/s  {serial / middle:6.3f} of one process")


if __name__ == "__main__":
    main()
