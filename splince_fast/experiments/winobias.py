"""Coreference in WinoBias: the referent, pro and anti stereotype (paper, fig. winobias_main).

Every sentence occurs as a pro and an anti twin with the same referent, so the concept is
independent of the referent, Cov(z, y) = 0, and SPLINCE has nothing to keep that LEACE removes. The
whitened cosine of the two is printed first: at 0 both are the same map.
"""

from __future__ import annotations

import warnings

import numpy as np
from scipy.stats import binomtest

from splince_fast import Moments, NothingErasedWarning, leace, sal, splince
from splince_fast.baselines import INLP
from splince_fast.evaluation._tables import Table
from splince_fast.experiments._common import Claim, Findings, Options, texts
from splince_fast.experiments.dataset import Dataset
from splince_fast.experiments.datasets import load

_COLUMNS = ("acc40", "anti", "pro", "pair", "anti", "pro", "distortion")


def run(options: Options) -> Findings:
    """Run the experiment; the split is the data's own, so there is one seed."""
    data = load("winobias", options.data)
    X = np.asarray(data.X, dtype=np.float64)
    y, z = data.labels["task"], data.labels["concept"]
    train = np.flatnonzero(data.labels["split"] == "train")
    names = data.arrays["names"][y]
    moments = Moments().update(X[train], {"concept": z[train], "task": names[train]})
    maps = {
        "SAL": sal(moments, erase="concept"),
        "LEACE": leace(moments, erase="concept"),
        "SPLINCE": splince(moments, erase="concept", keep="task"),
    }
    order = np.random.default_rng(0).permutation(len(train))
    held = np.isin(np.arange(len(train)), order[-(len(train) // 5) :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingErasedWarning)
        rounds = INLP(random_state=0).fit(X[train], concept=z[train], validation=held)
    maps["INLP"] = rounds.projection_
    total = np.sum((X[train] - X[train].mean(axis=0)) ** 2)
    rows, values = [], {}
    for name in ("none", *maps):
        clean = maps[name](X) if name in maps else X
        found = [*scores(data, clean), float(np.sum((clean - X)[train] ** 2) / total)]
        rows.append((name, *(f"{v:.4f}" for v in found[:-1]), f"{found[-1]:.5f}"))
        values[name] = found
    report = maps["SPLINCE"].report
    cosine = max(report.cosines, default=0.0) if report is not None else 0.0
    apart = float(np.abs(maps["SPLINCE"](X) - maps["LEACE"](X)).max() / np.abs(X).max())
    gain = values["SPLINCE"][0] - values["LEACE"][0]
    right = {name: hits(data, maps[name](X) if name in maps else X) for name in ("none", *maps)}
    anti = data.labels["concept"][data.labels["split"] == "test"] == 1
    more, first_test = sign_test(right["SPLINCE"], right["LEACE"])
    raised, second_test = sign_test(right["SPLINCE"][anti], right["none"][anti])
    claims = [
        Claim(
            "SPLINCE improves accuracy more than LEACE",
            more,
            f"acc40 {gain:+.4f}, {first_test}: the maps differ by {apart:.1e} of the largest state",
        ),
        Claim(
            "erasing raises accuracy on anti-stereotypical sentences",
            raised,
            f"acc40 {values['SPLINCE'][1]:.4f} after SPLINCE, {values['none'][1]:.4f} before, "
            f"{second_test}",
        ),
    ]
    first = Table(
        "largest cosine between what is erased and what is kept (whitened)",
        ("cosine", "rank erased by INLP"),
        ((f"{cosine:.2e}", f"{rounds.report_.rank}"),),
        (
            f"LEACE and SPLINCE can differ only where it is above rounding: n = {len(train)} "
            f"training rows, d = {X.shape[1]}; with n <= d and balanced twins it is 0",
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
        f"{texts(0.5 / np.sqrt(n))[0]} on all and {texts(0.5 / np.sqrt(n / 2))[0]} on a half",
        "the model is small and right in half of the sentences; the paper's models have 7 to 13 "
        "billion parameters, and its figure has no printed numbers",
    ]
    return Findings(
        "WinoBias", data, [first, table], claims, notes=notes,
        values={"cosine": cosine, "inlp_rank": rounds.report_.rank, **values},
    )  # fmt: skip


def scores(data: Dataset, states: np.ndarray) -> list[float]:
    """acc40 and pair accuracy on the test sentences: all, anti, pro."""
    test = np.flatnonzero(data.labels["split"] == "test")
    logits = states[test] @ np.asarray(data.arrays["head"], dtype=np.float64).T
    y, other = data.labels["task"][test], data.labels["other"][test]
    anti = data.labels["concept"][test] == 1
    rows = np.arange(len(test))
    hit = hits(data, states)
    pair = logits[rows, y] > logits[rows, other]
    return [float(v[part].mean()) for v in (hit, pair) for part in (anti | ~anti, anti, ~anti)]


def hits(data: Dataset, states: np.ndarray) -> np.ndarray:
    """Whether the referent leads among the 40 professions, by test sentence."""
    test = np.flatnonzero(data.labels["split"] == "test")
    logits = states[test] @ np.asarray(data.arrays["head"], dtype=np.float64).T
    return np.asarray(logits.argmax(axis=1) == data.labels["task"][test])


def sign_test(ours: np.ndarray, theirs: np.ndarray) -> tuple[bool | None, str]:
    """Exact sign test of two lists of hits (McNemar): whether ours is ahead, and in words."""
    won, lost = int(np.sum(ours & ~theirs)), int(np.sum(theirs & ~ours))
    p = float(binomtest(won, won + lost).pvalue) if won + lost else 1.0
    verdict = won > lost if p < 0.05 else None
    return verdict, f"{won} won and {lost} lost of {len(ours)}, p = {p:.3g}"
