"""Models that several test modules share, tiny and random, and comparisons of their states."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from splince_fast import nn as snn
from splince_fast.nn.sites import find

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

WIDTH = 16


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> Iterator[None]:
    """More threads than cores make every small product wait for the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 2))
    yield
    torch.set_num_threads(before)


# --- tiny models ---------------------------------------------------------------------------------

# Sizes by the names of all configurations.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 2),
    "vocab_size": 50, "max_position_embeddings": 64, "n_positions": 64, "d_kv": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
_CAUSAL = {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8, "num_experts": 3}  # fmt: skip
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2ForCausalLM", _CAUSAL),
    "gemma3": ("Gemma3ForCausalLM", _CAUSAL),
    "qwen3": ("Qwen3ForCausalLM",
              {"head_dim": 4, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 1, "num_local_experts": 3}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {"num_key_value_heads": 1, **_EXPERTS}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "bert": ("BertModel", {}),
    "neox": ("GPTNeoXForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {}),
    "t5": ("T5ForConditionalGeneration", {}),
    "mamba": ("MambaForCausalLM", {"state_size": 4}),
    "whisper": ("WhisperForConditionalGeneration",
                {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 10,
                 "max_target_positions": 16, "decoder_start_token_id": 1}),
    "vit": ("ViTModel", {"image_size": 8, "patch_size": 4}),
}  # fmt: skip


def tiny(name: str) -> Any:
    """A random model of two layers, d = 16, by the name of its family."""
    torch.manual_seed(0)
    if name == "transformer":
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    if name == "sequential":
        ends = torch.nn.Linear(5, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
        return torch.nn.Sequential(*ends).eval()
    transformers = pytest.importorskip("transformers")
    kind, options = _MODELS[name]
    model = getattr(transformers, kind)
    config = transformers.Gemma3TextConfig if name == "gemma3" else model.config_class
    return model(config(**{**_SIZES, **options})).eval()


def inputs(name: str, n: int = 6, length: int = 5, seed: int = 0) -> dict[str, Any]:
    """Arguments of a tiny model; the attention mask leaves out the first tokens of some."""
    g = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(n, 3, 8, 8, generator=g)}
    if name == "transformer":
        return {"src": torch.randn(n, length, WIDTH, generator=g)}
    if name == "sequential":
        return {"input": torch.randn(n, 5, generator=g)}
    ids = torch.randint(3, 50, (n, length), generator=g)
    if name == "whisper":
        sound = torch.randn(n, 8, 20, generator=g)
        return {"input_features": sound, "decoder_input_ids": ids}
    mask = torch.ones_like(ids)
    mask[: n // 2, :2] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        found["decoder_input_ids"] = torch.randint(3, 50, (n, length), generator=g)
    return found


# The linear layers that read norms, by the ends of the names of both.
_READERS = {
    "input_layernorm": ["self_attn.[qkv]_proj", "self_attention.query_key_value",
                        "attention.query_key_value"],
    "post_attention_layernorm": ["mlp.[gu]*_proj", "mlp.dense_h_to_4h", "mlp.gate",
                                 "block_sparse_moe.gate"],
    "pre_feedforward_layernorm": ["mlp.[gu]*_proj"],
    "ln_1": ["attn.c_attn"],
    "ln_2": ["mlp.c_fc"],
    "norm": ["lm_head"],
    "norm_f": ["lm_head"],
    "layer_norm": ["SelfAttention.[qkv]", "EncDecAttention.q", "DenseReluDense.wi"],
    "layernorm_after": ["**.fc1", "**.intermediate.dense"],
    "final_layer_norm": ["fc1"],
}  # fmt: skip


def readers(model: Any, names: Any) -> dict[str, Any]:
    """Linear layers that read each site, as far as they are there."""
    into: dict[str, Any] = {}
    for site in names:
        parent, _, name = site.rpartition(".")
        for layer in _READERS.get(name, ()):
            with contextlib.suppress(snn.SiteError):
                found = find(model, layer if layer == "lm_head" else f"{parent}.{layer}")
                into.setdefault(site, []).extend(found.values())
    return into


def labelled(name: str, n: int = 100, seed: int = 0) -> dict[str, Any]:
    """Arguments of a tiny model, with labels z of two classes in turn."""
    return {**inputs(name, n, seed=seed), "z": torch.arange(n) % 2}


def rows_with(x: Any, **labels: Any) -> dict[str, Any]:
    """A batch of rows for a model whose argument is `input`; z has two classes in turn."""
    return {"input": x, "z": torch.arange(len(x)) % 2, **labels}


def cache_name(model: Any) -> str:
    """The argument for earlier tokens: transformers 5.24 renamed it to `cache` in most models."""
    parameters = inspect.signature(model.forward).parameters
    return next(
        name for name in ("cache", "past_key_values", "cache_params", "state") if name in parameters
    )


def module(forward: Callable[..., Any], **children: Any) -> Any:
    """A module with these submodules, whose forward method is a function of it and its inputs."""
    made = type("Model", (torch.nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def model_of(form: Callable[[Any], Any]) -> Any:
    """A model whose only site, "0", returns a function of its input."""
    return torch.nn.Sequential(module(lambda self, x: form(x)))


def identity() -> Any:
    """A model whose only site, "0", returns its input."""
    return model_of(lambda x: x)


def projection(width: int = WIDTH, rank: int = 1, seed: int = 0) -> Any:
    """A projection of a given rank with an offset."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(width, rank))
    right = left @ np.linalg.inv(left.T @ left)
    return sf.Projection(left, right, rng.normal(size=width))


# --- comparisons ---------------------------------------------------------------------------------


def outputs(model: Any, batch: dict[str, Any], erasers: Any = None, **options: Any) -> Any:
    """The main tensor that a model returns, with erasers installed."""
    with torch.no_grad(), snn.install(model, erasers or {}, **options):
        found = model(**batch)
    if isinstance(found, torch.Tensor):
        return found
    return found.logits if "logits" in found else found.last_hidden_state


def states(model: Any, name: str, run: Callable[[], object], side: str = "output") -> list[Any]:
    """The tensors that a site returns or takes while a function runs, erased by earlier hooks."""
    seen: list[Any] = []

    def look(module: Any, args: Any, output: Any = None) -> None:
        value = args if side == "input" else output
        seen.append((value if isinstance(value, torch.Tensor) else value[0]).clone())

    module = model.get_submodule(name)
    add = module.register_forward_pre_hook if side == "input" else module.register_forward_hook
    handle = add(look)
    with torch.no_grad():
        run()
    handle.remove()
    return seen


def state_of(model: Any, name: str, batch: dict[str, Any], side: str = "output") -> Any:
    """The tensor that a site returns or takes for a batch."""
    return states(model, name, lambda: model(**batch), side)[-1]


def changed(model: Any, site: str, run: Callable[[], object], **options: Any) -> list[Any]:
    """The tokens whose rows at a site an eraser changes, as nested lists of 0 and 1."""
    plain = torch.cat(states(model, site, run), 1)
    with snn.install(model, {site: projection()}, **options):
        erased = torch.cat(states(model, site, run), 1)
    return (erased != plain).any(-1).int().tolist()


def assert_decoded_alike(model: Any, call: dict[str, Any]) -> None:
    """Check that decoding with a cache is decoding without."""
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached, slow = (model.generate(**call, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, slow)


def attended_rows(
    model: Any, batches: list[dict[str, Any]], name: str, side: str = "output"
) -> np.ndarray:
    """The rows (n, d) of attended tokens that a site returns or takes, in float64."""
    rows = []
    for batch in batches:
        mask = batch["attention_mask"]
        call = {"input_ids": batch["input_ids"], "attention_mask": mask}
        x = state_of(model, name, call, side)
        rows.append(x.reshape(*mask.shape, -1)[mask != 0].double().numpy())
    return np.concatenate(rows)


def left(
    model: Any, batches: Any, erasers: Any, at: Any = None, name: str = "z", **options: Any
) -> dict[str, float]:
    """Per site, |Cov(h, z)| with erasers over that without."""
    at, options = at or list(erasers), {"labels": name, **options}
    before = snn.collect(model, batches, at, **options)
    with snn.install(model, erasers):
        after = snn.collect(model, batches, at, **options)
    norm = np.linalg.norm
    return {
        s: float(norm(after[s].cross_covariance(name)) / norm(before[s].cross_covariance(name)))
        for s in before
    }


def is_erased(found: Any, x: Any, p: Any, rows: Any = None) -> bool:
    """Whether the rows of a mask, or all, are r(x) to float32 rounding; others must have x's bits.

    Dot products of d numbers in any order are off by d roundings of their absolute terms, the
    factors by one, and each of the r subtractions by one of its result. Narrower results are
    rounded once more, to half a spacing.
    """
    shape = (-1, p.n_features)
    rows = torch.ones(x.shape[:-1], dtype=torch.bool) if rows is None else rows
    found, x = found.detach().reshape(shape), x.detach().reshape(shape)
    rows = rows.reshape(-1)
    exact = x.double().numpy()
    coefficients = exact @ p.right - p.bias
    terms = np.abs(exact) @ np.abs(p.right) + np.abs(p.bias)
    wrong = (p.n_features + 4) * terms @ np.abs(p.left).T
    wrong += (p.left.shape[1] + 1) * (np.abs(exact) + np.abs(coefficients) @ np.abs(p.left).T)
    wrong *= 2.0**-24
    if found.dtype.itemsize == 2:
        own = torch.finfo(found.dtype)
        wrong += own.eps / 2 * (found.double().abs().numpy() + own.tiny)
    distance = np.abs(found.double().numpy() - (exact - coefficients @ p.left.T))
    right = bool((distance <= wrong)[rows.numpy()].all())
    return right and torch.equal(found[~rows], x[~rows])


def raises(*cases: tuple[Any, str, Callable[[], object]]) -> None:
    """Check that each call is an error with this message."""
    for error, match, call in cases:
        with pytest.raises(error, match=match):
            call()


def refused(
    error: Any, match: str, model: Any, erasers: Any, batch: Any = None, **options: Any
) -> Any:
    """Check that a model with erasers is an error in a call, or already in the installation."""
    with pytest.raises(error, match=match) as caught, snn.install(model, erasers, **options):
        model(**batch) if isinstance(batch, dict) else model(batch)
    return caught.value


def hooks_in(model: Any) -> int:
    """Number of hooks of all kinds on all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)
