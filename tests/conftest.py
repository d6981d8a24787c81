"""Settings of Hypothesis, optional libraries, and checks of the arguments of sparse kernels.

``SPLINCE_FAST_FUZZ=n`` multiplies the examples of every property test by n and draws them afresh;
without it the same examples are drawn on each run.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
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


def library(name: str) -> Any:
    """A fixture of an optional library; tests that take it are skipped where it is missing."""
    return pytest.fixture(scope="session")(lambda: pytest.importorskip(name))


pd, pl, pa, pq, torch = map(library, ("pandas", "polars", "pyarrow", "pyarrow.parquet", "torch"))


# --- checks of the arguments of kernels ----------------------------------------------------------


# Kernel -> its array of one entry per feature.
SPARSE_KERNELS = {"sum_rows": "total", "sum_squares": "squares"}


def _guarded(kernel: Callable[..., Any], per_feature: str) -> Callable[..., Any]:
    signature = inspect.signature(kernel)

    def call(*arguments: Any) -> Any:
        given = signature.bind(*arguments).arguments
        data, indices, indptr, weight = (
            given.pop(k) for k in ("data", "indices", "indptr", "weight")
        )
        n, d = len(indptr) - 1, len(given[per_feature])
        assert weight.shape in ((n,), (0,))
        assert len(data) >= indptr[-1] <= len(indices)
        assert (np.diff(indptr) >= 0).all()
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < d)
        for name in given.keys() & {"codes", "values"}:
            assert given[name].shape[1:] == (n,)
        for name in given.keys() & {"class_sums", "products"}:
            assert not len(given[name]) or given[name].shape[1:] == (d,)
        if "mean" in given:
            assert given["mean"].shape == given[per_feature].shape
        if "codes" in given:
            assert len(given["products"]) == len(given["values"])
            assert given["codes"].size == 0 or given["codes"].max() < len(given["class_sums"])
        return kernel(*arguments)

    return call


@pytest.fixture(scope="session", autouse=True)
def guarded_kernels() -> Iterator[None]:
    """Replace the sparse kernels, which check no bounds, by versions that check their arguments."""
    with pytest.MonkeyPatch.context() as patch:
        for name, per_feature in SPARSE_KERNELS.items():
            patch.setattr(sparse, name, _guarded(getattr(sparse, name), per_feature))
        yield


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


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command; return stdout after success and stderr after a mistake, the other empty."""
    from splince_fast.cli import main

    def run(*argv: str, code: int = 0) -> str:
        assert main(list(argv)) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert not (out if code else err)
        return err if code else out

    return run
