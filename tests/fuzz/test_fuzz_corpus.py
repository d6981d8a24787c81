"""Inputs that fuzzing found, and reports with junk in any position."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from entangled import drawn

import splince_fast as sf
from splince_fast import Moments, Report
from splince_fast._runtime import files
from splince_fast.exceptions import FileFormatError

CORPUS = Path(__file__).resolve().parent / "corpus"


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(CORPUS.parent)
    return importlib.import_module("targets")


@pytest.mark.parametrize("kind", ["moments", "projection", "conditional", "labels"])
def test_inputs_that_fuzzing_found(targets: Any, kind: str, tmp_path: Path) -> None:
    """Every input of the corpora, which keep every crash: a typed error or a result."""
    found = sorted((CORPUS / kind).iterdir())
    assert len(found) > 3
    outcomes = {targets.TARGETS[kind](path.read_bytes(), tmp_path) for path in found}
    assert outcomes == {"result", "refused"}


def positions(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path to a value in an object of JSON."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from positions(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], junk: Any, missing: bool = False) -> Any:
    """A copy with another value at one path, or with none."""
    if not path:
        return junk
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    if missing:
        del inner[path[-1]]
    return copy


JUNK = [
    None, 0, -1, 5, 1.5, True, "x", "", [], {}, ["a"], [None], [[]], [[1]], {"a": 1}, 10**12,
    10**30,
]  # fmt: skip


def test_reports_with_junk_in_any_place_are_refused_or_can_be_read() -> None:
    """Strings and nulls instead of numbers were loaded and failed when printed or saved."""
    X, z, y = drawn(50, 3)
    eraser = sf.splince(Moments().update(X, {"z": z, "y": y}), erase="z", keep="y")
    report = eraser.report
    assert report is not None
    whole = json.loads(json.dumps(report.to_dict()))
    refused = 0
    for path in positions(whole):
        for junk in JUNK:
            try:
                found = Report.from_dict(replaced(whole, path, junk))
            except FileFormatError:
                refused += 1
                continue
            assert str(found)
            assert found._repr_html_()
            assert Report.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert refused > 200


SOURCES = [("projection", "splince"), ("conditional", "quadratic")] + [
    pytest.param("moments", name, marks=pytest.mark.slow)
    for name in ("settled", "every-kind", "classes", "sampled", "folds")
]


@pytest.mark.parametrize(("kind", "source"), SOURCES)
def test_metadata_with_junk_in_any_place(
    targets: Any, kind: str, source: str, tmp_path: Path
) -> None:
    """Numbers instead of objects surfaced as AttributeError; reports have a test of their own."""
    written = str(files.kind_of(CORPUS / kind / source))
    tensors, metadata = files.read(CORPUS / kind / source, written, 4)
    path, outcomes = tmp_path / "junk", []
    for place in positions(metadata):
        if "report" in place[:-1]:
            continue
        spoilt = [replaced(metadata, place, junk) for junk in JUNK]
        if place and isinstance(place[-1], str):
            spoilt.append(replaced(metadata, place, None, missing=True))
        for junk in spoilt:
            files.write(path, written, 1, tensors, junk)
            outcomes.append(targets.TARGETS[kind](path.read_bytes(), tmp_path))
    assert outcomes.count("refused") > 20
