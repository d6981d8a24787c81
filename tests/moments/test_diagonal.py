"""Moments without a d x d matrix: linear in the data, exact constraints, sparse rows untouched.

Modules: `moments.diagonal`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast.exceptions import (
    FileFormatError,
    IncompatibleMomentsError,
    InputError,
    NonFiniteError,
)
from splince_fast.moments.state import Diagonal

Float = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)
DIAG = {"covariance_type": "diag"}


def rows(n: int = 700, d: int = 24, seed: int = 0) -> tuple[Float, dict[str, NDArray[Any]]]:
    """Correlated rows of unlike scales, mostly zeros where they are to be sparse."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(d, d)) / d**0.5 + np.diag(np.geomspace(0.1, 3, d))
    z = rng.integers(0, 3, n)
    y = np.where(rng.random(n) < 0.6, z, rng.integers(0, 3, n))
    X = rng.normal(size=(n, d)) @ mix + np.eye(3)[z] @ mix[:3] + np.eye(3)[y] @ mix[3:6]
    X[rng.random(X.shape) < 0.7] = 0.0
    t = X[:, :2] @ rng.normal(size=(2, 1)) + rng.normal(size=(n, 1))
    return X, {"z": z, "y": y, "t": t}


def squares_of(moments: sf.Moments) -> Float:
    """Variances, not normalised."""
    second = moments._state().second
    assert isinstance(second, Diagonal)
    return second.matrix


def near(found: sf.Moments, expected: sf.Moments) -> None:
    """Equal to rounding: sums of n rows in another order, n eps of the largest entries."""
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12, atol=1e-13)
    theirs = squares_of(expected)
    size = 100 * found.n_rows * EPS * theirs.max(initial=1.0)
    np.testing.assert_allclose(squares_of(found), theirs, atol=size)
    for name in expected.variables:
        np.testing.assert_allclose(
            found.cross_covariance(name), expected.cross_covariance(name), atol=1e-12
        )


# --- the state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_the_state_is_its_definition(sparse: bool) -> None:
    X, labels = rows()
    weight = np.random.default_rng(1).integers(0, 4, len(X)).astype(float)
    given = scipy.sparse.csr_array(X) if sparse else X
    moments = sf.Moments(**DIAG).update(given, labels, sample_weight=weight)
    centred = X - weight @ X / weight.sum()
    expected = weight @ centred**2
    np.testing.assert_allclose(squares_of(moments), expected, atol=len(X) * EPS * expected.max())
    full = sf.Moments().update(X, labels, sample_weight=weight)
    for name in labels:
        np.testing.assert_allclose(
            moments.cross_covariance(name), full.cross_covariance(name), atol=1e-12
        )


@pytest.mark.parametrize("sparse", [False, True])
def test_linear_in_the_data(sparse: bool) -> None:
    X, labels = rows()
    X = X + 50.0 * (np.arange(X.shape[1]) == 2)  # a feature far from zero
    convert = scipy.sparse.csr_matrix if sparse else np.asarray

    def of(part: slice | NDArray[Any], weight: Any = None) -> sf.Moments:
        named = {name: column[part] for name, column in labels.items()}
        return sf.Moments(**DIAG).update(convert(X[part]), named, sample_weight=weight)

    whole, a, b = of(slice(None)), of(slice(0, 300)), of(slice(300, None))
    near(a + b, whole)
    near(b + a, whole)
    near(sum([a, b]), whole)  # type: ignore[arg-type]
    near(whole - b, a)
    near(of(np.r_[0:700, 0:100]), of(slice(None), np.where(np.arange(700) < 100, 2.0, 1.0)))
    blocks = sf.Moments(**DIAG, block_rows=64)
    for start in range(0, len(X), 33):
        part = slice(start, start + 33)
        blocks.update(convert(X[part]), {name: column[part] for name, column in labels.items()})
    near(blocks, whole)
    # Control: about the mean of each part instead of the whole, the gap of the means is lost.
    parts = squares_of(a) + squares_of(b)
    assert np.abs(parts - squares_of(whole)).max() > 1e-6 * parts.max()


def test_sparse_and_dense_rows_mix_with_late_classes_and_constants() -> None:
    X, labels = rows()
    X[:, 5] = 3.0
    order = np.argsort(labels["z"], kind="stable")
    X, z = X[order], labels["z"][order]
    mixed = sf.Moments(**DIAG).update(X[:250], {"z": z[:250]})
    mixed.update(scipy.sparse.coo_array(X[250:]), {"z": z[250:]})
    whole = sf.Moments(**DIAG).update(X, {"z": z})
    near(mixed, whole)
    assert mixed.classes("z") == (0, 1, 2)
    eraser = sf.leace(mixed, erase="z")
    assert not eraser.right[5].any()
    assert not eraser.left[5].any()


def test_a_stored_column_far_from_zero_keeps_its_variance_under_weights() -> None:
    """Weights sum to the whole but for rounding, and that times the square of a mean is much."""
    rng = np.random.default_rng(0)
    X = 1e8 + rng.normal(size=(500, 20))
    for _ in range(4):
        weight = rng.random(500)
        of = [
            sf.Moments(**DIAG).update(given, sample_weight=weight)
            for given in (scipy.sparse.csr_array(X), X)
        ]
        np.testing.assert_allclose(squares_of(of[0]), squares_of(of[1]), rtol=1e-6)


def test_duplicates_of_a_sparse_matrix_are_summed_and_the_caller_keeps_his() -> None:
    X = scipy.sparse.csr_array(
        (np.array([1.0, 2.0, 4.0]), np.array([1, 1, 0]), np.array([0, 2, 3])), shape=(2, 3)
    )
    moments = sf.Moments(**DIAG).update(X)
    assert X.nnz == 3
    np.testing.assert_allclose(moments.mean, [2.0, 1.5, 0.0])
    np.testing.assert_allclose(squares_of(moments), [8.0, 4.5, 0.0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("stored", [0, 1, 38, 39, 40])
def test_the_variance_of_a_sparse_column_counts_its_implicit_zeros(
    stored: int, weighted: bool
) -> None:
    rng = np.random.default_rng(0)
    column = np.zeros(40)
    column[:stored] = rng.uniform(0.5, 2.0, stored)
    column = rng.permutation(column)
    X = np.column_stack([column, rng.normal(size=40)])
    weight = rng.uniform(0.5, 2.0, 40) if weighted else np.ones(40)
    moments = sf.Moments(**DIAG).update(
        scipy.sparse.csr_array(X), sample_weight=weight if weighted else None
    )
    expected = weight @ (X - weight @ X / weight.sum()) ** 2
    np.testing.assert_allclose(squares_of(moments), expected, rtol=1e-13, atol=0)


@pytest.mark.filterwarnings("ignore:the eraser is sensitive")  # which the offset makes it
@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("offset", [2000.0, 1.7e9, 1e12])
def test_a_stored_column_of_sparse_rows_far_from_zero_loses_no_digits(
    offset: float, weighted: bool, zeros: int
) -> None:
    """A year or a time stamp beside words; a few rows may lack it, which is an implicit 0."""
    X, labels = rows()
    rng = np.random.default_rng(2)
    X[:, 5] = offset + np.round(rng.normal(size=len(X)) * 10 + 5 * labels["z"])
    X[[1, 300, 600][:zeros], 5] = 0.0
    X[:, 6] = offset  # a constant
    weight = rng.integers(1, 4, len(X)).astype(float) if weighted else None
    source = sf.sources.from_arrays(
        scipy.sparse.csr_array(X), labels, sample_weight=weight, block_rows=256
    )
    moments = sf.Moments.from_blocks(source, **DIAG)
    w = np.ones(len(X)) if weight is None else weight
    exact = X.astype(np.longdouble)
    exact -= w @ exact / w.sum()
    wanted = np.asarray((w * exact.T**2).sum(axis=1) / w.sum(), float)
    squares = squares_of(moments)
    scale = np.sqrt(wanted)
    assert squares[6] == 0.0
    # n eps of the sums of n terms of the size of deviations; offsets are rounded to eps of theirs.
    np.testing.assert_allclose(squares / w.sum(), wanted, rtol=1e-12, atol=1e-24 * offset**2)
    z = np.eye(3)[labels["z"]]
    cross = np.asarray(exact.T @ (w[:, None] * (z - w @ z / w.sum())) / w.sum(), float)
    gap = np.abs(moments.cross_covariance("z", ddof=0) - cross)[scale > 0]
    assert (gap / scale[scale > 0, None]).max() < 1e-12
    for eraser in (
        sf.leace(moments, erase="z"),
        sf.leace(moments, erase="z", refine=source, passes=2),
    ):
        left = cross - eraser.left @ (eraser.right.T @ cross)
        (report,) = eraser.report.variables  # type: ignore[union-attr]
        units = np.where(scale > 0, scale, np.inf)[:, None]
        residual = np.linalg.norm(left / units) / np.linalg.norm(cross / units)
        assert residual <= report.bound < 1e-9


@pytest.mark.parametrize("sparse", [False, True])
def test_files_pickles_checkpoints_and_folds(tmp_path: Path, sparse: bool) -> None:
    X, labels = rows()
    given = scipy.sparse.csr_array(X) if sparse else X
    moments = sf.Moments(**DIAG).update(given, labels)
    moments.save(tmp_path / "m.moments")
    for found in (
        sf.Moments.load(tmp_path / "m.moments"), pickle.loads(pickle.dumps(moments)),
        moments.copy(),
    ):  # fmt: skip
        assert found._arguments() == moments._arguments()
        assert squares_of(found).tobytes() == squares_of(moments).tobytes()
        near(found.update(given, labels), moments + moments)
    source = sf.sources.from_arrays(given, labels, block_rows=100)
    whole = sf.Moments.from_blocks(source, **DIAG)
    path = tmp_path / "run.moments"

    class Broken(sf.sources.Source):
        def iter_from(self, first_block: int = 0) -> Any:
            for i, block in enumerate(source.iter_from(first_block)):
                if i == 4:
                    raise OSError("the disk is gone")
                yield block

    broken = Broken(source.name, n_rows=source.n_rows, n_features=source.n_features)
    with pytest.raises(OSError, match="gone"):
        sf.Moments.from_blocks(broken, **DIAG, checkpoint=path)
    resumed = sf.Moments.from_blocks(source, **DIAG, checkpoint=path)
    assert squares_of(resumed).tobytes() == squares_of(whole).tobytes()
    folds = sf.Moments.from_blocks(source, **DIAG, folds=3)
    near(folds.total, whole)
    assert sf.leace(folds, erase="z").rank == 2


def test_damaged_files_and_those_of_a_sketch_are_refused() -> None:
    record = sf.Moments(**DIAG).update(*rows()).__getstate__()
    tensors, metadata = record["tensors"], record["metadata"]
    short = {**tensors, "variances": tensors["variances"][:-1]}
    for damaged, text in (
        ({**record, "tensors": short}, "variances"),
        ({**record, "metadata": {**metadata, "rank": 3, "seed": 0}}, "earlier version"),
    ):
        with pytest.raises(FileFormatError, match=text):
            sf.Moments().__setstate__(damaged)
    sf.Moments().__setstate__(record)  # control


# --- the solve -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["splince", "leace", "sal", "mean_projection"])
def test_constraints_of_variances_hold_to_rounding(method: str) -> None:
    X, labels = rows()
    full = sf.Moments().update(X, labels)
    keeps: dict[str, Any] = {"keep": ["y", "t"]} if method == "splince" else {}
    for moments in (m := sf.Moments(**DIAG).update(X, labels), m.factored()):
        eraser = getattr(sf, method)(moments, erase="z", **keeps)
        after = sf.Moments().update(eraser(X), labels)
        bound = eraser.report.variables[0].bound
        assert bound < 1e-9
        gone = np.linalg.norm(after.cross_covariance("z"))
        assert gone < bound * np.linalg.norm(full.cross_covariance("z"))
        if keeps:
            for name in ("y", "t"):
                gap = after.cross_covariance(name) - full.cross_covariance(name)
                assert np.linalg.norm(gap) < bound * np.linalg.norm(full.cross_covariance(name))
        assert eraser.report.diagonal is not None
        assert eraser.report.rho is None


@pytest.mark.parametrize("intensity", [0.0, 0.3])
def test_the_metric_is_that_of_the_variances(intensity: float) -> None:
    X, labels = rows()
    X[:, 5] = 3.0  # a constant
    kept = sf.Moments(**DIAG).update(X, labels).factored(shrinkage=intensity or None)
    target = (1 - intensity) * X.var(axis=0) + intensity * X.var(axis=0).mean()
    b = np.random.default_rng(0).normal(size=(3, 24))
    expected = np.divide(b, target, out=np.zeros_like(b), where=target > 0)
    np.testing.assert_allclose(kept.factor.solve(b), expected, rtol=1e-12)
    np.testing.assert_allclose(kept.gram(b), (b * X.var(axis=0)) @ b.T, rtol=1e-12)
    assert abs(kept.gram(b) - b @ np.cov(X.T, ddof=0) @ b.T).max() > 0.1  # control


def test_erasers_are_those_of_uncorrelated_rows() -> None:
    X, labels = rows()
    white = np.linalg.qr(X - X.mean(axis=0))[0] * np.geomspace(0.1, 3, 24)  # Cov(x) is diagonal
    for keeps in ({}, {"keep": "y"}):
        method: Any = sf.splince if keeps else sf.leace
        for data, differ in ((white, False), (X, True)):
            exact = method(sf.Moments().update(data, labels), erase="z", **keeps).matrix()
            found = method(sf.Moments(**DIAG).update(data, labels), erase="z", **keeps).matrix()
            assert (np.abs(found - exact).max() > 1e-3) == differ
            assert differ or np.abs(found - exact).max() < 1e-10


def test_shrinkage_by_a_policy_is_refused() -> None:
    moments = sf.Moments(**DIAG).update(*rows())
    for policy in ("oas", "cv"):
        with pytest.raises(InputError, match=r"whole covariance|folds"):
            sf.leace(moments, erase="z", shrinkage=policy)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, True, 0, "tied", ["diag"]])
def test_another_type_is_refused(kind: Any) -> None:
    with pytest.raises(InputError, match="covariance_type is"):
        sf.Moments(covariance_type=kind)


def test_what_does_not_go_together_is_refused_before_a_row_is_read() -> None:
    def unread() -> Any:
        raise AssertionError("a row was read")
        yield

    for parameters, text in (
        ({**DIAG, "subsample": 0.5}, "exclude each other"),
        ({**DIAG, "subsample": "auto"}, "exclude each other"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=text):
            sf.Moments.from_blocks(unread(), **parameters)


def test_states_that_do_not_go_together() -> None:
    X, labels = rows()
    first, other = (m.update(X, labels) for m in (sf.Moments(**DIAG), sf.Moments()))
    for combine in (lambda: first + other, lambda: other - first):
        with pytest.raises(IncompatibleMomentsError, match="covariance_type="):
            combine()


def test_what_needs_a_covariance_says_so() -> None:
    X, labels = rows()
    moments = sf.Moments(**DIAG).update(X, labels)
    for use in (
        moments.covariance, lambda: sf.concept_strength(moments, "z"),
        lambda: sf.concept_strength(moments.factored(), "z"),
        lambda: sf.leace(moments, erase="z", solver="eigh"),
    ):  # fmt: skip
        with pytest.raises(InputError, match="covariance_type="):
            use()


def test_sparse_rows_of_a_full_covariance_are_refused_with_the_ways_out() -> None:
    X, labels = rows()
    csr = scipy.sparse.csr_array(X)
    with pytest.raises(InputError, match=r"covariance_type='diag'.*TruncatedSVD.*toarray"):
        sf.Moments().update(csr, labels)
    eraser = sf.leace(sf.Moments(**DIAG).update(csr, labels), erase="z")
    with pytest.raises(InputError, match=r"fold_into.*eraser\.right"):
        eraser(csr)
    # And the ways out are ways: a linear head on the rows as they are.
    head = np.random.default_rng(0).normal(size=(2, 24))
    weight, bias = eraser.fold_into(head, np.zeros(2))
    np.testing.assert_allclose(csr @ weight.T + bias, eraser(X) @ head.T, atol=1e-10)


def test_a_damaged_sparse_matrix_is_refused() -> None:
    X = scipy.sparse.csr_array(np.eye(4))
    X.indices[2] = 1_000_000
    with pytest.raises(InputError, match="damaged"):
        sf.Moments(**DIAG).update(X)
    X = scipy.sparse.csr_array(np.eye(4))
    X.indptr[2] = 400
    with pytest.raises(InputError, match="damaged"):
        sf.Moments(**DIAG).update(X)
    for bad in (scipy.sparse.csr_array(np.eye(4) * 1j), scipy.sparse.csr_array((4, 0))):
        with pytest.raises(InputError):
            sf.Moments(**DIAG).update(bad)
    assert sf.Moments(**DIAG).update(scipy.sparse.csr_array((0, 4))).n_rows == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200, 1.5e149])
def test_what_fails_leaves_no_trace(bad: float) -> None:
    X, labels = rows()
    moments = sf.Moments(**DIAG, block_rows=len(X)).update(scipy.sparse.csr_array(X), labels)
    before = squares_of(moments).copy()
    X[7, 3] = bad
    for form in (scipy.sparse.csr_array, np.array):  # the latter is checked by its sums
        with pytest.raises(InputError) as caught:
            moments.update(form(X), labels)
        assert isinstance(caught.value, NonFiniteError) == (not np.isfinite(bad))
    with pytest.raises(sf.exceptions.LabelError):
        moments.update(scipy.sparse.csr_array(X[:7]), {"z": np.linspace(0, 1, 7)})
    with pytest.raises(InputError, match="columns"):
        moments.update(scipy.sparse.csr_array(X[:7, :5]))
    assert squares_of(moments).tobytes() == before.tobytes()


# --- memory --------------------------------------------------------------------------------------

_MEASURE = """
import numpy as np, scipy.sparse
import splince_fast as sf
def peak():  # of this process: ru_maxrss would begin at what its parent took
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
rng = np.random.default_rng(0)
{body}
print(peak() - before)
"""


def megabytes(body: str) -> float:
    """Growth of the peak memory of a process that runs `body`, which sets `before`."""
    code = _MEASURE.format(body=textwrap.dedent(body))
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    return float(done.stdout)


proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from /proc, which is not here"
)

_WARM = """
        z = rng.integers(0, 2, 200)
        warm = rng.normal(size=(200, 64)).astype(np.float32)
        sf.leace(sf.Moments(covariance_type="diag").update(warm, {"z": z}), erase="z")
        warm = scipy.sparse.csr_array(warm * (warm > 1))
        sf.leace(sf.Moments(covariance_type="diag").update(warm, {"z": z}), erase="z")
"""


_TEXT = """
        n, d = 3700, 40_000
        terms, starts = rng.integers(0, d, 31 * n), np.arange(0, 31 * n + 1, 31)
        X = scipy.sparse.csr_array((np.ones(31 * n), terms, starts), shape=(n, d))
"""


@pytest.mark.slow
@proc
def test_dense_rows_of_100_000_features_fit_in_500_megabytes() -> None:
    """One block of 64 MiB beside it; the covariance would take 75 GiB."""
    grown = megabytes(
        _WARM
        + """
        block = rng.standard_normal((160, 100_000), dtype=np.float32)
        block[:80] += 1.0
        before = peak()
        moments = sf.Moments(covariance_type="diag")
        for _ in range(2):
            moments.update(block, {"z": np.arange(160) < 80})
        eraser = sf.leace(moments, erase="z")
        assert eraser.report.variables[0].residual < 1e-9
        """
    )
    print(f"{grown:.0f} MB")
    assert grown < 500


@proc
def test_sparse_text_is_never_made_dense() -> None:
    """3,700 documents of 40,000 terms: dense they take 1,184 MB, and the moments 2 MB."""
    grown = megabytes(
        _WARM
        + _TEXT
        + """
        before = peak()
        moments = sf.Moments(covariance_type="diag").update(X, {"z": rng.integers(0, 2, n)})
        eraser = sf.leace(moments, erase="z", refine=[(X,)])
        assert eraser.report.variables[0].residual < 1e-9
        """
    )
    dense = megabytes(_WARM + _TEXT + "        before = peak()\n        X[:370].toarray().sum()")
    print(f"{grown:.0f} MB, {dense:.0f} MB for a tenth of the rows made dense")
    assert grown < 60
    assert dense > 100  # control
