"""Erasers that need labels, at use: rows and labels of any kind, masks, refusals and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from problems import told

import splince_fast as sf
from splince_fast._runtime import files
from splince_fast.exceptions import FileFormatError, FoldError, InputError, LabelError

N, D = 600, 6
Fitted = tuple[sf.ConditionalEraser, NDArray[np.float64], dict[str, Any]]


def fit(kind: str, **options: Any) -> Fitted:
    """A map per class, or shifts of classes and one map for all rows."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, N)
    y = np.where(rng.random(N) < 0.6, z, rng.integers(0, 3, N))
    roots = np.eye(D) + 0.4 * rng.normal(size=(2, D, D))
    X = np.einsum("nij,nj->ni", roots[z], rng.normal(size=(N, D))) + np.outer(z, np.ones(D)) + 5
    X += rng.normal(size=(3, D))[y]
    labels = {"z": np.array(["a", "b"])[z], "y": y, "s": X @ rng.normal(size=D)}
    moments = sf.Moments(by="z").update(X, labels)
    if kind == "shifts":
        options = {"missing": "raise"} | options
        return sf.oracle(moments, erase="z", keep="y", **options), X, labels
    return told(sf.quadratic, moments, erase="z", keep="y")[0], X, labels


@pytest.fixture(scope="module", params=["class maps", "shifts"])
def fitted(request: pytest.FixtureRequest) -> Fitted:
    return fit(request.param)


def test_rows_go_by_their_class(fitted: Fitted) -> None:
    eraser, X, labels = fitted
    mean, shift = eraser.after.mean, eraser.shifts[0]
    codes = [shift.classes.index(c) for c in labels["z"]]
    twin = X - shift.matrix[codes]
    if eraser.maps is not None:
        twin = mean + np.einsum("nij,nj->ni", eraser.maps[codes], twin - mean)
    twin = eraser.after(twin)
    for given in (labels, labels["z"]):
        np.testing.assert_allclose(eraser(X, given), twin, rtol=1e-12)
    other = labels["z"][::-1]
    assert not np.allclose(eraser(X, {"z": other}), twin)  # control: other labels, other rows
    assert isinstance(eraser, sf.Eraser)
    assert eraser.needs_labels
    assert eraser.n_features == D
    method = "oracle" if eraser.maps is None else "repair @ QLEACE"
    assert repr(eraser) == f"ConditionalEraser({method}, {D} features, labels of 'z')"


def test_stacks_masks_and_out(fitted: Fitted) -> None:
    eraser, X, labels = fitted
    whole, z = eraser(X, labels), labels["z"]
    stack, named = X.reshape(-1, 4, D), z.reshape(-1, 4)
    assert np.array_equal(eraser(stack, {"z": named}), whole.reshape(stack.shape))
    per_sequence = eraser(stack, {"z": named[:, 0]})
    assert np.array_equal(per_sequence[:, 0], whole[::4])
    mask = np.arange(N) % 3 > 0
    masked = eraser(X, {"z": np.where(mask, z, None)}, mask=mask)
    assert np.array_equal(masked, np.where(mask[:, None], whole, X))
    for out in (np.empty_like(X), np.empty_like(X, order="F"), X.copy()):
        rows = out if np.array_equal(out, X) else X
        assert eraser(rows, labels, out=out) is out
        assert np.array_equal(out, whole)
    for dtype in ("float16", "float32", "float64"):
        rows = X.astype(dtype)
        # Rounding of the rows and of the result, enlarged by the map.
        bound = 8 * float(np.finfo(dtype).eps) * np.abs(X).max() * eraser.report.amplification
        for given in (rows, np.asfortranarray(rows), np.repeat(rows, 2, axis=0)[::2]):
            found = eraser(given, labels)
            assert found.dtype == rows.dtype
            np.testing.assert_allclose(found, whole, atol=bound)
    assert eraser(np.ones((2, D), int), {"z": ["a", "b"]}).dtype == np.float64
    assert eraser(X[:0], {"z": []}).shape == (0, D)


def test_tensors_give_tensors(fitted: Fitted) -> None:
    torch = pytest.importorskip("torch")
    eraser, X, labels = fitted
    rows, z = X.astype(np.float32), labels["z"]
    tensor, expected = torch.from_numpy(rows), torch.from_numpy(eraser(rows, labels))
    assert torch.equal(eraser(tensor, labels), expected)
    assert eraser(tensor.to(torch.bfloat16), labels).dtype == torch.bfloat16
    stacked = eraser(tensor.reshape(-1, 4, D), {"z": z.reshape(-1, 4)})
    assert torch.equal(stacked, expected.reshape(-1, 4, D))
    with pytest.raises(InputError, match="gradients"):
        eraser(tensor.clone().requires_grad_(), labels)


@pytest.mark.parametrize("module", ["pandas", "polars", "pyarrow"])
def test_labels_in_frames_of_any_library(fitted: Fitted, module: str) -> None:
    eraser, X, labels = fitted
    library = pytest.importorskip(module)
    frame = library.table if module == "pyarrow" else library.DataFrame
    held = frame({name: list(column) for name, column in labels.items()})
    for rows in (X, X.reshape(6, 100, -1)):
        np.testing.assert_array_equal(eraser(rows, held).reshape(X.shape), eraser(X, labels))
    with pytest.raises(InputError, match=r"hold no 'z', .*; they hold 'other'$"):
        eraser(X, frame({"other": list(labels["y"])}))


def test_labels_and_rows_that_do_not_fit(fitted: Fitted) -> None:
    eraser, X, labels = fitted
    stack, some = X.reshape(-1, 4, D), [None, *labels["z"][1:]]
    missing = r"1 row\(s\) have no label of 'z', the first is row 0"
    cases = [
        (X, None, InputError, "needs the labels"), (X, {"y": labels["y"]}, InputError, "no 'z'"),
        (X, {"z": labels["s"]}, LabelError, "z"),
        (X, {"z": np.where(labels["z"] == "a", "a", "d")}, LabelError, "'d'"),
        (X, {"z": some}, LabelError, missing),
        (X, {"z": labels["z"][:-1]}, InputError, str(N)),
        (stack, {"z": labels["z"][:7]}, InputError, "entry per sequence"),
        (X[:, :5], labels, InputError, "5 columns"),
        (np.full((2, D), 6e4, np.float16), {"z": ["a", "b"]}, InputError, "float16"),
        *((rows, {"z": wrong}, (InputError, LabelError), r"one label per row|entry per seq")
          for rows in (X, stack) for wrong in (None, 1, "a")),
    ]  # fmt: skip
    for rows, given, error, text in cases:
        with pytest.raises(error, match=text):
            eraser(rows, given)


def test_composition_and_folding(fitted: Fitted) -> None:
    eraser, X, labels = fitted
    axis = np.eye(D)[:, :1]
    second = sf.Projection(axis, axis, X.mean(0))
    np.testing.assert_allclose(
        (second @ eraser)(X, labels), second(eraser(X, labels)), atol=1e-12 * np.abs(X).max()
    )
    with pytest.raises(TypeError):
        eraser @ second  # type: ignore[operator]
    with pytest.raises(FoldError, match=r"by its labels.*leace or splince"):
        eraser.fold_into(np.eye(D))


def test_rows_without_a_label_go_by_the_fallback() -> None:
    eraser, X, labels = fit("shifts", missing="splince")
    clean = eraser(X, {"z": np.where(np.arange(N) % 5 > 0, labels["z"], None)})
    assert eraser.fallback is not None
    np.testing.assert_array_equal(clean[::5], eraser.fallback(X[::5]))
    np.testing.assert_array_equal(clean[1::5], eraser(X, labels)[1::5])


def test_maps_and_shifts_that_do_not_fit_are_refused(fitted: Fitted, tmp_path: Path) -> None:
    """Files of no shift, and of two of one variable, were loaded and ended in IndexError."""
    eraser, *_ = fitted
    for wrong in (np.zeros((2, D, 5)), np.zeros((3, D, D)), np.full((2, D, D), np.nan)):
        with pytest.raises(InputError):
            sf.ConditionalEraser(eraser.shifts, eraser.after, None, maps=wrong)
    first, *rest = eraser.shifts
    for wrong in ({"matrix": first.matrix[:, :2]}, {"matrix": np.full_like(first.matrix, np.inf)}):
        with pytest.raises(InputError, match="the shift of 'z'"):
            sf.ConditionalEraser([first._replace(**wrong), *rest], eraser.after, None)
    narrow = sf.Projection(np.zeros((2, 0)), np.zeros((2, 0)), np.zeros(2))
    with pytest.raises(InputError, match="fallback has 2"):
        sf.ConditionalEraser(eraser.shifts, eraser.after, narrow)
    eraser.save(tmp_path / "e")
    tensors, metadata = files.read(tmp_path / "e", "conditional", 1)
    for name in ("mean", "matrix"):
        tensors[f"shift.1.{name}"] = tensors[f"shift.0.{name}"]
    for shifts in ([], metadata["shifts"] * 2):
        files.write(tmp_path / "e", "conditional", 1, tensors, metadata | {"shifts": shifts})
        with pytest.raises(FileFormatError, match="shifts are of the variables"):
            sf.load_eraser(tmp_path / "e")


def test_report_in_words(fitted: Fitted) -> None:
    report = fitted[0].report
    assert report is not None
    assert "may be unlawful" in report.explain()
    assert "needs the label of every row" in str(report)
