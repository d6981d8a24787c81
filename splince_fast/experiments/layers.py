"""Erasers at several layers of a language model (paper, tab. profession_all).

Erasers act on the outputs of several late blocks and of the final norm, at every token. They are
fitted to last-token states in the order of the layers; during each fit, the erasers of earlier
layers are active. The perplexity of the model with its erasers is computed on texts that ship with
scikit-learn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from splince_fast.evaluation import log_odds_regression
from splince_fast.evaluation._tables import Table
from splince_fast.evaluation.regression import LogOddsRegression
from splince_fast.evaluation.statistics import holm
from splince_fast.experiments import _language
from splince_fast.experiments._common import (
    Claim,
    Findings,
    RunOptions,
    cell_texts,
    combine_verdicts,
    paper_table,
)
from splince_fast.experiments.datasets import load
from splince_fast.experiments.erasers import ERASERS

if TYPE_CHECKING:
    from torch.nn import Module

# Indices of the blocks whose outputs are erased, in addition to the output of the final norm.
DEPTHS = {"last 1": (), "last 3": (27, 28), "last 5": range(25, 29), "last 9": range(21, 29)}
PAPER = {
    "Original": ("3.59", "15.71", "3.59", "15.71", "3.59", "15.71"),
    "SAL": ("1.14", "4.07", "0.86", "5.29", "1.18", "6.48"),
    "LEACE": ("1.04", "14.30", "0.63", "14.35", "0.90", "26.12"),
    "SPLINCE": ("1.00", "37.94", "0.64", "15.09", "0.87", "78.17"),
}
_COLUMNS = ("exp(stereotype), exp(factual)", "last 3", "", "last 5", "", "last 9", "")


def run(options: RunOptions) -> Findings:
    """Run the experiment on one random split of the nouns."""
    data = load("layers", options.data)
    model, tokenizer = _language.read_model()
    import torch

    from splince_fast import nn as snn

    z, y, nouns = (data.labels[name] for name in ("concept", "task", "noun"))
    prompts = [str(p) for p in data.labels["prompt"]]
    names = list(dict.fromkeys(nouns))
    train_names = np.random.default_rng(0).permutation(len(names))[: int(0.7 * len(names))]
    in_train = np.isin(nouns, [names[i] for i in train_names])
    selected = (
        np.arange(len(prompts)) % 8 == 0 if options.quick else np.ones(len(prompts), dtype=bool)
    )
    train, test = np.flatnonzero(in_train & selected), np.flatnonzero(~in_train & selected)
    # Sort by length to save padding; moments do not depend on the order of rows.
    train = train[np.argsort([len(prompts[i]) for i in train], kind="stable")]
    train_batches = [
        {
            **tokenizer([prompts[i] for i in index], padding=True, return_tensors="pt"),
            "concept": torch.from_numpy(z[index]),
            "task": torch.from_numpy(y[index]),
        }
        for index in np.array_split(train, -(-len(train) // 64))
    ]
    body, head = model.model, np.asarray(data.arrays["head"], dtype=np.float64)
    # The states before the first erased block are the same for all methods: compute them once, and
    # use them instead of the tokens as inputs.
    batches = {
        "train": train_batches,
        "test": _language.prompt_batches(tokenizer, [prompts[i] for i in test]),
        "prose": _language.prose_batches(tokenizer, 200 if options.quick else 3000),
    }
    n_tokens = sum(batch["ids"].numel() for batch in batches["prose"])

    regressions: dict[str, LogOddsRegression] = {}

    def measure(body: Module, name: str) -> tuple[float, float, float]:
        log_odds = _language.states(body, batches["test"]) @ (head[0] - head[1])
        regression = log_odds_regression(
            log_odds, stereotype=z[test], factual=y[test], clusters=nouns[test]
        )
        regressions[name] = regression
        perplexity = _language.perplexity(body, model.lm_head, batches["prose"])
        return regression["stereotype"], regression["factual"], perplexity

    values: dict[str, tuple[float, float, float]] = {}
    depths = {"last 3": DEPTHS["last 3"]} if options.quick else DEPTHS
    n_blocks_run = 0
    # The depths are sorted by their first erased block, so that each depth continues with the
    # states of the previous one.
    for depth in sorted(depths, key=lambda name: -len(depths[name])):
        start = min(depths[depth], default=len(body.layers))
        blocks_between = _language.submodel(body, n_blocks_run, start)
        batches = {
            name: _language.run_blocks(blocks_between, part) for name, part in batches.items()
        }
        last_blocks, n_blocks_run = _language.submodel(body, start), start
        if not values:
            values["none"] = measure(last_blocks, "none")
        sites = [*(f"layers.{block - start}" for block in depths[depth]), "norm"]
        for name in ERASERS:
            erasers = _language.fit_sites(last_blocks, batches["train"], sites, name)
            with snn.install(last_blocks, erasers, tokens="all"):
                values[f"{depth}/{name}"] = measure(last_blocks, f"{depth}/{name}")
    tables = []
    for depth in depths:
        rows = []
        for name in ("none", *ERASERS):
            a, b, c = values[name if name == "none" else f"{depth}/{name}"]
            rows.append((name, *cell_texts(a, b, math.exp(a), math.exp(b), c)))
        columns = ("eraser", "stereotype", "factual", "exp", "exp", "perplexity")
        tables.append(Table(f"{depth}: coefficients on the test nouns", columns, tuple(rows)))
    unerased = values["none"]
    pairs = {d: (values[f"{d}/SPLINCE"], values[f"{d}/LEACE"]) for d in depths}
    perplexity_ratio = max(v[2] / unerased[2] for v in values.values())

    def compare(first: str, second: str) -> tuple[bool | None, float]:
        """Return whether `first` has a larger factual coefficient than `second`, and the p value.

        The verdict is None if p >= 0.05.
        """
        value, _, p = regressions[first].difference(regressions[second], "factual")
        return (value > 0 if p < 0.05 else None), p

    over_leace = [compare(f"{d}/SPLINCE", f"{d}/LEACE") for d in depths]
    best_depth = max(depths, key=lambda d: values[f"{d}/SPLINCE"][1])
    over_none = compare(f"{best_depth}/SPLINCE", "none")
    p_none = holm([compare(f"{d}/SPLINCE", "none")[1] for d in depths])[
        list(depths).index(best_depth)
    ]
    claims = [
        Claim(
            "SPLINCE's factual coefficient is above LEACE's at every depth",
            combine_verdicts([verdict for verdict, _ in over_leace]),
            ", ".join(f"{d} {s[1]:.2f} / {t[1]:.2f}" for d, (s, t) in pairs.items())
            + f", largest p = {max(p for _, p in over_leace):.2g} over the depths",
        ),
        Claim(
            "SPLINCE's factual coefficient is far above that of the unerased model (in the paper, "
            "exp is 2.4 times as large for last 3)",
            over_none[0] if p_none < 0.05 else None,
            f"at most {max(s[1] for s, _ in pairs.values()):.2f}, before {unerased[1]:.2f}, "
            f"p = {p_none:.2g} (Holm)",
        ),
    ]
    notes = [
        f"perplexity on {n_tokens} tokens of prose: {unerased[2]:.1f} before, at most "
        f"{perplexity_ratio:.2f} times that after",
        f"one split by noun; {len(test)} test prompts of {len(set(nouns[test]))} nouns",
    ]
    return Findings(
        "Several layers in sequence", data, tables, claims,
        [paper_table("tab. profession_all, Llama 2 7B", _COLUMNS, PAPER)], notes=notes,
        values=values,
    )  # fmt: skip
