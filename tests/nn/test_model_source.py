"""nn.from_model: activations as a source are those of collect, and the model stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import hooks_in, inputs, labelled, rows_with, state_of, tiny
from splince_fast import nn as snn

SITE = "model.layers.1"


def test_moments_of_the_source_are_those_of_collect() -> None:
    model, batches = tiny("llama"), [labelled("llama", 40, seed=i) for i in range(3)]
    for batch in batches:  # labels per token, with missing ones
        batch["y"] = torch.where(batch["input_ids"] > 40, -100, batch["input_ids"] % 3)
    options: dict[str, Any] = {"labels": ["z", "y"], "tokens": "body"}
    expected = snn.collect(model, batches, SITE, **options)[SITE]
    found = sf.Moments.from_blocks(snn.from_model(model, batches, SITE, **options), by="z")
    assert found.n_rows == expected.n_rows == sum(m.n_rows for m in found.by_class.values())
    for f in (lambda m: m.covariance(), lambda m: m.cross_covariance("y")):  # of float32 rows
        assert np.allclose(f(found), f(expected), atol=1e-6 * np.abs(f(expected)).max())


def test_an_eraser_of_means_erases_the_means() -> None:
    """The mean of P x + c over tokens is P mean + c, so erased tokens have erased means."""
    model, batches = tiny("llama"), [labelled("llama", 60, seed=i) for i in range(3)]
    source = snn.from_model(model, batches, SITE, labels="z")
    rows, labels, _ = next(iter(source))
    mask = batches[0]["attention_mask"]
    body = (mask.cumsum(1) * mask > 1).double()[..., None]  # without the first token
    expected = (state_of(model, SITE, inputs("llama", 60)) * body).sum(1) / body.sum(1)
    assert np.allclose(rows, expected, rtol=1e-6, atol=1e-7)
    assert np.array_equal(labels["z"], batches[0]["z"])
    before = sf.Moments.from_blocks(source)
    with snn.install(model, {SITE: sf.leace(before, erase="z")}):  # the tokens of "body"
        after = sf.Moments.from_blocks(source)
    assert np.ptp(after.cross_covariance("z")) < 1e-5 * np.ptp(before.cross_covariance("z"))


def test_a_stopped_pass_leaves_the_model_and_resumes_without_running_it(tmp_path: Any) -> None:
    # The second layer changes the rows of the first in place.
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(inplace=True)).train()
    batches = [rows_with(torch.randn(20, 5)) for _ in range(5)]
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    path, broken = tmp_path / "run.moments", [*batches[:3], rows_with(torch.ones(20, 4))]
    source = snn.from_model(model, broken, "0", labels="z")
    assert next(iter(source)).X.shape == (20, 8)
    with pytest.raises(RuntimeError, match="shapes"):
        sf.Moments.from_blocks(source, checkpoint=path)
    assert (model.training, torch.is_grad_enabled(), hooks_in(model)) == (True, True, 1)
    source = snn.from_model(model, batches, "0", labels="z")
    resumed = sf.Moments.from_blocks(source, checkpoint=path)
    assert len(calls) == 1 + 4 + 2
    whole = sf.Moments().update(model[0](torch.cat([batch["input"] for batch in batches])))
    assert np.allclose(resumed.covariance(), whole.covariance(), rtol=1e-5, atol=1e-6)


def test_invalid_arguments_and_batches_are_errors() -> None:
    model, batch = tiny("sequential"), {"input": torch.ones(3, 6, 5), "z": torch.zeros(3, 6)}
    with pytest.raises(sf.SplinceError, match="such as a list"):  # one batch
        snn.from_model(model, batch, "0")
    for match, at, options in (
        ("pass one site", "*", {}), ("one row per sequence", "0", {"labels": "z"}),
        ("does not run '0'", "0", {"forward": lambda model, batch: None}),
    ):  # fmt: skip
        with pytest.raises(sf.SplinceError, match=match):
            list(snn.from_model(model, [batch], at, **options))
