"""The experiments: data sets, options of `compare`, and the claims of the paper.

Where the paper's figures print no values, the statements of its text are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from reproduction import balanced_heads, images, language
from reproduction.data import Dataset
from reproduction.findings import (
    Claim,
    Findings,
    Options,
    above,
    below,
    cell,
    exactly,
    interval,
    interval_note,
    number,
    table,
)
from splince_fast.demo import experiment as demo
from splince_fast.demo.data import load as load_professions
from splince_fast.evaluation import Comparison, compare

ERASERS = ("none", "SAL", "LEACE", "SPLINCE")
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)
HEADS = ("retrained", "frozen")
ALPHAS = (1.0, 0.1, 0.01, 0.001, 0.0001)

Run = Callable[..., Findings]  # of the options and the data sets


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment: its subject with the label in the paper, its data sets, and its program."""

    subject: str
    data: tuple[str, ...]
    run: Run


# -- comparisons of erasers ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparing:
    """A comparison of erasers on one data set, at levels of association or at the data's own."""

    data: Dataset
    result: Comparison
    levels: tuple[float | None, ...]
    heads: tuple[str, ...]
    n_seeds: int

    @property
    def p(self) -> float | None:
        """The strongest association."""
        return self.levels[-1]

    @property
    def ratio(self) -> float:
        """Test rows per training row."""
        return self.result.test_ratio(self.p)

    def seeds(self, metric: str, eraser: str, **where: Any) -> dict[int, float]:
        """Return the values of a metric by seed, by default at the strongest association."""
        where = {"head": self.heads[0], "p": self.p} | where
        return self.result.values(metric, eraser=eraser, **where)

    def mean(self, metric: str, eraser: str, **where: Any) -> float:
        """Return the mean of a metric over seeds."""
        return float(np.mean([*self.seeds(metric, eraser, **where).values()]))

    def differences(
        self, metric: str, eraser: str, reference: str, **where: Any
    ) -> dict[int, float]:
        """Return the metric of an eraser minus that of another one, by seed."""
        values = self.seeds(metric, eraser, **where)
        others = self.seeds(metric, reference, **where)
        return {seed: values[seed] - others[seed] for seed in values if seed in others}

    def table(self, title: str, metrics: Mapping[str, str], **where: Any) -> str:
        """Return a table of erasers by metrics, given as columns by metric."""
        rows = {
            e: [cell(self.seeds(metric, e, **where).values()) for metric in metrics]
            for e in ERASERS
        }
        return table(title, [where.get("head", "eraser"), *metrics.values()], rows)

    def level_table(self, metric: str) -> str:
        """Return a table of erasers by levels of association."""
        rows = {
            e: [cell(self.seeds(metric, e, p=p).values()) for p in self.levels] for e in ERASERS
        }
        return table(f"{metric}, {self.heads[0]} head", ["p", *map(str, self.levels)], rows)

    def values(self) -> dict[str, float]:
        """Return all means over seeds, with keys ``metric/eraser/head/level``."""
        metrics = {*HEAD_METRICS, *ERASER_METRICS} & {*self.result.metrics}
        return {
            f"{metric}/{eraser}/{head}/{p}": self.mean(metric, eraser, head=head, p=p)
            for metric, eraser, head, p in product(metrics, ERASERS, self.heads, self.levels)
            if self.seeds(metric, eraser, head=head, p=p)
        }

    def findings(
        self, tables: list[str], claims: list[Claim], figures: Sequence[str] = ()
    ) -> Findings:
        """Return findings with a figure over the levels of association for each of `figures`."""
        name = self.data.name.split()[0]
        plots = {
            f"{name}_{metric}": lambda metric=metric: self.result.plot("association", metric=metric)
            for metric in figures
        }
        note = interval_note(self.n_seeds)
        return Findings([self.data], tables, claims, [note], plots, self.values())


HEAD_METRICS = {
    "accuracy": "accuracy",
    "class_accuracy": "acc/class",
    "worst_group": "worst group",
    "tpr_gap": "TPR gap",
}
ERASER_METRICS = {
    "probe_accuracy": "probe acc",
    "probe_auc": "probe AUC",
    "kept_covariance": "kept cov",
    "distortion": "distortion",
}


def compared(
    n_seeds: int,
    judge: Callable[[Comparing], Findings],
    levels: tuple[float | None, ...] = (None,),
    **settings: Any,
) -> Run:
    """Return a program that compares the erasers at levels of association, and judges claims."""

    def run(options: Options, data: Dataset) -> Findings:
        chosen = (levels[0], levels[-1]) if options.quick and len(levels) > 1 else levels
        n = options.n_seeds(n_seeds)
        result = compare(
            data.X, task=data.labels["task"], concept=data.labels["concept"], erasers=ERASERS,
            association=None if chosen == (None,) else chosen, sizes=data.sizes, n_seeds=n,
            aligned_class=data.aligned_class, n_jobs=options.n_jobs, **settings,
        )  # fmt: skip
        return judge(Comparing(data, result, chosen, settings.get("heads", HEADS), n))

    return run


def best_claim(c: Comparing, metric: str, text: str, best: str = "SPLINCE") -> Claim:
    """Return the claim that an eraser has a larger metric than all others, with retrained heads."""
    others = [e for e in ERASERS if e != best]
    parts = [above(c.differences(metric, best, e).values(), 0.0, c.ratio) for e in others]
    second = max(others, key=lambda e: c.mean(metric, e))
    evidence = ", ".join(f"{e} {number(c.mean(metric, e))}" for e in (best, second))
    difference = interval(c.differences(metric, best, second).values(), c.ratio)
    return Claim(text, f"{evidence}, {difference}", parts)


def association(c: Comparing) -> Findings:
    """Judge the statements of the section "Classification where the last layer is re-trained"."""
    low, p = c.levels[0], c.p
    leads = [c.differences("worst_group", "SPLINCE", "LEACE", p=q) for q in (low, p)]
    growth = [leads[1][seed] - leads[0][seed] for seed in leads[1] if seed in leads[0]]
    text = f"SPLINCE has the best {{}} with a retrained head at p = {p}"
    claims = [
        best_claim(c, "accuracy", text.format("accuracy")),
        best_claim(c, "worst_group", text.format("worst group")),
        Claim(
            f"SPLINCE's lead over LEACE in the worst group is larger at p = {p} than at {low}",
            f"{np.mean(growth):+.3f}, {interval(growth, c.ratio)}",
            [above(growth, 0.0, c.ratio)],
        ),
    ]
    tables = [c.table(f"p = {p}, {head} head", HEAD_METRICS, head=head) for head in c.heads]
    tables += [c.table(f"p = {p}, erasers", ERASER_METRICS)]
    tables += [c.level_table(metric) for metric in ("accuracy", "worst_group")]
    return c.findings(tables, claims, ("accuracy", "worst_group"))


def professions_of_bios(c: Comparing) -> Findings:
    """Judge the statements on all professions, at the data's own association with gender."""

    def differences(metric: str, first: str, second: str, head: str) -> list[float]:
        return [*c.differences(metric, first, second, head=head).values()]

    pairs = [differences("accuracy", *pair, "retrained") for pair in combinations(ERASERS, 2)]
    accuracies = [c.mean("accuracy", e) for e in ERASERS]
    gaps = [differences("tpr_gap", e, "none", "retrained") for e in ERASERS[1:]]
    sal_loss = differences("accuracy", "none", "SAL", "frozen")
    leads = [differences("accuracy", e, "SAL", "frozen") for e in ("LEACE", "SPLINCE")]
    claims = [
        Claim(
            "with a retrained head the erasers' accuracies are alike (within a point)",
            f"within {100 * (max(accuracies) - min(accuracies)):.2f} points",
            [
                part
                for pair in pairs
                for part in (above(pair, -0.01, c.ratio), below(pair, 0.01, c.ratio))
            ],
        ),
        Claim(
            "every eraser reduces the TPR gap of a retrained head",
            ", ".join(f"{e} {c.mean('tpr_gap', e):.3f}" for e in ERASERS),
            [below(gap, 0.0, c.ratio) for gap in gaps],
        ),
        Claim(
            "with a frozen head SAL loses more than two points of accuracy",
            f"{100 * np.mean(sal_loss):.2f} points, {interval(sal_loss, c.ratio)}",
            [above(sal_loss, 0.02, c.ratio)],
        ),
        Claim(
            "with a frozen head LEACE and SPLINCE lose less accuracy than SAL",
            ", ".join(f"{e} {c.mean('accuracy', e, head='frozen'):.3f}" for e in ERASERS),
            [above(lead, 0.0, c.ratio) for lead in leads],
        ),
    ]
    paper = table(
        "the paper (tab. bios_all, per cent)",
        ("eraser", "frozen acc", "acc/class", "gap", "retrained acc", "acc/class", "gap"),
        {
            "none": ("81.31", "65.52", "14.20", "81.55", "72.94", "14.24"),
            "SAL": ("78.35", "62.17", "13.26", "81.47", "72.30", "12.90"),
            "LEACE": ("81.07", "65.09", "12.12", "81.62", "72.74", "13.13"),
            "SPLINCE": ("81.11", "65.22", "12.36", "81.64", "73.08", "13.27"),
        },
    )
    tables = [c.table(f"{head} head", HEAD_METRICS, head=head) for head in ("frozen", "retrained")]
    return c.findings([*tables, c.table("erasers", ERASER_METRICS), paper], claims)


def penalties(c: Comparing) -> Findings:
    """Judge differences between erasers by the penalty alpha of the head.

    Theorem 2 of the paper: without a penalty, retrained heads give the same predictions for all
    erasers of the concept.
    """
    tables, claims = [], []
    values: dict[str, float] = {}
    for metric in ("accuracy", "worst_group"):
        rows = {}
        for alpha in ALPHAS:
            cells = {e: c.seeds(metric, e, alpha=alpha).values() for e in ERASERS[1:]}
            leads = {e: c.differences(metric, "SPLINCE", e, alpha=alpha) for e in ("LEACE", "SAL")}
            texts = [*map(cell, cells.values()), *(cell([*v.values()]) for v in leads.values())]
            rows[f"{alpha:g}"] = texts
            values |= {
                f"{metric}/{e}/{alpha:g}": float(np.mean([*v.values()])) for e, v in leads.items()
            }
        columns = ("alpha", "SAL", "LEACE", "SPLINCE", "SPLINCE - LEACE", "SPLINCE - SAL")
        tables.append(table(f"{metric}, p = {c.p}, one alpha for all", columns, rows))
        weak, strong = (
            [*c.differences(metric, "SPLINCE", "LEACE", alpha=alpha).values()]
            for alpha in (min(ALPHAS), max(ALPHAS))
        )
        claims += [
            Claim(
                f"{metric}: with the weakest penalty SPLINCE and LEACE do not differ (by .005)",
                f"{np.mean(weak):+.4f}, {interval(weak, c.ratio)}",
                [above(weak, -0.005, c.ratio), below(weak, 0.005, c.ratio)],
            ),
            Claim(
                f"{metric}: with the strongest penalty SPLINCE is better than LEACE",
                f"{np.mean(strong):+.4f}, {interval(strong, c.ratio)}",
                [above(strong, 0.0, c.ratio)],
            ),
        ]
    return Findings([c.data], tables, claims, [interval_note(c.n_seeds)], values=values)


def covariance(c: Comparing) -> Findings:
    """Judge the fraction of the covariance between rows and task that erasers keep."""
    kept = {e: [*c.seeds("kept_covariance", e).values()] for e in ERASERS}
    fractions = np.divide(kept["SAL"], kept["LEACE"])
    splince = float(np.mean(kept["SPLINCE"]))
    claims = [
        Claim(
            "SPLINCE keeps all of the covariance with the task",
            f"{splince:.6f}",
            exactly(abs(splince - 1) < 1e-6),
        ),
        Claim(
            "LEACE and SAL remove more of the covariance as p grows, and nearly all at p = .9",
            ", ".join(
                f"{e} {np.mean(kept[e]):.3f} ({interval(kept[e], c.ratio)})"
                for e in ("LEACE", "SAL")
            ),
            [below(kept[e], 0.1, c.ratio) for e in ("LEACE", "SAL")],
        ),
        Claim(
            "SAL keeps far less of the covariance than LEACE at p = .9 (in the paper, 1/70)",
            f"a fraction of {np.mean(fractions):.2f}, {interval(fractions, c.ratio)}",
            [below(fractions, 0.5, c.ratio)],
        ),
    ]
    paper = table(
        "the paper (text beside fig. removal_cov)", ("eraser", "p = .9"),
        {"SAL": ["0.001"], "LEACE": ["0.07"], "SPLINCE": ["1"]},
    )  # fmt: skip
    return c.findings([c.level_table("kept_covariance"), paper], claims, ["kept_covariance"])


# -- the experiment of the demo ------------------------------------------------------------------


def professions(options: Options) -> Findings:
    """Judge log-odds of "he" to "she" after a profession, as in the demo."""
    source = load_professions()
    n = max(2, options.seeds or (3 if options.quick else 20))
    results = demo.run(source, n_splits=n)
    ratio = results.test_ratio
    coefficients = {
        field: {m: results.column(m, field) for m in demo.METHODS}
        for field in ("stereotype", "factual")
    }
    factors = {
        field: {m: float(np.exp(np.mean(column))) for m, column in columns.items()}
        for field, columns in coefficients.items()
    }
    stereotype, factual = coefficients["stereotype"], coefficients["factual"]
    nearer = {e: np.abs(stereotype["Original"]) - np.abs(stereotype[e]) for e in demo.ERASERS}
    leads = [factual[a] - factual[b] for a, b in (("SPLINCE", "LEACE"), ("LEACE", "SAL"))]
    texts = {
        field: ", ".join(f"{m} {factor:.2f}" for m, factor in of_method.items())
        for field, of_method in factors.items()
    }
    claims = [
        Claim(
            "every eraser brings the stereotype's coefficient nearer to 1",
            texts["stereotype"] + "; reduction of |log odds|: "
            + ", ".join(f"{e} {interval(values, ratio)}" for e, values in nearer.items()),
            [above(values, 0.0, ratio) for values in nearer.values()],
        ),
        Claim(
            "every eraser brings the stereotype's coefficient below 1 (in the paper, not for "
            "Mistral 7B)",
            "log odds: "
            + ", ".join(f"{e} {interval(stereotype[e], ratio)}" for e in demo.ERASERS),
            [below(stereotype[e], 0.0, ratio) for e in demo.ERASERS],
        ),
        Claim(
            "SPLINCE keeps more of the factual coefficient than LEACE, and LEACE more than SAL",
            f"{texts['factual']}; log odds of SPLINCE over LEACE {interval(leads[0], ratio)}, of "
            f"LEACE over SAL {interval(leads[1], ratio)}",
            [above(lead, 0.0, ratio) for lead in leads],
        ),
    ]  # fmt: skip
    tables = [
        table(
            f"{n} random splits by family of nouns: coefficients of the log-odds, and exp(mean)",
            ("method", "stereotype", "factual", "exp(stereotype)", "exp(factual)"),
            {
                m: (
                    *(cell(coefficients[field][m]) for field in coefficients),
                    *(f"{factors[field][m]:.2f}" for field in factors),
                )
                for m in demo.METHODS
            },
        ),
        table(
            "the paper (tab. profession_main)",
            (
                "exp(stereotype), exp(factual)", "Llama 2 7B", "", "Llama 2 13B", "",
                "Llama 3 8B", "",
            ),
            {
                "Original": ("3.59", "15.71", "3.84", "20.2", "3.98", "19.02"),
                "SAL": ("0.80", "5.90", "0.84", "4.81", "0.87", "3.50"),
                "LEACE": ("0.85", "12.14", "0.88", "16.32", "0.88", "7.68"),
                "SPLINCE": ("0.79", "24.27", "0.81", "33.24", "0.82", "13.43"),
            },
        ),
    ]  # fmt: skip
    data = Dataset(
        "240 nouns in 20 templates (shipped)", source.activations, {}, source.model, source.licence
    )
    values = {f"{field}/{m}": v for field, of in factors.items() for m, v in of.items()}
    notes = ["splince-fast demo draws the figure and prints the full table"]
    return Findings([data], tables, claims, notes, values=values)


EXPERIMENTS = {
    "bios": Experiment(
        "Bias in Bios, association sweep (fig. classification)",
        ("bios",),
        compared(3, association, LEVELS),
    ),
    "bios_full": Experiment(
        "all professions, frozen and retrained heads (tab. bios_all)",
        ("bios_full",),
        compared(2, professions_of_bios, alphas=(1e-3,)),
    ),
    "multilingual": Experiment(
        "a concept of three classes (fig. classification)",
        ("multilingual",),
        compared(5, association, LEVELS),
    ),
    "alphas": Experiment(
        "differences by the penalty alpha (fig. SPLINCE_LEACE_per_lambda)",
        ("bios",),
        compared(3, penalties, LEVELS[-2:], alphas=ALPHAS),
    ),
    "covariance": Experiment(
        "covariance with the task after erasure (fig. removal_cov)",
        ("bios",),
        compared(5, covariance, LEVELS, heads=("frozen",), alphas=(0.01,), leakage=()),
    ),
    "professions": Experiment("log-odds of he and she (tab. profession_main)", (), professions),
    "winobias": Experiment(
        "coreference, pro and anti stereotype (fig. winobias_main)",
        ("winobias",),
        language.winobias,
    ),
    "layers": Experiment(
        "several layers in sequence (tab. profession_all)", ("layers",), language.layers
    ),
    "images": Experiment(
        "raw pixels (fig. CelebA_individual, CelebA_mean)", ("images",), images.run
    ),
    "nlp_ood": Experiment(
        "against DFR and GroupDRO on text (fig. nlp_comp)",
        ("bios", "multilingual"),
        balanced_heads.text,
    ),
    "vision_ood": Experiment(
        "against DFR and GroupDRO on images (fig. vision_comp)", ("images",), balanced_heads.vision
    ),
    "waterbirds": Experiment(
        "birds on backgrounds (fig. vision_proj)",
        ("waterbirds",),
        compared(5, association, LEVELS),
    ),
}
