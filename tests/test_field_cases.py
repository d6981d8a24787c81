"""The cases that other tools failed in the field, C0a to C40, each with the test that names it.

A case is tested here, in a function named after it, or by the tests that `ELSEWHERE` names. The
docstring of a test says in one line how the other tool failed. C8 and C16 to C19 concern steps that
no method of the package has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from entangled import drawn, gap, normal
from naive_model import state_bytes
from named_tests import definitions
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import Moments, SplinceError

Float = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("members", [3, 20])
def test_c0a_rare_concept_is_erased_whatever_its_share(members: int, dtype: Any) -> None:
    """An absolute threshold for singular values left the whole gap between the means, silently."""
    n = 20_000
    X = normal(n, 8).astype(dtype)
    z = np.zeros(n, int)
    z[:members] = 1
    X[:members, 2] += 3.5
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    clean = P(X.astype(np.float64))
    assert gap(X.astype(np.float64), z) > 2
    # The mean of few members errs by rounding of the sums over all n rows, divided by their share.
    assert gap(clean, z) < 8 * n * EPS * 4 * (n / members) ** 0.5


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_c0b_float32_rows_far_from_zero_are_erased(offset: float) -> None:
    """Running float32 means left a residual of 2e-2 at a mean of 1e4 standard deviations."""
    X, z, _ = drawn(4000)
    X = (X + offset).astype(np.float32)
    moments = Moments(block_rows=256).update(X, {"z": z})
    wide = X.astype(np.float64)
    truth = np.cov(wide.T)
    scale = np.sqrt(np.outer(np.diag(truth), np.diag(truth)))
    assert (np.abs(moments.covariance() - truth) / scale).max() < 1e-6
    clean = sf.leace(moments, erase="z")(wide)
    # Erased rows of float64 err by the size of the offset, not by that of float32.
    assert gap(clean, z) < 64 * EPS * offset * len(X) ** 0.5


@pytest.mark.parametrize("method", [sf.leace, sf.sal, sf.mean_projection])
def test_c1_integers_of_one_dimension_are_classes(method: Any) -> None:
    """Labels 0, 1, 2 in one column were one number: rank 1, and the concept stayed readable."""
    z = np.arange(300) % 3
    X = normal(300, 5) + np.eye(3, 5)[z]
    P = method(Moments().update(X, {"z": z}), erase="z")
    assert P.rank == 2
    assert gap(P(X), z, 3) < 1e-12
    as_number = Moments(kinds={"z": "continuous"}).update(X, {"z": z})
    one = sf.leace(as_number, erase="z")
    assert one.rank == 1
    assert gap(one(X), z, 3) > 0.05, "the control: one number is not the classes"


@pytest.mark.parametrize("scale", [1e-12, 5e-4, 1.0, 1e12])
def test_c4_small_variances_are_no_zero_variances(scale: float) -> None:
    """An absolute cut of eigenvalues at 1e-6 mapped small data to P = 0: everything deleted."""
    X, z, y = drawn()
    expected = sf.splince(Moments().update(X, {"z": z, "y": y}), erase="z", keep="y").matrix()
    found = sf.splince(Moments().update(scale * X, {"z": z, "y": y}), erase="z", keep="y")
    np.testing.assert_allclose(found.matrix(), expected, rtol=0, atol=1e-10)
    assert found.rank == 1


def test_c6_columns_of_unlike_means_are_erased_and_features_keep_theirs() -> None:
    """Centring several sensitive columns by one common mean left a correlation of 0.76."""
    rng = np.random.default_rng(0)
    sensitive = np.column_stack([rng.integers(0, 2, 500), rng.normal(40, 9, 500)])
    X = normal(500, 5) + sensitive @ rng.normal(size=(2, 5)) / 10 + 6
    P = sf.leace(Moments().update(X, {"s": sensitive.astype(float)}), erase="s")
    clean = P(X)
    both = np.corrcoef(clean.T, sensitive.T)[:5, 5:]
    assert np.abs(both).max() < 1e-12
    np.testing.assert_allclose(clean.mean(axis=0), X.mean(axis=0), rtol=1e-12)


def test_c9_a_map_that_erases_nothing_is_the_identity_and_not_nan() -> None:
    """With nothing to erase, a correction of the trace divided zero by zero."""
    X = np.vstack([normal(50, 4), normal(50, 4)])
    z = np.repeat([0, 1], 50)  # equal rows in both classes
    with pytest.warns(sf.NothingErasedWarning):
        P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    np.testing.assert_array_equal(P(X), X)
    np.testing.assert_array_equal(P.matrix(), np.eye(4))


def test_c10_half_precision_rows_overflow_no_statistic() -> None:
    """Statistics in the dtype of float16 rows were infinite after a few batches."""
    X = (normal(3000, 4) * 100 + 300).astype(np.float16)
    z = np.arange(3000) % 2
    moments = Moments(block_rows=128)
    for start in range(0, 3000, 100):
        moments.update(X[start : start + 100], {"z": z[start : start + 100]})
    truth = np.cov(X.astype(np.float64).T)
    sizes = np.sqrt(np.outer(np.diag(truth), np.diag(truth)))
    assert (np.abs(moments.covariance() - truth) / sizes).max() < 1e-6
    assert np.isfinite(sf.leace(moments, erase="z")(X).astype(np.float64)).all()


@pytest.mark.parametrize("value", [0, 7])
def test_c12_a_constant_task_is_named(value: int) -> None:
    """A task of a single value gave 0/0: a projection of NaN."""
    X, z, _ = drawn()
    moments = Moments().update(X, {"z": z, "job": np.full(len(X), value)})
    with pytest.raises(sf.ConstantVariableError, match="job"):
        sf.splince(moments, erase="z", keep="job")


def test_c20_saved_bias_is_applied_as_it_was(tmp_path: Path) -> None:
    """A bias stored as the mean was applied as an additive offset: P mean was left in the rows."""
    X, z, _ = drawn()
    X += 100
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    P.save(tmp_path / "eraser.safetensors")
    np.testing.assert_array_equal(sf.Projection.load(tmp_path / "eraser.safetensors")(X), P(X))
    np.testing.assert_allclose(X @ P.matrix().T + P.offset, P(X), rtol=1e-12)
    np.testing.assert_allclose(P.mean - P.matrix() @ P.mean, P.offset, atol=1e-11)
    np.testing.assert_allclose(P(P.mean[None, :])[0], P.mean, rtol=1e-13)


def test_c29_groups_beyond_two_are_all_guarded() -> None:
    """Gaps computed from the first two groups hid the gap of the third."""
    z = np.arange(600) % 5
    X = normal(600, 7) + np.eye(5, 7)[z] * (z == 4)[:, None] * 3
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    assert gap(X, z, 5) > 1
    assert gap(clean, z, 5) < 1e-12


def test_c31_rounding_left_in_erased_rows_is_below_a_relative_cut() -> None:
    """Least squares without a cut reads the concept off the rounding of erased rows."""
    X, z, _ = drawn(300, 8)
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    centred, target = clean - clean.mean(axis=0), z - z.mean()

    def explained(cut: float) -> float:
        coefficients = np.linalg.lstsq(centred, target, rcond=cut)[0]
        return 1 - float(((target - centred @ coefficients) ** 2).sum() / (target**2).sum())

    assert abs(explained(1e-6)) < 1e-10


def test_c32_a_thousand_million_rows_by_merging() -> None:
    """Counts in float32 stop at 2^24 rows of a class; here they are integers throughout."""
    X, z = normal(1000, 6) + 5, np.arange(1000) % 4
    part = Moments().update(X, {"z": z, "y": X[:, 0] + X[:, 1]})
    total, power, left = Moments(), part, 10**6
    while left:
        if left & 1:
            total = total + power
        power, left = power + power, left >> 1
    assert total.n_rows == 10**9
    assert total.class_counts("z") == dict.fromkeys(range(4), 250_000_000)
    np.testing.assert_allclose(total.mean, part.mean, rtol=1e-14)
    np.testing.assert_allclose(total.covariance(ddof=0), part.covariance(ddof=0), rtol=1e-12)
    a, b = (sf.splince(m, erase="z", keep="y").matrix() for m in (total, part))
    np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("axis", ["rows", "features"])
def test_c39_lazy_rows_are_refused_or_give_the_numbers_in_memory(axis: str) -> None:
    """Chunks of unknown size, or along the features, failed with errors from inside."""
    array = pytest.importorskip("dask.array")
    X, z, _ = drawn(200, 6)
    lazy = array.from_array(X, chunks=(50, 6) if axis == "rows" else (200, 3))
    if axis == "rows":
        lazy = lazy[array.from_array(np.ones(200, bool), chunks=50)]  # sizes are unknown now
    try:
        moments = Moments().update(lazy, {"z": z})
    except SplinceError:
        return
    assert state_bytes(moments) == state_bytes(Moments().update(X, {"z": z}))


def test_c40_float32_rows_of_low_rank_are_solved_in_float64() -> None:
    """Eigenvalues of a float32 matrix of low rank did not converge on a GPU."""
    rng = np.random.default_rng(0)
    z = np.arange(300) % 2
    X = ((rng.normal(size=(300, 5)) + z[:, None]) @ rng.normal(size=(5, 60))).astype(np.float32)
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    assert P.left.dtype == P.right.dtype == np.float64
    wide = X.astype(np.float64)
    # Residual of a solve, times the gap that was there: 8 d eps |P|^2, and the sums over n rows.
    size = float(np.linalg.norm(P.matrix(), 2)) ** 2
    assert gap(P(wide), z) < (8 * 60 * size + 16 * 300) * EPS * float(np.abs(wide).max())
    assert gap(wide, z) > 0.1


# --- the table -----------------------------------------------------------------------------------

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "C0c": ("test_one_row_at_a_time_costs_no_quadratic_work",),
    "C2": ("test_units_of_continuous_variables_do_not_matter", "test_units_of_x_do_not_matter"),
    "C3": ("test_the_form_of_class_labels_does_not_matter",),
    "C5": (
        "test_task_that_is_a_function_of_the_concept",
        "test_nearly_the_same_variable_is_feasible_and_costly",
        "test_max_amplification_gives_up_what_lies_above_it_and_no_more",
    ),
    "C7": ("test_whitened_data_are_shrunk_within_bounds",),
    "C11": ("test_covariance_is_exact_whatever_offset_order_and_block",),
    "C13": ("test_unknown_choices_are_refused_at_fit",),
    "C14": ("test_labels_of_one_dimension_are_accepted",),
    "C15": ("test_integer_labels_of_any_number_of_classes", "test_no_assert_guards_the_user"),
    "C21": ("test_orientation_of_the_matrix_and_the_offset",),
    "C22": ("test_last_batch_smaller_than_needed_and_any_other_split",),
    "C23": (
        "test_classes_absent_from_the_first_block_or_from_one_worker",
        "test_classes_absent_from_the_first_batch_or_from_one_worker",
    ),
    "C24": ("test_class_present_only_in_the_test_data",),
    "C25": ("test_missing_values_are_named_and_missing_labels_are_used",),
    "C26": (
        "test_constant_data_erase_nothing_and_say_so",
        "test_constant_features_are_left_alone",
    ),
    "C27": ("test_intensity_equals_scikit_learn",),
    "C28": ("test_recoded_and_redundant_columns_do_not_matter",),
    "C30": ("test_the_probe_does_not_depend_on_units",),
    "C33": ("test_a_cascade_must_be_refitted_and_then_equals_the_joint_eraser",),
    "C34": ("test_a_name_is_not_its_characters",),
    "C35": (
        "test_first_step_of_a_pipeline",
        "test_cross_validation_slices_the_concept",
        "test_grid_search_over_shrinkage",
        "test_feature_union",
        "test_column_transformer",
        "test_transform_takes_no_metadata",
    ),
    "C36": ("test_green_suite_that_ran_one_check",),
    "C37": ("test_threads_of_blas_are_left_as_they_were",),
    "C38": (
        "test_vectors_are_not_copied",
        "test_offset_of_a_slice_matters",
        "test_bad_vector_is_named_with_its_row_group",
        "test_null_that_would_suit_another_width_is_named",
        "test_width_that_changes_between_row_groups_is_named",
    ),
}
"""Case -> the tests that reproduce it, by the names of their functions."""


@pytest.mark.parametrize("case", ELSEWHERE)
def test_case_is_reproduced_by_the_tests_that_the_table_names(case: str) -> None:
    named = definitions()
    assert [name for name in ELSEWHERE[case] if len(named.get(name, [])) != 1] == []
