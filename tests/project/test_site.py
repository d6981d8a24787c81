"""The site: lines that fit, and targets of links. `tools/screenshots.py` looks at it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted({*DOCS.glob("*.md"), *(DOCS / "howto").glob("*.md")} - {DOCS / "changelog.md"})
# Of a code block at 1280 pixels: 75 characters, and the prompt of a doctest.
WIDEST = 79


def code_lines(text: str) -> list[str]:
    """Lines that a reader types: Python, and commands."""
    blocks = re.findall(r"^```(?:python|py|sh|console)\n(.*?)^```", text, re.M | re.S)
    lines = "".join(blocks).splitlines()
    typed = (">>> ", "... ", "$ ", "    ")
    return [line for line in lines if line.startswith(typed) or ">>>" not in "".join(blocks)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_fits_its_place(page: Path) -> None:
    assert [line for line in code_lines(page.read_text()) if len(line) > WIDEST] == []


def test_a_line_that_is_too_long_is_noticed() -> None:
    text = f"```python\n>>> {'x' * WIDEST}\n```\n"
    assert max(map(len, code_lines(text))) > WIDEST
