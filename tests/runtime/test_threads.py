"""_runtime.threads, _runtime.lock: number of threads, concurrent use, equal bytes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from entangled import normal
from naive_model import (
    REDUCTION,
    Rows,
    check,
    fed_in_parts,
    flushed,
    made,
    rows_for,
    state_bytes,
    summed,
)
from problems import METHODS, Float, assert_same, change, draw_data, erase, slack
from processes import run

import splince_fast as sf
from splince_fast import Folds, Moments, Projection, leace
from splince_fast._runtime import rows
from splince_fast._runtime import threads as thread_pool
from splince_fast.exceptions import InputError
from splince_fast.methods import fit
from splince_fast.moments import block
from splince_fast.moments import moments as moments_module

COUNTS = ["1", "2", "3", "7"]
VARIABLE = "SPLINCE_FAST_NUM_THREADS"


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small work is split, too."""
    for module, name in (
        (block, "_GRAIN"), (block, "_GRAIN_PRODUCTS"), (rows, "_GRAIN"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 64)


# --- how many ------------------------------------------------------------------------------------


def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    available = thread_pool.thread_count()
    assert 1 <= available <= (os.cpu_count() or 1)
    for text, expected in (("", available), ("1", 1), ("5", 5), ("200", 200)):
        monkeypatch.setenv(VARIABLE, text)
        assert thread_pool.thread_count() == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " ", "1e3", "²", "9" * 5000])
def test_a_number_of_threads_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    states = Moments(), Moments(subsample=0.5)
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, text)
        for act in (thread_pool.thread_count, *(partial(m.update, normal(10, 3)) for m in states)):
            with pytest.raises(InputError, match=VARIABLE):
                act()
    assert [m.n_rows for m in states] == [0, 0]  # and neither counted nor half counted
    check(states[0].update(normal(10, 3)), Rows.of(normal(10, 3)))


# --- splitting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_an_error_in_one_thread_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    """Buffers must stay alive until nobody writes to them."""
    monkeypatch.setenv(VARIABLE, "4")
    finished: list[int] = []

    def work(first: int, last: int) -> None:
        if first // 10 == culprit:
            raise ZeroDivisionError("one failed")
        time.sleep(0.05)
        finished.append(first // 10)

    with pytest.raises(ZeroDivisionError, match="one failed"):
        thread_pool.split(work, 40, grain=10)
    assert sorted(finished) == sorted({0, 1, 2, 3} - {culprit})


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_threads_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, eager: None, at: int, dtype: Any
) -> None:
    """No room for threads, or an interpreter that shuts down: slower, but right."""
    monkeypatch.setenv(VARIABLE, "4")
    original = ThreadPoolExecutor.submit
    calls = iter(range(10**6))

    def submit(self: Any, *arguments: Any, **more: Any) -> Any:
        if next(calls) >= at:
            raise RuntimeError("can't start new thread")
        return original(self, *arguments, **more)

    X = normal(200, 96, dtype)
    moments = Moments(block_rows=64)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", submit)
        moments.update(X, {"z": np.arange(200) % 3})
        check(moments, Rows.of(X, {"z": np.arange(200) % 3}))


ATEXIT = """
import atexit, os
import numpy as np
from splince_fast import Moments
from splince_fast.moments import block
block._GRAIN = block._GRAIN_PRODUCTS = 64
os.environ["SPLINCE_FAST_NUM_THREADS"] = "4"
X = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float32)
moments = Moments(block_rows=100).update(X)
def last_words():
    moments.update(X)
    print("rows", moments.n_rows, moments.covariance().shape, flush=True)
atexit.register(last_words)
"""


def test_an_update_while_the_interpreter_exits() -> None:
    done = run(ATEXIT)
    assert (done.stdout, done.stderr) == ("rows 1000 (64, 64)\n", "")


# --- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", ["full", "variances of sparse rows", "sample", "folds of classes"]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("d", [5, 33, 97, 200])
def test_the_number_of_threads_changes_no_byte(
    monkeypatch: pytest.MonkeyPatch, eager: None, d: int, dtype: Any, state: str
) -> None:
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(700, d)) + 3).astype(dtype)
    labels: dict[str, Any] = {
        "z": rng.integers(0, 4, 700),
        "y": rng.normal(size=(700, 2)),
        "t": np.array(["a", None] * 350, object),
    }
    weight, factors = rng.uniform(0.5, 2, 700), rng.normal(size=(2, d, 3))
    results = set()
    for count in COUNTS:
        monkeypatch.setenv(VARIABLE, count)
        states = [made(state, block_rows=128) for _ in range(2)]
        for some, weights in zip(states, (None, weight), strict=True):
            fed_in_parts(some, rows_for(state, X), labels, 150, weights)
        if isinstance(states[0], Moments):
            both = states[0] + states[1]
            states += [both, both - states[0]]
        applied = Projection(factors[0], factors[1], np.zeros(d))(X)
        results.add(str([*map(state_bytes, states), applied.tobytes()]))
    assert len(results) == 1


@pytest.mark.parametrize("classes", [2, 400])  # threads share rows, or columns
def test_threads_share_rows_or_columns_of_a_sample(
    monkeypatch: pytest.MonkeyPatch, classes: int
) -> None:
    X = normal(1400, 600)
    labels = {"z": np.arange(len(X)) % classes}
    assert (block._segment_rows(len(X), 600, 2 + classes) < len(X)) == (classes == 2)
    found = set()
    for count in COUNTS[:3]:
        monkeypatch.setenv(VARIABLE, count)
        found.add(str(state_bytes(Moments(subsample=0.5).update(X, labels))))
    assert len(found) == 1


def test_the_scan_for_bad_numbers_sees_every_part(
    monkeypatch: pytest.MonkeyPatch, eager: None
) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    for row in range(0, 100, 9):
        X = normal(100, 16)
        X[row, row % 16] = np.nan
        with pytest.raises(InputError, match=rf"row {row}\)"):
            Moments().update(X)


# --- one object, several threads -----------------------------------------------------------------


def added_in_place(moments: Moments) -> None:
    moments += Moments().update(normal(3, 4))


ADDED: dict[str, tuple[Any, Any]] = {
    "update": (normal(3, 4), None),
    "add in place": (normal(3, 4), None),
    "update of one row": (normal(1, 4), {"z": np.array([1])}),
}
USES: dict[str, Callable[[Moments, Path], Any]] = {
    "update": lambda m, _: m.update(*ADDED["update"]),
    "update of one row": lambda m, _: m.update(*ADDED["update of one row"]),
    "mean": lambda m, _: m.mean,
    "weight": lambda m, _: m.weight,
    "covariance": lambda m, _: m.covariance(),
    "cross_covariance": lambda m, _: m.cross_covariance("z"),
    "class_counts": lambda m, _: m.class_counts("z"),
    "copy": lambda m, _: m.copy(),
    "save": lambda m, path: m.save(path / "state"),
    "add": lambda m, _: m + Moments(),
    "add to another": lambda m, _: Moments() + m,
    "remove": lambda m, _: m - Moments(),
    "pickle": lambda m, _: m.__getstate__(),
    "add in place": lambda m, _: added_in_place(m),
    "solve": lambda m, _: leace(m, erase="z"),
}


def run_beside(
    patch: pytest.MonkeyPatch, place: tuple[Any, str], act: Callable[[], Any]
) -> tuple[list[threading.Thread], list[bool]]:
    """Before the first call of a function, start `act` in a thread; whether it ended in 0.2 s."""
    original, threads, ended = getattr(*place), list[threading.Thread](), list[bool]()

    def call(*arguments: Any, **options: Any) -> Any:
        if not threads:
            threads.append(threading.Thread(target=act))
            threads[0].start()
            threads[0].join(timeout=0.2)
            ended.append(not threads[0].is_alive())
        return original(*arguments, **options)

    patch.setattr(*place, call)
    return threads, ended


def second_thread(moments: Moments, use: Callable[[], Any]) -> tuple[bool, threading.Thread]:
    """Start `use` in the middle of an update of 50 rows; whether it ended before the update."""
    with pytest.MonkeyPatch.context() as patch:
        threads, ended = run_beside(patch, REDUCTION, use)
        moments.update(normal(50, 4), {"z": np.arange(50) % 2})
    return ended[0], threads[0]


@pytest.mark.parametrize("use", USES)
def test_a_second_thread_waits_and_the_sums_are_right(tmp_path: Path, use: str) -> None:
    X, labels = normal(50, 4), {"z": np.arange(50) % 2}
    moments = Moments(block_rows=16).update(X, labels)
    ended, thread = second_thread(moments, lambda: USES[use](moments, tmp_path))
    thread.join(timeout=30)
    assert not ended
    assert not thread.is_alive()
    expected = Rows.of(X, labels) + Rows.of(X, labels)
    check(moments, expected + Rows.of(*ADDED[use]) if use in ADDED else expected)


def test_without_the_lock_the_second_thread_does_not_wait() -> None:
    """The control of the test above."""
    moments = Moments(block_rows=16).update(normal(50, 4), {"z": np.arange(50) % 2})
    moments._lock = nullcontext()
    ended, thread = second_thread(moments, lambda: moments.n_rows or moments.copy())
    thread.join(timeout=30)
    assert ended


def test_an_update_of_folds_waits_for_a_thread_that_reads_one_of_them() -> None:
    folds = Folds(2).update(normal(50, 4))
    with ThreadPoolExecutor(1) as pool:
        with folds[1]._lock:
            update = pool.submit(folds.update, normal(50, 4))
            with pytest.raises(TimeoutError):
                update.result(timeout=0.2)
        assert update.result(timeout=60).n_rows == 100


def test_eight_threads_fill_one_object() -> None:
    X, z = normal(4000, 6), np.arange(4000) % 3
    moments = Moments(block_rows=32)

    def fill(i: int) -> None:
        for j in range(i, 4000, 8 * 5):
            index = np.arange(j, min(4000, j + 5 * 8), 8)
            moments.update(X[index], {"z": z[index]})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(8)))
    check(moments, Rows.of(X, {"z": z}))


def test_a_covariance_is_of_one_moment_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update while the scatter is being read would mix two states into one wrong number."""
    moments = flushed(Moments(block_rows=4).update(normal(8, 4)))
    more = partial(moments.update, normal(8, 4, seed=1))
    threads, ended = run_beside(monkeypatch, (moments_module, "denominator"), more)
    np.testing.assert_allclose(moments.covariance(), np.cov(normal(8, 4).T), rtol=1e-12)
    assert ended == [False]
    threads[0].join(timeout=30)
    assert moments.n_rows == 16


# --- many objects, many threads ------------------------------------------------------------------


def test_many_threads_fill_many_objects(monkeypatch: pytest.MonkeyPatch, eager: None) -> None:
    monkeypatch.setenv(VARIABLE, "3")
    X = normal(2400, 40, np.float32)
    z = np.arange(2400) % 7

    def part(i: int) -> Moments:
        rows = slice(i * 300, (i + 1) * 300)
        some: Moments = fed_in_parts(Moments(block_rows=64), X[rows], {"z": z[rows]}, 50)
        return some

    with ThreadPoolExecutor(8) as pool:
        parallel = list(pool.map(part, range(8)))
    for i, moments in enumerate(parallel):
        assert state_bytes(moments) == state_bytes(part(i))
    total = summed(parallel)
    assert total.n_rows == 2400
    serial = summed(part(i) for i in range(8))
    assert state_bytes(total) == state_bytes(serial)


def test_two_sums_that_cross_never_wait_for_each_other() -> None:
    """a + b and b + a, a - b and b - a, a += b and b += a at once; no deadlock."""
    a, b = Moments().update(normal(50, 30)), Moments().update(normal(50, 30, seed=1))

    def add(first: Moments, second: Moments) -> None:
        for _ in range(200):
            assert (first + second - second).n_rows == 50
        empty = Moments()
        for _ in range(200):
            empty += first
            first += Moments()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(add, a, b), pool.submit(add, b, a)]:
            future.result(timeout=60)
    assert (a + b).n_rows == 100


def test_threads_of_blas_are_left_as_they_were() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")

    def counts() -> dict[str, int]:
        return {lib["filepath"]: lib["num_threads"] for lib in threadpoolctl.threadpool_info()}

    before = counts()
    Moments().update(normal(600, 50, np.float32)).covariance()
    assert before.items() <= counts().items()


# --- solving --------------------------------------------------------------------------------------


@pytest.fixture
def impatient_threads() -> Any:
    """Threads that change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient_threads")
@pytest.mark.parametrize("shared", [False, True])
def test_solves_from_several_threads_agree(shared: bool) -> None:
    """Also from one and the same moments: a solve reads them, and readers do not disturb."""
    data = draw_data(34)
    expected = erase("splince", data.moments()).matrix()
    common = data.moments()

    def work() -> list[Float]:
        own = common if shared else data.moments()
        return [erase("splince", own).matrix() for _ in range(100)]

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(work) for _ in range(4)]
    assert all((matrix == expected).all() for own in found for matrix in own.result())


def test_rows_that_come_during_a_solve_do_not_get_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait; the solve never sees half of them."""
    data, more = draw_data(35), draw_data(36)
    moments = sf.Moments(block_rows=50).update(data.x, {"z": data.z, "y": data.y})
    expected = erase("splince", data.moments())
    added = partial(moments.update, 1e3 * more.x, {"z": more.z, "y": more.y})
    threads, _ = run_beside(monkeypatch, (fit, "oblique"), added)
    assert_same(change(erase("splince", moments)), change(expected), slack(data))
    threads[0].join(timeout=30)
    assert moments.n_rows == len(data.x) + len(more.x)


def test_solving_leaves_the_moments_as_they_were() -> None:
    data = draw_data(37)
    moments = flushed(data.moments())
    before = state_bytes(moments)
    for method in METHODS:
        erase(method, moments)
    assert state_bytes(moments) == before
    eraser = erase("splince", moments)
    matrix = eraser.matrix()
    moments.update(data.x * 3, {"z": data.z, "y": data.y})
    np.testing.assert_array_equal(eraser.matrix(), matrix)
