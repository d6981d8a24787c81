"""The scikit-learn estimators: the same erasers behind scikit-learn's manners."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError, UnsetMetadataPassedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import splince_fast as sf
from splince_fast import LEACE, SAL, SPLINCE, MeanProjection, transformer
from splince_fast import estimators as erasers
from splince_fast.exceptions import (
    ConstantVariableError,
    InfeasibleError,
    InputError,
    LabelError,
    NonFiniteError,
    NothingErasedWarning,
    SplinceError,
)

pytestmark = pytest.mark.filterwarnings("error")
fast = settings(max_examples=25, deadline=None)

EPS = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)
CLASSES = (SPLINCE, LEACE, SAL, MeanProjection)
Data = tuple[np.ndarray, np.ndarray, np.ndarray]


def make_data(
    n: int = 400, d: int = 6, seed: int = 0, classes: int = 3, dtype: Any = np.float64
) -> Data:
    """Rows that covary with a concept z and with a task y, which is correlated with it."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, classes, size=n)
    y = np.where(rng.random(n) < 0.7, z % 2, rng.integers(0, 2, size=n))
    X = rng.normal(size=(n, d)) @ (np.eye(d) + 0.3 * rng.normal(size=(d, d)))
    X += rng.normal(size=(classes, d))[z] + rng.normal(size=(2, d))[y] + 3.0
    return X.astype(dtype), y, z


@pytest.fixture
def data() -> Data:
    return make_data()


def rounding(estimator: Any, eps: float = EPS) -> float:
    """How far two ways to the same projection may be apart, relative to its norm.

    8 d eps (kappa + q) / s, the forward error of the closed form, with kappa the condition number
    of Cov(x), q that of the whitened cross-covariances and s the sine of the smallest angle. The
    sums behind the moments are off by a few eps of theirs, which the constant covers.
    """
    kappa = float(np.linalg.cond(estimator.moments_.covariance(ddof=0)))
    q = 1.0
    for variable in estimator.report_.variables:
        values = variable.singular_values
        q = max(q, values[0] / values[variable.rank - 1]) if variable.rank else q
    return float(8 * estimator.n_features_in_ * eps * (kappa + q) * estimator.report_.amplification)


def distance(a: Any, b: Any) -> float:
    """Relative distance of two projections, their means included."""
    a, b = (getattr(e, "projection_", e) for e in (a, b))
    gap = np.linalg.norm(a.matrix() - b.matrix()) / np.linalg.norm(a.matrix())
    return float(gap + np.linalg.norm(a.mean - b.mean) / np.linalg.norm(a.mean))


def same(a: Any, b: Any, eps: float = EPS) -> bool:
    return distance(a, b) <= rounding(a, eps)


def covariance(X: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Cov(x, labels), labels as indicators of their classes."""
    indicators = (labels[:, None] == np.unique(labels)).astype(float)
    return np.asarray((X - X.mean(axis=0)).T @ indicators / len(X))


# --- what they compute --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LEACE, SAL, MeanProjection])
def test_only_splince_looks_at_y(kind: Any, data: Data) -> None:
    X, y, z = data
    plain, given_y = kind().fit(X, concept=z), kind().fit(X, "any nonsense", concept=z)
    assert np.array_equal(plain.projection_.matrix(), given_y.projection_.matrix())
    assert given_y.kept_ is None
    assert list(given_y.moments_.variables) == ["concept"]
    assert distance(SPLINCE().fit(X, y, concept=z), SPLINCE().fit(X, y[::-1], concept=z)) > 1e-3


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtype_is_preserved_and_inputs_are_untouched(kind: Any, dtype: Any) -> None:
    X, y, z = make_data(dtype=dtype)
    weight = np.linspace(0, 2, len(X))
    arguments = X, y, z, weight
    before = [a.copy() for a in arguments]
    for array in arguments:
        array.flags.writeable = False
    estimator = kind().fit(X, y, concept=z, sample_weight=weight)
    clean = estimator.transform(X)
    estimator.partial_fit(X, y, concept=z, sample_weight=weight)
    assert clean.dtype == dtype
    assert clean is not X
    assert all(np.array_equal(a, b) for a, b in zip(arguments, before, strict=True))
    assert estimator.transform((X * 10).astype(np.int32)).dtype == np.float64


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fit_reads_the_array_itself_once(
    kind: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy and no second pass: fitting costs what the moments and the method cost."""
    X, y, z = make_data(dtype=dtype)
    seen = []
    update = sf.Moments.update

    def spy(self: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(rows)
        return update(self, rows, *args, **kwargs)

    monkeypatch.setattr(sf.Moments, "update", spy)
    kind().fit(X, y, concept=z)
    assert len(seen) == 1
    assert np.shares_memory(seen[0], X)
    assert seen[0].shape == X.shape


# --- one pass in any split ----------------------------------------------------------------------


@st.composite
def splits(draw: st.DrawFn, n: int = 120) -> list[slice]:
    """Blocks of any size, empty ones included, that cover n rows in order."""
    bounds = sorted(draw(st.lists(st.integers(0, n), max_size=12)))
    return [slice(a, b) for a, b in zip([0, *bounds], [*bounds, n], strict=True)]


@fast
@given(splits(), st.sampled_from(CLASSES), st.booleans(), st.integers(0, 99))
def test_last_batch_smaller_than_needed_and_any_other_split(
    blocks: list[slice], kind: Any, weighted: bool, seed: int
) -> None:
    """Any batch size, also of one row and of none, gives what one fit gives."""
    X, y, z = make_data(120, seed=seed)
    weight = np.random.default_rng(seed).integers(0, 3, size=120) if weighted else None
    whole = kind().fit(X, y, concept=z, sample_weight=weight)
    parts = kind()
    for block in blocks:
        w = None if weight is None else weight[block]
        parts.partial_fit(X[block], y[block], concept=z[block], sample_weight=w)
    assert same(whole, parts)
    assert whole.n_samples_seen_ == parts.n_samples_seen_
    assert whole.report_.rank == parts.report_.rank


def test_control_a_lost_block_is_seen(data: Data) -> None:
    X, y, z = data
    assert not same(SPLINCE().fit(X, y, concept=z), SPLINCE().fit(X[:-1], y[:-1], concept=z[:-1]))


def test_fit_forgets_the_previous_fit(data: Data) -> None:
    X, y, z = data
    frame = pd.DataFrame(X, columns=list("abcdef"))
    estimator = SPLINCE().fit(frame, {"other": y}, concept={"name": z})
    estimator.fit(X[:, :4], y, concept=z)
    assert not hasattr(estimator, "feature_names_in_")
    assert estimator.n_features_in_ == 4
    assert (estimator.erased_, estimator.kept_) == (["concept"], ["task"])
    assert same(SPLINCE().fit(X[:, :4], y, concept=z), estimator)


def failures(X: np.ndarray, y: Any, z: Any) -> Iterator[dict[str, Any]]:
    """Arguments that no fit can use."""
    good = {"X": X, "y": y, "concept": z}
    broken = X.copy()
    broken[3, 2] = np.nan
    yield good | {"X": broken}
    yield good | {"X": X[:, 0]}
    yield good | {"X": X[:5]}
    yield good | {"X": X.astype(complex)}
    yield good | {"concept": None}
    yield good | {"concept": np.full(len(X), 1j)}
    yield good | {"sample_weight": -np.ones(len(X))}
    yield good | {"concept": {"task": z}}
    yield good | {"concept": {}}


@pytest.mark.parametrize("verb", ["fit", "partial_fit"])
@pytest.mark.parametrize("fitted", [False, True])
def test_a_failed_call_changes_nothing(fitted: bool, verb: str, data: Data) -> None:
    X, y, z = data
    estimator = SPLINCE()
    if fitted:
        estimator.fit(pd.DataFrame(X, columns=list("abcdef")), y, concept=z)
    before = vars(estimator).copy()
    state = pickle.dumps(estimator.moments_) if fitted else b""
    count = 0
    empty = {"X": X, "y": y, "concept": z, "sample_weight": np.zeros(len(X))}
    for arguments in [*failures(X, y, z), *([empty] if verb == "fit" else [])]:
        with warnings.catch_warnings():  # of arrays after a frame, by scikit-learn
            warnings.simplefilter("ignore", UserWarning)
            with pytest.raises(SplinceError):
                getattr(estimator, verb)(**arguments)
        assert vars(estimator) == before
        assert not fitted or pickle.dumps(estimator.moments_) == state
        count += 1
    assert count == 9 + (verb == "fit")


def test_errors_that_need_all_the_data_wait_until_the_projection_is_needed(data: Data) -> None:
    X, y, z = data
    one = z == 0
    estimator = SPLINCE().partial_fit(X[one], y[one], concept=z[one])
    with pytest.raises(ConstantVariableError, match="single value"):
        estimator.transform(X)
    estimator.partial_fit(X[~one], y[~one], concept=z[~one])
    order = np.concatenate([np.flatnonzero(one), np.flatnonzero(~one)])
    assert same(SPLINCE().fit(X[order], y[order], concept=z[order]), estimator)
    with pytest.raises(ConstantVariableError, match="single value"):
        SPLINCE().fit(X[one], y[one], concept=z[one])


@pytest.mark.parametrize("name", ["projection_", "report_", "n_samples_seen_"])
def test_unfitted_estimators_raise(name: str, data: Data) -> None:
    for estimator in (LEACE(), SPLINCE(shrinkage=0.5)):
        assert not hasattr(estimator, name)
        with pytest.raises(NotFittedError):
            getattr(estimator, name)
        with pytest.raises(NotFittedError):
            estimator.transform(data[0])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize("lazy", [False, True])
def test_copies_go_on_alone(copier: Callable[[Any], Any], lazy: bool, data: Data) -> None:
    X, y, z = data
    estimator = SPLINCE(shrinkage=0.2)
    getattr(estimator, "partial_fit" if lazy else "fit")(X[:200], y[:200], concept=z[:200])
    twin = copier(estimator)
    assert np.array_equal(twin.transform(X), estimator.transform(X))
    twin.partial_fit(X[200:], y[200:], concept=z[200:])
    assert estimator.n_samples_seen_ == 200
    assert same(SPLINCE(shrinkage=0.2).fit(X, y, concept=z), twin)


# --- adding the moments of estimators -----------------------------------------------------------


def test_classes_absent_from_the_first_batch_or_from_one_worker() -> None:
    """The class table grows, and a merge aligns classes by name, not by position."""
    X, y, codes = make_data(300, classes=4)
    z = np.array(["delta", "alpha", "charlie", "bravo"])[codes]
    whole = SPLINCE().fit(X, y, concept=z)
    assert whole.report_.rank == 3
    left, right = np.isin(z, ["delta", "alpha"]), np.isin(z, ["bravo", "charlie"])
    order = np.concatenate([np.flatnonzero(left), np.flatnonzero(right)])
    stream = SPLINCE()
    for rows in (left, right):
        stream.partial_fit(X[rows], y[rows], concept=z[rows])
    workers = [SPLINCE().partial_fit(X[r], y[r], concept=z[r]).moments_ for r in (right, left)]
    merged = SPLINCE.from_moments(workers[0] + workers[1], erase="concept", keep="task")
    expected = SPLINCE().fit(X[order], y[order], concept=z[order])
    assert same(expected, stream)
    assert same(expected, merged)
    counts = {name: int((z == name).sum()) for name in np.unique(z)}
    assert merged.moments_.class_counts("concept") == counts
    # Control: by position, "alpha" and "delta" of one worker would be classes of the other.
    mixed = np.where(left, np.where(z == "delta", "charlie", "bravo"), z)
    assert not same(expected, SPLINCE().fit(X[order], y[order], concept=mixed[order]))


# --- the concept and the task -------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("verb", ["fit", "partial_fit", "fit_transform"])
def test_y_never_silently_becomes_the_concept(kind: Any, verb: str, data: Data) -> None:
    X, y, _ = data
    with pytest.raises(
        InputError, match=r"concept=z.*pipeline.*never silently.*concept_from"
    ) as told:
        getattr(kind(), verb)(X, y)
    keeps = kind is SPLINCE
    assert f"which {kind.__name__} {'keeps' if keeps else 'does not keep'}," in str(told.value)
    assert ("fit(X, y, concept=z)" if keeps else "fit(X, concept=z)") in str(told.value)
    with pytest.raises(InputError, match=f"{kind.__name__.lower()}__concept=z"):
        make_pipeline(kind(), LogisticRegression()).fit(X, y)
    with pytest.raises(TypeError):
        kind().fit(X, y, y)  # the concept is a keyword


@pytest.mark.parametrize("kind", CLASSES)
def test_the_explicit_opt_in(kind: Any, data: Data) -> None:
    X, y, z = data
    opted = kind(concept_from="y").fit(X, z)
    if kind is SPLINCE:  # without a task SPLINCE is LEACE, and says so
        assert opted.report_.method == "LEACE"
        assert np.array_equal(opted.transform(X), LEACE().fit_transform(X, concept=z))
    else:
        assert np.array_equal(opted.transform(X), kind().fit_transform(X, concept=z))
    with pytest.raises(InputError, match="given a concept, too"):
        kind(concept_from="y").fit(X, y, concept=z)
    with pytest.raises(InputError, match=r"requires y .* target y is None"):
        kind(concept_from="y").fit(X)
    with pytest.raises(InputError, match="must be None or 'y'"):
        kind(concept_from="x").fit(X, y, concept=z)


def test_splince_needs_a_task(data: Data) -> None:
    X, _, z = data
    with pytest.raises(InputError, match=r"requires y .* LEACE erases without"):
        SPLINCE().fit(X, concept=z)
    with pytest.raises(ConstantVariableError, match="'task', to be kept"):
        SPLINCE().fit(X, np.zeros(len(X), dtype=int), concept=z)
    with pytest.raises(InfeasibleError, match=r"'task' while it erases 'concept'"):
        SPLINCE().fit(X, z, concept=z)


def containers(table: dict[str, np.ndarray]) -> list[Any]:
    return [table, pd.DataFrame(table), pl.DataFrame(table), pa.table(table)]


def test_several_concepts_and_tasks_from_any_container() -> None:
    rng = np.random.default_rng(5)
    X, y, z = make_data(500, d=10)
    concepts = {"gender": z, "age": rng.normal(40, 9, size=500)}
    tasks = {"job": y.astype(str), "score": rng.normal(size=500)}
    X = X + np.outer(concepts["age"] / 9, rng.normal(size=10))
    X += np.outer(tasks["score"], rng.normal(size=10))
    moments = sf.Moments().update(X, concepts | tasks)
    expected = sf.splince(moments, erase=["gender", "age"], keep=["job", "score"])
    for concept, task in zip(containers(concepts), containers(tasks), strict=True):
        fitted = SPLINCE().fit(X, task, concept=concept)
        assert distance(fitted, expected) <= rounding(fitted)
        assert (fitted.erased_, fitted.kept_) == (list(concepts), list(tasks))
    alone = SPLINCE().fit(X, tasks, concept={"gender": z})
    assert distance(alone, expected) > 1e-3  # control: age is erased, too


def test_single_columns_are_named_by_their_role(data: Data) -> None:
    """So that a Series and an array may alternate, whatever the Series is called."""
    X, y, z = data
    whole = SPLINCE().fit(X, pd.Series(y, name=0), concept=pd.Series(z, name="gender"))
    mixed = SPLINCE().partial_fit(X[:50], y[:50].tolist(), concept=pl.Series(z[:50]))
    mixed.partial_fit(X[50:], y[50:], concept=z[50:, None])
    assert (whole.erased_, whole.kept_) == (["concept"], ["task"])
    assert same(whole, mixed)


def test_blocks_name_the_same_variables(data: Data) -> None:
    X, y, z = data
    estimator = SPLINCE().fit(X, y, concept={"a": z, "b": z % 2})
    estimator.partial_fit(X, y, concept={"b": z % 2, "a": z})  # in any order
    with pytest.raises(LabelError, match=r"erase 'a', 'b'.*gets 'a'"):
        estimator.partial_fit(X, y, concept={"a": z})
    with pytest.raises(LabelError, match="keep 'task'"):
        estimator.partial_fit(X, {"job": y}, concept={"a": z, "b": z % 2})
    with pytest.raises(LabelError, match="gets 1, 'a'"):
        estimator.partial_fit(X, y, concept={"a": z, 1: z})
    assert estimator.n_samples_seen_ == 800


def test_ambiguous_labels_are_refused(data: Data) -> None:
    X, y, z = data
    with pytest.raises(LabelError, match="both hold a variable 'same'"):
        SPLINCE().fit(X, {"same": y}, concept={"same": z})
    twice = pd.DataFrame(np.stack([z, z], axis=1), columns=["a", "a"])
    with pytest.raises(LabelError, match="two columns of the same name"):
        LEACE().fit(X, concept=twice)
    with pytest.raises(InputError, match="holds no variable"):
        LEACE().fit(X, concept=pd.DataFrame(index=range(len(X))))
    with pytest.raises(LabelError, match="not a string but an int"):
        LEACE().fit(X, concept=pd.DataFrame({0: z}))
    with pytest.raises(LabelError, match="collect"):
        LEACE().fit(X, concept=pl.LazyFrame({"a": z}))
    with pytest.raises(LabelError, match="continuous"):
        LEACE().fit(X, concept=z).partial_fit(X, concept=z + 0.25)


# --- cases from the field -----------------------------------------------------------------------


def test_labels_of_one_dimension_are_accepted(data: Data) -> None:
    X, y, z = data
    flat = SPLINCE().fit(X, y, concept=z)
    for shape in ((-1, 1), (-1,)):
        other = SPLINCE().fit(X, y.reshape(shape), concept=z.reshape(shape))
        assert np.array_equal(flat.projection_.matrix(), other.projection_.matrix())
    continuous = SPLINCE().fit(X, y.astype(float), concept=X[:, 0] + X[:, 1])
    assert continuous.projection_.rank == 1


def test_no_assert_guards_the_user() -> None:
    """Assertions vanish under ``python -O``."""
    source = inspect.getsource(transformer) + inspect.getsource(erasers)
    nodes = list(ast.walk(ast.parse(source.replace("from __future__ import annotations", ""))))
    assert not any(isinstance(node, ast.Assert) for node in nodes)
    raised = [n.exc for n in nodes if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    assert len(raised) > 10
    names = vars(transformer) | vars(erasers)
    for call in raised:
        assert isinstance(call.func, ast.Name)
        if call.func.id not in ("NotImplementedError", "error"):
            assert issubclass(names[call.func.id], SplinceError)


def test_missing_values_are_named_and_missing_labels_are_used(data: Data) -> None:
    X, _, z = data
    broken = X.copy()
    broken[[7, 11], [0, 3]] = np.nan, np.inf
    with pytest.raises(NonFiniteError, match=r"2 of 400 rows \(rows 7, 11\)"):
        LEACE().fit(broken, concept=z)
    labels = [None if i % 3 == 0 else str(v) for i, v in enumerate(z)]
    fitted = LEACE().fit(X, concept=labels)
    assert fitted.n_samples_seen_ == len(X)
    assert sum(fitted.moments_.class_counts("concept").values()) == 266
    assert np.array_equal(fitted.moments_.covariance(), LEACE().fit(X, concept=z).moments_
                          .covariance())  # fmt: skip
    known = np.arange(len(X)) % 3 > 0
    dropped = LEACE().fit(X[known], concept=z[known])
    assert not same(dropped, fitted)  # their rows count for the covariance of X
    # The covariance over the labelled rows is erased, for any S.
    residual = fitted.projection_.matrix() @ covariance(X[known], z[known])
    assert np.abs(residual).max() < 64 * EPS * np.abs(X).max() * 6


def test_a_name_is_not_its_characters(data: Data) -> None:
    X, y, z = data
    moments = sf.Moments().update(X, {"sex": z, "s": y, "e": y, "x": y})
    fitted = LEACE.from_moments(moments, erase="sex")
    assert [v.name for v in fitted.report_.variables] == ["sex"]
    assert same(fitted, LEACE().fit(X, concept=z))
    with pytest.raises(LabelError, match=r"'concept' is 'sex', not a column"):
        LEACE().fit(X, concept="sex")


# --- frames and feature names -------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_in_frames_out(library: str, kind: Any, dtype: Any) -> None:
    X, y, z = make_data(dtype=dtype)
    frame = pd.DataFrame(X, columns=list("abcdef"), index=[f"row{i}" for i in range(len(X))])
    concept = pd.Series(z, index=frame.index)
    polars = library == "polars"
    rows, task, labels = (
        (pl.from_pandas(frame), pl.Series(y), pl.Series("z", z)) if polars else (frame, y, concept)
    )
    estimator = kind().set_output(transform=library)
    clean = estimator.fit_transform(rows, task, concept=labels)
    assert type(clean) is type(rows)
    assert list(clean.columns) == list(estimator.get_feature_names_out()) == list("abcdef")
    assert polars or clean.index.equals(frame.index)
    assert set(clean.dtypes) == set(rows.dtypes)
    plain = kind().fit(X, y, concept=z).transform(X)
    np.testing.assert_allclose(clean, plain, rtol=0, atol=64 * np.finfo(dtype).eps * 40)
    assert list(estimator.feature_names_in_) == list("abcdef")


def test_default_feature_names(data: Data) -> None:
    X, _, z = data
    assert list(LEACE().fit(X, concept=z).get_feature_names_out()) == [f"x{i}" for i in range(6)]
    with pytest.raises(NotFittedError):
        LEACE().get_feature_names_out()


# --- values that are not finite -----------------------------------------------------------------


@fast
@given(
    st.sampled_from(CLASSES),
    st.integers(0, 39),
    st.integers(0, 5),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.sampled_from([np.float32, np.float64]),
)
def test_transform_refuses_what_is_not_finite(
    kind: Any, row: int, column: int, value: float, dtype: Any
) -> None:
    X, y, z = make_data(40, dtype=dtype)
    fitted = kind().fit(X, y, concept=z)
    X[row, column] = value
    with pytest.raises(NonFiniteError, match=f"row {row}"):
        fitted.transform(X)


def test_transform_checks_values_where_nothing_is_subtracted() -> None:
    z = np.array([0, 1] * 10)
    X = np.ones((20, 2))
    with pytest.warns(NothingErasedWarning):
        fitted = LEACE().fit(X, concept=z)
    X[4, 1] = np.nan
    with pytest.raises(NonFiniteError, match="row 4"):
        fitted.transform(X)
    assert fitted.transform(X[:0]).shape == (0, 2)


# --- one pass, many erasers ---------------------------------------------------------------------


@pytest.fixture
def moments(data: Data) -> sf.Moments:
    X, y, z = data
    return sf.Moments(joint=[("z", "half")]).update(X, {"z": z, "y": y, "half": z > 0})


def test_from_moments_is_fit_without_data(data: Data, moments: sf.Moments) -> None:
    X, y, z = data
    fitted = SPLINCE.from_moments(moments, erase="z", keep="y", shrinkage=0.25)
    assert same(SPLINCE(shrinkage=0.25).fit(X, y, concept=z), fitted)
    assert (fitted.erased_, fitted.kept_, fitted.n_features_in_) == ("z", "y", 6)
    assert fitted.n_samples_seen_ == 400
    assert fitted.get_params()["shrinkage"] == 0.25
    reader = SPLINCE.from_moments(moments, erase="z", keep="y", concept_from="y")
    assert reader.report_.method == "SPLINCE"  # how fit would read its y changes nothing here
    joint = LEACE.from_moments(moments, erase=("z", "half"))
    assert same(joint, LEACE.from_moments(moments, erase="z"))  # "half" is a function of z
    directions = np.eye(6)[:, :2]
    kept = SPLINCE.from_moments(moments, erase="z", keep=directions).projection_.matrix()
    assert np.allclose(kept @ directions, directions, rtol=0, atol=1e-12)


def test_from_moments_does_not_follow_later_updates(data: Data, moments: sf.Moments) -> None:
    X, y, z = data
    fitted = LEACE.from_moments(moments, erase="z")
    before = fitted.projection_.matrix()
    moments.update(X + 1, {"z": z[::-1], "y": y, "half": z > 0})
    assert moments.n_rows == 800
    assert fitted.n_samples_seen_ == 400
    assert np.array_equal(LEACE.from_moments(fitted.moments_, erase="z").projection_.matrix(),
                          before)  # fmt: skip


def test_from_moments_refuses(data: Data, moments: sf.Moments) -> None:
    X, _, z = data
    with pytest.raises(InputError, match="keep is missing"):
        SPLINCE.from_moments(moments, erase="z")
    with pytest.raises(InputError, match="LEACE keeps nothing"):
        LEACE.from_moments(moments, erase="z", keep="y")
    with pytest.raises(InputError, match=r"Moments\(\).update"):
        LEACE.from_moments(X, erase="z")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="null_space"):
        LEACE.from_moments(moments, erase="z", null_space="erase")
    for option in ({"kinds": {"z": "continuous"}}, {"subsample": 0.5}, {"covariance_type": "diag"}):
        with pytest.raises(InputError, match=f"{next(iter(option))} determines how moments are"):
            LEACE.from_moments(moments, erase="z", **option)
    fitted = LEACE.from_moments(moments, erase="z")
    with pytest.raises(InputError, match="made from moments"):
        fitted.partial_fit(X, concept={"z": z})
    for kind, name, text in (
        (LEACE, "unknown", r"LEACE takes no unknown= \(it takes erase, "),
        (LEACE, "shrinkge", "did you mean shrinkage="),
        (SPLINCE, "kep", "did you mean keep="),
    ):
        with pytest.raises(InputError, match=text):
            kind.from_moments(moments, erase="z", **{name: 1})
    assert fitted.fit(X, concept=z).partial_fit(X, concept=z).n_samples_seen_ == 800


# --- metadata through scikit-learn's routers ----------------------------------------------------


@pytest.fixture(params=[False, True], ids=["plain", "routed"])
def routed(request: pytest.FixtureRequest) -> Iterator[bool]:
    with sklearn.config_context(enable_metadata_routing=request.param):
        yield request.param


def concept_for(routed: bool, name: str, z: Any) -> dict[str, Any]:
    """The keyword under which a router takes the concept of its step `name`."""
    return {"concept" if routed else f"{name}__concept": z}


def pipeline(**params: Any) -> Pipeline:
    return make_pipeline(SPLINCE(**params), StandardScaler(), LogisticRegression())


def test_first_step_of_a_pipeline(routed: bool, data: Data) -> None:
    X, y, z = data
    expected = SPLINCE().fit(X, y, concept=z)
    pipe = pipeline().fit(X, y, **concept_for(routed, "splince", z))
    assert np.array_equal(pipe[0].projection_.matrix(), expected.projection_.matrix())
    by_hand = make_pipeline(StandardScaler(), LogisticRegression()).fit(expected.transform(X), y)
    assert np.array_equal(pipe.predict(X), by_hand.predict(expected.transform(X)))
    scaled = make_pipeline(SPLINCE(), StandardScaler())
    clean = scaled.fit_transform(X, y, **concept_for(routed, "splince", z))
    assert np.allclose(clean, scaled.transform(X))
    with pytest.raises(InputError, match="never silently"):
        pipeline().fit(X, y)


def test_cross_validation_slices_the_concept(routed: bool, data: Data) -> None:
    X, y, z = data
    concepts = pd.DataFrame({"a": z, "b": z > 0})
    for concept in (z, concepts, pl.DataFrame(concepts)):
        result = cross_validate(
            pipeline(), X, y, cv=KFold(3), params=concept_for(routed, "splince", concept),
            return_estimator=True, return_indices=True, error_score="raise",
        )  # fmt: skip
        for pipe, rows in zip(result["estimator"], result["indices"]["train"], strict=True):
            expected = SPLINCE().fit(X[rows], y[rows], concept=z[rows])
            assert same(expected, pipe[0])
            assert not same(expected, SPLINCE().fit(X, y, concept=z))


def test_cross_validation_cannot_slice_a_mapping(routed: bool, data: Data) -> None:
    X, y, z = data
    with pytest.raises(InputError, match="400 labels but the block has 266"):
        cross_validate(
            pipeline(), X, y, cv=KFold(3), params=concept_for(routed, "splince", {"a": z}),
            error_score="raise",
        )  # fmt: skip


def test_grid_search_over_shrinkage(routed: bool, data: Data) -> None:
    X, y, z = data
    grid = {"splince__shrinkage": [None, 0.1, "oas"], "splince__max_amplification": [None, 10.0]}
    search = GridSearchCV(pipeline(), grid, cv=3, error_score="raise")
    search.fit(X, y, **concept_for(routed, "splince", z))
    assert len(search.cv_results_["params"]) == 6
    best = search.best_estimator_[0]
    expected = SPLINCE(**best.get_params()).fit(X, y, concept=z)
    assert np.array_equal(best.projection_.matrix(), expected.projection_.matrix())


def test_feature_union(routed: bool, data: Data) -> None:
    X, y, z = data
    union = FeatureUnion([("kept", SPLINCE()), ("plain", LEACE())])
    clean = union.fit_transform(X, y, concept=z)
    expected = [SPLINCE().fit_transform(X, y, concept=z), LEACE().fit_transform(X, concept=z)]
    assert np.array_equal(clean, np.concatenate(expected, axis=1))
    assert np.array_equal(union.transform(X), clean)


def test_column_transformer(routed: bool, data: Data) -> None:
    X, y, z = data
    split = ColumnTransformer(
        [("erase", SPLINCE(), slice(0, 4)), ("leave", "passthrough", slice(4, 6))]
    )
    if not routed:  # scikit-learn takes no metadata there without routing
        with pytest.raises(ValueError, match="enable_metadata_routing"):
            split.fit_transform(X, y, concept=z)
        return
    clean = split.fit_transform(X, y, concept=z)
    assert np.array_equal(clean[:, :4], SPLINCE().fit_transform(X[:, :4], y, concept=z))
    assert np.array_equal(clean[:, 4:], X[:, 4:])
    assert np.array_equal(split.transform(X), clean)


def test_sample_weight_is_routed_when_asked_for(data: Data) -> None:
    X, y, z = data
    weight = np.arange(len(X)) % 4 + 0.5
    expected = SPLINCE().fit(X, y, concept=z, sample_weight=weight)
    plain = make_pipeline(SPLINCE(), StandardScaler())
    plain.fit(X, y, splince__concept=z, splince__sample_weight=weight)
    assert np.array_equal(plain[0].projection_.matrix(), expected.projection_.matrix())
    with sklearn.config_context(enable_metadata_routing=True):
        asked = SPLINCE().set_fit_request(sample_weight=True, concept="gender")
        pipe = make_pipeline(asked, StandardScaler().set_fit_request(sample_weight=False))
        pipe.fit(X, y, gender=z, sample_weight=weight)
        assert np.array_equal(pipe[0].projection_.matrix(), expected.projection_.matrix())
        refused = make_pipeline(
            SPLINCE().set_fit_request(sample_weight=False),
            StandardScaler().set_fit_request(sample_weight=True),
        ).fit(X, y, concept=z, sample_weight=weight)
        unweighted = SPLINCE().fit(X, y, concept=z)
        assert np.array_equal(refused[0].projection_.matrix(), unweighted.projection_.matrix())
        with pytest.raises(UnsetMetadataPassedError, match="sample_weight"):
            make_pipeline(SPLINCE(), StandardScaler()).fit(X, y, concept=z, sample_weight=weight)


def test_transform_takes_no_metadata(data: Data) -> None:
    for kind in CLASSES:
        request = kind().get_metadata_routing()
        assert request.fit.requests["concept"] is True
        assert request.partial_fit.requests["concept"] is True
        assert not request.transform.requests
        assert list(inspect.signature(kind().transform).parameters) == ["X"]


# --- manners ------------------------------------------------------------------------------------


def test_labels_that_are_all_missing_are_named_as_such() -> None:
    X = np.arange(12.0).reshape(6, 2)
    for eraser in (LEACE(), LEACE().partial_fit(X, concept=[None] * 6)):
        with pytest.raises(SplinceError, match="'concept' was accumulated, or none of its labels"):
            eraser.fit(X, concept=np.full(6, np.nan))
        with pytest.raises(SplinceError, match="none of its labels is present"):
            eraser.partial_fit(X, concept=[None] * 6).transform(X)
