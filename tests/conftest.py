"""What all tests share: profiles, guards of the kernels, real data.

``SPLINCE_FAST_FUZZ=n`` multiplies the examples of every property test by n and draws them afresh;
without it the same examples are drawn on each run. ``SPLINCE_FAST_DATA`` names the folder of the
real data sets, which are not part of the project.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from naive_model import FUZZ

from splince_fast._kernels import accumulate, blas, gram, sampled, sparse
from splince_fast._kernels import apply as row_kernels
from splince_fast._kernels.tiles import COLUMNS, LANES

settings.register_profile(
    "splince_fast",
    deadline=None,
    derandomize=not FUZZ,
    max_examples=30 * max(FUZZ, 1),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("splince_fast")

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SPLINCE_FAST_DATA") or ROOT.parent / "shared" / "data")


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """Path of a real data set by the name of its folder or file; skips where it is absent."""

    def find(name: str) -> Path:
        path = DATA / name
        if not path.exists():
            pytest.skip(f"the real data set {name!r} is not in {DATA}; see SPLINCE_FAST_DATA")
        return path

    return find


# --- kernels that refuse what would make them read or write out of bounds ------------------------


def _check_sort(codes: Any, n_codes: int, part_rows: int, order: Any, cell: Any) -> None:
    assert part_rows >= 1
    assert order.shape == cell.shape == codes.shape[1:]
    assert codes.size == 0 or (codes.min() >= -1 and codes.max() < n_codes)


def _size_of(rows: Any, index: Any) -> int:
    """Rows of a block, of which all exist."""
    assert rows.flags.c_contiguous
    assert rows.flags.aligned
    assert index.dtype == np.intp
    assert index.size == 0 or (index.min() >= 0 and index.max() < len(rows))
    return len(index) or len(rows)


def _check_sample(rows: Any, index: Any, weight: Any, stride: int, shift: Any, spread: Any) -> None:
    n, d = _size_of(rows, index), rows.shape[1]
    assert weight.shape in ((n,), (0,))
    assert n >= 1 <= stride
    assert shift.shape == spread.shape == (d,)


def _check_centring(
    rows: Any, index: Any, weight: Any, shift: Any, offset: Any, codes: Any, order: Any, cell: Any,
    values: Any, turns: Any, part_rows: int, peak: Any, total: Any, class_sums: Any, products: Any,
) -> None:  # fmt: skip
    """What `centre_block` and `reduce_chunks` have in common."""
    n, d = _size_of(rows, index), rows.shape[1]
    assert weight.shape in ((n,), (0,))
    assert shift.shape == offset.shape == peak.shape == total.shape == (d,)
    assert np.array_equal(np.sort(order), np.arange(n))
    assert np.array_equal(order // part_rows, np.arange(n) // part_rows)
    assert part_rows % 4 == 0
    assert cell.shape == (n,)
    assert turns.shape[1:] == (2,)
    assert codes.shape[1:] == values.shape[1:] == (n,)
    assert class_sums.shape[1:] == products.shape[1:] == (d,)
    assert len(products) == len(values)
    assert codes.size == 0 or (codes.min() >= -1 and codes.max() < len(class_sums))


def _check_centre_block(*arguments: Any) -> None:
    common, (begin, stop, first, last, out, panels), sums = (
        arguments[:11], arguments[11:17], arguments[17:-1],
    )  # fmt: skip
    assert arguments[-1].shape == arguments[3].shape
    _check_centring(*common, *sums)
    n, d = _size_of(*arguments[:2]), arguments[0].shape[1]
    assert 0 <= begin < stop <= n
    assert begin % 4 == 0
    assert stop == n or stop % 4 == 0
    assert 0 <= first < last <= d
    if panels.size:
        whole, k, lanes = panels.shape
        assert out.shape == (4, whole * lanes)
        assert k >= -(-(stop - begin) // 4) * 4
    else:
        assert out.shape == (-(-n // 4) * 4, d)


def _check_reduce_chunks(*arguments: Any) -> None:
    stripe, four, panels = arguments[11:14]
    _check_centring(*arguments[:11], *arguments[14:18])
    product, counters = arguments[18:]
    rows = arguments[0]
    two, whole, chunk, lanes = panels.shape
    assert two == 2
    assert chunk % 4 == 0
    assert stripe % lanes == 0 < stripe
    assert whole == -(-rows.shape[1] // lanes)
    assert four.shape == (4, whole * lanes)
    assert (four[:, rows.shape[1] :] == 0.0).all()
    assert product.shape == (whole * lanes, whole * lanes)
    assert panels.dtype == four.dtype == product.dtype == rows.dtype
    assert all(a.flags.c_contiguous for a in (four, panels, product, counters))
    assert counters.shape == (-(-_size_of(*arguments[:2]) // chunk) + 1, 16)


def _check_sweep_block(
    rows: Any, index: Any, weight: Any, shift: Any, inverse: Any, codes: Any, values: Any,
    stripe: int, bounds: Any, cell_row: Any, cell_weight: Any, sums: Any, leverage: Any,
    counters: Any,
) -> None:  # fmt: skip
    n, d, segments = _size_of(rows, index), rows.shape[1], len(sums)
    assert weight.shape in ((n,), (0,))
    assert shift.shape == inverse.shape == (d,)
    assert stripe % sampled.STRIPE == 0 < stripe
    assert segments == 1 or stripe >= d
    assert (bounds[0], bounds[-1], len(bounds)) == (0, n, segments + 1)
    assert (np.diff(bounds) > 0).all()
    assert cell_row.shape == cell_weight.shape == (n,)
    assert codes.shape[1:] == values.shape[1:] == (n,)
    assert sums.shape[2:] == (d,)
    assert sums.flags.c_contiguous
    classes = sums.shape[1] - 2 - len(values)
    assert classes >= 0
    assert codes.size == 0 or (codes.min() >= -1 and codes.max() < classes)
    assert leverage.shape == (-(-d // sampled.STRIPE), n)
    assert counters.shape == (segments + 1, 16)


def _check_choose_rows(
    leverage: Any, weight: Any, rate: float, key: Any, position: int, chosen: Any, inclusion: Any
) -> None:
    n = leverage.shape[1]
    assert weight.shape in ((n,), (0,))
    assert chosen.shape == inclusion.shape == (n,)
    assert 0 < rate <= 1
    assert position >= 0


def _check_label_products(codes: Any, values: Any, places: Any, weight: Any, gram: Any) -> None:
    n = codes.shape[1]
    assert values.shape == (len(places), n)
    assert weight.shape in ((n,), (0,))
    assert gram.shape == (len(gram), len(gram))
    assert codes.size == 0 or (codes.min() >= -1 and codes.max() < len(gram))
    assert places.size == 0 or (places.min() >= 0 and places.max() < len(gram))


def _check_add_lower(
    scatter: Any, product: Any, sign: float, vectors: Any, coefficients: Any, first: int, last: int
) -> None:
    d = len(scatter)
    assert scatter.shape == (d, d)
    assert scatter.flags.f_contiguous
    assert product.flags.f_contiguous
    assert product.shape[0] == product.shape[1]
    assert not product.size or len(product) >= d
    assert vectors.shape == (2, d)
    assert coefficients.shape == (2,)
    assert 0 <= first <= last <= (d + 1) // 2


def _check_syrk(rows: Any, square: Any) -> None:
    assert square.shape == (rows.shape[1], rows.shape[1])


def _check_apply(
    rows: Any, measuring: Any, removing: Any, mean: Any, shift: Any, streamed: bool,
    start: int, stop: int, out: Any,
) -> None:  # fmt: skip
    assert rows.shape == out.shape
    assert rows.dtype == out.dtype
    rank, width = len(shift), len(mean)
    assert rows.shape[1] == width
    wide = 1 if rank == 1 else COLUMNS
    narrow = min(wide, LANES) if rank <= LANES else wide
    assert measuring.shape == (-(-rank // narrow), width, narrow)
    assert removing.shape == (-(-width // wide), rank, wide)
    assert 0 <= start <= stop <= len(rows)


def _check_csr(data: Any, indices: Any, indptr: Any, weight: Any, width: int) -> None:
    n = len(indptr) - 1
    assert weight.shape in ((n,), (0,))
    assert len(data) >= indptr[-1] <= len(indices)
    assert (np.diff(indptr) >= 0).all()
    assert indices.size == 0 or (indices.min() >= 0 and indices.max() < width)


def _check_sum_rows(
    data: Any, indices: Any, indptr: Any, weight: Any, codes: Any, values: Any, total: Any,
    class_sums: Any, products: Any,
) -> None:  # fmt: skip
    _check_csr(data, indices, indptr, weight, len(total))
    assert codes.shape[1:] == values.shape[1:] == (len(indptr) - 1,)
    assert len(products) == len(values)
    for sums in (class_sums, products):
        assert not len(sums) or sums.shape[1:] == total.shape
    assert codes.size == 0 or codes.max() < len(class_sums)


def _check_sum_squares(
    data: Any, indices: Any, indptr: Any, weight: Any, mean: Any, whole: float, squares: Any
) -> None:
    _check_csr(data, indices, indptr, weight, len(squares))
    assert mean.shape == squares.shape


def _check_add_images(
    data: Any, indices: Any, indptr: Any, weight: Any, vectors: Any, centre: Any,
    coordinates: Any, total: Any, out: Any,
) -> None:  # fmt: skip
    _check_csr(data, indices, indptr, weight, len(out))
    assert vectors.shape == out.shape
    assert centre.shape == coordinates.shape == total.shape == out.shape[1:]


_GUARDS: list[tuple[Any, str, Callable[..., None]]] = [
    (accumulate, "sort_by_cell", _check_sort),
    (accumulate, "sample_columns", _check_sample),
    (accumulate, "centre_block", _check_centre_block),
    (accumulate, "add_lower", _check_add_lower),
    (gram, "reduce_chunks", _check_reduce_chunks),
    (sampled, "sweep_block", _check_sweep_block),
    (sampled, "choose_rows", _check_choose_rows),
    (sampled, "add_label_products", _check_label_products),
    (sparse, "sum_rows", _check_sum_rows),
    (sparse, "sum_squares", _check_sum_squares),
    (sparse, "add_images", _check_add_images),
    (row_kernels, "apply_rows", _check_apply),
    (blas, "syrk_f32_out", _check_syrk),
    (blas, "syrk_f64_into", _check_syrk),
]


def _guarded(kernel: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        check(*args)
        return kernel(*args)

    return call


@pytest.fixture(scope="session", autouse=True)
def guarded_kernels() -> Iterator[None]:
    """Compiled kernels check no bounds: a wrong buffer fails a test here, and no memory breaks."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, check in _GUARDS:
            patch.setattr(module, name, _guarded(getattr(module, name), check))
        yield


@pytest.fixture
def narrow_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which blocks are multiplied by BLAS, and centred by `centre_block`."""
    monkeypatch.setattr(gram, "WIDE", False)


# A job in the background of a script inherits an ignored SIGINT; the tests of Ctrl-C need Python's.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
