"""OracleSPLINCE: labels at transform, by hand, in pipelines, in blocks; what is missing."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

import splince_fast as sf
from splince_fast import OracleSPLINCE

Float = NDArray[np.float64]


def data(n: int = 500, d: int = 6, seed: int = 0) -> tuple[Float, Any, Any]:
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 3, n)
    y = np.where(rng.random(n) < 0.7, z % 2, rng.integers(0, 2, n))
    X = rng.normal(size=(n, d)) + rng.normal(size=(3, d))[z] + rng.normal(size=(2, d))[y]
    return X, y, np.array(["a", "b", "c"])[z]


@pytest.mark.parametrize("classwise", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_oracle_splince_equals_the_function(classwise: bool, kept: bool) -> None:
    X, y, z = data()
    fitted = OracleSPLINCE(classwise=classwise).fit(X, y if kept else None, concept=z)
    moments = sf.Moments(by="concept" if classwise else None).update(X, {"concept": z, "task": y})
    expected = sf.oracle(
        moments, erase="concept", keep="task" if kept else None, classwise=classwise
    )
    clean = fitted.transform(X, concept=z)
    np.testing.assert_allclose(clean, expected(X, {"concept": z}), atol=1e-12)
    assert np.array_equal(fitted.fit_transform(X, y if kept else None, concept=z), clean)
    assert isinstance(fitted.eraser_, sf.ConditionalEraser)
    assert fitted.report_.method == "oracle"
    # A control: SPLINCE, which reads no labels, gives other rows.
    plain = sf.SPLINCE().fit(X, y, concept=z).transform(X)
    assert np.abs(clean - plain).max() > 1e-3


def test_blocks_and_merging_equal_one_fit() -> None:
    X, y, z = data()
    whole = OracleSPLINCE().fit(X, y, concept=z).transform(X, concept=z)
    parts = [OracleSPLINCE(), OracleSPLINCE()]
    for i, rows in enumerate(np.array_split(np.arange(len(X)), 6)):
        parts[i % 2].partial_fit(X[rows], y[rows], concept=z[rows])
    total = parts[0].moments_ + parts[1].moments_
    merged = OracleSPLINCE.from_moments(total, erase="concept", keep="task")
    np.testing.assert_allclose(merged.transform(X, concept=z), whole, atol=1e-10)
    again = pickle.loads(pickle.dumps(merged))
    assert np.array_equal(again.transform(X, concept=z), merged.transform(X, concept=z))
    moments = sf.Moments().update(X, {"z": z, "y": y})
    found = OracleSPLINCE.from_moments(moments, erase="z", keep="y")
    np.testing.assert_allclose(found.transform(X, concept={"z": z}), whole, atol=1e-12)


def test_rows_without_a_label_get_splince_or_are_refused() -> None:
    X, y, z = data()
    some = np.array([None, *z[1:]], dtype=object)
    fitted = OracleSPLINCE().fit(X, y, concept=z)
    clean = fitted.transform(X, concept=some)
    np.testing.assert_allclose(clean[0], sf.SPLINCE().fit(X, y, concept=z).transform(X)[0])
    assert np.array_equal(clean[1:], fitted.transform(X, concept=z)[1:])
    strict = OracleSPLINCE(missing="raise").fit(X, y, concept=z)
    with pytest.raises(sf.LabelError, match="1 row"):
        strict.transform(X, concept=some)


def test_labels_are_never_left_out_silently() -> None:
    X, y, z = data()
    fitted = OracleSPLINCE().fit(X, y, concept=z)
    with pytest.raises(sf.InputError, match="enable_metadata_routing"):
        fitted.transform(X)
    with pytest.raises(sf.LabelError, match="'d'"):
        fitted.transform(X, concept=np.array(["d", *z[1:]]))
    with pytest.raises(sf.InputError, match="499 labels"):
        fitted.transform(X, concept=z[1:])
    with pytest.raises(sf.InputError, match=r"task, which OracleSPLINCE keeps.*concept$"):
        OracleSPLINCE().fit(X, y)
    with pytest.raises(NotFittedError):
        OracleSPLINCE().transform(X, concept=z)
    bad = X.copy()
    bad[3, 1] = np.nan
    with pytest.raises(sf.NonFiniteError):
        fitted.transform(bad, concept=z)
    for wrong in ({"strength": 2.0}, {"missing": "other"}):
        with pytest.raises(sf.InputError, match=next(iter(wrong))):
            OracleSPLINCE(**wrong).fit(X, y, concept=z)


def test_a_concept_in_another_order_than_the_rows_is_refused() -> None:
    X, y, z = data()
    frame, column = pd.DataFrame(X), pd.Series(z)
    frame.columns = [f"f{i}" for i in range(X.shape[1])]
    fitted = OracleSPLINCE().fit(frame, y, concept=column)
    expected = fitted.transform(frame, concept=z)
    assert np.array_equal(fitted.transform(frame, concept=column), expected)
    turned = column.iloc[[*range(1, len(column)), 0]]
    for concept in (turned, {"concept": turned}):
        with pytest.raises(sf.LabelError, match="in another order"):
            fitted.transform(frame, concept=concept)


def test_pipelines_and_searches_route_the_concept() -> None:
    X, y, z = data()
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(X.shape[1])])
    direct = OracleSPLINCE().fit(frame, y, concept=z)
    head = LogisticRegression().fit(direct.transform(frame, concept=z), y)
    expected = head.predict(direct.transform(frame, concept=z))
    with sklearn.config_context(enable_metadata_routing=True):
        pipe = make_pipeline(OracleSPLINCE(), LogisticRegression()).fit(frame, y, concept=z)
        assert np.array_equal(pipe.predict(frame, concept=z), expected)
        grid = {"oraclesplince__strength": [0.0, 1.0]}
        search = GridSearchCV(clone(pipe), grid, cv=3, error_score="raise")
        search.fit(frame, y, concept=z)
        assert set(search.best_params_) == set(grid)
    output = OracleSPLINCE().set_output(transform="pandas").fit(frame, y, concept=z)
    assert list(output.transform(frame, concept=z).columns) == list(frame.columns)
    assert direct.feature_names_in_.tolist() == list(frame.columns)


@pytest.mark.parametrize("wrong", ["", 0, [], {}])
def test_an_empty_selection_to_keep_is_refused(wrong: Any) -> None:
    X, y, z = data()
    moments = sf.Moments().update(X, {"z": z, "y": y})
    with pytest.raises(sf.SplinceError):
        OracleSPLINCE.from_moments(moments, erase="z", keep=wrong)
    assert OracleSPLINCE.from_moments(moments, erase="z").kept_ is None
