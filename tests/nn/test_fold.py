"""nn.folding: folded weights equal hooks, or every parameter is as before."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import prune

import splince_fast as sf
from nn.conftest import hooks_in, inputs, left, module, outputs, projection, readers, tiny
from splince_fast import nn as snn


def everywhere(call: Any) -> torch.Tensor:
    """Every token, pads included."""
    return torch.ones_like(call["input_ids"], dtype=torch.bool)


def contents(model: Any) -> Any:
    """Parameters, their values, the configuration and the hooks of a model, to compare later."""
    config = getattr(model, "config", None)
    values = {k: p if p.is_meta else p.detach().clone() for k, p in model.named_parameters()}
    rest = list(map(id, model.parameters())), config and config.to_dict(), hooks_in(model)
    return values, rest


def refused(
    match: str, model: Any, erasers: Any, into: Any = None, error: Any = snn.FoldError, **call: Any
) -> Any:
    """Check that a fold is an error with this message, and changes nothing."""
    before, rest = contents(model)
    with pytest.raises(error, match=match) as caught:
        snn.fold(model, erasers, into, **call)
    after, rest_after = contents(model)
    assert rest_after == rest
    assert list(after) == list(before)
    assert all(p.is_meta or torch.equal(p, before[k]) for k, p in after.items())
    return caught.value


def layer_norm(*after: Any) -> Any:
    """A model of a norm, "0", and modules that read it."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.LayerNorm(16), *after).eval()


H, A, L = "transformer.h.{}", "encoder.layer.0.attention.output.dense", "model.layers.{}"
LINEAR = sf.Projection(np.eye(16)[:, :3], np.eye(16)[:, :3], np.zeros(16))  # without a mean
CASES: dict[str, dict[str, Any]] = {
    # LayerNorm with bias, Conv1D with bias
    "gpt2": {f"{H}.ln_1": projection(seed=1), f"{H}.ln_2": projection(rank=2, seed=2),
             f"{H}.mlp.c_proj": projection(seed=3)},
    "bert": {A: projection(rank=2), "embeddings.word_embeddings": projection(seed=4)},
    "llama": {f"{L}.input_layernorm": LINEAR, f"{L}.post_attention_layernorm": LINEAR},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_fold_is_the_model_with_hooks(name: str, dtype: Any) -> None:
    model, batch, g = tiny(name).to(dtype), inputs(name), torch.Generator().manual_seed(5)
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):  # zero in a new model
            parameter.data = torch.randn(parameter.shape, generator=g).to(dtype)
    sites = {k.format(i): p for k, p in CASES[name].items() for i in (0, 1)}
    plain, expected = outputs(model, batch), outputs(model, batch, sites, tokens=everywhere)
    folded = snn.fold(model, sites, readers(model, sites), example=batch)
    found = outputs(model, batch)
    size = float(expected.abs().max())
    # Sums of at most 64 products in two layers, in units of the rounding of weights.
    atol = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype] * size
    assert torch.allclose(found, expected, rtol=0, atol=atol)
    assert (plain - expected).abs().max() > 2 * atol  # control
    assert folded.difference * size <= 10 * atol
    assert list(folded.layers) == list(sites)
    assert hooks_in(model) == 0
    assert {p.dtype for p in model.parameters()} == {dtype}


# --- biases --------------------------------------------------------------------------------------

NORMS = ["model.layers.*.*_layernorm", "model.norm"]
SITE = "model.layers.1.input_layernorm"


def llama_and_batches() -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    model = tiny("llama")
    batches = [inputs("llama", n=40, length=6, seed=i) for i in range(6)]
    example = dict(batches[0])
    for batch in batches:
        batch["z"] = batch["input_ids"].double().sin().sum(1)
    return model, batches, example


def reloaded(model: Any, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
        return type(model).from_pretrained(path).eval()


def test_a_missing_bias_is_an_error_or_added(tmp_path: Path) -> None:
    model, p, batch = tiny("llama"), {SITE: projection()}, inputs("llama")
    into = readers(model, [SITE])
    expected = outputs(model, batch, p, tokens=everywhere)
    refused(r"q_proj.*no bias.*for_fold=True", model, p, into, example=batch)
    other = model.lm_head.register_forward_hook(  # other code reads an added bias
        lambda m, a, out: out + float(model.model.layers[1].self_attn.q_proj.bias is not None)
    )
    refused("differ from hooks", model, p, into, example=batch, bias="add")
    other.remove()
    with pytest.warns(sf.SplinceWarning, match=r"q_proj'.*from_pretrained drops.*for_fold=True"):
        snn.fold(model, p, into, example=batch, bias="add")
    found = outputs(model, batch)
    assert torch.allclose(found, expected, atol=1e-5)
    # The reason of the warning.
    assert not torch.allclose(outputs(reloaded(model, tmp_path), batch), found, atol=1e-3)


def test_several_sites_without_biases_are_exact_or_refused(tmp_path: Path) -> None:
    model, batches, example = llama_and_batches()
    before = snn.collect(model, batches, NORMS, labels="z")

    def fraction(model: Any, erasers: Any) -> float:
        """The largest fraction of Cov(h, z) in P h, for states h; the weights hold P."""
        found = snn.collect(model, batches, list(erasers), labels="z")
        return max(
            float(np.linalg.norm(p.matrix() @ found[s].cross_covariance("z")))
            / float(np.linalg.norm(before[s].cross_covariance("z")))
            for s, p in erasers.items()
        )

    erasers = snn.fit_layers(model, batches, NORMS, sf.leace, erase="z", for_fold=True)
    folded, names = copy.deepcopy(model), list(model.state_dict())
    found = snn.fold(folded, erasers, readers(folded, erasers), example=example)
    assert list(folded.state_dict()) == names  # no bias was added
    assert found.difference < 1e-5
    assert max(fraction(folded, erasers), fraction(reloaded(folded, tmp_path), erasers)) < 1e-6
    assert max(left(model, batches, erasers).values()) < 1e-6  # the hooks do the same

    # Fitted behind sites with their means: refused, and rightly.
    into = readers(model, erasers)
    with_means = snn.fit_layers(model, batches, NORMS, sf.leace, erase="z", apply_to="all")
    refused(r"no bias.*for_fold=True", model, with_means, into, example=example)
    linear = {s: sf.Projection(p.left, p.right, np.zeros(16)) for s, p in with_means.items()}
    snn.fold(model, linear, into, example=example)
    assert fraction(model, with_means) > 1e-3


# --- tied weights --------------------------------------------------------------------------------


def tied_llama() -> Any:
    model = tiny("llama")
    model.config.tie_word_embeddings = True
    return type(model)(model.config).eval()


def tied_llava() -> Any:
    """A model of images and text, with a configuration for each."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    text = transformers.LlamaConfig(**sizes, vocab_size=50, tie_word_embeddings=True)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=49)
    config.tie_word_embeddings = True
    return transformers.LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("make", "norm"), [(tied_llama, "model.norm"), (tied_llava, "model.language_model.norm")]
)
def test_a_tied_head_is_untied_and_survives_a_file(make: Any, norm: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = make(), {"input_ids": inputs("llama")["input_ids"] % 48}
    tied = model.get_input_embeddings().weight
    assert model.lm_head.weight is tied
    embedding, sites = tied.clone(), {norm: LINEAR}
    hook = model.lm_head.register_forward_hook(lambda m, a, out: out * m.weight.sum())
    refused("other code reads it", model, sites, {norm: "lm_head"}, example=batch)
    hook.remove()
    assert model.lm_head.weight is tied
    with pytest.warns(sf.SplinceWarning, match="are separate now"):
        folded = snn.fold(model, sites, {norm: "lm_head"}, example=batch)
    assert folded.untied == ("lm_head",)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert not model.config.tie_word_embeddings
    assert not model.config.get_text_config().tie_word_embeddings
    assert torch.equal(outputs(reloaded(model, tmp_path), batch), outputs(model, batch))


# --- refusals ------------------------------------------------------------------------------------

X, NORM, ZERO = torch.randn(50, 16), {"norm": projection()}, {"0": projection()}


def residual(form: Any = lambda y: y, width: int = 16) -> Any:
    """A model in which a residual connection reads the norm, too; `form` maps the output."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        h = self.norm(x)
        return form(self.linear(h) + (h if self.with_residual else 0))

    torch.manual_seed(0)
    linear = torch.nn.Linear(width, width)
    return module(forward, norm=torch.nn.LayerNorm(width), linear=linear, with_residual=True)


@pytest.mark.parametrize(
    "form",
    [
        *(lambda y, value=value: y.index_fill(1, torch.tensor([0]), value)
          for value in (-1e9, torch.finfo(torch.float32).min, -torch.inf, torch.nan)),
        lambda y: [(torch.ones(3), y.double(), {"ids": y.argmax(-1)})],
    ],
    ids=["suppressed", "smallest number", "infinite", "not a number", "containers"],
)  # fmt: skip
def test_a_reader_that_is_not_named_is_found_in_every_form_of_output(form: Any) -> None:
    model = residual(form)
    refused("residual connection", model, NORM, {"norm": "linear"}, example=X)
    # Control: without the connection the same outputs are accepted.
    model.with_residual = False
    assert 0 < snn.fold(model, NORM, {"norm": "linear"}, example=X).difference < 1e-4


def test_a_reader_is_found_below_the_precision_of_bfloat16() -> None:
    """The eraser changes wide activations by less than the rounding of folded weights may."""
    width = 2048
    model = torch.nn.Sequential(residual(width=width), torch.nn.Linear(width, 8)).bfloat16()
    with torch.no_grad():
        model[0].linear.weight.mul_(0.05)
    direction = np.full((width, 1), width**-0.5)
    sites = {"0.norm": sf.Projection(direction, direction, np.zeros(width))}
    into, x = {"0.norm": "0.linear"}, torch.randn(20, width).bfloat16()
    plain, erased = (outputs(model, {"input": x}, given) for given in ({}, sites))
    assert (plain - erased).abs().max() < 2e-2 * erased.abs().max()
    refused("residual connection", model, sites, into, example=x)
    model[0].with_residual = False
    snn.fold(model, sites, into, example=x)


def test_folds_that_the_example_does_not_verify_are_refused() -> None:
    gpt2, batch, site = tiny("gpt2"), inputs("gpt2"), "transformer.h.0.ln_1"
    llama, shared = tiny("llama"), torch.nn.Linear(16, 16)
    # A layer that runs at two places reads other states, too.
    twice = layer_norm(shared, torch.nn.Tanh(), shared)
    constant = residual(lambda y: {"ids": y.argmax(-1), "constant": torch.ones(3)})

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.large(h) if len(x) > 5 else self.small(self.other(h))

    norms = {name: torch.nn.LayerNorm(16) for name in ("norm", "other")}
    linear = {name: torch.nn.Linear(16, 4) for name in ("large", "small")}
    routed, two = module(forward, **norms, **linear), NORM | {"other": projection(seed=1)}
    read = layer_norm(torch.nn.Linear(16, 16))
    read[1].register_forward_hook(lambda m, a, y: torch.tanh(y) @ m.weight)
    half = layer_norm(torch.nn.Linear(16, 4)).half()
    half[1].weight.data[:] = 60_000 * torch.from_numpy(np.sign(projection().right[:, 0]))
    large = sf.Projection(projection().left * 100, projection().right, np.zeros(16))
    overflows = "overflows, or other code reads it"
    for match, model, erasers, into, example in (
        *((f"than '{wrong}' read the sites", gpt2, {site: projection()}, {site: wrong}, batch)
          for wrong in ("transformer.h.1.attn.c_attn", "transformer.h.0.attn.c_proj")),
        ("name all readers", llama, {SITE: LINEAR}, {SITE: "**.1.self_attn.[qk]_proj"}, batch),
        ("name all readers", twice, ZERO, {"0": "1"}, X),
        ("change no floating tensor", constant, NORM, {"norm": "linear"}, X),
        ("does not run 'other', so", routed, two, {"norm": "large", "other": "small"}, X),
        ("does not run 'small', so", routed, NORM, {"norm": ["large", "small"]}, X),
        (overflows, read, ZERO, {"0": "1"}, X),
        (overflows, half, {"0": large}, {"0": "1"}, X.half()),
    ):  # fmt: skip
        refused(match, model, erasers, into, example=example)
    snn.fold(routed, NORM, {"norm": "large"}, example=X)  # control


def packed(linear: Any) -> Any:
    """The weight as a subclass with a floating dtype, as the packed weights of torchao."""
    kind = type("Packed", (torch.Tensor,), {})
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(kind))
    assert type(linear.weight) is kind
    return linear


def narrow(linear: Any) -> Any:
    linear.weight = torch.nn.Parameter(linear.weight.to(torch.float8_e4m3fn), False)
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight.to(x.dtype))
    return linear


def adapted(linear: Any) -> Any:
    forward = lambda self, x: torch.nn.Linear.forward(self, x)  # noqa: E731
    linear.__class__ = type("Adapted", (torch.nn.Linear,), {"forward": forward})
    return linear


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    "change",
    [
        packed, narrow, adapted,
        lambda linear: prune.l1_unstructured(linear, "weight", 0.3),
        lambda linear: prune.l1_unstructured(linear, "bias", 0.3),
        torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm,
        torch.nn.utils.parametrizations.spectral_norm,
    ],
)  # fmt: skip
def test_layers_that_are_not_plain_are_refused_and_hooks_work(change: Any) -> None:
    model = layer_norm(change(torch.nn.Linear(16, 16)))
    refused(r"^'1', a \w+, is no plain layer", model, ZERO, {"0": "1"}, example=X)
    assert outputs(model, {"input": X}, ZERO).shape == X.shape


def test_invalid_arguments_of_fold_are_errors() -> None:
    model, batches, example = llama_and_batches()
    body = snn.fit_layers(model, batches, "model.norm", sf.leace, erase="z")
    into, given = {"model.norm": "lm_head"}, {"model.norm": LINEAR}
    for match, erasers, options in (
        (r"'body'.*for_fold=True\), then fold\(model, erasers, example=", body, {}),
        ("bias is", given, {"bias": "drop"}),
        ("erasers is a Projection", projection(), {}),
        ("erasers is empty", {}, {"into": {}}),
        ("names 'a'; the sites are 'model.norm'", given, {"into": {"a": "lm_head"}}),
        ("example is None", given, {"example": None}),
    ):
        call = {"into": into, "example": example} | options
        refused(match, model, erasers, error=sf.exceptions.InputError, **call)
    wrong = {"input_ids": torch.tensor([[99]])}
    refused("index out of range", model, given, into, IndexError, example=wrong)
    layers = layer_norm(torch.nn.GELU(), torch.nn.Linear(16, 3), torch.nn.Conv2d(3, 16, 3))
    width = r"\(3, 16\), and the eraser of '2' has width 16"
    for match, site, reader in (
        (r"'0', a LayerNorm.*into=\{'0': ", "0", "0"), ("'1', a GELU", "0", "1"),
        (width, "2", "2"), ("'3', a Conv2d, is not linear", "3", "3"),
    ):  # fmt: skip
        refused(match, layers, {site: projection()}, {site: reader}, example=X)
    model = layer_norm(torch.nn.Linear(16, 16))
    for side in ("input", "output"):
        with snn.install(model, {"1": projection()}, side=side):
            match = r"installed in this model, at '1'; call remove\(\)"
            refused(match, model, ZERO, {"0": "1"}, example=X)
    assert snn.fold(model, ZERO, {"0": "1"}, example=X).difference < 1e-5


# --- the rest of a model -------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", ["weight", "bias"])
def test_folded_parameters_train_as_before(trainable: str) -> None:
    model = layer_norm(torch.nn.Linear(16, 3)).train()
    for name, parameter in model[1].named_parameters():
        parameter.requires_grad_(name == trainable)
    model[1].bias.data = model[1].bias.data.double()
    model[1].forward = lambda x: x @ model[1].weight.T + model[1].bias.float()
    snn.fold(model, {"0": projection()}, {"0": model[1]}, example=torch.randn(20, 16))
    names = [name for name, parameter in model[1].named_parameters() if parameter.requires_grad]
    assert names == [trainable]
    assert (model[1].weight.dtype, model[1].bias.dtype) == (torch.float32, torch.float64)
    assert model.training


def test_convolutions_of_one_pixel_are_folded() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 5, 1)
    ).eval()
    batches = [{"input": torch.randn(40, 3, 8, 8), "z": torch.arange(40) % 2} for _ in range(2)]
    options: dict[str, Any] = {"labels": "z", "feature_dim": 1}
    erasers = snn.collect(model, batches, "1", **options).erasers(sf.leace, erase="z")
    call = {"input": batches[0]["input"]}
    expected = outputs(model, call, erasers)
    assert not torch.allclose(outputs(model, call), expected, atol=1e-3)  # control
    snn.fold(model, erasers, {"1": "2"}, example=call)
    assert torch.allclose(outputs(model, call), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_read_one_token_of_a_site_are_folded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    model = module(lambda self, x: self.head(self.norm(x)[:, 0]), norm=norm, head=head).to(dtype)
    x = torch.randn(30, 5, 16).to(dtype)
    folded = snn.fold(model, {"norm": projection(rank=6)}, {"norm": "head"}, example=x)
    assert folded.layers == {"norm": ("head",)}
