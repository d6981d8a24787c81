"""nn.hooks, nn.folding: each architecture is erased at its sites, with caches, and folded."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import (  # noqa: E402
    hooks_in,
    inputs,
    is_erased,
    left,
    projection,
    state_of,
    tiny,
)
from splince_fast import nn as snn  # noqa: E402
from splince_fast.nn.sites import find  # noqa: E402


class Case(NamedTuple):
    """Where a tiny model is erased, and where its erasers are folded."""

    sites: list[str]
    fold: str
    folds: bool = True


_DECODER = ["model.layers.*", "model.norm"]
CASES = {
    "llama": Case(_DECODER, "model.layers.*.*_layernorm"),
    "gemma2": Case(_DECODER, "model.layers.*.input_layernorm"),
    "gemma3": Case(_DECODER, "model.layers.*.pre_feedforward_layernorm"),
    "qwen3": Case(_DECODER, "model.layers.*.*_layernorm"),
    "mixtral": Case(_DECODER, "model.layers.*.post_attention_layernorm", folds=False),
    "qwen2_moe": Case(_DECODER, "model.layers.*.post_attention_layernorm", folds=False),
    "gpt2": Case(["transformer.h.*", "transformer.ln_f"], "transformer.h.*.ln_[12]"),
    "neox": Case(["gpt_neox.layers.*"], "gpt_neox.layers.*.*_layernorm"),
    "bloom": Case(["transformer.h.*"], "transformer.h.*.*_layernorm"),
    "mamba": Case(["backbone.layers.*", "backbone.norm_f"], "backbone.norm_f"),
    "bert": Case(["encoder.layer.*"], "encoder.layer.*.attention.output.dense"),
    "t5": Case(
        ["decoder.block.*", "decoder.final_layer_norm"], "decoder.block.*.layer.*.layer_norm"
    ),
    "vit": Case(["**.layer*.[01]", "layernorm"], "**.layernorm_after"),
    "whisper": Case(["model.decoder.layers.*"], "model.decoder.layers.*.final_layer_norm"),
    "transformer": Case(["layers.*"], "layers.*.linear1"),
    "sequential": Case(["0", "2"], "2"),
}


# The linear layers that read norms, by the ends of the names of both.
_READERS = {
    "input_layernorm": ["self_attn.[qkv]_proj", "self_attention.query_key_value",
                        "attention.query_key_value"],
    "post_attention_layernorm": ["mlp.[gu]*_proj", "mlp.dense_h_to_4h", "mlp.gate"],
    "pre_feedforward_layernorm": ["mlp.[gu]*_proj"],
    "ln_1": ["attn.c_attn"],
    "ln_2": ["mlp.c_fc"],
    "norm_f": ["lm_head"],
    "layer_norm": ["SelfAttention.[qkv]", "EncDecAttention.q", "DenseReluDense.wi"],
    "layernorm_after": ["**.fc1", "**.intermediate.dense"],
    "final_layer_norm": ["fc1"],
}  # fmt: skip


def readers(model: Any, erasers: Any) -> dict[str, Any]:
    """Linear layers that read each site, named as far as they are there."""
    into = {}
    for site in erasers:
        parent, _, name = site.rpartition(".")
        parent = "" if name == "norm_f" else f"{parent}."
        found = []
        for layer in _READERS.get(name, ()):
            with contextlib.suppress(snn.SiteError):
                found += find(model, parent + layer).values()
        if found:
            into[site] = found
    return into


def outputs(model: Any, batch: dict[str, Any]) -> Any:
    """The main tensor of what a model returns."""
    with torch.no_grad():
        found = model(**batch)
    if isinstance(found, torch.Tensor):
        return found
    return found.logits if "logits" in found else found.last_hidden_state


def labelled(name: str) -> list[dict[str, Any]]:
    """Batches with a label that the inputs tell."""
    found = []
    for seed in range(4):
        batch = inputs(name, n=40, seed=seed)
        first = next(iter(batch.values()))
        batch["z"] = first.double().reshape(40, -1).sin().sum(1)
        found.append(batch)
    return found


# The others run in the whole suite.
_QUICK = ("llama", "qwen3", "bert", "sequential")


@pytest.mark.parametrize(
    "name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_sites_of_an_architecture_are_erased_decoded_and_folded(name: str) -> None:
    case, model, batches = CASES[name], tiny(name), labelled(name)
    example = {k: v[:6] for k, v in batches[0].items() if k != "z"}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before, hooks = outputs(model, example), hooks_in(model)

    # Erased at every site, fitted and installed together.
    erasers = snn.fit_layers(model, batches, case.sites, sf.leace, erase="z")
    assert max(left(model, batches, erasers, case.sites).values()) < 1e-6
    with snn.install(model, erasers):
        assert not torch.equal(outputs(model, example), before)

    # Decoding with a cache is decoding without.
    if getattr(model, "can_generate", lambda: False)():
        given = {k: v for k, v in example.items() if k != "attention_mask"}
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with snn.install(model, erasers):
            cached = model.generate(**given, **options)
            assert torch.equal(model.generate(**given, **options, use_cache=False), cached)

    # A map of rank 2 is applied to attended rows alone, to rounding.
    site, p = list(erasers)[-1], projection(rank=2)
    with snn.install(model, {site: p}, tokens="all"):
        erased = state_of(model, site, example)
    rows = state_of(model, site, example)
    attended = torch.ones(rows.shape[:-1], dtype=torch.bool)
    if "attention_mask" in example and name != "t5":  # whose decoder has no mask here
        attended = example["attention_mask"].bool()
    assert is_erased(erased, rows, p, attended)
    assert not is_erased(rows, rows, p, attended)

    # Folded exactly, or refused and put back.
    linear = snn.fit_layers(
        model, batches, case.fold, sf.leace, erase="z", tokens="all", for_fold=True
    )
    other = copy.deepcopy(model)
    with snn.install(other, linear):
        expected = outputs(other, example)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sf.SplinceWarning)
            snn.fold(other, linear, readers(other, linear), example=example)
        folded = True
    except snn.FoldError:
        folded = False
    assert folded == case.folds
    shown = torch.ones(expected.shape[:-1], dtype=torch.bool)
    if attended.shape == shown.shape:
        shown = attended
    found = outputs(other, example)
    if folded:
        scale = float(expected.max() - expected.min())
        assert torch.allclose(found[shown], expected[shown], atol=1e-4 * scale)
    else:
        assert torch.equal(found, before)

    # Nothing is left behind.
    assert hooks_in(model) == hooks
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(outputs(model, example), before)
