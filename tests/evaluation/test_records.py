"""Records of a comparison and their files (`records.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons import data, run

from splince_fast.evaluation import Comparison
from splince_fast.evaluation.records import Context, PartLabels
from splince_fast.exceptions import FileFormatError


@pytest.mark.parametrize(
    "change",
    [{"sizes": [1, 2]}, {"cells": [[1, 2]]}, {"surprise": 1}, {"path": [[1]]}, {"notes": None}],
)
def test_other_records_are_refused_with_a_clear_word(
    change: dict[str, Any], tmp_path: Path
) -> None:
    result = run(*data(200), n_seeds=1, erasers=("none",), heads=("frozen",))
    path = tmp_path / "result.json"
    result.save(path)
    content = json.loads(path.read_text())
    content["records"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match="is not a comparison of this version"):
        Comparison.load(path)
    for other in (b"{}", b"[]", b"\xff\xfe"):
        path.write_bytes(other)
        with pytest.raises(FileFormatError, match="is not a comparison of this version"):
            Comparison.load(path)


def test_labels_of_a_split_of_ones_own_are_in_the_file(tmp_path: Path) -> None:
    X, y, z = data(300)
    part = np.arange(300) % 3 == 0
    result = run(X, y, z, n_seeds=1, test=part, groups=np.arange(300))
    assert isinstance(result.context, Context)
    assert result.context.test_labels is not None
    assert np.array_equal(result.context.test_labels.task, y[part])
    result.save(tmp_path / "result.json")
    loaded = Comparison.load(tmp_path / "result.json")
    assert loaded.context == result.context
    assert loaded.records == result.records
    assert loaded.interval("accuracy", eraser="LEACE") == result.interval(
        "accuracy", eraser="LEACE"
    )
    other = PartLabels(y[part], None, None)  # control
    assert result.context.test_labels != other
