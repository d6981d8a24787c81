"""How much of the covariance with the task an eraser leaves (paper, fig. removal_cov)."""

from __future__ import annotations

from splince_fast.evaluation import compare
from splince_fast.experiments._common import (
    ERASERS,
    LEVELS,
    Claim,
    Findings,
    Options,
    over,
    paper_table,
    summary,
)
from splince_fast.experiments.datasets import load


def run(options: Options) -> Findings:
    """Run the experiment."""
    data = load("bios", options.data)
    result = compare(
        data.X, task=data.labels["task"], concept=data.labels["concept"], erasers=ERASERS,
        heads=("frozen",), strengths=(0.01,), leakage=(), tied=data.tied, sizes=data.sizes,
        association=LEVELS[::4] if options.quick else LEVELS,
        n_seeds=options.n_seeds(5), n_jobs=options.n_jobs, progress=options.progress,
    )  # fmt: skip
    kept = {e: [result.mean("kept_covariance", eraser=e, p=p) for p in result.context.levels]
            for e in ERASERS}  # fmt: skip
    last = {e: values[-1] for e, values in kept.items()}
    claims = [
        Claim("SPLINCE keeps all of it", abs(last["SPLINCE"] - 1) < 1e-6, f"{last['SPLINCE']:.6f}"),
        Claim(
            "LEACE and SAL lose it as p grows, nearly all at .9",
            max(last["SAL"], last["LEACE"]) < 0.1,
            f"LEACE {last['LEACE']:.3f}, SAL {last['SAL']:.3f}",
        ),
        Claim(
            "SAL leaves far less than LEACE at .9 (a seventieth)",
            last["SAL"] < 0.5 * last["LEACE"],
            f"a share of {last['SAL'] / last['LEACE']:.2f}",
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
