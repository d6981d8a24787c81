"""Tables, frames, files, figures and the report of a comparison."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splince_fast import evaluation as ev
from splince_fast.evaluation import Comparison
from splince_fast.exceptions import FileFormatError, InputError


@pytest.fixture(scope="module")
def result() -> Comparison:
    rng = np.random.default_rng(0)
    n = 1200
    y, z = rng.integers(0, 2, n), rng.integers(0, 2, n)
    X = rng.normal(size=(n, 6))
    X[:, 0] += 2 * z
    X[:, 1] += y
    return ev.compare(
        X, task=np.array(["no", "<yes>"])[y], concept={"gender": z}, association=(0.5, 0.9),
        tied=1, n_seeds=3, strengths=(0.1, 0.001), leakage=("linear", "boosting"), progress=False,
    )  # fmt: skip


def test_print_fits_a_hundred_columns_and_names_everything(result: Comparison) -> None:
    text = str(result)
    assert max(map(len, text.splitlines())) <= 100
    for word in ("SPLINCE", "retrained", "frozen", "p = 0.9", "kept cov", "advice", "±"):
        assert word in text
    assert "3 resamplings of this data set" in text


def test_intervals_are_those_of_the_seeds(result: Comparison) -> None:
    values = list(result.values("accuracy", eraser="SAL").values())
    found = result.interval("accuracy", eraser="SAL")
    assert found.mean == pytest.approx(np.mean(values))
    assert found.error == pytest.approx(np.std(values, ddof=1) / 3**0.5)
    point = result.values("accuracy", eraser="SAL", strength=0.001)
    assert len(point) == 3


def test_a_star_needs_the_test(result: Comparison) -> None:
    best = result.best("probe_accuracy")
    assert best[0] != "none"
    assert "none" not in result.best("probe_accuracy")
    assert len(best) == 3  # the three erasers cannot be told from each other
    text = str(result.differences("probe_accuracy", reference="none"))
    assert text.count("*") == 3


def test_the_long_form_is_complete(result: Comparison) -> None:
    pytest.importorskip("pandas")
    frame = result.to_frame()
    assert list(frame.columns) == [
        "seed", "p", "eraser", "head", "lambda", "metric", "value", "n", "reason"
    ]  # fmt: skip
    chosen = frame[
        (frame.metric == "worst_group") & (frame.eraser == "LEACE") & (frame["head"] == "frozen")
        & (frame.p == 0.9)
    ]  # fmt: skip
    assert chosen.value.mean() == pytest.approx(
        result.mean("worst_group", eraser="LEACE", head="frozen")
    )
    path = frame[(frame["head"] == "strengths") & (frame.metric == "accuracy")]
    assert len(path) == 3 * 2 * 4 * 2
    with pytest.raises(InputError, match="backend"):
        result.to_frame("excel")


def test_saved_and_loaded_it_is_the_same(result: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result.save(path)
    loaded = Comparison.load(path)
    assert str(loaded) == str(result)
    assert loaded.context == result.context
    path.write_text(path.read_text()[:-20])
    with pytest.raises(FileFormatError, match="truncated"):
        Comparison.load(path)
    path.write_text(json.dumps({"kind": "moments", "format": 1}))
    with pytest.raises(FileFormatError):
        Comparison.load(path)


@pytest.mark.parametrize(
    "kind", ["association", "strengths", "covariance", "leakage", "groups", "trade-off"]
)
def test_every_figure_is_drawn_from_the_result(result: Comparison, kind: str) -> None:
    pytest.importorskip("matplotlib")
    axes = result.plot(kind).axes[0]
    assert axes.get_title(loc="left")
    assert axes.get_legend() is not None
    if kind == "association":
        lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
        for eraser in result.context.erasers:
            expected = [result.mean("worst_group", eraser=eraser, p=p) for p in (0.5, 0.9)]
            assert list(lines[eraser]) == pytest.approx(expected)
    if kind == "groups":
        assert any("n = " in label.get_text() for label in axes.get_yticklabels())


def test_unknown_names_list_what_there_is(result: Comparison) -> None:
    with pytest.raises(InputError, match="association, strengths"):
        result.plot("pie")
    with pytest.raises(InputError, match="accuracy"):
        result.mean("precision", eraser="SAL")
    with pytest.raises(InputError, match="'LEACE'"):
        result.mean("accuracy", eraser="LACE")
    with pytest.raises(InputError, match="level"):
        result.mean("accuracy", eraser="SAL", p=0.7)


class Reader(HTMLParser):
    """Collects tags that stay open, links to the outside, and text."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_report_stands_alone(result: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    path = result.to_html(tmp_path / "report.html")
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 1_000_000
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.outside == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert not re.search(r"(https?:)?//\w+\.", page)
    assert page.count("<svg") == 6
    text = " ".join(reader.text)
    for word in ("SPLINCE", "data fingerprint", "How to cite", "rho", "splince_fast"):
        assert word in text
    assert "<yes>" not in page  # names of classes are escaped
    assert result.to_html(tmp_path / "again.html").read_text() == page  # and reproducible


def test_the_report_opens_in_a_browser(result: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium or google-chrome is installed")
    path = result.to_html(tmp_path / "report.html")
    found = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert found.stdout.count("<button") > 20  # the script ran: heads of columns are buttons
    # The first screen: what was compared, what came out, and two figures, before any table.
    first = found.stdout.partition("<table")[0]
    assert first.count('class="finding"') >= 3
    assert first.count("<figure>") == 2
    assert "resamplings of this data set" in first


def test_notebooks_get_tables(result: Comparison) -> None:
    reader = Reader()
    page = result._repr_html_()
    reader.feed(page)
    assert reader.open == []
    shown = "".join(reader.text)
    for word in ("SPLINCE", "rho", "resamplings of this data set"):
        assert word in shown
    assert page.count("<table") == page.count("<caption style=") > 1
    assert "text-align:right" in result.table("accuracy")._repr_html_()
    assert "style=" not in result.table("accuracy").to_html()  # the report has its own sheet
