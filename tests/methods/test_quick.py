"""Erasing in one call, and the table of methods: one spelling, callables, a sixth method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.cli import main
from splince_fast.exceptions import InputError, LabelError
from splince_fast.methods.table import METHODS, Method, method_of

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
        ({"method": "inlp"}, InputError, "must be one of 'splince'"),
        ({"method": "splince"}, InputError, "needs keep="),
        ({"method": "leace", "keep": [0, 1] * 150}, InputError, "keeps nothing"),
        ({"keep": {"concept": [0, 1] * 150}}, InputError, "two names"),
        ({"keep": [0, 1]}, InputError, "2 labels but the block has 300 rows"),
        ({"rank": 1}, InputError, "leace takes no rank="),
        ({"erase": "z"}, InputError, "leace takes no erase="),
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
        with pytest.raises(LabelError, match="two columns have the name '1'"):
            sf.erase(X, columns)
        with pytest.raises(LabelError, match="two columns have the name '1'"):
            sf.erase(X, z, keep=columns)
    eraser = sf.erase(X, {1: z, 2: y})[1]  # control
    assert eraser.report is not None
    assert [variable.name for variable in eraser.report.variables] == ["1", "2"]


def test_tensors_give_tensors(data: Data) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    X, z, y = data
    clean, _ = sf.erase(torch.from_numpy(X), torch.from_numpy(z), torch.from_numpy(y))
    assert torch.equal(clean, torch.from_numpy(sf.erase(X, z, y)[0]))


# --- the table of methods -------------------------------------------------------------------------


def doubled(moments: Any, *, erase: Any, keep: Any = None, reach: float = 1.0) -> sf.Projection:
    """LEACE times a number: a method that the library does not have."""
    return sf.leace(moments, erase=erase).scaled(reach)


@pytest.mark.parametrize("key", METHODS)
def test_every_spelling_names_the_same_method(key: str) -> None:
    label = METHODS[key].label
    for name in (
        key,
        key.upper(),
        label,
        label.lower(),
        key.replace("_", " "),
        key.replace("_", "-"),
    ):
        keep = "y" if METHODS[key].needs_task else None
        assert method_of(name, keep) is METHODS[key]


def test_nothing_is_erased_by_none(data: Data) -> None:
    X, z, _ = data
    clean, eraser = sf.erase(X, z, method="none")
    np.testing.assert_array_equal(clean, X)
    assert eraser.rank == 0


@pytest.mark.parametrize(
    ("method", "keep", "text"),
    [
        ("leece", None, "did you mean 'leace'"),
        ("splince", None, "SPLINCE needs keep="),
        ("LEACE", "y", "LEACE keeps nothing"),
        ("none", "y", "none keeps nothing"),
        (3, None, "must be a name, or a function"),
        (sf.SPLINCE, "y", "is the class SPLINCE; it must be a name"),
    ],
)
def test_bad_methods(method: Any, keep: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        method_of(method, keep)


def test_callable_is_a_method(data: Data) -> None:
    X, z, y = data
    found = sf.erase(X, z, y, method=doubled, reach=0.5)[1]
    expected = sf.leace(sf.Moments().update(X, {"z": z}), erase="z").scaled(0.5)
    np.testing.assert_allclose(found.matrix(), expected.matrix(), atol=1e-12)
    with pytest.raises(InputError, match="takes no rech=; did you mean reach"):
        sf.erase(X, z, method=doubled, rech=0.5)


def test_entry_of_the_table_is_all_that_a_sixth_method_needs(
    data: Data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(METHODS, "doubled", Method("Doubled", doubled))
    X, z, y = data
    direct = sf.leace(sf.Moments().update(X, {"z": z}), erase="z")
    np.testing.assert_allclose(sf.erase(X, z, method="DOUBLED")[1].matrix(), direct.matrix())
    result = ev.compare(
        X, task=y, concept=z, n_seeds=1, alphas=(0.01,), progress=False,
        erasers=("none", "doubled"), heads=("retrained",),
    )  # fmt: skip
    assert result.context.erasers == ("none", "Doubled")
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "z.npy", z)
    out = tmp_path / "eraser.safetensors"
    command = ["fit", str(tmp_path / "X.npy"), "--labels", str(tmp_path / "z.npy"), "--erase", "z"]
    assert main([*command, "--method", "doubled", "-o", str(out)]) == 0
    np.testing.assert_allclose(sf.Projection.load(out).matrix(), direct.matrix(), atol=1e-12)


def test_methods_without_a_solve_on_folds_are_refused_by_cross_report(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another function must not be reported by the figures of a closed form."""
    monkeypatch.setitem(METHODS, "doubled", Method("Doubled", doubled, whitened=True))
    X, z, _ = data
    folds = [sf.Moments().update(X[i::2], {"z": z[i::2]}) for i in range(2)]
    for method in ("doubled", doubled, "none", "oracle"):
        with pytest.raises(InputError, match=r"cross_report cannot evaluate .* on folds"):
            sf.cross_report(folds, erase="z", method=method)
    by_function, by_name = (
        sf.cross_report(folds, erase="z", method=m) for m in (sf.leace, "leace")
    )
    assert by_function.folds == by_name.folds
