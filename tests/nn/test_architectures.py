"""nn: each architecture is erased at its sites, with caches, measured and folded."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch

import splince_fast as sf
from nn.conftest import (
    assert_decoded_alike,
    hooks_in,
    inputs,
    is_erased,
    left,
    outputs,
    projection,
    readers,
    state_of,
    tiny,
)
from splince_fast import nn as snn

_DECODER = ["model.layers.*", "model.norm"]
# The sites at which a tiny model is erased, and those whose erasers are folded.
CASES: dict[str, tuple[list[str], str]] = {
    "llama": (_DECODER, "model.layers.*.*_layernorm"),
    "gemma2": (_DECODER, "model.layers.*.input_layernorm"),
    "gemma3": (_DECODER, "model.layers.*.pre_feedforward_layernorm"),
    "qwen3": (_DECODER, "model.layers.*.*_layernorm"),
    "mixtral": (_DECODER, "model.layers.*.post_attention_layernorm"),
    "qwen2_moe": (_DECODER, "model.layers.*.post_attention_layernorm"),
    "gpt2": (["transformer.h.*", "transformer.ln_f"], "transformer.h.*.ln_[12]"),
    "neox": (["gpt_neox.layers.*"], "gpt_neox.layers.*.*_layernorm"),
    "bloom": (["transformer.h.*"], "transformer.h.*.*_layernorm"),
    "mamba": (["backbone.layers.*", "backbone.norm_f"], "backbone.norm_f"),
    "bert": (["encoder.layer.*"], "encoder.layer.*.attention.output.dense"),
    "t5": (["decoder.block.*", "decoder.final_layer_norm"], "decoder.block.*.layer.*.layer_norm"),
    "vit": (["**.layer*.[01]", "layernorm"], "**.layernorm_after"),
    "whisper": (["model.decoder.layers.*"], "model.decoder.layers.*.final_layer_norm"),
    "transformer": (["layers.*"], "layers.*.linear1"),
    "sequential": (["0", "2"], "2"),
}
WITHOUT_LOSS = ("bert", "t5", "vit", "whisper", "transformer", "sequential")
NOT_FOLDED = ("mixtral", "qwen2_moe")  # experts read their norms


# The others run in the whole suite.
_QUICK = ("llama", "qwen3", "bert", "sequential")


@pytest.mark.parametrize(
    "name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_sites_of_an_architecture_are_erased_decoded_measured_and_folded(name: str) -> None:
    (sites, to_fold), model = CASES[name], tiny(name)
    batches = [inputs(name, n=40, seed=seed) for seed in range(4)]
    for batch in batches:  # a label that the inputs tell
        batch["z"] = next(iter(batch.values())).double().reshape(40, -1).sin().sum(1)
    example = {k: v[:6] for k, v in batches[0].items() if k != "z"}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before, hooks = outputs(model, example), hooks_in(model)

    # Erased at every site, fitted and installed together.
    erasers = snn.fit_layers(model, batches, sites, sf.leace, erase="z")
    assert max(left(model, batches, erasers, sites).values()) < 1e-6
    with snn.install(model, erasers):
        assert not torch.equal(outputs(model, example), before)
        if getattr(model, "can_generate", lambda: False)():
            assert_decoded_alike(model, {k: example[k] for k in example if k != "attention_mask"})

    # Its effect is measured, and the loss of models that predict the next token.
    found = snn.effect(model, erasers, batches[:1], progress=False)
    assert all(r["after"] > 0 for r in found if r["metric"] == "change")
    assert any(r["metric"] == "loss" for r in found) == (name not in WITHOUT_LOSS)

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
        model, batches, to_fold, sf.leace, erase="z", tokens="all", for_fold=True
    )
    other = copy.deepcopy(model)
    expected = outputs(other, example, linear)
    is_folded = name not in NOT_FOLDED
    with (
        contextlib.nullcontext() if is_folded else pytest.raises(snn.FoldError),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", sf.SplinceWarning)
        snn.fold(other, linear, readers(other, linear), example=example)
    is_by_token = attended.shape == expected.shape[:-1]
    shown, found = attended if is_by_token else slice(None), outputs(other, example)
    if is_folded:
        scale = float(expected.max() - expected.min())
        assert torch.allclose(found[shown], expected[shown], atol=1e-4 * scale)
    else:
        assert torch.equal(found, before)

    # Nothing is left behind.
    assert hooks_in(model) == hooks
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(outputs(model, example), before)
