"""The table of methods: one spelling, callables, and a sixth method in three files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.cli import main
from splince_fast.methods.table import METHODS, Method, method_of


def data(n: int = 400) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    z, y = rng.integers(0, 2, (2, n))
    return rng.normal(size=(n, 5)) + z[:, None] + np.outer(y, np.eye(5)[1]), z, y


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


def test_nothing_is_erased_by_none() -> None:
    X, z, _ = data()
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
        (3, None, "must be a name or a function"),
        (sf.SPLINCE, "y", "is the class SPLINCE; pass 'splince'"),
    ],
)
def test_bad_methods(method: Any, keep: Any, text: str) -> None:
    with pytest.raises(sf.InputError, match=text):
        method_of(method, keep)


def test_callable_is_a_method() -> None:
    X, z, y = data()
    found = sf.erase(X, z, y, method=doubled, reach=0.5)[1]
    expected = sf.leace(sf.Moments().update(X, {"z": z}), erase="z").scaled(0.5)
    np.testing.assert_allclose(found.matrix(), expected.matrix(), atol=1e-12)
    with pytest.raises(sf.InputError, match="takes no rech=; did you mean reach"):
        sf.erase(X, z, method=doubled, rech=0.5)


def test_entry_of_the_table_is_all_that_a_sixth_method_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(METHODS, "doubled", Method("Doubled", doubled))
    X, z, y = data()
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another function must not be reported by the figures of a closed form."""
    monkeypatch.setitem(METHODS, "doubled", Method("Doubled", doubled, whitened=True))
    X, z, _ = data()
    folds = [sf.Moments().update(X[i::2], {"z": z[i::2]}) for i in range(2)]
    for method in ("doubled", doubled, "none", "oracle"):
        with pytest.raises(sf.InputError, match=r"cross_report cannot evaluate .* on folds"):
            sf.cross_report(folds, erase="z", method=method)
    by_function, by_name = (
        sf.cross_report(folds, erase="z", method=m) for m in (sf.leace, "leace")
    )
    assert by_function.folds == by_name.folds
