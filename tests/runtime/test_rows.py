"""_runtime.rows, _runtime.sparse, _runtime.memory, _runtime.interrupts: rows as kernels get them.

Other modules of _runtime are tested where they are used: files in ``moments/test_files.py``,
erase_rows in ``methods/test_projection.py``, hashing in ``moments/test_folds.py``, containers of
rows in ``test_containers.py``, numbers of rows and extras in ``sources/test_sources.py``.
"""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from splince_fast._runtime.lock import Deferred
from splince_fast._runtime.memory import aligned
from splince_fast._runtime.rows import Rows
from splince_fast._runtime.sparse import SparseRows, subtracted
from splince_fast.exceptions import InputError


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
