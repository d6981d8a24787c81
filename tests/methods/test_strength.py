"""Concept strength: canonical correlations, their chance level and p-values."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import Float
from scipy import stats

import splince_fast as sf
from splince_fast.strength import ConceptStrength, concept_strength, p_value

# Errors of the moments, of a few n eps, are amplified by the inverse covariance, whose condition
# number is below 1e4 in the problems here; 1e-9 holds for n up to 1e3, and is nothing statistical.
CLOSE = 1e-9


def strength(X: Any, z: Any, weight: Any = None, **kinds: str) -> ConceptStrength:
    moments = sf.Moments(kinds=kinds).update(X, {"z": z}, sample_weight=weight)
    return concept_strength(moments, "z")


# --- the naive twin: bases by singular value decompositions of the data --------------------------


def indicators(z: Any, weight: Float | None = None) -> Float:
    """0/1 columns of the classes; the rows without a label at their weighted means."""
    labels = np.array(["" if v is None else f"c{v}" for v in z])
    known = labels != ""
    columns = (labels[:, None] == np.unique(labels[known])).astype(np.float64)
    columns[~known] = np.average(columns[known], 0, None if weight is None else weight[known])
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


@given(
    n=st.integers(8, 200),
    d=st.integers(1, 6),
    rows=st.sampled_from(["plain", "units", "redundant", "constant"]),
    kind=st.sampled_from(["binary", "names", "gaps", "column", "columns", "collinear", "nan"]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_correlations_equal_those_of_the_data(
    n: int, d: int, rows: str, kind: str, weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)) + 3.0
    if rows == "units":
        X *= 10.0 ** rng.uniform(-30, 30, size=d)
    elif rows != "plain":
        X = np.column_stack(
            [X, X @ rng.normal(size=(d, 2)) if rows == "redundant" else 0 * X + 0.1]
        )
    weight = rng.integers(1, 4, n).astype(np.float64) if weighted else None
    z: Any
    gone = (rng.random(n) < 0.3) & (np.arange(n) > 3) & (kind in ("gaps", "nan"))
    if kind in ("column", "columns", "collinear", "nan"):
        z = columns = 1e3 + 5.0 * rng.normal(size=(n, 1 if kind == "column" else 2))
        if kind == "collinear":
            z = columns = np.column_stack([z * [1e-9, 1], z @ [1.0, 1 / 3], np.full(n, 0.1)])
        if gone.any():  # as the mean of the others
            mean = np.average(z[~gone], 0, None if weight is None else weight[~gone])
            columns, z = (np.where(gone[:, None], value, z) for value in (mean, np.nan))
    else:
        codes = rng.integers(0, 2 if kind == "binary" else 4, n)
        codes[:2] = [0, 1]
        z = [None if g else int(v) for g, v in zip(gone, codes, strict=True)]
        z = np.array(["d", "a", "c", "b"])[codes] if kind == "names" else z
        columns = indicators(z, weight)
    found, expected = strength(X, z, weight), twin(X, columns, weight)
    assert (found.rank_x, found.rank_z) == (basis(X).shape[1], basis(columns).shape[1])
    # Near 0 a correlation is the root of a rounding error of the products.
    np.testing.assert_allclose(found.correlations, expected, rtol=0, atol=CLOSE)
    assert found.pillai == pytest.approx(float(np.sum(expected**2)), abs=CLOSE)
    assert found.n == (n if weight is None else weight.sum())


# --- the exact statements, against every permutation ---------------------------------------------


# x with outliers, so that leverages are far from equal, and few rows of every kind of z.
RNG = np.random.default_rng(5)
TINY: dict[str, tuple[int, int, Any]] = {
    "balanced": (5, 2, [0, 1, 0, 1, 0]), "rare": (6, 2, [1, 0, 0, 0, 0, 0]),
    "three": (6, 1, [0, 0, 0, 1, 1, 2]), "gaps": (6, 2, [0, 0, 0, 1, None, None]),
    "column": (6, 4, RNG.standard_t(1, (6, 1))), "columns": (6, 2, RNG.standard_t(1, (6, 3))),
}  # fmt: skip


def all_traces(X: Float, z: Any) -> Float:
    """V of all n! permutations, the identity first."""
    h, k = (u @ u.T for u in (basis(X), basis(indicators(z) if isinstance(z, list) else z)))
    every = itertools.permutations(range(len(X)))
    return np.array([np.sum(h * k[np.ix_(order, order)]) for order in every])


# The products and sums behind V are of numbers below 1, for at most 720 permutations of 36 terms;
# t-distributed x has condition numbers up to some 1e3, which the moments square.
EXACT = 1e-9


@pytest.mark.parametrize(("n", "d", "z"), TINY.values(), ids=TINY)
def test_chance_is_the_mean_over_all_permutations(n: int, d: int, z: Any) -> None:
    X = np.random.default_rng(n + d).standard_t(1, size=(n, d))
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
        found = strength(rng.normal(size=(n, d)), rng.normal(size=(n, 1)))
        f = found.pillai / d / ((1 - found.pillai) / (n - 1 - d))
        assert found.p_value == pytest.approx(float(stats.f.sf(f, d, n - 1 - d)), abs=1e-9)


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
    z, absent = rng.integers(0, 3, (2, 2000))
    X = (rng.normal(size=(2000, 20)) + np.eye(20)[z]).astype(dtype)
    after = strength(sf.leace(sf.Moments().update(X, {"z": z}), erase="z")(X), z)
    assert "a linear association" in strength(X, z).conclusion
    assert "less association with 'z' than random labels have" in after.conclusion
    # The rounding of the erased rows is left, beside directions of size one.
    assert after.pillai < (100 * np.finfo(dtype).eps) ** 2 * 2000
    assert "no linear association" in strength(X, absent).conclusion


# --- weights, joint cells and degenerate data ----------------------------------------------------


def test_joint_cells_have_the_strength_of_their_classes_and_weights_scale_the_sample() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 3, 200), np.arange(200) % 2
    X = rng.normal(size=(200, 6)) + 0.2 * a[:, None]
    cells = sf.Moments(joint=[("a", "b")]).update(X, {"a": a, "b": b})
    joint, plain = concept_strength(cells, ("a", "b")), strength(X, 2 * a + b)
    assert joint.pillai == pytest.approx(plain.pillai, abs=CLOSE)
    assert (joint.rank_z, joint.p_value) == (5, pytest.approx(plain.p_value, abs=100 * CLOSE))
    half = strength(X, 2 * a + b, np.full(200, 0.5))
    assert half.n == 100
    np.testing.assert_allclose(half.correlations, plain.correlations, rtol=0, atol=CLOSE)
    assert half.p_value > plain.p_value


def test_a_rare_class_does_not_count_twice() -> None:
    """The common class's share rounds to within eps of 1; the rank of two classes stays 1."""
    X, z = np.random.default_rng(0).normal(size=(20000, 3)), np.isin(np.arange(20000), [5, 77])
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
    part, few = (
        sf.Moments().update(rows, {"z": labels})
        for rows, labels in ((X, z), (rng.normal(size=(6, 20)), [0, 1] * 3))
    )
    found = concept_strength((part + few) - part, "z")
    assert (found.n, found.rank_x, found.r2, found.p_value) == (6, 5, None, 1.0)


def test_constant_x_has_no_trace() -> None:
    found = strength(np.full((20, 3), 0.1), np.arange(20) % 2)
    assert (found.correlations, found.pillai, found.p_value) == ((), 0.0, 1.0)
    assert found.conclusion == "no linear association with 'z': x is constant"


def test_chance_is_not_moved_by_what_varies_at_the_rounding_level() -> None:
    """Directions left out are left out whatever the labels, or their choice would be a search."""
    rng, z = np.random.default_rng(10), np.arange(300) % 2
    clear, noise = rng.normal(size=(300, 5)), 1e-4 * rng.normal(size=(300, 60))
    X = np.hstack([clear, clear @ rng.normal(size=(5, 60)) + noise]).astype(np.float32)
    found = strength(X, z)
    assert found.rank_x == 5
    scaled = X.astype(np.float64) - X.mean(axis=0, dtype=np.float64)
    u = np.linalg.svd(scaled / scaled.std(axis=0), full_matrices=False)[0][:, :5]
    expected = float(np.sum((u.T @ basis(indicators(z))) ** 2))
    # Directions with eigenvalues of 1e-8 turn the others by as much; float32 sums by 1e-6.
    assert found.pillai == pytest.approx(expected, abs=1e-5)


# --- how it looks --------------------------------------------------------------------------------


def test_it_prints_itself_and_becomes_json() -> None:
    X, z = np.random.default_rng(6).normal(size=(200, 6)), np.arange(200) % 3
    found = concept_strength(sf.Moments().update(X, {"<b>": z}), "<b>")
    assert str(found).splitlines()[0] == found.conclusion
    assert f"{found.pillai:.4g}" in str(found)
    assert "<b>" not in found._repr_html_()
    assert "&lt;b&gt;" in found._repr_html_()
    values = json.loads(json.dumps(found.to_dict()))
    assert values.pop("conclusion") == found.conclusion
    assert ConceptStrength(**{**values, "correlations": tuple(values["correlations"])}) == found
    with pytest.raises(AttributeError):
        found.n = 3  # type: ignore[misc]
