"""The command of the experiments, their claims and pictures (`_common`, `images`, `winobias`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from splince_fast import evaluation as ev
from splince_fast import experiments
from splince_fast.evaluation.statistics import corrected_t
from splince_fast.experiments import __main__ as command
from splince_fast.experiments import balanced_heads, images, winobias
from splince_fast.experiments._common import (
    Bounds,
    Claim,
    Findings,
    RunOptions,
    best_claim,
    cell_texts,
    combine_verdicts,
    corrected_bounds,
)
from splince_fast.experiments.dataset import VARIABLE, Dataset
from splince_fast.experiments.datasets import load


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
        "GiB resident",
    ):
        assert line in printed
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["values"]
    if name in ("covariance", "images"):
        assert all(path.stat().st_size > 5000 for path in tmp_path.glob("*.png"))
        assert list(tmp_path.glob("*.png"))


def test_the_command_needs_no_module_that_windows_lacks() -> None:
    code = (
        "import sys; sys.modules['resource'] = None; "
        "from splince_fast.experiments import __main__ as c; assert not c._peak_memory()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
        [sys.executable, "-m", "splince_fast.experiments", "--help"],
        capture_output=True, text=True, check=True, timeout=120, env=dict(os.environ),
    )  # fmt: skip
    assert all(name in done.stdout for name in experiments.NAMES)


def test_every_name_has_an_experiment() -> None:
    assert list(command.EXPERIMENTS) == list(experiments.NAMES)


def test_claims_are_listed_by_verdict() -> None:
    claims = [Claim("a", bool(np.True_), "1"), Claim("b", False, "2")]
    findings = Findings("T", load("images"), [], claims)
    assert findings.verdicts() == "agrees  : a (1)\ndiffers : b (2)\nnot decided: nothing"
    claims[1] = Claim("b", np.bool_(True), "3")  # type: ignore[arg-type]
    claims.append(Claim("c", None, "p = .375"))
    assert findings.verdicts() == (
        "agrees  : a (1); b (3)\ndiffers : nothing\nnot decided: c (p = .375)"
    )


def test_a_claim_is_decided_by_its_interval() -> None:
    nan = float("nan")
    pairs = ((0.1, 0.3), (-0.3, -0.1), (-0.1, 0.1), (nan, nan))
    assert [Bounds(*pair).above() for pair in pairs] == [True, False, None, None]
    assert [Bounds(*pair).below(0.0) for pair in pairs] == [False, True, None, None]
    assert [Bounds(*pair).within(0.2) for pair in pairs] == [None, None, True, None]
    assert Bounds(0.1, 0.3).within(0.05) is False
    assert Bounds(0.1, 0.3).above(0.2) is None
    assert Bounds(-0.1, 0.5).above() is None  # whatever the sign of its middle
    assert Bounds(-0.5, 0.1).above() is None
    assert combine_verdicts([True, True]) is True
    assert combine_verdicts([True, None]) is None
    assert combine_verdicts([None, False]) is False
    assert corrected_bounds([0.2, 0.3, 0.4], 0.25) == corrected_t([0.2, 0.3, 0.4], 0.25)[2:]
    assert np.isnan(corrected_bounds([0.2, 0.3], 0.25)).all()
    assert str(corrected_bounds([0.2, 0.3], 0.25)) == "no test"


def test_winobias_is_decided_by_a_sign_test() -> None:
    theirs = np.zeros(396, dtype=bool)
    ours = theirs.copy()
    ours[:4], theirs[4] = True, True
    verdict, text = winobias.sign_test(ours, theirs)
    assert verdict is None
    assert text == "4 gained and 1 lost of 396, p = 0.375"
    ours[:20] = True
    theirs[:] = False
    theirs[21] = True
    assert winobias.sign_test(ours, theirs)[0] is True
    assert winobias.sign_test(theirs, ours)[0] is False
    assert winobias.sign_test(ours, ours) == (None, "0 gained and 0 lost of 396, p = 1")


def test_a_lead_is_decided_by_the_corrected_test() -> None:
    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 2, 600), rng.integers(0, 2, 600)
    X = rng.normal(size=(600, 5)) + np.outer(y, np.eye(5)[0]) + 3 * np.outer(z, np.eye(5)[1])
    result = ev.compare(
        X, task=y, concept=z, erasers=("none", "LEACE", "SPLINCE"), heads=("retrained",),
        n_seeds=5, alphas=(0.1,), progress=False,
    )  # fmt: skip
    close = best_claim(result, "accuracy", "retrained", None, "SPLINCE leads")
    assert close.agrees is None
    clear = best_claim(result, "probe_accuracy", "", None, "none leads the probe", best="none")
    assert clear.agrees is True
    assert "p = " in clear.evidence
    assert best_claim(result, "probe_accuracy", "", None, "x", best="LEACE").agrees is False


def test_figures_of_one_seed_have_no_interval() -> None:
    assert cell_texts(0.5) == (".500",)


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
    found = images.run(RunOptions(quick=True))
    data = load("images")
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
    return Dataset("made", X, labels, None, "", "", 1, arrays={"shape": np.array([2, 3])})


def test_balanced_heads_take_default_sizes_with_validation_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balanced_heads, "load", lambda name, data: without_sizes())
    findings = balanced_heads.vision(RunOptions("paper", seeds=1, quick=True))
    assert {f"worst_group/{name}/0.9" for name in ("SPLINCE", "DFR", "GDRO")} <= {*findings.values}
    assert findings.data.sizes is None


def test_intervals_of_images_use_the_sizes_of_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the figures")
    data = without_sizes()
    monkeypatch.setattr(images, "load", lambda name, choice: data)
    findings = images.run(RunOptions("paper", seeds=3))
    y, z = data.labels["task"], data.labels["concept"]
    split = ev.spurious_split(y, z, p=0.9, random_state=0, aligned_class=1)
    results = [images.evaluate_split(data, 0.9, seed) for seed in range(3)]
    norms = [list(result.norms("SPLINCE").values()) for result in results]
    # Task and concept are aligned in the first and the last cell.
    ratios = [min(b, c) / max(a, d) for a, b, c, d in norms]
    bounds = corrected_bounds(ratios, len(split.test) / len(split.train))
    assert str(bounds) in findings.claims[0].evidence
    assert str(corrected_bounds(ratios, 0.0)) != str(bounds)  # control: no overlap of the splits


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
