"""Output of the profession experiment: table, significance test and JSON."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from splince_fast.demo.data import ProfessionData
from splince_fast.demo.experiment import (
    CORRELATION_TOLERANCE,
    ERASERS,
    METHODS,
    PROBE_PENALTY,
    Results,
)
from splince_fast.evaluation.statistics import corrected_t

STAR_LEVEL: Final = 0.01
SCORES: Final = ("stereotype", "factual")
# exp(factual coefficient) of SPLINCE divided by that of LEACE in the paper: the smallest ratio
# (Mistral, Phi-2) and the largest ratio (Llama 2) over the models.
_PAPER_RATIOS: Final = (1.48, 2.04)

_HEADER: Final = (
    "method       exp(beta_stereo)        exp(beta_fact) residual z kept y "
    "distortion R2 of z seconds"
)


class OddsFactor(NamedTuple):
    """Factor on the odds, exp(mean coefficient over splits), and the limits of its interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


class FactualTest(NamedTuple):
    """One-tailed paired t-test, corrected for the overlap of the splits."""

    difference: float
    t: float
    p: float


def factual_test(results: Results) -> FactualTest:
    """Test whether the factual coefficient of SPLINCE exceeds that of LEACE, paired by split."""
    values = results.column("SPLINCE", "factual") - results.column("LEACE", "factual")
    t, p, *_ = corrected_t(values.tolist(), results.test_ratio)
    return FactualTest(float(values.mean()), t, p / 2 if t > 0 else 1 - p / 2)


def odds_factor(results: Results, method: str, field: str) -> OddsFactor:
    """Return exp(mean coefficient) with a t-interval corrected for the overlap of the splits."""
    values = results.column(method, field)
    _, _, low, high = corrected_t(values.tolist(), results.test_ratio)
    return OddsFactor(*map(float, np.exp([values.mean(), low, high])))


def heading(data: ProfessionData, results: Results) -> str:
    """Return two lines with the settings of the run."""
    return (
        f"{data.model}: {len(data.nouns)} nouns x {len(data.templates)} templates = "
        f"{len(data.activations):,} prompts, {data.activations.shape[1]} dimensions\n"
        f"{len(results.splits)} random splits by family of nouns ({results.n_train} train, "
        f"{results.n_test} held out), random_state {results.random_state}"
    )


def table(results: Results) -> str:
    """Return the table of one run: a line about the training prompts, then a line per method."""
    prompts = round(float(np.mean([len(split.train) for split in results.splits])))
    correlation = float(np.mean([split.train_correlation for split in results.splits]))
    selection = "all" if results.train_correlation is None else "a subset"
    lines = [
        f"Fitted on {prompts:,} training prompts ({selection}), corr(stereotype, factual) = "
        f"{correlation:.2f}",
        _HEADER,
    ]
    star = "*" if factual_test(results).p < STAR_LEVEL else " "
    for method in METHODS:
        fields = ("residual", "kept", "distortion", "probe_r2")
        residual, kept, distortion, probe = (results.column(method, f).mean() for f in fields)
        seconds = np.median(results.column(method, "seconds"))
        stereotype, factual = (str(odds_factor(results, method, f)) for f in SCORES)
        factual += star if method == "SPLINCE" else " "
        changes = f"{residual:10.1e} {kept:6.3f} {100 * distortion:8.2f} %"
        if method == "Original":
            changes = f"{1:>10} {1:>6} {0:>10}"
        time = f"{seconds:7.3f}" if method in ERASERS else f"{'-':>7}"
        lines.append(f"{method:<9} {stereotype:>19} {factual:>21} {changes} {probe:7.2f} {time}")
    return "\n".join(lines)


def paper_comparison(results: Results) -> str:
    """Return two lines that compare the results with the paper."""
    stereo = {method: odds_factor(results, method, "stereotype") for method in METHODS}
    erased_texts = ", ".join(f"{method} {stereo[method].mean:.2f}" for method in ERASERS)
    distance = {method: abs(np.log(value.mean)) for method, value in stereo.items()}
    nearer = [method for method in ERASERS if distance[method] < distance["Original"]]
    all_nearer = len(nearer) == len(ERASERS)
    neutral = [method for method in ERASERS if stereo[method].low <= 1 <= stereo[method].high]
    test = factual_test(results)
    significant = bool(test.p < STAR_LEVEL)
    leace_kept = float(results.column("LEACE", "kept").mean())
    agreement = {True: "as in the paper", False: "unlike the paper"}
    return (
        f"Stereotype: {stereo['Original'].mean:.2f} becomes {erased_texts}: nearer to 1 for "
        f"{'all' if all_nearer else ', '.join(nearer) or 'none'}, {agreement[all_nearer]}; the "
        f"interval contains 1 for {', '.join(neutral) or 'none'}.\n"
        f"Factual: SPLINCE's factor is {np.exp(test.difference):.2f} times LEACE's (paper: "
        f"{_PAPER_RATIOS[0]:.2f} to {_PAPER_RATIOS[1]:.2f}), p = {test.p:.1e}, "
        f"{'' if significant else 'not '}significant {agreement[significant]}; LEACE kept "
        f"{leace_kept:.1%} of |Cov(x, y)|."
    )


def notes(results: Results) -> str:
    """Return a text that defines the columns of :func:`table`."""
    correlation = max(abs(split.test_correlation) for split in results.splits)
    prompts = round(float(np.mean([len(split.test) for split in results.splits])))
    return f"""\
exp(beta): factor on the odds of he to she per unit of score, from the regression of
  log p(he) - log p(she) on both scores over {prompts:,} held-out prompts, where the two correlate
  by less than {CORRELATION_TOLERANCE:g} (largest {correlation:.1g}); 95% t-interval \
over splits, widened for their
  overlap (Nadeau and Bengio 2003)
residual z, kept y: |Cov(r(x), .)| / |Cov(x, .)| on the training prompts, z the stereotype, y the
  factual score; distortion: E|r(x) - x|^2 as a fraction of the variance of x
R2 of z: of a ridge regression on the training prompts (features standardised, penalty \
{PROBE_PENALTY:g} per row),
  on the held-out prompts
seconds: to fit from the moments and to apply to every prompt (median)
*: SPLINCE's factual coefficient is above LEACE's at the {STAR_LEVEL:.0%} level, one-tailed paired \
t-test with the
  same correction"""


def to_dict(data: ProfessionData, runs: list[Results]) -> dict[str, object]:
    """Return a description of the data and the results of all runs, in types of JSON."""
    return {
        "model": data.model,
        "n_nouns": len(data.nouns),
        "n_templates": len(data.templates),
        "n_features": data.activations.shape[1],
        "runs": [_run_to_dict(results) for results in runs],
    }


def _run_to_dict(results: Results) -> dict[str, object]:
    return {
        "random_state": results.random_state,
        "train_correlation": results.train_correlation,
        "n_train_families": results.n_train,
        "n_test_families": results.n_test,
        "splits": [
            {
                "train_prompts": len(split.train),
                "test_prompts": len(split.test),
                "train_correlation": split.train_correlation,
                "test_correlation": split.test_correlation,
            }
            for split in results.splits
        ],
        "methods": {
            method: {
                "exp_beta_stereo": odds_factor(results, method, "stereotype")._asdict(),
                "exp_beta_fact": odds_factor(results, method, "factual")._asdict(),
                "per_split": [dict(vars(values)) for values in results.split_values[method]],
            }
            for method in METHODS
        },
        "splince_above_leace": factual_test(results)._asdict(),
        "reading": paper_comparison(results).splitlines(),
    }
