"""report.certificate: its quantile, its coverage on simulated fits, and controls that miss it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.stats

import splince_fast as sf
from splince_fast._solve.held_out import certificate
from splince_fast.moments import statistics

SLOW = pytest.mark.slow


class Population(NamedTuple):
    """Classes of fractions q, n rows: x = gap e_c + noise in class c > 0, of deviation `wide`."""

    n: int = 1000
    d: int = 8
    q: tuple[float, ...] = (0.5, 0.5)
    wide: tuple[float, ...] = (1.0, 1.0)
    some: int = 1000  # features that are wide; the others have deviation 1
    gap: float = 12.0  # z is linear in x but for 1 %, where the bound is the tightest
    others: int = 0  # continuous variables with an effect on every feature

    @property
    def deviations(self) -> Any:
        return np.where(np.arange(self.d) >= self.d - self.some, np.c_[list(self.wide)], 1.0)

    @property
    def means(self) -> Any:
        return self.gap * np.eye(len(self.q), self.d, k=-1)

    @property
    def effects(self) -> Any:
        return np.random.default_rng(self.others).normal(size=(self.others, self.d))

    def draw(self, rng: Any) -> tuple[Any, Any]:
        z = rng.choice(len(self.q), self.n, p=self.q)
        return rng.normal(size=(self.n, self.d)) * self.deviations[z] + self.means[z], z

    def r2(self, eraser: sf.Projection) -> float:
        """R^2 of the best linear predictor of z from erased rows: the largest of the classes."""
        q, P = np.array(self.q), eraser.matrix()
        centred = self.means - q @ self.means
        S = np.diag(q @ self.deviations**2) + (centred.T * q) @ centred
        S += self.effects.T @ self.effects
        left = P @ (centred.T * q)
        inner = np.linalg.pinv(P @ S @ P.T, rcond=1e-10, hermitian=True)
        return float((np.einsum("ij,ij->j", left, inner @ left) / (q * (1 - q))).max())


def rare(fraction: float, n: int = 1000, d: int = 8, **more: Any) -> Population:
    return Population(n, d, (1 - fraction, fraction), **more)


def report_of(X: Any, z: Any, by: str | None = None, **parameters: Any) -> Any:
    """The report of LEACE."""
    return sf.leace(sf.Moments(by=by, **parameters).update(X, {"z": z}), erase="z").report


def limit_of(report: Any, delta: float = 0.05) -> float:
    """The bound of the certificate."""
    (limit,) = report.certificate(delta).values()
    return float(limit)


def chi2(delta: float, degrees: int, n: int) -> Any:
    """The bound q / (1 + q) under equal class covariances, up to rounding."""
    q = scipy.stats.chi2.isf(delta, degrees) / n
    return pytest.approx(q / (1 + q), rel=1e-12)


def covered(
    n_fits: int, p: Population, by: str | None = "z", method: Any = sf.leace, bound: Any = None
) -> float:
    """Fraction of fits whose certificate at 95 % holds in the population."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(n_fits):
        X, z = p.draw(rng)
        moments = sf.Moments(by=by).update(X, {"z": z})
        eraser = method(moments, erase="z")
        held += p.r2(eraser) <= (bound(moments, p) if bound else limit_of(eraser.report))
    return held / n_fits


CASES = {
    "equal": Population(),
    "balanced, wide": Population(wide=(1.0, 3.0)),
    "rare": rare(0.05),
    "rare, wide": rare(0.05, wide=(1.0, 3.0)),
    "rare, few rows": rare(0.1, 200, 20, wide=(1.0, 3.0)),
    "rare, wide in one feature": rare(0.05, d=20, wide=(1.0, 6.0), some=1),
    "four": Population(1500, q=(0.4, 0.3, 0.24, 0.06), wide=(1.0, 1.0, 0.5, 3.0)),
}


@pytest.mark.parametrize(
    ("case", "n_fits"),
    [
        *((case, 200) for case in ("rare, few rows", "rare, wide", "four")),
        *(pytest.param(case, 2000, marks=SLOW) for case in CASES),
    ],
)
def test_certificate_covers(case: str, n_fits: int) -> None:
    # Three standard deviations of a fraction of .95 below the nominal level for few fits.
    least = 0.94 if n_fits == 2000 else 0.95 - 3 * (0.95 * 0.05 / n_fits) ** 0.5
    assert covered(n_fits, CASES[case]) >= least


@pytest.mark.parametrize(("case", "most"), [("rare, wide", 0.3), ("four", 0.5)])
def test_control_without_class_covariances_a_rare_wide_class_is_missed(
    case: str, most: float
) -> None:
    assert covered(60, CASES[case], None) < most


def plug_in(moments: sf.Moments, p: Population) -> float:
    """tau / (p - 1) chi2_{p-1; .95} / n with tau as the rows have it."""
    S = moments.covariance(ddof=0)
    rare = moments.class_counts("z")[1] / moments.n_rows
    parts = {c: part.covariance(ddof=0) for c, part in moments.by_class.items()}
    tau = np.trace(np.linalg.solve(S, (1 - rare) * parts[1] + rare * parts[0]))
    q = tau / (p.d - 1) * scipy.stats.chi2.ppf(0.95, p.d - 1) / p.n
    return float(q / (1 + q))


def half(moments: sf.Moments, _: Population) -> float:
    """Exceeded by most fits where x determines the concept, where the bound is tight."""
    return limit_of(sf.leace(moments, erase="z").report) / 2


@pytest.mark.parametrize(
    ("case", "n_fits", "bound", "most"),
    [
        ("equal", 60, half, 0.8),
        ("rare, few rows", 200, plug_in, 0.89),  # without leverage
        # with degrees of freedom of directions that are not wide
        pytest.param("rare, wide in one feature", 2000, plug_in, 0.92, marks=SLOW),
    ],
)
def test_control_smaller_bounds_are_missed(case: str, n_fits: int, bound: Any, most: float) -> None:
    assert covered(n_fits, CASES[case], bound=bound) < most


@pytest.mark.parametrize("method", [sf.sal, sf.mean_projection, partial(sf.leace, shrinkage=0.1)])
def test_bound_holds_for_every_map_of_this_kernel(method: Any) -> None:
    """It depends on the moments alone: not on the method, nor on what stands for Cov(x)."""
    p = CASES["rare, wide"]
    X, z = p.draw(np.random.default_rng(0))
    moments = sf.Moments(by="z").update(X, {"z": z})
    own, other = (limit_of(m(moments, erase="z").report) for m in (sf.leace, method))
    assert own == other
    assert covered(60, p, method=method) >= 0.88


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.5])
def test_bound_is_the_quantile_of_equal_covariances(delta: float) -> None:
    """It needs no covariance of x, and every column of a continuous variable counts."""
    X, z = Population(500, 6, gap=1.0).draw(np.random.default_rng(1))
    for parameters in ({}, {"subsample": 0.3}, {"covariance_type": "diag"}):
        assert limit_of(report_of(X, z, **parameters), delta) == chi2(delta, 5, 500)
    rng = np.random.default_rng(3)
    Z = rng.normal(size=(900, 3))
    report = report_of(rng.normal(size=(900, 5)) + Z[:, :1], Z)
    assert limit_of(report, delta) == chi2(delta / 3, 4, 900)
    # The rank of fewer rows than features is not that of the population: every feature counts.
    few = report_of(*Population(30, 40, gap=1.0).draw(np.random.default_rng(1)), "z")
    assert limit_of(few, delta) == chi2(delta, 39, 30)
    assert not few.variables[0].noise.by_class
    assert limit_of(few, np.float32(0.5)) == limit_of(few, 0.5)


def test_classes_divide_delta_and_the_widest_counts() -> None:
    """A twin of the noise, from rows, with the vectors that the whitened means span."""
    rng, n, d, k = np.random.default_rng(2), 2000, 6, 4
    z = rng.integers(0, k, n)
    X = rng.normal(size=(n, d)) * (1 + (z == 3))[:, None] + z[:, None] * np.eye(d)[0]
    X[:, 1] += z == 2
    report = report_of(X, z, "z")
    values, vectors = np.linalg.eigh(np.cov(X.T, ddof=0))
    white = (X - X.mean(axis=0)) @ vectors / np.sqrt(values)
    means = np.array([white[z == c].mean(axis=0) for c in range(k)])
    basis = np.linalg.svd(means)[2][:3]
    white = white - white @ basis.T @ basis
    spread = [np.cov(white[z == c].T, ddof=0) for c in range(k)]
    counts = np.bincount(z)
    traces = np.array([np.trace(A) for A in spread])
    traces *= (1 - d / n) / (1 - traces / n) * counts / (counts - 1)
    scale = traces / [np.trace(A) for A in spread]
    norms = [
        max(np.sum(A**2) * s**2 - t**2 / (m - 1), t**2 / (d - 3)) ** 0.5
        for A, s, t, m in zip(spread, scale, traces, counts, strict=True)
    ]
    q = counts / n
    limits = []
    for c in range(k):
        v = q * q[c] / (1 - q[c])
        v[c] = 1 - q[c]
        tau = v @ traces
        variance = 2 * np.sum(v**2 * np.square(norms) / (counts - 1)) / tau**2
        variance += (1 - 2 * q[c]) ** 2 / (n * q[c] * (1 - q[c]))
        quantile = scipy.stats.f.isf(0.05 / k, (tau / (v @ norms)) ** 2, 2 / variance)
        limits.append(quantile * tau / n / (1 + quantile * tau / n))
    assert limit_of(report) == pytest.approx(max(limits), rel=1e-8)
    (erased,) = report.variables
    assert erased.noise.ratio == pytest.approx((1 - q) @ traces / 3 / (d - 3), rel=1e-8)
    assert max(limits) > 1.2 * limits[0]  # control: the widest class is not the first


@pytest.mark.parametrize(("wide", "some"), [(3.0, 200), (9.0, 3)])  # 3: g is far below p
def test_noise_of_many_features_is_estimated_from_random_directions(
    wide: float, some: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 4 standard errors, sqrt(2 / (128 g)) of tau for g degrees of freedom each."""
    X, z = rare(0.1, 2000, 150, wide=(1.0, wide), some=some).draw(np.random.default_rng(1))
    X = np.hstack([X, X[:, :20]])  # of rank 150 in 170 features
    moments = sf.Moments(by="z").update(X, {"z": z})
    found = sf.leace(moments, erase="z").report.variables[0].noise
    with monkeypatch.context() as patch:
        patch.setattr(statistics, "_PROBES", 200)
        exact = sf.leace(moments, erase="z").report.variables[0].noise
    error = 4 * (2 / (128 * exact.degrees[0])) ** 0.5
    assert found.taus[0] == pytest.approx(exact.taus[0], rel=error)
    assert found.degrees[0] == pytest.approx(exact.degrees[0], rel=4 * error)
    assert found.taus[0] != exact.taus[0]
    assert certificate(found, 0.05) == pytest.approx(certificate(exact, 0.05), rel=error)


RARE = rare(0.06, 1500, 20, gap=2.0)


@pytest.mark.parametrize(
    ("p", "by", "labelled", "least", "most"),
    [
        (Population(2000, 60, gap=4.0), None, 0.1, 0.85, 1.15),
        *(
            pytest.param(Population(2000, 60, gap=4.0), None, labelled, 0.85, 1.15, marks=SLOW)
            for labelled in (1, 0.5)
        ),
        (RARE, None, 1, 0.9, 1.1),
        (CASES["rare, wide"], "z", 1, 0.85, 1.15),
        # The ranks of all erased variables count.
        (Population(300, 12, gap=7.0, others=9), None, 1, 0.8, 1.2),
        *(
            pytest.param(Population(300, 12, gap=7.0, others=k), by, 1, 0.8, 1.2, marks=SLOW)
            for k, by in ((1, None), (6, "z"), (9, "z"))
        ),
        # Controls: equal class covariances are what the figure needs without by=.
        (RARE._replace(wide=(1.0, 3.0)), None, 1, 0, 0.6),
        (CASES["rare, wide"], None, 1, 0, 0.4),
    ],
)
def test_the_expected_trace_is_that_of_a_simulation(
    p: Population, by: str | None, labelled: float, least: float, most: float
) -> None:
    """The mean over fits, with labels missing at random; of a rare class, it is below its bound."""
    rng, found = np.random.default_rng(3), []
    for _ in range(100):
        X, z = p.draw(rng)
        labels = {"z": np.where(rng.random(p.n) < labelled, z.astype(object), None)}
        if p.others:
            labels["u"] = rng.normal(size=(p.n, p.others))
            X += labels["u"] @ p.effects
        eraser: Any = sf.leace(sf.Moments(by=by).update(X, labels), erase=list(labels))
        variable = eraser.report.variables[0]
        found.append((p.r2(eraser), variable.expected, variable.expected_most or np.inf))
        assert ("labelled" in variable.kind) == (labelled < 1)
        assert variable.expected <= found[-1][2] * (1 + 1e-12)
    (true, expected, bound), error = np.mean(found, axis=0), np.std([row[0] for row in found]) / 10
    assert least * true <= expected <= most * true
    if by is None:
        assert f"at most {variable.expected_most:.2g}" in str(eraser.report)
        assert "equal covariances" in eraser.report.explain()
        assert p.q[1] == 0.5 or true + 3 * error < bound


def test_rows_without_noise_across_the_classes(tmp_path: Path) -> None:
    """Labelled rows that are constant within each class, and rows of one feature."""
    rng, z = np.random.default_rng(0), np.arange(300) % 2
    X, labels = rng.normal(size=(2, 4))[z], z.astype(object)
    X[:100], labels[:100] = rng.normal(size=(100, 4)), None
    eraser = sf.leace(sf.Moments(by="z").update(X, {"z": labels}), erase="z")
    assert eraser.report.certificate() == {"z": 0.0}
    eraser.save(tmp_path / "e")
    assert sf.Projection.load(tmp_path / "e").report == eraser.report
    one = rng.normal(size=(300, 1)) + z[:, None]
    eraser = sf.leace(sf.Moments(by="z").update(one, {"z": z}), erase="z")
    assert np.ptp(eraser(one)) < 1e-12
    assert 0 <= eraser.report.certificate()["z"] < 1e-12


def test_report_states_the_certificate_in_words() -> None:
    X, z = rare(0.2, 800, 6, wide=(1.0, 2.0)).draw(np.random.default_rng(4))
    for report, assumed in ((report_of(X, z, "z"), False), (report_of(X, z), True)):
        text = f"In 95 % of fits a linear predictor explains at most {limit_of(report):.2g} "
        assert text in report.explain()
        assert ("Moments(by='z')" in report.explain()) == assumed
        assert ("equal class covariances" in str(report)) == assumed
