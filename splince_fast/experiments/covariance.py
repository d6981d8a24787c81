"""How much of the covariance with the task an eraser leaves (paper, fig. removal_cov)."""

from __future__ import annotations

import numpy as np

from splince_fast.evaluation import compare
from splince_fast.experiments._common import (
    ERASERS,
    LEVELS,
    Claim,
    Findings,
    Options,
    all_of,
    decided,
    in_words,
    limits,
    over,
    paper_table,
    ratio_of,
    reverse,
    summary,
)
from splince_fast.experiments.datasets import load


def run(options: Options) -> Findings:
    """Run the experiment."""
    data = load("bios", options.data)
    result = compare(
        data.X, task=data.labels["task"], concept=data.labels["concept"], erasers=ERASERS,
        heads=("frozen",), alphas=(0.01,), leakage=(), aligned_class=data.aligned_class,
        sizes=data.sizes,
        association=LEVELS[::4] if options.quick else LEVELS,
        n_seeds=options.n_seeds(5), n_jobs=options.n_jobs, progress=options.progress,
    )  # fmt: skip
    kept = {e: [result.mean("kept_covariance", eraser=e, p=p) for p in result.context.levels]
            for e in ERASERS}  # fmt: skip
    last = {e: values[-1] for e, values in kept.items()}
    p, ratio = result.context.levels[-1], ratio_of(result)
    by = {e: result.values("kept_covariance", eraser=e, p=p) for e in ERASERS}
    ends = {e: limits(by[e], ratio) for e in ("SAL", "LEACE")}
    share = {seed: by["SAL"][seed] / by["LEACE"][seed] for seed in by["SAL"]}
    of_shares = limits(share, ratio)
    claims = [
        Claim("SPLINCE keeps all of it", abs(last["SPLINCE"] - 1) < 1e-6, f"{last['SPLINCE']:.6f}"),
        Claim(
            "LEACE and SAL lose it as p grows, nearly all at .9",
            all_of([reverse(decided(*ends[e], 0.1)) for e in ends]),
            f"LEACE {last['LEACE']:.3f} ({in_words(*ends['LEACE'])}), SAL {last['SAL']:.3f} "
            f"({in_words(*ends['SAL'])})",
        ),
        Claim(
            "SAL leaves far less than LEACE at .9 (a seventieth)",
            reverse(decided(*of_shares, 0.5)),
            f"a fraction of {np.mean(list(share.values())):.2f}, {in_words(*of_shares)}",
        ),
    ]
    paper = paper_table(
        "text beside fig. removal_cov", ("eraser", "p = .9"),
        {"SAL": ["0.001"], "LEACE": ["0.07"], "SPLINCE": ["1"]},
    )  # fmt: skip
    return Findings(
        "Covariance with the task that is left", data, [result.table("kept_covariance")], claims,
        [paper], {"covariance": result.plot("covariance")}, [over(result)], summary(result),
    )  # fmt: skip
