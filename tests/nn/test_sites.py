"""nn.sites: names of modules behind wrappers, and tensors in outputs of any type."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nn.conftest import hooks_in, inputs, is_erased, model_of, module, projection, refused, tiny
from splince_fast import nn as snn
from splince_fast.nn import sites

# --- names ----------------------------------------------------------------------------------------


def pre_norm() -> Any:
    """A block whose submodule is called as that of a wrapper, with a norm inside and outside."""
    layers = OrderedDict(norm=torch.nn.LayerNorm(16), linear=torch.nn.Linear(16, 16))
    inner, norm = torch.nn.Sequential(layers), torch.nn.BatchNorm1d(16)
    return module(lambda self, x: self.module(self.norm(x)), module=inner, norm=norm)


def wrapper(inner: Any) -> Any:
    """A wrapper of another library."""
    return module(lambda self, x: self.module(x), module=inner)


PRE_NORM = {"module": "Sequential", "module.norm": "LayerNorm", "module.linear": "Linear",
            "norm": "BatchNorm1d"}  # fmt: skip


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        torch.nn.DataParallel,
        wrapper,
        lambda model: wrapper(torch.nn.DataParallel(model)),
        lambda model: torch.compile(model, backend="eager"),
    ],
    ids=["none", "parallel", "other", "two", "compiled"],
)
def test_a_submodule_called_module_keeps_its_name_behind_every_wrapper(wrap: Any) -> None:
    blocks = torch.nn.Sequential(pre_norm(), torch.nn.DataParallel(pre_norm()))
    expected = {"": type(wrap(blocks)).__name__, "0": "Model", "1": "DataParallel"}
    expected |= {f"{i}.{name}": kind for i in range(2) for name, kind in PRE_NORM.items()}
    model = wrap(blocks)
    found = {name: type(part).__name__ for name, part in sites.named_modules(model).items()}
    assert found == expected
    for name in PRE_NORM:
        part = blocks[0].get_submodule(name)
        assert sites.find(model, f"0.{name}") == sites.find(model, part) == {f"0.{name}": part}
    for name, part in model.named_modules():  # as they are printed, also in wrappers
        if isinstance(part, torch.nn.Linear | torch.nn.LayerNorm):
            assert list(sites.find(model, name).values()) == [part]
    outermost = sites.named_modules(wrap(pre_norm()))
    assert {name: type(part).__name__ for name, part in outermost.items() if name} == PRE_NORM


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for peft's calls
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_models_of_peft_have_the_names_of_the_base_model(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("llama"), config).eval()
    (printed,) = (name for name, _ in model.named_modules() if name.endswith("layers.1"))
    expected = {"model.layers.1": model.get_submodule(printed)}
    assert sites.find(model, "model.layers.1") == sites.find(model, printed) == expected
    with snn.install(model, {"model.layers.1": projection()}) as installed, torch.no_grad():
        model(**inputs("llama"))
    assert installed.counts == {"model.layers.1": 1}


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
    # Brackets hold characters, not numbers.
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12)))
    assert list(sites.find(model, "[2-4]")) == ["2", "3", "4"]
    for pattern in ("[5-10]", "[10-11]", "[z-a]"):
        with pytest.raises(snn.SiteError, match="brackets stand for one character"):
            sites.find(model, pattern)


# --- outputs --------------------------------------------------------------------------------------


Named = namedtuple("Named", "a b")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass that derives a field."""

    a: Any
    b: Any
    n_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_rows", len(self.a))


def of_transformers(x: torch.Tensor) -> Any:
    outputs = pytest.importorskip("transformers").modeling_outputs
    return outputs.BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=x.mean(1))


# An output that holds x, the argument `output`, and the key of the tensor to erase.
FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], Any, Any]] = {
    "tensor": (lambda x: x + 0, None, None),
    "view": (lambda x: x[:], None, None),
    "identity": (lambda x: x, None, None),
    "tuple": (lambda x: (x, 3), None, 0),
    "list": (lambda x: [x, None], None, 0),
    "element": (lambda x: (x.long(), x), 1, 1),
    "named tuple": (lambda x: Named(x, "b"), None, 0),
    "field of a named tuple": (lambda x: Named(x, x), "b", 1),
    "frozen dataclass": (lambda x: Frozen(x, x), "b", "b"),
    "torch": (lambda x: torch.return_types.aminmax((x, x)), "max", 1),
    "torch by index": (lambda x: torch.return_types.aminmax((x, x)), 1, 1),
    "mapping": (lambda x: {"size": 3, "states": x}, None, "states"),
    "only one of the width": (
        lambda x: {"ids": x[..., 0].long(), "states": x, "logits": x[..., :3]}, None, "states"
    ),
    # As sentence-transformers returns them.
    "one of several": (lambda x: {"tokens": x, "sentence": x + 1}, "sentence", "sentence"),
    "transformers": (of_transformers, None, "last_hidden_state"),
}  # fmt: skip


def elements(value: Any) -> dict[Any, Any]:
    """The parts of an output by index or name."""
    if isinstance(value, torch.Tensor):
        return {None: value}
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, dict) else vars(value)


@pytest.mark.parametrize("form", FORMS)
def test_one_tensor_of_an_output_is_replaced_in_a_copy_of_its_type(form: str) -> None:
    make, output, key = FORMS[form]
    seen: list[Any] = []
    model = model_of(lambda x: seen.append(make(x)) or seen[-1])
    x, p = torch.randn(4, 7, 16), projection()
    kept, plain = x.clone(), elements(make(x))
    with snn.install(model, p, at="0", output=output):
        found = model(x)
    assert type(found) is type(seen[0])
    parts = elements(found)
    assert is_erased(parts.pop(key), plain.pop(key), p)
    assert all(p is plain[k] or torch.equal(p, plain[k]) for k, p in parts.items())
    # The output of the module itself and its argument are as before.
    assert torch.equal(x, kept)
    assert torch.equal(elements(seen[0])[key], elements(make(x))[key])
    if form == "transformers":
        assert found.last_hidden_state is found["last_hidden_state"]


SAME_WIDTH = "same width, 'tokens', 'sentence'.*output="


@pytest.mark.parametrize(
    ("form", "match", "options"),
    [
        (lambda x: None, "'0' has no floating tensor", {}),
        (lambda x: x.long(), "'0' has no floating tensor", {}),
        (lambda x: (x.long(), x), "output= can be 1", {}),
        (lambda x: {"tokens": x, "sentence": x.mean(1)}, SAME_WIDTH, {}),
        # Along another axis other fields are alike.
        (lambda x: {"a": x, "b": x[..., :3], "c": x[:, :2]}, "width, 'a', 'b'", {"feature_dim": 1}),
        (lambda x: x, r"axis 1 must have width 16.*axis 2 has this width", {"feature_dim": 1}),
    ],
)  # fmt: skip
def test_outputs_without_one_tensor_of_the_width_are_named(
    form: Any, match: str, options: Any
) -> None:
    model, x = model_of(form), torch.randn(4, 7, 16)
    refused(snn.SiteError, match, model, {"0": projection()}, x, **options)
    assert hooks_in(model) == 0


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
