"""INLP and R-LACE alike: the map, refusals, seeds, routers, and what a fit leaves behind."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import sklearn
from numpy.typing import NDArray
from processes import script
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier

import splince_fast as sf
from splince_fast.baselines import INLP, RLACE, inlp
from splince_fast.exceptions import (
    InputError,
    LabelError,
    NotEnoughDataError,
    WholeNumbersWarning,
)


def draw(n: int = 600, d: int = 8, k: int = 2, seed: int = 0) -> tuple[NDArray[Any], ...]:
    """Rows whose means depend on a task and on a concept of k classes that goes with it."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, size=n)
    z = np.where(rng.random(n) < 0.85, y, rng.integers(0, k, size=n))
    return rng.normal(size=(n, d)) + 2.0 * np.eye(d)[z] + 1.0 * np.eye(d)[k + y] + 5.0, y, z


def test_importing_it_loads_no_scikit_learn() -> None:
    script(
        "import sys, splince_fast.baselines as b; "
        "assert not {'sklearn', 'scipy'} & set(sys.modules); "
        "assert set(b.__all__) <= set(dir(b)); b.INLP; assert 'sklearn' in sys.modules"
    )


@pytest.mark.parametrize(
    ("estimator", "k", "rank"),
    [
        *((INLP(), k, None) for k in (2, 3, 4)),
        *(
            (RLACE(rank=rank, max_steps=300, check_every=150, random_state=0), k, rank)
            for k, rank in ((2, 1), (3, 2), (2, 3))
        ),
    ],
)
def test_the_map_is_an_orthogonal_projection_about_the_training_mean(
    estimator: Any, k: int, rank: int | None
) -> None:
    X, _, z = draw(n=1500, k=k, d=9)
    mask = np.arange(1500) % 5 == 0
    eraser = estimator.fit(X, concept=z, validation=mask)
    P, left = eraser.projection_.matrix(), eraser.projection_.left
    np.testing.assert_allclose(P @ P, P, atol=1e-12)
    np.testing.assert_allclose(P, P.T, atol=1e-12)
    np.testing.assert_allclose(left.T @ left, np.eye(left.shape[1]), atol=1e-12)
    assert eraser.projection_.rank == eraser.report_.rank >= k - 1
    assert rank is None or eraser.report_.rank == rank
    mean = X[~mask].mean(axis=0)
    np.testing.assert_allclose(eraser.transform(mean[None])[0], mean, atol=1e-12)


BOTH, ROWS = (INLP, RLACE), np.arange(600)
REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], Any, str]] = [
    (INLP, {"alpha": 0}, {}, InputError, "alpha is 0"),
    (INLP, {"tol": -1}, {}, InputError, "tol is -1"),
    (INLP, {"tol": np.nan}, {}, InputError, "tol is nan"),
    (INLP, {"max_rank": 0}, {}, InputError, "max_rank is 0"),
    (INLP, {"random_state": "a"}, {}, InputError, "random_state is 'a'"),
    *((INLP, {"probe": probe}, {}, InputError, "it must be a linear classifier")
      for probe in ("svm", LinearSVC, Ridge(), 3)),
    (INLP, {"probe": DecisionTreeClassifier()}, {}, InputError, "has no coef_ after fit"),
    (INLP, {"probe": LinearDiscriminantAnalysis()}, {"sample_weight": 1.0 + ROWS}, InputError,
     "LinearDiscriminantAnalysis takes no sample_weight"),
    (RLACE, {"rank": 0}, {}, InputError, "rank is 0"),
    (RLACE, {"rank": 9}, {}, InputError, "X has only 8 features"),
    (RLACE, {"momentum": 1.0}, {}, InputError, "momentum is 1.0"),
    (RLACE, {"step_size": 0.0}, {}, InputError, "step_size is 0.0"),
    (RLACE, {"alpha": np.inf}, {}, InputError, "alpha is inf"),
    (RLACE, {"batch_size": 0}, {}, InputError, "batch_size is 0"),
    (RLACE, {"patience": 0}, {}, InputError, "patience is 0"),
    (RLACE, {"max_steps": 1.5}, {}, InputError, "max_steps is 1.5"),
    *((kind, *case) for kind in BOTH for case in (
        ({"validation_share": 1.0}, {}, InputError, "validation_share is 1.0"),
        ({"concept_from": "x"}, {}, InputError, "concept_from is 'x'"),
        ({}, {"concept": None}, InputError, "was given no concept"),
        ({}, {"concept": np.zeros(600, int)}, LabelError, r"only 1 class\(es\)"),
        ({}, {"concept": [None] * 600}, LabelError, r"only 0 class\(es\)"),
        ({}, {"concept": {"a": ROWS % 2, "b": ROWS % 2}}, LabelError, "one variable"),
        ({}, {"concept": np.linspace(0, 1, 600)}, LabelError, "concept"),
        ({}, {"validation": np.zeros(600, int)}, InputError, "one boolean per row"),
        ({}, {"validation": np.ones(600, bool)}, InputError, "all of the usable rows"),
        ({}, {"validation": draw()[2] == 1}, NotEnoughDataError, "has no training row"),
        ({}, {"validation": (draw()[2] == 1) & (ROWS < 300)}, LabelError, "hold a single class"),
        ({}, {"sample_weight": np.zeros(600)}, NotEnoughDataError, "every sample_weight is zero"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "given", "error", "match"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_bad_input_is_refused_and_nothing_is_fitted(
    kind: Any, options: dict[str, Any], given: dict[str, Any], error: type[Exception], match: str
) -> None:
    X, _, z = draw()
    eraser = kind(**options)
    with pytest.raises(error, match=match):
        eraser.fit(X, **{"concept": z, **given})
    assert not [name for name in vars(eraser) if name.endswith("_")]


def test_ctrl_c_leaves_the_estimator_unfitted(monkeypatch: pytest.MonkeyPatch) -> None:
    (X, _, z), calls, original = draw(k=3, d=9), [], inlp.fit_probe

    def interrupted(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(inlp, "fit_probe", interrupted)
    eraser = INLP(random_state=0)
    with pytest.raises(KeyboardInterrupt):
        eraser.fit(X, concept=z)
    assert len(calls) == 2
    assert not [name for name in vars(eraser) if name.endswith("_")]


@pytest.mark.parametrize("options", [None, {"max_steps": 50, "check_every": 25}])
def test_the_same_seed_gives_the_same_map_and_rows_stay_as_they_were(options: Any) -> None:
    X, _, z = draw()
    before, state = X.copy(), np.random.get_state()[1].copy()  # noqa: NPY002

    def fitted(seed: Any) -> Any:
        kind = INLP(random_state=seed) if options is None else RLACE(random_state=seed, **options)
        return kind.fit(X, concept=z).projection_.matrix()

    first, second, other = (fitted(seed) for seed in (5, np.random.default_rng(5), 6))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 1e-3  # control
    legacy = (fitted(np.random.RandomState(5)) for _ in "ab")
    np.testing.assert_array_equal(*legacy)
    np.testing.assert_array_equal(X, before)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_missing_labels_count_for_the_mean_alone() -> None:
    X, _, z = draw()
    labels = [None if i % 3 == 0 else int(c) for i, c in enumerate(z)]
    eraser = INLP(validation_share=0).fit(X, concept=labels)
    np.testing.assert_allclose(eraser.projection_.mean, X.mean(axis=0), atol=1e-12)
    assert eraser.report_.n_rows == 400


def test_whole_floats_are_classes_without_a_warning_that_they_are_numbers() -> None:
    X, _, z = draw(k=3, d=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WholeNumbersWarning)
        eraser = INLP(random_state=0).fit(X, concept=z.astype(float))
        assert eraser.classes_.tolist() == [0, 1, 2]
        with pytest.raises(WholeNumbersWarning):  # moments do read them as numbers
            sf.Moments().update(X, {"concept": z.astype(float)})


def test_pipelines_and_routers_pass_the_concept() -> None:
    X, y, z = draw()
    pipe = make_pipeline(StandardScaler(), INLP(random_state=0), LogisticRegression())
    pipe.fit(X, y, inlp__concept=z)
    alone = INLP(random_state=0).fit(StandardScaler().fit_transform(X), concept=z)
    np.testing.assert_array_equal(pipe[1].projection_.matrix(), alone.projection_.matrix())
    with pytest.raises(InputError, match="inlp__concept=z"):
        pipe.fit(X, y)
    with sklearn.config_context(enable_metadata_routing=True):
        scores = cross_validate(pipe, X, y, params={"concept": z}, cv=3)
    assert np.isfinite(scores["test_score"]).all()
