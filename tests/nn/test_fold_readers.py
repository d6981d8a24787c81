"""nn.fold without into=: the layers that read a site are found in one call, or refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import inputs, module, projection, tiny
from splince_fast import nn as snn

P = sf.Projection(np.eye(16)[:, :3], np.eye(16)[:, :3], np.zeros(16))  # without a mean
X = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
ERRORS = snn.FoldError, sf.exceptions.InputError  # an error is both


def everywhere(call: Any) -> torch.Tensor:
    """Every token, pads included."""
    return torch.ones_like(call["input_ids"], dtype=torch.bool)


LLAMA = ["model.layers.*.*_layernorm", "model.norm"]
MLP = "model.layers.0.post_attention_layernorm"
# Sites, and one of them with the number of layers that read it.
CASES: dict[str, tuple[list[str], str, set[int]]] = {
    "llama": (LLAMA, "model.layers.0.input_layernorm", {3}),
    "gpt2": (["transformer.h.*.ln_?", "transformer.ln_f"], "transformer.h.0.ln_1", {1}),
    "neox": (["gpt_neox.layers.*.*_layernorm"], "gpt_neox.layers.0.input_layernorm", {1}),
    # A router, and three experts in one parameter or of two layers each.
    "mixtral": (LLAMA, MLP, {2, 7}),
    "qwen2_moe": (LLAMA, MLP, {5, 10}),  # and a shared expert with its gate
}


@pytest.mark.parametrize("name", CASES)
def test_a_fold_into_the_layers_that_are_found_is_the_model_with_hooks(name: str) -> None:
    (at, site, n_readers), model, batch = CASES[name], tiny(name), inputs(name, n=20)
    erasers, state = dict.fromkeys(at, P), copy.deepcopy(model.state_dict())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.SplinceWarning)  # a tied head is untied
        plain = model(**batch).logits
        with snn.install(model, erasers, tokens=everywhere):
            expected = model(**batch).logits
        readers = snn.fold(model, erasers, example=batch).layers[site]
        # Sums of at most 64 products in two blocks, in units of the rounding of weights.
        atol = 1e-5 * float(expected.abs().max())
        assert torch.allclose(model(**batch).logits, expected, rtol=0, atol=atol)
        assert len(readers) in n_readers
        # Controls: no fold, and a fold that leaves one reader out.
        assert not torch.allclose(plain, expected, rtol=0, atol=2 * atol)
        own = {k: v for k, v in state.items() if k.startswith(readers[-1] + ".")}
        model.load_state_dict(own, strict=False)
        assert not torch.allclose(model(**batch).logits, expected, rtol=0, atol=2 * atol)


def test_a_residual_stream_is_refused_and_folds_into_its_writers() -> None:
    model, batch, p = tiny("llama"), inputs("llama"), projection(rank=2)
    for error in ERRORS:
        with pytest.raises(error, match=r"no linear layer reads 'model.layers.0'.*into="):
            snn.fold(model, {"model.layers.0": P}, example=batch)
    # P (P a + c + P b) + c = P a + c + P b: with P at all writers, and the mean at the embedding
    # alone, every state of the stream is erased.
    linear = sf.Projection(p.left, p.right, np.zeros(16))
    writers = {"**.o_proj": linear, "**.down_proj": linear, "model.embed_tokens": p}
    for is_folded in (False, True):
        with torch.no_grad():
            plain = model(**batch).logits
            with snn.install(model, {"model.layers.*": p}, tokens=everywhere):
                assert torch.allclose(model(**batch).logits, plain, atol=1e-5) == is_folded
        snn.fold(model, {} if is_folded else writers, example=batch) if not is_folded else None


EXPERTS: dict[str, tuple[Any, str]] = {  # forms of experts (3, 16, 5), and errors
    "bmm": (lambda h, w: h.expand(3, -1, -1) @ w, ""),
    "loop over some": (lambda h, w: torch.stack([h.flip(0)[:9] @ own for own in w[:2]]), ""),
    "einsum": (lambda h, w: torch.einsum("end,edf->enf", h.expand(3, -1, -1), w), ""),
    "weight first": (lambda h, w: torch.einsum("edf,end->enf", w, h.expand(3, -1, -1)), ""),
    "not the parameter": (lambda h, w: h @ w.abs(), "no linear layer"),
    "not the rows": (lambda h, w: h**2 @ w, "no linear layer"),
    "a copy": (lambda h, w: h[:, None] @ w[torch.arange(40) % 3], "no linear layer"),
    "another use": (lambda h, w: h @ w + 1e-3 * h[:, :5], "other code reads it"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_one_parameter_are_folded_whole_or_refused(name: str) -> None:
    form, error = EXPERTS[name]
    experts = module(lambda self, h: form(h, self.weight))
    experts.weight = torch.nn.Parameter(torch.randn(3, 16, 5))
    model, before = torch.nn.Sequential(torch.nn.LayerNorm(16), experts), experts.weight.clone()
    with pytest.raises(snn.FoldError, match=error or "takes no means.*for_fold=True"):
        snn.fold(model, {"0": P if error else projection()}, example=X, bias="add")
    assert torch.equal(experts.weight, before)
    if not error:
        assert snn.fold(model, {"0": P}, example=X).layers == {"0": ("1",)}
        assert torch.allclose(experts.weight[:, 3:], before[:, 3:])
        assert not experts.weight[:, :3].any()


def test_experts_that_the_example_does_not_reach_are_named() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h, is_second = self.norm(x), x[:, 0] > 0
        chosen = [(i, h[is_second == i]) for i in is_second.unique().int().tolist()]
        return torch.cat([self.experts[i](rows) for i, rows in chosen])

    two = torch.nn.ModuleList([torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)])
    model = module(forward, norm=torch.nn.LayerNorm(16), experts=two)
    with pytest.raises(snn.FoldError, match=r"does not run 'experts.1'"):
        snn.fold(model, {"norm": projection()}, example=X[X[:, 0] <= 0])
    found = snn.fold(model, {"norm": projection()}, example=X).layers["norm"]
    assert sorted(found) == ["experts.0", "experts.1"]
