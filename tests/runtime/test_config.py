"""What the library runs on: the choice of BLAS, and what show_config says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import splince_fast as sf
from splince_fast._kernels import blas, gram, provider
from splince_fast.cli import main

CODE = """
import numpy as np, splince_fast as sf
from splince_fast._kernels import provider
rng = np.random.default_rng(0)
z = rng.integers(0, 2, 3000)
X = rng.normal(size=(3000, 300)).astype(np.float32) + z[:, None]
m = sf.Moments().update(X, {"z": z})
print(provider.ensure().name)
print(repr(m.covariance()[:3, :3].tolist()))
"""


def run(**environment: str) -> tuple[str, np.ndarray]:
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    name, numbers = result.stdout.strip().splitlines()
    return name, np.array(eval(numbers))


def test_scipy_can_be_asked_for() -> None:
    assert run(SPLINCE_FAST_BLAS="scipy")[0] == "scipy"


def test_another_choice_is_an_error() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True, text=True, check=False, env={**os.environ, "SPLINCE_FAST_BLAS": "mkl"},
    )  # fmt: skip
    assert "InputError" in result.stderr
    assert "'auto' or 'scipy'" in result.stderr


@pytest.mark.skipif(
    find_spec("scipy_openblas32") is None or not provider.has_avx512(),
    reason='needs pip install "splince-fast[blas]" and a processor with AVX-512',
)
def test_providers_agree_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    path = provider._library_path()
    if path is None:
        pytest.skip("scipy_openblas32 is already imported in this process")
    library = provider._load(path)
    assert library is not None
    addresses = provider._addresses(library)
    assert addresses is not None
    rows = np.random.default_rng(0).normal(size=(500, 64))
    products = []
    for use in (blas.use_scipy_routines, lambda: blas.use_routines(addresses)):
        use()
        scatter = np.zeros((64, 64), order="F")
        blas.syrk_f64_into(rows, scatter)
        products.append(scatter)
    blas.use_scipy_routines()
    # Sums of 500 products each: n eps times the sum of magnitudes bounds their difference.
    bound = 500 * 2.3e-16 * (np.abs(rows).T @ np.abs(rows))
    assert (np.abs(products[0] - products[1]) <= bound).all()
    assert np.abs(products[0]).max() > 0


def test_a_library_without_all_routines_is_not_used() -> None:
    import ctypes

    assert provider._addresses(ctypes.CDLL(None)) is None


def test_show_config_measures_and_advises(capsys: pytest.CaptureFixture[str]) -> None:
    config = sf.show_config()
    assert config.syrk_float32 > 0
    assert config.syrk_float64 > 0
    assert config.copy > 0
    assert config.threads >= 1
    assert (config.products == "BLAS") is not gram.WIDE
    assert config.versions["numpy"] == np.__version__
    assert config.blas in ("scipy", "scipy-openblas32")
    assert "BLAS" in str(config)
    assert "<table>" in config._repr_html_()
    assert set(config.to_dict()) >= {"versions", "advice", "blas_reason"}
    assert main(["doctor"]) == 0
    assert "symmetric product" in capsys.readouterr().out


def test_the_environment_is_restored_around_the_load() -> None:
    before = os.environ.get("OPENBLAS_CORETYPE")
    with provider._environment("OPENBLAS_CORETYPE", "SkylakeX"):
        assert os.environ["OPENBLAS_CORETYPE"] == "SkylakeX"
    assert os.environ.get("OPENBLAS_CORETYPE") == before
