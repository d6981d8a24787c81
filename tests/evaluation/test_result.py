"""A comparison (`result.py`, `records.py` and the views): tables, figures, report, files."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from comparisons import FAILED, changed, data, edited, run

from splince_fast import evaluation as ev
from splince_fast.evaluation import Comparison, figures, report_html, statistics
from splince_fast.evaluation.records import CellCount, PartLabels
from splince_fast.exceptions import FileFormatError, InputError


@pytest.fixture(scope="module")
def result() -> Comparison:
    X, y, z = data(1200)
    task, concept = np.array(["no", "<yes>"])[y], {"gender": z}
    return run(X, task, concept, association=(0.5, 0.9), aligned_class=1, n_seeds=3)


class Reader(HTMLParser):
    """Collects tags that stay open, links to the outside, ids and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "link", "br", "img", "input", "hr"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_and_notebooks_name_everything(result: Comparison) -> None:
    text, page = str(result), result._repr_html_()
    assert max(map(len, text.splitlines())) <= 100
    for word in ("SPLINCE", "retrained", "frozen", "p = 0.9", "kept cov", "±",
                 "3 resamplings of this data set"):  # fmt: skip
        assert word in text
        assert word in Reader(page).text
    assert page.count("<table") == page.count("<caption style=") > 1
    assert "text-align:right" in result.table("accuracy")._repr_html_()


def test_a_note_is_shown_once_for_all_seeds(result: Comparison) -> None:
    record = result.records[0]
    texts = ("3 of 'a2' move by 1.5e-2", "40 of 'a2' move by 0.25", "3 of 'a3' move by 1.5e-2")
    noted = [dataclasses.replace(record, notes=(text,)) for text in texts]
    found = Comparison([*noted, *result.records[1:]], result.context).notes
    assert [sum(text in note for note in found) for text in texts] == [1, 0, 1]


def test_intervals_are_those_of_the_seeds(result: Comparison) -> None:
    values = list(result.values("accuracy", eraser="SAL").values())
    found = result.interval("accuracy", eraser="SAL")
    assert found.mean == pytest.approx(np.mean(values))
    assert found.error == pytest.approx(np.std(values, ddof=1) / 3**0.5)
    point = result.values("accuracy", eraser="SAL", alpha=0.001)
    assert len(point) == 3
    assert result.values("accuracy", eraser="SAL", alpha=np.float32(0.001)) == point


def test_unknown_names_list_those_that_exist(result: Comparison) -> None:
    for match, call in {
        "the alphas are": lambda: result.values("accuracy", eraser="SAL", alpha=0.5),
        "association, trade-off": lambda: result.plot("pie"),
        "accuracy": lambda: result.mean("precision", eraser="SAL"),
        "'LEACE'": lambda: result.mean("accuracy", eraser="LACE"),
        "the heads are": lambda: result.mean("accuracy", eraser="SAL", head="tuned"),
        "level": lambda: result.mean("accuracy", eraser="SAL", p=0.7),
        "backend": lambda: result.to_frame("excel"),
    }.items():
        with pytest.raises(InputError, match=match):
            call()


def test_the_long_form_is_complete(result: Comparison) -> None:
    frame = result.to_frame()
    names = ["seed", "p", "eraser", "head", "alpha", "metric", "value", "n", "reason"]
    assert list(frame.columns) == names
    where = "metric == 'worst_group' and eraser == 'LEACE' and head == 'frozen' and p == 0.9"
    expected = result.mean("worst_group", eraser="LEACE", head="frozen")
    assert frame.query(where).value.mean() == pytest.approx(expected)
    assert len(frame.query("head == 'alphas' and metric == 'accuracy'")) == 3 * 2 * 4 * 2


@pytest.mark.parametrize(
    "change",
    [{"sizes": [1, 2]}, {"cells": [[1, 2]]}, {"surprise": 1}, {"path": [[1]]}, {"notes": None}],
)
def test_other_records_are_refused(
    result: Comparison, change: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    result.save(path)
    content = json.loads(path.read_text())
    content["records"][0] |= change
    moments = b'{"kind": "moments", "format": 1}'
    for text in (json.dumps(content).encode(), b"{}", b"[]", b"\xff\xfe", moments,
                 path.read_bytes()[:-20]):  # fmt: skip
        path.write_bytes(text)
        with pytest.raises(FileFormatError, match="is not a comparison of this version"):
            Comparison.load(path)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    """With the labels of a split of one's own, and with the direction of a custom metric."""
    X, y, z = data(300)
    part = np.arange(300) % 3 == 0
    error = ev.Metric(lambda a, b: np.mean(a != b), lower_is_better=True, label="error rate")
    result = run(
        X, y, z, n_seeds=1, test=part, groups=np.arange(300), metrics={"error": error},
        erasers=("none", "LEACE"), heads=("frozen",),
    )  # fmt: skip
    assert result.context.test_labels is not None
    assert np.array_equal(result.context.test_labels.task, y[part])
    result.save(tmp_path / "result.json")
    loaded = Comparison.load(tmp_path / "result.json")
    assert loaded.context == result.context
    assert loaded.records == result.records
    assert str(loaded) == str(result)
    metric = loaded.metric("error")
    assert metric == result.metric("error")
    assert (metric.label, metric.lower_is_better) == ("error rate", True)
    assert result.context.test_labels != PartLabels(y[part], None, None)  # control


def test_figures_are_drawn_from_the_result(result: Comparison) -> None:
    for kind in ("trade-off", "association"):
        axes = result.plot(kind).axes[0]
        assert axes.get_title(loc="left")
        assert axes.figure.legends
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    for eraser in result.context.erasers:
        expected = [result.mean("worst_group", eraser=eraser, p=p) for p in (0.5, 0.9)]
        assert list(lines[eraser]) == pytest.approx(expected)


def test_the_report_stands_alone(result: Comparison, tmp_path: Path) -> None:
    path = result.to_html(tmp_path / "report.html")
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 1_000_000
    reader = Reader(page)
    assert reader.outside == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert not re.search(r"(https?:)?//\w+\.", page)
    assert page.count("<svg") == 2
    folded = page.index("<details")
    assert page.index("<p>") < folded < page.index("<svg")
    assert page[:folded].count("<p>") == 3
    for word in ("SPLINCE", "data fingerprint", "How to cite", "splince_fast"):
        assert word in reader.text
    assert "<yes>" not in page  # names of classes are escaped
    assert result.to_html(tmp_path / "again.html").read_text() == page  # and reproducible


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
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for drawing_text in drawings:
        ElementTree.fromstring(drawing_text)  # well-formed
    assert "mathdefault" not in "".join(drawings)
    assert "$\\sqrt$" in "".join(drawings)


def test_a_report_has_the_figures_that_have_values() -> None:
    X, y, z = data(300)
    plain = run(X, y, z)
    assert figures.available(plain) == ["trade-off"]
    for failed, left in ((("retrained",), True), (("retrained", "frozen"), False)):
        result = edited(plain, lambda r, failed=failed: FAILED if r.head in failed else {})
        page = report_html.render(result)
        assert ("aria-label='figure: trade-off'" in page) is left
        assert "Failures (" in page
    quantities = run(X, X[:, 1] + X[:, 2], X[:, 0] ** 3, erasers=("none", "LEACE"))
    axes = quantities.plot("trade-off").axes[0]
    assert axes.get_xlabel() == "R2 (better to the right)"
    assert axes.get_ylabel() == "probe R2 (better below)"
    with pytest.raises(InputError, match="natural split"):
        quantities.plot("association")
    with pytest.raises(InputError, match="has no probes"):
        run(X, y, z, n_seeds=1, leakage=()).plot("trade-off")


def test_a_star_needs_the_test(result: Comparison) -> None:
    best = result.verdict("probe_accuracy").leaders
    assert set(best) == {"SAL", "LEACE", "SPLINCE"}  # they cannot be told from each other
    assert str(result.differences("probe_accuracy", reference="none")).count("*") == 3


def test_an_eraser_that_failed_at_some_seeds_is_compared_over_those_of_all() -> None:
    X, y, z = data(600)
    plain = run(X, y, z, n_seeds=6, heads=("retrained",), erasers=("none", "SAL", "LEACE"))
    good, bad = {s: 0.9 for s in range(3)}, {s: 0.1 for s in range(3, 6)}
    part = changed(plain, {"SAL": good | bad, "LEACE": {s: 0.8 for s in range(3)},
                           "none": {s: 0.2 for s in range(6)}})  # fmt: skip
    assert part.mean("worst_group", eraser="LEACE") > part.mean("worst_group", eraser="SAL")
    found = part.verdict("worst_group")
    assert (found.order, found.n_seeds) == (("SAL", "LEACE", "none"), 3)  # over seeds 0, 1, 2
    assert "LEACE 3/6" in str(part)
    assert "k/6: k of 6 seeds have values" in str(part)
    assert "3/6" in str(part.table("worst_group"))
    assert "3/6" not in str(plain)  # control
    over = "Order over the 3 seeds at which all erasers have values."
    assert over in part.decision().reasons
    assert over not in plain.decision().reasons
    assert changed(plain, {"SAL": good, "LEACE": bad}).verdict("worst_group").leaders == ()


def test_a_confirmed_leader_is_starred_and_a_tie_is_a_tie(result: Comparison) -> None:
    rng = np.random.default_rng(0)
    noise = {e: 0.01 * rng.normal(size=3) for e in result.context.erasers}
    level = {"SAL": 0.9, "none": 0.1, "LEACE": 0.1, "SPLINCE": 0.1}
    ahead = changed(result, {e: {s: level[e] + noise[e][s] for s in range(3)} for e in level})
    found = ahead.verdict("worst_group")
    assert (found.leaders, found.confirmed) == (("SAL",), "SAL")
    assert ahead.decision().sentence.endswith("each difference is significant.")
    zeros = changed(result, {e: dict.fromkeys(range(3), 0.0) for e in level})
    first = next(text for text in str(zeros).split("\n\n") if text.startswith("retrained"))
    assert "*" not in first
    # Without variation over seeds a difference from unerased rows cannot be tested.
    without = changed(result, {e: dict.fromkeys(range(3), 0.5 * (e != "none")) for e in level})
    assert without.decision().outcome == "not decided"


def test_of_erasers_with_one_mean_the_least_change_is_taken() -> None:
    X, y, z = data(300)
    twins = {"none": "none", "SAL": "SAL", "LEACE": "LEACE", "other": "LEACE"}
    found = run(X, y, z, n_seeds=3, erasers=twins, heads=("retrained",))
    assert repr(found) == "Comparison(4 erasers, 1 head, 1 level, 3 seeds)"
    values = {e: {s: 0.7 + s / 100 for s in range(3)} for e in twins}
    same = changed(found, values | {"none": {0: 0.69, 1: 0.73, 2: 0.7}})
    changes = {e: same.mean("distortion", eraser=e) for e in ("SAL", "LEACE", "other")}
    choice = same.decision("worst_group")
    assert choice.eraser == min(changes, key=changes.__getitem__) == "LEACE"
    assert any(text.startswith("LEACE minus unerased rows") for text in choice.reasons)
    with pytest.raises(InputError, match="only the natural split; leave p out"):
        found.decision(p=0.9)


def test_the_worst_group_has_its_cell_and_its_rows(result: Comparison) -> None:
    for head in result.context.heads:
        cells = result.worst_cells(eraser="SAL", head=head)
        assert set(cells) == {0, 1, 2}
        for seed, value in result.values("worst_group", eraser="SAL", head=head).items():
            cell = cells[seed]
            assert cell.accuracy == value
            assert cell.low <= value <= cell.high
            assert cell.cell in result.context.cells
            assert cell.n == result.sizes[seed, 0.9][2] // 4
    assert cells[0].n >= 20
    assert f"(n = {cells[0].n})" in str(result)
    assert "not reliable" not in str(result)
    # Of equally bad cells, the one with most rows is named.
    counts = (CellCount(0, 5, 0), CellCount(1, 40, 0), CellCount(2, 50, 30))
    zero = {"worst_group": 0.0}
    same = edited(result, lambda r: {"cells": counts, "values": r.values | zero} if r.cells else {})
    found = same.worst_cells(eraser="SAL")
    assert {(c.cell, c.n) for c in found.values()} == {(result.context.cells[1], 40)}


def test_the_test_takes_the_sizes_of_its_level() -> None:
    X, y, z = data(400)
    result = run(X, y, z, groups=np.arange(400) // 3, heads=("retrained",), association=(0.5, 0.9),
                 aligned_class=1, n_seeds=3)  # fmt: skip
    row = result.differences("accuracy", reference="none", p=0.9)[0]
    pairs = [result.values("accuracy", eraser=e, p=0.9) for e in (row.method, "none")]
    values = [pairs[0][s] - pairs[1][s] for s in pairs[0]]
    sizes = [size for (_, p), size in result.sizes.items() if p == 0.9]
    ratio = np.mean([test / train for train, _, test in sizes])
    assert (row.t, row.p) == pytest.approx(statistics.corrected_t(values, float(ratio))[:2])
    first = result.context.sizes
    assert first[2] / first[0] != pytest.approx(ratio, rel=1e-3)  # control


def test_differences_are_resolved_by_the_rows_that_decide_them(result: Comparison) -> None:
    """Equal differences of .05 at three seeds: the variance is that of the rows behind them."""
    metrics = ("accuracy", "class_accuracy", "tpr_gap", "worst_group", "probe_accuracy")

    def fields(r: Any) -> dict[str, Any]:
        value = 0.7 if r.eraser == "SAL" else 0.75
        known = dict.fromkeys({*metrics, "probe_auc"} & set(r.values), value)
        last = (r.eraser, r.seed, r.p) == ("LEACE", 1, 0.9)
        counts = (CellCount(0, 60, 45), CellCount(1, 12, 9) if last else CellCount(1, 40, 30))
        return {"values": r.values | known, "cells": counts if r.cells else ()}

    found = edited(result, fields)
    train, _, test = result.sizes[0, 0.9]
    for metric in metrics:
        row = found.differences(metric, reference="none")[0]
        rows = 12 if metric == "worst_group" else test
        error = math.sqrt((1 / 3 + test / train) * 0.05 * 0.95 / rows)
        assert (row.method, row.how) == ("SAL", "corrected t")
        assert row.t == pytest.approx(-0.05 / error), metric
    assert found.differences("probe_auc", reference="none")[0].how == "no test"  # no fraction


def test_cells_whose_names_would_collide_are_told_apart() -> None:
    X, y, z = data(400)
    task, concept = [("a", "a · b")[k] for k in y], [("b · c", "c")[k] for k in z]
    cells = run(X, task, concept, n_seeds=1, erasers=("none",)).context.cells
    assert len(set(cells)) == 4
    assert "'a · b' · 'c'" in cells
