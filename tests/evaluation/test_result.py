"""A comparison (`result.py`, `measurements.py`, `tables.py`): tables, frames, files, verdicts."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons import changed, data, edited, run

from splince_fast.evaluation import Comparison, statistics
from splince_fast.evaluation.records import CellCount
from splince_fast.exceptions import InputError


@pytest.fixture(scope="module")
def result() -> Comparison:
    X, y, z = data(1200)
    task, concept = np.array(["no", "<yes>"])[y], {"gender": z}
    return run(X, task, concept, association=(0.5, 0.9), aligned_class=1, n_seeds=3)


def test_print_fits_a_hundred_columns_and_names_everything(result: Comparison) -> None:
    text = str(result)
    assert max(map(len, text.splitlines())) <= 100
    for word in ("SPLINCE", "retrained", "frozen", "p = 0.9", "kept cov", "±"):
        assert word in text
    assert "3 resamplings of this data set" in text


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
    with pytest.raises(InputError, match="the alphas are"):
        result.values("accuracy", eraser="SAL", alpha=0.5)


def test_a_star_needs_the_test(result: Comparison) -> None:
    best = result.verdict("probe_accuracy").leaders
    assert best[0] != "none"
    assert "none" not in best
    assert len(best) == 3  # the three erasers cannot be told from each other
    text = str(result.differences("probe_accuracy", reference="none"))
    assert text.count("*") == 3


def test_the_long_form_is_complete(result: Comparison) -> None:
    pytest.importorskip("pandas")
    frame = result.to_frame()
    assert list(frame.columns) == [
        "seed", "p", "eraser", "head", "alpha", "metric", "value", "n", "reason"
    ]  # fmt: skip
    chosen = frame[
        (frame.metric == "worst_group") & (frame.eraser == "LEACE") & (frame["head"] == "frozen")
        & (frame.p == 0.9)
    ]  # fmt: skip
    assert chosen.value.mean() == pytest.approx(
        result.mean("worst_group", eraser="LEACE", head="frozen")
    )
    path = frame[(frame["head"] == "alphas") & (frame.metric == "accuracy")]
    assert len(path) == 3 * 2 * 4 * 2
    with pytest.raises(InputError, match="backend"):
        result.to_frame("excel")


@pytest.mark.parametrize("kind", ["association", "trade-off"])
def test_every_figure_is_drawn_from_the_result(result: Comparison, kind: str) -> None:
    pytest.importorskip("matplotlib")
    axes = result.plot(kind).axes[0]
    assert axes.get_title(loc="left")
    assert axes.figure.legends
    if kind == "association":
        lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
        for eraser in result.context.erasers:
            expected = [result.mean("worst_group", eraser=eraser, p=p) for p in (0.5, 0.9)]
            assert list(lines[eraser]) == pytest.approx(expected)


def test_unknown_names_list_what_there_is(result: Comparison) -> None:
    with pytest.raises(InputError, match="association, trade-off"):
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
    assert page.count("<svg") == 2
    folded = page.index("<details")
    assert page.index("<p>") < folded < page.index("<svg")
    assert page[:folded].count("<p>") == 3
    text = " ".join(reader.text)
    for word in ("SPLINCE", "data fingerprint", "How to cite", "splince_fast"):
        assert word in text
    assert "<yes>" not in page  # names of classes are escaped
    assert result.to_html(tmp_path / "again.html").read_text() == page  # and reproducible


def test_notebooks_get_tables(result: Comparison) -> None:
    reader = Reader()
    page = result._repr_html_()
    reader.feed(page)
    assert reader.open == []
    shown = "".join(reader.text)
    for word in ("SPLINCE", "resamplings of this data set"):
        assert word in shown
    assert page.count("<table") == page.count("<caption style=") > 1
    assert "text-align:right" in result.table("accuracy")._repr_html_()


# -- verdicts ---------------------------------------------------------------------------------


def test_an_eraser_that_failed_at_some_seeds_is_compared_over_those_of_all() -> None:
    X, y, z = data(600)
    plain = run(X, y, z, n_seeds=6, heads=("retrained",), erasers=("none", "SAL", "LEACE"))
    good, bad = {s: 0.9 for s in range(3)}, {s: 0.1 for s in range(3, 6)}
    part = changed(plain, {"SAL": good | bad, "LEACE": {s: 0.8 for s in range(3)},
                           "none": {s: 0.2 for s in range(6)}})  # fmt: skip
    assert part.mean("worst_group", eraser="LEACE") > part.mean("worst_group", eraser="SAL")
    found = part.verdict("worst_group")
    assert found.order == ("SAL", "LEACE", "none")  # over seeds 0, 1, 2
    assert found.n_seeds == 3
    assert "LEACE 3/6" in str(part)
    assert "k/6: k of 6 seeds have values" in str(part)
    assert "3/6" in str(part.table("worst_group"))
    assert "3/6" not in str(plain)  # control
    over = "Order over the 3 seeds at which all erasers have values."
    assert over in part.decision().reasons
    assert over not in plain.decision().reasons
    apart = changed(plain, {"SAL": good, "LEACE": bad})
    assert apart.verdict("worst_group").leaders == ()


def test_a_confirmed_leader_is_starred_and_a_tie_is_a_tie(result: Comparison) -> None:
    rng = np.random.default_rng(0)
    noise = {e: 0.01 * rng.normal(size=3) for e in result.context.erasers}
    level = {"SAL": 0.9, "none": 0.1, "LEACE": 0.1, "SPLINCE": 0.1}
    ahead = changed(result, {e: {s: level[e] + noise[e][s] for s in range(3)} for e in level})
    assert ahead.verdict("worst_group").leaders == ("SAL",)
    assert ahead.verdict("worst_group").confirmed == "SAL"
    assert ahead.decision().outcome == "decided"
    assert "Use SAL: its worst group is .9" in ahead.decision().sentence
    assert ahead.decision().sentence.endswith("each difference is significant.")
    zeros = changed(result, {e: dict.fromkeys(range(3), 0.0) for e in level})
    assert zeros.decision().outcome == "no gain"
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


# -- worst groups -----------------------------------------------------------------------------


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
    n = cells[0].n
    assert n >= 20
    assert f"(n = {n})" in str(result)
    assert "not reliable" not in str(result)


def test_of_equally_bad_cells_the_one_with_most_rows_is_named(result: Comparison) -> None:
    cells = (CellCount(0, 5, 0), CellCount(1, 40, 0), CellCount(2, 50, 30))
    zero = {"worst_group": 0.0}
    same = edited(result, lambda r: {"cells": cells, "values": r.values | zero} if r.cells else {})
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
    expected = statistics.corrected_t(values, float(ratio))
    assert (row.t, row.p) == pytest.approx(expected[:2])
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
    no_fraction = found.differences("probe_auc", reference="none")[0]
    assert no_fraction.how == "no test"


def test_cells_whose_names_would_collide_are_told_apart() -> None:
    X, y, z = data(400)
    result = run(
        X, [("a", "a · b")[k] for k in y], [("b · c", "c")[k] for k in z], n_seeds=1,
        erasers=("none",),
    )  # fmt: skip
    assert len(set(result.context.cells)) == 4
    assert "'a · b' · 'c'" in result.context.cells
