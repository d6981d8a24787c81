"""nn.from_model: activations as a source are those of collect, and the model stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import hooks_in, inputs, labelled, rows_with, state_of, tiny
from splince_fast import nn as snn

SITE = "model.layers.1"


@pytest.mark.parametrize("tokens", ["mean", "body", "last"])
def test_rows_and_labels_are_those_of_the_calls(tokens: str) -> None:
    model, batches = tiny("llama"), [labelled("llama", n, seed=n) for n in (8, 5)]
    source = snn.from_model(model, batches, SITE, labels="z", tokens=tokens)
    for block, batch in zip(source, batches, strict=True):
        x, mask = (
            state_of(model, SITE, inputs("llama", len(batch["z"]), seed=len(batch["z"]))),
            batch["attention_mask"],
        )
        rank = mask.cumsum(1) * mask
        mask = rank == rank.max(1, keepdim=True)[0] if tokens == "last" else rank > 1
        rows = [own[chosen].double() for own, chosen in zip(x, mask, strict=True)]
        rows = [own.mean(0, keepdim=True) for own in rows] if tokens == "mean" else rows
        assert np.allclose(block.X, torch.cat(rows), rtol=1e-6, atol=1e-7)
        assert np.array_equal(
            block.labels["z"], np.repeat(batch["z"].numpy(), list(map(len, rows)))
        )


def test_moments_of_the_source_are_those_of_collect() -> None:
    model, batches = tiny("llama"), [labelled("llama", 40, seed=i) for i in range(3)]
    for batch in batches:  # labels per token, with missing ones
        batch["y"] = torch.where(batch["input_ids"] > 40, -100, batch["input_ids"] % 3)
    options: dict[str, Any] = {"labels": ["z", "y"], "tokens": "body"}
    expected = snn.collect(model, batches, SITE, **options)[SITE]
    source = snn.from_model(model, batches, SITE, **options)
    found = sf.Moments.from_blocks(source, by="z")
    assert found.n_rows == expected.n_rows == sum(m.n_rows for m in found.by_class.values())
    for f in (lambda m: m.covariance(), lambda m: m.cross_covariance("y")):
        # Rows are float32.
        assert np.allclose(f(found), f(expected), atol=1e-6 * np.abs(f(expected)).max())


def test_an_eraser_of_means_erases_the_means() -> None:
    """The mean of P x + c over tokens is P mean + c, so erased tokens have erased means."""
    model, batches = tiny("llama"), [labelled("llama", 60, seed=i) for i in range(3)]
    source = snn.from_model(model, batches, SITE, labels="z")
    before = sf.Moments.from_blocks(source)
    with snn.install(model, {SITE: sf.leace(before, erase="z")}):  # the tokens of "body"
        after = sf.Moments.from_blocks(source)
    left = np.abs(after.cross_covariance("z")) / np.abs(before.cross_covariance("z")).max()
    assert left.max() < 1e-5
    again = sf.Moments.from_blocks(source)  # control: without the eraser
    assert np.array_equal(again.cross_covariance("z"), before.cross_covariance("z"))


def test_the_model_is_left_as_found_also_when_a_pass_stops() -> None:
    model = tiny("llama").train()
    model.model.norm.eval()
    modes = [m.training for m in model.modules()]
    source = snn.from_model(model, [inputs("llama"), inputs("llama"), {"input_ids": "a"}], SITE)
    for read in (lambda: next(iter(source)), lambda: sf.Moments.from_blocks(source)):
        try:
            block = read()
            assert block.labels is None
        except AttributeError:
            pass
        assert torch.is_grad_enabled()
        assert [m.training for m in model.modules()] == modes
        assert hooks_in(model) == 0


def test_a_resumed_run_skips_batches_without_running_the_model(tmp_path: Path) -> None:
    # The second layer changes the rows in place.
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(inplace=True))
    batches = [rows_with(torch.randn(20, 5)) for _ in range(5)]
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    whole = sf.Moments().update(model[0](torch.cat([b["input"] for b in batches])))
    path, broken = tmp_path / "run.moments", [*batches[:3], {}]
    with pytest.raises(sf.exceptions.LabelError):
        sf.Moments.from_blocks(snn.from_model(model, broken, "0", labels="z"), checkpoint=path)
    source = snn.from_model(model, batches, "0", labels="z")
    resumed = sf.Moments.from_blocks(source, checkpoint=path)
    assert len(calls) == 5
    assert np.allclose(resumed.covariance(), whole.covariance(), rtol=1e-5, atol=1e-6)
    loader = torch.utils.data.DataLoader(batches, batch_size=None, shuffle=True)
    for match, first, other in (
        ("5 blocks", 6, source),
        ("shuffles", 1, snn.from_model(model, loader, "0")),
    ):
        with pytest.raises(sf.exceptions.InputError, match=match):
            list(other.iter_from(first))


def test_invalid_arguments_and_batches_are_errors() -> None:
    model, x = tiny("sequential"), torch.randn(6, 5)
    for match, at, options in (
        ("pass one site", "*", {}),
        ("tokens is 'median'", "0", {"tokens": "median"}),
        ("per token", "0", {"labels": "z"}),
        ("does not run '0'", "0", {"forward": lambda model, batch: None}),
    ):
        batch = {"input": x.expand(3, 6, 5), "z": torch.zeros(3, 6)}
        with pytest.raises(sf.SplinceError, match=match):
            list(snn.from_model(model, [batch], at, **options))
    once = snn.from_model(model, iter([(x, x[:, 0] > 0)]), "0", labels="z")
    assert [len(block.labels["z"]) for block in once] == [6]
    with pytest.raises(sf.exceptions.InputError, match="read only once"):
        list(once)
