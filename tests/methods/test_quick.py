"""Erasing in one call: the same eraser as by the three steps, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

import splince_fast as sf

Data = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


@pytest.fixture
def data() -> Data:
    rng = np.random.default_rng(0)
    z = rng.integers(0, 3, size=300)
    y = np.where(rng.random(300) < 0.6, z % 2, rng.integers(0, 2, size=300))
    return rng.normal(size=(300, 6)) + np.eye(3, 6)[z] + np.outer(y, np.arange(6)), z, y


def by_hand(data: Data, method: str) -> sf.Projection:
    X, z, y = data
    labels = {"z": z, "y": y} if method in ("splince", "sal") else {"z": z}
    moments = sf.Moments().update(X, labels)
    return {
        "splince": lambda: sf.splince(moments, erase="z", keep="y"),
        "leace": lambda: sf.leace(moments, erase="z"),
        "sal": lambda: sf.sal(moments, erase="z", keep="y"),
        "mean_projection": lambda: sf.mean_projection(moments, erase="z"),
    }[method]()


@pytest.mark.parametrize("method", ["splince", "leace", "sal", "mean_projection"])
def test_one_call_is_the_three_steps(data: Data, method: str) -> None:
    X, z, y = data
    keep = y if method in ("splince", "sal") else None
    clean, eraser = sf.erase(X, z, keep, method)
    expected = by_hand(data, method)
    np.testing.assert_array_equal(eraser.matrix(), expected.matrix())
    np.testing.assert_array_equal(clean, expected(X))


def test_the_default_keeps_what_is_to_be_kept(data: Data) -> None:
    X, z, y = data
    clean, eraser = sf.erase(X, {"z": z}, keep={"y": y}, shrinkage=0.1)
    assert eraser.method == "SPLINCE"
    assert eraser.report is not None
    assert eraser.report.shrinkage == 0.1
    centred = y - y.mean()
    np.testing.assert_allclose(centred @ clean, centred @ X, atol=1e-9)
    assert sf.erase(X, z)[1].method == "LEACE"
    assert sf.erase(X, {"z": z, "y": y})[1].rank == 3
    weight = np.arange(300) % 2
    some = sf.erase(X, z, sample_weight=weight)[1]
    np.testing.assert_allclose(some.mean, X[1::2].mean(axis=0), atol=1e-12)


def test_mean_projection_reads_floats_as_classes(data: Data) -> None:
    X, z, _ = data
    found = sf.erase(X, z.astype(float), method="mean_projection")[1]
    np.testing.assert_array_equal(found.matrix(), by_hand(data, "mean_projection").matrix())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"method": "inlp"}, sf.InputError, "must be one of 'splince'"),
        ({"method": "splince"}, sf.InputError, "needs keep="),
        ({"method": "leace", "keep": [0, 1] * 150}, sf.InputError, "keeps nothing"),
        ({"keep": {"concept": [0, 1] * 150}}, sf.InputError, "two names"),
        ({"keep": [0, 1]}, sf.InputError, "2 labels but the block has 300 rows"),
        ({"rank": 1}, sf.InputError, "leace takes no rank="),
        ({"erase": "z"}, sf.InputError, "leace takes no erase="),
    ],
)
def test_erase_refuses_bad_arguments(
    data: Data, arguments: dict[str, Any], error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        sf.erase(data[0], data[1], **arguments)


def test_two_columns_of_one_name_are_refused(data: Data) -> None:
    X, z, y = data
    for columns in ({1: z, "1": y}, pd.DataFrame({1: z, "1": y})):
        with pytest.raises(sf.LabelError, match="two columns have the name '1'"):
            sf.erase(X, columns)
        with pytest.raises(sf.LabelError, match="two columns have the name '1'"):
            sf.erase(X, z, keep=columns)
    eraser = sf.erase(X, {1: z, 2: y})[1]  # control
    assert eraser.report is not None
    assert [variable.name for variable in eraser.report.variables] == ["1", "2"]


def test_tensors_give_tensors(data: Data) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    X, z, y = data
    clean, _ = sf.erase(torch.from_numpy(X), torch.from_numpy(z), torch.from_numpy(y))
    assert torch.equal(clean, torch.from_numpy(sf.erase(X, z, y)[0]))
