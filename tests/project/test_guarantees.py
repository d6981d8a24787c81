"""docs/guarantees.md names, for every promise, a bound, a scope and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from named_tests import definitions

DOCUMENT = next(
    folder / "docs" / "guarantees.md"
    for folder in Path(__file__).resolve().parents
    if (folder / "docs" / "guarantees.md").is_file()
)
HEADING = ["promise", "bound", "holds for", "test"]


def rows(text: str) -> list[list[str]]:
    """Cells of every row of every table, headings and rules left out."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in cells if row != HEADING and not set("".join(row)) <= set("-")]


def faults(text: str, known: dict[str, list[Path]]) -> list[str]:
    """Rows that are not whole, and tests that do not exist or whose name is not unique."""
    found = [f"not four cells: {row}" for row in rows(text) if len(row) != 4 or not all(row)]
    for row in rows(text):
        named = re.findall(r"`(\w+)`", row[-1])
        if not named:
            found.append(f"no test: {row[0]}")
    for name in re.findall(r"`(test_\w+|Test\w+)`", text):
        if len(known.get(name, [])) != 1:
            found.append(f"{name} is defined in {len(known.get(name, []))} files")
    return found


def test_every_promise_names_tests_that_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert len(rows(text)) > 40
    assert faults(text, definitions()) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            "| a | b | c | `test_that_nobody_wrote` |",
            "test_that_nobody_wrote is defined in 0 files",
        ),
        ("| a | b | c | none |", "no test: a"),
        ("| a | b | `test_every_promise_names_tests_that_exist` |", "not four cells"),
        ("| a | | c | `test_every_promise_names_tests_that_exist` |", "not four cells"),
    ],
)
def test_control_a_promise_without_its_test_is_seen(line: str, fault: str) -> None:
    found = faults(line, definitions())
    assert any(fault in text for text in found), found
