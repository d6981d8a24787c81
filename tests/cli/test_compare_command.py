"""The command compare: files in, a table and a report out."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from splince_fast.cli import main
from splince_fast.evaluation import Comparison, compare

Cli = Callable[..., str]
BASE = "compare embeddings.npy --labels people.csv --erase gender"
QUICK = f"{BASE} --keep job --seeds 1 --alphas .1 --eraser LEACE --eraser SPLINCE"
DEFAULTS = f"{BASE} --keep job --alphas .1 --test part"  # of seeds and erasers
OUTPUT = "--head frozen --save all.json --force"
rng = np.random.default_rng(0)
Y, Z = rng.integers(0, 2, 800), rng.integers(0, 2, 800)
X = rng.normal(size=(800, 5)).astype(np.float32)
X[:, 0] += 2 * Z
X[:, 1] += Y
COLUMNS = {
    "job": ["nurse" if y else "poet" for y in Y], "gender": ["f" if z else "m" for z in Z],
    "part": ["test" if i % 4 == 0 else "train" for i in range(800)],
    "person": [f"p{i // 8}" for i in range(800)],
    "shade": ["" if i % 5 == 0 else str(i % 3) for i in range(800)],
}  # fmt: skip


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[..., str]) -> Cli:
    """Run a command line in a folder of embeddings and labels."""
    monkeypatch.chdir(tmp_path)
    np.save("embeddings.npy", X)
    lines = [",".join(row) for row in zip(*COLUMNS.values(), strict=True)]
    Path("people.csv").write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
    return lambda line, code=0: told(*shlex.split(line), code=code)


def test_a_table_and_a_report(cli: Cli) -> None:
    out = cli(
        f"{QUICK} -o report.html --seeds 3 --alphas .1,.01 --association .5,.8 "
        "--aligned-class f --save all.json --run cells"
    )
    assert "SPLINCE" in out
    assert "report: report.html" in out
    assert "Erasing gender" in Path("report.html").read_text()
    assert Path("cells", "cells.jsonl").exists()
    assert Comparison.load("all.json").context.aligned_class == "f"


def test_the_split_the_groups_and_the_sizes_are_those_of_the_function(cli: Cli) -> None:
    options: dict[str, Any] = {
        "task": COLUMNS["job"], "concept": {"gender": COLUMNS["gender"]}, "n_seeds": 1,
        "alphas": (0.1,), "erasers": ("LEACE", "SPLINCE"), "heads": ("frozen",), "progress": False,
    }  # fmt: skip
    found = []
    for flags, more in (
        ("", {}),
        ("--groups person", {"groups": COLUMNS["person"]}),
        (DEFAULTS, {"test": COLUMNS["part"], "erasers": ("none", "SAL", "LEACE", "SPLINCE")}),
        ("--association .8 --sizes 200,40,80", {"association": 0.8, "sizes": (200, 40, 80)}),
    ):
        line = flags if flags is DEFAULTS else f"{QUICK} {flags}"
        assert ("bootstrap" in cli(f"{line} {OUTPUT}")) == (flags is DEFAULTS)
        direct = compare(X, **(options | more))
        found.append(Comparison.load("all.json").records)
        for record, expected in zip(found[-1], direct.records, strict=True):
            assert record.values == pytest.approx(expected.values, rel=1e-9, abs=1e-12)
    assert len({repr(records) for records in found}) == 4  # control: the splits differ


def test_a_parquet_file_holds_rows_and_labels(cli: Cli) -> None:
    table = pa.table({"vector": X.tolist(), **COLUMNS})
    pq.write_table(table, "people.parquet")
    line = QUICK.replace("embeddings.npy --labels people.csv", "people.parquet --embedding vector")
    assert "LEACE" in cli(line)
    pq.write_table(table.slice(0, 0), "people.parquet")
    assert "has no rows" in cli(line, 2)


def test_a_failing_eraser_keeps_the_status(cli: Cli) -> None:
    np.save("same.npy", COLUMNS["gender"])
    assert "! SPLINCE" in cli(QUICK.replace("--keep job", "--labels same.npy --keep same"))


MISTAKES = (
    ("-o people.csv", "is an input, too"),
    ("--save ./embeddings.npy --force", "is an input, too"),
    ("-o a.html --save a.html", "is the file of --output, too"),
    ("--save folder --force", "is a folder"),
    ("-o ''", "the path is empty"),
    ("-o old.html", "--force"),
    ("--save old.html", "--force"),
    ("-o nowhere/report.html", "no folder"),
    ("--run people.csv", "--run people.csv is a file"),
    ("--test job", "'job' is named twice"),
    ("--groups gender", "'gender' is named twice"),
    ("--erase job", "'job' is named twice"),
    ("--erase other", "the variables are 'job', 'gender', 'part'"),
    ("--association 1.5", "probability"),
    ("--kind gender=number", "NAME=classes"),
    ("--association .8 --aligned-class x", "'f', 'm'"),
    ("--association .5;.8", "no comma-separated list"),
    ("--labels jobs.csv", "no file 'jobs.csv'"),
    ("--association .8 --sizes 100,10", "pass (training, validation, test)"),
    ("--association .8 --sizes inf,10,10", "whole numbers"),
    ("--association .8 --sizes 100.5,10,10", "whole numbers"),
)


def test_mistakes_overwrite_nothing_and_fit_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the comparison has begun")

    monkeypatch.setattr("splince_fast.evaluation.run.Job", never)
    Path("folder").mkdir()
    Path("old.html").write_text("old")
    before = {path.name: path.is_file() and path.read_bytes() for path in Path().iterdir()}
    for flags, text in MISTAKES:
        assert text in cli(f"{BASE} --keep job {flags.replace(';', chr(92) + ';')}", 2), flags
        after = {path.name: path.is_file() and path.read_bytes() for path in Path().iterdir()}
        assert before == after, flags


def test_kinds_are_those_of_fit(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    line = QUICK.replace("--erase gender", "--erase shade")
    for kind, shown in (("classes", "probe acc"), ("continuous", "probe R2")):
        assert main([*line.split(), "--kind", f"shade={kind}"]) == 0
        out, err = capsys.readouterr()
        assert "160 of 800 rows lack a label" in err  # a missing label is no class
        assert shown in out
        assert "--kind" not in err  # it was said
