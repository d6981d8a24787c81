"""nn.collection, nn.installed: erasers of attention heads are one block-diagonal map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splince_fast as sf
from nn.conftest import assert_decoded_alike, attended_rows, hooks_in, outputs, tiny
from nn.test_collect import text_batches
from splince_fast import nn as snn
from splince_fast.exceptions import InputError

ATTENTION = "model.layers.{}.self_attn."
# Sites of qwen3, the side, and the number of heads; norms have (batch, token, heads, width).
SITES = [("o_proj", "input", 4), ("v_proj", "output", 2),
         ("q_norm", "output", 4), ("k_norm", "output", 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "side", "heads"), SITES)
def test_every_head_has_its_own_moments_and_is_erased(name: str, side: str, heads: int) -> None:
    model, batches, at = tiny("qwen3"), text_batches(), ATTENTION.format("*") + name
    options: dict[str, Any] = {"tokens": "all", "side": side, "heads": heads}
    z = np.concatenate(
        [np.repeat(b["gender"].numpy(), b["attention_mask"].sum(1).numpy()) for b in batches]
    )
    found = snn.collect(model, batches, at, labels="gender", **options)
    erasers = snn.fit_layers(model, batches, at, sf.leace, erase="gender", **options)
    assert list(found) == [f"{site}[{i}]" for site in erasers for i in range(heads)]
    assert {site.width for site in found.sites} == {4}
    for site, eraser in erasers.items():
        matrix, blocks = eraser.matrix(), np.kron(np.eye(heads), np.ones((4, 4)))
        assert not matrix[blocks == 0].any()
        assert eraser.rank == heads
        before = attended_rows(model, batches, site, side)
        with snn.install(model, erasers):
            after = attended_rows(model, batches, site, side)
            assert_decoded_alike(model, {"input_ids": batches[0]["input_ids"][:3, -2:]})
        for i in range(heads):
            own, moments = slice(4 * i, 4 * i + 4), found[f"{site}[{i}]"]
            expected = sf.Moments().update(before[:, own], {"z": z}).covariance()
            np.testing.assert_allclose(moments.covariance(), expected, rtol=1e-5, atol=1e-8)
            assert moments.n_rows == len(before)
            size = np.abs((z - z.mean()) @ before[:, own]).max()
            assert np.abs((z - z.mean()) @ after[:, own]).max() < 1e-5 * size
            assert size > 0.1  # control
    assert hooks_in(model) == 0


@pytest.mark.parametrize(
    ("name", "at", "heads", "bias"),
    [("qwen3", ATTENTION.format("*") + "o_proj", 4, "drop"),
     ("gpt2", "transformer.h.*.attn.c_proj", 2, "keep")],
    ids=["grouped keys, no biases", "biases"],
)  # fmt: skip
def test_heads_fold_into_the_layer_that_takes_them(
    name: str, at: str, heads: int, bias: str, tmp_path: Path
) -> None:
    """Also from the model's own files."""
    model, batches = tiny(name), text_batches()
    erasers = snn.fit_layers(
        model, batches, at, sf.leace, erase="gender", tokens="all", side="input", heads=heads,
        bias=bias,
    )  # fmt: skip
    example = {k: batches[0][k] for k in ("input_ids", "attention_mask")}
    plain, expected = outputs(model, example), outputs(model, example, erasers)
    folded = snn.fold(model, erasers, example=example)
    assert folded.layers == {name: (name,) for name in erasers}
    assert folded.difference < 1e-5
    model.save_pretrained(tmp_path)
    shown = example["attention_mask"] != 0
    for one in (model, type(model).from_pretrained(tmp_path).eval()):
        found = outputs(one, example)
        np.testing.assert_allclose(found[shown], expected[shown], atol=1e-5)
    assert (found - plain)[shown].abs().max() > 1e-3  # control


def test_one_pass_and_effect_take_heads() -> None:
    model, batches = tiny("qwen3"), text_batches()
    at = ATTENTION.format(1) + "o_proj"
    found = snn.collect(model, batches, at, labels="gender", side="input", heads=4)
    erasers = found.erasers(sf.leace, erase="gender")  # one site, whatever its heads: no warning
    assert list(erasers) == [at]
    shown = snn.effect(model, erasers, text_batches(seed=1), labels="gender")
    assert [record["site"] for record in shown if record["metric"] == "accuracy"] == [at]


def test_invalid_numbers_of_heads_are_errors() -> None:
    model, batches = tiny("qwen3"), text_batches()
    for site, options, error, match in (
        *(("o_proj", {"heads": wrong}, InputError, "num_attention_heads")
          for wrong in (0, True, 2.0, "n_heads")),
        ("o_proj", {"heads": 5, "side": "input"}, snn.SiteError, "does not split into 5 heads"),
        ("k_norm", {"heads": 4}, snn.SiteError, "num_key_value_heads"),
        ("o_proj", {"heads": 4, "feature_dim": 1}, InputError, "feature_dim"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            snn.collect(model, batches, ATTENTION.format(0) + site, labels="gender", **options)
    assert hooks_in(model) == 0
