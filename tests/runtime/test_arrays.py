"""_runtime.arrays, _runtime.sparse, _runtime.memory, _runtime.interrupts: rows as kernels get them.

Other modules of _runtime are tested where they are used: files in ``moments/test_files.py``,
erase_rows in ``methods/test_projection.py``, hashing in ``moments/test_folds.py``, blocks and
extras in ``sources/test_sources.py``.
"""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from splince_fast._runtime.arrays import Rows, check_values
from splince_fast._runtime.lock import Deferred
from splince_fast._runtime.memory import aligned
from splince_fast._runtime.sparse import SparseRows, subtracted
from splince_fast.exceptions import InputError, NonFiniteError


@pytest.mark.parametrize(
    ("dtype", "working"),
    [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64),
     (np.longdouble, np.float64), (np.int8, np.float64), (np.bool_, np.float64)],
)  # fmt: skip
def test_rows_have_a_working_dtype_and_are_direct_only_in_it(dtype: Any, working: Any) -> None:
    X = np.ones((6, 4), dtype)
    assert Rows.of(X).dtype == working
    assert Rows.of(X).direct is (dtype == working)
    assert not Rows.of(X[:, ::2]).direct
    assert not Rows.of(np.asfortranarray(X)).direct


def test_sparse_centring_equals_dense_centring() -> None:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(40, 6)) * (rng.random((40, 6)) < 0.7)
    shift = np.array([0.0, 2.0, 0.0, 0.0, -0.5, 0.0])
    centred = subtracted(scipy.sparse.csr_array(dense), shift)
    np.testing.assert_array_equal(centred.toarray(), dense - shift)
    implicit = dense[:, 1] == 0  # control: entries that were not stored are shifted, too
    assert implicit.any()
    assert (centred.toarray()[implicit, 1] == -2.0).all()


def test_duplicates_are_summed_and_the_matrix_of_the_caller_is_unchanged() -> None:
    matrix = scipy.sparse.csr_array((np.array([1.0, 2.0, 4.0]), [1, 1, 0], [0, 2, 3]), (2, 3))
    rows = SparseRows.of(matrix)
    assert rows.array.nnz == 2
    np.testing.assert_array_equal(rows.array.toarray(), [[0, 3, 0], [4, 0, 0]])
    assert matrix.nnz == 3


@pytest.mark.parametrize("index", [-1, 3])
def test_a_sparse_index_out_of_bounds_is_an_error(index: int) -> None:
    matrix = scipy.sparse.csr_array((np.ones(2), [0, 2], [0, 1, 2]), (2, 3))
    assert len(SparseRows.of(matrix)) == 2  # control
    matrix.indices[1] = index
    with pytest.raises(InputError, match="damaged"):
        SparseRows.of(matrix)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (64, 2), (0,)])
def test_aligned_memory_begins_at_a_cache_line(shape: tuple[int, ...]) -> None:
    arrays = [aligned(shape) for _ in range(8)]
    assert all(array.ctypes.data % 64 == 0 or not array.size for array in arrays)
    assert {array.shape for array in arrays} == {shape}


@pytest.mark.parametrize("deferred", [True, False])
def test_an_interrupt_is_raised_when_the_block_ends(deferred: bool) -> None:
    steps = []

    def block() -> None:
        steps.append(1)
        signal.raise_signal(signal.SIGINT)
        steps.append(2)

    def run() -> None:
        if deferred:
            with Deferred():
                block()
        else:  # control
            block()
        steps.append(3)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ([1, 2] if deferred else [1])
    assert signal.getsignal(signal.SIGINT) is handler


# --- values that cannot be used ------------------------------------------------------------------


def is_accepted(X: NDArray[Any]) -> bool:
    """Whether the values pass, whatever the layout and the number of rows."""
    many = np.tile(X, (1 + (1 << 14) // max(1, X.size), 1))  # more than one sum of BLAS
    layouts = (X, many, np.asfortranarray(X), np.repeat(X, 2, axis=1)[:, ::2], many[::-1])
    found = {_error_of(array) for array in layouts}
    assert len(found) == 1
    return found == {None}


def _error_of(X: NDArray[Any]) -> type[Exception] | None:
    try:
        check_values(X)
    except InputError as error:
        return type(error)
    return None


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=20),
        elements=st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e-45, 1.0])),
    )
)
def test_finite_squares_are_recognised(X: NDArray[Any]) -> None:
    with np.errstate(all="ignore"):
        sums = (X.astype(np.float64) ** 2).sum(axis=1)
    assert is_accepted(X) == np.isfinite(sums).all()
    assert (_error_of(X) is NonFiniteError) == (not np.isfinite(X).all())


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 1.5e149, -1e300])
@pytest.mark.parametrize("d", [1, 2, 15, 16, 17, 64, 1000])
def test_one_bad_number_is_found_wherever_it_is(d: int, value: float) -> None:
    X = np.ones((3, d))
    for j in {0, d // 2, d - 1}:
        X[1, j] = value
        assert not is_accepted(X)
        assert is_accepted(X[[0, 2]])
        X[1, j] = 1
    assert is_accepted(X)


@pytest.mark.parametrize("d", [1, 3, 1000])
def test_large_numbers_are_accepted_up_to_the_bound(d: int) -> None:
    """Squares of float32 numbers are computed in float64, and only their row counts."""
    assert is_accepted(np.full((2, d), 3e38, np.float32))
    largest = 0.99 * (1e298 / d) ** 0.5
    assert is_accepted(np.full((2, d), largest))
    assert not is_accepted(np.full((2, d), 1.02 * largest))
