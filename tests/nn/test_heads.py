"""nn.collection, nn.installed: erasers of attention heads are one block-diagonal map."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import attended_rows, cache_name, hooks_in, tiny  # noqa: E402
from nn.test_collect import text_batches  # noqa: E402
from splince_fast import nn as snn  # noqa: E402

O_PROJ = "model.layers.*.self_attn.o_proj"
V_PROJ = "model.layers.*.self_attn.v_proj"


def labels_of(batches: list[dict[str, Any]]) -> np.ndarray:
    """The label of each attended token."""
    counts = [batch["attention_mask"].sum(1) for batch in batches]
    return np.concatenate(
        [np.repeat(b["gender"].numpy(), n.numpy()) for b, n in zip(batches, counts, strict=True)]
    )


@pytest.mark.parametrize(
    ("at", "side", "heads"),
    [
        ("model.layers.1.self_attn.o_proj", "input", 4),
        ("model.layers.1.self_attn.v_proj", "output", 2),
        ("model.layers.1.self_attn.q_norm", "output", 4),  # (batch, token, heads, width)
        ("model.layers.1.self_attn.k_norm", "output", 2),
    ],
)
def test_moments_of_each_head(at: str, side: str, heads: int) -> None:
    model, batches = tiny("qwen3"), text_batches()
    found = snn.collect(
        model, batches, at, labels="gender", tokens="all", side=side, heads=heads
    )  # fmt: skip
    assert list(found) == [f"{at}[{i}]" for i in range(heads)]
    assert {site.width for site in found.sites} == {4}
    rows, z = attended_rows(model, batches, at, side), labels_of(batches)
    for i, moments in enumerate(found.values()):
        own = sf.Moments().update(rows[:, 4 * i : 4 * i + 4], {"z": z})
        np.testing.assert_allclose(moments.covariance(), own.covariance(), rtol=1e-5, atol=1e-8)
        assert moments.n_rows == len(rows)


@pytest.mark.parametrize(
    ("at", "side", "heads"),
    [
        (O_PROJ, "input", 4),
        (V_PROJ, "output", 2),
        ("model.layers.*.self_attn.q_norm", "output", 4),
    ],
)
def test_every_head_is_erased(at: str, side: str, heads: int, tmp_path: Path) -> None:
    model, batches = tiny("qwen3"), text_batches()
    erasers = snn.fit_layers(
        model, batches, at, sf.leace, erase="gender", tokens="all", side=side, heads=heads
    )
    assert len(erasers) == 2
    cache = cache_name(model)
    erasers.save(tmp_path / "heads.safetensors")
    loaded = snn.Erasers.load(tmp_path / "heads.safetensors")
    assert loaded.placement.heads == heads
    z = labels_of(batches) - labels_of(batches).mean()
    for name, eraser in erasers.items():
        matrix, blocks = eraser.matrix(), np.kron(np.eye(heads), np.ones((4, 4)))
        assert not matrix[blocks == 0].any()
        assert eraser.rank == heads
        before = attended_rows(model, batches, name, side)
        with snn.install(model, loaded):
            after = attended_rows(model, batches, name, side)
            # A prediction of the next token is the same with a cache as without.
            ids = batches[0]["input_ids"][:1, -2:]
            with torch.no_grad():
                full = model(input_ids=ids).logits
                first = model(input_ids=ids[:, :1], use_cache=True)
                second = model(input_ids=ids[:, 1:], **{cache: first[cache]})
            np.testing.assert_allclose(second.logits[:, -1], full[:, -1], atol=1e-5)
        for i in range(heads):
            own = slice(4 * i, 4 * i + 4)
            size = np.abs(z @ before[:, own]).max()
            assert np.abs(z @ after[:, own]).max() < 1e-5 * size
            assert np.abs(z @ before[:, own]).max() > 0.1  # control
    assert hooks_in(model) == 0


@pytest.mark.parametrize(
    ("name", "at", "heads", "bias"),
    [("qwen3", O_PROJ, 4, "drop"), ("gpt2", "transformer.h.*.attn.c_proj", 2, "keep")],
    ids=["grouped keys, no biases", "biases"],
)
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
    with torch.no_grad():
        plain = model(**example).logits
        with snn.install(model, erasers):
            expected = model(**example).logits
    folded = snn.fold(model, erasers, example=example)
    assert folded.layers == {name: (name,) for name in erasers}
    assert folded.difference < 1e-5
    model.save_pretrained(tmp_path)
    shown = example["attention_mask"] != 0
    with torch.no_grad():
        for one in (model, type(model).from_pretrained(tmp_path).eval()):
            found = one(**example).logits
            np.testing.assert_allclose(found[shown], expected[shown], atol=1e-5)
        assert (found - plain)[shown].abs().max() > 1e-3  # control


def test_one_pass_and_effect_take_heads() -> None:
    model, batches = tiny("qwen3"), text_batches()
    at, heads = "model.layers.1.self_attn.o_proj", 4
    found = snn.collect(model, batches, at, labels="gender", side="input", heads=heads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one site, whatever its heads
        erasers = found.erasers(sf.leace, erase="gender")
    assert list(erasers) == [at]
    shown = snn.effect(model, erasers, text_batches(seed=1), labels="gender")
    assert [record["site"] for record in shown if record["metric"] == "accuracy"] == [at]


def test_invalid_numbers_of_heads_are_errors() -> None:
    model, batches = tiny("qwen3"), text_batches()

    at = "model.layers.0.self_attn.{}"
    for site, options, error, match in (
        *(("o_proj", {"heads": wrong}, sf.exceptions.InputError, "num_attention_heads")
          for wrong in (0, True, 2.0, "n_heads")),
        ("o_proj", {"heads": 5, "side": "input"}, snn.SiteError, "does not split into 5 heads"),
        ("k_norm", {"heads": 4}, snn.SiteError, "num_key_value_heads"),
        ("o_proj", {"heads": 4, "feature_dim": 1}, sf.exceptions.InputError, "feature_dim"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            snn.collect(model, batches, at.format(site), labels="gender", **options)
    erasers = snn.fit_layers(
        model, batches, "model.layers.0.mlp", sf.leace, erase="gender", tokens="all", side="input"
    )
    with pytest.raises(snn.FoldError, match="is not linear"):
        snn.fold(model, erasers, example={"input_ids": batches[0]["input_ids"]})
    assert hooks_in(model) == 0
