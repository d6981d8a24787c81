"""docs/guarantees.md names, for every promise, a bound, a scope and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from named_tests import definitions

# Also where a copy of the tests runs, in a folder below the project.
DOCUMENT = next(
    path
    for folder in Path(__file__).resolve().parents
    if (path := folder / "docs" / "guarantees.md").is_file()
)


def rows(text: str) -> list[list[str]]:
    """Cells of every row of every table, headings and rules left out."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    heading = ["promise", "bound", "holds for", "test"]
    return [row for row in cells if row != heading and not set("".join(row)) <= set("-")]


def faults(text: str, known: dict[str, list[Path]]) -> list[str]:
    """Rows that are not whole, and tests that do not exist or whose name is not unique."""
    found = [f"not four cells: {row}" for row in rows(text) if len(row) != 4 or not all(row)]
    found += [f"no test: {row[0]}" for row in rows(text) if not re.search(r"`\w+`", row[-1])]
    counts = {n: len(known.get(n, [])) for n in re.findall(r"`(test_\w+|Test\w+)`", text)}
    return found + [f"{name} is defined in {n} files" for name, n in counts.items() if n != 1]


def test_every_promise_names_tests_that_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert len(rows(text)) > 40
    assert faults(text, definitions()) == []


def test_control_a_promise_without_its_test_is_seen() -> None:
    known = "`test_every_promise_names_tests_that_exist`"
    for line, fault in (
        ("| a | b | c | `test_of_nobody` |", "test_of_nobody is defined in 0 files"),
        ("| a | b | c | none |", "no test: a"),
        (f"| a | b | {known} |", "not four cells"),
        (f"| a | | c | {known} |", "not four cells"),
    ):
        assert any(fault in text for text in faults(line, definitions())), line
