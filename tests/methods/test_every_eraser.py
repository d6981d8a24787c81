"""Every kind of eraser: what it does to its rows, what its report says, and what a file gives back.

Rows of condition 100 and their sums over a few hundred rows are known to 1e-12.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from erasers import draw_eraser
from numpy.typing import NDArray
from problems import Data, Float, covariance, draw_data, ignored, moved, within_bounds

import splince_fast as sf
from splince_fast.exceptions import FileFormatError, InputError

ROWS, FEW = draw_data(14), draw_data(0, n=20, d=30, kz=2, ky=1)


def moments(data: Data = ROWS, rows: Float | None = None, **parameters: Any) -> sf.Moments:
    rows = data.x if rows is None else rows
    return sf.Moments(**parameters).update(rows, {"z": data.z, "y": data.y})


def leace(**options: Any) -> sf.Projection:
    return sf.leace(moments(), erase="z", **options)


def splince(source: Any = None, **options: Any) -> sf.Projection:
    return sf.splince(source or moments(), erase="z", keep="y", **options)


def oracle(source: Any = None, **options: Any) -> sf.ConditionalEraser:
    return sf.oracle(source or moments(), erase="z", **options)


def quadratic(**options: Any) -> sf.ConditionalEraser:
    return sf.quadratic(moments(by="z"), erase="z", **options)


FOLDS = sf.Folds(2).update(ROWS.x, {"z": ROWS.z, "y": ROWS.y})


EXACT = "'z' is erased exactly from these rows: no linear predictor does better than a constant"
EXPECTED = f"{EXACT}; new rows will show R^2 of about"
QUADRATIC = "'z' is erased exactly from these rows: no quadratic"
HALF = "'z' is not erased: it keeps the fraction 0.5"

# name -> verdict of its report, and a fit to ROWS, or to FEW where the name says so
KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "LEACE": (EXPECTED, leace),
    "SPLINCE": (EXPECTED, splince),
    "classes": (EXPECTED, lambda: sf.leace(moments(by="z"), erase="z")),
    "folds": (EXPECTED, lambda: splince(FOLDS)),
    "strength": (EXPECTED, lambda: splince(strength=0.3)),
    "SAL": (EXACT, lambda: sf.sal(moments(), erase="z")),
    "SAL that keeps": (EXACT, lambda: sf.sal(moments(), erase="z", keep="y")),
    "mean projection": (EXACT, lambda: sf.mean_projection(moments(), erase="z")),
    "shrunk": (EXACT, lambda: leace(shrinkage=0.1)),
    "shrunk that keeps": (EXACT, lambda: splince(shrinkage=1.0)),
    "variances": (EXACT, lambda: sf.leace(moments(covariance_type="diag"), erase="z")),
    "few rows": (EXACT, lambda: splince(moments(FEW))),
    "few rows, null space": (EXACT, lambda: splince(moments(FEW), null_space="drop")),
    "oracle": (EXACT, oracle),
    "oracle that keeps": (EXACT, lambda: oracle(keep="y")),
    "oracle, shrunk": (EXACT, lambda: oracle(moments().factored(shrinkage=0.5), keep="y")),
    "oracle, variances": (EXACT, lambda: oracle(moments(covariance_type="diag"))),
    "quadratic": (QUADRATIC, quadratic),
    "quadratic that keeps": (QUADRATIC, lambda: quadratic(keep="y")),
    "rank_tol": ("'z' is not erased entirely: the fraction", lambda: leace(rank_tol=0.9)),
    "partial": (HALF, lambda: leace().scaled(0.5)),
    "partial that keeps": (HALF, lambda: splince().scaled(0.5)),
    "repair": (
        "'y' regains the fraction 1 of the covariance that it lost",
        lambda: sf.repair(moments(rows=leace()(ROWS.x)), before=moments(), keep="y"),
    ),
}
WITHOUT_REPORT: dict[str, Callable[[], sf.Projection]] = {
    "composition": lambda: draw_eraser(3, d=8) @ draw_eraser(2, d=8, seed=1),
    "factors of float32": lambda: draw_eraser(d=8).astype(np.float32),
    "nothing": lambda: draw_eraser(2, d=8).scaled(0),
}


@cache
def fitted(kind: str) -> Any:
    return WITHOUT_REPORT[kind]() if kind in WITHOUT_REPORT else KINDS[kind][1]()


def data_of(kind: str) -> Data:
    return FEW if kind.startswith("few") else ROWS


def erased(eraser: Any, data: Data, dtype: Any = np.float64) -> Float:
    labels = [{"z": data.z}] if eraser.needs_labels else []
    return np.asarray(eraser(data.x.astype(dtype), *labels))


pytestmark = [ignored("UnseenRowsWarning"), ignored("PrecisionWarning", "the eraser is sensitive")]
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_the_report_states_what_the_rows_show(kind: str) -> None:
    eraser, data = fitted(kind), data_of(kind)
    rows = leace()(data.x) if kind == "repair" else data.x
    clean = erased(eraser, dataclasses.replace(data, x=rows))
    found, change = eraser.report, clean - rows
    if kind == "variances":  # they do not determine it
        assert found.distortion is None
    else:
        assert found.distortion == pytest.approx(moved(data.x + change, data.x), rel=1e-9)
    assert found.distortion_leace is None or not kind.startswith("shrunk")
    partly = kind in ("strength", "rank_tol", "partial", "partial that keeps")
    assert within_bounds(found) == (not partly)
    for variable, labels in zip(found.variables, (data.z, data.y), strict=False):
        kept = kind == "repair" or variable.role == "kept"
        before = covariance(data.x, data.y if kept else labels)
        after = covariance(clean, data.y if kept else labels)
        lost = np.linalg.norm(after - before * kept) / np.linalg.norm(before)
        assert (lost < 1e-10) == (variable.residual <= variable.bound)


@every_kind
def test_the_words_begin_with_a_verdict_and_are_at_most_six_sentences(kind: str) -> None:
    found, data = fitted(kind).report, data_of(kind)
    verdict, *lines = found.explain().splitlines()
    assert verdict.startswith(KINDS[kind][0])
    size = f"{len(data.x)} rows with {data.x.shape[1]} features"
    assert lines[0].startswith(f"{found.method} was fitted to {size}")
    sentences = [line for line in lines if not line.startswith("Warning: ")]
    assert len(sentences) <= 6
    assert lines[len(sentences) :] == [f"Warning: {text}." for text in found.warnings]
    for line in (verdict, *sentences):
        assert line.endswith(".")
        assert ". " not in line
        assert not any(word in line for word in ("amplification", "whitened", "excess risk"))


@every_kind
def test_dictionaries_and_json_give_the_report_back(kind: str) -> None:
    found = fitted(kind).report
    values = found.to_dict()
    assert set(values) == {f.name for f in dataclasses.fields(sf.Report)}
    for given_back in (values, json.loads(json.dumps(values, allow_nan=False))):
        assert sf.Report.from_dict(given_back) == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 3


def arrays(eraser: Any) -> list[NDArray[Any]]:
    if isinstance(eraser, sf.Projection):
        return [eraser.left, eraser.right, eraser.mean, eraser.offset]
    own = [array for shift in eraser.shifts for array in (shift.matrix, shift.mean)]
    own += [] if eraser.maps is None else [eraser.maps]
    return own + [a for e in (eraser.after, eraser.fallback) if e is not None for a in arrays(e)]


@pytest.mark.parametrize("kind", [*KINDS, *WITHOUT_REPORT])
def test_files_pickles_and_copies_give_back_every_bit(kind: str, tmp_path: Path) -> None:
    eraser, path = fitted(kind), tmp_path / "e.safetensors"
    eraser.save(path)
    type(eraser).load(path).save(str(path))  # written again by what was read
    restored = [
        type(eraser).load(path),
        sf.load_eraser(path),
        *(pickle.loads(pickle.dumps(eraser, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)),
        copy.deepcopy(eraser),
        copy.copy(eraser),
    ]
    for other in restored:
        assert type(other) is type(eraser)
        assert (other.report, other.method) == (eraser.report, eraser.method)
        assert repr(other) == repr(eraser)
        for array, expected in zip(arrays(other), arrays(eraser), strict=True):
            assert array.tobytes() == expected.tobytes()
            assert not array.flags.writeable
        for dtype in (np.float32, np.float64):
            results = (erased(e, data_of(kind), dtype).tobytes() for e in (other, eraser))
            assert len(set(results)) == 1
    another = sf.Projection if eraser.needs_labels else sf.ConditionalEraser
    with pytest.raises(FileFormatError):
        another.load(path)


@pytest.mark.parametrize("kind", ["LEACE", "oracle"])
def test_other_suffixes_are_refused_before_a_file_is_written(kind: str, tmp_path: Path) -> None:
    for name in ("a.onnx", "a.pt", "a.SAFETENSORS", "a.npz", "a.v2"):
        with pytest.raises(InputError, match=r"\.safetensors.*ONNX"):
            fitted(kind).save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    fitted(kind).save(tmp_path / "a")  # control
    assert type(sf.load_eraser(tmp_path / "a")) is type(fitted(kind))
