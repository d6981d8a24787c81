"""The profession experiment (`demo`, `cli.demo`) against explicit formulas."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from splince_fast.cli import main
from splince_fast.demo import experiment, table
from splince_fast.demo.data import ProfessionData
from splince_fast.demo.experiment import (
    ERASERS,
    METHODS,
    NounSplit,
    Results,
    SplitValues,
    fit_eraser,
)
from splince_fast.demo.figure import Plane
from splince_fast.exceptions import NotEnoughDataError

Float = NDArray[np.float64]
N_TEMPLATES, WIDTH = 6, 12


@pytest.fixture(scope="module")
def data() -> ProfessionData:
    """States made of the two scores and noise: 40 occupations, each also male and female."""
    rng = np.random.default_rng(3)
    stereotype = np.repeat(rng.uniform(-1, 1, size=40), 3)
    factual = np.tile([0.0, 1.0, -1.0], 40)
    n = len(factual)
    nouns = tuple(f"{form} {i}".strip() for i in range(40) for form in ("", "male", "female"))
    index = np.repeat(np.arange(n), N_TEMPLATES)
    noise = rng.normal(size=(n * N_TEMPLATES, WIDTH)) @ rng.normal(size=(WIDTH, WIDTH))
    scores = np.outer(stereotype, rng.normal(size=WIDTH)) + np.outer(
        factual, rng.normal(size=WIDTH)
    )
    return ProfessionData(
        activations=5.0 + 2 * scores[index] + 0.5 * noise,
        noun_index=index,
        nouns=nouns,
        families=tuple(str(i) for i in np.repeat(np.arange(40), 3)),
        templates=tuple(f"The {{noun}} did {i}" for i in range(N_TEMPLATES)),
        stereotype=stereotype,
        factual=factual,
        he_minus_she=rng.normal(size=WIDTH),
        model="a made-up model",
        licence="none",
        checksum="",
    )


@pytest.fixture(scope="module")
def results(data: ProfessionData) -> Results:
    return experiment.run(data, n_splits=3, random_state=1, train_correlation=0.3)


def scores(data: ProfessionData, rows: NDArray[np.intp]) -> tuple[Float, Float]:
    nouns = data.noun_index[rows]
    return data.stereotype[nouns], data.factual[nouns]


def test_splits_divide_no_family_and_set_both_correlations(data: ProfessionData) -> None:
    """Few prompts are dropped, and none from the training rows without a target."""
    families = np.array(data.families)[data.noun_index]
    for seed in range(5):
        full = experiment.make_split(data, (seed, 0))
        split = experiment.make_split(data, (seed, 0), 0.3)
        np.testing.assert_array_equal(split.test, full.test)
        assert len(full.train) == 28 * 3 * N_TEMPLATES
        assert len(full.train) / 3 < len(split.train) < len(full.train)
        assert len(full.test) > 0.8 * 12 * 3 * N_TEMPLATES
        train, test = set(families[full.train]), set(families[full.test])
        assert not train & test
        assert len(train) == 28
        assert set(families[split.train]) <= train
        on_test, on_train = (
            np.corrcoef(*scores(data, rows))[0, 1] for rows in (split.test, split.train)
        )
        assert abs(on_test) < 1e-3
        assert abs(on_train - 0.3) < 1e-3
        # Correlations of some hundred terms, by two formulas.
        assert split.test_correlation == pytest.approx(on_test, abs=1e-12)
        assert split.train_correlation == pytest.approx(on_train, abs=1e-12)


def test_a_split_depends_on_its_seed_alone(data: ProfessionData) -> None:
    first, again, other = (
        experiment.run(data, n_splits=n, random_state=seed) for n, seed in ((2, 5), (3, 5), (2, 6))
    )
    for method in METHODS:
        for field in ("stereotype", "factual", "probe_r2", "distortion"):
            values = first.column(method, field)
            np.testing.assert_array_equal(values, again.column(method, field)[:2])
            assert method == "Original" or not np.array_equal(values, other.column(method, field))


def test_scores_that_cannot_be_made_uncorrelated_are_refused(data: ProfessionData) -> None:
    same = dataclasses.replace(data, factual=data.stereotype)
    with pytest.raises(NotEnoughDataError, match="does not lead to a correlation of 0"):
        experiment.make_split(same, (0, 0))
    constant = dataclasses.replace(data, factual=np.ones_like(data.factual))
    with pytest.raises(NotEnoughDataError, match="a score is constant"):
        experiment.make_split(constant, (0, 0))


def explicit_projection(method: str, X: Float, z: Float, y: Float) -> Float:
    """P by the printed formulas, with a symmetric root of the covariance."""
    covariance = np.cov(X.T)
    s_xz, s_xy = ((X - X.mean(axis=0)).T @ (v - v.mean()) for v in (z, y))
    if method == "SAL":
        q = s_xz / np.linalg.norm(s_xz)
        return np.eye(len(q)) - np.outer(q, q)
    unwhiten = scipy.linalg.sqrtm(covariance).real
    W = np.linalg.inv(unwhiten)
    a, b = W @ s_xz, W @ s_xy
    if method == "LEACE":
        middle = np.eye(len(a)) - np.outer(a, a) / (a @ a)
    else:
        # U: complement of W s_xz. V: W s_xy, and what of U is orthogonal to both.
        U = scipy.linalg.null_space(a[None, :])
        V = np.column_stack([b, scipy.linalg.null_space(np.stack([a, b]))])
        middle = V @ np.linalg.inv(U.T @ V) @ U.T
    return np.asarray(unwhiten @ middle @ W)


@pytest.mark.parametrize("method", METHODS)
def test_one_split_against_the_printed_formulas(
    data: ProfessionData, results: Results, method: str
) -> None:
    split, outcome = results.splits[1], results.split_values[method][1]
    X = data.activations[split.train]
    z, y = scores(data, split.train)
    P = np.eye(WIDTH) if method == "Original" else explicit_projection(method, X, z, y)
    mean = X.mean(axis=0)
    erased = mean + (X - mean) @ P.T
    held = mean + (data.activations[split.test] - mean) @ P.T
    z_test, y_test = scores(data, split.test)
    regression = LinearRegression().fit(np.stack([z_test, y_test], 1), held @ data.he_minus_she)
    share = np.sum((erased - X) ** 2) / np.sum((X - mean) ** 2)
    lengths = [
        np.linalg.norm(np.cov(rows.T, score)[:-1, -1]) for score in (z, y) for rows in (erased, X)
    ]
    probe = make_pipeline(StandardScaler(), Ridge(alpha=len(X) * experiment.PROBE_PENALTY))
    expected = {
        "stereotype": regression.coef_[0],
        "factual": regression.coef_[1],
        "distortion": share,
        "residual": lengths[0] / lengths[1],
        "kept": lengths[2] / lengths[3],
        "probe_r2": r2_score(z_test, probe.fit(erased, z).predict(held)),
    }
    for field, value in expected.items():
        # Whitening costs the square of the condition number, some 1e4, in units of 2e-16.
        assert getattr(outcome, field) == pytest.approx(value, rel=1e-8, abs=1e-9), field


def test_the_guarantees_hold_and_leace_is_the_control(results: Results) -> None:
    for method in ERASERS:
        assert results.column(method, "residual").max() < 1e-12
        assert (results.column(method, "distortion") > 1e-3).all()
        assert (results.column(method, "seconds") > 0).all()
    np.testing.assert_allclose(results.column("SPLINCE", "kept"), 1, rtol=1e-12)
    assert results.column("LEACE", "kept").max() < 0.999
    assert results.column("SAL", "kept").max() < 0.999
    assert (results.column("Original", "residual") == 1).all()
    # Of states from which nothing was erased, the probe does find the score.
    assert results.column("Original", "probe_r2").min() > 0.5
    assert results.column("SPLINCE", "probe_r2").max() < 0.1


def test_the_probe_does_not_depend_on_units_or_on_a_constant_feature() -> None:
    rng = np.random.default_rng(0)
    X, z = rng.normal(size=(200, 3)), rng.normal(size=200)
    X[:, 0] += z
    before, after = (
        experiment.probe_r2(rows[:150], z[:150], rows[150:], z[150:])
        for rows in (X, np.c_[X * [1, 1000, 0.5], np.full(200, 7.0)])
    )
    assert 0 < before < 1
    assert after == pytest.approx(before, rel=1e-12)


def made_up_like_the_paper(advantage: float, noise: float = 0.01) -> Results:
    """Results with given coefficients."""
    rng = np.random.default_rng(0)
    split_values = {}
    for method, factual, stereotype in zip(
        METHODS, (2.0, 0.5, 1.5, 1.5 + advantage), (1.0, -0.2, 0.001, 0.1), strict=True
    ):
        split_values[method] = [
            SplitValues(z, y, 1e-15, 0.75, 0.0123, -0.05, 0.0042)
            for y, z in zip(
                factual + noise * rng.normal(size=10), [stereotype - 0.01, stereotype + 0.01] * 5,
                strict=True,
            )
        ]  # fmt: skip
    split = NounSplit(np.arange(30), np.arange(30, 40), 0.26, -0.0004)
    return Results(split_values, [split] * 10, 0.26, 7, 3, 0)


def test_the_odds_factor_is_students_interval_widened_for_overlap() -> None:
    results = made_up_like_the_paper(0.5)
    values = results.column("LEACE", "factual")
    error = scipy.stats.sem(values) * np.sqrt(1 + len(values) * 3 / 7)
    limits = scipy.stats.t.interval(0.95, len(values) - 1, values.mean(), error)
    factor = table.odds_factor(results, "LEACE", "factual")
    assert factor == pytest.approx(np.exp([values.mean(), *limits]), rel=1e-12)


@pytest.mark.parametrize("advantage", [0.01, -0.01])
def test_the_factual_test_is_students_corrected_for_overlap(advantage: float) -> None:
    results = made_up_like_the_paper(advantage)
    found = table.factual_test(results)
    pair = (results.column(method, "factual") for method in ("SPLINCE", "LEACE"))
    t = scipy.stats.ttest_rel(*pair).statistic / np.sqrt(1 + 10 * 3 / 7)
    assert found.t == pytest.approx(t, rel=1e-12)
    assert found.p == pytest.approx(scipy.stats.t.sf(t, 9), rel=1e-10)


@pytest.mark.parametrize(("advantage", "starred"), [(0.5, True), (0.003, False), (-0.5, False)])
def test_star_and_reading_follow_the_figures(advantage: float, starred: bool) -> None:
    results = made_up_like_the_paper(advantage)
    assert ("]*" in table.table(results).splitlines()[-1]) is starred
    stereotype, factual = table.paper_comparison(results).splitlines()
    said = "significant as in the paper" if starred else "not significant unlike the paper"
    assert f", {said}; " in factual
    difference = np.mean(results.column("SPLINCE", "factual") - results.column("LEACE", "factual"))
    assert f"SPLINCE's factor is {np.exp(difference):.2f} times LEACE's" in factual
    assert "LEACE kept 75.0% of |Cov(x, y)|" in factual
    assert "2.72 becomes SAL 0.82, LEACE 1.00, SPLINCE 1.11: nearer to 1 for all, as" in stereotype
    assert stereotype.endswith("contains 1 for LEACE.")


def test_the_plane_shows_all_that_the_erasers_do(data: ProfessionData, results: Results) -> None:
    plane = Plane(data, results)
    rows = results.splits[0].train
    moments, X = experiment.accumulate(data, rows), data.activations[rows]
    erasers = {method: fit_eraser(method, moments) for method in plane.erased}
    for method, points in plane.erased.items():
        change = erasers[method](X) - X
        moved = np.linalg.norm(points - plane.states, axis=1)
        np.testing.assert_allclose(moved, np.linalg.norm(change, axis=1), atol=1e-10)
        assert np.linalg.norm(plane.covariance(points, plane.z)) < 1e-12
    before = plane.covariance(plane.states, plane.y)
    np.testing.assert_allclose(plane.covariance(plane.erased["SPLINCE"], plane.y), before)
    assert not np.allclose(plane.covariance(plane.erased["LEACE"], plane.y), before, rtol=0.01)
    np.testing.assert_allclose(np.cov(plane.whitened.T, ddof=0), np.eye(2), atol=1e-12)
    for points in (plane.states, plane.whitened):
        for score in (plane.z, plane.y):
            assert (points @ plane.covariance(points, score) @ (score - score.mean())) > 0
    a, b = (plane.covariance(plane.whitened, score) for score in (plane.z, plane.y))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) == pytest.approx(plane.cosine)
    report = erasers["SPLINCE"].report
    assert report is not None
    assert report.cosines[0] == pytest.approx(abs(plane.cosine))


@pytest.mark.parametrize("shipped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_gives_a_figure_and_keeps_the_guarantees(
    shipped: bool, data: ProfessionData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shipped:
        monkeypatch.setattr("splince_fast.demo.data.load", lambda: data)
    figure, numbers = tmp_path / "figure.png", tmp_path / "all.json"
    assert main(["demo", "--splits", "2", "--json", str(numbers), "--figure", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert figure.stat().st_size > 20_000
    runs = json.loads(numbers.read_text())["runs"]
    for run, correlation in zip(runs, (None, 0.26), strict=True):
        assert run["train_correlation"] == correlation
        for split in run["splits"]:
            assert abs(split["test_correlation"]) < 1e-3
            assert correlation is None or abs(split["train_correlation"] - correlation) < 1e-3
        for method in ERASERS:
            for outcome in run["methods"][method]["per_split"]:
                assert outcome["residual"] < 1e-12
                assert method != "SPLINCE" or outcome["kept"] == pytest.approx(1, rel=1e-12)
        for field in ("exp_beta_stereo", "exp_beta_fact"):
            assert not shipped or run["methods"]["Original"][field]["mean"] > 1


def test_without_matplotlib_the_table_is_printed_and_the_extra_is_named(
    data: ProfessionData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("splince_fast.demo.data.load", lambda: data)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    extra = 'pip install "splince_fast[demo]"'
    assert main(["demo", "--splits", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("exp(beta_fact)") == 2
    assert extra in printed
    assert main(["demo", "--splits", "2", "--no-figure"]) == 0
    out, err = capsys.readouterr()
    assert "figure" not in out
    assert "training prompts: 100%" in err
    assert main(["demo", "--figure", "figure.png"]) == 2  # one that was asked for is an error
    out, err = capsys.readouterr()
    assert (out, extra in err) == ("", True)
    assert not list(tmp_path.iterdir())


def test_mistakes_in_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, text in {
        "--splits 1": "at least 2",
        "--random-state -3": "must not be negative",
        "--json absent/all.json": "there is no folder",
        "--figure absent/figure.png": "there is no folder",
        "--splits many": "invalid int value",
        "--figure a.png --no-figure": "not allowed with",
    }.items():
        assert text in told("demo", *arguments.split(), code=2)
        assert not list(tmp_path.iterdir())
