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

from splince_fast._kernels import row_kernels, sparse

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
    (sparse, "sum_rows", _check_sum_rows),
    (sparse, "sum_squares", _check_sum_squares),
    (sparse, "add_images", _check_add_images),
]


def _guarded(kernel: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        check(*args)
        return kernel(*args)

    return call


@pytest.fixture(scope="session", autouse=True)
def guarded_kernels() -> Iterator[None]:
    """Numba kernels check no bounds: a wrong argument fails a test before memory is touched."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, check in _GUARDS:
            patch.setattr(module, name, _guarded(getattr(module, name), check))
        yield


@pytest.fixture
def narrow_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which blocks are multiplied by BLAS, and centred by `centre_columns`."""
    monkeypatch.setattr(row_kernels, "wide", lambda: False)


@pytest.fixture(scope="module", params=row_kernels.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this processor in turn."""
    before = row_kernels.level_name()
    row_kernels.use_level(request.param)
    yield request.param
    row_kernels.use_level(before)


# A job in the background of a script inherits an ignored SIGINT; the tests of Ctrl-C need Python's.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
