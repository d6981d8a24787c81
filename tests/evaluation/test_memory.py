"""Rows far larger than the memory of a job, and the release of pages of maps (`data.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splince_fast import evaluation as ev
from splince_fast.evaluation import data, plan
from splince_fast.exceptions import NonFiniteError, SplinceWarning

ROOT = Path(__file__).resolve().parents[2]

# 10 GB of rows with two jobs are to stay below 4 GB resident. Everything that grows with the rows
# is divided by 32 here: the file (312 MB), what a job keeps (16 MiB of 512) and what is allowed
# beyond the same run on a small file, 4 GB / 32 = 125 MB for the three processes together.
SCALE = 32
_PROGRAM = """
import json, os, sys, threading, time, warnings
import numpy as np
from splince_fast import evaluation as ev
from splince_fast.evaluation import plan

def resident():
    "Sum over this process and its children; a page that k of them map counts as 1 / k of each."
    ids, kids = [os.getpid()], [os.getpid()]
    while kids:
        k = kids.pop()
        try:
            threads = os.listdir(f"/proc/{k}/task")
            found = [int(c) for t in threads
                     for c in open(f"/proc/{k}/task/{t}/children").read().split()]
        except OSError:
            continue
        ids += found
        kids += found
    total = 0
    for k in ids:
        try:
            lines = open(f"/proc/{k}/smaps_rollup").read().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024

peak, done = [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.02)

def compare(path, n):
    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 2, n), rng.integers(0, 2, n)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ev.compare(path, task=y, concept=z, n_seeds=2, alphas=(0.1,), n_jobs=2,
                            progress=False)
    assert not result.failures
    return result, [str(w.message) for w in caught]

if __name__ == "__main__":
    small, large, scale = sys.argv[1], sys.argv[2], int(sys.argv[3])
    plan._JOB_BYTES //= scale
    compare(small, 2000)  # imports, compilers, workers: what does not grow with the rows
    thread = threading.Thread(target=watch)
    thread.start()
    compare(small, 2000)
    before, peak[0] = peak[0], 0
    result, told = compare(large, len(np.load(large, mmap_mode="r")))
    done.set()
    thread.join()
    print(json.dumps({"before": before, "peak": peak[0], "sizes": result.context.sizes,
                      "told": told}))
"""


def rows_on_disk(path: Path, n: int, d: int) -> Path:
    X = np.lib.format.open_memmap(path, "w+", np.float32, (n, d))
    rng = np.random.default_rng(0)
    for start in range(0, n, 1 << 14):
        X[start : start + (1 << 14)] = rng.standard_normal((min(1 << 14, n - start), d), np.float32)
    X.flush()
    return path


@pytest.mark.slow
def test_ten_gigabytes_and_two_jobs_stay_below_four_scaled(tmp_path: Path) -> None:  # case 13
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("resident memory is read from /proc/self/smaps_rollup, which is not here")
    d = 256
    n = 10_000_000_000 // SCALE // (4 * d)
    small = rows_on_disk(tmp_path / "small.npy", 2000, d)
    large = rows_on_disk(tmp_path / "large.npy", n, d)
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(small), str(large), str(SCALE)],
        capture_output=True, text=True, cwd=ROOT, timeout=600, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1",
             "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    grown = found["peak"] - found["before"]
    assert grown < 4_000_000_000 / SCALE
    assert 8 * d * sum(found["sizes"]) <= plan._JOB_BYTES / SCALE
    assert 8 * d * sum(found["sizes"]) > 0.99 * plan._JOB_BYTES / SCALE  # control: no less
    assert any("a job keeps at most 16 MiB" in text for text in found["told"])


def test_sizes_of_the_caller_are_not_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 2, 900), rng.integers(0, 2, 900)
    X = rng.normal(size=(900, 4)) + y[:, None]
    monkeypatch.setattr(plan, "_JOB_BYTES", 8 * 4 * 300)
    settings: dict[str, Any] = {"n_seeds": 1, "alphas": (0.1,), "progress": False}
    with pytest.warns(SplinceWarning, match="300 of 900"):
        natural = ev.compare(X, task=y, concept=z, **settings)
    assert 297 <= sum(natural.context.sizes) <= 300
    part = np.arange(900) % 3 == 0
    with pytest.warns(SplinceWarning, match="300 of 900"):
        own = ev.compare(X, task=y, concept=z, test=part, **settings)
    assert own.context.sizes == (180, 20, 100)
    with pytest.warns(SplinceWarning, match="a job keeps"):
        chosen = ev.compare(X, task=y, concept=z, association=0.6, **settings)
    assert sum(chosen.context.sizes) <= 300
    asked = ev.compare(X, task=y, concept=z, association=0.6, sizes=(400, 40, 100), **settings)
    assert asked.context.sizes == (400, 40, 100)


def test_pages_of_a_map_are_released_and_changes_stay(tmp_path: Path) -> None:
    path = rows_on_disk(tmp_path / "X.npy", 5000, 3)
    expected = np.load(path)
    for mode in ("r", "r+", "c"):
        X = np.load(path, mmap_mode=mode)
        known = expected.copy()
        if mode != "r":
            X[7] = known[7] = 5.0
        rows = np.array([4999, 7, 0, 4100])
        assert (data.take_rows(X[:], rows) == known[rows]).all()
        assert (np.concatenate([block for _, block in data.blocks(X)]) == known).all()
        assert (known == X).all()  # in mode "c" the change is in this process alone
        del X
        expected = np.load(path)


def test_a_bad_row_beyond_the_first_block_is_named_by_its_own_number() -> None:  # case 17
    rng = np.random.default_rng(0)
    n = data.BLOCK + 100
    X = rng.normal(size=(n, 2))
    X[n - 3, 1] = np.inf
    with pytest.raises(NonFiniteError, match=f"row {n - 3}"):
        ev.compare(X, task=rng.integers(0, 2, n), concept=rng.integers(0, 2, n), progress=False)
