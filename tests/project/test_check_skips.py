"""The gate's look at skipped tests: it must fail where a test ran in no job."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def junit(path: Path, *cases: str) -> str:
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return str(path)


def ran(name: str, file: str = "tests/test_a.py") -> str:
    module = file.removesuffix(".py").replace("/", ".")
    return f'<testcase classname="{module}" name="{name}" file="{file}" />'


def skipped(name: str, why: str, kind: str = "pytest.skip", file: str = "tests/test_a.py") -> str:
    module = file.removesuffix(".py").replace("/", ".")
    return (
        f'<testcase classname="{module}" name="{name}" file="{file}">'
        f'<skipped type="{kind}" message="{why}">{file}:1: {why}</skipped></testcase>'
    )


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_skips", ROOT / "tools" / "check_skips.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_test_that_ran_nowhere_fails_the_gate(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = junit(tmp_path / "core.xml", ran("test_x"), skipped("test_y", "pandas is missing"))
    other = junit(tmp_path / "all.xml", ran("test_x"), skipped("test_y", "pandas is missing"))
    assert tool.main([core, other]) == 1
    out = capsys.readouterr().out
    assert "tests/test_a.py::test_y is skipped in every job: pandas is missing" in out
    assert "1 tests ran, 1 ran nowhere, 1 of them without excuse" in out
    assert tool.main(["--list", core, other]) == 0
    assert capsys.readouterr().out == "tests/test_a.py::test_y\n"


def test_a_test_that_ran_in_one_job_passes(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = junit(tmp_path / "core.xml", ran("test_x"), skipped("test_y", "pandas is missing"))
    other = junit(tmp_path / "all.xml", ran("test_y"))
    assert tool.main([core, other]) == 0
    assert "0 ran nowhere, 0 of them without excuse" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("why", "excused"),
    [
        ("needs a GPU", True), ("no CUDA here", True), ("needs AVX-512", True),
        ("set SPLINCE_FAST_DATA", True), ("SPLINCE_FAST_SLOW is not set", True),
        ("needs pandas", False), ("flaky", False), ("", False),
    ],
)  # fmt: skip
def test_only_named_reasons_excuse(
    tool: ModuleType, tmp_path: Path, why: str, excused: bool
) -> None:
    core = junit(tmp_path / "core.xml", ran("test_x"), skipped("test_y", why))
    assert tool.main([core]) == int(not excused)


def test_expected_failures_are_no_skips_and_nothing_at_all_fails(
    tool: ModuleType, tmp_path: Path
) -> None:
    xfail = junit(tmp_path / "x.xml", ran("test_x"), skipped("test_y", "bug", "pytest.xfail"))
    assert tool.main([xfail]) == 0
    assert tool.main([junit(tmp_path / "empty.xml")]) == 1


def test_a_module_that_was_skipped_as_a_whole_is_named(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (
        '<testcase classname="" name="tests.test_b"><skipped type="pytest.skip" '
        'message="needs dask">needs dask</skipped></testcase>'
    )
    core = junit(tmp_path / "core.xml", ran("test_x"), whole)
    assert tool.main([core]) == 1
    assert "tests/test_b.py is skipped in every job" in capsys.readouterr().out
    other = junit(tmp_path / "all.xml", ran("test_z", "tests/test_b.py"))
    assert tool.main([core, other]) == 0
