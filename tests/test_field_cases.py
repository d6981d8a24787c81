"""The cases that other tools failed in the field, C0a to C40, each with the test that names it.

A case is tested here, in a function named after it, or by the tests that `ELSEWHERE` names. The
docstring of a test says in one line how the other tool failed. C8 and C16 to C19 concern steps that
no method of the package has.
"""

from __future__ import annotations

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


# --- the table -----------------------------------------------------------------------------------

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "C0a": ("test_rare_concept_far_from_the_rest",),
    "C0b": (
        "test_covariance_is_exact_whatever_offset_order_and_block",
        "test_offset_of_ten_thousand_deviations",
    ),
    "C0c": ("test_one_row_at_a_time_costs_no_quadratic_work",),
    "C2": ("test_units_of_continuous_variables_do_not_matter", "test_units_of_x_do_not_matter"),
    "C3": ("test_the_form_of_class_labels_does_not_matter",),
    "C4": ("test_units_of_x_do_not_matter",),
    "C5": (
        "test_task_that_is_a_function_of_the_concept",
        "test_nearly_the_same_variable_is_feasible_and_costly",
        "test_max_amplification_gives_up_what_lies_above_it_and_no_more",
    ),
    "C6": (
        "test_recoded_and_redundant_columns_do_not_matter",
        "test_the_mean_stays_and_twice_is_once",
    ),
    "C7": ("test_whitened_data_are_shrunk_within_bounds",),
    "C9": ("test_no_trace_to_rounding_warns_at_any_scale",),
    "C10": ("test_statistics_equal_two_passes_over_the_rows",),
    "C11": ("test_covariance_is_exact_whatever_offset_order_and_block",),
    "C12": ("test_constant_variables_are_refused_by_name",),
    "C13": ("test_unknown_choices_are_refused_at_fit",),
    "C14": ("test_labels_of_one_dimension_are_accepted",),
    "C15": ("test_integer_labels_of_any_number_of_classes", "test_no_assert_guards_the_user"),
    "C20": ("test_files_give_back_every_bit", "test_orientation_of_the_matrix_and_the_offset"),
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
        "test_rank_deficient_features",
    ),
    "C27": ("test_intensity_equals_scikit_learn",),
    "C28": ("test_recoded_and_redundant_columns_do_not_matter",),
    "C29": ("test_covariances_of_erased_rows",),
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
        "test_bad_vector_is_named_with_its_row_group",
        "test_null_that_would_suit_another_width_is_named",
        "test_width_that_changes_between_row_groups_is_named",
    ),
    "C40": ("test_rank_deficient_features",),
}
"""Case -> the tests that reproduce it, by the names of their functions."""


@pytest.mark.parametrize("case", ELSEWHERE)
def test_case_is_reproduced_by_the_tests_that_the_table_names(case: str) -> None:
    named = definitions()
    assert [name for name in ELSEWHERE[case] if len(named.get(name, [])) != 1] == []
