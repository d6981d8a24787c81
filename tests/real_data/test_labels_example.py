"""The table of the how-to page on labels is that which the example of the gallery prints."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Names in the output of the example, where they differ from those of the page.
PRINTED = {"unchanged": "none", "QLEACE, task kept": "repair @ QLEACE"}


def figures(name: str, cells: list[str]) -> tuple[str, list[float]]:
    name = re.sub(r" \((quadratic).*\)", "", name.replace("`", ""))
    return PRINTED.get(name, name), [float(cell) for cell in cells]


@pytest.mark.slow
def test_figures_of_the_page_are_those_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    page = (ROOT / "docs" / "howto" / "labels_at_hand.md").read_text()
    table = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][1:]
    expected = dict(figures(name.strip(), cells) for name, *cells in table)
    runpy.run_path(str(ROOT / "docs" / "examples" / "plot_labels.py"))
    found = {
        line[:22].strip(): [float(cell) for cell in line[22:].split()]
        for line in capsys.readouterr().out.splitlines()[1:]
    }
    assert list(found) == list(expected)
    for name, values in expected.items():
        # Two digits; vectors of 8 bits ship, and a folder of real data may hold the full ones.
        assert found[name] == pytest.approx(values, abs=0.016), name
    # Control: the order that the page draws conclusions from.
    change, kernel = ({name: row[i] for name, row in found.items()} for i in (0, 2))
    assert change["o-LEACE"] < change["LEACE"]
    assert change["o-SPLINCE"] < change["SPLINCE"]
    assert kernel["o-LEACE"] > kernel["LEACE"] > kernel["QLEACE"]
