"""Coreference in pro- and anti-stereotypical WinoBias sentences (paper, fig. winobias_main).

The task y is the referent, the profession to which the pronoun refers. The concept z is whether the
sentence is pro- or anti-stereotypical. Each referent has equally many sentences of both kinds, so
that Cov(z, y) = 0. LEACE and SPLINCE are the same map if the erased and the kept subspace are
orthogonal after whitening; the first table has the largest cosine between the two subspaces.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from splince_fast import Moments, NothingErasedWarning
from splince_fast.baselines import INLP
from splince_fast.evaluation.text_table import Table, number
from splince_fast.experiments._common import Claim, Findings, RunOptions
from splince_fast.experiments.dataset import Dataset
from splince_fast.experiments.datasets import load
from splince_fast.experiments.erasers import ERASERS, fit_method

Float = NDArray[np.float64]
Mask = NDArray[np.bool_]
_COLUMNS = ("acc40", "anti", "pro", "pair", "anti", "pro", "distortion")


def run(options: RunOptions) -> Findings:
    """Run the experiment on the data set's own split, with one seed."""
    data = load("winobias", options.data)
    X = np.asarray(data.X, dtype=np.float64)
    y, z = data.labels["task"], data.labels["concept"]
    train = np.flatnonzero(data.labels["split"] == "train")
    names = data.arrays["names"][y]
    moments = Moments().update(X[train], {"concept": z[train], "task": names[train]})
    maps = {e: fit_method(e, moments, erase="concept", keep="task") for e in ERASERS}
    order = np.random.default_rng(0).permutation(len(train))
    validation = np.isin(np.arange(len(train)), order[-(len(train) // 5) :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingErasedWarning)
        inlp = INLP(random_state=0).fit(X[train], concept=z[train], validation=validation)
    maps["INLP"] = inlp.projection_
    total_squares = np.sum((X[train] - X[train].mean(axis=0)) ** 2)
    rows, values, correct = [], {}, {}
    for name in ("none", *maps):
        erased = maps[name](X) if name in maps else X
        hits, pair_hits, anti = predictions(data, erased)
        values[name] = [
            float(hit[part].mean())
            for hit in (hits, pair_hits) for part in (anti | ~anti, anti, ~anti)
        ]  # fmt: skip
        values[name].append(float(np.sum((erased - X)[train] ** 2) / total_squares))
        rows.append((name, *(f"{v:.4f}" for v in values[name][:-1]), f"{values[name][-1]:.5f}"))
        correct[name] = hits
    report = maps["SPLINCE"].report
    cosine = max(report.cosines, default=0.0) if report is not None else 0.0
    change = float(np.abs(maps["SPLINCE"](X) - maps["LEACE"](X)).max() / np.abs(X).max())
    gain = values["SPLINCE"][0] - values["LEACE"][0]
    better, first_test = sign_test(correct["SPLINCE"], correct["LEACE"])
    improved, second_test = sign_test(correct["SPLINCE"][anti], correct["none"][anti])
    claims = [
        Claim(
            "SPLINCE improves accuracy more than LEACE",
            better,
            f"acc40 {gain:+.4f}, {first_test}: the maps differ by {change:.1e} of the largest "
            "state",
        ),
        Claim(
            "erasing raises accuracy on anti-stereotypical sentences",
            improved,
            f"acc40 {values['SPLINCE'][1]:.4f} after SPLINCE, {values['none'][1]:.4f} before, "
            f"{second_test}",
        ),
    ]
    first = Table(
        "largest cosine of the erased and the kept subspace (whitened)",
        ("cosine", "rank erased by INLP"),
        ((f"{cosine:.2e}", f"{inlp.report_.rank}"),),
        (
            f"LEACE and SPLINCE differ only if the cosine is above rounding error: n = "
            f"{len(train)} training rows, d = {X.shape[1]}; the cosine is 0 if n <= d and each "
            "sentence occurs in a pro- and an anti-stereotypical version",
        ),
    )
    table = Table(
        "test sentences: argmax over 40 professions (acc40), referent above the other (pair)",
        ("eraser", *_COLUMNS),
        tuple(rows),
    )
    n = int((data.labels["split"] == "test").sum())
    notes = [
        f"{n} test sentences: the standard error of an accuracy is about "
        f"{number(0.5 / np.sqrt(n))} on all and {number(0.5 / np.sqrt(n / 2))} on a half",
        "the model is small and right in half of the sentences; the paper's models have 7 to 13 "
        "billion parameters, and its figure has no printed numbers",
    ]
    return Findings(
        "WinoBias", data, [first, table], claims, notes=notes,
        values={"cosine": cosine, "inlp_rank": inlp.report_.rank, **values},
    )  # fmt: skip


def predictions(data: Dataset, states: Float) -> tuple[Mask, Mask, Mask]:
    """Return three masks of the test sentences.

    The masks say whether the referent has the largest logit of all professions, whether its logit
    exceeds that of the other profession in the sentence, and whether the sentence is
    anti-stereotypical.
    """
    test = np.flatnonzero(data.labels["split"] == "test")
    logits = states[test] @ np.asarray(data.arrays["head"], dtype=np.float64).T
    y, other = data.labels["task"][test], data.labels["other"][test]
    rows = np.arange(len(test))
    pair_hits = logits[rows, y] > logits[rows, other]
    return logits.argmax(axis=1) == y, pair_hits, data.labels["concept"][test] == 1


def sign_test(hits: Mask, reference: Mask) -> tuple[bool | None, str]:
    """Test by McNemar's exact test whether `hits` has more hits than `reference`.

    Both are masks of the same sentences. Return the verdict, None if p >= 0.05, and a text with the
    result of the test.
    """
    gained, lost = int(np.sum(hits & ~reference)), int(np.sum(reference & ~hits))
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    verdict = gained > lost if p < 0.05 else None
    return verdict, f"{gained} gained and {lost} lost of {len(hits)}, p = {p:.3g}"
