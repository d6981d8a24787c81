"""A covariance from a sample of the rows: exact constraints, and the excess that a formula says.

Every property has its control: the step that secures it is left out, and the figure breaks.

Modules: `moments.block_sums`, `moments.sampled`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast._runtime.rows import splitmix64
from splince_fast.exceptions import (
    FileFormatError,
    IncompatibleMomentsError,
    InputError,
    NonFiniteError,
    NotEnoughDataError,
    SampledScatterWarning,
)
from splince_fast.moments import block_sums, sampled
from splince_fast.moments.sampled import SampledAccumulator

Float = NDArray[np.float64]
Find = Callable[[str], Path]
EPS = float(np.finfo(np.float64).eps)


def gaussian(
    n: int, d: int, strength: float, seed: int = 0
) -> tuple[Float, dict[str, NDArray[Any]]]:
    """Correlated Gaussian rows with a concept z and a task y that go together."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(d, d)) / d**0.5 + np.eye(d)
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.7, z, 1 - z)
    X = rng.normal(size=(n, d)) @ mix
    X += strength * np.outer(z, mix[0]) + 0.5 * strength * np.outer(y, mix[1])
    return X, {"z": z, "y": y}


def accumulator_of(moments: sf.Moments) -> SampledAccumulator:
    held = moments._flushed()
    assert isinstance(held, SampledAccumulator)
    return held


def distortion(eraser: sf.Projection, covariance: Float) -> float:
    """tr(E S E^T) of the removed part E = left right^T."""
    left, right = eraser.left, eraser.right
    return float(np.sum((left.T @ left) * (right.T @ covariance @ right)))


def draws(
    X: Any, labels: Any, rate: float, count: int, fit: Callable[[sf.Moments], sf.Projection]
) -> tuple[Float, Float, Float]:
    """Excess, the formula's excess, and reported over true distortion, of `count` samples."""
    full = sf.Moments().update(np.asarray(X, np.float64), labels)
    covariance = full.covariance(ddof=0)
    least, total = distortion(fit(full), covariance), float(np.trace(covariance))
    rows = []
    for seed in range(count):
        eraser = fit(sf.Moments(subsample=rate, random_state=seed).update(X, labels))
        report = eraser.report
        assert report is not None
        found = distortion(eraser, covariance)
        excess = None if report.sampling is None else report.sampling.expected_excess
        expected = np.nan if excess is None else excess
        rows.append((found / least - 1, expected, report.distortion * total / found))
    return tuple(np.array(rows).T)  # type: ignore[return-value]


def errors_from(found: Float, expected: Float) -> float:
    """Distance of the means in standard errors of the first."""
    return float(abs(found.mean() - expected.mean()) / (found.std() / len(found) ** 0.5))


def leace(moments: sf.Moments) -> sf.Projection:
    return sf.leace(moments, erase="z")


def splince(moments: sf.Moments) -> sf.Projection:
    return sf.splince(moments, erase="z", keep="y")


# --- constraints ---------------------------------------------------------------------------------


def residuals(eraser: sf.Projection, full: sf.Moments) -> tuple[float, float]:
    """|P Cov(x, z)| and |P Cov(x, y) - Cov(x, y)|, relative, with Cov of all rows."""
    out = []
    for name in ("z", "y"):
        span = full.cross_covariance(name).T
        removed = (span @ eraser.right) @ eraser.left.T
        out.append(np.linalg.norm(span - removed if name == "z" else removed))
        out[-1] = float(out[-1] / np.linalg.norm(span))
    return out[0], out[1]


@pytest.mark.parametrize("seed", range(6))
def test_constraints_hold_to_rounding_at_a_hundredth(seed: int) -> None:
    X, labels = gaussian(40_000, 8, 1.0)
    full = sf.Moments().update(X, labels)
    moments = sf.Moments(subsample=0.01, random_state=seed).update(X, labels)
    eraser = splince(moments)
    report = eraser.report
    assert report is not None
    assert 250 < report.sampling.n_rows < 800
    assert all(v.residual <= v.bound for v in report.variables)
    # Sums over n rows carry sqrt(n) roundings, of x over the size of its cross-covariance.
    assert max(residuals(eraser, full)) < 200 * 100 * EPS
    # Control: class means of the sampled rows alone.
    chosen = chosen_rows(len(X), 0.01, seed)
    alone = splince(sf.Moments().update(X[chosen], {k: v[chosen] for k, v in labels.items()}))
    assert max(residuals(alone, full)) > 1e-3


# --- what it costs -------------------------------------------------------------------------------

CASES = [
    (strength, rows, fit) for strength in (0.3, 4.0) for rows in (5, 20) for fit in (leace, splince)
]


@pytest.mark.parametrize(("strength", "rows", "fit"), CASES)
def test_excess_is_that_of_the_formula(strength: float, rows: int, fit: Any) -> None:
    n, d = 6000, 32
    X, labels = gaussian(n, d, strength)
    excess, formula, reported = draws(X, labels, rows * d / n, 40, fit)
    assert errors_from(excess, formula) < 4
    # The report's distortion is that of all rows: 40 draws scatter by a few percent.
    assert abs(reported.mean() - 1) < 0.03 + 4 * reported.std() / 40**0.5
    # Control: with all n rows for the m sampled ones the formula says far less.
    assert errors_from(excess, formula * (rows * d / n)) > 4


@pytest.mark.parametrize("strength", [0.3, 4.0])
@pytest.mark.parametrize("fit", [leace, splince])
def test_21_rows_per_feature_cost_at_most_five_percent(strength: float, fit: Any) -> None:
    n, d = 12_000, 24
    X, labels = gaussian(n, d, strength)
    assert draws(X, labels, 21 * d / n, 25, fit)[0].mean() < 0.05
    # Control: half of these rows cost more.
    assert draws(X, labels, 10.5 * d / n, 25, fit)[0].mean() > 0.05


def test_half_of_the_rows_cost_half_as_much() -> None:
    """The factor 1 - f of a sample of the very rows that are erased; without it: a control."""
    n, d = 1500, 24
    X, labels = gaussian(n, d, 0.3)
    excess, formula, _ = draws(X, labels, 0.5, 60, leace)
    assert errors_from(excess, formula) < 4
    assert errors_from(excess, formula / 0.5) > 4


def test_naive_distortion_is_low() -> None:
    """Control of the correction: what the sample itself says of the eraser fitted to it."""
    n, d = 6000, 32
    X, labels = gaussian(n, d, 0.3)
    covariance = sf.Moments().update(X, labels).covariance(ddof=0)
    naive, corrected = [], []
    for seed in range(20):
        moments = sf.Moments(subsample=5 * d / n, random_state=seed).update(X, labels)
        eraser = leace(moments)
        true = distortion(eraser, covariance)
        naive.append(distortion(eraser, moments.covariance(ddof=0)) / true)
        assert eraser.report is not None
        corrected.append(eraser.report.distortion * float(np.trace(covariance)) / true)
    assert np.mean(naive) < 0.8
    assert abs(np.mean(corrected) - 1) < 0.05


@pytest.mark.filterwarnings("ignore:the eraser is sensitive:splince_fast.PrecisionWarning")
@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.WholeNumbersWarning")
@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.SampledScatterWarning")
@pytest.mark.parametrize("fit", [leace, splince])
@pytest.mark.parametrize(
    ("folder", "z", "y", "rows"),
    [
        ("bug_profession_gender", "z", "y", 4.5),
        ("bug_profession_gender", "z", "y", 8),
        ("professions_smollm2", "z_stereotype", "y_fact", 4.5),
    ],
)
def test_excess_on_real_embeddings(
    real_data: Find, folder: str, z: str, y: str, rows: float, fit: Any
) -> None:
    where = real_data(folder)
    X = np.load(where / "X.npy")
    labels = {"z": np.load(where / f"{z}.npy"), "y": np.load(where / f"{y}.npy")}
    excess, formula, reported = draws(X, labels, rows * X.shape[1] / len(X), 4, fit)
    # Real rows have heavier tails: a uniform sample misses some rows that alone have a direction.
    assert 1 / 1.6 < excess.mean() / formula.mean() < 2.5
    assert abs(reported.mean() - 1) < 0.15


# --- rare rows ----------------------------------------------------------------------------------


def with_giants(n: int, d: int) -> tuple[Float, dict[str, NDArray[Any]]]:
    """One row in a thousand is a hundred times as long, along one feature."""
    X, labels = gaussian(n, d, 0.8)
    rng = np.random.default_rng(7)
    giant = rng.random(n) < 1e-3
    X[giant, 3] += 100 * d**0.5 * rng.choice([-1.0, 1.0], giant.sum())
    return X, labels


def test_exact_variances_repair_a_rare_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a warning names the feature."""
    n, d = 6000, 32
    X, labels = with_giants(n, d)
    frame = pd.DataFrame(X, columns=[f"f{j}" for j in range(d)])
    with pytest.warns(SampledScatterWarning, match=r"1 feature\(s\) \('f3'\)"):
        repaired = draws(frame, labels, 5 * d / n, 60, leace)[0]
    assert repaired.max() < 1.0
    monkeypatch.setattr(sampled, "_STANDARD_ERRORS", 1e300)
    assert draws(X, labels, 5 * d / n, 60, leace)[0].max() > 10


def test_drifting_rows_sorted_by_class() -> None:
    """Position says nothing of a hash. Control: the first m rows, which know one class alone."""
    n, d = 8000, 24
    X, labels = gaussian(n, d, 0.8)
    order = np.argsort(labels["z"], kind="stable")
    labels = {name: column[order] for name, column in labels.items()}
    # The spread of half of the features grows along the stream.
    X = X[order]
    X[:, ::2] *= np.linspace(0.2, 3.0, n)[:, None]
    rate = 10 * d / n
    excess, formula, _ = draws(X, labels, rate, 20, leace)
    assert excess.mean() < 2 * formula.mean()
    full = sf.Moments().update(X, labels)
    covariance = full.covariance(ddof=0)
    head = np.cov(X[: 10 * d].T, ddof=0)
    span = full.cross_covariance("z")[:, :1]
    along = np.linalg.solve(head, span)
    removed = span @ along.T / float(span[:, 0] @ along[:, 0])
    of_head = float(np.trace(removed @ covariance @ removed.T))
    assert of_head > 1.5 * distortion(leace(full), covariance)


def test_parts_of_other_fractions_count_by_their_rows() -> None:
    """Wide rows of which few are sampled, and narrow ones. Control: sampled rows count alike."""
    rng = np.random.default_rng(0)
    wide, narrow = 3 * rng.normal(size=(10_000, 8)), rng.normal(size=(10_000, 8))
    whole = float(np.trace(sf.Moments().update(np.concatenate([wide, narrow])).covariance()))
    weighted, plain = [], []
    for seed in range(30):
        few, many = (
            sf.Moments(subsample=fraction, random_state=seed).update(part)
            for part, fraction in ((wide, 0.02), (narrow, 0.2))
        )
        weighted.append(np.trace((few + many).covariance(ddof=0)))
        rows = wide[chosen_rows(10_000, 0.02, seed)], narrow[chosen_rows(10_000, 0.2, seed)]
        plain.append(float(np.concatenate(rows).var(axis=0).sum()))
    assert errors_from(np.array(weighted), np.array([whole])) < 4
    assert errors_from(np.array(plain), np.array([whole])) > 8


# --- which rows ----------------------------------------------------------------------------------


def chosen_rows(n: int, fraction: float, seed: int) -> NDArray[np.intp]:
    """The rows that are sampled, from the definition: a hash of the position alone."""
    key = splitmix64(np.array([seed], np.uint64))[0]
    hashed = splitmix64(np.arange(n, dtype=np.uint64) + key)
    return np.flatnonzero(hashed.astype(np.float64) / 2.0**64 < fraction)


@pytest.mark.parametrize("step", [9000, 1000])
def test_the_rows_are_those_of_the_definition(step: int) -> None:
    """Also where the moments are read between the updates."""
    X, _ = gaussian(9000, 5, 0.0)
    chosen = chosen_rows(len(X), 0.1, 4)
    moments = sf.Moments(subsample=0.1, random_state=4)
    for start in range(0, len(X), step):
        moments.update(X[start : start + step])
        assert moments.covariance().shape == (5, 5)
    expected = np.cov(X[chosen].T, ddof=0)
    np.testing.assert_allclose(moments.covariance(ddof=0), expected, atol=1e3 * EPS)
    assert accumulator_of(moments).sample.n_rows == len(chosen)
    assert len(chosen) != len(chosen_rows(len(X), 0.1, 5))


def same_bits(a: sf.Moments, b: sf.Moments) -> bool:
    return (
        a.n_rows == b.n_rows
        and np.array_equal(a.mean, b.mean)
        and np.array_equal(a.covariance(), b.covariance())
        and all(np.array_equal(a.cross_covariance(v), b.cross_covariance(v)) for v in a.variables)
        and accumulator_of(a).squares == accumulator_of(b).squares
    )


def fed(X: Any, labels: Any, step: int, **parameters: Any) -> sf.Moments:
    moments = sf.Moments(**parameters)
    for i in range(0, len(X), step):
        moments.update(X[i : i + step], {k: v[i : i + step] for k, v in labels.items()})
    return moments


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_any_size_of_update_gives_the_same_bits(dtype: Any) -> None:
    X, labels = gaussian(1500, 6, 1.0)
    X = X.astype(dtype)
    # Classes are numbered as they come: here in their order, whatever the size of the updates.
    for name in labels:
        labels[name][:2] = 0, 1
    given: dict[str, Any] = {"subsample": 0.2, "block_rows": 256}
    whole = fed(X, labels, len(X), **given)
    assert all(same_bits(whole, fed(X, labels, step, **given)) for step in (1, 77, 256, 777))
    half = fed(X[:700], {k: v[:700] for k, v in labels.items()}, 700, **given)
    rest = X[700:], {k: v[700:] for k, v in labels.items()}
    assert same_bits(whole, pickle.loads(pickle.dumps(half)).update(*rest))
    # Control: a stream that forgets where it stood takes other rows.
    half._accumulator.position = 0  # type: ignore[attr-defined]
    assert not same_bits(whole, half.update(*rest))


@pytest.mark.parametrize("classes", [2, 400])  # threads share rows, or columns
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, classes: int) -> None:
    X, labels = gaussian(4096, 600, 1.0)
    labels["z"] = np.arange(len(X)) % classes
    segment = block_sums._segment_rows(len(X), 600, 2 + classes)
    assert (segment < len(X)) == (classes == 2)
    found = []
    for count in ("1", "2", "3"):
        monkeypatch.setenv("SPLINCE_FAST_NUM_THREADS", count)
        found.append(sf.Moments(subsample=0.5).update(X, labels))
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_an_interrupted_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    X, labels = gaussian(2000, 6, 1.0)

    def blocks(fails_at: int = 2000) -> Iterator[Any]:
        for i in range(0, 2000, 150):
            if i >= fails_at:
                raise OSError("the disk is gone")
            yield X[i : i + 150], {k: v[i : i + 150] for k, v in labels.items()}

    path = tmp_path / "run.moments"
    given: dict[str, Any] = {"subsample": 0.3, "random_state": 2, "block_rows": 256}
    with pytest.raises(OSError, match="disk"):
        sf.Moments.from_blocks(blocks(900), checkpoint=path, **given)
    resumed = sf.Moments.from_blocks(blocks(), checkpoint=path, **given)
    assert same_bits(resumed, sf.Moments.from_blocks(blocks(), **given))
    with pytest.raises(FileFormatError, match="other parameters"):
        sf.Moments.from_blocks(blocks(), checkpoint=path, **{**given, "random_state": 3})


# --- contracts of moments ------------------------------------------------------------------------


def close(a: sf.Moments, b: sf.Moments, roundings: float = 1e4) -> None:
    """Equal to rounding, sample included."""
    deviation = float(b.covariance(ddof=0).diagonal().max()) ** 0.5
    np.testing.assert_allclose(a.mean, b.mean, atol=roundings * EPS * deviation)
    np.testing.assert_allclose(
        a.covariance(ddof=0), b.covariance(ddof=0), atol=roundings * EPS * deviation**2
    )
    for name in b.variables:
        order: Any = slice(None)
        if b.variables[name] == "classes":  # numbered as they came
            order = [a.classes(name).index(c) for c in b.classes(name)]
        np.testing.assert_allclose(
            a.cross_covariance(name)[:, order],
            b.cross_covariance(name),
            atol=roundings * EPS * deviation,
        )
    one, other = accumulator_of(a), accumulator_of(b)
    assert one.sample.n_rows == other.sample.n_rows
    assert abs(one.squares / other.squares - 1) < 1e-9


def test_sums_and_differences() -> None:
    X, labels = gaussian(6000, 8, 1.0)
    value = X[:, 0] + np.random.default_rng(1).normal(size=6000)
    parts = []
    for i in range(3):
        cut = slice(2000 * i, 2000 * (i + 1))
        # Class names that only one part has, missing labels, and a continuous variable.
        z = np.array([f"{i if c else 'all'}" for c in labels["z"][cut]], object)
        z[::50] = None
        given = {"z": z, "t": np.where(np.arange(2000) % 9 == 0, np.nan, value[cut])}
        parts.append(sf.Moments(subsample=0.3, random_state=i).update(X[cut] + 5.0 * i, given))
    a, b, c = parts
    together = a + b + c
    close(together, c + (a + b))
    close(together, sum(parts))  # type: ignore[arg-type]
    close((a + b) - b, a)
    close(together - c, a + b)
    S = together.covariance(ddof=0)
    first, again = sf.leace(together - c, erase="z"), sf.leace(a + b, erase="z")
    assert abs(distortion(first, S) / distortion(again, S) - 1) < 1e-6
    restored = pickle.loads(pickle.dumps(together))
    assert same_bits(restored, together)
    more = restored.update(X[:10], {"z": ["all"] * 10, "t": value[:10]})
    assert more.n_rows == 6010
    with pytest.raises(IncompatibleMomentsError):
        _ = a - (a + b)


def test_files_keep_every_bit(tmp_path: Path) -> None:
    X, labels = gaussian(3000, 6, 1.0)
    moments = sf.Moments(subsample=0.3, block_rows=512).update(X, labels)
    moments.save(tmp_path / "a.moments")
    loaded = sf.Moments.load(tmp_path / "a.moments")
    loaded.save(tmp_path / "b.moments")
    assert (tmp_path / "a.moments").read_bytes() == (tmp_path / "b.moments").read_bytes()
    assert np.array_equal(splince(loaded).left, splince(moments).left)
    assert same_bits(loaded, moments)
    assert loaded.parameters == moments.parameters
    copy = moments.copy()
    copy.update(X, labels)
    assert same_bits(loaded, moments), "a copy is independent"


def test_scaled_weights_scale_every_sum() -> None:
    X, labels = gaussian(5000, 6, 1.0)
    moments = sf.Moments(subsample=0.3).update(X, labels)
    scaled = moments.scaled(0.25)
    assert scaled.weight == 0.25 * moments.weight
    assert scaled.n_rows == moments.n_rows
    # A power of 2 scales sums and their sample without rounding, so every
    # statistic of ddof 0 and every eraser has the same bits.
    assert np.array_equal(scaled.covariance(ddof=0), moments.covariance(ddof=0))
    erasers = [sf.leace(m, erase="z") for m in (scaled, moments)]
    assert np.array_equal(erasers[0].left, erasers[1].left)
    assert erasers[0].report.distortion == erasers[1].report.distortion
    again = scaled.scaled(4.0)
    assert same_bits(again, moments)
    assert not same_bits(scaled, moments)  # control


def test_weights_of_a_sample_are_frequencies() -> None:
    X, labels = gaussian(5000, 6, 1.0)
    rng = np.random.default_rng(3)
    weight = rng.integers(0, 3, 5000).astype(np.float64)
    given = sf.Moments(subsample=0.3).update(X, labels, sample_weight=weight)
    present = weight > 0
    absent = sf.Moments(subsample=0.3).update(
        X[present], {k: v[present] for k, v in labels.items()}, sample_weight=weight[present]
    )
    assert same_bits(given, absent), "a weight of 0 is absence"
    repeated = np.repeat(np.arange(5000), weight.astype(int))
    twice = sf.Moments(subsample=0.3).update(
        X[repeated], {k: v[repeated] for k, v in labels.items()}
    )
    np.testing.assert_allclose(given.mean, twice.mean, atol=1e-12)
    np.testing.assert_allclose(given.cross_covariance("z"), twice.cross_covariance("z"), atol=1e-12)
    # The scatter in expectation: a variance of m rows has the relative error sqrt(2 / m).
    ratio = given.covariance().diagonal() / twice.covariance().diagonal()
    assert np.abs(ratio - 1).max() < 6 * (2 * 2 / 1200) ** 0.5


def test_variances_are_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    n = 3000
    X = (gaussian(n, 5, 0.0)[0] + 100.0).astype(np.float32)
    X[:, 4] = 7.0
    weight = rng.random(n) + 0.5
    moments = sf.Moments(subsample=0.3).update(X, sample_weight=weight)
    squares = accumulator_of(moments).nonempty_state().second.diagonal()
    naive = np.average((X - np.average(X, axis=0, weights=weight)) ** 2, axis=0, weights=weight)
    np.testing.assert_allclose(squares / weight.sum(), naive, rtol=1e-6, atol=1e-20)
    assert squares[4] == 0.0


def test_a_class_without_a_sampled_row_is_erased() -> None:
    X, _ = gaussian(4000, 6, 0.0)
    z = np.zeros(4000, int)
    z[1:2000] = 1
    chosen = set(chosen_rows(len(X), 0.1, 0).tolist())
    z[next(i for i in range(2000, 4000) if i not in chosen)] = 2
    moments = sf.Moments(subsample=0.1).update(X, {"z": z})
    eraser = leace(moments)
    assert eraser.rank == 2
    span = moments.cross_covariance("z").T
    assert np.abs(span - (span @ eraser.right) @ eraser.left.T).max() < 1e-12


def test_subsample_of_one_has_the_bits_of_the_full_covariance() -> None:
    X, labels = gaussian(5000, 6, 1.0)
    plain, given = (
        sf.Moments(**p).update(X, labels) for p in ({}, {"subsample": 1, "random_state": 5})
    )
    assert np.array_equal(plain.covariance(), given.covariance())
    assert np.array_equal(splince(plain).left, splince(given).left)
    assert splince(given).report == splince(plain).report
    assert splince(plain).report.sampling is None  # type: ignore[union-attr]


def test_snapshots_folds_and_other_methods() -> None:
    X, labels = gaussian(8000, 6, 1.0)
    moments = sf.Moments(subsample=0.1).update(X, labels)
    kept = moments.factored()
    for fit in (leace, splince):
        one, other = fit(moments), fit(kept)  # type: ignore[arg-type]
        np.testing.assert_allclose(one.left, other.left, rtol=1e-10, atol=1e-12)
        assert one.report is not None
        assert other.report is not None
        assert abs(one.report.distortion / other.report.distortion - 1) < 1e-9
        assert one.report.sampling.expected_excess == pytest.approx(
            other.report.sampling.expected_excess
        )
    plain = sf.Moments().update(X, labels)
    np.testing.assert_allclose(
        sf.sal(moments, erase="z").left, sf.sal(plain, erase="z").left, atol=1e-12
    )
    for policy in ("oas", 0.1):
        shrunk = sf.leace(moments, erase="z", shrinkage=policy).report
        assert shrunk is not None
        assert 0 < shrunk.shrinkage <= 0.2
        assert shrunk.sampling.expected_excess is None
    folds = sf.Moments.from_blocks([(X, labels)], folds=2, subsample=0.2)
    assert folds.total.n_rows == 8000
    report = sf.cross_report(list(folds), erase="z", method="leace")
    assert max(report.distortion) < 1.0


def test_too_few_rows_for_the_formula_state_no_excess() -> None:
    """excess = (1 - f) p / (m - p - 2), of m = 10 rows and p regressors."""
    sample = sampled.SampleStatistics(10, 10.0, 0.1, EPS)
    one = np.array([[1.0, 0.0]])
    assert sample.distortion(one, np.eye(1), 8)[1] is None
    assert sample.distortion(one, np.eye(1), 7)[1] == pytest.approx(0.9 * 7)


def test_what_is_given_up_costs_no_rows() -> None:
    """Kept directions that are all dropped are regressors again, as LEACE has them."""
    moments = sf.Moments(subsample=0.1).update(*gaussian(4000, 16, 1.0))
    with pytest.warns(sf.DroppedDirectionsWarning):
        dropped = sf.splince(moments, erase="z", keep="y", max_amplification=1.0).report
    plain = leace(moments).report
    assert dropped is not None
    assert plain is not None
    assert dropped.sampling.expected_excess == pytest.approx(
        plain.sampling.expected_excess, rel=1e-9
    )


def test_report_states_rows_and_excess() -> None:
    X, labels = gaussian(8000, 6, 1.0)
    report = splince(sf.Moments(subsample=0.05).update(X, labels)).report
    assert report is not None
    assert f"of {report.sampling.n_rows:,} sampled rows (expected excess" in str(report)
    assert type(report).from_dict(report.to_dict()) == report


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scatter", [0, -0.5, 1.5, np.nan, True, "auto", "half", None])
def test_a_rate_out_of_range_is_refused(scatter: Any) -> None:
    with pytest.raises(InputError, match="above 0 and at most 1"):
        sf.Moments(subsample=scatter)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "a", 1 << 63])
def test_a_seed_out_of_range_is_refused(seed: Any) -> None:
    with pytest.raises(InputError, match="random_state"):
        sf.Moments(subsample=0.5, random_state=seed)


def test_auto_takes_what_five_percent_need() -> None:
    X, labels = gaussian(4096, 8, 1.0)
    source = sf.sources.from_arrays(X, labels)
    moments = sf.Moments.from_blocks(source, subsample="auto")
    assert moments.parameters.subsample == 1 / 16  # 4096 / 16 = 256 rows, and 22 * 8 = 176
    small = sf.Moments.from_blocks(sf.sources.from_arrays(X[:200], None), subsample="auto")
    assert small.parameters.subsample == 1.0
    with pytest.raises(InputError, match="needs the number of rows"):
        sf.Moments.from_blocks(iter([(X, labels)]), subsample="auto")
    for n, d in ((6000, None), (None, 24)):
        with pytest.raises(InputError, match="unknown for blocks"):
            sampled.subsample_for("auto", n, d, "blocks", 2)
        assert sampled.subsample_for(1e-3, n, d, "blocks", 2) == 1e-3
    with pytest.raises(InputError, match=r"pass at least 0\.0078"):
        sf.Moments.from_blocks(source, subsample=0.001)


def test_too_few_rows_for_a_solve() -> None:
    X, labels = gaussian(2000, 20, 1.0)
    moments = sf.Moments(subsample=0.02).update(X, labels)
    with pytest.raises(NotEnoughDataError, match="80 are needed"):
        leace(moments)
    assert sf.leace(moments, erase="z", shrinkage="oas").rank == 1
    nothing = sf.Moments(subsample=1e-9).update(X, labels)
    with pytest.raises(NotEnoughDataError, match="0 sampled rows"):
        sf.leace(nothing, erase="z", shrinkage="oas")


def test_states_that_do_not_go_together() -> None:
    X, labels = gaussian(500, 5, 1.0)
    plain, some = sf.Moments().update(X, labels), sf.Moments(subsample=0.5).update(X, labels)
    with pytest.raises(IncompatibleMomentsError, match="subsample=1"):
        plain + some
    with pytest.raises(InputError, match="subsample=1 for a test"):
        sf.concept_strength(some, "z")
    with pytest.raises(InputError, match="subsample=1 for a test"):
        sf.concept_strength(some.factored(), "z")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("step", [100, 64, 300])
def test_what_fails_leaves_no_trace(bad: float, step: int) -> None:
    X, labels = gaussian(300, 5, 1.0)
    moments = fed(X[:step], {k: v[:step] for k, v in labels.items()}, step, subsample=0.5,
                  block_rows=64)  # fmt: skip
    before = pickle.dumps(moments)
    wrong = X.copy()
    wrong[70, 2] = bad
    for rows in (slice(None), slice(64, 128)):  # the latter are a block, where none wait
        with pytest.raises((NonFiniteError, InputError)):
            moments.update(wrong[rows], {k: v[rows] for k, v in labels.items()})
        assert pickle.dumps(moments) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("variances", np.full(5, -1.0)),
        ("weights.squares", np.array([-1.0])),
        ("sample.reference", np.zeros(4)),
    ],
)
def test_damaged_files_are_refused(key: str, value: Any) -> None:
    from splince_fast.moments.format import from_tensors, to_tensors

    X, labels = gaussian(500, 5, 1.0)
    tensors, metadata = to_tensors(sf.Moments(subsample=0.5).update(X, labels)._flushed())
    from_tensors(tensors, metadata)  # control: nothing is wrong with them
    with pytest.raises(FileFormatError):
        from_tensors({**tensors, key: value}, metadata)


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("columns", [2, 9])  # in the pass, or multiplied as a matrix
# One segment, and several; columns that fill no register, no cache line, no stripe.
@pytest.mark.parametrize(
    ("n", "d", "segments"), [(3, 5, 1), (203, 209, 1), (203, 1100, 1), (2803, 400, 2)]
)
def test_block_sums_are_its_naive_twin(
    dtype: Any, weighted: bool, columns: int, n: int, d: int, segments: int, level: str
) -> None:
    """Also of rows that lie among others."""
    rng = np.random.default_rng(0)
    lying = rng.normal(size=(2 * n, d)).astype(dtype)
    index = rng.permutation(2 * n)[:n] if weighted else None
    rows = lying[:n] if index is None else lying[index]
    weight = rng.random(n) + 0.1 if weighted else None
    codes = np.stack([rng.integers(-1, 3, n), np.where(rng.random(n) < 0.5, 3, 4)]).astype(np.intp)
    values, shift = rng.normal(size=(columns, n)), rng.normal(size=d)
    given = rows if index is None else lying
    sums = block_sums.sum_block(given, weight, shift, codes, 5, values, index)
    w = np.ones(n) if weight is None else weight
    y = rows.astype(np.float64) - shift
    near = {"rtol": 1e-12, "atol": 1e-11}
    np.testing.assert_allclose(sums.total, w @ y, **near)
    np.testing.assert_allclose(sums.squares, w @ (y * y), **near)
    np.testing.assert_allclose(sums.products, values @ y, **near)
    expected = np.zeros((5, d))
    for column in codes:
        np.add.at(expected, column[column >= 0], (w[:, None] * y)[column >= 0])
    np.testing.assert_allclose(sums.class_sums, expected, **near)
    n_sums = 2 + 5 + (columns if columns < block_sums.MATRIX_PRODUCT_FROM else 0)
    assert -(-n // block_sums._segment_rows(n, d, n_sums)) == segments


@pytest.mark.parametrize(
    ("first", "offset", "weight"), [(0, 3e152, 1.0), (300, 3e152, 1.0), (300, 3e149, 1e-50)]
)
def test_rows_that_are_too_large_are_refused_though_none_is_sampled(
    first: int, offset: float, weight: float
) -> None:
    """An offset that all rows have, which deviations do not show; and deviations of light rows."""
    X, labels = gaussian(4096, 5, 1.0)
    moments = sf.Moments(subsample=1e-9)
    large = X.copy()
    large[first:] += offset
    with pytest.raises(InputError, match="rescale"):
        moments.update(large, labels, sample_weight=np.full(len(X), weight))
    assert not moments.n_rows
    assert moments.update(X, labels).n_rows == len(X)  # control
    assert not accumulator_of(moments).sample.n_rows


def test_infinities_in_two_segments_are_refused() -> None:
    """Their sum has no value; an error says so, and no warning (the tests make it an error)."""
    X, labels = gaussian(4096, 300, 1.0)
    assert len(X) > 2 * block_sums._segment_rows(len(X), 300, 6)
    moments = sf.Moments(subsample=0.5).update(X, labels)
    before = moments.copy()
    X[[100, 4000], 5] = np.inf, -np.inf
    with pytest.raises(NonFiniteError, match="100"):
        moments.update(X, labels)
    assert same_bits(moments, before)


def test_folds_sort_the_classes_of_their_label_tables_too() -> None:
    """Classes that come in descending order, and one that the first fold's blocks lack at first."""
    rng = np.random.default_rng(0)
    z = np.sort(rng.integers(0, 3, 6000))[::-1].copy()
    X = rng.normal(size=(6000, 8)) + 0.7 * z[:, None]
    labels = {"z": z, "y": (rng.random(6000) < (1 + z) / 4).astype(int)}
    blocks = [
        (X[i : i + 500], {k: v[i : i + 500] for k, v in labels.items()})
        for i in range(0, 6000, 500)
    ]
    for fold in sf.Folds.from_blocks(blocks, folds=2, subsample=0.3):
        assert fold.classes("z") == (0, 1, 2)
        counts = list(fold.class_counts("z").values())
        assert len(set(counts)) == 3  # control: another order has other counts
        table = fold._accumulator.label_products
        cells = table.gram[np.ix_(table.index["z"], table.index["y"])]
        assert cells.sum(axis=1).tolist() == counts
        assert cells.sum(axis=0).tolist() == list(fold.class_counts("y").values())
