"""Erasers in weights: the same numbers as hooks, or everything put back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import hooks_in, inputs, projection, tiny  # noqa: E402
from splince_fast import nn as snn  # noqa: E402


def everywhere(call: Any) -> torch.Tensor:
    """Every token, pads included."""
    return torch.ones_like(call["input_ids"], dtype=torch.bool)


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(model: Any, before: dict[str, torch.Tensor], owners: dict[str, int]) -> bool:
    now = model.state_dict()
    values = list(now) == list(before) and all(torch.equal(now[k], before[k]) for k in now)
    return values and {k: id(p) for k, p in model.named_parameters()} == owners


def test_norms_that_feed_linear_layers() -> None:
    model = tiny("gpt2")  # LayerNorm with bias, transposed Conv1D with bias
    batch = inputs("gpt2")
    sites = {"transformer.h.*.ln_1": projection(seed=1), "transformer.h.*.ln_2": projection(seed=2)}
    with snn.install(model, sites, tokens=everywhere):
        wanted = model(**batch).logits
    folded = snn.fold(model, sites, batch)
    assert torch.allclose(model(**batch).logits, wanted, atol=1e-5)
    assert folded.layers["transformer.h.0.ln_1"] == ("transformer.h.0.attn.c_attn",)
    assert folded.difference < 1e-4
    assert hooks_in(model) == 0
    assert "transformer.h.1.mlp.c_fc" in str(folded)


def test_a_linear_site_and_an_embedding() -> None:
    model, p = tiny("bert"), projection()
    batch = inputs("bert")
    sites = {
        "encoder.layer.0.attention.output.dense": p, "embeddings.word_embeddings": projection(seed=4)
    }  # fmt: skip
    with snn.install(model, sites, tokens=everywhere):
        wanted = model(**batch).last_hidden_state
    snn.fold(model, sites, batch)
    assert torch.allclose(model(**batch).last_hidden_state, wanted, atol=1e-5)


def test_control_a_norm_that_feeds_a_residual_is_refused() -> None:
    model = tiny("bert")
    before, owners = bits(model), {k: id(p) for k, p in model.named_parameters()}
    with pytest.raises(snn.FoldError, match="residual connection"):
        snn.fold(model, {"encoder.layer.0.output.LayerNorm": projection(rank=2)}, inputs("bert"))
    assert same(model, before, owners)


def test_a_residual_stream_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(snn.FoldError, match=r"norm|not linear"):
        snn.fold(model, {"model.layers.0": projection()}, inputs("llama"))


@pytest.mark.parametrize("bias", ["error", "add", "drop"])
def test_a_missing_bias(bias: str) -> None:
    model, p = tiny("llama"), projection()
    batch = inputs("llama")
    before, owners = bits(model), {k: id(p) for k, p in model.named_parameters()}
    site = "model.layers.1.input_layernorm"
    linear = sf.Projection(p.left, p.right, np.zeros(16))
    with snn.install(model, {site: linear if bias == "drop" else p}, tokens=everywhere):
        wanted = model(**batch).logits
    if bias == "error":
        with pytest.raises(snn.FoldError, match=r"q_proj.*no bias"):
            snn.fold(model, {site: p}, batch, bias=bias)
        assert same(model, before, owners)
        return
    if bias == "add":
        with pytest.warns(sf.SplinceWarning, match="from_pretrained drops them"):
            folded = snn.fold(model, {site: p}, batch, bias=bias)
        assert model.model.layers[1].self_attn.q_proj.bias is not None
        assert folded.shift[site] == 0
    else:
        folded = snn.fold(model, {site: p}, batch, bias=bias)
        assert list(model.state_dict()) == list(before)
        offsets = [
            before[f"model.layers.1.self_attn.{k}_proj.weight"].double().numpy() @ p.offset
            for k in "qkv"
        ]
        assert np.isclose(folded.shift[site], max(np.linalg.norm(o) for o in offsets))
        assert "mean shifted" in str(folded)
    assert torch.allclose(model(**batch).logits, wanted, atol=1e-5)


def test_a_tied_head_is_untied_and_survives_a_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
        intermediate_size=32, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = inputs("llama")
    embedding = model.model.embed_tokens.weight.clone()
    with pytest.warns(sf.SplinceWarning, match="are their own now"):
        folded = snn.fold(model, {"model.norm": projection()}, batch, bias="drop")
    assert folded.untied == ("lm_head",)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert not model.config.tie_word_embeddings
    wanted = model(**batch).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(**batch).logits, wanted)
    # Undone where the fold fails: the tie is back.
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config.to_dict(), "tie_word_embeddings": True}))
    with pytest.raises(snn.FoldError):
        snn.fold(other.eval(), {"model.layers.1": projection(), "model.norm": projection()}, batch)
    assert other.config.tie_word_embeddings
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_a_convolution_of_one_pixel() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 5, 1)
    ).eval()
    p, x = projection(rank=2), torch.randn(2, 3, 8, 8)
    with snn.install(model, {"1": p}, feature_dim=1):
        wanted = model(x)
    folded = snn.fold(model, {"1": p}, x)
    assert folded.layers == {"1": ("2",)}
    assert torch.allclose(model(x), wanted, atol=1e-5)


def test_dropout_and_identity_are_looked_through() -> None:
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(16), torch.nn.Dropout(0.5), torch.nn.Identity(), torch.nn.Linear(16, 3)
    ).train()
    folded = snn.fold(model, {"0": projection()}, torch.randn(20, 16))
    assert folded.layers == {"0": ("3",)}
    assert model.training


def test_what_is_not_linear_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    with pytest.raises(snn.FoldError, match="a GELU"):
        snn.fold(model, {"0": projection()}, torch.randn(20, 16))


def test_weights_that_are_no_numbers_are_refused() -> None:
    class Packed(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = torch.nn.Sequential(torch.nn.LayerNorm(16), Packed(16, 3))
    with pytest.raises(snn.FoldError, match="Packed"):
        snn.fold(model, {"0": projection()}, torch.randn(20, 16))
    shared = torch.nn.Linear(16, 16)
    twice = torch.nn.Sequential(torch.nn.LayerNorm(16), shared, torch.nn.Tanh(), shared)
    with pytest.raises(snn.FoldError, match="2 places"):
        snn.fold(twice, {"0": projection()}, torch.randn(20, 16))


def test_offloaded_weights_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny("gpt2"), execution_device="cpu")
    with pytest.raises(snn.FoldError, match="offloaded"):
        snn.fold(model, {"transformer.ln_f": projection()}, inputs("gpt2"))


def test_tokens_must_be_all() -> None:
    model = tiny("gpt2")
    batch = {**inputs("gpt2", n=100), "z": torch.arange(100) % 2}
    found = snn.collect(model, [batch], "transformer.ln_f", labels="z")
    erasers = found.erasers(sf.leace, erase="z")
    with pytest.raises(sf.InputError, match="cannot know positions"):
        snn.fold(model, erasers, batch, bias="drop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.SplinceWarning)  # the head is tied
        snn.fold(model, erasers, {k: v for k, v in batch.items() if k != "z"}, tokens="all", bias="drop")
    with pytest.raises(sf.InputError, match="every token"):
        snn.fold(model, {"transformer.ln_f": projection()}, batch, tokens="last")
    with pytest.raises(sf.InputError, match="bias is"):
        snn.fold(model, {"transformer.ln_f": projection()}, batch, bias="keep")


def test_bfloat16_weights() -> None:
    model = tiny("gpt2").bfloat16()
    batch = inputs("gpt2")
    folded = snn.fold(model, {"transformer.h.*.ln_1": projection()}, batch)
    assert folded.difference < 2e-2
    assert model.transformer.h[0].attn.c_attn.weight.dtype == torch.bfloat16
