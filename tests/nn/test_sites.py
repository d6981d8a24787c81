"""nn.sites: names of modules behind wrappers, and tensors in outputs of any type."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nn.conftest import inputs, projection, tiny  # noqa: E402
from splince_fast import nn as snn  # noqa: E402
from splince_fast.nn import sites  # noqa: E402

# --- names ----------------------------------------------------------------------------------------


class PreNorm(torch.nn.Module):
    """A block whose submodule is called as that of a wrapper, with a norm inside and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(
            OrderedDict(norm=torch.nn.LayerNorm(16), linear=torch.nn.Linear(16, 16))
        )
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(self.norm(x))


class Wrapper(torch.nn.Module):
    """A wrapper of another library."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


PRE_NORM = {"module": "Sequential", "module.norm": "LayerNorm", "module.linear": "Linear",
            "norm": "BatchNorm1d"}  # fmt: skip


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        torch.nn.DataParallel,
        Wrapper,
        lambda model: Wrapper(torch.nn.DataParallel(model)),
        lambda model: torch.compile(model, backend="eager"),
    ],
    ids=["none", "parallel", "other", "two", "compiled"],
)
def test_a_submodule_called_module_keeps_its_name_behind_every_wrapper(wrap: Any) -> None:
    blocks = torch.nn.Sequential(PreNorm(), torch.nn.DataParallel(PreNorm()))
    expected = {"": type(wrap(blocks)).__name__, "0": "PreNorm", "1": "DataParallel"}
    expected |= {f"{i}.{name}": kind for i in range(2) for name, kind in PRE_NORM.items()}
    model = wrap(blocks)
    found = {name: type(module).__name__ for name, module in sites.named_modules(model).items()}
    assert found == expected
    for name in PRE_NORM:
        module = blocks[0].get_submodule(name)
        assert sites.find(model, f"0.{name}") == sites.find(model, module) == {f"0.{name}": module}
    outermost = sites.named_modules(wrap(PreNorm()))
    assert {name: type(module).__name__ for name, module in outermost.items() if name} == PRE_NORM


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for peft's calls
@pytest.mark.parametrize("kind", ["LoraConfig", "PromptTuningConfig", "PrefixTuningConfig"])
def test_models_of_peft_have_the_names_of_the_base_model(kind: str) -> None:
    peft = pytest.importorskip("peft")
    options = {"LoraConfig": {"target_modules": ["q_proj"], "r": 2}}
    config = getattr(peft, kind)(**options.get(kind, {"num_virtual_tokens": 3}),
                                 task_type="CAUSAL_LM")  # fmt: skip
    model = peft.get_peft_model(tiny("llama"), config).eval()
    (printed,) = (name for name, _ in model.named_modules() if name.endswith("layers.1"))
    expected = {"model.layers.1": model.get_submodule(printed)}
    assert sites.find(model, "model.layers.1") == sites.find(model, printed) == expected
    with snn.install(model, {"model.layers.1": projection()}) as installed, torch.no_grad():
        model(**inputs("llama"))
    assert installed.counts == {"model.layers.1": 1}


def test_names_that_named_modules_prints_are_accepted() -> None:
    """Also of wrappers."""
    block = torch.nn.Sequential(PreNorm())
    for model in (torch.compile(block, backend="eager"), torch.nn.DataParallel(block)):
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
                assert list(sites.find(model, name).values()) == [module]


def test_patterns_select_modules_by_name() -> None:
    model = tiny("llama")
    first, last = (f"model.layers.{i}" for i in (0, 1))
    for at, names in (
        ("model.layers.*", [first, last]),
        ("model.layers.?", [first, last]),
        ("model.layers.[1-9]", [last]),
        ("model.layers.[!0]", [last]),
        ("**.mlp", [f"{first}.mlp", f"{last}.mlp"]),
        ("**mlp", [f"{first}.mlp", f"{last}.mlp"]),
        (f"{last}.input**", [f"{last}.input_layernorm"]),
        ("*.*.1.input**", [f"{last}.input_layernorm"]),
        ("**.1.*_layernorm", [f"{last}.input_layernorm", f"{last}.post_attention_layernorm"]),
        ("**.1.**.[qk]_*", [f"{last}.self_attn.q_proj", f"{last}.self_attn.k_proj"]),
        (
            f"{last}.mlp.**",
            [f"{last}.mlp.{k}" for k in ("gate_proj", "up_proj", "down_proj", "act_fn")],
        ),
        (["model.norm", model.model.layers[0]], [first, "model.norm"]),
    ):
        assert list(sites.find(model, at)) == names
    with pytest.raises(snn.SiteError, match="no module"):  # one star does not cross dots
        sites.find(model, "*mlp")
    wrapped = torch.nn.Sequential(OrderedDict(module=model))
    assert list(sites.find(wrapped, "model.norm")) == ["model.norm"]


def test_brackets_hold_characters_not_numbers() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12)))
    assert list(sites.find(model, "[2-4]")) == ["2", "3", "4"]
    for pattern in ("[5-10]", "[10-11]", "[z-a]"):
        with pytest.raises(snn.SiteError, match="brackets stand for one character"):
            sites.find(model, pattern)


# --- outputs --------------------------------------------------------------------------------------


class Named(NamedTuple):
    """A named tuple."""

    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass
class Fields:
    """A dataclass."""

    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass that derives a field."""

    a: torch.Tensor
    b: torch.Tensor
    n_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_rows", len(self.a))


def largest(a: torch.Tensor, b: torch.Tensor) -> Any:
    """A named tuple of torch, as of torch.topk."""
    return torch.return_types.aminmax((a, b))


@pytest.mark.parametrize(
    ("make", "key"),
    [(Named, "b"), (Fields, "b"), (Frozen, "b"), (largest, "max"), (largest, 1)],
    ids=["named tuple", "dataclass", "frozen dataclass", "torch", "torch by index"],
)
def test_a_field_of_an_output_is_replaced_in_a_copy(make: Callable[..., Any], key: Any) -> None:
    class Site(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            self.output = make(x, x)  # both fields hold the same tensor
            return self.output

    model, x, p = torch.nn.Sequential(Site()), torch.randn(20, 16), projection()
    with snn.install(model, p, at="0", output=key):
        found = model(x)
    assert type(found) is type(model[0].output)
    first, second = (found.a, found.b) if hasattr(found, "a") else (found.min, found.max)
    assert torch.equal(first, x)
    assert np.allclose(second, p(x.numpy()), atol=1e-5)
    original = model[0].output
    assert (original.b if hasattr(original, "b") else original.max) is x
    assert getattr(found, "n_rows", 20) == 20


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_the_remedy() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[0, 4:] = True
    batch = {"src": torch.randn(4, 6, 8), "src_key_padding_mask": padding, "z": torch.arange(4) % 2}
    options: dict[str, Any] = {"labels": "z", "tokens": "all"}
    for site in ("layers.0", "layers.1.linear1"):
        with pytest.raises(snn.SiteError, match=r"nested tensor.*use_nested_tensor to False"):
            snn.collect(encoder, [batch], site, **options)
    encoder.use_nested_tensor = False
    assert snn.collect(encoder, [batch], "layers.0", **options)["layers.0"].n_rows == 24
