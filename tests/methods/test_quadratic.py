"""Quadratic erasure through moments: guarantees, shrinkage, errors, files and rows of any kind.

Modules: `methods.classes`.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import splince_fast as sf
from splince_fast.exceptions import (
    ConstantVariableError,
    FileFormatError,
    FoldError,
    InfeasibleError,
    InputError,
    LabelError,
    NotEnoughDataError,
    PrecisionWarning,
    UnknownVariableError,
    UnseenRowsWarning,
)


def data(n=1200, d=6, k=2, seed=0):
    """Classes of other means and covariances; a task of three classes, and a number."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, k, n)
    roots = np.eye(d) + 0.4 * rng.normal(size=(k, d, d))
    X = np.einsum("nij,nj->ni", roots[z], rng.normal(size=(n, d))) + np.outer(z, np.ones(d)) + 5
    score = X @ rng.normal(size=d) + rng.normal(size=n)
    y = np.digitize(score, np.quantile(score, [0.3, 0.6])) + (z == 1)
    labels = {"z": np.array(["a", "b", "c"])[z], "y": y, "s": score}
    return X, labels


def moments(X, labels, **parameters):
    return sf.Moments(by="z", **parameters).update(X, labels)


def quiet(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnseenRowsWarning)
        return sf.quadratic(*args, **kwargs)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("keep", [None, "y", "s", ["y", "s"]])
def test_classes_are_alike_and_the_task_is_kept(k, keep):
    X, labels = data(k=k)
    eraser = quiet(moments(X, labels), erase="z", keep=keep, shrinkage=None)
    clean = eraser(X, labels)
    groups = [clean[labels["z"] == c] for c in np.unique(labels["z"])]
    for part in groups:
        assert np.abs(part.mean(axis=0) - X.mean(axis=0)).max() < 1e-12 * 100
        gap = np.cov(part.T, ddof=0) - np.cov(groups[0].T, ddof=0)
        assert np.abs(gap).max() < 1e-10 * np.abs(np.cov(X.T)).max()
    before, after = (sf.Moments().update(rows, labels) for rows in (X, clean))
    kept = [keep] if isinstance(keep, str) else keep or []
    for name in kept:
        wanted = before.cross_covariance(name)
        assert np.abs(after.cross_covariance(name) - wanted).max() < 1e-10 * np.abs(wanted).max()
    if "y" not in kept:  # control: what is not kept changes
        assert np.abs(after.cross_covariance("y") - before.cross_covariance("y")).max() > 1e-3
    report = eraser.report
    assert all(v.residual < v.bound for v in report.variables)
    assert [v.name for v in report.variables] == ["z", *kept]
    changed = np.sum((clean - X) ** 2) / np.sum((X - X.mean(axis=0)) ** 2)
    assert np.isclose(report.distortion, changed, rtol=1e-9)
    assert np.isclose(report.distortion_leace, sf.leace(before, erase="z").report.distortion)
    deviations = X.std(axis=0)
    scaled = [deviations[:, None] ** -1 * a * deviations for a in eraser.maps]
    assert np.isclose(report.amplification, max(1, *(np.linalg.norm(a, 2) for a in scaled)))


def test_more_combinations_than_dimensions_are_refused():
    """One dimension can keep one combination; maps that missed the others were returned."""
    X, labels = data(d=1)
    score = labels["s"]
    given = moments(X, labels | {"y": np.digitize(score, np.quantile(score, [0.3, 0.6]))})
    with pytest.raises(InfeasibleError, match=r"sf\.oracle"):
        quiet(given, erase="z", keep="y", shrinkage=None)
    eraser = quiet(given, erase="z", keep="s", shrinkage=None)  # control
    assert all(v.residual < v.bound for v in eraser.report.variables)


def test_canonical_correlations_are_those_of_splince():
    X, labels = data()
    report = quiet(moments(X, labels), erase="z", keep=["y", "s"], shrinkage=None).report
    other = sf.splince(sf.Moments().update(X, labels), erase="z", keep=["y", "s"]).report
    for ours, theirs in zip(report.variables, other.variables, strict=True):
        assert (ours.kind, ours.rank) == (theirs.kind, theirs.rank)
        assert np.allclose(ours.singular_values, theirs.singular_values, atol=1e-9)


def test_share_one_moves_classes_alone():
    X, labels = data()
    eraser = quiet(moments(X, labels), erase="z", shrinkage=1)
    means = {c: X[labels["z"] == c].mean(axis=0) for c in "ab"}
    wanted = X - np.stack([means[c] for c in labels["z"]]) + X.mean(axis=0)
    assert np.allclose(eraser(X, labels), wanted, atol=1e-10)
    assert (
        eraser.report.distortion
        < quiet(moments(X, labels), erase="z", shrinkage=0).report.distortion
    )


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_task_and_means_are_exact_for_any_share(share):
    X, labels = data()
    clean = quiet(moments(X, labels), erase="z", keep="y", shrinkage=share)(X, labels)
    before, after = (sf.Moments().update(rows, labels) for rows in (X, clean))
    assert np.allclose(after.cross_covariance("y"), before.cross_covariance("y"), atol=1e-10)
    assert np.abs(after.cross_covariance("z")).max() < 1e-12


def test_a_mapping_of_moments_or_folds_is_the_same():
    X, labels = data()
    parts = {c: {n: v[labels["z"] == c] for n, v in labels.items()} for c in "ab"}
    rows = {c: X[labels["z"] == c] for c in "ab"}
    one = quiet(moments(X, labels), erase="z", keep="y", shrinkage=None)
    two = quiet(
        {c: sf.Moments().update(rows[c], parts[c]) for c in "ab"},
        erase="z", keep="y", shrinkage=None,
    )  # fmt: skip
    assert np.allclose(one.maps, two.maps, atol=1e-8)
    for source in (sf.Folds(2, by="z").update(X, labels),
                   {c: sf.Folds(2).update(rows[c], parts[c]) for c in "ab"}):  # fmt: skip
        total = quiet(source, erase="z", keep="y")
        assert np.allclose(one.maps, total.maps, atol=1e-8)


@pytest.mark.parametrize("dtype", [int, bool, str])
def test_classes_of_a_mapping_may_be_numpy_scalars(dtype, tmp_path):
    X, labels = data()
    z = (labels["z"] == "b").astype(dtype)
    by_name = {c: sf.Moments().update(X[z == c]) for c in np.unique(z)}
    eraser = sf.quadratic(by_name, erase="z", shrinkage=0.1)
    plain = sf.quadratic(moments(X, {"z": z}), erase="z", shrinkage=0.1)
    np.testing.assert_allclose(eraser(X, {"z": z}), plain(X, {"z": z}), atol=1e-9)
    eraser.save(tmp_path / "e")
    np.testing.assert_array_equal(sf.load_eraser(tmp_path / "e")(X, z), eraser(X, z))
    with pytest.raises(LabelError, match="cannot name a class"):
        sf.quadratic(
            {float(c): m for c, m in zip((0, 1), by_name.values(), strict=True)}, erase="z"
        )


def test_few_rows_are_told():
    rng = np.random.default_rng(4)
    labels = {"z": rng.integers(0, 2, 200)}
    with pytest.warns(UnseenRowsWarning, match=r"sampling noise leaves .* new rows.*shrinkage="):
        raw = sf.quadratic(moments(rng.normal(size=(200, 20)), labels), erase="z", shrinkage=None)
    assert len(raw.report.warnings) == 2
    # Control: with the same classes and many rows there is no warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.quadratic(moments(*data(20000, d=6)), erase="z", shrinkage=None)


def test_rows_without_a_label_of_the_concept_are_in_no_class():
    X, labels = data()
    some = {**labels, "z": np.where(np.arange(len(X)) < 100, None, labels["z"])}
    found = quiet(moments(X, some), erase="z", shrinkage=None)
    rest = quiet(
        moments(X[100:], {n: v[100:] for n, v in labels.items()}), erase="z", shrinkage=None
    )
    assert np.allclose(found.maps, rest.maps, atol=1e-9)
    assert found.report.n_rows == len(X) - 100


def test_a_task_class_that_one_class_never_has():
    X, labels = data()
    labels["y"] = np.where(labels["z"] == "a", np.minimum(labels["y"], 1), labels["y"])
    clean = quiet(moments(X, labels), erase="z", keep="y", shrinkage=None)(X, labels)
    before, after = (sf.Moments().update(rows, labels) for rows in (X, clean))
    assert np.allclose(after.cross_covariance("y"), before.cross_covariance("y"), atol=1e-9)


def test_weights_count_as_rows():
    X, labels = data(300)
    w = np.random.default_rng(3).integers(1, 4, len(X))
    weighted = sf.Moments(by="z").update(X, labels, sample_weight=w)
    repeated = moments(np.repeat(X, w, axis=0), {n: np.repeat(v, w) for n, v in labels.items()})
    one, two = (quiet(m, erase="z", keep="y", shrinkage=None) for m in (weighted, repeated))
    assert np.allclose(one.maps, two.maps, atol=1e-7)


def test_a_feature_that_does_not_vary_stays_and_float32_rows_are_erased():
    X, labels = data()
    X = np.hstack([X, np.full((len(X), 1), 3.0), X[:, :1]])
    eraser = quiet(moments(X, labels), erase="z", keep="y", shrinkage=None)
    clean = eraser(X.astype(np.float32), labels)
    assert clean.dtype == np.float32
    assert np.allclose(clean[:, 6], 3.0)
    assert np.allclose(clean[:, 7], clean[:, 0], atol=1e-4)
    new = X + np.eye(8)[6]
    assert np.allclose(eraser(new, labels)[:, 6], 4.0)
    parts = [clean[labels["z"] == c].astype(float) for c in "ab"]
    gap = np.cov(parts[0].T) - np.cov(parts[1].T)
    assert np.abs(gap).max() < 0.02 * np.abs(np.cov(X.T)).max()


# -- errors ----------------------------------------------------------------------------------------


def test_moments_without_by_are_refused_with_the_line_to_write():
    X, labels = data()
    with pytest.raises(InputError, match=r"sf\.Moments\(by='z'\)"):
        sf.quadratic(sf.Moments().update(X, labels), erase="z", shrinkage=None)
    with pytest.raises(InputError, match=r"those of 'z'.*by='y'"):
        sf.quadratic(moments(X, labels), erase="y", shrinkage=None)
    with pytest.raises(LabelError, match="bin it"):
        sf.quadratic(sf.Moments().update(X, labels), erase="s", shrinkage=None)


def test_variances_and_samples_are_refused():
    X, labels = data()
    for parameters in ({"covariance_type": "diag"}, {"subsample": 0.5}):
        parts = {c: sf.Moments(**parameters).update(X[labels["z"] == c], None) for c in ("a", "b")}
        with pytest.raises(InputError, match="covariance_type='diag' or subsample="):
            sf.quadratic(parts, erase="z", shrinkage=None)


@pytest.mark.parametrize("size", [1e-60, 1e60, 1e80])
def test_units_of_all_features_do_not_matter(size):
    X, labels = data(n=200)
    found, plain = (
        sf.quadratic(moments(rows, labels), erase="z", keep="s", shrinkage=0.5)
        for rows in (size * X, X)
    )
    np.testing.assert_allclose(found.report.distortion, plain.report.distortion, rtol=1e-6)
    np.testing.assert_allclose(found.maps, plain.maps, atol=1e-8)


@pytest.mark.parametrize(
    "wrong",
    [{"shrinkage": 2}, {"shrinkage": "oas"}, {"shrinkage": "cv"}, {"erase": ["z", "y"]},
     {"erase": ("z", "y")}, {"erase": 3}, {"keep": np.eye(6)}, {"keep": []}],
)  # fmt: skip
def test_parameters_out_of_range(wrong):
    X, labels = data(200)
    with pytest.raises(InputError):
        sf.quadratic(moments(X, labels), **{"erase": "z", "shrinkage": None, **wrong})


def test_other_sources_are_refused():
    X, labels = data(200)
    one = sf.Moments().update(X, labels)
    for source in (3, {"a": 3}, {"a": one, "b": one.factored()}, one.factored()):
        with pytest.raises(InputError):
            sf.quadratic(source, erase="z", shrinkage=None)
    with pytest.raises(ConstantVariableError):
        sf.quadratic({"a": one}, erase="z", shrinkage=None)
    with pytest.raises(ConstantVariableError):
        sf.quadratic({"a": one, "b": sf.Moments()}, erase="z", shrinkage=None)
    with pytest.raises(UnknownVariableError):
        sf.quadratic(moments(X, labels), erase="z", keep="nothing", shrinkage=None)


def test_a_task_without_a_label_in_some_rows_is_refused_with_their_number():
    X, labels = data(200)
    labels["s"] = np.where(np.arange(200) < 7, np.nan, labels["s"])
    with pytest.raises(InputError, match="7 of 200 rows"):
        sf.quadratic(moments(X, labels), erase="z", keep="s", shrinkage=None)


def test_a_task_that_is_a_function_of_the_concept_is_infeasible():
    X, labels = data()
    labels["same"] = (labels["z"] == "a").astype(int)
    with pytest.raises(InfeasibleError, match=r"\[same = \d\]"):
        sf.quadratic(moments(X, labels), erase="z", keep="same", shrinkage=None)


def test_few_rows_in_a_class_are_refused_without_shrinkage():
    X, labels = data(30, d=20)
    with pytest.raises(NotEnoughDataError, match="rank of x, plus 1"):
        sf.quadratic(moments(X, labels), erase="z", shrinkage=None)
    eraser = quiet(moments(X, labels), erase="z", shrinkage=0.5)
    clean = eraser(X, labels)
    gap = clean[labels["z"] == "a"].mean(axis=0) - clean[labels["z"] == "b"].mean(axis=0)
    assert np.abs(gap).max() < 1e-9


def test_a_feature_that_is_constant_in_one_class_is_named():
    X, labels = data()
    X[labels["z"] == "b", 2] = 1.0
    with pytest.raises(NotEnoughDataError, match=r"class 'b'.*constant"):
        sf.quadratic(moments(X, labels), erase="z", shrinkage=None)


# -- the eraser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    X, labels = data()
    return quiet(moments(X, labels), erase="z", keep="y", shrinkage=None), X, labels


@pytest.fixture(scope="module", params=["class maps", "shifts"])
def conditional(request, fitted):
    """Each kind of map by labels: that of `fitted`, and the shifts of the oracle."""
    if request.param == "class maps":
        return fitted
    X, labels = data()
    return sf.oracle(moments(X, labels), erase="z", keep="y", missing="raise"), X, labels


def test_rows_go_by_their_class(fitted):
    eraser, X, labels = fitted
    mean, shift = eraser.after.mean, eraser.shifts[0]
    twin = np.stack([
        mean + eraser.maps[i] @ (x - mean - shift.matrix[i])
        for x, i in zip(X, [shift.classes.index(c) for c in labels["z"]], strict=True)
    ])  # fmt: skip
    assert np.allclose(eraser(X, labels), twin, rtol=1e-12)
    assert np.allclose(eraser(X, labels["z"]), twin, rtol=1e-12)
    other = labels["z"][::-1]
    assert not np.allclose(eraser(X, {"z": other}), twin)  # control: other labels, other rows
    assert isinstance(eraser, sf.Eraser)
    assert eraser.needs_labels
    assert eraser.n_features == 6
    assert repr(eraser) == "ConditionalEraser(repair @ QLEACE, 6 features, labels of 'z')"


def test_stacks_masks_and_out(conditional):
    eraser, X, labels = conditional
    whole = eraser(X, labels)
    stack, z = X.reshape(300, 4, 6), labels["z"].reshape(300, 4)
    assert np.array_equal(eraser(stack, {"z": z}), whole.reshape(300, 4, 6))
    per_sequence = eraser(stack, {"z": z[:, 0]})
    assert np.array_equal(per_sequence[:, 0], whole.reshape(300, 4, 6)[:, 0])
    mask = np.arange(len(X)) % 3 > 0
    blank = {"z": [c if m else None for c, m in zip(labels["z"], mask, strict=True)]}
    masked = eraser(X, blank, mask=mask)
    assert np.array_equal(masked[mask], whole[mask])
    assert np.array_equal(masked[~mask], X[~mask])
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
    assert eraser(np.ones((2, 6), int), {"z": ["a", "b"]}).dtype == np.float64
    assert eraser(X[:0], {"z": []}).shape == (0, 6)


def test_maps_by_labels_of_tensors_give_tensors(conditional):
    torch = pytest.importorskip("torch")
    eraser, X, labels = conditional
    tensor = torch.from_numpy(X.astype(np.float32))
    whole = eraser(X.astype(np.float32), labels)
    found = eraser(tensor, labels)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), whole)
    assert eraser(tensor.to(torch.bfloat16), labels).dtype == torch.bfloat16
    stacked = eraser(tensor.reshape(300, 4, 6), {"z": labels["z"].reshape(300, 4)})
    assert torch.equal(stacked, found.reshape(300, 4, 6))
    with pytest.raises(InputError, match="gradients"):
        eraser(tensor.clone().requires_grad_(), labels)


def test_labels_that_do_not_fit(conditional):
    eraser, X, labels = conditional
    cases = [
        (None, InputError, "needs the labels"), ({"y": labels["y"]}, InputError, "no 'z'"),
        ({"z": labels["s"]}, LabelError, "z"),
        ({"z": np.where(labels["z"] == "a", "a", "d")}, LabelError, "'d'"),
        ({"z": [None, *labels["z"][1:]]}, LabelError, "1 row"),
        ({"z": labels["z"][:-1]}, InputError, "1200"),
    ]  # fmt: skip
    for wrong, error, text in cases:
        with pytest.raises(error, match=text):
            eraser(X, wrong)
    for wrong in (None, 1, "a"):
        for rows in (X, X.reshape(300, 4, 6)):
            with pytest.raises((InputError, LabelError), match=r"one label per row|entry per seq"):
                eraser(rows, {"z": wrong})
    with pytest.raises(InputError, match="entry per sequence"):
        eraser(X.reshape(300, 4, 6), {"z": labels["z"][:7]})
    with pytest.raises(InputError):
        eraser(X[:, :5], labels)
    with pytest.raises(InputError, match="float16"):
        eraser(np.full((2, 6), 6e4, np.float16), {"z": ["a", "b"]})
    with pytest.raises(FoldError, match="leace or splince"):
        eraser.fold_into(np.eye(6))


@pytest.mark.parametrize("missing", ["no label is missing", "splince"])
def test_files_keep_every_bit_of_maps_by_labels(fitted, missing, tmp_path):
    eraser, X, labels = fitted
    if missing == "splince":  # shifts, and what is applied to the rows without a label
        eraser = sf.oracle(moments(X, labels), erase="z", keep="y", missing=missing)
        labels = {"z": np.where(np.arange(len(X)) % 5 > 0, labels["z"], None)}
        assert np.array_equal(eraser(X, labels)[::5], eraser.fallback(X[::5]))
    path = tmp_path / "z.safetensors"
    eraser.save(path)
    for loaded in (sf.ConditionalEraser.load(path), sf.load_eraser(path)):
        assert isinstance(loaded, sf.ConditionalEraser)
        assert isinstance(loaded, sf.Eraser)
        assert np.array_equal(loaded(X, labels), eraser(X, labels))
        assert loaded.report == eraser.report
        assert loaded.method == eraser.method
    with pytest.raises(FileFormatError, match="conditional"):
        sf.Projection.load(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FileFormatError):
        sf.ConditionalEraser.load(path)


def test_wrong_maps_are_refused(fitted):
    eraser, *_ = fitted
    for wrong in (np.zeros((2, 6, 5)), np.zeros((3, 6, 6)), np.full((2, 6, 6), np.nan)):
        with pytest.raises(InputError):
            sf.ConditionalEraser(eraser.shifts, eraser.after, None, maps=wrong)


def test_report_in_words(fitted):
    report = fitted[0].report
    assert "label of every row" in report.explain()
    assert "needs the label of every row" in str(report)
    assert sf.Report.from_dict(report.to_dict()) == report


def test_amplification_and_singular_classes_are_told():
    """A feature that hardly varies in one class: a warning, or a typed error."""
    X, labels = data()
    inside = labels["z"] == "b"
    for factor in (1e-5, 1e-9, 1e-16):
        rows = X.copy()
        rows[inside, 2] = 1 + factor * X[inside, 2]
        if factor == 1e-5:
            with pytest.warns(PrecisionWarning, match=r"up to .* times"):
                eraser = quiet(moments(rows, labels), erase="z", shrinkage=None)
            assert eraser.report.amplification > 1e4
        else:
            with pytest.raises(NotEnoughDataError, match=r"class 'b'"):
                quiet(moments(rows, labels), erase="z", shrinkage=None)


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.SplinceWarning")
def test_bounds_cover_rounded_rows_of_classes_of_unlike_scale() -> None:
    """Rank 1, deviations that differ up to 1e4 times, and means far from 0."""
    residuals = []
    for seed in range(1, 60, 2):
        rng = np.random.default_rng(seed)
        z = rng.integers(0, 2, size=60)
        X = rng.normal(size=(60, 1)) @ rng.normal(size=(1, 2))
        X = X * 10.0 ** rng.uniform(-4, 0, size=(2, 1))[z] + 6 * rng.normal(size=(2, 2))[z]
        report = sf.quadratic(moments(X, {"z": z}), erase="z", shrinkage=None).report
        (erased,) = report.variables
        assert erased.residual <= erased.bound
        residuals.append(erased.residual)
    assert max(residuals) > 128 * np.finfo(float).eps, (
        "the control: more than the solve's own rounding"
    )
