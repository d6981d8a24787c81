"""Concept strength: canonical correlations, their chance level and p-values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

import splince_fast as sf
from splince_fast.strength import ConceptStrength, concept_strength, p_value

Float = NDArray[np.float64]

# Every test of uniformity and of rates is done on draws that are fixed; had they been drawn
# afresh, a right implementation would fail each of them with this probability.
FALSE_ALARM = 1e-4


def strength(X: Any, z: Any, weight: Any = None, **kinds: str) -> ConceptStrength:
    moments = sf.Moments(kinds=kinds).update(X, {"z": z}, sample_weight=weight)
    return concept_strength(moments, "z")


# --- the naive twin: bases by singular value decompositions of the data --------------------------


def indicators(z: Any) -> Float:
    """0/1 columns of the classes; the rows without a label at their means."""
    labels = np.array(["" if v is None else f"c{v}" for v in z])
    classes = np.unique(labels[labels != ""])
    columns = (labels[:, None] == classes).astype(np.float64)
    columns[labels == ""] = columns[labels != ""].mean(axis=0)
    return columns


def basis(columns: Float, weight: Float | None = None) -> Float:
    """Orthonormal basis of the columns, centred and scaled, as rows of multiplicity `weight`."""
    weight = np.ones(len(columns)) if weight is None else weight
    centred = columns - weight @ columns / weight.sum()
    rows = np.sqrt(weight)[:, None] * centred
    size = np.linalg.norm(rows, axis=0)
    varies = size > 1e-12 * np.sqrt(len(columns)) * np.abs(columns).max(axis=0)
    u, s, _ = np.linalg.svd(rows[:, varies] / size[varies], full_matrices=False)
    return np.asarray(u[:, s > 1e-9])


def twin(X: Float, columns: Float, weight: Float | None = None) -> Float:
    """Canonical correlations: cosines of the angles between the two centred column spaces."""
    product = basis(X, weight).T @ basis(columns, weight)
    return np.asarray(np.linalg.svd(product, compute_uv=False))


# Errors of the moments, of a few n eps, are amplified by the inverse covariance, whose condition
# number is below 1e4 in the problems here; 1e-9 holds for n up to 1e3, and is nothing statistical.
CLOSE = 1e-9


@given(
    n=st.integers(8, 200),
    d=st.integers(1, 6),
    kind=st.sampled_from(["binary", "classes", "gaps", "column", "columns", "collinear"]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_correlations_equal_those_of_the_data(
    n: int, d: int, kind: str, weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)) + 3.0
    weight = rng.integers(1, 4, n).astype(np.float64) if weighted else None
    z: Any
    if kind in ("binary", "classes", "gaps"):
        z = rng.integers(0, 2 if kind == "binary" else 4, n)
        z[:2] = [0, 1]
        columns = indicators(z)
        if kind == "gaps":
            z = [None if i > 3 and rng.random() < 0.3 else int(v) for i, v in enumerate(z)]
            columns = indicators(z)
            labelled = np.array([v is not None for v in z])
            if weight is not None:  # the mean that stands for a missing label is weighted, too
                known = columns[labelled]
                columns[~labelled] = weight[labelled] @ known / weight[labelled].sum()
    else:
        z = columns = 1e3 + 5.0 * rng.normal(size=(n, 1 if kind == "column" else 2))
        if kind == "collinear":
            z = columns = np.column_stack([z, z @ [1.0, 1 / 3], np.full(n, 0.1)])
    found = strength(X, z, weight)
    expected = twin(X, columns, weight)
    assert (found.rank_x, found.rank_z) == (basis(X).shape[1], basis(columns).shape[1])
    # Near 0 a correlation is the root of a rounding error of the products.
    np.testing.assert_allclose(found.correlations, expected, rtol=0, atol=CLOSE)
    assert found.pillai == pytest.approx(float(np.sum(expected**2)), abs=CLOSE)
    assert found.n == (n if weight is None else weight.sum())


# --- the exact statements, against every permutation ---------------------------------------------


def tiny_problems() -> list[tuple[str, Float, Any]]:
    """x with outliers, so that leverages are far from equal, and few rows of every kind of z."""
    rng = np.random.default_rng(5)
    problems: list[tuple[str, Float, Any]] = []
    for n, d in [(4, 1), (5, 2), (6, 1), (6, 2), (6, 4)]:
        X = rng.standard_t(1, size=(n, d))
        problems += [
            (f"balanced-{n}-{d}", X, [i % 2 for i in range(n)]),
            (f"rare-{n}-{d}", X, [int(i == 0) for i in range(n)]),
            (f"column-{n}-{d}", X, rng.standard_t(1, size=(n, 1))),
        ]
        if n == 6:
            problems += [
                (f"three-{n}-{d}", X, [0, 0, 0, 1, 1, 2]),
                (f"gaps-{n}-{d}", X, [0, 0, 0, 1, None, None]),
                (f"columns-{n}-{d}", X, rng.standard_t(1, size=(n, 3))),
            ]
    return problems


TINY = [pytest.param(X, z, id=name) for name, X, z in tiny_problems()]


def all_traces(X: Float, z: Any) -> Float:
    """V of all n! permutations, the identity first."""
    h, k = (u @ u.T for u in (basis(X), basis(indicators(z) if isinstance(z, list) else z)))
    every = itertools.permutations(range(len(X)))
    return np.array([np.sum(h * k[np.ix_(order, order)]) for order in every])


# The products and sums behind V are of numbers below 1, for at most 720 permutations of 36 terms;
# t-distributed x has condition numbers up to some 1e3, which the moments square.
EXACT = 1e-9


@pytest.mark.parametrize(("X", "z"), TINY)
def test_chance_is_the_mean_over_all_permutations(X: Float, z: Any) -> None:
    traces = all_traces(X, z)
    found = strength(X, z)
    assert found.pillai == pytest.approx(traces[0], abs=EXACT)
    assert found.chance == pytest.approx(traces.mean(), abs=EXACT)
    # A control: with n instead of n - 1 the mean would be another one.
    assert abs(found.rank_x * found.rank_z / found.n - traces.mean()) > 1e-3
    # R^2 is linear in V, and has the mean 0.
    rest = found.n - 1 - found.rank_x
    r2 = 1 - (1 - traces / found.rank_z) * (found.n - 1) / rest
    assert found.r2 == pytest.approx(r2[0], abs=10 * EXACT)
    assert r2.mean() == pytest.approx(0.0, abs=10 * EXACT)


@given(
    n=st.integers(4, 60), p=st.integers(1, 58), q=st.integers(1, 58), where=st.floats(0.001, 0.999)
)
def test_p_value_is_a_distribution_on_what_v_can_reach(
    n: int, p: int, q: int, where: float
) -> None:
    p, q = min(p, n - 2), min(q, n - 2)
    lowest, highest = max(0, p + q - (n - 1)), min(p, q)
    width = highest - lowest
    assert p_value(lowest, n, p, q) == 1.0
    assert p_value(highest, n, p, q) == 0.0
    near, far = lowest + where * width, lowest + (where + 0.001) * width
    assert 0.0 <= p_value(far, n, p, q) <= p_value(near, n, p, q) <= 1.0
    # Symmetric in x and z, and the complements of two subspaces meet as the subspaces do.
    assert p_value(near, n, p, q) == pytest.approx(p_value(near, n, q, p), abs=1e-9)


def test_p_value_of_one_column_is_that_of_the_f_test() -> None:
    rng = np.random.default_rng(3)
    for n, d in [(20, 3), (50, 7), (12, 1)]:
        X, z = rng.normal(size=(n, d)), rng.normal(size=(n, 1))
        found = strength(X, z)
        rest = n - 1 - d
        f = found.pillai / d / ((1 - found.pillai) / rest)
        assert found.p_value == pytest.approx(float(stats.f.sf(f, d, rest)), abs=1e-9)


# --- chance: p-values are uniform, and traces are found ------------------------------------------


def p_values(n: int, d: int, k: int, draws: int, seed: int, signal: float = 0.0) -> Float:
    """p-values of Gaussian rows with the distance `signal` of classes; k = 1 is a single column."""
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(draws):
        z = rng.standard_t(2, size=(n, 1)) if k == 1 else rng.permutation(np.arange(n) % k)
        X = rng.normal(size=(n, d))
        X[:, 0] += signal * z.ravel()
        values.append(strength(X, z).p_value)
    return np.array(values)


@pytest.mark.parametrize(("n", "d", "k"), [(40, 10, 2), (30, 4, 1), (60, 1, 4), (80, 12, 28)])
def test_p_values_are_uniform_under_the_null(n: int, d: int, k: int) -> None:
    values = p_values(n, d, k, 400, seed=n)
    assert stats.kstest(values, "uniform").pvalue > FALSE_ALARM
    assert stats.binomtest(int(np.sum(values < 0.05)), len(values), 0.05).pvalue > FALSE_ALARM


def test_control_a_signal_gives_small_p_values() -> None:
    assert np.mean(p_values(40, 10, 2, 100, seed=0, signal=2.0) < 0.05) > 0.9


def test_control_a_wrong_rank_is_caught_by_the_test_of_uniformity() -> None:
    rng = np.random.default_rng(1)
    traces = [strength(rng.normal(size=(40, 10)), np.arange(40) % 2).pillai for _ in range(400)]
    for wrong in ((40, 8, 1), (44, 10, 1)):
        values = [p_value(trace, *wrong) for trace in traces]
        assert stats.kstest(values, "uniform").pvalue < FALSE_ALARM


@pytest.mark.parametrize(("p", "q", "n"), [(3, 2, 10), (5, 5, 10), (10, 5, 30), (10, 4, 12)])
def test_f_approximation_is_good_in_the_tail(p: int, q: int, n: int) -> None:
    """V of random subspaces, which is that of Gaussian x, against levels of 5 and 1 %."""
    rng = np.random.default_rng(0)
    draws = 20000
    bases = np.linalg.qr(rng.normal(size=(draws, n - 1, p)))[0]
    traces = np.sum(bases[:, :q] ** 2, axis=(1, 2))
    values = np.array([p_value(trace, n, p, q) for trace in traces])
    for level in (0.05, 0.01):
        # Within a fifth of the level, as measured, and 4 deviations of the rate.
        slack = 0.2 * level + 4 * (level / draws) ** 0.5
        assert abs(np.mean(values <= level) - level) < slack


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_erased_is_told_from_never_there(dtype: Any) -> None:
    rng = np.random.default_rng(4)
    labels = {"z": rng.integers(0, 3, 2000), "absent": rng.integers(0, 3, 2000)}
    X = (rng.normal(size=(2000, 20)) + np.eye(20)[labels["z"]]).astype(dtype)
    moments = sf.Moments().update(X, labels)
    assert "a linear association" in concept_strength(moments, "z").conclusion
    erased = sf.Moments().update(sf.leace(moments, erase="z")(X), labels)
    after = concept_strength(erased, "z")
    assert "less association with 'z' than random labels have" in after.conclusion
    # The rounding of the erased rows is left, beside directions of size one.
    assert after.pillai < (100 * np.finfo(dtype).eps) ** 2 * 2000
    assert "no linear association" in concept_strength(erased, "absent").conclusion


# --- invariance ----------------------------------------------------------------------------------


def same(a: ConceptStrength, b: ConceptStrength, atol: float = CLOSE) -> None:
    assert (a.n, a.rank_x, a.rank_z) == (b.n, b.rank_x, b.rank_z)
    np.testing.assert_allclose(a.correlations, b.correlations, rtol=0, atol=atol)
    # p-values move by the density, below 1e2 here, times the change of V.
    figures = [(s.pillai, s.chance, s.r2, s.p_value) for s in (a, b)]
    np.testing.assert_allclose(*figures, rtol=0, atol=100 * atol)


def example() -> tuple[Float, NDArray[np.int64]]:
    rng = np.random.default_rng(6)
    z = rng.integers(0, 3, 200)
    return rng.normal(size=(200, 6)) + 0.2 * z[:, None], z


def test_affine_maps_of_x_and_codes_of_the_concept_change_nothing() -> None:
    X, z = example()
    rng = np.random.default_rng(0)
    cell = sf.Moments(joint=[("a", "b")]).update(X, {"a": z, "b": np.arange(200) % 2})
    joint = concept_strength(cell, ("a", "b"))
    assert joint.rank_z == 5
    same(joint, strength(X, 2 * z + np.arange(200) % 2))
    reference = strength(X, z)
    for rows in (
        X @ rng.normal(size=(6, 6)) + 50.0,
        X * 10.0 ** np.array([-30, -9, 0, 3, 9, 30]),
        np.column_stack([X, X @ rng.normal(size=(6, 4))]),
        np.column_stack([X * 1e-30, X[:, :2] - 1, np.full(200, 0.1)]),
        np.column_stack([X, X[:, 0] * 1e-25 + X[:, 1] * 3e-25]),
    ):
        same(reference, strength(rows, z))
    for codes in (np.array(["c", "a", "b"])[z], np.eye(3)[z]):
        same(reference, strength(X, codes))
    same(strength(X, np.where(z == 1, 7.0, -3.0)), strength(X, z == 1))
    columns = rng.normal(size=(200, 3))
    same(strength(X, columns), strength(X, columns @ rng.normal(size=(3, 3)) - 1e3), atol=1e-7)
    same(strength(X, columns[:, :2]), strength(X, columns[:, [0, 1, 1, 0]] * [1, 1e-9, 5, 1e9]))


def test_a_weight_of_two_is_the_row_twice_and_scale_is_the_sample_size() -> None:
    X, z = example()
    weight = np.where(np.arange(200) < 70, 2.0, 1.0)
    doubled = strength(X, z, weight)
    same(doubled, strength(np.vstack([X, X[:70]]), np.append(z, z[:70])))
    effective = weight.sum() ** 2 / np.sum(weight**2)
    scaled = strength(X, z, weight * effective / weight.sum())
    assert scaled.n == round(effective) < doubled.n
    np.testing.assert_allclose(scaled.correlations, doubled.correlations, rtol=0, atol=CLOSE)
    assert scaled.p_value > doubled.p_value


# --- where it gets difficult ---------------------------------------------------------------------


def test_a_rare_class_does_not_count_twice() -> None:
    """The common class's share rounds to within eps of 1; the rank of two classes stays 1."""
    rng = np.random.default_rng(0)
    X, z = rng.normal(size=(20000, 3)), np.zeros(20000, int)
    z[[5, 77]] = 1
    found = strength(X, z)
    assert found.rank_z == 1
    assert found.pillai == pytest.approx(float(np.sum(twin(X, indicators(z)) ** 2)), abs=CLOSE)


@pytest.mark.parametrize(("n", "d"), [(10, 40), (10, 9), (11, 10), (2, 1)])
def test_interpolation_says_nothing(n: int, d: int) -> None:
    X = np.random.default_rng(0).normal(size=(n, d))
    found = strength(X, np.arange(n) % 2)
    assert found.rank_x == min(n - 1, d)
    assert found.correlations == pytest.approx((1.0,), abs=1e-6)
    assert (found.p_value, found.chance, found.r2) == (1.0, 1.0, None)
    assert "no conclusion about 'z'" in found.conclusion
    of_every_row = strength(X, np.arange(n))  # a class for every row
    assert (of_every_row.rank_z, of_every_row.r2, of_every_row.p_value) == (n - 1, None, 1.0)


def test_interpolation_is_seen_in_what_a_removal_leaves() -> None:
    """Rounding of the whole fills the null space of the few rows that stay."""
    rng = np.random.default_rng(0)
    X, z = 1e3 * rng.normal(size=(3000, 20)), rng.integers(0, 2, 3000)
    few = rng.normal(size=(6, 20))
    part = sf.Moments().update(X, {"z": z})
    rest = (part + sf.Moments().update(few, {"z": [0, 1, 0, 1, 0, 1]})) - part
    found = concept_strength(rest, "z")
    assert (found.n, found.rank_x, found.r2, found.p_value) == (6, 5, None, 1.0)


def test_constant_x_has_no_trace() -> None:
    found = strength(np.full((20, 3), 0.1), np.arange(20) % 2)
    assert (found.correlations, found.pillai, found.p_value) == ((), 0.0, 1.0)
    assert found.conclusion == "no linear association with 'z': x is constant"


def test_float32_rows_give_the_figures_of_float64() -> None:
    rng = np.random.default_rng(9)
    z = rng.integers(0, 5, 3000)
    X = (rng.normal(size=(3000, 32)) + 20.0 + 0.1 * z[:, None]).astype(np.float32)
    # Products of 3,000 rows in float32, added up with errors of 6e-8 sqrt(3000) at most.
    same(strength(X, z), strength(X.astype(np.float64), z), atol=4e-6)


def test_chance_is_not_moved_by_what_varies_at_the_rounding_level() -> None:
    """Directions left out are left out whatever the labels, or their choice would be a search."""
    rng = np.random.default_rng(10)
    clear = rng.normal(size=(300, 5))
    noise = rng.normal(size=(300, 60))
    X = np.hstack([clear, clear @ rng.normal(size=(5, 60)) + 1e-4 * noise]).astype(np.float32)
    found = strength(X, np.arange(300) % 2)
    assert found.rank_x == 5
    scaled = X.astype(np.float64) - X.mean(axis=0, dtype=np.float64)
    u = np.linalg.svd(scaled / scaled.std(axis=0), full_matrices=False)[0][:, :5]
    expected = float(np.sum((u.T @ basis(indicators(np.arange(300) % 2))) ** 2))
    # Directions with eigenvalues of 1e-8 turn the others by as much; float32 sums by 1e-6.
    assert found.pillai == pytest.approx(expected, abs=1e-5)


# --- what it refuses, and how it looks -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.WholeNumbersWarning")
def test_errors_are_typed_and_say_what_to_do() -> None:
    X, z = example()
    labels = {
        "z": z,
        "flat": np.zeros(200, int),
        "level": np.full(200, 0.1),
    }
    moments = sf.Moments().update(X, labels)
    with pytest.raises(sf.exceptions.InputError, match="update"):
        concept_strength(X, "z")  # type: ignore[arg-type]
    with pytest.raises(sf.exceptions.UnknownVariableError, match="'w'"):
        concept_strength(moments, "w")
    with pytest.raises(sf.exceptions.UnknownVariableError):
        concept_strength(moments, ["z"])  # type: ignore[arg-type]
    for name in ("flat", "level"):
        with pytest.raises(sf.exceptions.ConstantVariableError, match="single value"):
            concept_strength(moments, name)
    part = sf.Moments().update(X, {"z": z, "w": z.astype(float)})
    emptied = (sf.Moments().update(X) + part) - part
    for name in ("z", "w"):
        with pytest.raises(sf.exceptions.ConstantVariableError, match="no label"):
            concept_strength(emptied, name)
    with pytest.raises(sf.exceptions.NotEnoughDataError):
        concept_strength(sf.Moments(), "z")


def test_it_prints_itself_and_becomes_json() -> None:
    X, z = example()
    moments = sf.Moments().update(X, {"<b>": z})
    found = concept_strength(moments, "<b>")
    text = str(found)
    assert text.splitlines()[0] == found.conclusion
    assert f"{found.pillai:.4g}" in text
    assert "<b>" not in found._repr_html_()
    assert "&lt;b&gt;" in found._repr_html_()
    values = json.loads(json.dumps(found.to_dict()))
    conclusion = values.pop("conclusion")
    assert conclusion == found.conclusion
    assert ConceptStrength(**{**values, "correlations": tuple(values["correlations"])}) == found
    with pytest.raises(AttributeError):
        found.n = 3  # type: ignore[misc]


# --- real embeddings -----------------------------------------------------------------------------


def test_gender_of_professions_is_there_and_shuffled_gender_is_not(
    real_data: Callable[[str], Path],
) -> None:
    folder = real_data("bug_profession_gender")
    X, z = np.load(folder / "X.npy"), np.load(folder / "z.npy")
    labels = {"gender": z, "shuffled": np.random.default_rng(0).permutation(z)}
    moments = sf.Moments().update(X, labels)
    gender, shuffled = (concept_strength(moments, name) for name in labels)
    assert gender.correlations[0] > 0.8
    assert gender.p_value == 0.0  # below what float64 holds
    assert gender.r2 is not None
    assert gender.r2 > 0.6
    assert shuffled.p_value > 0.01
    assert shuffled.r2 == pytest.approx(0.0, abs=0.02)
