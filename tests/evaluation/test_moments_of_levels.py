"""Labels between the arguments of a comparison and its moments (`data.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparisons import run


@pytest.mark.parametrize(
    "names",
    [
        np.array([2**63 - 2, 2**63 - 1, 2**63 + 1], np.uint64),  # 2**63 as floats, all three
        ["a", "a\0", "a\0\0"],  # one name in an array of strings
    ],
    ids=["uint64", "trailing NUL"],
)
def test_classes_keep_their_identity(names: Any) -> None:
    rng = np.random.default_rng(0)
    z, y = rng.integers(0, 3, 900), rng.integers(0, 2, 900)
    X = rng.normal(size=(900, 6)) + 2 * np.eye(6)[z]
    seen: list[Any] = []

    def kinds(y_true: Any, y_pred: Any) -> float:
        seen.append(set(y_true.tolist()))
        return 0.0

    settings: dict[str, Any] = {"n_seeds": 1, "alphas": (0.1,), "erasers": ("none", "LEACE")}
    named = run(X, y, [names[k] for k in z], **settings)
    coded = run(X, y, z, **settings)
    assert named.mean("rank", eraser="LEACE") == 2
    for metric in ("probe_accuracy", "accuracy", "kept_covariance"):
        for eraser in ("none", "LEACE"):
            # the order of the classes may differ, and with it the last digits
            assert named.mean(metric, eraser=eraser) == pytest.approx(
                coded.mean(metric, eraser=eraser), abs=1e-9
            )
    run(X, [names[k] for k in z], y, metrics={"kinds": kinds}, **settings)
    assert all(found == {names[0], names[1], names[2]} for found in seen)
    assert seen
