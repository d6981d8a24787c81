"""The advice from moments alone (`advice.py`), by exact algebra and by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from comparisons import data, run

import splince_fast as sf
from splince_fast.evaluation import _tables
from splince_fast.evaluation.advice import frozen_head_advice, frozen_squared_errors, held_out_trace
from splince_fast.exceptions import InputError


def draw(rng: np.random.Generator, n: int, d: int, c: float) -> tuple[Any, Any]:
    """Rows of unit covariance, of which one direction has correlation c with z."""
    z = rng.normal(size=n)
    X = rng.normal(size=(n, d))
    X[:, 0] = c * z + np.sqrt(1 - c * c) * X[:, 0]
    return X, z


@pytest.mark.slow
def test_the_association_in_new_rows_depends_on_the_kernel_alone() -> None:
    rng = np.random.default_rng(0)
    X, z = draw(rng, 200, 20, 0.6)
    moments = sf.Moments().update(X, {"z": z})
    B = np.zeros(20)
    B[0] = 0.6
    direction = moments.cross_covariance("z")[:, 0]
    expected = B @ B - (B @ direction) ** 2 / (direction @ direction)
    for eraser in (sf.leace(moments, erase="z"), sf.sal(moments, erase="z")):
        P = eraser.matrix()
        left = P @ B
        shown = left @ np.linalg.pinv(P @ P.T, rcond=1e-9) @ left
        assert shown == pytest.approx(expected, rel=1e-9)
    Q = np.eye(20) - np.outer(np.eye(20)[3], np.eye(20)[3])  # control: another kernel
    assert pytest.approx(expected, rel=1e-3) != (Q @ B) @ (Q @ B)


@pytest.mark.parametrize(("d", "n", "c"), [(50, 200, 0.5), (50, 1000, 0.5), (100, 400, 0.15)])
def test_the_expected_trace_is_that_of_a_simulation(d: int, n: int, c: float) -> None:
    rng = np.random.default_rng(1)
    left, said = [], []
    for _ in range(60):
        X, z = draw(rng, n, d, c)
        moments = sf.Moments().update(X, {"z": z})
        b = moments.cross_covariance("z")[:, 0]
        left.append(c * c * (1 - b[0] ** 2 / (b @ b)))
        said.append(held_out_trace(moments, "z").expected)
    m = (d - 1) / n
    formula = c * c * m / (c * c + m)
    # Terms of order 1 / p and 1 / (n c^2) are left out, and the mean has its own error.
    slack = formula * (2 / d + 1 / (n * c * c)) + 3 * np.std(left) / 60**0.5
    assert abs(np.mean(left) - formula) < slack
    assert abs(np.mean(said) - formula) < slack + 3 * np.std(said) / 60**0.5
    assert abs(np.mean(left) - 2 * formula) > slack  # control


def test_rows_for_an_r2_give_that_r2() -> None:
    X, z = draw(np.random.default_rng(0), 2000, 30, 0.5)
    moments = sf.Moments().update(X, {"z": z})
    trace = held_out_trace(moments, "z")
    needed = trace.rows_for(0.002)
    assert held_out_trace(moments, "z", n=int(needed)).r2 == pytest.approx(0.002, rel=1e-3)
    assert trace.rows_for(0.9) == 0
    assert "training rows" in str(trace)
    with pytest.raises(InputError):
        trace.rows_for(0)
    for n in (0, True):
        with pytest.raises(InputError):
            held_out_trace(moments, "z", n=n)


@pytest.mark.slow
def test_the_threshold_tells_which_eraser_serves_a_shrunk_head() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 6))
    z, y = X[:, 0] + rng.normal(size=4000), 0.8 * X[:, 0] + 0.6 * X[:, 1] + rng.normal(size=4000)
    moments = sf.Moments().update(X, {"z": z, "y": y})
    advice = frozen_head_advice(moments, "z", "y")
    centred, target = X - X.mean(axis=0), y - y.mean()
    beta = np.linalg.lstsq(centred, target, rcond=None)[0]

    def risk(eraser: sf.Projection, g: float) -> float:
        return float(np.mean((target - g * (eraser(X) - X.mean(axis=0)) @ beta) ** 2))

    leace = sf.leace(moments, erase="z")
    splince = sf.splince(moments, erase="z", keep="y")
    for g, wins in ((advice.threshold - 0.01, True), (advice.threshold + 0.01, False)):
        assert (risk(splince, g) < risk(leace, g)) is wins
    assert f"{advice.threshold:.2f}" in str(advice)


def test_two_balanced_classes_are_decided_alike_whatever_the_squared_error() -> None:
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], 1000)
    z = np.where(rng.random(2000) < 0.85, y, 1 - y)
    X = rng.normal(size=(2000, 6)) + np.outer(y, np.eye(6)[0]) + np.outer(z, np.eye(6)[1] * 2)
    moments = sf.Moments().update(X, {"z": z, "task": y})
    mean = X.mean(axis=0)
    target = np.eye(2)[y]
    head = np.linalg.lstsq(X - mean, target - 0.5, rcond=None)[0].T
    leace, splince = sf.leace(moments, erase="z"), sf.splince(moments, erase="z", keep="task")
    scores = {p.method: (p(X) - mean) @ head[1] for p in (leace, splince)}
    first, second = scores.values()
    rho = frozen_head_advice(moments, "z", "task").rho
    assert rho > 0.2
    assert second == pytest.approx(first / (1 - rho), abs=1e-9)
    assert np.array_equal(first > 0, second > 0)
    for g, wins in ((0.2, True), (1.0, False)):  # of 2 (1 - rho) / (2 - rho)
        found = frozen_squared_errors(
            moments, "z", "task", g * head, X - mean, target, np.full(2, 0.5)
        )
        for name, eraser in (("LEACE", leace), ("SPLINCE", splince)):
            rest = target - 0.5 - g * (eraser(X) - mean) @ head.T
            assert found[name] == pytest.approx(np.mean(np.sum(rest**2, axis=1)), rel=1e-9)
        assert (found["SPLINCE"] < found["LEACE"]) is wins


def test_advice_on_frozen_heads_speaks_of_squared_error_and_shows_it() -> None:
    X, y, z = data(900)
    X[:, 2] += y + z
    z = np.where(np.random.default_rng(1).random(900) < 0.7, y, z)
    result = run(X, y, z, n_seeds=1)
    found = result.advice()
    (line,) = (x for x in _tables.advice_lines(result) if "frozen" in x)
    assert "smaller after LEACE than after SPLINCE, unless" in line
    assert "accuracy" not in line
    assert f"{found['squared_error_strong']:+.2g} at alpha 0.1 and" in line
    assert "For two classes of about equal size" in line
    assert found["squared_error_strong"] != found["squared_error_weak"]
    shrunk = run(X, y, z, n_seeds=1, alphas=(30.0, 1e-3)).advice()
    assert shrunk["squared_error_strong"] < 0 < shrunk["squared_error_weak"]
    (line, *_) = _tables.advice_lines(run(X, y, z, n_seeds=1, alphas=(0.01,)))
    assert line.count("at alpha") == 1
    three = run(X, y + (X[:, 3] > 0.5), z, n_seeds=1)
    assert not any("two classes" in x for x in _tables.advice_lines(three))
    weighted = run(
        X,
        y,
        z,
        n_seeds=1,
        association=(0.8,),
        association_method="weights",
        aligned_class=1,
        sizes=(300, 60, 120),
    )
    assert math.isfinite(weighted.advice()["squared_error_weak"])


@pytest.mark.parametrize("labelled", [1.0, 0.5, 0.1])
def test_the_expected_trace_is_that_of_the_labelled_rows(labelled: float) -> None:
    """Labels missing at random: x is of all rows, its covariance with z of the labelled ones."""
    n, d = 2000, 60
    mean = 2.0 * np.eye(d)[0]  # z = +-1, so that Cov(x) = I + mean mean^T and Cov(x, z) = mean
    covariance = np.eye(d) + np.outer(mean, mean)
    truth, expected = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        z = rng.integers(0, 2, n)
        X = rng.normal(size=(n, d)) + np.outer(2 * z - 1, mean)
        given = np.where(rng.random(n) < labelled, z.astype(object), None)
        moments = sf.Moments().update(X, {"z": given})
        eraser = sf.leace(moments, erase="z")
        P = eraser.matrix()
        cross = P @ mean
        truth.append(cross @ np.linalg.pinv(P @ covariance @ P.T, rcond=1e-10) @ cross)
        assert eraser.report is not None
        variable = eraser.report.variables[0]
        expected.append(variable.expected)
        assert held_out_trace(moments, "z").r2 == pytest.approx(variable.expected, rel=1e-3)
        assert ("labelled" in variable.kind) == (labelled < 1)
        assert variable.expected <= variable.expected_most
    # The standard error of the mean of 20 traces of d / n_labelled is 4 % of it; as if all rows had
    # labels, the trace would be a tenth of the truth at one label in ten.
    assert np.mean(expected) == pytest.approx(np.mean(truth), rel=0.15)


def test_rows_that_are_erased_already_are_named() -> None:
    X, y, z = data()
    text = "the training rows have no linear association with concept before erasing"
    erased = str(run(sf.erase(X, concept=z)[0], y, z, n_seeds=1))
    assert text in " ".join(erased.split())
    assert "would halve" not in erased
    assert text not in " ".join(str(run(X, y, z, n_seeds=1)).split())  # control
    moments = sf.Moments().update(sf.erase(X, concept=z)[0], {"z": z})
    assert "are they erased already?" in str(held_out_trace(moments, "z"))
