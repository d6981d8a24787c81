"""nn.installed: compiled and exported models compute the numbers of eager code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nn.conftest import cache_name, inputs, module, outputs, projection, tiny
from splince_fast import nn as snn


def wrapped(model: Any, **options: Any) -> Any:
    return torch.compile(model, **options)


def in_place(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


@pytest.mark.parametrize(
    ("compiled_by", "backend", "fullgraph", "is_called"),
    [(wrapped, "eager", False, True), (in_place, "eager", True, False),
     pytest.param(in_place, "aot_eager", False, True, marks=pytest.mark.slow),
     pytest.param(wrapped, "aot_eager", True, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_installations_in_a_compiled_model_take_effect_at_the_next_call(
    compiled_by: Any, backend: str, fullgraph: bool, is_called: bool
) -> None:
    """Before and after the first call, again and again, and one beside another."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    # Torch compiles no frame of its own containers in place.
    model, x = module(
        lambda self, x: self.second(torch.tanh(self.first(x))),
        first=torch.nn.Linear(5, 16), second=torch.nn.Linear(16, 16),
    ), torch.randn(3, 5)  # fmt: skip
    eager = copy.deepcopy(model)
    compiled = compiled_by(model, backend=backend, fullgraph=fullgraph)
    first, second = {"first": projection(rank=2)}, {"second": projection(seed=1)}

    def holds(result: torch.Tensor) -> bool:
        return torch.allclose(compiled(x), result, atol=1e-6)

    with torch.no_grad():
        plain, one = eager(x), outputs(eager, {"x": x}, first)
        with snn.install(eager, first):
            both = outputs(eager, {"x": x}, second)
        distances = [(a - b).abs().max() for a, b in ((plain, one), (one, both), (plain, both))]
        assert min(distances) > 1e-2  # control
        assert not is_called or holds(plain)
        installed = snn.install(model, first)
        assert holds(one)
        with snn.install(compiled, second):
            assert holds(both)
        assert holds(one)
        frames = counters["frames"]["total"]
        with installed.disabled():
            assert holds(plain)
        assert holds(one)
        assert counters["frames"]["total"] == frames  # nothing was compiled again
        installed.check()
        installed.remove()
        assert holds(plain)
        with installed:
            assert holds(one)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_static_caches_select_tokens_in_compiled_code() -> None:
    transformers = pytest.importorskip("transformers")
    torch.compiler.reset()
    model = tiny("llama")
    ids = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1))

    def decode(run: Any) -> torch.Tensor:
        """Logits of a prefill of five tokens and of two steps."""
        cache = transformers.StaticCache(config=model.config, max_cache_len=12)
        found = []
        for start, stop in ((0, 5), (5, 6), (6, 7)):
            step = run(
                input_ids=ids[:, start:stop], attention_mask=torch.ones(2, stop).long(),
                use_cache=True, cache_position=torch.arange(start, stop),
                **{cache_name(model): cache},
            )  # fmt: skip
            found.append(step.logits[:, -1])
        return torch.stack(found)

    with torch.no_grad():
        with snn.install(model, {"model.layers.*": projection(rank=2)}, tokens="body"):
            eager, found = decode(model), decode(torch.compile(model, backend="eager"))
        plain = decode(model)
    assert torch.allclose(found, eager, atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tokens", "masked"),
    [("body", True), ("first", False), pytest.param("last", True, marks=pytest.mark.slow),
     pytest.param("all", True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_an_export_with_a_variable_batch_erases(tokens: str, masked: bool) -> None:
    model, keys = tiny("llama"), ["input_ids", *(["attention_mask"] if masked else [])]
    small, large = ({k: inputs("llama", n=n)[k] for k in keys} for n in (6, 9))
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {**{k: {0: batch} for k in keys}, "use_cache": None}
    # By products of vectors, and of matrices.
    erasers = {"model.layers.0": projection(rank=2), "model.layers.1": projection(rank=6, seed=1)}
    with snn.install(model, erasers, tokens=tokens), torch.no_grad():
        exported = torch.export.export(
            model, (), {**small, "use_cache": False}, dynamic_shapes=shapes, strict=False
        ).module()
        expected = outputs(model, large)
    assert torch.allclose(exported(**large, use_cache=False).logits, expected, atol=1e-6)
    assert not torch.allclose(outputs(model, large), expected, atol=1e-3)  # control
