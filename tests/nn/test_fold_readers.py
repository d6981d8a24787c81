"""nn.fold without into=: the layers that read a site are found in one call, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import inputs, module, projection, tiny
from splince_fast import nn as snn

LEFT, RIGHT = np.random.default_rng(0).normal(size=(2, 16, 3))
P = sf.Projection(LEFT, RIGHT @ np.linalg.inv(LEFT.T @ RIGHT), np.zeros(16))  # oblique, no mean
X = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
ALL: Any = {"tokens": lambda call: torch.ones_like(call["input_ids"], dtype=torch.bool)}
LLAMA = ["model.layers.*.*_layernorm", "model.norm"]
MLP = "model.layers.0.post_attention_layernorm"
CASES: dict[str, Any] = {  # sites, and one of them with the number of layers that read it
    "llama": (LLAMA, "model.layers.0.input_layernorm", [3]),
    "gpt2": (["transformer.h.*.ln_?", "transformer.ln_f"], "transformer.h.0.ln_1", [1]),
    # Attention and MLP read norms of one state, which are equal in a new model.
    "neox": (["gpt_neox.layers.*.*_layernorm"], "gpt_neox.layers.0.input_layernorm", [1]),
    "mixtral": (LLAMA, MLP, [2, 7]),  # router; three experts in one parameter, or of two layers
    "qwen2_moe": (LLAMA, MLP, [5, 10]),  # and a shared expert with its gate
}


@pytest.mark.filterwarnings("ignore:the weights of 'lm_head' were tied")
@pytest.mark.parametrize("name", CASES)
def test_a_fold_into_the_layers_that_are_found_is_the_model_with_hooks(name: str) -> None:
    (at, site, n_readers), model, batch = CASES[name], tiny(name), inputs(name, n=20)
    with torch.no_grad():
        plain = model(**batch).logits
        with snn.install(model, dict.fromkeys(at, P), **ALL):
            expected = model(**batch).logits
        readers = snn.fold(model, dict.fromkeys(at, P), example=batch).layers[site]
        # Sums of at most 64 products in two blocks, in units of the rounding of weights.
        atol = 1e-5 * float(expected.abs().max())
        assert torch.allclose(model(**batch).logits, expected, rtol=0, atol=atol)
        assert len(readers) in n_readers
        # Controls: no fold, and a fold that leaves one reader out.
        last, before = (m.get_submodule(readers[-1]) for m in (model, tiny(name)))
        last.load_state_dict(before.state_dict())
        for other in (plain, model(**batch).logits):
            assert not torch.allclose(other, expected, rtol=0, atol=2 * atol)


def test_a_residual_stream_is_refused_and_folds_into_its_writers() -> None:
    model, batch, p = tiny("llama"), inputs("llama"), sf.Projection(P.left, P.right, np.ones(16))
    with pytest.raises(sf.exceptions.InputError, match=r"reads 'model.layers.0'.*into="):
        snn.fold(model, {"model.layers.0": P}, example=batch)
    # P (P a + c + P b) + c = P a + c + P b: with P at all writers, and the mean at the embedding
    # alone, every state of the stream is erased, so that hooks there change nothing.
    writers = {"**.o_proj": P, "**.down_proj": P, "model.embed_tokens": p}
    for is_erased in (False, True):
        plain = model(**batch).logits
        with snn.install(model, {"model.layers.*": p}, **ALL):
            assert torch.allclose(model(**batch).logits, plain, atol=1e-5) == is_erased
        snn.fold(model, writers, example=batch)


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (lambda h, w: h.expand(3, -1, -1) @ w, ""),
        (lambda h, w: torch.stack([h.flip(0)[:9] @ own for own in w[:2]]), ""),
        (lambda h, w: w.mT @ h.expand(3, -1, -1).mT, ""),
        (lambda h, w: h**2 @ w, "no linear layer"),
        (lambda h, w: h[:, None] @ w[torch.arange(40) % 3], "no linear layer"),
        (lambda h, w: h @ w + h[:, :5] + 1e6, "other code reads it"),  # a small part of the size
    ],
)
def test_experts_in_one_parameter_are_folded_whole_or_refused(form: Any, error: str) -> None:
    experts = module(lambda self, h: form(h, self.weight))
    experts.weight = torch.nn.Parameter(torch.randn(3, 16, 5))
    model, before = torch.nn.Sequential(torch.nn.LayerNorm(16), experts), experts.weight.clone()
    with pytest.raises(snn.FoldError, match=error or r"takes no means.*for_fold=True"):
        snn.fold(model, {"0": P if error else projection()}, example=X, bias="add")
    assert torch.equal(experts.weight, before)
    if not error:
        snn.fold(model, {"0": P}, example=X)
        expected = torch.from_numpy(P.matrix().T).float() @ before
        assert torch.allclose(experts.weight, expected, atol=1e-5)


@pytest.mark.parametrize("is_called", [False, True])  # with no rows
def test_experts_that_the_example_does_not_reach_are_named(is_called: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h, second = self.norm(x), (x[:, 0] > 0).int()
        reached = range(2) if is_called else second.unique().tolist()
        return torch.cat([self.experts[i](h[second == i]) for i in reached])

    two = torch.nn.ModuleList(torch.nn.Linear(16, 4) for _ in range(2))
    model = module(forward, norm=torch.nn.LayerNorm(16), experts=two)
    with pytest.raises(snn.FoldError, match=r"does not run 'experts.1'"):
        snn.fold(model, {"norm": projection()}, example=X[X[:, 0] <= 0])
    assert len(snn.fold(model, {"norm": projection()}, example=X).layers["norm"]) == 2


def test_a_layer_of_zero_rows_reads_no_site_in_inference_mode_too() -> None:
    norm, a, b = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    model = module(lambda self, x: self.a(self.n(x)) + self.b(0 * x), n=norm, a=a, b=b)
    with torch.inference_mode():
        folded = snn.fold(model, {"n": P}, example=torch.cat([X, torch.zeros(1, 16)]))
    assert folded.layers == {"n": ("a",)}
