"""docs/howto/serve.md: erasers that are served elsewhere give the library's results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import splince_fast as sf

PAGE = (Path(__file__).resolve().parents[2] / "docs/howto/serve.md").read_text()
X = np.random.default_rng(0).normal(3, 1, size=(5, 7, 16)).astype(np.float32)
ROWS = X.reshape(-1, 16)
BLOCKS = dict(re.findall(r"^```(js|sql)\n(.*?)^```", PAGE, re.M | re.S))


@pytest.fixture(params=[1, 6], ids=["rank 2", "rank 7"])
def eraser(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sf.Projection:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(request.param)
    z = rng.integers(0, request.param + 1, size=500)
    moments = sf.Moments().update(rng.normal(size=(500, 16)) + 3 + np.eye(8, 16)[z], {"z": z})
    first = sf.Projection(np.eye(16, 1), np.eye(16, 1), np.zeros(16))
    projection = sf.leace(moments, erase="z") @ first  # its shift is not zero
    assert not agrees(X, projection, X)  # the control
    projection.save("eraser.safetensors")
    return projection


def agrees(result: Any, eraser: sf.Projection, rows: Any) -> bool:
    """Whether each row is erased to 1e-6 of its norm, 16 roundings of float32."""
    error = np.linalg.norm(np.asarray(result, dtype=float) - eraser(rows.astype(float)), axis=-1)
    return bool((error <= 1e-6 * np.linalg.norm(rows, axis=-1)).all())


def test_the_file_is_that_of_the_page(eraser: sf.Projection) -> None:
    with safe_open("eraser.safetensors", "numpy") as file:
        arrays, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    shapes = {
        name: eval(shape, {"d": 16, "r": eraser.rank})
        for names, shape in re.findall(r"^\| (`[a-z].*?) \| (\(.*?\)) \|", PAGE, re.M)
        for name in re.findall(r"\w+", names)
    }
    assert {name: values.shape for name, values in arrays.items()} == shapes
    assert {values.dtype.str for values in arrays.values()} == {"<f8"}
    assert all(f"`{name}`" in PAGE for name in [*header, *json.loads(header["metadata"])])
    names = {**arrays, "X": ROWS.astype(float)}
    names["P"] = np.eye(16) - arrays["left"] @ arrays["right"].T
    formulas = re.findall(r"^\| `(X [^`]*)`", PAGE, re.M)
    assert len(formulas) == 3
    for formula in formulas:
        np.testing.assert_allclose(eval(formula, names), eraser(names["X"]), rtol=0, atol=1e-13)


def test_javascript_erases(eraser: sf.Projection) -> None:
    node = shutil.which("node") or pytest.skip("node is not installed")
    program = f"""{BLOCKS["js"]}
        const fs = require("fs"), erase = loadEraser(fs.readFileSync("eraser.safetensors"));
        console.log(JSON.stringify(JSON.parse(fs.readFileSync(0)).map(erase)));"""
    rows = json.dumps(ROWS.tolist())
    result = subprocess.run([node, "-e", program], input=rows, stdout=-1, text=True, check=True)
    assert agrees(json.loads(result.stdout), eraser, ROWS)


def test_sql_erases(eraser: sf.Projection) -> None:
    duckdb = pytest.importorskip("duckdb")
    lists = {"l": eraser.left, "r": eraser.right.T, "b": eraser.bias}
    Path("eraser.json").write_text(json.dumps({k: v.tolist() for k, v in lists.items()}))
    with duckdb.connect() as database:
        database.execute("CREATE TABLE embeddings (l INTEGER, x FLOAT[], c DOUBLE[])")
        rows = [(i, row, row[:2]) for i, row in enumerate(ROWS.tolist())]
        database.executemany("INSERT INTO embeddings VALUES (?, ?, ?)", rows)
        database.execute(BLOCKS["sql"])
        clean = database.execute("FROM clean ORDER BY l").fetchall()
    assert [(row[0], row[2]) for row in clean] == [(row[0], row[2]) for row in rows]
    assert agrees([row[1] for row in clean], eraser, ROWS)


@pytest.mark.filterwarnings("default")  # of torch
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_exports_erase_batches_of_any_size(eraser: sf.Projection, dtype: str, torch: Any) -> None:
    from splince_fast import nn as snn

    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    example = torch.zeros(2, 3, 16, dtype=getattr(torch, dtype))
    module = snn.Eraser(eraser, dtype=example.dtype)
    program = torch.export.export(module, (example,), dynamic_shapes=(axes,))
    rows = X.astype(dtype)
    assert agrees(program.module()(torch.from_numpy(rows)), eraser, rows)
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(program, dynamo=True, input_names=["x"]).save("eraser.onnx")
    session = onnxruntime.InferenceSession("eraser.onnx")
    for part in (rows, rows[:1, :1], rows[:0]):
        (result,) = session.run(None, {"x": part})
        assert (result.dtype, result.shape) == (part.dtype, part.shape)
        assert agrees(result, eraser, part)
