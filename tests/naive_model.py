"""A naive model of moments, computed from a list of rows, random tables and layouts."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import scipy.sparse
from hypothesis import strategies as st
from numpy.typing import NDArray

from splince_fast import Folds, Moments
from splince_fast._kernels import row_kernels
from splince_fast.exceptions import InputError, LabelError, NonFiniteError

# Multiplies the examples of every property test.
FUZZ = int(os.environ.get("SPLINCE_FAST_FUZZ", "0"))

# Module and name of the kernel that reduces small blocks on this processor; its first argument is
# the block.
REDUCTION: tuple[Any, str] = (
    row_kernels,
    "reduce_chunks" if row_kernels.wide() else "centre_columns",
)


# --- the naive model: a list of rows, and two passes over it in extended precision ---------------


@dataclass
class Rows:
    """Rows of positive weight with their labels, as they were given.

    A label is a class name, a tuple of floats (the columns of a continuous variable), or None.
    """

    x: NDArray[np.float64]
    w: NDArray[np.float64]
    labels: dict[Any, list[Any]] = field(default_factory=dict)
    narrow: bool = False  # some of them came with at most 32 bits

    def __len__(self) -> int:
        return len(self.w)

    def __add__(self, other: Rows) -> Rows:
        if not len(self) or not len(other):
            return other if not len(self) else self
        labels = {
            name: self.labels.get(name, [None] * len(self))
            + other.labels.get(name, [None] * len(other))
            for name in {**self.labels, **other.labels}
        }
        return Rows(
            np.concatenate([self.x, other.x]),
            np.concatenate([self.w, other.w]),
            labels,
            self.narrow or other.narrow,
        )

    def take(self, index: Any) -> Rows:
        where = np.arange(len(self))[index]
        labels = {name: [column[i] for i in where] for name, column in self.labels.items()}
        return Rows(self.x[where], self.w[where], labels, self.narrow)

    @classmethod
    def of(cls, X: Any, labels: dict[str, Any] | None = None, weight: Any = None) -> Rows:
        """The model of one block as it is passed to `Moments.update`."""
        X = np.asarray(X)
        w = np.ones(len(X)) if weight is None else np.asarray(weight, np.float64)
        columns = {name: _as_labels(column) for name, column in (labels or {}).items()}
        narrow = X.dtype.kind == "f" and X.dtype.itemsize <= 4
        return cls(X.astype(np.float64), w, columns, narrow).take(w > 0)


def no_rows(width: int = 1) -> Rows:
    return Rows(np.empty((0, width)), np.empty(0))


def _as_labels(column: Any) -> list[Any]:
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        wide = column[:, None] if column.ndim == 1 else column
        return [None if np.isnan(row).any() else tuple(map(float, row)) for row in wide]
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def scatter_of(x: NDArray[Any], w: NDArray[Any] | None = None) -> NDArray[Any]:
    """Two-pass scatter in extended precision."""
    x = x.astype(np.longdouble)
    w = np.ones(len(x), np.longdouble) if w is None else w.astype(np.longdouble)
    centred = x - (w @ x) / w.sum()
    return np.asarray((w[:, None] * centred).T @ centred)


def scatter_error(moments: Moments, X: NDArray[Any], weight: NDArray[Any] | None = None) -> float:
    """Largest error of the scatter, entry by entry against sqrt(S_ii S_jj)."""
    truth = scatter_of(X, weight)
    root = np.sqrt(np.diag(truth))
    found = moments.covariance(ddof=0).astype(np.longdouble) * moments.weight
    with np.errstate(invalid="ignore"):
        relative = np.abs(found - truth) / np.outer(root, root)
    assert np.isfinite(found).all()
    return float(np.nanmax(relative))


U32, U64 = 2.0**-24, 2.0**-53


def check(moments: Moments, rows: Rows, history: Rows | None = None) -> None:
    """Everything that `moments` says against the naive model.

    `history` holds every row that ever went through the state: what was removed leaves its
    roundings behind. The bounds are those of summation, (N u) sum |terms|, with Cauchy and Schwarz
    for products: entry (i, j) of the scatter to N u sqrt(S_ii S_jj), u = 2^-24 where float32 rows
    were seen, plus what the rounding of x itself, of size A = max |x|, does in float64. The factor
    8 allows for centring, weighting and merging; misplaced or lost rows are off by far more.
    """
    past = rows if history is None else history
    assert moments.n_rows == len(rows)
    if not len(rows):
        assert moments.weight == 0
        return
    n, total = len(past) + 16, float(past.w.sum())
    size = np.abs(past.x).max(axis=0)
    root = np.sqrt(np.diag(scatter_of(past.x, past.w)).astype(np.float64))
    w = rows.w.astype(np.longdouble)
    x = rows.x.astype(np.longdouble)

    assert abs(moments.weight - float(w.sum())) <= 8 * n * U64 * total
    mean_slack = 8 * n * U64 * size * total / float(w.sum())
    assert (np.abs(moments.mean - (w @ x) / w.sum()) <= mean_slack).all()

    full = moments.parameters.covariance_type == "full" and moments.parameters.subsample == 1
    u = U32 if past.narrow and full else U64
    mixed = np.sqrt(total) * np.outer(size, root)
    slack = n * u * np.outer(root, root) + n * U64 * (mixed + mixed.T)
    slack += (n * U64) ** 2 * total * np.outer(size, size)
    truth, variances = scatter_of(rows.x, rows.w), squares_of(moments)
    assert (np.abs(variances - np.diag(truth)) <= 8 * np.diag(slack)).all()
    if full:
        covariance = moments.covariance(ddof=0)
        np.testing.assert_array_equal(covariance, covariance.T)
        excess = np.abs(covariance * float(w.sum()) - truth) - 8 * slack
        assert (excess <= 0).all(), f"the scatter is off by {excess.max()} beyond rounding"
    if moments.parameters.by is not None:
        _check_classes_of(moments, rows, past)

    for name in moments.variables:
        _check_variable(moments, name, rows, past, size)
    for name, column in rows.labels.items():
        assert name in moments.variables or all(value is None for value in column)


def _check_variable(
    moments: Moments, name: Any, rows: Rows, past: Rows, size: NDArray[np.float64]
) -> None:
    """Counts of classes, and the covariance with the columns of a variable: values, indicators."""
    column = rows.labels.get(name, [None] * len(rows))
    known = np.array([value is not None for value in column])
    assert moments._flushed().variable(name).n_rows == known.sum()
    if not known.any():
        return
    given = [value for value in column if value is not None]
    w, x = rows.w.astype(np.longdouble)[known], rows.x.astype(np.longdouble)[known]
    if isinstance(given[0], tuple) and all(type(part) is float for part in given[0]):
        z = np.array(given, np.longdouble)
        seen = np.abs(np.array([v for v in past.labels[name] if v is not None])).max(axis=0)
    else:
        classes = moments.classes(name)
        assert len({(type(c), c) for c in classes}) == len(classes)
        counts = {c: count for c, count in moments.class_counts(name).items() if count}
        assert counts == Counter(given)
        z = np.array([[value == c for c in classes] for value in given], np.longdouble)
        seen = np.full(len(classes), 0.5)
    weight = w.sum()
    centred_x, centred_z = x - (w @ x) / weight, z - (w @ z) / weight
    truth = (w[:, None] * centred_x).T @ centred_z / weight
    slack = 32 * (len(past) + 16) * U64 * np.outer(size, seen) * past.w.sum() / float(weight)
    assert (np.abs(moments.cross_covariance(name, ddof=0) - truth) <= slack).all(), name


def _check_classes_of(moments: Moments, rows: Rows, past: Rows) -> None:
    """The moments of each class of `by` are those of its rows."""
    by = moments.parameters.by

    def of_class(all_rows: Rows, name: Any) -> Rows:
        column = all_rows.labels.get(by, [None] * len(all_rows))
        return all_rows.take([i for i, value in enumerate(column) if value == name])

    found = {c: own for c, own in moments.by_class.items() if own.n_rows}
    assert found.keys() == set(rows.labels.get(by, [None]))
    for name, own in found.items():
        check(own, of_class(rows, name), of_class(past, name))


def squares_of(moments: Moments) -> NDArray[np.float64]:
    """Sums of squares about the mean, of all rows."""
    found: NDArray[np.float64] = moments._state().second.diagonal()
    return found


def summed(states: Iterable[Moments]) -> Moments:
    """``sum(states)``, which begins with 0."""
    total: Any = sum(states)
    assert isinstance(total, Moments)
    return total


def state_bytes(moments: Moments) -> dict[str, Any]:
    """All that a state holds, rows that wait included, for comparison bit by bit."""
    state = moments.__getstate__()
    tensors = {k: (t.dtype.str, t.shape, t.tobytes()) for k, t in state["tensors"].items()}
    return {"metadata": state["metadata"], "tensors": tensors}


# --- forms of a state ----------------------------------------------------------------------------

# Arguments of `Moments`, or of `Folds` where they have `folds`.
STATES: dict[str, dict[str, Any]] = {
    "full": {},
    "variances": {"covariance_type": "diag"},
    "variances of sparse rows": {"covariance_type": "diag"},
    "sample": {"subsample": 0.3, "random_state": 2},
    "classes": {"by": "z"},
    "folds": {"folds": 2},
    "folds of classes": {"folds": 2, "by": "z"},
}


def rows_for(state: str, X: Any) -> Any:
    """The rows, sparse where the state is one of sparse rows."""
    if "sparse" not in state or X.ndim != 2:
        return X
    dtype = np.dtype(np.float32) if X.dtype.itemsize == 2 and X.dtype.kind == "f" else X.dtype
    return scipy.sparse.csr_array(X.astype(dtype.newbyteorder("=")))


def made(state: str, **more: Any) -> Any:
    arguments = {**STATES[state], **more}
    n_folds = arguments.pop("folds", None)
    return Moments(**arguments) if n_folds is None else Folds(n_folds, **arguments)


def part(labels: dict[str, Any], rows: Any) -> dict[str, Any]:
    return {name: column[rows] for name, column in labels.items()}


def classed(n: int, d: int = 3, seed: int = 0, dtype: Any = np.float64) -> tuple[Any, Any]:
    """Rows whose covariance depends on their class z; some values of v are missing."""
    rng = np.random.default_rng(seed)
    z, y, v = rng.integers(0, 3, n), rng.integers(0, 2, n), rng.normal(size=n)
    X = rng.normal(size=(n, d)) * (1 + z[:, None]) + 3 * z[:, None] + np.outer(y, np.eye(d)[0])
    v[rng.random(n) < 0.1] = np.nan
    return X.astype(dtype), {"z": np.array(["a", "b", "c"])[z], "y": y, "v": v}


def fed_in_parts(state: Any, X: Any, labels: Any, size: int, weight: Any = None) -> Any:
    """A state after updates of this many rows."""
    for start in range(0, X.shape[0], size):
        rows = slice(start, start + size)
        given = None if weight is None else weight[rows]
        state.update(X[rows], part(labels, rows), sample_weight=given)
    return state


# --- updates that are refused ---------------------------------------------------------------------


def spoilt(value: float, row: int = 2) -> NDArray[np.float64]:
    X = np.random.default_rng(0).normal(size=(6, 3))
    X[row, 1] = value
    return X


SIX = spoilt(0.0)
# X, other arguments of `update`, type of the error, and a pattern of its text.
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "NaN": (spoilt(np.nan), {}, NonFiniteError, r"1 of 6 rows \(row 2\)"),
    "infinity": (spoilt(np.inf, 5), {}, NonFiniteError, "row 5"),
    "all rows": (
        np.full((6, 3), np.nan), {}, NonFiniteError, r"6 of 6 rows \(rows 0, 1, 2, 3, 4, \.\.\.\)",
    ),
    **{
        f"squares of {value} overflow": (spoilt(value), {}, InputError, "rescale")
        for value in (1.5e149, 1e155, 1.7e308)
    },
    "float16 saturated": (spoilt(np.inf).astype("f2"), {}, NonFiniteError, "65504"),
    "F-ordered NaN": (np.asfortranarray(spoilt(np.nan)), {}, NonFiniteError, "row 2"),
    "long double beyond float64": (
        np.full((6, 3), np.longdouble("1e400")) if np.finfo(np.longdouble).max > 1e400
        else np.full((6, 3), np.inf), {}, InputError, ".",
    ),
    "integer beyond float64": (np.array([[10**400, 1, 1]], object), {}, InputError, "."),
    "list of integers beyond float64": ([[10**400, 1, 1]], {}, InputError, "."),
    "None among objects": (np.array([[None, 1.0, 1.0]], object), {}, InputError, "."),
    "one axis": (np.ones(4), {}, InputError, r"X\[None, :\]"),
    "no axis": (np.float64(3), {}, InputError, "2-D"),
    "no columns": (np.empty((3, 0)), {}, InputError, "column"),
    "leading dimensions without features": (np.ones((6, 1, 0)), {}, InputError, "columns"),
    "ragged": ([[1, 2], [3]], {}, InputError, "unequal length"),
    "complex": (SIX * 1j, {}, InputError, "imaginary"),
    "text": (SIX.astype(str), {}, InputError, "text|dtype"),
    "dates": (np.ones((6, 3), "M8[s]"), {}, InputError, "dtype"),
    "structured": (np.ones((6, 3), [("a", float)]), {}, InputError, "dtype"),
    "nothing": (None, {}, InputError, "."),
    "mapping": ({"a": [1, 2]}, {}, InputError, "."),
    "sparse with NaN": (scipy.sparse.csr_array(spoilt(np.nan)), {}, InputError, "."),
    "mask of numbers": (np.ones((2, 2, 3)), {"mask": [[0, 2], [1, 1]]}, InputError, "1 and 0"),
    "mask of text": (SIX, {"mask": ["a", "b"] * 3}, InputError, "1 and 0"),
    "masked rows": (np.ma.array(SIX, mask=np.eye(6, 3)), {}, InputError, "mask"),
    **{
        f"weights {name}": (SIX, {"sample_weight": weight}, InputError, text)
        for name, weight, text in (
            ("masked", np.ma.array(np.ones(6), mask=np.eye(6)[0]), "mask"),
            ("too short", [1], "one weight per row"),
            ("of two axes", np.ones((6, 1)), "shape"),
            ("of text", ["a"] * 6, "numbers"),
            ("complex", np.ones(6) * 1j, "."),
            ("beyond float64", [10**400, 1, 1, 1, 1, 1], "."),
            ("negative", [1, -1e-9, 1, 1, 1, 1], "non-negative"),
            ("NaN", [1, np.nan, 1, 1, 1, 1], "finite"),
            ("infinite", [1, np.inf, 1, 1, 1, 1], "finite"),
            ("None", [1, None, 1, 1, 1, 1], "."),
        )
    },
    **{
        f"labels {name}": (SIX, {"labels": labels}, kind, ".")
        for name, labels, kind in (
            ("too short", {"new": [1]}, InputError),
            ("too long", {"new": ["a"] * 9}, InputError),
            ("infinite", {"new": [1.0, np.inf, 0.0, 2.0, 3.0, 4.0]}, InputError),
            ("of two types", {"new": ["a", 1] * 3}, LabelError),
            ("of bytes", {"new": [b"a"] * 6}, LabelError),
            ("of a second variable wrong", {"new": ["u"] * 6, "newer": [b"x"] * 6}, LabelError),
            ("of a name that is no string", {7: ["a"] * 6}, LabelError),
            ("whose squares overflow", {"new": [0, 1, -1e155, 1e155, 0.5, 2]}, LabelError),
            ("whose sums overflow", {"new": [0, 1, -1.7e308, 1.7e308, 0.5, 2]}, LabelError),
        )
    },
}  # fmt: skip


# --- blocks at random ---------------------------------------------------------------------------

DTYPES = ("f8", "f4", "f2", ">f2", ">f4", ">f8", "i8", "i1", "u2", "u8", "bool")
LAYOUTS = ("C", "F", "strided", "reversed", "read-only")
CLASS_NAMES: dict[str, list[Any]] = {
    "text": ["a", "b", "c", "d", "e", "f"],
    "number": [-3, 0, 1, 7, 2**40],
    "flag": [False, True],
}


@dataclass
class Table:
    """One block as `Moments.update` takes it, and its model."""

    X: NDArray[Any]
    labels: dict[str, Any]
    weight: NDArray[np.float64] | None
    rows: Rows

    def feed(self, moments: Moments) -> Moments:
        return moments.update(self.X, self.labels or None, sample_weight=self.weight)


def laid_out(X: NDArray[Any], layout: str) -> NDArray[Any]:
    """The same numbers in another layout of memory."""
    if layout == "F":
        return np.asfortranarray(X)
    if layout == "strided":
        wide = np.zeros((2 * len(X) + 1, 3 * X.shape[1]), X.dtype)
        view = wide[1::2, ::3]
        view[...] = X
        return view
    if layout == "reversed":
        return X[::-1, ::-1].copy()[::-1, ::-1]
    if layout == "unaligned":
        memory = np.zeros(X.nbytes + 1, np.uint8)
        view = memory[1:].view(X.dtype).reshape(X.shape)
        view[...] = X
        return view
    copy = X.copy()
    copy.flags.writeable = layout != "read-only"
    return copy


def rows_of(rng: np.random.Generator, n: int, d: int, dtype: str, offset: float) -> NDArray[Any]:
    """Random rows that `dtype` holds, with the given offset in standard deviations."""
    x = rng.normal(size=(n, d)) * rng.uniform(0.1, 3.0, size=d) + offset
    if dtype == "bool":
        return x > offset
    if np.dtype(dtype).kind in "iu":
        return np.clip(np.round(3 * (x - offset)) + 5, 0, 100).astype(dtype)
    return x.astype(dtype)


@st.composite
def tables(draw: st.DrawFn, width: int | None = None) -> Table:
    """A block of rows with any dtype, layout, labels and weights."""
    n, d = draw(st.integers(0, 20)), width or draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    X = rows_of(rng, n, d, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0, 1, 300])))
    X = laid_out(X, draw(st.sampled_from(LAYOUTS)))
    labels: dict[str, Any] = {}
    for name, choices in CLASS_NAMES.items():
        form = draw(st.sampled_from(["absent", "full", "gaps"]))
        if form != "absent":
            known = choices[: draw(st.integers(1, len(choices)))]
            column = [known[i] for i in rng.integers(0, len(known), n)]
            if form == "gaps":
                column = [
                    None if u < 0.3 else v for u, v in zip(rng.random(n), column, strict=True)
                ]
            labels[name] = column
    for name, k in (("score", 1), ("scores", 2)):
        form = draw(st.sampled_from(["absent", "full", "gaps"]))
        if form != "absent":
            values = rng.normal(size=(n, k)) + 2 * np.float64(X.sum(axis=1, keepdims=True))
            if form == "gaps":
                values[rng.random((n, k)) < 0.2] = np.nan
            labels[name] = values[:, 0] if k == 1 else values
    weight = None
    if draw(st.booleans()):
        weight = rng.choice([0.0, 0.25, 1.0, 2.0, 1e3], size=n)
        if draw(st.booleans()):
            weight = np.maximum(weight, rng.random(n))
    return Table(X, labels, weight, Rows.of(X, labels, weight))


block_sizes = st.sampled_from([None, 1, 2, 3, 7, 64])


def fed(*parts: Table, block_rows: int | None = None) -> Moments:
    moments = Moments(block_rows=block_rows)
    for part in parts:
        part.feed(moments)
    return moments


def flushed(moments: Moments) -> Moments:
    moments.weight  # noqa: B018 (a read merges the rows that wait)
    return moments


# --- Ctrl-C in the middle of an update -----------------------------------------------------------


def failing(
    function: Callable[..., Any], at: int, error: BaseException | None = None
) -> Callable[..., Any]:
    """The function with an error in its call number `at`, or with Ctrl-C after that call."""

    def call(*arguments: Any, **options: Any) -> Any:
        number = next(call.calls)
        if number == at and error is not None:
            raise error
        result = function(*arguments, **options)
        if number == at:
            signal.raise_signal(signal.SIGINT)
        return result

    call.calls = count()
    return call
