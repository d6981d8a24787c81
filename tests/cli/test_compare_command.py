"""The command: files in, a table and a report out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splince_fast.cli import main
from splince_fast.evaluation import Comparison, compare

Told = Callable[..., str]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 2, 800), rng.integers(0, 2, 800)
    X = rng.normal(size=(800, 5)).astype(np.float32)
    X[:, 0] += 2 * z
    X[:, 1] += y
    np.save("embeddings.npy", X)
    lines = ["profession,gender,part"]
    lines += [f"{'nurse' if a else 'poet'},{'f' if b else 'm'},{'test' if i % 4 == 0 else 'train'}"
              for i, (a, b) in enumerate(zip(y, z, strict=True))]  # fmt: skip
    Path("people.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


BASE = ["compare", "embeddings.npy", "--labels", "people.csv", "--erase", "gender"]


def test_a_table_and_a_report(files: Path, told: Told) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    out = told(*BASE, "--keep", "profession", "-o", "report.html", "--seeds", "3",
               "--alphas", ".1,.01", "--association", ".5,.8", "--aligned-class", "f",
               "--save", "all.json", "--run", "cells")  # fmt: skip
    assert "SPLINCE" in out
    assert "report: report.html" in out
    assert "Erasing gender" in (files / "report.html").read_text()
    assert (files / "all.json").exists()
    assert (files / "cells" / "cells.jsonl").exists()


def test_a_split_of_your_own(files: Path, told: Told) -> None:
    assert "bootstrap" in told(*BASE, "--keep", "profession", "--test", "part", "--alphas", ".1")


def test_a_parquet_file_holds_rows_and_labels(files: Path, told: Told, pa: Any, pq: Any) -> None:
    X = np.load("embeddings.npy")
    rows = [line.split(",") for line in Path("people.csv").read_text().splitlines()[1:]]
    table = pa.table(
        {"vector": X.tolist(), "gender": [r[1] for r in rows], "job": [r[0] for r in rows]}
    )
    pq.write_table(table, "people.parquet")
    argv = ["compare", "people.parquet", "--embedding", "vector", "--erase", "gender"]
    argv += ["--keep", "job", "--seeds", "1", "--alphas", ".1"]
    assert "LEACE" in told(*argv)
    pq.write_table(table.slice(0, 0), "people.parquet")
    assert "has no rows" in told(*argv, code=2)


def test_a_failing_eraser_keeps_the_status(files: Path, told: Told) -> None:
    text = Path("people.csv").read_text().splitlines()
    head, rows = text[0] + ",same", [f"{row},{row.split(',')[1]}" for row in text[1:]]
    Path("people.csv").write_text("\n".join([head, *rows]) + "\n")
    assert "! SPLINCE" in told(*BASE, "--keep", "same", "--seeds", "1", "--alphas", ".1")


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["-o", "people.csv"], "is an input, too"),
        (["--save", "embeddings.npy"], "is an input, too"),
        (["--save", "./embeddings.npy", "--force"], "is an input, too"),
        (["-o", "a.html", "--save", "a.html"], "is the file of --output, too"),
        (["-o", "folder"], "is a folder"),
        (["--save", "folder", "--force"], "is a folder"),
        (["-o", ""], "--output is empty"),
        (["--save", ""], "--save is empty"),
        (["-o", "old.html"], "--force"),
        (["-o", "new.pdf"], "the report is HTML"),
        (["--run", "people.csv"], "--run 'people.csv' is a file"),
        (["--test", "profession"], "--test names 'profession', which is also kept"),
        (["--groups", "gender"], "--groups names 'gender', which is also erased"),
        (["--keep", "job"], "'profession', 'gender', 'part'"),
        (["--keep", "gender"], "both erased and kept"),
        (["-o", "nowhere/report.html"], "no folder"),
        (["--association", "1.5"], "probability"),
        (["--kind", "gender=number"], "NAME=classes"),
        (["--association", ".8", "--aligned-class", "x"], "'f', 'm'"),
        (["--association", ".5;.8"], "no comma-separated list"),
        (["--labels", "jobs.csv"], "no file 'jobs.csv'"),
        (["--test", "gender", "--erase", "part"], "which is also erased"),
        (["--association", ".8", "--sizes", "100,10"], "three whole numbers"),
        (["--association", ".8", "--sizes", "inf,10,10"], "whole numbers"),
        (["--association", ".8", "--sizes", "nan,10,10"], "whole numbers"),
        (["--association", ".8", "--sizes", "100.5,10,10"], "whole numbers"),
    ],
)
def test_refusals_overwrite_nothing_and_fit_nothing(
    files: Path, told: Told, more: list[str], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "folder").mkdir()
    (files / "old.html").write_text("old")
    before = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the comparison has begun")

    needs_labels = match in ("probability", "'f', 'm'")
    place = "evaluation.run.Job" if needs_labels else "evaluation.compare"
    monkeypatch.setattr(f"splince_fast.{place}", never)
    keep = [] if "--keep" in more else ["--keep", "profession"]
    assert match in told(*BASE, *keep, *more, code=2)
    assert before == {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}


def test_force_overwrites(files: Path, told: Told) -> None:
    (files / "all.json").write_text("old")
    more = ["--keep", "profession", "--seeds", "1", "--alphas", ".1", "--save", "all.json"]
    told(*BASE, *more, code=2)
    assert (files / "all.json").read_text() == "old"
    told(*BASE, *more, "--force")
    assert (files / "all.json").read_text() != "old"


def test_kinds_are_those_of_fit(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["job,shade"] + [f"{i % 2},{'' if i % 5 == 0 else i % 3}" for i in range(800)]
    Path("jobs.csv").write_text("\n".join(lines) + "\n")
    base = ["compare", "embeddings.npy", "--labels", "jobs.csv", "--erase", "shade", "--keep",
            "job", "--seeds", "1", "--alphas", ".1", "--eraser", "LEACE"]  # fmt: skip
    assert main([*base, "--kind", "shade=classes"]) == 0
    shown = capsys.readouterr()
    assert "160 of 800 rows lack a label" in shown.err  # a missing label is no class
    assert "probe acc" in shown.out
    assert main([*base, "--kind", "shade=continuous"]) == 0
    shown = capsys.readouterr()
    assert "probe R2" in shown.out
    assert "--kind" not in shown.err  # it was said


def test_groups_of_the_command_are_those_of_the_function(files: Path) -> None:
    lines = ["task,concept,person"]
    lines += [f"{i % 2},{i // 2 % 2},p{i // 8}" for i in range(800)]
    Path("groups.csv").write_text("\n".join(lines) + "\n")
    base = ["compare", "embeddings.npy", "--labels", "groups.csv", "--erase", "concept", "--keep",
            "task", "--seeds", "1", "--alphas", ".1", "--eraser", "LEACE", "--head", "frozen",
            "--save", "all.json", "--force"]  # fmt: skip
    rows = np.arange(800)
    options: dict[str, Any] = {
        "task": rows % 2, "concept": {"concept": rows // 2 % 2}, "n_seeds": 1, "alphas": (0.1,),
        "erasers": ("LEACE",), "heads": ("frozen",), "progress": False,
    }  # fmt: skip
    persons = [f"p{i // 8}" for i in rows]
    found = []
    for more, groups in ((["--groups", "person"], persons), ([], None)):
        assert main([*base, *more]) == 0
        direct = compare(np.load("embeddings.npy"), groups=groups, **options)
        found.append(Comparison.load("all.json"))
        for metric in direct.metrics:
            assert found[-1].mean(metric, eraser="LEACE") == pytest.approx(
                direct.mean(metric, eraser="LEACE"), rel=1e-9, abs=1e-12
            )
    apart = [f.mean("distortion", eraser="LEACE") for f in found]
    assert apart[0] != pytest.approx(apart[1], rel=1e-3)  # control: the split is another one
