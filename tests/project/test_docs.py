"""The site says what is there: every public name, every command, every link."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from splince_fast.cli.commands import _parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PAGES = [page for page in PAGES if not {"gallery", "generated", "_build"} & set(page.parts)]
MODULES = (
    "splince_fast",
    "splince_fast.labels",
    "splince_fast.sources",
    "splince_fast.evaluation",
    "splince_fast.baselines",
    "splince_fast.nn",
)


def _indexed(text: str) -> set[str]:
    """Names that the tables and the data directives of a page list, with their modules."""
    module, listed, inside = "", set(), False
    for line in text.splitlines():
        if found := re.match(r"\.\. currentmodule:: (\S+)", line):
            module = found[1]
        elif line.startswith(".. autosummary::"):
            inside = True
        elif found := re.match(r"\.\. py:data:: (\w+)$", line):
            listed.add(f"{module}.{found[1]}")
        elif inside and re.match(r"   \w+$", line):
            listed.add(f"{module}.{line.strip()}")
        elif line.strip() and not line.startswith("   "):
            inside = False
    return listed


def _module(name: str) -> object:
    if name == "splince_fast.nn":
        pytest.importorskip("torch")
    return importlib.import_module(name)


def _public(name: str) -> dict[str, object]:
    """Public names of a module, without modules and errors, which have a page of their own."""
    module = _module(name)
    values = {n: getattr(module, n) for n in module.__all__}  # type: ignore[attr-defined]
    return {
        n: v
        for n, v in values.items()
        if not inspect.ismodule(v) and not (inspect.isclass(v) and issubclass(v, BaseException))
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    listed = _indexed((ROOT / "docs" / "api.rst").read_text())
    here = {entry for entry in listed if entry.rpartition(".")[0] == name}
    assert here == {f"{name}.{n}" for n in _public(name)}


def test_every_listed_name_exists() -> None:
    pytest.importorskip("torch")
    for entry in _indexed((ROOT / "docs" / "api.rst").read_text()):
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), name), entry


def test_control_a_name_that_is_not_listed_is_missed() -> None:
    text = (ROOT / "docs" / "api.rst").read_text()
    assert "splince_fast.leace" in _indexed(text)
    assert "splince_fast.leace" not in _indexed(text.replace("   leace\n", ""))


@pytest.mark.parametrize("name", MODULES)
def test_every_public_callable_has_an_example_that_runs(name: str) -> None:
    without = [
        n
        for n, value in _public(name).items()
        if callable(value)
        and ">>>" not in (value.__doc__ or "")
        and not (name == "splince_fast.nn" and _made_by_others(value))
    ]
    assert without == []


def _made_by_others(value: object) -> bool:
    """A record or handle of a model, which nobody constructs: the function that does shows it."""
    return inspect.isclass(value)


def test_every_error_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.rst").read_text()
    assert ".. automodule:: splince_fast.exceptions\n   :members:" in text
    exceptions = importlib.import_module("splince_fast.exceptions")
    own = [v for v in vars(exceptions).values() if inspect.isclass(v)]
    assert own
    assert all(v.__doc__ for v in own)


def _commands() -> Iterator[tuple[str, str]]:
    """Every line of a console block that calls the command line, with its page."""
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in block.replace("\\\n", "").splitlines():
                if line.startswith("$ splince-fast"):
                    yield str(page.relative_to(ROOT)), line[2:]


COMMANDS = list(_commands())


def test_the_pages_show_commands() -> None:
    assert len(COMMANDS) > 8
    assert {line.split()[1] for _, line in COMMANDS} >= {"fit", "apply", "compare", "inspect"}


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_is_one_that_the_parser_takes(page: str, line: str) -> None:
    args = _parser().parse_args(shlex.split(line)[1:])
    assert callable(args.run), page


def test_control_a_wrong_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["fit", "X.npy", "--erased", "z", "-o", "e.safetensors"])
    assert "--erase" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
def test_the_commands_of_the_parquet_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from splince_fast.cli import main

    rng = np.random.default_rng(0)
    gender = rng.integers(0, 2, size=200)
    doctor = np.where(rng.random(200) < 0.8, gender, 1 - gender)
    X = rng.normal(size=(200, 4)).astype(np.float32)
    X[:, 0] += gender
    X[:, 1] += doctor
    monkeypatch.chdir(tmp_path)
    table = pa.table({"embedding": list(X), "gender": gender, "doctor": doctor})
    pq.write_table(table, "people.parquet")
    lines = [line for page, line in COMMANDS if page == "docs/howto/parquet.md"]
    assert len(lines) == 3
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    clean = np.array(pq.read_table("clean.parquet")["embedding"].to_pylist())
    gap = clean[gender == 1].mean(axis=0) - clean[gender == 0].mean(axis=0)
    assert np.abs(gap).max() < 1e-6
    assert np.abs(X[gender == 1].mean(axis=0) - X[gender == 0].mean(axis=0)).max() > 0.5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_of_the_repository_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve()
        if path.parent.name == "gallery":  # made from a program of the same name
            path = ROOT / "docs" / "examples" / (path.stem + ".py")
        assert path.exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_is_a_doctest(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        assert block.startswith(">>>"), block
