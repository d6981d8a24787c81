"""Failures that other tools showed in the field, each with what is right; and numbers at the edge.

Only what no other test module holds: ``test_methods.py``, ``test_estimators.py``,
``test_moments.py`` and the others name the rest. The docstring of a test says in one line what
the other tool did.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Rows, check, state_bytes
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import FileFormatError, Moments, Report, SplinceError, sources

Float = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


def normal(n: int, d: int, seed: int = 0) -> Float:
    return np.random.default_rng(seed).normal(size=(n, d))


def gap(X: Float, z: Any, classes: int = 2) -> float:
    """Largest difference between a class mean and the mean of all rows."""
    return float(max(np.abs(X[z == c].mean(axis=0) - X.mean(axis=0)).max() for c in range(classes)))


def drawn(n: int = 400, d: int = 6, seed: int = 0) -> tuple[Float, Any, Any]:
    """Rows that show a binary concept and a task that goes with it four times out of five."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.8, z, 1 - z)
    X = rng.normal(size=(n, d)) @ rng.normal(size=(d, d))
    X[:, 0] += 2 * z
    X[:, 1] += y
    return X, z, y


# --- other tools and what is right ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("members", [3, 20])
def test_rare_concept_is_erased_whatever_its_share(members: int, dtype: Any) -> None:
    """An absolute threshold for singular values left the whole gap between the means, silently."""
    n = 20_000
    X = normal(n, 8).astype(dtype)
    z = np.zeros(n, int)
    z[:members] = 1
    X[:members, 2] += 3.5
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    clean = P(X.astype(np.float64))
    assert gap(X.astype(np.float64), z) > 2
    # The mean of few members errs by rounding of the sums over all n rows, divided by their share.
    assert gap(clean, z) < 8 * n * EPS * 4 * (n / members) ** 0.5


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_float32_rows_far_from_zero_are_erased(offset: float) -> None:
    """Running float32 means left a residual of 2e-2 at a mean of 1e4 standard deviations."""
    X, z, _ = drawn(4000)
    X = (X + offset).astype(np.float32)
    moments = Moments(block_rows=256).update(X, {"z": z})
    wide = X.astype(np.float64)
    truth = np.cov(wide.T)
    scale = np.sqrt(np.outer(np.diag(truth), np.diag(truth)))
    assert (np.abs(moments.covariance() - truth) / scale).max() < 1e-6
    clean = sf.leace(moments, erase="z")(wide)
    # Erased rows of float64 err by the size of the offset, not by that of float32.
    assert gap(clean, z) < 64 * EPS * offset * len(X) ** 0.5


@pytest.mark.parametrize("scale", [1e-12, 5e-4, 1.0, 1e12])
def test_small_variances_are_no_zero_variances(scale: float) -> None:
    """An absolute cut of eigenvalues at 1e-6 turned small data into P = 0: everything deleted."""
    X, z, y = drawn()
    expected = sf.splince(Moments().update(X, {"z": z, "y": y}), erase="z", keep="y").matrix()
    found = sf.splince(Moments().update(scale * X, {"z": z, "y": y}), erase="z", keep="y")
    np.testing.assert_allclose(found.matrix(), expected, rtol=0, atol=1e-10)
    assert found.rank == 1


def test_residual_is_zero_for_columns_of_unlike_means_and_features_keep_theirs() -> None:
    """Centring several sensitive columns by one common mean left a correlation of 0.76."""
    rng = np.random.default_rng(0)
    sensitive = np.column_stack([rng.integers(0, 2, 500), rng.normal(40, 9, 500)])
    X = normal(500, 5) + sensitive @ rng.normal(size=(2, 5)) / 10 + 6
    P = sf.leace(Moments().update(X, {"s": sensitive.astype(float)}), erase="s")
    clean = P(X)
    both = np.corrcoef(clean.T, sensitive.T)[:5, 5:]
    assert np.abs(both).max() < 1e-12
    np.testing.assert_allclose(clean.mean(axis=0), X.mean(axis=0), rtol=1e-12)


def test_a_map_that_erases_nothing_is_the_identity_and_not_nan() -> None:
    """With nothing to erase, a correction of the trace divided zero by zero."""
    X = np.vstack([normal(50, 4), normal(50, 4)])
    z = np.repeat([0, 1], 50)  # equal rows in both classes
    with pytest.warns(sf.NothingErasedWarning):
        P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    np.testing.assert_array_equal(P(X), X)
    np.testing.assert_array_equal(P.matrix(), np.eye(4))


def test_half_precision_rows_overflow_no_statistic() -> None:
    """Statistics in the dtype of float16 rows were infinite after a few batches."""
    X = (normal(3000, 4) * 100 + 300).astype(np.float16)
    z = np.arange(3000) % 2
    moments = Moments(block_rows=128)
    for start in range(0, 3000, 100):
        moments.update(X[start : start + 100], {"z": z[start : start + 100]})
    truth = np.cov(X.astype(np.float64).T)
    sizes = np.sqrt(np.outer(np.diag(truth), np.diag(truth)))
    assert (np.abs(moments.covariance() - truth) / sizes).max() < 1e-6
    assert np.isfinite(sf.leace(moments, erase="z")(X).astype(np.float64)).all()


@pytest.mark.parametrize("value", [0, 7])
def test_a_constant_task_is_named(value: int) -> None:
    """A task of a single value gave 0/0: a projection of NaN."""
    X, z, _ = drawn()
    moments = Moments().update(X, {"z": z, "job": np.full(len(X), value)})
    with pytest.raises(sf.ConstantVariableError, match="job"):
        sf.splince(moments, erase="z", keep="job")


@pytest.mark.parametrize("method", [sf.leace, sf.sal, sf.mean_projection])
def test_integers_of_one_dimension_are_classes(method: Any) -> None:
    """Labels 0, 1, 2 in one column were one number: rank 1, and the concept stayed readable."""
    z = np.arange(300) % 3
    X = normal(300, 5) + np.eye(3, 5)[z]
    P = method(Moments().update(X, {"z": z}), erase="z")
    assert P.rank == 2
    assert gap(P(X), z, 3) < 1e-12
    as_number = Moments(kinds={"z": "continuous"}).update(X, {"z": z})
    one = sf.leace(as_number, erase="z")
    assert one.rank == 1
    assert gap(one(X), z, 3) > 0.05, "the control: one number is not the classes"


def test_saved_bias_is_applied_as_it_was() -> None:
    """A bias stored as the mean was applied as an additive offset: P mean was left in the rows."""
    X, z, _ = drawn()
    X += 100
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    np.testing.assert_allclose(X @ P.matrix().T + P.offset, P(X), rtol=1e-12)
    np.testing.assert_allclose(P.mean - P.matrix() @ P.mean, P.offset, atol=1e-11)
    np.testing.assert_allclose(P(P.mean[None, :])[0], P.mean, rtol=1e-13)


def test_rounding_left_in_erased_rows_is_below_a_relative_cut() -> None:
    """Least squares without a cut reads the concept off the rounding of erased rows."""
    X, z, _ = drawn(300, 8)
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    centred, target = clean - clean.mean(axis=0), z - z.mean()

    def explained(cut: float) -> float:
        coefficients = np.linalg.lstsq(centred, target, rcond=cut)[0]
        return 1 - float(((target - centred @ coefficients) ** 2).sum() / (target**2).sum())

    assert abs(explained(1e-6)) < 1e-10


def test_a_basis_vector_shows_the_columns_of_the_matrix() -> None:
    """Users who probed an eraser with basis vectors got P transposed."""
    X, z, y = drawn()
    P = sf.splince(Moments().update(X, {"z": z, "y": y}), erase="z", keep="y")
    probed = P(np.eye(6)) - P(np.zeros((1, 6)))
    np.testing.assert_allclose(probed, P.matrix().T, atol=1e-12)
    assert np.abs(P.matrix() - P.matrix().T).max() > 0.01, "the control: P is oblique"


@pytest.mark.parametrize("seen", [0, 1])
def test_a_worker_that_saw_one_class_only(seen: int) -> None:
    """Class counts fixed by the first batch failed, or numbered classes by position."""
    X, z, _ = drawn()
    first, rest = z == seen, z != seen
    parts = [Moments().update(X[m], {"z": z[m]}) for m in (first, rest)]
    P = sf.leace(parts[0] + parts[1], erase="z")
    whole = sf.leace(Moments().update(X, {"z": z}), erase="z")
    np.testing.assert_allclose(P.matrix(), whole.matrix(), atol=1e-12)


def test_groups_beyond_two_are_all_guarded() -> None:
    """Gaps computed from the first two groups hid what the third one showed."""
    z = np.arange(600) % 5
    X = normal(600, 7) + np.eye(5, 7)[z] * (z == 4)[:, None] * 3
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    assert gap(X, z, 5) > 1
    assert gap(clean, z, 5) < 1e-12


# --- numbers at the edge -------------------------------------------------------------------------


def test_a_thousand_million_rows_by_merging() -> None:
    """Counts in float32 stop at 2^24 rows of a class; here they are integers throughout."""
    X, z = normal(1000, 6) + 5, np.arange(1000) % 4
    part = Moments().update(X, {"z": z, "y": X[:, 0] + 1})
    total, power, left = Moments(), part, 10**6
    while left:
        if left & 1:
            total = total + power
        power, left = power + power, left >> 1
    assert total.n_rows == 10**9
    assert total.class_counts("z") == dict.fromkeys(range(4), 250_000_000)
    np.testing.assert_allclose(total.mean, part.mean, rtol=1e-14)
    np.testing.assert_allclose(total.covariance(ddof=0), part.covariance(ddof=0), rtol=1e-12)
    a, b = (sf.splince(m, erase="z", keep="y").matrix() for m in (total, part))
    np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("exponent", [-150, -100, 100, 140])
def test_scales_near_the_ends_of_float64(exponent: int) -> None:
    """Either the eraser of the same data in other units, or an error that says so."""
    X, z, y = drawn(200, 4)
    expected = sf.splince(Moments().update(X, {"z": z, "y": y}), erase="z", keep="y")
    moments = Moments().update(X * 10.0**exponent, {"z": z, "y": y})
    P = sf.splince(moments, erase="z", keep="y")
    assert P.rank == expected.rank
    np.testing.assert_allclose(P.matrix(), expected.matrix(), atol=1e-9)


def test_squares_beyond_float64_are_refused_before_any_change() -> None:
    X, z, _ = drawn(50, 3)
    moments = Moments()
    with pytest.raises(sf.InputError, match="rescale"):
        moments.update(X * 1e300, {"z": z})
    assert moments.n_rows == 0


@pytest.mark.parametrize("value", [1e-300, 5e-324])
def test_squares_that_vanish_give_no_nan(value: float) -> None:
    X, z, _ = drawn(50, 3)
    moments = Moments().update(X * value, {"z": z})
    assert np.isfinite(moments.covariance()).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.SplinceWarning)
        try:
            P = sf.leace(moments, erase="z")
        except SplinceError:
            return
    assert np.isfinite(P(X * value)).all()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", ">f8", "i4", "?"])
def test_one_feature(dtype: str) -> None:
    """d = 1: whatever is erased is everything."""
    z = np.arange(80) % 2
    X = (normal(80, 1) + 3 * z[:, None] > 1).astype(dtype)
    if dtype != "?":
        X = (X + z[:, None] * 2).astype(dtype)
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    assert P.rank == 1
    np.testing.assert_allclose(P(X).astype(float), float(np.mean(X.astype(float))), rtol=1e-3)


def test_many_features_and_few_rows() -> None:
    """d far above n: the constraints hold on the rows, and what is off their span stays."""
    X, z = normal(30, 1500), np.arange(30) % 3
    P = sf.leace(Moments(block_rows=16).update(X, {"z": z}), erase="z")
    assert P.rank == 2
    assert gap(P(X), z, 3) < 1e-11


def test_saturated_half_precision_is_named() -> None:
    """65504 is the largest float16; beyond it rows hold infinity, not a number."""
    largest = np.full((6, 2), 65504, np.float16)
    check(Moments().update(largest), Rows.of(largest))
    with np.errstate(over="ignore"):
        beyond = (largest.astype(np.float32) * 2).astype(np.float16)
    with pytest.raises(sf.NonFiniteError, match="65504"):
        Moments().update(beyond)


def test_half_precision_leaves_its_own_rounding() -> None:
    """The result is rounded to the dtype of the rows: its residue is of that size."""
    X, z, _ = drawn(2000)
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    size = np.abs(X).max()
    for dtype in (np.float16, np.float32, np.float64):
        rounded = P(X.astype(dtype)).astype(np.float64)
        # Rounding of the rows and of the result, each at most half an ulp of the largest entry.
        assert gap(rounded, z) < 4 * np.linalg.norm(P.matrix(), 2) * size * np.finfo(dtype).eps
    assert gap(P(X.astype(np.float16)).astype(np.float64), z) > 1e-7, "float16 shows none at all"


def test_negative_zero_is_zero() -> None:
    X, z, _ = drawn(60, 3)
    X[::3, 1] = 0.0
    negative = X.copy()
    negative[::3, 1] = -0.0
    a, b = (Moments().update(x, {"z": z}) for x in (X, negative))
    np.testing.assert_array_equal(a.covariance(), b.covariance())
    np.testing.assert_array_equal(sf.leace(a, erase="z").matrix(), sf.leace(b, erase="z").matrix())
    scores = Moments().update(X, {"s": np.where(z, 0.0, -0.0)})
    with pytest.raises(sf.ConstantVariableError):
        sf.leace(scores, erase="s")
    assert Moments(kinds={"s": "classes"}).update(X, {"s": np.where(z, 0.0, -0.0)}).classes(
        "s"
    ) == (0,)


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", ">i4", "?", "u1"])
@pytest.mark.parametrize("unaligned", [False, True])
def test_foreign_byte_orders_and_unaligned_rows(dtype: str, unaligned: bool) -> None:
    z = np.arange(90) % 3
    X = ((normal(90, 4) + np.eye(3, 4)[z]) * 4 + 20).astype(np.dtype(dtype).newbyteorder("="))
    foreign = X.astype(dtype)
    if unaligned:
        memory = np.zeros(foreign.nbytes + 1, np.uint8)
        view = memory[1:].view(foreign.dtype).reshape(foreign.shape)
        view[...] = foreign
        foreign = view
    a, b = (Moments().update(x, {"z": z}) for x in (X, foreign))
    assert state_bytes(a) == state_bytes(b)
    if X.any(axis=0).all() and dtype != "?":
        P = sf.leace(a, erase="z")
        np.testing.assert_array_equal(P(foreign).astype(float), P(X).astype(float))


def test_foreign_byte_orders_of_labels_and_weights() -> None:
    X, z, _ = drawn(90, 3)
    scores, weight = normal(90, 2), np.abs(normal(90, 1)[:, 0])
    a = Moments().update(X, {"z": z, "s": scores}, sample_weight=weight)
    b = Moments().update(
        X, {"z": z.astype(">i8"), "s": scores.astype(">f8")}, sample_weight=weight.astype(">f8")
    )
    assert state_bytes(a) == state_bytes(b)


# --- determinism and memory ----------------------------------------------------------------------


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
        environment = {
            **os.environ, "OPENBLAS_NUM_THREADS": threads, "SPLINCE_FAST_BLAS": "scipy",
            "PYTHONPATH": str(Path(sf.__file__).parent.parent),
        }  # fmt: skip
        subprocess.run([sys.executable, "-c", THREADS, str(path)], env=environment, check=True)
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


# --- what a guarded representation does and does not protect against ------------------------------


def accuracy(X: Float, z: Any) -> float:
    """Share of the rows that least squares (with an intercept) gets right."""
    design = np.column_stack([np.ones(len(X)), X])
    coefficients = np.linalg.lstsq(design, 2.0 * z - 1, rcond=1e-8)[0]
    return float(np.mean((design @ coefficients > 0) == z))


def balanced(n: int = 4000, d: int = 6, seed: int = 0) -> tuple[Float, Any]:
    rng = np.random.default_rng(seed)
    z = np.arange(n) % 2
    X = rng.normal(size=(n, d))
    X[:, 0] += 1.5 * z
    X[:, 1] *= 1 + 2 * z  # another spread in one class
    return X, z


def test_no_linear_probe_beats_a_constant_on_the_fitted_rows() -> None:
    """Least squares and logistic regression find coefficients of zero."""
    from sklearn.linear_model import LogisticRegression

    X, z = balanced()
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    coefficients = np.linalg.lstsq(
        np.column_stack([np.ones(len(X)), clean]), 2.0 * z - 1, rcond=1e-8
    )[0]
    assert np.abs(coefficients).max() < 1e-11
    assert accuracy(X, z) > 0.7, "the control: before erasure it can be read"
    probe = LogisticRegression(C=1e6, tol=1e-10, max_iter=1000)
    assert np.abs(probe.fit(clean, z).coef_).max() < 1e-6
    assert np.abs(probe.fit(X, z).coef_).max() > 1


def test_a_quadratic_probe_still_reads_the_concept() -> None:
    X, z = balanced()
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    assert accuracy(clean**2, z) > 0.65


def test_held_out_rows_keep_a_trace_of_sampling_size() -> None:
    """The gap of held-out means falls with the root of the rows fitted on, and is not zero."""
    held, z_held = balanced(200_000, seed=1)
    gaps = {}
    for n in (400, 40_000):
        X, z = balanced(n, seed=2)
        clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(held)
        gaps[n] = gap(clean, z_held)
        # A mean over n/2 rows of spread at most 3 in each class; six features, five sigma.
        assert 1e-6 < gaps[n] < 5 * 3 * (4 / n) ** 0.5 + 5 * 3 * (4 / 200_000) ** 0.5
    assert gaps[40_000] < gaps[400]


def test_shifted_rows_are_not_guarded() -> None:
    X, z = balanced()
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    shifted = X.copy()
    shifted[:, 2] += 2 * z  # a direction that said nothing of z before
    assert accuracy(P(shifted), z) > 0.7


# --- fuzzing -------------------------------------------------------------------------------------

CORPUS = Path(__file__).resolve().parent / "fuzz" / "corpus"


@pytest.mark.parametrize("kind", ["moments", "projection", "labels"])
def test_inputs_that_fuzzing_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    """Every input of the corpora, which hold whatever once crashed: a typed error or a result."""
    monkeypatch.syspath_prepend(CORPUS.parent)
    targets = importlib.import_module("targets")
    found = sorted((CORPUS / kind).iterdir())
    assert len(found) > 3
    outcomes = {targets.TARGETS[kind](path.read_bytes(), tmp_path) for path in found}
    assert outcomes == {"result", "refused"}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be replaced in an object of JSON."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """A copy with something else in one place."""
    if not path:
        return junk
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    return copy


JUNK = [None, 0, -1, 1.5, True, "x", [], {}, ["a"], [None], [[1]], {"a": 1}, 10**30]


def test_reports_with_junk_in_any_place_are_refused_or_can_be_read() -> None:
    """Strings and nulls in the place of numbers were loaded and failed when printed or saved."""
    X, z, y = drawn(50, 3)
    eraser = sf.splince(Moments().update(X, {"z": z, "y": y}), erase="z", keep="y")
    report = eraser.report
    assert report is not None
    whole = json.loads(json.dumps(report.to_dict()))
    refused = 0
    for path in places(whole):
        for junk in JUNK:
            try:
                found = Report.from_dict(replaced(whole, path, junk))
            except FileFormatError:
                refused += 1
                continue
            assert str(found)
            assert found._repr_html_()
            assert Report.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert refused > 200
