"""The log-odds regression (`regression.py`) against least squares, and its clusters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from splince_fast import evaluation as ev
from splince_fast.exceptions import InputError, NonFiniteError, NotEnoughDataError

rng = np.random.default_rng(0)
NOUN = np.repeat(np.arange(40), 11)
Z, Y = rng.normal(size=40)[NOUN], rng.normal(size=40)[NOUN]
NOISE = rng.normal(size=40)[NOUN]
ODDS = 0.5 + 0.3 * Z + 1.2 * Y + NOISE


def test_coefficients_are_least_squares_and_errors_those_of_the_sandwich() -> None:
    found = ev.log_odds_regression(ODDS, stereotype=Z, factual=Y, clusters=NOUN)
    X = np.stack([np.ones(440), Z, Y], axis=1)
    beta = np.linalg.lstsq(X, ODDS, rcond=None)[0]
    assert found.coefficients == pytest.approx(beta)
    rest = ODDS - X @ beta
    meat = sum(np.outer(s, s) for s in (X[g == NOUN].T @ rest[g == NOUN] for g in range(40)))
    bread = np.linalg.inv(X.T @ X)
    assert found.covariance == pytest.approx(bread @ meat @ bread * 40 / 39)
    assert found.odds_ratios["factual"] == pytest.approx(math.exp(found["factual"]))
    low, high = found.interval("factual")
    half = scipy.stats.t.ppf(0.975, 39) * found.covariance[2, 2] ** 0.5  # 40 clusters less one
    assert (low, high) == pytest.approx((beta[2] - half, beta[2] + half), rel=1e-12)
    narrow = found.interval("factual", 0.5)
    quarter = scipy.stats.t.ppf(0.75, 39) * found.covariance[2, 2] ** 0.5
    assert narrow == pytest.approx((beta[2] - quarter, beta[2] + quarter), rel=1e-12)
    assert "factual" in str(found)


def test_eleven_prompts_of_a_noun_are_not_eleven_observations() -> None:
    with_nouns = ev.log_odds_regression(ODDS, factual=Y, clusters=NOUN).interval("factual")
    without = ev.log_odds_regression(ODDS, factual=Y).interval("factual")
    assert with_nouns[1] - with_nouns[0] > 2 * (without[1] - without[0])


def test_a_paired_test_cancels_what_two_regressions_share() -> None:
    other = ODDS - 0.05 * Y + 0.01 * rng.normal(size=440)
    first = ev.log_odds_regression(ODDS, factual=Y, clusters=NOUN)
    second = ev.log_odds_regression(other, factual=Y, clusters=NOUN)
    value, error, p = first.difference(second, "factual")
    assert value == pytest.approx(0.05, abs=0.005)
    assert p < 1e-6
    assert error < 0.1 * first.covariance[1, 1] ** 0.5  # a constant reference would use this
    influence = first.residual_scores[:, 1] - second.residual_scores[:, 1]
    assert error == pytest.approx(math.sqrt(np.sum(influence**2) * 40 / 39), rel=1e-12)
    assert p == pytest.approx(2 * scipy.stats.t.sf(value / error, 39), rel=1e-9)
    assert first.difference(first, "factual")[2] == 1.0


def test_invalid_scores_are_refused() -> None:
    with pytest.raises(InputError, match="collinear"):
        ev.log_odds_regression(ODDS, a=Y, b=2 * Y)
    with pytest.raises(InputError, match="at least one score"):
        ev.log_odds_regression(ODDS)
    with pytest.raises(InputError, match="shape"):
        ev.log_odds_regression(ODDS, a=Y[:-1])
    with pytest.raises(NonFiniteError):
        ev.log_odds_regression(ODDS * np.nan, a=Y)
    with pytest.raises(NotEnoughDataError, match="clusters"):
        ev.log_odds_regression(ODDS, a=Y, clusters=NOUN % 2)
    with pytest.raises(InputError, match="'intercept'"):
        ev.log_odds_regression(ODDS, intercept=Y)
    one = ev.log_odds_regression(ODDS, a=Y)
    with pytest.raises(InputError, match="different rows"):
        one.difference(ev.log_odds_regression(ODDS[:100], a=Y[:100]), "a")
    with pytest.raises(InputError, match="scores"):
        one.difference(ev.log_odds_regression(ODDS, b=Y), "b")
    with pytest.raises(KeyError, match="no score 'b'"):
        one["b"]
    with pytest.raises(InputError, match="level is 95"):
        one.interval("a", level=95)


@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_units_of_scores_are_not_collinearity(unit: float) -> None:
    one, other = (ev.log_odds_regression(ODDS, a=Y * u) for u in (1.0, unit))
    assert np.isclose(other["a"] * unit, one["a"], rtol=1e-9)
    with pytest.raises(InputError, match="collinear"):  # control
        ev.log_odds_regression(ODDS, a=Y, b=unit * Y)
