"""Contracts of every form of moments: full, variances, samples, classes, folds.

An update is whole or absent, files keep every bit, a run resumes to the same bytes, and sums are
those of the rows; the same blocks give the same bytes, and a pass takes memory for blocks only.
"""

from __future__ import annotations

import pickle
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from entangled import drawn, normal
from naive_model import (
    REFUSED,
    SIX,
    STATES,
    Rows,
    check,
    classed,
    fed_in_parts,
    flushed,
    interrupt_reductions,
    made,
    part,
    rows_for,
    squares_of,
    state_bytes,
    summed,
)
from processes import script

import splince_fast as sf
from splince_fast import Folds, Moments, SplinceError, sources
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
        data()[1],
        NonFiniteError,
        f"row {N - 1}",
    ),
}


@pytest.mark.parametrize(
    ("state", "case"),
    [(s, c) for s in STATES for c in REFUSED if s in MERGED or "mask" not in REFUSED[c][1]],
)
def test_errors_are_typed_tell_why_and_change_nothing(state: str, case: str) -> None:
    X, arguments, kind, text = REFUSED[case]
    if type(X) is np.ndarray and X.dtype == float and X.size and "mask" not in arguments:
        X = rows_for(state, X)
    labels = {**KNOWN, **arguments.get("labels", {})}
    # The update would join buffered rows, fill one block, or be the first.
    for some in (started(state, 37), started(state, 36, block_rows=6), made(state)):
        before = state_bytes(some)
        with pytest.raises(kind, match=text) as caught:
            some.update(X, **{**arguments, "labels": labels})
        assert len(str(caught.value)) > 30
        assert state_bytes(some) == before


@states
@pytest.mark.parametrize("case", CONTRADICTING)
def test_a_refused_update_changes_no_part(state: str, case: str) -> None:
    X, changes, kind, text = CONTRADICTING[case]
    some, undisturbed = (started(state, dtype=np.float32) for _ in range(2))
    before = state_bytes(some)
    with pytest.raises(kind, match=text):
        some.update(rows_for(state, X), {**KNOWN, **changes})
    if case == "a wrong width":  # also of no rows
        with pytest.raises(kind, match=text):
            some.update(rows_for(state, X[:0]), part(KNOWN, slice(0)))
    assert state_bytes(some) == before
    more = rows_for(state, SIX), KNOWN
    assert state_bytes(some.update(*more)) == state_bytes(undisturbed.update(*more))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("before", "after"), [("f4", "f8"), ("f8", "f4"), ("f8", "f8")])
def test_a_refused_block_leaves_no_trace_in_what_follows(
    before: str, after: str, value: float
) -> None:
    """It fills no work memory of its dtype, and sets no column names."""
    X, y = data(16)[0], data(16, 1)[0]
    some = Moments(block_rows=16).update(X.astype(before), {"y": y})
    kept, undisturbed = state_bytes(some), some.copy()
    wrong = X.astype(after)
    wrong[3, 1] = value
    with pytest.raises(InputError):
        some.update(wrong, {"y": pd.DataFrame(y, columns=["age", "height", "weight"])})
    assert state_bytes(some) == kept
    for state in (some, undisturbed):
        state.update(2 * X.astype(before), {"y": pd.DataFrame(y, columns=list("abc"))})
    assert state_bytes(some) == state_bytes(undisturbed)


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


def failing(function: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    """Return the function with an error in its call number `at`."""
    calls = iter(range(10**9))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error
        return function(*args, **kwargs)

    return call


KERNELS = [
    (state, kernel) for state in ("full", "classes", "folds", "folds of classes")
    for kernel in ("reduce_chunks", "centre_columns", "syrk_f32_out")
] + [("variances", "sum_block"), ("sample", "sum_block")]  # fmt: skip


@pytest.mark.parametrize("waiting", [0, 5])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize(("state", "kernel"), KERNELS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
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


@pytest.mark.parametrize("state", ["full", "classes", "folds", "folds of classes"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_control_c_leaves_an_update_whole_or_absent(
    monkeypatch: pytest.MonkeyPatch, at: int, state: str
) -> None:
    some, twin = started(state, 4), started(state, 4)
    X, labels = data(200)
    before, handler = state_bytes(some), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_reductions(patch, at)
        with pytest.raises(KeyboardInterrupt):
            some.update(X, labels)
    assert signal.getsignal(signal.SIGINT) is handler
    assert state_bytes(some) == before
    some.update(X, labels)
    interrupt_reductions(monkeypatch, 1)  # of the rows that wait, by a read
    with pytest.raises(KeyboardInterrupt):
        (some[0] if isinstance(some, Folds) else some).covariance()
    assert state_bytes(some) == state_bytes(twin.update(X, labels))


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


class Blocks:
    """Blocks of 30 rows that break off before one of them."""

    def __init__(self, state: str, stop: int = 10, dtype: Any = np.float32, **names: str) -> None:
        X, labels = data(dtype=dtype)
        self.state, self.stop, self.X = state, stop, X
        self.labels = {names.get(name, name): column for name, column in labels.items()}

    def __iter__(self) -> Iterator[Any]:
        for i in range(10):
            if i == self.stop:
                raise ConnectionError("the store is gone")
            rows = slice(30 * i, 30 * i + 30)
            X = rows_for(self.state, self.X[rows])
            yield (
                X if "sparse" in self.state else pd.DataFrame(X, columns=NAMES),
                part(self.labels, rows),
            )


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
        run(Blocks(state, stop))
    if stop:
        assert Moments.load(tmp_path / "run").n_rows == 30 * stop
    resumed = run(Blocks(state))
    plain = Moments.from_blocks(Blocks(state), **{**STATES[state], "block_rows": 16})
    assert resumed.n_rows == N
    assert resumed.feature_names == (None if "sparse" in state else NAMES)
    for other in (resumed, run(Blocks(state))):  # finished: nothing is read twice
        assert state_bytes(other) == state_bytes(plain)
    if state in MERGED:
        by_hand = made(state, block_rows=16)
        for block in Blocks(state):
            by_hand.update(*block)
        assert state_bytes(by_hand) == state_bytes(plain)


@pytest.mark.parametrize("state", ["full", "classes", "folds", "folds of classes"])
def test_control_c_during_a_block_of_a_run_counts_its_rows_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str
) -> None:
    source = sources.from_arrays(*data(dtype=np.float32), block_rows=75)
    run = partial(Moments.from_blocks, source, **{**STATES[state], "block_rows": 16})
    with monkeypatch.context() as patch:
        interrupt_reductions(patch, 9)  # in the first part of a block of the source
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=tmp_path / "run")
    assert 0 < Moments.load(tmp_path / "run").n_rows < N
    assert state_bytes(run(checkpoint=tmp_path / "run")) == state_bytes(run())


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Moments.from_blocks(Blocks("full"), checkpoint=path, subsample=0.5)
    kept, run = path.read_bytes(), partial(Moments.from_blocks, checkpoint=path)
    for parameters in (
        {"block_rows": 7}, {"kinds": {"z": "classes"}}, {"joint": [("z", "y")]}, {"random_state": 3}
    ):  # fmt: skip
        with pytest.raises(FileFormatError, match="delete the checkpoint"):
            run(Blocks("full"), **{"subsample": 0.5, **parameters})
    with pytest.raises(FileFormatError, match="delete the checkpoint"):
        run(tuple(Blocks("full")), subsample=0.5)
    started("full").save(path)  # a state, but of no stream
    with pytest.raises(FileFormatError):
        run(Blocks("full"))
    path.write_bytes(kept[:-3])
    with pytest.raises(FileFormatError):
        run(Blocks("full"), subsample=0.5)
    path.unlink()
    with pytest.raises(ConnectionError):
        run(Blocks("full", 4))
    with pytest.raises(FileFormatError, match=r"'v'.*'x'"):  # two halves of two variables
        run(Blocks("full", v="x"))
    assert run(Blocks("full")).n_rows == N


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
    erasers = [sf.leace(m, erase="z") for m in (scaled, some)]
    assert np.array_equal(erasers[0].left, erasers[1].left)
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


def test_a_sample_of_auto_needs_a_source_and_classes_need_by() -> None:
    with pytest.raises(InputError, match="above 0 and at most 1"):
        Moments(subsample="auto")
    with pytest.raises(InputError, match=r"Moments\(by=NAME\)"):
        _ = started("full").by_class


Z, ZERO = ["x"] * N, [0] * N
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    # parameters of the second state; labels of both; text
    "variances": ({"covariance_type": "diag"}, {}, {}, "covariance_type="),
    "a sample": ({"subsample": 0.3}, {}, {}, "subsample=1"),
    "classes": ({"by": "z"}, {}, {}, "by='z'"),
    "type of classes": ({}, {"z": Z, "y": ZERO}, {"z": [1] * N, "y": ZERO}, "."),
    "kind": ({}, {"z": Z, "y": ZERO}, {"z": ["y"] * N, "y": np.arange(float(N))}, "."),
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


def labelled(n: int, seed: int, dtype: Any = np.float32) -> tuple[Any, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3)).astype(dtype)
    return X, {"z": rng.integers(0, 3, n), "y": rng.normal(size=n)}


class FaultyNumpy:
    """NumPy whose n-th allocation fails."""

    ALLOCATING = frozenset(
        ["append", "arange", "array", "asarray", "ascontiguousarray", "asfortranarray", "bincount",
         "concatenate", "cumsum", "diff", "empty", "flatnonzero", "full", "ones", "outer", "sqrt",
         "stack", "where", "zeros"]
    )  # fmt: skip

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        return self._wrapped(value) if name in self.ALLOCATING else value

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise MemoryError("injected")
            return function(*args, **kwargs)

        return call


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
            except MemoryError:
                pass
            else:
                assert at > 1, "no fault was injected"
                return
        yield at
    pytest.fail("still failing after 500 allocations")


FAULTS = {
    # block size, rows before, rows of the update that fails
    "first update waits": (8, 0, 3),
    "first update is one block": (8, 0, 8),
    "update waits": (8, 9, 3),
    "update fills the block": (8, 5, 3),
    "update is one block": (8, 16, 8),
}


@pytest.mark.parametrize("dtypes", [("f4", "f4"), ("f8", "f8"), ("f8", "f4"), ("f4", "f8")])
@pytest.mark.parametrize("weight", [None, 7.0])
@pytest.mark.parametrize("case", FAULTS)
def test_memory_that_runs_out_leaves_the_state_as_it_was(
    monkeypatch: pytest.MonkeyPatch, case: str, weight: float | None, dtypes: tuple[str, str]
) -> None:
    """Every allocation of an update of at most one block fails in turn."""
    size, n_before, n = FAULTS[case]
    first, second = labelled(n_before, 1, dtypes[0]), labelled(n, 2, dtypes[1])
    other = labelled(12, 3, dtypes[0])
    second[1]["new"] = ["u"] * n
    second[1]["z"] = np.full(n, 9)
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
    first, second = labelled(10, 1), labelled(7, 2)
    second[1]["z"] = np.full(7, 5)
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
    X, labels = labelled(8, 1, np.float64)
    del labels["y"]  # its products are computed beforehand, by the same function
    monkeypatch.setattr(row_kernels, "wide", lambda: False)
    moments = Moments(block_rows=8).update(X, labels)
    moments.save(tmp_path / "checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr(blas, "syrk_f64_into", failing(blas.syrk_f64_into, 0, MemoryError()))
        with pytest.raises(MemoryError):
            moments.update(X, labels)
    calls: list[Callable[[], Any]] = [
        lambda: moments.update(X, labels), lambda: moments.update(X[:1], labels={"z": [0]}),
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


EPS = float(np.finfo(np.float64).eps)


def _bytes_of_a_run(seed: int = 0) -> tuple[Any, bytes]:
    X, z, y = drawn(3000, 70, seed)
    moments = Moments(block_rows=512)
    for start in range(0, 3000, 700):
        rows = slice(start, start + 700)
        moments.update(X[rows].astype(np.float32), {"z": z[rows], "y": y[rows]})
    P = sf.splince(moments, erase="z", keep="y")
    return state_bytes(moments), P.left.tobytes() + P.right.tobytes() + P(X).tobytes()


def test_the_same_blocks_give_the_same_bytes() -> None:
    assert _bytes_of_a_run() == _bytes_of_a_run()
    assert _bytes_of_a_run(1)[1] != _bytes_of_a_run()[1], "the control: other rows, other bytes"


THREADS = """
import sys
import numpy as np
import splince_fast as sf
X = np.random.default_rng(0).normal(size=(3000, 300))
z = np.arange(3000) % 3
X[:, 0] += z
moments = sf.Moments().update(X, {"z": z})
np.savez(sys.argv[1], covariance=moments.covariance(), matrix=sf.leace(moments, erase="z").matrix())
"""


def test_blas_threads_agree_to_rounding(tmp_path: Path) -> None:
    found = []
    for threads in ("1", "2"):
        path = tmp_path / f"{threads}.npz"
        script(THREADS, str(path), OPENBLAS_NUM_THREADS=threads)
        found.append(dict(np.load(path)))
    for name, scale in (("covariance", np.abs(found[0]["covariance"]).max()), ("matrix", 1.0)):
        # Sums of n products in another order differ by a few sqrt(n) eps; solving adds d eps.
        assert np.abs(found[0][name] - found[1][name]).max() < 300 * 8 * EPS * scale, name


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
