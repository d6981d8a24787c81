"""The package as others get it: light to import, complete as wheel and as source distribution."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import script

import splince_fast as sf

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "dask", "scipy", "sklearn", "numba", "pandas", "polars", "pyarrow", "matplotlib")


def test_import_is_light_and_estimators_pull_in_scikit_learn() -> None:
    text = "import time; t = time.process_time(); import splince_fast as sf"
    text += f"; print(time.process_time() - t, *(m for m in {HEAVY} if m in sys.modules))"
    text += "; sf.SPLINCE; print('sklearn' in sys.modules)"
    runs = [script(f"import sys; {text}").split() for _ in range(3)]
    assert all(loaded == ["True"] for _, *loaded in runs)  # control: no other name is printed
    # Of the processor, which other processes do not add to; the best of three fresh interpreters.
    assert min(float(seconds) for seconds, *_ in runs) < 0.3


def test_missing_extension_says_how_to_build_it() -> None:
    text = (
        "import sys\n"
        "sys.modules['splince_fast._kernels.oblique'] = None\n"
        "import splince_fast\n"
        "try:\n    splince_fast.splince\n"
        "except ImportError as error:\n    print(error)\n"
    )
    assert "pip install" in script(text)


packaging = pytest.mark.skipif(
    os.environ.get("SPLINCE_FAST_PACKAGING") != "1" or find_spec("pip") is None,
    reason="set SPLINCE_FAST_PACKAGING=1, with pip and network access, to build distributions",
)


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def tool(name: str, *arguments: str) -> None:
    """Run a checker of distributions, or skip where it is not installed."""
    if find_spec(name) is None:
        pytest.skip(f"needs {name}, of the extra packaging")
    result = run(sys.executable, "-m", name, *arguments, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    tool("build", "--sdist", "-o", str(folder), str(ROOT))
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that pip builds from the source distribution, far from the source tree."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(sdist.parent)]
    subprocess.run([*command, str(sdist)], check=True)
    (found,) = sdist.parent.glob("*.whl")
    return found


@packaging
def test_distributions_hold_what_they_need(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert sources >= {
        "LICENSE",
        "README.md",
        "setup.py",
        "tests/project/test_packaging.py",
        "proofs_check/__main__.py",
        *(f"splince_fast/_kernels/{name}" for name in (
            "oblique.pyx", "shapes.pxd", "csrc/simd.h", "csrc/erase.inc.c", "csrc/level_avx512.c"
        )),
    }  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    data = "splince_fast/demo/professions/professions.safetensors"
    assert {"splince_fast/py.typed", data} <= set(names)
    assert not [n for n in names if n.startswith(("tests/", "reproduction/"))]
    assert not [n for n in names if n.endswith((".c", ".h"))]


@packaging
def test_one_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        built = [n for n in archive.namelist() if n.endswith((".so", ".pyd"))]
    assert built
    assert all(".abi3." in n or n.endswith(".pyd") for n in built)


@packaging
@pytest.mark.parametrize(
    "checker",
    [
        "abi3audit --strict",  # no symbol outside the limited API
        "twine check --strict",  # metadata that the package index takes
        "check_wheel_contents",  # the package and nothing else
        pytest.param(
            "auditwheel show",  # no library of its own
            marks=pytest.mark.skipif(sys.platform != "linux", reason="a tool for Linux"),
        ),
    ],
)
def test_checkers_of_wheels_find_no_fault(wheel: Path, checker: str) -> None:
    tool(*checker.split(), str(wheel))


@packaging
@pytest.mark.parametrize("name", ["ci.yml", "wheels.yml"])
def test_the_workflows_follow_their_schema(name: str) -> None:
    path = ROOT / ".github" / "workflows" / name
    checker = str(Path(sys.executable).with_name("check-jsonschema"))
    result = run(checker, "--builtin-schema", "vendor.github-workflows", str(path))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_recipe_names_what_the_package_needs() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text()
    run = recipe[recipe.index("  run:") : recipe.index("\ntests:")]
    listed = {line.strip("- ").replace(" ", "") for line in run.splitlines()[1:] if line.strip()}
    assert listed - {"python>=3.11"} == set(needed)


# A fault of the example's types is seen by each: what is given back is an eraser, no text.
@packaging
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_the_types_hold_for_others(wheel: Path, checker: str, tmp_path: Path) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"needs {checker}, of the extra packaging")
    # The package from its wheel, beside the dependencies of this environment.
    venv.create(tmp_path / "home", with_pip=False)
    (site,) = (tmp_path / "home").glob("**/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(str(Path(np.__file__).parents[1]), encoding="utf-8")
    interpreter = str(tmp_path / "home" / ("Scripts" if os.name == "nt" else "bin") / "python")
    outside = tmp_path / "outside"
    outside.mkdir()
    settings = {"typeCheckingMode": "strict", "include": ["example.py"]}
    (outside / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    options = {
        "mypy": ["--strict", "--python-executable", interpreter, "example.py"],
        "pyright": ["--pythonpath", interpreter],
    }
    text = (ROOT / "tests" / "typing" / "example.py").read_text(encoding="utf-8")
    for content in (text, text.replace("-> sf.Projection:", "-> str:", 1)):
        (outside / "example.py").write_text(content, encoding="utf-8")
        result = run(sys.executable, "-m", checker, *options[checker], cwd=outside)
        assert (result.returncode == 0) == (content == text), result.stdout + result.stderr
        assert result.returncode == 0 or '"str"' in result.stdout


@packaging
def test_the_wheel_runs_the_demo_where_no_compiler_is(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "home", with_pip=True)
    bin_ = tmp_path / "home" / ("Scripts" if os.name == "nt" else "bin")
    bare = os.environ | {"PATH": str(bin_), "CC": "no-compiler"}

    def out(*command: str) -> str:
        done = run(*command, env=bare, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    probe = "import shutil; print([c for c in ('gcc', 'cc', 'clang', 'cl') if shutil.which(c)])"
    assert out(str(bin_ / "python"), "-c", probe).strip() == "[]"
    out(str(bin_ / "python"), "-m", "pip", "install", "-q", "--only-binary=:all:", str(wheel))
    assert "SPLINCE" in out(str(bin_ / "splince-fast"), "demo", "--no-figure", "--splits", "3")
    code = (
        "import numpy as np, splince_fast as sf\n"
        "z = np.arange(100) % 2\n"
        "X = np.random.default_rng(0).normal(size=(100, 4)) + z[:, None]\n"
        "m = sf.Moments().update(X, {'z': z})\n"
        "print(sf.__version__, sf.leace(m, erase='z').rank)\n"
    )
    assert out(str(bin_ / "python"), "-c", code).strip() == f"{sf.__version__} 1"
