"""The command, and the claims and pictures of the experiments (`findings`, `images`)."""

from __future__ import annotations

import ast
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

import reproduction
from reproduction import __main__ as command
from reproduction import balanced_heads, images, language
from reproduction.data import VARIABLE, Dataset, load
from reproduction.experiments import EXPERIMENTS, best_claim, compared
from reproduction.findings import (
    Claim,
    Findings,
    Options,
    Part,
    above,
    below,
    cell,
    holm,
    interval,
)
from reproduction.language import log_odds_regression
from splince_fast import evaluation as ev
from splince_fast.evaluation.statistics import corrected_t
from splince_fast.evaluation.statistics import holm as adjusted


@pytest.fixture
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.filterwarnings("ignore:up to .* test rows of a split equal")
@pytest.mark.parametrize(
    "name",
    [
        "covariance",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("images", "vision_ood", "professions")),
    ],
)
@pytest.mark.usefixtures("no_data_folder")
def test_an_experiment_runs_on_shipped_data(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the figures")
    assert command.main([name, "--quick", "--seeds", "1", "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for line in (
        "data    :",
        "licence :",
        "agrees  :",
        "differs :",
        "not decided:",
        "time    :",
    ):
        assert line in printed
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["values"]
    if name in ("covariance", "images"):
        assert all(path.stat().st_size > 5000 for path in tmp_path.glob("*.png"))
        assert list(tmp_path.glob("*.png"))


@pytest.mark.usefixtures("no_data_folder")
def test_an_experiment_without_data_exits_with_an_explanation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["waterbirds"]) == 2
    assert "no offline stand-in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["bios", "--seeds", "0"])
    with pytest.raises(SystemExit):
        command.main(["jse"])


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reproduction", "--help"],
        capture_output=True, text=True, check=True, timeout=120,
        cwd=Path(reproduction.__file__).parents[1],
    )  # fmt: skip
    assert all(name in done.stdout for name in EXPERIMENTS)


def test_the_experiments_use_public_names_and_the_demo_alone() -> None:
    for path in Path(reproduction.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("splince_fast"):
                if module.startswith(("splince_fast.demo", "splince_fast.exceptions")):
                    continue
                names = {alias.name for alias in node.names}
                assert names <= set(importlib.import_module(module).__all__), (path, module)


def claim(*parts: Part) -> Claim:
    return Claim("", "", parts)


def test_a_claim_is_a_conjunction() -> None:
    """It holds if each part is significant, and fails if one does after Holm's adjustment."""
    yes, no, maybe = Part(True, 0.04), Part(False, 0.001), Part(True, 0.2)
    assert claim(yes, yes, yes).agrees is True
    assert claim(yes, maybe).agrees is None
    assert claim(yes, no, maybe).agrees is False
    assert claim(Part(False, 0.03)).agrees is False
    assert claim(Part(False, 0.03), yes).agrees is None  # .03 is no surprise among two tests
    assert claim(Part(False, 0.2)).agrees is None
    assert claim(Part(True, math.nan)).agrees is None
    assert claim(Part(False, math.nan), no).agrees is False


def test_parts_that_hold_by_chance_do_not_contradict_a_claim() -> None:
    """Of true conjunctions on their boundary at most 5 % are contradicted."""
    rng = np.random.default_rng(0)
    p = rng.random((4000, 5))
    naive = np.mean((p < 0.05).any(axis=1))
    found = np.mean([claim(*(Part(False, q) for q in row)).agrees is False for row in p])
    assert found < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 4000)
    assert naive > 0.2  # control: without the adjustment
    np.testing.assert_allclose(holm(p[0]), adjusted(list(p[0])))


@given(st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=3, max_size=8))
def test_the_test_of_a_part_is_that_of_its_interval(values: list[float]) -> None:
    assume(np.std(values) > 1e-3)
    for threshold in (-0.2, 0.0, 0.3):
        assume(abs(np.mean(values) - threshold) > 1e-9)  # else rounding decides the sign
        _, p, low, high = corrected_t([v - threshold for v in values], 0.25)
        part = above(values, threshold, 0.25)
        assert part.p == pytest.approx(p, rel=1e-9)
        assert part.holds == (np.mean(values) > threshold)
        assert below(values, threshold, 0.25)[1] == pytest.approx(p, rel=1e-9)
        assert interval(values, 0.25) == (
            f"95 % interval {low + threshold:+.3f} to {high + threshold:+.3f}"
        )
        seeds = claim(part).seeds
        assert seeds is None or seeds > len(values) or p < 0.05


def test_claims_are_listed_by_verdict_with_the_seeds_that_would_decide() -> None:
    part = Part(True, 0.01)
    claims = [Claim("a", "1", [part]), Claim("b", "2", [Part(False, 0.01)])]
    findings = Findings([load("images")], [], claims)
    assert findings.verdicts() == "agrees  : a (1)\ndiffers : b (2)\nnot decided: nothing"
    claims.append(Claim("c", "3", [above([0.1, 0.2], 0.0, 0.25)]))
    assert findings.verdicts().splitlines()[2:] == [
        "not decided: c (3)", "seeds   : nothing is tested below --seeds 3"
    ]  # fmt: skip
    claims[2] = Claim("c", "3", [above([0.1, 0.5, 0.2], 0.0, 0.25)])
    n = claims[2].seeds
    assert n is not None
    assert n > 3
    assert findings.verdicts().endswith(f"it takes at least --seeds {n}")
    # The same mean and deviation at n and at n - 1 seeds.
    t = {m: 0.8 / 3 / np.std([0.1, 0.5, 0.2], ddof=1) / np.sqrt(1 / m + 0.25) for m in (n, n - 1)}
    assert t[n] > stats.t.ppf(0.975, n - 1)
    assert t[n - 1] < stats.t.ppf(0.975, n - 2)
    claims[2] = Claim("c", "3", [above([0.1, 0.5, -0.4], 0.0, 0.25)])
    assert "it takes more rows" in findings.verdicts()
    # One part that fails decides a conjunction, whatever the others need; Holm's method counts.
    failing = below([0.05, 0.2, 0.11], 0.0, 0.01)
    alone, three = claim(failing).seeds, claim(failing, *2 * [Part(True, 0.5, lambda n: 0.5)]).seeds
    assert alone is not None
    assert three is not None
    assert 3 < alone < three
    assert claim(failing, Part(True, 0.5)).seeds is None


def test_winobias_is_decided_by_a_sign_test() -> None:
    theirs = np.zeros(396, dtype=bool)
    ours = theirs.copy()
    ours[:4], theirs[4] = True, True
    part, text = language.sign_test(ours, theirs)
    assert claim(part).agrees is None
    assert text == "4 gained and 1 lost of 396, p = 0.375"
    ours[:20] = True
    theirs[:] = False
    theirs[21] = True
    assert claim(language.sign_test(ours, theirs)[0]).agrees is True
    assert claim(language.sign_test(theirs, ours)[0]).agrees is False
    same = language.sign_test(ours, ours)
    assert same == (Part(False, 1.0), "0 gained and 0 lost of 396, p = 1")


def test_a_lead_is_decided_by_the_corrected_test() -> None:
    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 2, 600), rng.integers(0, 2, 600)
    X = rng.normal(size=(600, 5)) + np.outer(y, np.eye(5)[0]) + 3 * np.outer(z, np.eye(5)[1])
    found = []
    data = Dataset("made", X, {"task": y, "concept": z}, "", "")
    judge = compared(5, found.append, heads=("retrained",), alphas=(0.1,))  # type: ignore[arg-type]
    judge(Options(), data)
    assert best_claim(found[0], "accuracy", "SPLINCE leads").agrees is None
    assert best_claim(found[0], "probe_accuracy", "x", best="none").agrees is True
    assert best_claim(found[0], "probe_accuracy", "x", best="LEACE").agrees is False


def test_figures_of_one_seed_have_no_interval() -> None:
    assert cell(0.5) == cell([0.4, 0.6]) == ".500"
    assert cell([0.4, 0.5, 0.6]).startswith(".500 ±")


def test_differences_share_one_symmetric_scale_with_white_at_zero() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the figures")
    rng = np.random.default_rng(0)
    pictures = rng.random((3, 12))
    erased = {"SAL": pictures + 0.1, "LEACE": pictures - rng.random((3, 12))}
    figure = images.draw_images(pictures, erased, (3, 4), ["a", "b", "c"])
    panels = [ax.get_images()[0] for ax in figure.axes if ax.get_images()]
    signed = [panel for panel in panels if panel.get_clim() != (0, 1)]
    assert len(signed) == 6
    limits = {panel.get_clim() for panel in signed}
    assert len(limits) == 1
    ((low, high),) = limits
    assert low == -high
    assert high == pytest.approx(np.abs(erased["LEACE"] - pictures).max())
    assert signed[0].get_cmap()(0.5)[:3] == pytest.approx((1, 1, 1), abs=0.01)


def test_clipped_fraction_counts_pixels_outside_the_unit_interval() -> None:
    assert images.clipped_fraction(np.array([[0.0, 1.0], [1.1, -0.1]])) == 0.5


@pytest.mark.usefixtures("no_data_folder")
def test_the_image_experiment_measures_shifts_by_cell() -> None:
    data = load("images")
    found = images.run(Options(quick=True), data)
    norms = [found.values[f"shift/LEACE/{data.cell(a, b)}/0.9"] for a in (0, 1) for b in (0, 1)]
    assert min(norms) > 0
    assert found.values["kept cov/SPLINCE/retrained/0.9"] == pytest.approx(1.0, abs=1e-6)
    assert found.values["kept cov/LEACE/retrained/0.9"] < 0.9
    assert len(found.claims) == 2


def without_sizes() -> Dataset:
    """Small images whose numbers of training and test rows are not stated, like those of CelebA."""
    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 2, 800), rng.integers(0, 2, 800)
    X = rng.random((800, 6)) + 0.5 * np.outer(y, np.eye(6)[0]) + np.outer(z, np.eye(6)[1])
    labels = {"task": y, "concept": z}
    return Dataset("made", X, labels, "", "", 1, arrays={"shape": np.array([2, 3])})


def test_balanced_heads_take_default_sizes_with_validation_rows() -> None:
    findings = balanced_heads.vision(Options("paper", seeds=1, quick=True), without_sizes())
    assert {f"worst_group/{name}/0.9" for name in ("SPLINCE", "DFR", "GDRO")} <= {*findings.values}
    assert findings.data[0].sizes is None


def test_intervals_of_images_use_the_sizes_of_the_splits() -> None:
    data = without_sizes()
    findings = images.run(Options("paper", seeds=3), data)
    y, z = data.labels["task"], data.labels["concept"]
    split = ev.spurious_split(y, z, p=0.9, random_state=0, aligned_class=1)
    results = [images.evaluate_split(data, 0.9, seed) for seed in range(3)]
    norms = [list(result.norms("SPLINCE").values()) for result in results]
    # Task and concept are aligned in the first and the last cell.
    ratios = [min(b, c) / max(a, d) for a, b, c, d in norms]
    text = interval(ratios, len(split.test) / len(split.train))
    assert text in findings.claims[0].evidence
    assert interval(ratios, 0.0) != text  # control: no overlap of the splits


def test_an_output_that_is_no_folder_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        command.main(["covariance", "--quick", "-o", str(tmp_path / "file")])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert "-o/--output" in err
    assert not out


def test_the_errors_of_coefficients_are_robust_to_clusters() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(120), 6)
    z, y = rng.normal(size=(2, 120))[:, clusters]
    log_odds = 2 * z - y + rng.normal(size=120)[clusters]
    found, errors = log_odds_regression(log_odds, z, y, clusters)
    design = np.stack([np.ones_like(z), z, y], axis=1)
    expected, *_ = np.linalg.lstsq(design, log_odds)
    np.testing.assert_allclose(found, expected[1:], rtol=1e-12)
    residual, inverse = log_odds - design @ expected, np.linalg.inv(design.T @ design)
    sums = [design[clusters == c].T @ residual[clusters == c] for c in np.unique(clusters)]
    middle = sum(np.outer(s, s) for s in sums) * len(sums) / (len(sums) - 1)
    robust = np.sqrt(np.diag(inverse @ middle @ inverse))[1:]
    np.testing.assert_allclose(errors, robust, rtol=1e-10)
    _, plain = log_odds_regression(log_odds, z, y, np.arange(len(z)))
    assert (errors > 2 * plain).all()  # control: as if the prompts of a noun were independent
