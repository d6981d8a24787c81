"""The scikit-learn estimators: the same erasers behind scikit-learn's manners."""

from __future__ import annotations

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
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError, UnsetMetadataPassedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold, cross_validate
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import StandardScaler

import splince_fast as sf
from splince_fast import LEACE, SAL, SPLINCE, MeanProjection
from splince_fast.exceptions import (
    ConstantVariableError,
    InfeasibleError,
    InputError,
    LabelError,
    NonFiniteError,
    SplinceError,
)

fast = settings(max_examples=25, deadline=None)

EPS = float(np.finfo(np.float64).eps)
METHODS: dict[Any, Callable[..., sf.Projection]] = {
    SPLINCE: sf.splince, LEACE: sf.leace, SAL: sf.sal, MeanProjection: sf.mean_projection,
}  # fmt: skip
CLASSES = tuple(METHODS)
every_class = pytest.mark.parametrize("kind", CLASSES)
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


def keep(kind: Any) -> dict[str, Any]:
    return {"keep": "task"} if kind is SPLINCE else {}


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


OPTIONS: dict[Any, dict[str, Any]] = {
    SPLINCE: {"max_amplification": 50, "shrinkage": 0.1, "solver": "eigh"},
    LEACE: {"null_space": "drop", "shrinkage": "oas", "rank_tol": 1e-3},
    SAL: {"rank_tol": 0.999},
    MeanProjection: {"rank_tol": 0.999},
}


@every_class
@pytest.mark.parametrize(
    "given", ["every option", {"subsample": 0.2}, {"covariance_type": "diag"}], ids=str
)
def test_each_is_its_method(kind: Any, given: Any) -> None:
    X, y, z = make_data(2000, d=12)
    options = OPTIONS[kind] if given == "every option" else {}
    accumulation = {} if options else given
    fitted = kind(**options, **accumulation).fit(X, y, concept=z)
    labels = {"concept": z, "task": y} if kind is SPLINCE else {"concept": z}
    moments = sf.Moments(**accumulation).update(X, labels)
    expected = METHODS[kind](moments, erase="concept", **keep(kind), **options)
    assert np.array_equal(fitted.projection_.left, expected.left)
    assert np.array_equal(fitted.projection_.right, expected.right)
    assert np.array_equal(fitted.transform(X), expected(X))
    assert fitted.report_ == expected.report
    assert fitted.report_.method == kind.__name__
    assert clone(fitted).get_params() == fitted.get_params()
    if options or kind in (SPLINCE, LEACE):  # control: the parameters have an effect
        plain = kind().fit(X, y, concept=z)
        assert np.abs(plain.projection_.matrix() - fitted.projection_.matrix()).max() > 1e-6


@pytest.mark.parametrize("kind", [LEACE, SAL, MeanProjection])
def test_only_splince_looks_at_y(kind: Any, data: Data) -> None:
    X, y, z = data
    plain, given_y = kind().fit(X, concept=z), kind().fit(X, "any nonsense", concept=z)
    assert np.array_equal(plain.projection_.matrix(), given_y.projection_.matrix())
    assert given_y.kept_ is None
    assert list(given_y.moments_.variables) == ["concept"]
    assert distance(SPLINCE().fit(X, y, concept=z), SPLINCE().fit(X, y[::-1], concept=z)) > 1e-3


@every_class
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


@fast
@given(
    st.lists(st.integers(0, 120), max_size=12),
    st.sampled_from(CLASSES),
    st.booleans(),
    st.integers(0, 99),
)
def test_last_batch_smaller_than_needed_and_any_other_split(
    bounds: list[int], kind: Any, weighted: bool, seed: int
) -> None:
    """Any batch size, also of one row and of none, gives what one fit gives."""
    X, y, z = make_data(120, seed=seed)
    weight = np.random.default_rng(seed).integers(0, 3, size=120) if weighted else None
    whole = kind().fit(X, y, concept=z, sample_weight=weight)
    parts, bounds = kind(), sorted(bounds)
    for block in (slice(a, b) for a, b in zip([0, *bounds], [*bounds, 120], strict=True)):
        w = None if weight is None else weight[block]
        parts.partial_fit(X[block], y[block], concept=z[block], sample_weight=w)
    assert same(whole, parts)
    assert whole.n_samples_seen_ == parts.n_samples_seen_
    assert whole.report_.rank == parts.report_.rank
    lost = kind().fit(X[:-1], y[:-1], concept=z[:-1])
    assert weighted or not same(whole, lost)  # control: a lost row is seen


def test_fit_forgets_the_previous_fit(data: Data) -> None:
    X, y, z = data
    frame = pd.DataFrame(X, columns=list("abcdef"))
    estimator = SPLINCE().fit(frame, {"other": y}, concept={"name": z})
    estimator.fit(X[:, :4], y, concept=z)
    assert not hasattr(estimator, "feature_names_in_")
    assert estimator.n_features_in_ == 4
    assert (estimator.erased_, estimator.kept_) == (["concept"], ["task"])
    assert same(SPLINCE().fit(X[:, :4], y, concept=z), estimator)


@pytest.mark.parametrize("verb", ["fit", "partial_fit"])
@pytest.mark.parametrize("fitted", [False, True])
def test_a_failed_call_changes_nothing(fitted: bool, verb: str, data: Data) -> None:
    X, y, z = data
    estimator = SPLINCE()
    if fitted:
        estimator.fit(pd.DataFrame(X, columns=list("abcdef")), y, concept=z)
    before = vars(estimator).copy()
    state = pickle.dumps(estimator.moments_) if fitted else b""
    broken = X.copy()
    broken[3, 2] = np.nan
    failures: list[dict[str, Any]] = [
        *({"X": rows} for rows in (broken, X[:, 0], X[:5], X.astype(complex))),
        *({"concept": labels} for labels in (None, np.full(len(X), 1j), {"task": z}, {})),
        {"sample_weight": -np.ones(len(X))},
        *([{"sample_weight": np.zeros(len(X))}] if verb == "fit" else []),
    ]
    for wrong in failures:
        with warnings.catch_warnings():  # of arrays after a frame, by scikit-learn
            warnings.simplefilter("ignore", UserWarning)
            with pytest.raises(SplinceError):
                getattr(estimator, verb)(**({"X": X, "y": y, "concept": z} | wrong))
        assert vars(estimator) == before
        assert not fitted or pickle.dumps(estimator.moments_) == state


def test_errors_that_need_all_the_data_wait_until_the_projection_is_needed(data: Data) -> None:
    X, y, z = data
    one = z == 0
    estimator = SPLINCE().partial_fit(X[one], y[one], concept=z[one])
    with pytest.raises(ConstantVariableError, match="single value"):
        estimator.transform(X)
    estimator.partial_fit(X[~one], y[~one], concept=z[~one])
    order = np.argsort(~one, kind="stable")
    assert same(SPLINCE().fit(X[order], y[order], concept=z[order]), estimator)
    with pytest.raises(ConstantVariableError, match="single value"):
        SPLINCE().fit(X[one], y[one], concept=z[one])


@pytest.mark.parametrize("name", ["projection_", "report_", "n_samples_seen_"])
def test_unfitted_estimators_raise(name: str, data: Data) -> None:
    for estimator in (LEACE(), SPLINCE(shrinkage=0.5)):
        assert not hasattr(estimator, name)
        for use in (lambda e: getattr(e, name), lambda e: e.transform(data[0]),
                    lambda e: e.get_feature_names_out()):  # fmt: skip
            with pytest.raises(NotFittedError):
                use(estimator)


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


@every_class
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


@every_class
def test_the_explicit_opt_in(kind: Any, data: Data) -> None:
    X, y, z = data
    opted = kind(concept_from="y").fit(X, z)
    twin = LEACE if kind is SPLINCE else kind  # without a task SPLINCE is LEACE, and says so
    assert opted.report_.method == twin.__name__
    assert np.array_equal(opted.transform(X), twin().fit_transform(X, concept=z))
    with pytest.raises(InputError, match="given a concept, too"):
        kind(concept_from="y").fit(X, y, concept=z)
    with pytest.raises(InputError, match=r"requires y .* target y is None"):
        kind(concept_from="y").fit(X)
    with pytest.raises(InputError, match="must be None or 'y'"):
        kind(concept_from="x").fit(X, y, concept=z)


def test_several_concepts_and_tasks_from_any_container() -> None:
    rng = np.random.default_rng(5)
    X, y, z = make_data(500, d=10)
    concepts = {"gender": z, "age": rng.normal(40, 9, size=500)}
    tasks = {"job": y.astype(str), "score": rng.normal(size=500)}
    X = X + np.outer(concepts["age"] / 9, rng.normal(size=10))
    X += np.outer(tasks["score"], rng.normal(size=10))
    moments = sf.Moments().update(X, concepts | tasks)
    expected = sf.splince(moments, erase=["gender", "age"], keep=["job", "score"])
    for container in (dict, pd.DataFrame, pl.DataFrame, pa.table):
        fitted = SPLINCE().fit(X, container(tasks), concept=container(concepts))
        assert distance(fitted, expected) <= rounding(fitted)
        assert (fitted.erased_, fitted.kept_) == (list(concepts), list(tasks))
    alone = SPLINCE().fit(X, tasks, concept={"gender": z})
    assert distance(alone, expected) > 1e-3  # control: age is erased, too


def test_single_columns_are_named_by_their_role(data: Data) -> None:
    """Blocks may pass a Series of any name, an array or a matrix of one column in turn."""
    X, y, z = data
    whole = SPLINCE().fit(X, pd.Series(y, name=0), concept=pd.Series(z, name="gender"))
    mixed = SPLINCE().partial_fit(X[:50], y[:50].tolist(), concept=pl.Series(z[:50]))
    mixed.partial_fit(X[50:], y[50:, None], concept=z[50:, None])
    assert (whole.erased_, whole.kept_) == (["concept"], ["task"])
    assert same(whole, mixed)


def test_blocks_name_the_same_variables(data: Data) -> None:
    X, y, z = data
    estimator = SPLINCE().fit(X, y, concept={"a": z, "b": z % 2})
    estimator.partial_fit(X, y, concept={"b": z % 2, "a": z})  # in any order
    for task, concept, text in (
        (y, {"a": z}, r"erase 'a', 'b'.*gets 'a'"),
        ({"job": y}, {"a": z, "b": z % 2}, "keep 'task'"),
        (y, {"a": z, 1: z}, "gets 1, 'a'"),
    ):
        with pytest.raises(LabelError, match=text):
            estimator.partial_fit(X, task, concept=concept)
    assert estimator.n_samples_seen_ == 800


def test_labels_that_are_refused(data: Data) -> None:
    X, y, z = data
    missing = np.full(len(X), np.nan)
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (SPLINCE, {"same": y}, {"same": z}, LabelError, "both hold a variable 'same'"),
        (SPLINCE, None, z, InputError, r"requires y .* LEACE erases without"),
        (SPLINCE, 0 * y, z, ConstantVariableError, "'task', to be kept"),
        (SPLINCE, z, z, InfeasibleError, r"'task' while it erases 'concept'"),
        (LEACE, y, pd.DataFrame(index=range(len(X))), InputError, "holds no variable"),
        (LEACE, y, "sex", LabelError, "'concept' is 'sex', not a column"),
        (LEACE, y, missing, SplinceError, "'concept' was accumulated, or none of its labels"),
    ]
    for kind, task, concept, error, text in cases:
        with pytest.raises(error, match=text):
            kind().fit(X, task, concept=concept)
    with pytest.raises(LabelError, match="continuous"):
        LEACE().fit(X, concept=z).partial_fit(X, concept=z + 0.25)
    with pytest.raises(SplinceError, match="none of its labels is present"):
        LEACE().partial_fit(X, concept=[None] * len(X)).transform(X)


def test_rows_without_a_label_count_for_the_covariance_of_x(data: Data) -> None:
    X, _, z = data
    some = [str(v) if i % 3 else None for i, v in enumerate(z)]
    fitted, whole = LEACE().fit(X, concept=some), LEACE().fit(X, concept=z)
    assert fitted.n_samples_seen_ == len(X)
    assert np.array_equal(fitted.moments_.covariance(), whole.moments_.covariance())
    assert not same(whole, fitted)


@every_class
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
    plain = kind().fit(X, y, concept=z)
    np.testing.assert_allclose(clean, plain.transform(X), rtol=0, atol=2560 * np.finfo(dtype).eps)
    assert list(estimator.feature_names_in_) == list("abcdef")
    assert list(plain.get_feature_names_out()) == [f"x{i}" for i in range(6)]


@pytest.fixture
def moments(data: Data) -> sf.Moments:
    X, y, z = data
    return sf.Moments(joint=[("z", "half")]).update(X, {"z": z, "y": y, "half": z > 0})


def test_from_moments_is_fit_without_data(data: Data, moments: sf.Moments) -> None:
    X, y, z = data
    fitted = SPLINCE.from_moments(moments, erase="z", keep="y", shrinkage=0.25)
    assert same(SPLINCE(shrinkage=0.25).fit(X, y, concept=z), fitted)
    assert (fitted.erased_, fitted.kept_, fitted.n_features_in_) == ("z", "y", 6)
    assert fitted.get_params()["shrinkage"] == 0.25
    assert not hasattr(fitted, "feature_names_in_")
    frame = pd.DataFrame(X, columns=list("abcdef"))
    framed = LEACE.from_moments(sf.Moments().update(frame, {"z": z}), erase="z")
    assert list(framed.feature_names_in_) == list("abcdef")
    reader = SPLINCE.from_moments(moments, erase="z", keep="y", concept_from="y")
    assert reader.report_.method == "SPLINCE"  # how fit would read its y changes nothing here
    named = LEACE.from_moments(sf.Moments().update(X, {"sex": z, "s": y, "e": y}), erase="sex")
    assert [v.name for v in named.report_.variables] == ["sex"]  # no name is its characters
    joint = LEACE.from_moments(moments, erase=("z", "half"))
    alone = LEACE.from_moments(moments, erase="z")
    assert same(joint, alone)  # "half" is a function of z
    directions = np.eye(6)[:, :2]
    kept = SPLINCE.from_moments(moments, erase="z", keep=directions).projection_.matrix()
    assert np.allclose(kept @ directions, directions, rtol=0, atol=1e-12)
    workers = [LEACE().partial_fit(X[i::2], concept=z[i::2]).moments_ for i in (0, 1)]
    assert same(LEACE.from_moments(workers[0] + workers[1], erase="concept"), alone)
    before = alone.projection_.matrix()
    moments.update(X + 1, {"z": z[::-1], "y": y, "half": z > 0})
    assert (moments.n_rows, alone.n_samples_seen_) == (800, 400)
    again = LEACE.from_moments(alone.moments_, erase="z")
    assert np.array_equal(again.projection_.matrix(), before)


def test_from_moments_refuses(data: Data, moments: sf.Moments) -> None:
    X, _, z = data
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (SPLINCE, moments, {}, "keep is missing"),
        (LEACE, moments, {"keep": "y"}, "LEACE keeps nothing"),
        (LEACE, X, {}, r"Moments\(\).update"),
        (LEACE, moments, {"null_space": "erase"}, "null_space"),
        (LEACE, moments, {"kinds": {"z": "continuous"}}, "kinds determines how moments are"),
        (LEACE, moments, {"subsample": 0.5}, "subsample determines how moments are"),
        (LEACE, moments, {"covariance_type": "diag"}, "covariance_type determines how moments"),
        (LEACE, moments, {"unknown": 1}, r"LEACE takes no unknown= \(it takes erase, "),
        (LEACE, moments, {"shrinkge": 1}, "did you mean shrinkage="),
        (SPLINCE, moments, {"kep": 1}, "did you mean keep="),
    ]
    for kind, given_moments, options, text in cases:
        with pytest.raises(InputError, match=text):
            kind.from_moments(given_moments, erase="z", **options)
    fitted = LEACE.from_moments(moments, erase="z")
    with pytest.raises(InputError, match="made from moments"):
        fitted.partial_fit(X, concept={"z": z})
    assert fitted.fit(X, concept=z).partial_fit(X, concept=z).n_samples_seen_ == 800


@pytest.fixture(params=[False, True], ids=["plain", "routed"])
def routed(request: pytest.FixtureRequest) -> Iterator[bool]:
    with sklearn.config_context(enable_metadata_routing=request.param):
        yield request.param


def concept_for(routed: bool, z: Any) -> dict[str, Any]:
    """The keyword under which a router takes the concept of its step SPLINCE."""
    return {"concept" if routed else "splince__concept": z}


def pipeline() -> Any:
    return make_pipeline(SPLINCE(), StandardScaler(), LogisticRegression())


def test_first_step_of_a_pipeline(routed: bool, data: Data) -> None:
    X, y, z = data
    expected = SPLINCE().fit(X, y, concept=z)
    pipe = pipeline().fit(X, y, **concept_for(routed, z))
    assert np.array_equal(pipe[0].projection_.matrix(), expected.projection_.matrix())
    by_hand = make_pipeline(StandardScaler(), LogisticRegression()).fit(expected.transform(X), y)
    assert np.array_equal(pipe.predict(X), by_hand.predict(expected.transform(X)))
    scaled = make_pipeline(SPLINCE(), StandardScaler())
    clean = scaled.fit_transform(X, y, **concept_for(routed, z))
    assert np.allclose(clean, scaled.transform(X))
    with pytest.raises(InputError, match="never silently"):
        pipeline().fit(X, y)


def test_cross_validation_slices_columns_and_frames_but_no_mapping(
    routed: bool, data: Data
) -> None:
    X, y, z = data
    concepts = pd.DataFrame({"a": z, "b": z > 0})
    options: dict[str, Any] = {
        "cv": KFold(3), "error_score": "raise", "return_estimator": True, "return_indices": True
    }  # fmt: skip
    for concept in (z, concepts, pl.DataFrame(concepts)):
        result = cross_validate(pipeline(), X, y, params=concept_for(routed, concept), **options)
        for pipe, rows in zip(result["estimator"], result["indices"]["train"], strict=True):
            expected = SPLINCE().fit(X[rows], y[rows], concept=z[rows])
            assert same(expected, pipe[0])
            assert not same(expected, SPLINCE().fit(X, y, concept=z))
    with pytest.raises(InputError, match="400 labels but the block has 266"):
        cross_validate(pipeline(), X, y, params=concept_for(routed, {"a": z}), **options)


def test_unions_and_column_transformers(routed: bool, data: Data) -> None:
    X, y, z = data
    union = FeatureUnion([("kept", SPLINCE()), ("plain", LEACE())])
    clean = union.fit_transform(X, y, concept=z)
    expected = [SPLINCE().fit_transform(X, y, concept=z), LEACE().fit_transform(X, concept=z)]
    assert np.array_equal(clean, np.concatenate(expected, axis=1))
    assert np.array_equal(union.transform(X), clean)
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
    expected = SPLINCE().fit(X, y, concept=z, sample_weight=weight).projection_.matrix()
    plain = make_pipeline(SPLINCE(), StandardScaler())
    plain.fit(X, y, splince__concept=z, splince__sample_weight=weight)
    assert np.array_equal(plain[0].projection_.matrix(), expected)
    with sklearn.config_context(enable_metadata_routing=True):
        asked = SPLINCE().set_fit_request(sample_weight=True, concept="gender")
        pipe = make_pipeline(asked, StandardScaler().set_fit_request(sample_weight=False))
        pipe.fit(X, y, gender=z, sample_weight=weight)
        assert np.array_equal(pipe[0].projection_.matrix(), expected)
        with pytest.raises(UnsetMetadataPassedError, match="sample_weight"):
            make_pipeline(SPLINCE(), StandardScaler()).fit(X, y, concept=z, sample_weight=weight)


@every_class
def test_transform_takes_no_metadata(kind: Any) -> None:
    request = kind().get_metadata_routing()
    assert request.fit.requests["concept"] is True
    assert request.partial_fit.requests["concept"] is True
    assert not request.transform.requests
    assert list(inspect.signature(kind().transform).parameters) == ["X"]


@every_class
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_transform_refuses_what_is_not_finite(kind: Any, value: float, data: Data) -> None:
    """The check includes an eraser that is the identity."""
    X, y, z = data
    with pytest.warns(sf.exceptions.NothingErasedWarning):
        identity = LEACE().fit(np.ones_like(X), concept=z)
    for fitted in (kind().fit(X, y, concept=z), identity):
        assert fitted.transform(X[:0]).shape == (0, 6)
        for dtype in (np.float32, np.float64):
            bad = X.astype(dtype)
            bad[399, 5] = value
            with pytest.raises(NonFiniteError, match="row 399"):
                fitted.transform(bad)
