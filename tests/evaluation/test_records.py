"""Records of a comparison and their files (`records.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons import data, run

from splince_fast import evaluation as ev
from splince_fast.evaluation import Comparison
from splince_fast.evaluation.records import PartLabels
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
    moments = b'{"kind": "moments", "format": 1}'
    for other in (b"{}", b"[]", b"\xff\xfe", moments, path.read_bytes()[:-20]):
        path.write_bytes(other)
        with pytest.raises(FileFormatError, match="is not a comparison of this version"):
            Comparison.load(path)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    """With the labels of a split of one's own, and with the direction of a custom metric."""
    X, y, z = data(300)
    part = np.arange(300) % 3 == 0
    error = ev.Metric(lambda a, b: np.mean(a != b), lower_is_better=True, label="error rate")
    result = run(X, y, z, n_seeds=1, test=part, groups=np.arange(300), metrics={"error": error})
    assert result.context.test_labels is not None
    assert np.array_equal(result.context.test_labels.task, y[part])
    result.save(tmp_path / "result.json")
    loaded = Comparison.load(tmp_path / "result.json")
    assert loaded.context == result.context
    assert loaded.records == result.records
    assert str(loaded) == str(result)
    assert loaded.interval("accuracy", eraser="LEACE") == result.interval(
        "accuracy", eraser="LEACE"
    )
    assert loaded.metric("error") == result.metric("error")
    assert (loaded.metric("error").label, loaded.metric("error").lower_is_better) == (
        "error rate", True
    )  # fmt: skip
    other = PartLabels(y[part], None, None)  # control
    assert result.context.test_labels != other
