"""The recipes of docs/coming_from.md against the packages that they translate."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
from fairlearn.preprocessing import CorrelationRemover
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import Pipeline

import splince_fast as sf
from splince_fast.exceptions import InputError, LabelError

Float = NDArray[np.float64]

# Well-conditioned rows of order 1 (condition number of the covariance below 10, d = 8): rounding
# of either side stays below 1e3 eps.
CLOSE = 1e-12


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=CLOSE)


def rows(n: int = 600, d: int = 8) -> tuple[Float, NDArray[np.int64], Float]:
    """Rows, a binary concept, and a quantity, both associated with the rows."""
    rng = np.random.default_rng(0)
    z, age = rng.integers(0, 2, n), rng.normal(size=n)
    X = rng.normal(size=(n, d))
    X[:, 0] += 2 * z
    X[:, 1] += age
    return X, z, age


# --- concept-erasure ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package() -> Any:
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit")  # at its import
        return pytest.importorskip("concept_erasure")


def test_a_streamed_leace_fitter(package: Any, torch: Any) -> None:
    X, z, _ = rows()
    fitter = package.LeaceFitter(X.shape[1], 1, dtype=torch.float64, shrinkage=False, svd_tol=1e-9)
    moments = sf.Moments()
    for part in np.array_split(np.arange(len(X)), 4):
        fitter.update(torch.from_numpy(X[part]), torch.from_numpy(z[part]))
        moments.update(X[part], {"z": z[part]})
    theirs, ours = fitter.eraser, sf.leace(moments, erase="z")
    there = theirs(torch.from_numpy(X)).numpy()
    close(ours(X), there)
    close(ours.left @ ours.right.T, theirs.proj_left @ theirs.proj_right)
    close(ours.mean, theirs.bias)
    assert ours(torch.from_numpy(X).float()).dtype is torch.float32
    assert np.abs(there - X).max() > 0.1  # either of them erases something


@pytest.mark.parametrize(
    ("method", "options"), [("leace", {"shrinkage": False}), ("sal", {"method": "orth"})]
)
def test_one_call_replaces_the_fitter(
    package: Any, torch: Any, method: str, options: dict[str, Any]
) -> None:
    X, z, _ = rows()
    tensors = torch.from_numpy(X), torch.from_numpy(z)
    theirs = package.LeaceEraser.fit(*tensors, svd_tol=1e-9, **options)
    clean, eraser = sf.erase(X, z, method=method)
    close(clean, theirs(tensors[0]))
    np.testing.assert_array_equal(clean, eraser(X))


def test_integers_are_classes_here_and_one_number_there(package: Any, torch: Any) -> None:
    rng = np.random.default_rng(0)
    z = rng.integers(0, 3, 600)
    X = torch.from_numpy(rng.normal(size=(600, 8)) + 2 * np.eye(3, 8)[z])
    one_number, one_hot = (
        package.LeaceEraser.fit(X, torch.from_numpy(labels), shrinkage=False, svd_tol=1e-9)(X)
        for labels in (z, np.eye(3)[z])
    )
    classes, _ = sf.erase(X, z)
    moments = sf.Moments(kinds={"z": "continuous"}).update(X, {"z": z})
    close(classes, one_hot)
    close(sf.leace(moments, erase="z")(X), one_number)
    assert (classes - one_number).abs().max() > 0.1


def test_a_rare_concept_stays_there_and_is_erased_here(package: Any, torch: Any) -> None:
    rng = np.random.default_rng(0)
    z = (np.arange(20_000) % 1000 == 0).astype(int)
    X = rng.normal(size=(20_000, 8)) + 3 * np.outer(z, np.eye(8)[0])
    tensor = torch.from_numpy(X)
    theirs = package.LeaceEraser.fit(tensor, torch.from_numpy(z))
    np.testing.assert_array_equal(theirs(tensor).numpy(), X)
    clean, _ = sf.erase(X, z)
    gap = clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)
    assert np.abs(gap).max() < CLOSE < 2 < X[z == 1, 0].mean() - X[z == 0, 0].mean()


@pytest.mark.slow
def test_erasers_inside_a_model(package: Any, torch: Any) -> None:
    pytest.importorskip("transformers")
    from splince_fast import nn as snn

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Tanh())
    X, z, _ = rows()
    batch = {"input": torch.from_numpy(X).float(), "z": torch.from_numpy(z)}
    erasers = snn.fit_layers(model, [batch], "1", sf.leace, erase="z", labels="z")
    ours = erasers["1"]
    factors = (torch.from_numpy(f.copy()).float() for f in (ours.left, ours.right.T, ours.mean))
    scrubber = package.ConceptScrubber()
    scrubber.erasers["1"] = package.LeaceEraser(*factors)
    with torch.no_grad():
        before = model(batch["input"])
        with scrubber.scrub(model):
            there = model(batch["input"])
        with snn.install(model, erasers):
            here = model(batch["input"])
    # float32, values of order 1, sums of 8 terms: below 1e2 eps.
    torch.testing.assert_close(here, there, rtol=0, atol=1e-5)
    assert (here - before).abs().max() > 0.1


# --- fairlearn ------------------------------------------------------------------------------------


def people() -> Any:
    X, _, age = rows()
    income = X[:, 1] + np.random.default_rng(1).normal(size=600)
    return pd.DataFrame(X, columns=list("abcdefgh")).assign(age=40 + 10 * age, income=income)


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.LabelFeatureWarning")
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("names", [["age"], ["age", "income"]])
def test_correlation_remover(names: list[str], alpha: float) -> None:
    X = people()[[*"abcdefgh", *names]]
    theirs = CorrelationRemover(sensitive_feature_ids=names, alpha=alpha).fit_transform(X)
    eraser = sf.LEACE().fit(X, concept=X[names].astype(float)).projection_
    ours = eraser.scaled(alpha)(X)
    close(ours[:, :8], theirs)
    if alpha == 1:
        constant = ours[:, 8:]  # the columns that fairlearn drops
        assert np.ptp(constant, axis=0).max() < 1e-12 * np.abs(constant).max()
    if alpha > 0:
        assert np.abs(theirs - X.to_numpy()[:, :8]).max() > 0.01


def test_without_the_sensitive_column_nothing_of_it_is_needed() -> None:
    X = people().drop(columns="income")
    others, age = X.drop(columns="age"), X[["age"]].astype(float)
    clean = sf.LEACE().fit(others, concept=age).transform(others)
    deviation = age.to_numpy()[:, 0] - age.to_numpy().mean()
    assert np.abs(deviation @ clean).max() < 1e-12 * np.abs(deviation).sum() * np.abs(clean).max()
    with pytest.raises(ValueError, match=r"age|features|columns|shape"):
        CorrelationRemover(sensitive_feature_ids=["age"]).fit(X).transform(others)


# --- scikit-learn ---------------------------------------------------------------------------------


def test_a_search_over_erasers_scores_held_out_rows() -> None:
    X, z, _ = rows()
    y = np.where(np.random.default_rng(1).random(len(z)) < 0.8, z, 1 - z)
    steps = [("eraser", sf.LEACE()), ("head", LogisticRegression())]
    erasers = [sf.LEACE(), sf.SPLINCE(), sf.Identity()]
    search = GridSearchCV(Pipeline(steps), {"eraser": erasers}, cv=3, error_score="raise")
    plain = search.fit(X, y, eraser__concept=z).cv_results_
    with sklearn.config_context(enable_metadata_routing=True):
        routed = sklearn.clone(search).fit(X, y, concept=z).cv_results_
        passed = sklearn.clone(search).set_params(param_grid={"eraser": ["passthrough"]})
        with pytest.raises(TypeError, match="concept"):  # the control: why Identity exists
            passed.fit(X, y, concept=z)
    for fold, (train, test) in enumerate(StratifiedKFold(3).split(X, y)):
        scores = []
        for eraser in (*erasers, None):
            clean = X
            if eraser is not None:
                own = sklearn.clone(eraser).fit(X[train], y[train], concept=z[train])
                clean = own.transform(X)
            head = LogisticRegression().fit(clean[train], y[train])
            scores.append(head.score(clean[test], y[test]))
        for results in (plain, routed):
            np.testing.assert_array_equal(results[f"split{fold}_test_score"], scores[:3])
        assert scores[2] == scores[3]
        assert max(scores[:2]) < scores[2]  # the concept carries the task here


# --- dask -----------------------------------------------------------------------------------------


def test_dask_rows_give_the_same_eraser() -> None:
    pytest.importorskip("distributed")
    da = pytest.importorskip("dask.array")
    X, z, _ = rows()
    lazy, labels = da.from_array(X, chunks=(150, -1)), da.from_array(z, chunks=150)
    moments = sf.Moments.from_blocks(sf.sources.from_dask(lazy, {"z": labels}))
    ours = sf.LEACE.from_moments(moments, erase="z")
    expected = sf.LEACE().fit(X, concept=z).transform(X)
    found = ours.transform(lazy)
    assert found.chunks == lazy.chunks
    close(found.compute(), expected)
    by_block = lazy.map_blocks(ours.transform, dtype=float)
    np.testing.assert_array_equal(found.compute(), by_block.compute())
    assert np.abs(expected - X).max() > 0.1
    for refused in (sf.LEACE().fit, sf.LEACE().partial_fit, sf.LEACE().fit_transform, sf.erase):
        with pytest.raises(InputError, match=r"from_blocks\(sources\.from_dask"):
            refused(lazy, concept=z)
    with pytest.raises(LabelError, match=r"compute\(\) it"):
        sf.LEACE().fit(X, concept=labels)
    with pytest.raises(InputError, match=r"rechunk\(\{1: -1\}\)"):
        ours.transform(lazy.rechunk((150, 4)))
