"""nn.installed, nn.hooks: compiled and exported models compute the numbers of eager code."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nn.conftest import cache_name, inputs, module, projection, tiny  # noqa: E402
from splince_fast import nn as snn  # noqa: E402


def test_compiled_models_erase_as_eager_ones() -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    model = tiny("llama")
    batch = inputs("llama")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = compiled(**batch).logits
        with snn.install(compiled, {"model.layers.*": projection(rank=2)}) as installed:
            eager = model(**batch).logits
            erased = compiled(**batch).logits  # after the first compiled call
            assert torch.allclose(erased, eager, atol=1e-5)
            assert not torch.allclose(erased, plain, atol=1e-3)
            frames = counters["frames"]["total"]
            with installed.disabled():
                assert torch.allclose(compiled(**batch).logits, plain, atol=1e-6)
            assert torch.allclose(compiled(**batch).logits, erased)
            assert counters["frames"]["total"] == frames
        assert torch.allclose(compiled(**batch).logits, plain, atol=1e-6)


def wrapped(model: Any, **options: Any) -> Any:
    return torch.compile(model, **options)


def in_place(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


@pytest.mark.parametrize("compiled_by", [wrapped, in_place])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("is_called", [False, True])
def test_installations_in_a_compiled_model_take_effect_at_the_next_call(
    compiled_by: Any, backend: str, fullgraph: bool, is_called: bool
) -> None:
    """Before and after the first call, again and again, and one beside another."""
    torch.compiler.reset()
    # Torch compiles no frame of its own containers in place.
    model, x = module(
        lambda self, x: self.second(torch.tanh(self.first(x))),
        first=torch.nn.Linear(5, 16), second=torch.nn.Linear(16, 16),
    ), torch.randn(3, 5)  # fmt: skip
    eager = copy.deepcopy(model)
    compiled = compiled_by(model, backend=backend, fullgraph=fullgraph)
    first, second = {"first": projection(rank=2)}, {"second": projection(seed=1)}

    def expected(*installed: Any) -> torch.Tensor:
        handles = [snn.install(eager, erasers) for erasers in installed]
        result = eager(x)
        for handle in handles:
            handle.remove()
        return result

    with torch.no_grad():
        plain, one, both = expected(), expected(first), expected(first, second)
        distances = [(a - b).abs().max() for a, b in ((plain, one), (one, both), (plain, both))]
        assert min(distances) > 1e-2  # control
        if is_called:
            assert torch.allclose(compiled(x), plain, atol=1e-6)
        for _ in range(2):
            installed = snn.install(model, first)
            assert torch.allclose(compiled(x), one, atol=1e-6)
            with snn.install(compiled, second):
                assert torch.allclose(compiled(x), both, atol=1e-6)
            assert torch.allclose(compiled(x), one, atol=1e-6)
            installed.check()
            installed.remove()
            assert torch.allclose(compiled(x), plain, atol=1e-6)
        with installed:
            assert torch.allclose(compiled(x), one, atol=1e-6)


@pytest.mark.parametrize("tokens", ["body", "last"])
def test_static_caches_select_tokens_in_compiled_code(tokens: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.compiler.reset()
    model = tiny("llama")
    ids = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1))

    def decode(run: Any) -> torch.Tensor:
        """Logits of a prefill of five tokens and of two steps."""
        cache = transformers.StaticCache(config=model.config, max_cache_len=12)
        found = []
        for start, stop in ((0, 5), (5, 6), (6, 7)):
            mask = torch.ones(2, stop, dtype=torch.long)
            step = run(
                input_ids=ids[:, start:stop], attention_mask=mask, use_cache=True,
                cache_position=torch.arange(start, stop), **{cache_name(model): cache},
            )  # fmt: skip
            found.append(step.logits[:, -1])
        return torch.stack(found)

    with (
        snn.install(model, {"model.layers.*": projection(rank=2)}, tokens=tokens),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        eager = decode(model)
        found = decode(torch.compile(model, backend="eager"))
    with torch.no_grad():
        plain = decode(model)
    assert torch.allclose(found, eager, atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-3)
