"""States of moments after interrupts, forks, removals, far offsets and other data."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from entangled import normal
from naive_model import FUZZ, state_bytes
from processes import script

import splince_fast as sf
from splince_fast import Moments
from splince_fast._kernels import row_kernels
from splince_fast.exceptions import InputError
from splince_fast.moments import accumulator
from splince_fast.moments import moments as moments_module

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no POSIX signals")


# --- other shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_leading_dimensions_are_rows(masked: bool) -> None:
    rng = np.random.default_rng(0)
    X, mask = rng.normal(size=(4, 7, 3)), rng.random((4, 7)) < 0.6
    per_sequence, per_token = np.array(list("abca")), rng.integers(0, 3, (4, 7))
    score, weight = rng.normal(size=4), rng.uniform(0.5, 2, 4)
    if masked:
        X[~mask], per_token[~mask] = np.nan, -100
    chosen = mask if masked else np.ones((4, 7), bool)
    sequence = np.repeat(np.arange(4), 7)[chosen.ravel()]
    labels = {"s": per_sequence, "t": per_token, "score": score, "list": per_token.tolist()}
    found = Moments().update(X, labels, sample_weight=weight, mask=mask if masked else None)
    flat = {
        "s": per_sequence[sequence], "t": per_token[chosen], "score": score[sequence],
        "list": per_token[chosen],
    }  # fmt: skip
    expected = Moments().update(X[chosen], flat, sample_weight=weight[sequence])
    assert state_bytes(found) == state_bytes(expected)
    with pytest.raises(InputError, match="sequence"):
        Moments().update(X, {"s": [1, 2, 3]})
    with pytest.raises(InputError, match="mask has shape"):
        Moments().update(X, mask=mask[:2])


# --- removal -------------------------------------------------------------------------------------


def drawn_part(rng: np.random.Generator, n: int = 50, scale: float = 1.0, **labels: Any) -> Any:
    return scale * rng.normal(size=(n, 3)), labels


def with_constant(part: Any, value: float, dtype: Any = np.float64) -> Any:
    part[0][:, 2] = value
    return part[0].astype(dtype), part[1]


# Parts of a state, drawn by a random generator: the first stays, the others are removed.
REMOVALS: dict[str, Callable[[np.random.Generator], list[Any]]] = {
    **{
        f"a feature of {value} in {dtype}": lambda rng, value=value, dtype=dtype: [
            with_constant(drawn_part(rng, 200, z=rng.integers(0, 2, 200)), value, dtype),
            (rng.normal(size=(100, 3)).astype(dtype), {"z": rng.integers(0, 2, 100)}),
        ]
        for value in (0.0, 0.1, 333.0) for dtype in ("f4", "f8")
    },
    **{
        f"features at {offset}": lambda rng, offset=offset: [
            (np.full((100, 3), offset + 0.1 * rng.integers(3)), {}),
            (rng.normal(size=(100, 3)) + offset, {}),
        ]
        for offset in (1e8, 1e12)
    },
    "a constant label": lambda rng: [
        drawn_part(rng, z=np.zeros(50)),
        *(drawn_part(rng, z=rng.normal(size=50) * 10.0**k) for k in (0, 3, 6)),
    ],
    "a constant label far from those that go": lambda rng: [
        drawn_part(rng, z=np.full(50, 0.3)), drawn_part(rng, z=1e3 * rng.normal(size=50)),
    ],
    "a label that varies far from those that go": lambda rng: [
        drawn_part(rng, z=0.3 + rng.normal(size=50)), drawn_part(rng, z=1e3 * rng.normal(size=50)),
    ],
    "a class that goes": lambda rng: [
        drawn_part(rng, z=["a", "b"] * 25), *(drawn_part(rng, z=["b", "c"] * 25) for _ in range(3))
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", REMOVALS)
def test_what_a_removal_leaves_is_constant_where_the_rest_is(case: str) -> None:
    """Rounding left by a removal is no variance: it is exactly 0, and no eraser whitens it."""
    for seed in range(30):
        (X, labels), *rest = REMOVALS[case](np.random.default_rng(seed))
        goes = [Moments(block_rows=7).update(*part) for part in rest]
        whole = sum(goes, Moments(block_rows=16).update(X, labels))
        left = whole - sum(goes[::-1][1:], goes[-1])
        assert state_bytes(pickle.loads(pickle.dumps(left))) == state_bytes(left)
        constant = np.ptp(X, axis=0) == 0
        covariance = left.covariance(ddof=0)
        assert (covariance[constant] == 0).all()
        assert (np.diag(covariance)[~constant] > 0.1).all()
        if not labels:
            continue
        if len(set(labels["z"])) == 1:
            with pytest.raises(sf.exceptions.ConstantVariableError):
                sf.leace(left, erase="z")
            continue
        report = sf.leace(left, erase="z").report
        assert (report.rank_covariance, report.rank) == ((~constant).sum(), 1)
        if case == "a class that goes":
            gone = left.classes("z").index("c")
            assert (left.cross_covariance("z")[:, gone] == 0).all()


def test_a_part_of_more_rows_is_no_part_however_light() -> None:
    whole = Moments().update(normal(20, 3))
    with pytest.raises(sf.exceptions.IncompatibleMomentsError, match="30 rows"):
        whole - Moments().update(normal(30, 3), sample_weight=np.full(30, 0.1))


# --- the reference point -------------------------------------------------------------------------


def test_a_far_column_of_one_part_alone_keeps_its_digits() -> None:
    rng = np.random.default_rng(0)
    X, t = rng.normal(size=(90, 4)), 1e9 + rng.normal(size=40)
    labelled = Moments().update(X[50:], {"t": t})
    for bare in (Moments().update(X[:50]), labelled - labelled):
        found = (bare + labelled).cross_covariance("t")
        np.testing.assert_allclose(found, labelled.cross_covariance("t"), atol=1e-12)


@pytest.mark.parametrize("first", [1, 500])
@pytest.mark.parametrize(("size", "weight"), [(1e8, 1e-16), (1e12, 1e-24), (1e15, 1e-32)])
def test_a_light_row_far_away_costs_no_digits(size: float, weight: float, first: int) -> None:
    """The reference point is weighted, and follows the mean when it has gone far."""
    rng = np.random.default_rng(0)
    X, z = rng.normal(size=(500, 4)), rng.integers(0, 2, 500)
    X += z[:, None]
    w = np.ones(500)
    X[0], w[0] = size, weight
    moments = Moments()
    for part in (slice(0, first), slice(first, None)):
        moments.update(X[part], {"z": z[part]}, sample_weight=w[part])
    wide, heavy = X.astype(np.longdouble), w.astype(np.longdouble)
    indicator = (z[:, None] == moments.classes("z")).astype(np.longdouble)
    centred = indicator - (heavy @ indicator) / heavy.sum()
    truth = (wide - (heavy @ wide) / heavy.sum()).T @ (heavy[:, None] * centred) / heavy.sum()
    # w x of the light row is at most 1e-8 of that of the others: only their rounding is left.
    assert np.abs(moments.cross_covariance("z", ddof=0) - truth).max() < 1e-13


# --- storing -------------------------------------------------------------------------------------


def test_a_pickle_is_half_a_state_and_may_be_read_only() -> None:
    d = 200
    X, z, y = normal(300, d), np.arange(300) % 3, normal(300, 2, seed=1)
    moments = Moments(block_rows=64).update(X, {"z": z, "y": y})
    moments.covariance()
    assert len(pickle.dumps(moments, protocol=5)) < 4 * d * d + 64 * 1024
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(moments, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    assert frozen
    twin = pickle.loads(text, buffers=frozen)
    assert state_bytes(twin) == state_bytes(moments)
    np.testing.assert_array_equal(twin.covariance(), moments.covariance())
    sf.leace(twin, erase="z")
    assert state_bytes(twin.update(X, {"z": z, "y": y})) == state_bytes(
        moments.update(X, {"z": z, "y": y})
    )


# --- interrupts and forks ------------------------------------------------------------------------

FORK = """
import os, signal, threading, warnings
import numpy as np
from splince_fast import Moments
from splince_fast.moments import block
warnings.simplefilter("ignore")  # Python's own, of forks beside threads
block._GRAIN = block._GRAIN_PRODUCTS = 64  # small work is split, too
os.environ["SPLINCE_FAST_NUM_THREADS"] = "4"
X = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float32)
parent = Moments(block_rows=100).update(X)
inside, leave = threading.Event(), threading.Event()
def read():
    with parent._lock:
        inside.set()
        leave.wait()
thread = threading.Thread(target=read); thread.start(); inside.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    parent.update(X)
    mine = Moments(block_rows=100).update(X).update(X)
    same = (mine.covariance() == parent.covariance()).all()
    os._exit(0 if same and parent.n_rows == 1000 else 3)
leave.set(); thread.join()
status = os.waitpid(child, 0)[1]
print(status, parent.update(X).n_rows)
"""


@posix
def test_a_fork_after_threads_have_run() -> None:
    """The child has threads of its own, and free locks, although another thread had one."""
    assert script(FORK) == "0 1000\n"


IMPORTING = """
import os, pathlib, signal, sys, threading, time
import splince_fast, splince_fast.moments
folder = pathlib.Path(sys.argv[1])
(folder / "slow.py").write_text("import time; time.sleep(1)")
splince_fast.__path__.append(str(folder))
thread = threading.Thread(target=lambda: __import__("splince_fast.slow")); thread.start()
while "splince_fast.slow" not in sys.modules:
    time.sleep(0.01)
child = os.fork()
if not child:
    signal.alarm(20)
    import splince_fast.slow
    os._exit(0)
thread.join()
print(os.waitpid(child, 0)[1])
"""


@posix
def test_a_fork_waits_for_what_another_thread_imports(tmp_path: Path) -> None:
    """Kernels are imported when they are first needed; the lock of an import has no other end."""
    assert script(IMPORTING, str(tmp_path)) == "0\n"


# Parameters of moments with blocks of 8 rows, numbers of rows of two updates, and offset of the
# second.
CHANGES: dict[str, tuple[dict[str, Any], int, int, float]] = {
    "the first rows": ({}, 0, 3, 0.0),
    "a block": ({}, 8, 8, 0.0),
    "a block far away": ({}, 8, 8, 1e6),
    "rows that wait": ({}, 10, 3, 0.0),
    "rows that fill a block": ({}, 13, 3, 0.0),
    "rows that overfill a block": ({}, 13, 6, 0.0),
    "many blocks": ({}, 13, 30, 0.0),
    "variances": ({"covariance_type": "diag"}, 13, 6, 0.0),
    "a sample": ({"subsample": 0.5}, 13, 6, 0.0),
    "classes": ({"by": "w"}, 13, 20, 0.0),
}


def interrupted(act: Callable[[], object], at: int) -> int:
    """Raise KeyboardInterrupt at the bytecode number `at`; return the number of bytecodes run."""
    count, package, before = 0, str(Path(sf.__file__).parent), sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(package):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


def outcomes(case: str, act: str, n: int) -> set[str]:
    """How `n` interrupted updates or merges leave moments: "absent", "whole" or "torn"."""
    parameters, n_before, n_added, offset = CHANGES[case]
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n_before + n_added, 4))
    X[n_before:] += offset
    labels = {"z": rng.integers(0, 3, len(X)), "y": X[:, 0] - 1, "w": rng.integers(0, 2, len(X))}
    labels["z"][n_before] = 9  # a new class

    def part(rows: slice) -> Moments:
        moments = Moments(block_rows=8, **parameters)
        return moments.update(X[rows], {name: z[rows] for name, z in labels.items()})

    before, added = part(slice(n_before)), part(slice(n_before, None))
    if act == "merge":
        assert before.weight + added.weight == len(X)  # merges the rows that wait

    def change(moments: Moments) -> None:
        if act == "merge":
            moments += added
        else:
            moments.update(X[n_before:], {name: z[n_before:] for name, z in labels.items()})

    absent, whole = state_bytes(before), before.copy()
    n_bytecodes = interrupted(lambda: change(whole), -1)
    names = {"absent": absent, "whole": state_bytes(whole)}
    found = set()
    # Half of the interrupts come at the end, near the addition.
    places = np.concatenate(
        [rng.integers(1, n_bytecodes, n // 2), n_bytecodes - rng.integers(0, 150, n // 2)]
    )
    for at in places.tolist():
        moments = before.copy()
        interrupted(lambda: change(moments), at)  # noqa: B023 (called at once)
        left = state_bytes(moments)
        found.add(next((name for name, state in names.items() if state == left), "torn"))
    return found


@pytest.mark.parametrize("act", ["update", "merge"])
@pytest.mark.parametrize("case", CHANGES)
def test_an_interrupt_at_any_bytecode_leaves_a_change_whole_or_absent(case: str, act: str) -> None:
    assert outcomes(case, act, 100 * max(FUZZ, 1)) == {"absent", "whole"}


def test_changes_that_are_added_one_by_one_are_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: bytecodes between two changes."""

    def add_each(changes: list[Any]) -> None:
        for change in changes:
            row_kernels.add([change])

    monkeypatch.setattr(accumulator, "add", add_each)
    monkeypatch.setattr(moments_module, "add", add_each)
    monkeypatch.setattr(sf, "__file__", __file__)  # count the bytecodes of `add_each` alone
    assert "torn" in outcomes("a block", "update", 100)
