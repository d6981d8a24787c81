"""The package as others get it: light to import, complete as wheel and as source distribution."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import splince_fast as sf

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "dask", "scipy", "sklearn", "numba", "pandas", "polars", "pyarrow", "matplotlib")


def python(code: str, *flags: str, executable: str = sys.executable, cwd: Path = ROOT) -> str:
    result = subprocess.run(
        [executable, *flags, "-c", code], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_pulls_in_nothing_heavy() -> None:
    loaded = python(f"import sys, splince_fast; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


def test_control_estimators_do_pull_in_scikit_learn() -> None:
    assert (
        python("import sys, splince_fast as sf; sf.SPLINCE; print('sklearn' in sys.modules)")
        == "True"
    )


def test_import_takes_under_three_tenths_of_a_second() -> None:
    # The best of five fresh interpreters: the machine may be busy, the import may not be slow.
    code = (
        "import time; t = time.perf_counter(); import splince_fast; print(time.perf_counter() - t)"
    )
    assert min(float(python(code)) for _ in range(5)) < 0.3


def test_every_public_name_exists_and_is_documented() -> None:
    for name in sf.__all__:
        assert getattr(sf, name).__doc__, name


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sf.nothing  # noqa: B018


def test_missing_extension_says_how_to_build_it() -> None:
    code = (
        "import sys\n"
        "sys.modules['splince_fast._kernels.oblique'] = None\n"
        "import splince_fast\n"
        "try:\n    splince_fast.splince\n"
        "except ImportError as error:\n    print(error)\n"
    )
    assert "pip install" in python(code)


def test_user_errors_survive_optimised_mode() -> None:
    code = (
        "import numpy as np, splince_fast as sf\n"
        "try:\n    sf.Moments().update(np.zeros(3))\n"
        "except sf.InputError:\n    print('typed')\n"
    )
    assert python(code, "-O") == "typed"


packaging = pytest.mark.skipif(
    os.environ.get("SPLINCE_FAST_PACKAGING") != "1" or find_spec("pip") is None,
    reason="set SPLINCE_FAST_PACKAGING=1, with pip and network access, to build distributions",
)


@packaging
def test_wheel_built_from_the_source_distribution_works_elsewhere(tmp_path: Path) -> None:
    """sdist -> wheel -> new environment -> import and erase, far from the source tree."""
    pip = [sys.executable, "-m", "pip"]
    isolated = tmp_path / "build-env"
    venv.create(isolated, with_pip=True)
    build = str(isolated / "bin" / "python")
    subprocess.run([build, "-m", "pip", "install", "-q", "build"], check=True)
    subprocess.run(
        [build, "-m", "build", "--sdist", "-o", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    for needed in (
        "LICENSE",
        "README.md",
        "setup.py",
        "tests/test_packaging.py",
        "proofs_check/__main__.py",
        "splince_fast/_kernels/oblique.pyx",
        "splince_fast/_kernels/blas.pxd",
    ):
        assert needed in names
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(sdist)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for needed in ("splince_fast/py.typed", "splince_fast/demo/data/professions.safetensors"):
        assert needed in names
    assert not [name for name in names if name.endswith(".c") or name.startswith("tests/")]
    home = tmp_path / "elsewhere"
    venv.create(home, with_pip=True, system_site_packages=False)
    interpreter = str(home / "bin" / "python")
    subprocess.run([interpreter, "-m", "pip", "install", "-q", str(wheel)], check=True)
    code = (
        "import numpy as np, splince_fast as sf\n"
        "z = np.arange(100) % 2\n"
        "X = np.random.default_rng(0).normal(size=(100, 4)) + z[:, None]\n"
        "m = sf.Moments().update(X, {'z': z})\n"
        "print(sf.__version__, sf.leace(m, erase='z').rank)\n"
    )
    assert python(code, executable=interpreter, cwd=tmp_path) == f"{sf.__version__} 1"
