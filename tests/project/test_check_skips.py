"""tools/check_skips.py fails where a test ran in no job."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "check_skips.py"))["main"]
WHOLE = (
    '<testcase classname="" name="tests.test_b"><skipped type="pytest.skip" '
    'message="needs dask">needs dask</skipped></testcase>'
)


def junit(path: Path, *cases: str) -> str:
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return str(path)


def case(name: str, why: str | None = None, *, kind: str = "skip", module: str = "test_a") -> str:
    """A test that ran, or that was skipped with a reason."""
    found = "" if why is None else f'<skipped type="pytest.{kind}" message="{why}">{why}</skipped>'
    where = f'classname="tests.{module}" name="{name}" file="tests/{module}.py"'
    return f"<testcase {where}>{found}</testcase>"


def test_tests_and_modules_that_ran_nowhere_fail_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = junit(tmp_path / "core.xml", case("test_x"), case("test_y", "pandas is missing"), WHOLE)
    assert main([core, core]) == 1
    out = capsys.readouterr().out
    assert "tests/test_a.py::test_y is skipped in every job: pandas is missing" in out
    assert "tests/test_b.py is skipped in every job: needs dask" in out
    assert main(["--list", core]) == 0
    assert capsys.readouterr().out == "tests/test_a.py::test_y\ntests/test_b.py\n"
    other = junit(tmp_path / "all.xml", case("test_y"), case("test_z", module="test_b"))
    assert main([core, other]) == 0
    assert main([junit(tmp_path / "empty.xml")]) == 1


@pytest.mark.parametrize(
    ("why", "kind", "excused"),
    [("needs a GPU", "skip", True), ("set SPLINCE_FAST_DATA", "skip", True),
     ("a bug", "xfail", True), ("needs pandas", "skip", False), ("", "skip", False)],
)  # fmt: skip
def test_only_named_reasons_excuse(tmp_path: Path, why: str, kind: str, excused: bool) -> None:
    core = junit(tmp_path / "core.xml", case("test_x"), case("test_y", why, kind=kind))
    assert main([core]) == int(not excused)
