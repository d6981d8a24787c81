"""Erasing in one call, and the table of methods: one spelling, callables, a sixth method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.cli import main
from splince_fast.exceptions import InputError
from splince_fast.methods.table import METHODS, Method, method_of

rng = np.random.default_rng(0)
Z = rng.integers(0, 3, size=300)
Y = np.where(rng.random(300) < 0.6, Z % 2, rng.integers(0, 2, size=300))
X = rng.normal(size=(300, 6)) + np.eye(3, 6)[Z] + np.outer(Y, np.arange(6))
CLOSED_FORMS = {"splince": Y, "leace": None, "sal": Y, "mean_projection": None}


def by_hand(method: str) -> sf.Projection:
    keep = {} if CLOSED_FORMS[method] is None else {"keep": "y"}
    moments = sf.Moments().update(X, {"z": Z} | ({"y": Y} if keep else {}))
    eraser: sf.Projection = getattr(sf, method)(moments, erase="z", **keep)
    return eraser


@pytest.mark.parametrize("method", CLOSED_FORMS)
def test_one_call_is_the_three_steps(method: str) -> None:
    keep, expected = CLOSED_FORMS[method], by_hand(method)
    clean, eraser = sf.erase(X, Z, keep, method)
    np.testing.assert_array_equal(eraser.matrix(), expected.matrix())
    np.testing.assert_array_equal(clean, expected(X))


def test_the_default_keeps_what_is_to_be_kept() -> None:
    clean, eraser = sf.erase(X, {"z": Z}, keep={"y": Y}, shrinkage=0.1)
    assert eraser.report is not None
    assert (eraser.method, eraser.report.shrinkage) == ("SPLINCE", 0.1)
    centred = Y - Y.mean()
    np.testing.assert_allclose(centred @ clean, centred @ X, atol=1e-9)
    assert sf.erase(X, Z)[1].method == "LEACE"
    several = sf.erase(X, {1: Z, 2: Y})[1]
    assert several.report is not None
    assert [variable.name for variable in several.report.variables] == ["1", "2"]
    some = sf.erase(X, Z, sample_weight=np.arange(300) % 2)[1]
    np.testing.assert_allclose(some.mean, X[1::2].mean(axis=0), atol=1e-12)
    # Mean projection reads floats as classes.
    found = sf.erase(X, Z.astype(float), method="mean_projection")[1]
    np.testing.assert_array_equal(found.matrix(), by_hand("mean_projection").matrix())
    clean, eraser = sf.erase(X, Z, method="none")
    np.testing.assert_array_equal(clean, X)
    assert eraser.rank == 0


# --- the table of methods -------------------------------------------------------------------------


def doubled(moments: Any, *, erase: Any, keep: Any = None, reach: float = 1.0) -> sf.Projection:
    """LEACE times a number: a method that the library does not have."""
    return sf.leace(moments, erase=erase).scaled(reach)


@pytest.mark.parametrize("key", METHODS)
def test_every_spelling_names_the_same_method(key: str) -> None:
    label, keep = METHODS[key].label, "y" if METHODS[key].needs_task else None
    spaced = (key.replace("_", sign) for sign in " -")
    for name in (key, key.upper(), label, label.lower(), *spaced):
        assert method_of(name, keep) is METHODS[key]


def test_entry_of_the_table_is_all_that_a_sixth_method_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A function is a method without an entry, too."""
    half = sf.erase(X, Z, Y, method=doubled, reach=0.5)[1]
    expected = by_hand("leace")
    np.testing.assert_allclose(half.matrix(), expected.scaled(0.5).matrix(), atol=1e-12)
    with pytest.raises(InputError, match="takes no rech=; did you mean reach"):
        sf.erase(X, Z, method=doubled, rech=0.5)
    monkeypatch.setitem(METHODS, "doubled", Method("Doubled", doubled, whitened=True))
    np.testing.assert_allclose(sf.erase(X, Z, method="DOUBLED")[1].matrix(), expected.matrix())
    result = ev.compare(
        X, task=Y, concept=Z, n_seeds=1, alphas=(0.01,), progress=False,
        erasers=("none", "doubled"), heads=("retrained",),
    )  # fmt: skip
    assert result.context.erasers == ("none", "Doubled")
    paths = [str(tmp_path / name) for name in ("X.npy", "z.npy", "eraser.safetensors")]
    for path, array in zip(paths, (X, Z), strict=False):
        np.save(path, array)
    command = ["fit", paths[0], "--labels", paths[1], "--erase", "z", "--method", "doubled"]
    assert main([*command, "-o", paths[2]]) == 0
    found = sf.Projection.load(paths[2]).matrix()
    np.testing.assert_allclose(found, expected.matrix(), atol=1e-12)
    # Another function must not be reported by the figures of a closed form.
    folds = [sf.Moments().update(X[i::2], {"z": Z[i::2]}) for i in range(2)]
    for method in ("doubled", doubled, "none", "oracle"):
        with pytest.raises(InputError, match=r"cross_report cannot evaluate .* on folds"):
            sf.cross_report(folds, erase="z", method=method)
    names: tuple[Any, Any] = (sf.leace, "leace")
    by_function, by_name = (sf.cross_report(folds, erase="z", method=m) for m in names)
    assert by_function.folds == by_name.folds
