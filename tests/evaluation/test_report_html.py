"""Reports and figures (`report_html.py`, `figures.py`): whole files, escaped text, true bars."""

from __future__ import annotations

import html
import os
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from comparisons import FAILED, data, edited, run

from splince_fast.evaluation import Comparison, figures, report_html
from splince_fast.exceptions import InputError

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def small() -> Comparison:
    return run(*data(400), erasers=("none", "LEACE"), leakage=())


@pytest.mark.parametrize("method", ["to_html", "save"])
def test_an_old_file_survives_a_full_disk(
    small: Comparison, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            getattr(small, method)(target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    getattr(small, method)(target)  # control
    assert len(target.read_text()) > 1000


def test_labels_are_text_in_reports_and_figures(tmp_path: Path) -> None:
    X, y, z = data(400)
    task = np.array(["$\\frac", "b$"], dtype=object)[y].tolist()
    concept = ["\udc80lone" if k else "bell\x07" for k in z]
    result = run(
        X, task, {"$c\x01$ <b>": concept}, n_seeds=3,
        erasers={"$\\sqrt$": "LEACE", "plain": "none"}, association=(0.5, 0.8),
        aligned_class="bell\x07",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs that the font lacks
        text = result.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
        for kind in figures.available(result):
            result.plot(kind).savefig(tmp_path / f"{kind}.png")  # ticks are made here
    for shown in ("b$", "$\\sqrt$", "\\udc80lone", "bell\\x07", "$c\\x01$"):
        assert html.escape(shown) in text
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(drawing)  # well-formed
    svg = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "mathdefault" not in svg
    assert "$\\sqrt$" in svg


@pytest.mark.parametrize("failed", ["retrained", "every head"])
def test_a_report_leaves_out_figures_that_have_no_values(failed: str) -> None:
    plain = run(*data(300))
    result = edited(
        plain,
        lambda r: FAILED if r.head == failed or (r.head and failed == "every head") else {},
    )
    found = figures.available(result)
    assert ("trade-off" in found) is (failed == "retrained")  # of "frozen"
    page = report_html.render(result)
    assert ("aria-label='figure: trade-off'" in page) is ("trade-off" in found)
    assert "Failures (" in page
    assert figures.available(plain) == ["trade-off"]  # control


def test_a_report_on_quantities_has_figures_of_their_metrics() -> None:
    X, _, _ = data(300)
    result = run(X, X[:, 1] + X[:, 2], X[:, 0] ** 3, erasers=("none", "LEACE"))
    assert figures.available(result) == ["trade-off"]
    axes = result.plot("trade-off").axes[0]
    assert axes.get_xlabel() == "R2 (better to the right)"
    assert axes.get_ylabel() == "probe R2 (better below)"
    assert "probe R2 (better below)" in report_html.render(result)
    with pytest.raises(InputError, match="natural split"):
        result.plot("association")
    with pytest.raises(InputError, match="has no probes"):
        run(*data(300), n_seeds=1, leakage=()).plot("trade-off")
