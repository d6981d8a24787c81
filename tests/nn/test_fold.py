"""nn.folding, nn.layer_weights, nn.verification: folded weights equal hooks, or are restored."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import prune  # noqa: E402

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


def test_norms_are_folded_into_the_linear_layers_that_read_them() -> None:
    model = tiny("gpt2")  # LayerNorm with bias, transposed Conv1D with bias
    batch = inputs("gpt2")
    sites = {"transformer.h.*.ln_1": projection(seed=1), "transformer.h.*.ln_2": projection(seed=2)}
    with snn.install(model, sites, tokens=everywhere):
        expected = model(**batch).logits
    folded = snn.fold(model, sites, batch)
    assert torch.allclose(model(**batch).logits, expected, atol=1e-5)
    assert folded.layers["transformer.h.0.ln_1"] == ("transformer.h.0.attn.c_attn",)
    assert folded.difference < 1e-4
    assert hooks_in(model) == 0
    assert "transformer.h.1.mlp.c_fc" in str(folded)


def test_linear_sites_and_embeddings_are_folded() -> None:
    model, p = tiny("bert"), projection()
    batch = inputs("bert")
    sites = {
        "encoder.layer.0.attention.output.dense": p,
        "embeddings.word_embeddings": projection(seed=4),
    }
    with snn.install(model, sites, tokens=everywhere):
        expected = model(**batch).last_hidden_state
    snn.fold(model, sites, batch)
    assert torch.allclose(model(**batch).last_hidden_state, expected, atol=1e-5)


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
def test_a_missing_bias_is_an_error_or_added_or_dropped(bias: str) -> None:
    model, p = tiny("llama"), projection()
    batch = inputs("llama")
    before, owners = bits(model), {k: id(p) for k, p in model.named_parameters()}
    site = "model.layers.1.input_layernorm"
    linear = sf.Projection(p.left, p.right, np.zeros(16))
    with snn.install(model, {site: linear if bias == "drop" else p}, tokens=everywhere):
        expected = model(**batch).logits
    if bias == "error":
        with pytest.raises(snn.FoldError, match=r"q_proj.*no bias"):
            snn.fold(model, {site: p}, batch, bias=bias)
        assert same(model, before, owners)
        return
    if bias == "add":
        with pytest.warns(sf.SplinceWarning, match="drop the added biases"):
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
        assert "outputs shifted by" in str(folded)
    assert torch.allclose(model(**batch).logits, expected, atol=1e-5)


# --- several sites without biases ----------------------------------------------------------------

NORMS = ["model.layers.*.*_layernorm", "model.norm"]


def llama_and_batches() -> tuple[Any, list[dict[str, Any]]]:
    model = tiny("llama")
    batches = [inputs("llama", n=40, length=6, seed=i) for i in range(6)]
    for batch in batches:
        batch["z"] = batch["input_ids"].double().sin().sum(1)
    return model, batches


def read(model: Any, erasers: snn.Erasers, batches: Any) -> dict[str, np.ndarray]:
    """By site, Cov(P h, z) of the states in a model whose weights hold P."""
    found = snn.collect(model, batches, list(erasers), labels="z")
    return {s: p.matrix() @ found[s].cross_covariance("z") for s, p in erasers.items()}


def test_several_sites_without_biases_are_exact_or_refused(tmp_path: Path) -> None:
    model, batches = llama_and_batches()
    options: dict[str, Any] = {"erase": "z", "apply_to": "all"}
    before = snn.collect(model, batches, NORMS, labels="z")
    example = {k: v for k, v in batches[0].items() if k != "z"}

    def left(model: Any, erasers: snn.Erasers) -> list[float]:
        found = read(model, erasers, batches)
        norm = np.linalg.norm
        return [float(norm(c) / norm(before[s].cross_covariance("z"))) for s, c in found.items()]

    dropped = snn.fit_layers(model, batches, NORMS, sf.leace, bias="drop", **options)
    assert "means dropped" in str(dropped)
    assert not any(p.offset.any() or p.mean.any() for p in dropped.values())
    assert all(p.method == "LEACE" and p.report is not None for p in dropped.values())
    dropped.save(tmp_path / "dropped.safetensors")
    assert str(snn.Erasers.load(tmp_path / "dropped.safetensors")) == str(dropped)
    folded, names = copy.deepcopy(model), list(model.state_dict())
    found = snn.fold(folded, dropped, example)
    assert list(folded.state_dict()) == names  # no bias was added
    assert max(found.difference, found.from_installed) < 1e-5
    assert set(found.shift.values()) == {0.0}
    assert max(left(folded, dropped)) < 1e-6
    # The hooks do the same.
    with snn.install(model, dropped):
        after = snn.collect(model, batches, NORMS, labels="z")
    assert all(after.trace("z")[s] < 1e-6 * before.trace("z")[s] for s in dropped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folded.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
    assert max(left(loaded, dropped)) < 1e-6
    assert torch.equal(loaded(**example).logits, folded(**example).logits)

    # Fitted behind sites with their means: refused, and rightly.
    kept = snn.fit_layers(model, batches, NORMS, sf.leace, **options)
    before_bits, owners = bits(model), {k: id(p) for k, p in model.named_parameters()}
    with pytest.raises(snn.FoldError, match=r"post_attention_layernorm.*change by .*bias='drop'"):
        snn.fold(model, kept, example, bias="drop")
    assert same(model, before_bits, owners)
    assert hooks_in(model) == 0
    linear = {s: sf.Projection(p.left, p.right, np.zeros(16)) for s, p in kept.items()}
    forced = copy.deepcopy(model)
    snn.fold(forced, linear, example)
    assert max(left(forced, kept)) > 1e-3
    # One of them alone has nothing behind it.
    assert snn.fold(model, {"model.norm": kept["model.norm"]}, example, bias="drop").shift


def test_an_equal_shift_of_all_rows_is_folded() -> None:
    """Affine layers carry a dropped mean on as another mean."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16, bias=False),
        torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3, bias=False),
    ).eval()  # fmt: skip
    sites = {"0": projection(seed=1), "2": projection(seed=2)}
    x = torch.randn(50, 16)
    folded = snn.fold(copy.deepcopy(model), sites, x, bias="drop")
    assert min(folded.shift.values()) > 0.1
    # Control: the same sites with a nonlinear layer between them; and a single row tells nothing
    # of what all rows have in common, so its shift counts.
    curved = copy.deepcopy(model)
    curved[1] = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Tanh())
    for other, rows in ((curved, x), (model, x[:1])):
        with pytest.raises(snn.FoldError, match="activations at '2' change by"):
            snn.fold(other, sites, rows, bias="drop")


def test_the_installed_erasers_are_compared_too() -> None:
    """Weights erase the first token and drop the mean; installed by default, both stay."""
    model, batches = llama_and_batches()
    example = {k: v for k, v in batches[0].items() if k != "z"}
    erasers = snn.collect(model, batches, "model.norm", labels="z").erasers(sf.leace, erase="z")
    with torch.no_grad(), snn.install(model, erasers):
        expected = model(**example).logits
    folded = snn.fold(model, erasers, example, tokens="all", bias="drop")
    assert folded.difference < 1e-5
    attended = example["attention_mask"].bool()
    with torch.no_grad():
        rows = (model(**example).logits - expected).abs()[attended]
    size = expected[attended]
    assert np.isclose(folded.from_installed, rows.max() / (size.max() - size.min()), rtol=1e-3)
    assert folded.from_installed > 0.01
    assert f"{folded.from_installed:.1e} from install(model, erasers)" in str(folded)
    # Where install cannot select tokens, nothing is compared, and it is said.
    model, batches = llama_and_batches()
    means = snn.collect(model, batches, "model.norm", labels="z", tokens="mean")
    options: dict[str, Any] = {"tokens": "all", "bias": "drop"}
    folded = snn.fold(model, means.erasers(sf.leace, erase="z"), example, **options)
    assert folded.from_installed is None
    assert "not compared with install" in str(folded)


def test_a_fold_of_other_tokens_than_in_the_fit_warns() -> None:
    model, batches = llama_and_batches()
    example = {k: v for k, v in batches[0].items() if k != "z"}
    erasers = snn.fit_layers(model, batches, NORMS, sf.leace, erase="z", bias="drop")
    with pytest.warns(snn.OtherTokensWarning, match="'body' erased"):
        snn.fold(model, erasers, example, tokens="all")


def test_biases_are_folded() -> None:
    """Layers that read a site, and the site itself, add the mean to the bias that they have."""
    for name in ("gpt2", "bert"):  # both begin with biases of zero
        model, p, q = tiny(name), projection(rank=2, seed=1), projection(seed=2)
        g = torch.Generator().manual_seed(5)
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.data = torch.randn(parameter.shape, generator=g)
        sites = {
            "gpt2": {"transformer.h.0.ln_1": p, "transformer.h.1.mlp.c_proj": q},
            "bert": {"encoder.layer.0.attention.output.dense": p},
        }[name]
        batch = inputs(name)
        with torch.no_grad(), snn.install(model, sites, tokens=everywhere):
            expected = model(**batch)[0]
        folded = snn.fold(model, sites, batch)
        with torch.no_grad():
            found = model(**batch)[0]
        assert torch.allclose(found, expected, atol=1e-4 * float(expected.max() - expected.min()))
        assert folded.difference < 1e-5


def test_a_tied_head_is_untied_and_survives_a_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
        intermediate_size=32, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = inputs("llama")
    embedding = model.model.embed_tokens.weight.clone()
    with pytest.warns(sf.SplinceWarning, match="are separate now"):
        folded = snn.fold(model, {"model.norm": projection()}, batch, bias="drop")
    assert folded.untied == ("lm_head",)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert not model.config.tie_word_embeddings
    expected = model(**batch).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(**batch).logits, expected)
    # Undone where the fold fails: the tie is back.
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**config.to_dict(), "tie_word_embeddings": True})
    )
    with pytest.raises(snn.FoldError):
        snn.fold(other.eval(), {"model.layers.1": projection(), "model.norm": projection()}, batch)
    assert other.config.tie_word_embeddings
    assert other.lm_head.weight is other.model.embed_tokens.weight


class Config:
    """A configuration of a model of several parts."""

    def __init__(self, tie: bool, text: Any = None) -> None:
        self.tie_word_embeddings, self.text = tie, text

    def get_text_config(self, decoder: bool = False) -> Any:
        return self.text or self


@pytest.mark.parametrize("tied", [(True, True), (False, True), (True, False)])
def test_every_configuration_of_a_tied_head_is_untied(tied: tuple[bool, bool]) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(50, 16)
            self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight
            self.other = torch.nn.Linear(16, 16)
            self.config, self.other.config = Config(tied[0], Config(tied[1])), Config(True)
            self.embedding.config = Config(tied[1])

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embedding(input_ids)))

    def flags(model: Any) -> list[bool]:
        configs = model.config, model.config.text, model.embedding.config, model.other.config
        return [config.tie_word_embeddings for config in configs]

    model, ids = Model(), torch.arange(20).reshape(4, 5)
    before = flags(model)
    with pytest.warns(sf.SplinceWarning, match="are separate now"):
        snn.fold(model, {"norm": projection()}, ids, bias="drop")
    assert flags(model) == [False, False, False, True]  # another part keeps its own ties
    # Undone where the fold fails.
    model = Model()
    model.head.register_forward_hook(lambda m, a, out: out * m.weight.sum())
    with pytest.raises(snn.FoldError, match="another function of their weights"):
        snn.fold(model, {"norm": projection()}, ids, bias="drop")
    assert flags(model) == before
    assert model.head.weight is model.embedding.weight


def test_a_tied_head_of_a_model_of_images_and_text_survives_a_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    text = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, vocab_size=50, tie_word_embeddings=True
    )
    vision = transformers.CLIPVisionConfig(
        **sizes, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=49)
    config.tie_word_embeddings = True
    model = transformers.LlavaForConditionalGeneration(config).eval()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    batch = {"input_ids": inputs("llama")["input_ids"] % 48}
    with pytest.warns(sf.SplinceWarning, match="are separate now"):
        snn.fold(model, {"**.norm": projection()}, batch, bias="drop")
    assert not model.config.tie_word_embeddings
    assert not model.config.text_config.tie_word_embeddings
    with torch.no_grad():
        expected = model(**batch).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, expected)


@pytest.mark.parametrize("trainable", ["weight", "bias"])
def test_folded_parameters_train_as_before(trainable: str) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
    for name, parameter in model[1].named_parameters():
        parameter.requires_grad_(name == trainable)
    model[1].bias.data = model[1].bias.data.double()
    model[1].forward = lambda x: x @ model[1].weight.T + model[1].bias.float()
    snn.fold(model, {"0": projection()}, torch.randn(20, 16))
    names = [name for name, parameter in model[1].named_parameters() if parameter.requires_grad]
    assert names == [trainable]
    assert model[1].bias.dtype == torch.float64
    assert model[1].weight.dtype == torch.float32


def pruned(linear: Any) -> Any:
    return prune.l1_unstructured(linear, "weight", 0.3)


def pruned_bias(linear: Any) -> Any:
    return prune.l1_unstructured(linear, "bias", 0.3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    "change",
    [
        pruned, pruned_bias, torch.nn.utils.weight_norm,
        torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrizations.spectral_norm,
    ],
)  # fmt: skip
def test_weights_that_are_computed_from_parameters_are_refused(change: Any) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), change(torch.nn.Linear(16, 16)))
    before, owners = bits(model), {k: id(p) for k, p in model.named_parameters()}
    for site in ("0", "1"):
        with pytest.raises(snn.FoldError, match=r"(weight|bias) of '1' is no parameter"):
            snn.fold(model, {site: projection()}, torch.randn(20, 16))
    assert same(model, before, owners)


def test_convolutions_of_one_pixel_are_folded() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 5, 1)
    ).eval()
    p, x = projection(rank=2), torch.randn(2, 3, 8, 8)
    with snn.install(model, {"1": p}, feature_dim=1):
        expected = model(x)
    folded = snn.fold(model, {"1": p}, x)
    assert folded.layers == {"1": ("2",)}
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_dropout_and_identity_are_skipped() -> None:
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(16), torch.nn.Dropout(0.5), torch.nn.Identity(), torch.nn.Linear(16, 3)
    ).train()
    folded = snn.fold(model, {"0": projection()}, torch.randn(20, 16))
    assert folded.layers == {"0": ("3",)}
    assert model.training


def test_readers_that_are_not_linear_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    with pytest.raises(snn.FoldError, match="a GELU"):
        snn.fold(model, {"0": projection()}, torch.randn(20, 16))


def test_packed_weights_are_refused() -> None:
    class Packed(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = torch.nn.Sequential(torch.nn.LayerNorm(16), Packed(16, 3))
    with pytest.raises(snn.FoldError, match="Packed"):
        snn.fold(model, {"0": projection()}, torch.randn(20, 16))
    shared = torch.nn.Linear(16, 16)
    twice = torch.nn.Sequential(torch.nn.LayerNorm(16), shared, torch.nn.Tanh(), shared)
    with pytest.raises(snn.FoldError, match="occurs 2 times"):
        snn.fold(twice, {"0": projection()}, torch.randn(20, 16))


class Packed8(torch.Tensor):
    """Integers with a scale that pass for floats, as torchao's weights do."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scale: float) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        plain = [a.values.float() * a.scale if isinstance(a, cls) else a for a in args]
        if func is torch.ops.aten._to_copy.default:
            raise RuntimeError("not implemented for packed weights")
        return func(*plain, **(kwargs or {}))


def test_quantised_weights_are_refused_and_hooks_work() -> None:
    p, x = projection(), torch.randn(20, 16)

    def of(linear: Any) -> Any:
        return torch.nn.Sequential(torch.nn.LayerNorm(16), linear)

    subclass = torch.nn.Linear(16, 3)
    values = torch.randint(-100, 100, (3, 16), dtype=torch.int8)
    subclass.weight = torch.nn.Parameter(Packed8(values, 0.01), requires_grad=False)
    narrow = torch.nn.Linear(16, 3)
    narrow.weight = torch.nn.Parameter(narrow.weight.to(torch.float8_e4m3fn), False)
    narrow.forward = lambda x: torch.nn.functional.linear(x, narrow.weight.to(x.dtype))

    class Int8(torch.nn.Module):
        """As torch's own and AutoGPTQ's: a module inside holds the weights and never runs."""

        def __init__(self, kind: str) -> None:
            super().__init__()
            self.packed = torch.nn.Module()
            if kind == "qweight":
                self.register_buffer("qweight", values)
            else:
                self.weight = lambda: values

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, 0.01 * values.float())

    for linear in (subclass, narrow, Int8("qweight"), Int8("method")):
        model = of(linear)
        with pytest.raises(snn.FoldError, match=r"'1', a \w+, are quantised or packed"):
            snn.fold(model, {"0": p}, x)
        with torch.no_grad(), snn.install(model, {"0": p}):
            assert model(x).shape == (20, 3)
        assert hooks_in(model) == 0


@pytest.mark.filterwarnings("ignore")  # torch announces the end of its int8 layers
def test_torch_s_own_int8_layers_are_refused() -> None:
    quantize = getattr(torch.ao.quantization, "quantize_dynamic", None)
    if quantize is None:
        pytest.skip("this torch has no int8 layers")
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
    model = quantize(model, {torch.nn.Linear})
    with pytest.raises(snn.FoldError, match="quantised"):
        snn.fold(model, {"0": projection()}, torch.randn(20, 16))


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
    with pytest.raises(sf.InputError, match="do not depend on positions"):
        snn.fold(model, erasers, batch, bias="drop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.SplinceWarning)  # the head is tied
        snn.fold(
            model, erasers, {k: v for k, v in batch.items() if k != "z"}, tokens="all", bias="drop"
        )
    with pytest.raises(sf.InputError, match="every token"):
        snn.fold(model, {"transformer.ln_f": projection()}, batch, tokens="last")
    with pytest.raises(sf.InputError, match="bias is"):
        snn.fold(model, {"transformer.ln_f": projection()}, batch, bias="keep")
    for_all = snn.collect(model, [batch], "transformer.ln_f", labels="z", tokens="all")
    with pytest.raises(sf.InputError, match="tokens is 'last'"):
        snn.fold(model, for_all.erasers(sf.leace, erase="z"), batch, tokens="last")
    with pytest.raises(sf.InputError, match="erasers is a Projection"):
        snn.fold(model, projection(), batch)


def test_an_example_that_the_model_cannot_take_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    with pytest.raises(sf.InputError, match="example is None"):
        snn.fold(model, {"0": projection()}, None)
    with pytest.raises(RuntimeError, match="normalized_shape") as caught:
        snn.fold(model, {"0": projection()}, torch.ones(3, 7))
    assert caught.value.__notes__ == [
        "while the model ran on a batch or example: float32 tensor (3, 7)"
    ]


@pytest.mark.parametrize("masked", [-torch.inf, torch.nan])
def test_outputs_that_are_not_finite_do_not_pass_as_equal(masked: float) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    model.register_forward_hook(lambda m, a, out: out.index_fill(1, torch.tensor([3]), masked))
    example, sites = torch.randn(5, 16), {"0": projection()}
    # Outputs that are masked in both models do not count.
    assert 0 < snn.fold(copy.deepcopy(model), sites, example).difference < 1e-4

    half = copy.deepcopy(model).half()
    signs = np.sign(projection().right[:, 0])
    half[1].weight.data[:] = torch.from_numpy(60_000 * signs)  # the folded weight overflows
    before, owners = bits(half), {k: id(p) for k, p in half.named_parameters()}
    large = sf.Projection(projection().left * 100, projection().right, np.zeros(16))
    with pytest.raises(snn.FoldError, match="NaN or infinity"):
        snn.fold(half, {"0": large}, example.half())
    assert same(half, before, owners)


def test_bfloat16_weights_are_folded_to_their_precision() -> None:
    model = tiny("gpt2").bfloat16()
    batch = inputs("gpt2")
    folded = snn.fold(model, {"transformer.h.*.ln_1": projection()}, batch)
    assert folded.difference < 2e-2
    assert model.transformer.h[0].attn.c_attn.weight.dtype == torch.bfloat16


# --- outputs that hide a difference ---------------------------------------------------------------


@dataclasses.dataclass
class Output:
    """An output that is neither a tensor nor a container."""

    logits: torch.Tensor


class Residual(torch.nn.Module):
    """A residual connection also reads the norm; `form` maps the output."""

    def __init__(self, form: Callable[[torch.Tensor], Any], width: int = 16) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
        self.form, self.with_residual = form, True

    def forward(self, x: torch.Tensor) -> Any:
        h = self.norm(x)
        return self.form(self.linear(h) + (h if self.with_residual else 0))


@pytest.mark.parametrize(
    "form",
    [
        Output,
        lambda y: SimpleNamespace(result=[Output(y)]),
        lambda y: y.index_fill(1, torch.tensor([0]), -1e9),
        lambda y: y.index_fill(1, torch.tensor([0]), torch.finfo(torch.float32).min),
        lambda y: (torch.ones(3), y.double(), {"ids": y.argmax(-1)}),
    ],
    ids=["dataclass", "object", "suppressed", "smallest number", "tuple"],
)
def test_a_residual_connection_is_found_in_every_form_of_output(form: Any) -> None:
    torch.manual_seed(0)
    model, x, p = Residual(form), torch.randn(50, 16), projection()
    before, owners = bits(model), {k: id(q) for k, q in model.named_parameters()}
    with pytest.raises(snn.FoldError, match="residual connection"):
        snn.fold(model, {"norm": p}, x)
    assert same(model, before, owners)
    assert hooks_in(model) == 0
    # Control: without the connection the same outputs are accepted.
    model.with_residual = False
    assert 0 < snn.fold(model, {"norm": p}, x).difference < 1e-4


@pytest.mark.parametrize(
    "form",
    [lambda y: y.argmax(-1), lambda y: {"ids": y.argmax(-1), "constant": torch.ones(3)}],
    ids=["integers", "constants"],
)
def test_outputs_that_the_erasers_do_not_change_are_refused(form: Any) -> None:
    model, x = Residual(form), torch.randn(50, 16)
    before, owners = bits(model), {k: id(q) for k, q in model.named_parameters()}
    with pytest.raises(snn.FoldError, match="change no floating tensor"):
        snn.fold(model, {"norm": projection()}, x)
    assert same(model, before, owners)


def test_a_residual_connection_is_found_below_the_precision_of_bfloat16() -> None:
    """The eraser changes wide activations by less than the rounding of folded weights may."""
    torch.manual_seed(0)
    width = 2048
    model = torch.nn.Sequential(Residual(lambda y: y, width), torch.nn.Linear(width, 8)).bfloat16()
    with torch.no_grad():
        model[0].linear.weight.mul_(0.05)
    direction = np.full((width, 1), width**-0.5)
    sites = {"0.norm": sf.Projection(direction, direction, np.zeros(width))}
    x = torch.randn(20, width).bfloat16()
    with torch.no_grad(), snn.install(model, sites):
        erased = model(x)
    with torch.no_grad():
        change = (model(x) - erased).abs().max() / (erased.max() - erased.min())
    assert change < 2e-2
    with pytest.raises(snn.FoldError, match="residual connection"):
        snn.fold(model, sites, x)
    model[0].with_residual = False
    snn.fold(model, sites, x)


def test_weights_that_other_code_reads_are_found_beside_suppressed_tokens() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.twice = torch.nn.Linear(16, 16), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x))
            y = y @ self.linear.weight if self.twice else y
            return y.index_fill(1, torch.tensor([0]), -1e9)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(50, 16)
    with pytest.raises(snn.FoldError, match="reads their weights without calling them"):
        snn.fold(model, {"linear": projection()}, x)
    model.twice = False
    snn.fold(model, {"linear": projection()}, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_read_one_token_of_a_site_are_folded(dtype: torch.dtype) -> None:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(x)[:, 0])

    torch.manual_seed(0)
    model = Classifier().to(dtype)
    folded = snn.fold(model, {"norm": projection(rank=6)}, torch.randn(30, 5, 16).to(dtype))
    assert folded.layers == {"norm": ("head",)}
