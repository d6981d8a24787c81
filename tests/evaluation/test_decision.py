"""The decision (`_decision.py`): its outcomes, their rates, and the sentences of the cards."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from comparisons import changed, data, run
from scipy.stats import norm
from scipy.stats import t as student

import splince_fast as sf
from splince_fast.evaluation import Comparison, statistics
from splince_fast.evaluation._decision import (
    MIN_GAIN,
    _Choice,
    cards,
    sampling_accuracy,
)

SEEDS = 6


@pytest.fixture(scope="module")
def plain() -> Comparison:
    X, y, z = data(900)
    return run(
        X, y, z, n_seeds=SEEDS, heads=("retrained",), erasers=("none", "SAL", "LEACE"),
        association=0.8,
    )  # fmt: skip


def drawn(plain: Comparison, rng: np.random.Generator, gap: float, none: float) -> Comparison:
    """Worst groups of .7 and .7 + gap, of unerased rows .7 + none; splits share rows.

    Differences have the variance s^2 (1/J + ratio) in the mean: a part that all seeds share.
    """
    ratio = plain.test_ratio()
    values = {}
    for eraser, mean in (("none", 0.7 + none), ("SAL", 0.7), ("LEACE", 0.7 + gap)):
        shared = 0.01 * math.sqrt(ratio) * rng.normal()
        values[eraser] = {s: mean + shared + 0.01 * float(rng.normal()) for s in range(SEEDS)}
    return changed(plain, values)


@pytest.mark.parametrize("none", [-0.2, pytest.param(0.0, marks=pytest.mark.slow)])
def test_equal_erasers_are_not_decided_in_95_percent_of_runs(
    plain: Comparison, none: float
) -> None:
    rng = np.random.default_rng(0)
    runs = 80
    outcomes = [drawn(plain, rng, 0.0, none).decision().outcome for _ in range(runs)]
    decided = outcomes.count("decided")
    # Within three standard errors of 5 %; the test is conservative for few seeds.
    assert decided / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    far = [drawn(plain, rng, 0.3, none).decision() for _ in range(20)]  # control
    assert all(d.outcome == "decided" and d.eraser == "LEACE" for d in far)


def test_the_outcome_names_erasing_that_does_not_help(plain: Comparison) -> None:
    rng = np.random.default_rng(1)
    found = drawn(plain, rng, 0.0, 0.2).decision()
    assert found.outcome == "no gain"
    assert found.sentence.startswith("Erasing does not improve this metric")
    assert "LEACE, which changes the rows least" in found.sentence
    assert drawn(plain, rng, 0.0, -0.2).decision().outcome != found.outcome  # control


def test_the_number_of_seeds_in_the_sentence_narrows_the_interval() -> None:
    for deviation, ratio, half in ((0.02, 0.01, 0.01), (0.005, 0.3, 0.01), (0.02, 0.001, 0.005)):
        n = statistics.seeds_for(deviation, ratio, half)
        assert n is not None

        def width(n: int, deviation: float = deviation, ratio: float = ratio) -> float:
            return float(student.ppf(0.975, n - 1)) * deviation * math.sqrt(1 / n + ratio)

        assert width(n) <= half
        assert n == 3 or width(n - 1) > half
    assert statistics.seeds_for(0.02, 0.3, 0.01) is None  # 1.96 sd sqrt(ratio) is wider
    # The interval of the test that is made has that width.
    values = 0.005 * np.random.default_rng(0).normal(size=10)
    *_, low, high = statistics.corrected_t(values, 0.3)
    deviation = float(values.std(ddof=1))
    limit = (high - low) / 2
    assert statistics.seeds_for(deviation, 0.3, limit * (1 + 1e-9)) == 10


def test_cards_give_the_reasons_for_a_probe_above_chance(plain: Comparison) -> None:
    concept = next(card for card in cards(plain) if card.title.startswith("The concept"))
    assert "chance .5" in concept.text
    assert "unerased" in concept.text
    assert "no linear predictor" not in concept.text
    assert float(concept.value) > 0.55
    assert "From the sampling error of the training rows alone" in concept.text
    assert (
        "shift of distribution: association p = 0.8" in concept.text or "explains" in concept.text
    )
    cost = cards(plain)[-1]
    assert cost.value.endswith("%")
    assert "of the variance of the rows is changed" in cost.text


@pytest.mark.parametrize(("p", "distance"), [(0.5, 0.4), (0.7, 1.5), (0.9, 3.0)])
def test_accuracy_of_sampling_is_that_of_the_best_linear_rule(p: float, distance: float) -> None:
    r2 = p * (1 - p) * distance**2 / (1 + p * (1 - p) * distance**2)
    grid = np.linspace(-12, 12, 200_001)  # thresholds of a rule for N(0, 1) and N(distance, 1)
    rates = p * norm.cdf(grid) + (1 - p) * norm.sf(grid - distance)
    assert sampling_accuracy(r2, p) == pytest.approx(rates.max(), abs=1e-6)
    assert math.isnan(sampling_accuracy(r2, 0.3))  # more than two classes


def test_every_column_has_a_definition(plain: Comparison) -> None:
    from splince_fast.evaluation import report_html

    found = dict(report_html.definitions(plain))
    for table in (plain.table(metric) for metric in plain.metrics):
        assert table.title.partition(",")[0] in found
    assert all(found.values())


def test_partial_erasers_are_never_chosen() -> None:
    X, y, z = data(600)
    erasers = ("none", "LEACE", "LEACE*0.5", "random")
    found = run(X, y, z, n_seeds=3, erasers=erasers, association=0.8, heads=("retrained",))
    high = {e: dict.fromkeys(range(3), 0.9 if "*" in e or e == "random" else 0.5) for e in erasers}
    decision = changed(found, high).decision()
    assert decision.eraser == "LEACE"
    assert "LEACE*0.5" in decision.sentence.partition("Not considered")[2]
    alone = run(X, y, z, n_seeds=3, erasers=("none", "LEACE*0.5"), heads=("retrained",))
    assert alone.decision().eraser is None
    assert "of the covariance with the concept remains" in alone.decision().sentence


def test_an_eraser_is_partial_at_the_level_that_is_decided() -> None:
    X, y, z = data(2000)

    def partial_at_one_half(moments: sf.Moments) -> sf.Projection:
        eraser = sf.leace(moments, erase="concept")
        cross = moments.cross_covariance("task")
        return eraser if np.abs(cross[0]).max() > 0.2 else eraser.scaled(0.5)

    erasers = {"none": "none", "SAL": "SAL", "mine": partial_at_one_half}
    found = run(X, y, z, n_seeds=3, erasers=erasers, association=(0.5, 0.9), heads=("retrained",))
    high = {e: dict.fromkeys(range(3), 0.9 if e == "mine" else 0.5) for e in erasers}
    found = changed(found, high)
    assert found.decision(p=0.9).eraser == "mine"
    assert found.decision(p=0.5).eraser == "SAL"


def test_partial_iterative_erasers_are_never_chosen() -> None:
    X, y, z = data(600)
    erasers = ("none", "LEACE", "INLP", "INLP*0.5")
    found = run(X, y, z, n_seeds=3, erasers=erasers, association=0.8, heads=("retrained",))
    values = {"none": 0.5, "LEACE": 0.5, "INLP": 0.7, "INLP*0.5": 0.9}
    decision = changed(
        found, {e: dict.fromkeys(range(3), value) for e, value in values.items()}
    ).decision("worst_group")
    assert decision.eraser == "INLP", (
        decision.sentence
    )  # the control: at full intensity it counts as complete
    assert "INLP*0.5" in decision.sentence.partition("Not considered")[2]


def test_a_concept_of_three_classes_has_no_accuracy_of_two() -> None:
    rng = np.random.default_rng(3)
    z, y = rng.choice(3, 600, p=[0.7, 0.2, 0.1]), rng.integers(0, 2, 600)
    X = rng.normal(size=(600, 6)) + np.eye(6)[z] + np.outer(y, np.eye(6)[5])
    found = run(X, y, z, n_seeds=3, erasers=("none", "SAL"), heads=("retrained",))
    above_chance = [
        dataclasses.replace(r, values=r.values | {"probe_accuracy": 0.95})
        if "probe_accuracy" in r.values
        else r
        for r in found.records
    ]
    # The control, a concept of unknown size, counts as one of two classes.
    for sizes, expected in (((3,), False), ((), True)):
        context = dataclasses.replace(found.context, concept_sizes=sizes)
        texts = [card.text for card in cards(Comparison(above_chance, context))]
        assert any("an accuracy of about" in text for text in texts) == expected
    assert found.context.concept_sizes == (3,)


def test_the_least_gain_of_a_bounded_metric_is_absolute(plain: Comparison) -> None:
    for metric in ("accuracy", "class_accuracy", "equalized_odds"):
        choice = _Choice(plain, metric, "retrained", 0.8, "none", ["LEACE", "SAL"])
        assert choice.min_gain == MIN_GAIN, metric


def test_an_iterative_eraser_that_removed_nothing_is_never_chosen() -> None:
    rng = np.random.default_rng(1)
    z, y = rng.integers(0, 2, 400), rng.integers(0, 2, 400)
    X = rng.normal(size=(400, 5)) + np.outer(y, np.eye(5)[1]) + 0.1 * np.outer(z, np.eye(5)[0])
    found = run(X, y, z, n_seeds=3, erasers=("LEACE", "INLP"), alphas=(0.1,))
    assert set(found.values("rank", eraser="INLP").values()) == {0.0}
    decision = found.decision()
    assert decision.eraser == "LEACE"
    assert "INLP" in decision.sentence.partition("Not considered")[2]
    assert "INLP is best" not in decision.sentence


def test_a_worst_group_of_few_rows_decides_nothing(plain: Comparison) -> None:
    X, y, z = data(200)
    few = run(X, y, z, n_seeds=3, erasers=("none", "LEACE", "SAL"), heads=("retrained",))
    assert any(cell.n < 20 for cell in few.worst_cells(eraser="LEACE").values())
    assert few.decision().metric == "accuracy"
    assert plain.decision().metric == "worst_group"  # control
    assert few.decision("worst_group").metric == "worst_group"


def test_the_eraser_to_take_is_the_one_tested_against_unerased_rows(plain: Comparison) -> None:
    """SAL has the larger mean and varies much; LEACE changes the rows less and varies little."""
    noise = 0.01 * np.random.default_rng(2).normal(size=(3, SEEDS))
    spread = [-0.25, 0.25] * (SEEDS // 2)
    values = {
        "none": {s: 0.6 + noise[0, s] for s in range(SEEDS)},
        "LEACE": {s: 0.78 + noise[1, s] for s in range(SEEDS)},
        "SAL": {s: 0.8 + spread[s] + noise[2, s] for s in range(SEEDS)},
    }
    found = changed(plain, values)
    decision = found.decision()
    assert decision.eraser == "LEACE"
    assert "LEACE is better than unerased rows" in decision.sentence
    assert "SAL is" not in decision.sentence
    rows = {row.method: row for row in found.differences("worst_group", reference="SAL")}
    assert not rows["none"].significant  # control: by the best mean nothing would be shown


def test_an_interval_without_zero_that_is_not_significant_has_its_p(plain: Comparison) -> None:
    """The interval is of one comparison, the test is corrected for two."""
    rng = np.random.default_rng(0)
    for shift in np.linspace(0.005, 0.06, 60):
        found = drawn(plain, rng, float(shift), 0.0)
        row = {r.method: r for r in found.differences("worst_group", reference="LEACE")}["SAL"]
        if not row.significant and row.low * row.high > 0:
            assert "after Holm's correction" in found.decision().sentence
            break
    else:
        pytest.fail("no draw has such an interval")
