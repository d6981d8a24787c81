"""The pages list every public name; their commands and links are valid."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from splince_fast.cli import main
from splince_fast.cli.commands import _parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if not {"gallery", "generated", "_build"} & set(page.parts)
}
API = (ROOT / "docs" / "api.rst").read_text()
every_page = pytest.mark.parametrize("page", PAGES)
every_module = pytest.mark.parametrize(
    "name", ["", ".labels", ".sources", ".evaluation", ".baselines", ".nn"]
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


def _public(name: str) -> dict[str, Any]:
    """Public names of a module, without modules and errors, which have a page of their own."""
    if name == ".nn":
        pytest.importorskip("torch")
    module = importlib.import_module(f"splince_fast{name}")
    values = {n: getattr(module, n) for n in module.__all__}
    return {
        n: v
        for n, v in values.items()
        if not inspect.ismodule(v) and not (inspect.isclass(v) and issubclass(v, BaseException))
    }


@every_module
def test_every_public_name_is_in_the_reference(name: str) -> None:
    module = f"splince_fast{name}"
    here = {entry for entry in _indexed(API) if entry.rpartition(".")[0] == module}
    assert here == {f"{module}.{n}" for n in _public(name)}


def test_every_listed_name_exists() -> None:
    assert "splince_fast.leace" not in _indexed(API.replace("   leace\n", ""))  # control
    pytest.importorskip("torch")
    for entry in _indexed(API):
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), name), entry


@every_module
def test_every_public_callable_has_an_example_that_runs(name: str) -> None:
    # Records and handles of a model, which nobody constructs: the function that does shows them.
    made_by_others = inspect.isclass if name == ".nn" else lambda value: False
    public = {n: v for n, v in _public(name).items() if callable(v) and not made_by_others(v)}
    assert [n for n, value in public.items() if ">>>" not in (value.__doc__ or "")] == []


def test_every_error_is_in_the_reference() -> None:
    assert ".. automodule:: splince_fast.exceptions\n   :members:" in API
    exceptions = importlib.import_module("splince_fast.exceptions")
    own = [v for v in vars(exceptions).values() if inspect.isclass(v)]
    assert own
    assert all(v.__doc__ for v in own)


# Every line of a console block that calls the command line, with its page.
COMMANDS = [
    (name, line[2:])
    for name, page in PAGES.items()
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S)
    for line in block.replace("\\\n", "").splitlines()
    if line.startswith("$ splince-fast")
]


def test_the_pages_show_commands() -> None:
    assert len(COMMANDS) > 8
    assert {line.split()[1] for _, line in COMMANDS} >= {"fit", "apply", "compare", "inspect"}
    with pytest.raises(SystemExit):  # control
        _parser().parse_args(["fit", "X.npy", "--erased", "z", "-o", "e.safetensors"])


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_is_one_that_the_parser_takes(page: str, line: str) -> None:
    assert callable(_parser().parse_args(shlex.split(line)[1:]).run), page


def test_the_commands_of_the_parquet_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    gender = rng.integers(0, 2, size=200)
    doctor = np.where(rng.random(200) < 0.8, gender, 1 - gender)
    X = rng.normal(size=(200, 4)).astype(np.float32)
    X[:, :2] += np.stack([gender, doctor], axis=1)
    monkeypatch.chdir(tmp_path)
    table = pa.table({"embedding": list(X), "gender": gender, "doctor": doctor})
    pq.write_table(table, "people.parquet")
    lines = [line for page, line in COMMANDS if page == "docs/howto/parquet.md"]
    assert len(lines) == 3
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    clean = np.array(pq.read_table("clean.parquet")["embedding"].to_pylist())
    gaps = [rows[gender == 1].mean(axis=0) - rows[gender == 0].mean(axis=0) for rows in (clean, X)]
    assert np.abs(gaps[0]).max() < 1e-6
    assert np.abs(gaps[1]).max() > 0.5


@every_page
def test_every_link_to_a_file_of_the_repository_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", PAGES[page].read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (PAGES[page].parent / target).resolve()
        if path.parent.name == "gallery":  # made from a program of the same name
            path = ROOT / "docs" / "examples" / (path.stem + ".py")
        assert path.exists(), target


@every_page
def test_every_python_block_is_a_doctest(page: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", PAGES[page].read_text(), re.M | re.S):
        assert block.startswith(">>>"), block
