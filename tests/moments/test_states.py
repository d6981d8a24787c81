"""Contracts of every form of moments: full, variances, samples, classes, folds."""

from __future__ import annotations

import pickle
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from entangled import normal
from naive_model import (
    FUZZ,
    REDUCTION,
    REFUSED,
    SIX,
    STATES,
    Rows,
    check,
    classed,
    failing,
    fed_in_parts,
    flushed,
    made,
    part,
    rows_for,
    squares_of,
    state_bytes,
    summed,
)

import splince_fast as sf
from splince_fast import Moments, SplinceError, sources
from splince_fast._kernels import blas, row_kernels
from splince_fast._runtime import files
from splince_fast._runtime.rows import splitmix64
from splince_fast.exceptions import (
    FileFormatError,
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NonFiniteError,
)
from splince_fast.moments import accumulator
from splince_fast.moments import moments as moments_module
from splince_fast.moments.split import MOST_CLASSES

N, D = 300, 3
states = pytest.mark.parametrize("state", STATES)
MERGED = [state for state in STATES if "folds" not in STATES[state]]
merged = pytest.mark.parametrize("state", MERGED)


def data(n: int = N, seed: int = 0, dtype: Any = np.float64) -> tuple[Any, dict[str, Any]]:
    return classed(n, D, seed, dtype)


def started(state: str, n: int = N, dtype: Any = np.float64, **more: Any) -> Any:
    X, labels = data(n, dtype=dtype)
    return made(state, **{"block_rows": 16, **more}).update(rows_for(state, X), labels)


# --- whole or absent ------------------------------------------------------------------------------


KNOWN = data(6)[1]
# Updates that contradict earlier rows: X, changes of the labels, type and pattern of the error.
CONTRADICTING: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a wrong width": (SIX[:, :2], {}, InputError, "2 columns"),
    "features of another axis": (SIX[..., None], {}, InputError, "."),
    "a variable of another kind": (SIX, {"y": SIX[:, 0]}, LabelError, "cont"),
    "classes of another type": (SIX, {"z": np.arange(6) % 3}, LabelError, "one type"),
    "booleans for integers": (SIX, {"y": [True] * 6}, LabelError, "."),
    "a value whose square overflows": (SIX, {"v": [0, 1, -1e200, 2, 1, 0]}, LabelError, "rescale"),
    "another number of columns": (SIX, {"v": SIX[:, :2]}, SplinceError, "."),
    "NaN in the last row": (
        np.where(np.arange(N)[:, None] == N - 1, np.nan, data()[0]),
        data()[1] | {"v": pd.DataFrame({"age": data()[1]["v"]})},
        NonFiniteError,
        f"row {N - 1}",
    ),
}


@cache
def refusing(state: str) -> tuple[Any, ...]:
    """States of which an update joins buffered rows, fills one block, or is the first."""
    return started(state, 37), started(state, 36, block_rows=6), made(state)


@pytest.mark.parametrize(
    ("state", "case"),
    [(s, c) for s in STATES for c in REFUSED if s in MERGED or "mask" not in REFUSED[c][1]],
)
def test_errors_are_typed_tell_why_and_change_nothing(state: str, case: str) -> None:
    X, arguments, kind, text = REFUSED[case]
    if type(X) is np.ndarray and X.dtype == float and X.size and "mask" not in arguments:
        X = rows_for(state, X)
    labels = {**KNOWN, **arguments.get("labels", {})}
    for some in refusing(state):
        before = state_bytes(some)
        with pytest.raises(kind, match=text) as caught:
            some.update(X, **{**arguments, "labels": labels})
        assert len(str(caught.value)) > 30
        assert state_bytes(some) == before


@states
@pytest.mark.parametrize("case", CONTRADICTING)
def test_a_refused_update_changes_no_part(state: str, case: str) -> None:
    """It fills no work memory of its dtype, and sets no column names."""
    X, changes, kind, text = CONTRADICTING[case]
    more = rows_for(state, SIX), KNOWN | {"v": pd.DataFrame({"height": KNOWN["v"]})}
    for before, after in (("f4", "f8"), ("f8", "f4"), ("f8", "f8")):
        some, undisturbed = (started(state, 52, before) for _ in range(2))
        kept = state_bytes(some)
        for rows in [slice(None), slice(0)] if case == "a wrong width" else [slice(None)]:
            labels = part({**KNOWN, **changes}, rows)
            with pytest.raises(kind, match=text):
                some.update(rows_for(state, X[rows].astype(after)), labels)
        assert state_bytes(some) == kept
        assert state_bytes(some.update(*more)) == state_bytes(undisturbed.update(*more))


@pytest.mark.parametrize("state", ["classes", "folds of classes"])
def test_too_many_classes_change_no_part(state: str) -> None:
    """Also if they are too many for the last fold alone."""
    X, labels = data(400)
    some = made(state).update(X, labels)
    before, last = state_bytes(some), splitmix64(np.arange(400, 800, dtype=np.uint64)) % 2 == 1
    many = np.where(last, (np.arange(400) % (2 * MOST_CLASSES)).astype(str), "a")
    with pytest.raises(InputError, match=f"more than {MOST_CLASSES} classes"):
        some.update(X, {**labels, "z": many})
    assert state_bytes(some) == before
    few = np.where(last, (np.arange(400) % 60).astype(str), "a")
    assert some.update(X, {**labels, "z": few}).n_rows == 800  # control


KERNELS = [
    (state, kernel) for state in ("full", "classes", "folds", "folds of classes")
    for kernel in ("reduce_chunks", "centre_columns", "syrk_f32_out")
] + [("variances", "sum_block"), ("sample", "sum_block")]  # fmt: skip


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize(("state", "kernel"), KERNELS)
@pytest.mark.parametrize(("error", "waiting"), [(KeyboardInterrupt(), 0), (MemoryError(), 5)])
def test_a_kernel_that_raises_leaves_an_update_of_many_blocks_absent(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, state: str, kernel: str, at: int,
    waiting: int,
) -> None:  # fmt: skip
    module = blas if kernel == "syrk_f32_out" else row_kernels
    monkeypatch.setattr(row_kernels, "wide", lambda: kernel == "reduce_chunks")
    more = data(120, 1, np.float32)
    some, twin = (started(state, waiting, np.float32, block_rows=8) for _ in range(2))
    before = state_bytes(some)
    with monkeypatch.context() as patch:
        patch.setattr(module, kernel, failing(getattr(module, kernel), at, error))
        with pytest.raises(type(error)):
            some.update(*more)
    assert state_bytes(some) == before
    assert state_bytes(some.update(*more)) == state_bytes(twin.update(*more))


# State with blocks of 8 rows, numbers of rows of two updates, and offset of the second.
CHANGES = {
    "the first rows": ("full", 0, 3, 0.0),
    "a block": ("full", 8, 8, 0.0),
    "a block far away": ("full", 8, 8, 1e6),
    "rows that wait": ("full", 10, 3, 0.0),
    "rows that fill a block": ("full", 13, 3, 0.0),
    "rows that overfill a block": ("full", 13, 6, 0.0),
    "many blocks": ("full", 13, 30, 0.0),
    **{state: (state, 13, 20, 0.0) for state in STATES if state != "full"},
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
    """How `n` interrupted updates, merges or reads leave moments: "absent", "whole" or "torn"."""
    state, n_before, n_added, offset = CHANGES[case]
    X, labels = data(n_before + n_added)
    X[n_before:] += offset
    labels["z"][n_before] = "d"  # a new class
    parts = [slice(n_before), slice(n_before, None)]
    given = [(rows_for(state, X[rows]), part(labels, rows)) for rows in parts]
    before, added = (made(state, block_rows=8).update(*own) for own in given)
    if act == "merge":
        assert before.weight + added.weight == len(X)  # merges the rows that wait

    def change(moments: Any) -> None:
        if act == "merge":
            moments += added
        elif act == "read":
            assert moments.mean.any()
        else:
            moments.update(*given[1])

    absent, whole = state_bytes(before), pickle.loads(pickle.dumps(before))
    n_bytecodes = interrupted(lambda: change(whole), -1)
    names = {"absent": absent, "whole": state_bytes(whole)}
    found, rng = set(), np.random.default_rng(0)
    # Half of the interrupts come at the end, near the addition.
    places = np.concatenate(
        [rng.integers(1, n_bytecodes, n // 2), n_bytecodes - rng.integers(0, 150, n // 2)]
    )
    for at in places.tolist():
        moments = pickle.loads(pickle.dumps(before))
        interrupted(lambda: change(moments), at)  # noqa: B023 (called at once)
        left = state_bytes(moments)
        found.add(next((name for name, state in names.items() if state == left), "torn"))
    return found


UPDATES = [(case, "update") for case in CHANGES]
MERGES = [(case, "merge") for case in CHANGES if "folds" not in case]


@pytest.mark.parametrize(("case", "act"), [*UPDATES, *MERGES, ("rows that wait", "read")])
def test_an_interrupt_at_any_bytecode_leaves_a_change_whole_or_absent(case: str, act: str) -> None:
    assert outcomes(case, act, 40 * max(FUZZ, 1)) == {"absent", "whole"}


def test_changes_that_are_added_one_by_one_are_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: bytecodes between two changes."""

    def add_each(changes: list[Any]) -> None:
        for change in changes:
            row_kernels.add([change])

    monkeypatch.setattr(accumulator, "add", add_each)
    monkeypatch.setattr(moments_module, "add", add_each)
    monkeypatch.setattr(sf, "__file__", __file__)  # count the bytecodes of `add_each` alone
    assert "torn" in outcomes("a block", "update", 100)


# --- files and runs -------------------------------------------------------------------------------

NAMES = ("u", "v", "w")


@states
def test_files_pickles_and_copies_keep_every_bit(state: str, tmp_path: Path) -> None:
    X, labels = data()
    labels["z"] = np.where(np.arange(N) % 7 == 0, None, labels["z"])
    rows = X if "sparse" in state else pd.DataFrame(X, columns=NAMES)
    given = rows_for(state, rows), labels
    some = made(state, block_rows=128, joint=[("z", "y")], kinds={"y": "classes"}).update(*given)
    path, ways = tmp_path / "state", [lambda: pickle.loads(pickle.dumps(some))]
    if state in MERGED:
        for _ in range(2):  # the same state gives the same file
            some.save(path)
            kept = path.read_bytes()
            Moments.load(path).save(path)
            assert path.read_bytes() == kept
        ways += [lambda: Moments.load(path), some.copy]
    whole, before = pickle.loads(pickle.dumps(some)).update(*given), state_bytes(some)
    for way in ways:
        other = way()
        assert state_bytes(other) == before
        assert other.parameters == some.parameters
        assert other.feature_names == some.feature_names == (None if "sparse" in state else NAMES)
        with pytest.raises(LabelError):  # joint= and kinds= are in force
            other.update(given[0], {"z": labels["z"]})
        assert state_bytes(other.update(*given)) == state_bytes(whole)
        assert state_bytes(some) == before, "copies are independent"


def blocks(state: str, stop: int = 10, **names: str) -> Iterator[Any]:
    """Blocks of 30 rows that break off before one of them."""
    X, labels = data(dtype=np.float32)
    for i in range(10):
        if i == stop:
            raise ConnectionError("the store is gone")
        rows = slice(30 * i, 30 * i + 30)
        own = rows_for(state, X[rows])
        named = {names.get(name, name): column for name, column in part(labels, rows).items()}
        yield own if "sparse" in state else pd.DataFrame(own, columns=NAMES), named


@states
@pytest.mark.parametrize("stop", [0, 4, 9])
def test_a_run_that_was_interrupted_resumes_to_the_same_bytes(
    tmp_path: Path, state: str, stop: int
) -> None:
    """The error arrives as it was raised; the checkpoint holds every block that preceded it."""
    run = partial(
        Moments.from_blocks, **{**STATES[state], "block_rows": 16}, checkpoint=tmp_path / "run"
    )
    with pytest.raises(ConnectionError, match="the store is gone"):
        run(blocks(state, stop))
    if stop:
        assert Moments.load(tmp_path / "run").n_rows == 30 * stop
    resumed = run(blocks(state))
    plain = Moments.from_blocks(blocks(state), **{**STATES[state], "block_rows": 16})
    assert resumed.n_rows == N
    assert resumed.feature_names == (None if "sparse" in state else NAMES)
    for other in (resumed, run(blocks(state))):  # finished: nothing is read twice
        assert state_bytes(other) == state_bytes(plain)
    if state in MERGED:
        by_hand = made(state, block_rows=16)
        for block in blocks(state):
            by_hand.update(*block)
        assert state_bytes(by_hand) == state_bytes(plain)


@pytest.mark.parametrize("state", ["full", "classes", "folds", "folds of classes"])
def test_control_c_during_a_block_of_a_run_counts_its_rows_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str
) -> None:
    source = sources.from_arrays(*data(dtype=np.float32), block_rows=75)
    run = partial(Moments.from_blocks, source, **{**STATES[state], "block_rows": 16})
    with monkeypatch.context() as patch:
        # In the first part of a block of the source.
        patch.setattr(*REDUCTION, failing(getattr(*REDUCTION), 8))
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=tmp_path / "run")
    assert 0 < Moments.load(tmp_path / "run").n_rows < N
    assert state_bytes(run(checkpoint=tmp_path / "run")) == state_bytes(run())


def test_control_c_after_the_rows_of_a_block_waits_for_the_position(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, update = sources.from_arrays(*data(), block_rows=75), Moments.update

    def signalled(moments: Moments, *arguments: Any, **more: Any) -> Moments:
        updated = update(moments, *arguments, **more)
        if updated.n_rows == 150:
            signal.raise_signal(signal.SIGINT)
        return updated

    with monkeypatch.context() as patch:
        patch.setattr(Moments, "update", signalled)
        with pytest.raises(KeyboardInterrupt):
            Moments.from_blocks(source, checkpoint=tmp_path / "run")
    assert Moments.load(tmp_path / "run").n_rows == 150
    assert Moments.from_blocks(source, checkpoint=tmp_path / "run").n_rows == N


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Moments.from_blocks(blocks("full"), checkpoint=path, subsample=0.5)
    kept, run = path.read_bytes(), partial(Moments.from_blocks, checkpoint=path)
    for parameters in (
        {"block_rows": 7}, {"kinds": {"z": "classes"}}, {"joint": [("z", "y")]}, {"random_state": 3}
    ):  # fmt: skip
        with pytest.raises(FileFormatError, match="delete the checkpoint"):
            run(blocks("full"), **{"subsample": 0.5, **parameters})
    with pytest.raises(FileFormatError, match="delete the checkpoint"):
        run(tuple(blocks("full")), subsample=0.5)
    started("full").save(path)  # a state, but of no stream
    with pytest.raises(FileFormatError):
        run(blocks("full"))
    path.write_bytes(kept[:-3])
    with pytest.raises(FileFormatError):
        run(blocks("full"), subsample=0.5)
    path.unlink()
    with pytest.raises(ConnectionError):
        run(blocks("full", 4))
    with pytest.raises(FileFormatError, match=r"'v'.*'x'"):  # two halves of two variables
        run(blocks("full", v="x"))
    assert run(blocks("full")).n_rows == N


@pytest.mark.parametrize(
    "stream",
    [5, [], {}, {"position": None}, {"position": "1"}, {"position": -1}, {"position": True},
     {"source": 3}, {"files": {}}, {"files": [[]]}, {"files": [3]}],
)  # fmt: skip
def test_a_checkpoint_with_another_place_is_refused(tmp_path: Path, stream: Any) -> None:
    path, source = tmp_path / "c", sources.from_arrays(data()[0], block_rows=10)
    Moments.from_blocks(source, checkpoint=path)
    tensors, metadata = files.read(path, "moments", 1)
    changed = {**metadata["stream"], **stream} if isinstance(stream, dict) and stream else stream
    files.write(path, "moments", 1, tensors, {**metadata, "stream": changed})
    with pytest.raises(FileFormatError):
        Moments.from_blocks(source, checkpoint=path)


# --- sums, removals, weights ----------------------------------------------------------------------


@merged
def test_sums_and_differences(state: str) -> None:
    """Of parts with class names of their own, missing labels, and a feature far from zero."""
    n = 3000
    X, labels = data(n)
    X += 5.0 * (np.arange(n) // 1000)[:, None]
    X[:, 2] += 50.0
    z = labels["z"].astype(object)
    z[z == "a"] = np.array(["0", "1", "2"])[np.arange(n) // 1000][z == "a"]
    z[::50] = None
    labels["z"] = z

    def of(rows: Any, weight: Any = None, **more: Any) -> Moments:
        some: Moments = made(state, **more)
        return some.update(rows_for(state, X[rows]), part(labels, rows), sample_weight=weight)

    model, weight = Rows.of(X, labels), np.where(np.arange(n) < 100, 2.0, 1.0)
    rows = [model.take(slice(1000 * i, 1000 * (i + 1))) for i in range(3)]
    seeds = [{"random_state": i} if state == "sample" else {} for i in range(3)]
    a, b, c = (of(slice(1000 * i, 1000 * (i + 1)), **seeds[i]) for i in range(3))
    for together in (a + b + c, c + (a + b), summed([a, b, c])):
        check(together, model)
        check(together - c, rows[0] + rows[1], model)
    check((a + b) - b, rows[0], rows[0] + rows[1])
    if state == "sample":  # the samples are added and removed, too
        np.testing.assert_allclose((a + b - b).covariance(), a.covariance(), rtol=1e-9)
        np.testing.assert_allclose((b + a).covariance(), (a + b).covariance(), rtol=1e-9)
        squares = [m.__getstate__()["tensors"]["weights.squares"] for m in (a + b - b, a)]
        np.testing.assert_allclose(*squares, rtol=1e-12)
    with pytest.raises(IncompatibleMomentsError):
        _ = a - (a + b)
    check(fed_in_parts(made(state, block_rows=64), rows_for(state, X), labels, 33), model)
    for twice in (of(np.r_[0:n, 0:100]), of(slice(None), weight)):  # a row twice weighs two
        assert twice.weight == n + 100
        np.testing.assert_allclose(twice.mean, weight @ X / weight.sum(), rtol=1e-13)
    check(twice, Rows.of(X, labels, weight))
    # Control: about the mean of each part instead of the whole, the gap of the means is lost.
    parts = squares_of(a) + squares_of(b)
    assert np.abs(parts - squares_of(a + b)).max() > 1e-6 * parts.max()


@merged
def test_scaled_weights_scale_every_sum(state: str) -> None:
    """A power of 2 scales sums without rounding, so that every eraser has the same bits."""
    some = flushed(started(state))
    scaled, before = some.scaled(0.25), state_bytes(some)
    assert (scaled.weight, scaled.n_rows) == (0.25 * some.weight, some.n_rows)
    erasers: list[Any] = [sf.leace(m, erase="z") for m in (scaled, some)]
    assert np.array_equal(erasers[0].left, erasers[1].left)
    assert erasers[0].report.sampling == erasers[1].report.sampling
    assert state_bytes(scaled.scaled(4.0)) == state_bytes(some) == before
    assert state_bytes(scaled) != before  # control
    model = Rows.of(*data())
    scaled_model = Rows(model.x, 0.3 * model.w, model.labels)
    check(some.scaled(0.3), scaled_model)
    check(some.scaled(0.3) + some, scaled_model + model)


@merged
def test_rows_of_weight_zero_and_masked_rows_are_absent(state: str) -> None:
    X, labels = data()
    present, weight = np.arange(N) % 3 > 0, np.random.default_rng(1).integers(1, 4, N) / 2.0
    kept = rows_for(state, X[present]), part(labels, present)
    X[~present], labels["v"][~present], labels["z"] = np.nan, np.inf, labels["z"].astype(object)
    labels["z"][~present] = "none"
    absent = made(state).update(*kept, sample_weight=weight[present])
    given = rows_for(state, X), labels
    zero = made(state).update(*given, sample_weight=np.where(present, weight, 0))
    assert state_bytes(zero) == state_bytes(absent)
    if "sparse" not in state:
        masked = made(state).update(*given, mask=present)
        assert state_bytes(masked) == state_bytes(made(state).update(*kept))


# --- parameters, and states that do not combine ---------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"folds": n}, "folds is") for n in (0, 1, 2.0, True, 10**9, "2")),
    ({"folds": 2, "groups": 3}, "groups is"),
    ({"by": 3}, "name of a class-coded"),
    ({"by": "z", "subsample": 0.5}, "omit subsample="),
    ({"by": "z", "covariance_type": "diag"}, "omit subsample="),
    ({"kinds": {"age": "whatever"}}, "kinds has"),
    *(({"block_rows": n}, "block_rows") for n in (0, -1, 2.5, "8", True, [4], 10**25)),
    *(({"subsample": value}, "above 0 and at most 1")
      for value in (0, -0.5, 1.5, np.nan, True, "half", None)),
    *(({"subsample": 0.5, "random_state": seed}, "random_state")
      for seed in (-1, 1.5, True, "a", 1 << 63)),
    *(({"covariance_type": kind}, "covariance_type is")
      for kind in (None, True, 0, "tied", ["diag"])),
    *(({"covariance_type": "diag", "subsample": value}, "exclude each other")
      for value in (0.5, "auto")),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "text"), WRONG)
def test_parameters_are_refused_before_a_row_is_read(parameters: Any, text: str) -> None:
    def unread() -> Any:
        raise AssertionError("a row was read")
        yield

    with pytest.raises(InputError, match=text):
        Moments.from_blocks(unread(), **parameters)
    if "folds" not in parameters:
        with pytest.raises(InputError, match=text):
            Moments(**parameters)


Z, ZERO = ["x"] * N, [0] * N
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    # parameters of the second state; labels of both; text
    "variances": ({"covariance_type": "diag"}, {}, {}, "covariance_type="),
    "a sample": ({"subsample": 0.3}, {}, {}, "subsample=1"),
    "classes": ({"by": "z"}, {}, {}, "by='z'"),
    "type of classes": ({}, {"z": Z, "y": ZERO}, {"z": [1] * N, "y": ZERO}, "."),
    "kind": ({}, {"z": Z, "y": ZERO}, {"z": ["y"] * N, "y": np.arange(float(N))}, "."),
    "kind of columns": ({}, {"z": Z, "y": np.arange(float(N))}, {"z": Z, "y": ZERO}, "kinds="),
    "type": ({}, {"z": Z, "y": ZERO}, {"z": ["y"] * N, "y": ["s"] * N}, "."),
    "booleans": ({}, {"z": Z, "y": ZERO}, {"z": ["y"] * N, "y": [True] * N}, "."),
    "columns": (
        {}, {"z": Z, "y": np.ones((N, 2))}, {"z": ["y"] * N, "y": np.ones((N, 3))}, ".",
    ),
}  # fmt: skip


@pytest.mark.parametrize("by", [None, "z"])
@pytest.mark.parametrize("case", PAIRS)
def test_states_that_do_not_combine_are_refused(case: str, by: str | None) -> None:
    """Also if the variables that differ are those of different classes of `by`."""
    parameters, ours, theirs, text = PAIRS[case]
    if parameters and by:
        return
    X, default = data()
    first = Moments(by=by).update(X, ours or default)
    second = Moments(**{"by": by, **parameters}).update(X, theirs or default)
    first.mean, second.mean  # noqa: B018 (no rows wait)
    before = [state_bytes(some) for some in (first, second)]

    def add_in_place() -> None:
        nonlocal first
        first += second

    for combine in (lambda: first + second, lambda: second - first, add_in_place):
        with pytest.raises(IncompatibleMomentsError, match=text):
            combine()
    assert [state_bytes(some) for some in (first, second)] == before
    assert (first + first.copy()).n_rows == 2 * N  # control
    if parameters and case != "classes":
        for some in (second, second.factored()):
            with pytest.raises(InputError, match=f"chance level.*{text}"):
                sf.concept_strength(some, "z")


def test_parts_of_other_widths_and_classes_that_were_never_added_are_refused() -> None:
    whole = started("classes")
    before = flushed(whole).covariance().tobytes()
    with pytest.raises(IncompatibleMomentsError, match="3 features and of 2"):
        whole + Moments(by="z").update(SIX[:, :2], {"z": ["q"] * 6})
    with pytest.raises(IncompatibleMomentsError, match="were added"):
        whole - Moments(by="z").update(SIX, {"z": ["q"] * 6})
    assert whole.covariance().tobytes() == before


# --- memory that runs out -------------------------------------------------------------------------


class FaultyNumpy:
    """NumPy whose n-th allocation fails."""

    ALLOCATING = frozenset(
        ["append", "arange", "array", "asarray", "ascontiguousarray", "asfortranarray", "bincount",
         "concatenate", "cumsum", "diff", "empty", "flatnonzero", "full", "ones", "outer", "sqrt",
         "stack", "where", "zeros"]
    )  # fmt: skip

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, count()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(self.calls) == self.at:
                raise MemoryError("injected")
            return getattr(np, name)(*args, **kwargs)

        return call if name in self.ALLOCATING else getattr(np, name)


def faults(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> Iterator[int]:
    """Let every allocation of `act` in the package of moments fail in turn, until it succeeds."""
    package = [
        module for name, module in list(sys.modules.items())
        if name.startswith("splince_fast.moments.") and hasattr(module, "np")
    ]  # fmt: skip
    for at in range(500):
        faulty = FaultyNumpy(at)
        with monkeypatch.context() as patch:
            for module in package:
                patch.setattr(module, "np", faulty)
            try:
                act()
                break
            except MemoryError:
                pass
        yield at
    assert 1 < at < 499, "no fault was injected, or no call succeeded"


FAULTS = {
    # block size, rows before, rows of the update that fails
    "first update waits": (8, 0, 3),
    "first update is one block": (8, 0, 8),
    "update waits": (8, 9, 3),
    "update fills the block": (8, 5, 3),
    "update is one block": (8, 16, 8),
}


@pytest.mark.parametrize(
    ("dtypes", "weight"),
    [(("f4", "f4"), None), (("f8", "f8"), 7.0), (("f8", "f4"), None), (("f4", "f8"), 7.0)],
)
@pytest.mark.parametrize("case", FAULTS)
def test_memory_that_runs_out_leaves_the_state_as_it_was(
    monkeypatch: pytest.MonkeyPatch, case: str, weight: float | None, dtypes: tuple[str, str]
) -> None:
    """Every allocation of an update of at most one block fails in turn."""
    size, n_before, n = FAULTS[case]
    first, second = data(n_before, 1, dtypes[0]), data(n, 2, dtypes[1])
    other = data(12, 3, dtypes[0])
    second[1]["new"] = ["u"] * n
    second[1]["z"] = np.full(n, "q")
    weights = None if weight is None else np.full(n, weight)
    start = Moments(block_rows=size).update(*first)
    before, undisturbed = state_bytes(start), state_bytes(start.copy().update(*other))
    current = [start]
    for at in faults(monkeypatch, lambda: current[0].update(*second, sample_weight=weights)):
        assert state_bytes(current[0]) == before, f"allocation {at}"
        # Codes and weights beyond the buffered rows are overwritten; work memory has its dtype.
        assert state_bytes(current[0].update(*other)) == undisturbed
        current[:] = [Moments(block_rows=size).update(*first)]
    check(current[0], Rows.of(*first) + Rows.of(*second, weights))


def test_merging_that_runs_out_of_memory_changes_neither_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = data(10, 1), data(7, 2)
    second[1]["z"] = np.full(7, "q")
    a, b = Moments(block_rows=4).update(*first), Moments(block_rows=4).update(*second)

    def act() -> None:
        nonlocal a
        a += b

    for _ in faults(monkeypatch, act):
        check(a, Rows.of(*first))
        check(b, Rows.of(*second))
    check(a, Rows.of(*first) + Rows.of(*second))


def test_an_addition_that_fails_is_told_by_every_later_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not by a wrong number. Only BLAS can fail so late, where it adds float64 products itself."""
    X, labels = data(8, 1)
    del labels["v"]  # its products are computed beforehand, by the same function
    monkeypatch.setattr(row_kernels, "wide", lambda: False)
    moments = Moments(block_rows=8).update(X, labels)
    moments.save(tmp_path / "checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr(blas, "syrk_f64_into", failing(blas.syrk_f64_into, 0, MemoryError()))
        with pytest.raises(MemoryError):
            moments.update(X, labels)
    calls: list[Callable[[], Any]] = [
        lambda: moments.update(X, labels), lambda: moments.update(X[:1], labels={"z": ["a"]}),
        lambda: moments.mean, lambda: moments.n_rows, lambda: moments.weight, moments.covariance,
        moments.copy, lambda: moments.classes("z"), lambda: moments + Moments(),
        lambda: repr(moments), lambda: moments - moments, lambda: Moments() + moments,
        lambda: pickle.dumps(moments), lambda: moments.save(tmp_path / "other"),
        moments.factored, lambda: moments.variables, lambda: moments.n_features,
        lambda: moments.nbytes,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SplinceError, match="accumulate again, or load the checkpoint"):
            call()
    check(Moments.load(tmp_path / "checkpoint"), Rows.of(X, labels))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_memory_of_a_pass_over_a_file_does_not_grow_with_its_rows(
    tmp_path: Path, dtype: Any
) -> None:
    """At most three d x d matrices of doubles and three blocks, as NumPy's allocations show."""
    d, block_rows = 256, 512
    peaks = []
    for n in (4096, 16384):
        path = tmp_path / f"{n}.npy"
        np.save(path, np.zeros((n, d), dtype) + normal(1, d).astype(dtype))
        Moments(block_rows=8).update(np.ones((16, d), dtype))  # compiles
        tracemalloc.start()
        try:
            source = sources.from_npy(path, block_rows=block_rows)
            moments = Moments.from_blocks(source, block_rows=block_rows)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert moments.n_rows == n
    block = block_rows * d * np.dtype(dtype).itemsize
    # Besides: vectors of length d and Python's own objects.
    assert max(peaks) < 3 * 8 * d * d + 3.5 * block + 64 * 8 * d + 200_000, peaks
    assert peaks[1] < peaks[0] + 1.5 * block
