"""The package loads its members when they are touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from baseline_data import draw
from processes import script

from splince_fast.baselines import INLP, RLACE
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError


def test_importing_it_loads_no_scikit_learn() -> None:
    code = (
        "import sys, splince_fast.baselines as b; "
        "assert not {'sklearn', 'scipy'} & set(sys.modules); "
        "assert set(b.__all__) <= set(dir(b)); b.INLP; assert 'sklearn' in sys.modules"
    )
    script(code)


def test_separate_validation_rows_have_weight_1() -> None:
    data = draw(n=200)
    rows = np.arange(200)
    train = rows < 150
    options = {"concept": data.z[train], "sample_weight": 1.0 + rows[train] % 3}
    validation = (data.X[~train], data.z[~train])
    report = INLP(random_state=0).fit(data.X[train], **options, validation=validation).report_
    assert report.majority == np.bincount(data.z[~train]).max() / 50


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
    data = draw(n=1500, k=k, d=9)
    mask = np.arange(1500) % 5 == 0
    eraser = estimator.fit(data.X, concept=data.z, validation=mask)
    P, left = eraser.projection_.matrix(), eraser.projection_.left
    np.testing.assert_allclose(P @ P, P, atol=1e-12)
    np.testing.assert_allclose(P, P.T, atol=1e-12)
    np.testing.assert_allclose(left.T @ left, np.eye(left.shape[1]), atol=1e-12)
    assert eraser.projection_.rank == eraser.report_.rank >= k - 1
    assert rank is None or eraser.report_.rank == rank
    mean = data.X[~mask].mean(axis=0)
    np.testing.assert_allclose(eraser.transform(mean[None])[0], mean, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options", "given", "error", "match"),
    [
        (INLP, {"alpha": 0}, {}, InputError, "alpha is 0"),
        (INLP, {"tol": -1}, {}, InputError, "tol is -1"),
        (INLP, {"max_rank": 0}, {}, InputError, "max_rank is 0"),
        (INLP, {"validation_share": 1.0}, {}, InputError, "validation_share is 1.0"),
        (INLP, {"concept_from": "x"}, {}, InputError, "concept_from is 'x'"),
        (INLP, {"by_task": True, "concept_from": "y"}, {}, InputError, "by_task needs a task"),
        (INLP, {"by_task": True}, {}, InputError, "requires y to be passed"),
        (INLP, {}, {"concept": {"a": [0, 1] * 300, "b": [0, 1] * 300}}, LabelError, "one variable"),
        (INLP, {}, {"concept": np.linspace(0, 1, 600)}, LabelError, "concept"),
        (INLP, {}, {"validation": np.zeros(600, int)}, InputError, "one boolean per row"),
        (INLP, {}, {"validation": np.ones(600, bool)}, InputError, "all of the usable rows"),
        (
            INLP,
            {},
            {"sample_weight": np.zeros(600)},
            NotEnoughDataError,
            "every sample_weight is zero",
        ),
        (RLACE, {"rank": 0}, {}, InputError, "rank is 0"),
        (RLACE, {"rank": 9}, {}, InputError, "X has only 8 features"),
        (RLACE, {"momentum": 1.0}, {}, InputError, "momentum is 1.0"),
        (RLACE, {"step_size": 0.0}, {}, InputError, "step_size is 0.0"),
        (RLACE, {"batch_size": 0}, {}, InputError, "batch_size is 0"),
        (RLACE, {"patience": 0}, {}, InputError, "patience is 0"),
        (RLACE, {"max_steps": 1.5}, {}, InputError, "max_steps is 1.5"),
        (INLP, {}, {"concept": None}, InputError, "was given no concept"),
        (RLACE, {}, {"concept": None}, InputError, "was given no concept"),
        (INLP, {}, {"concept": np.zeros(600, int)}, LabelError, "only one class"),
        (RLACE, {}, {"concept": np.zeros(600, int)}, LabelError, "only one class"),
    ],
)
def test_bad_input_is_refused_before_anything_is_fitted(
    kind: Any, options: dict[str, Any], given: dict[str, Any], error: type[Exception], match: str
) -> None:
    data = draw()
    eraser = kind(**options)
    with pytest.raises(error, match=match):
        eraser.fit(data.X, **{"concept": data.z, **given})
    assert not hasattr(eraser, "n_features_in_")


@pytest.mark.parametrize("options", [None, {"max_steps": 50, "check_every": 25}])
def test_the_same_seed_gives_the_same_map_and_rows_stay_as_they_were(options: Any) -> None:
    data = draw()
    X, before = data.X, data.X.copy()
    state = np.random.get_state()[1].copy()  # noqa: NPY002

    def fitted(seed: int) -> Any:
        kind = INLP(random_state=seed) if options is None else RLACE(random_state=seed, **options)
        return kind.fit(X, concept=data.z).projection_.matrix()

    first, second, other = (fitted(seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 1e-3  # control
    np.testing.assert_array_equal(X, before)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002
