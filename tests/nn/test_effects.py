"""nn.effects: loss, probes and change equal figures of separate passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import attended_rows, hooks_in, identity, module, raises, tiny
from splince_fast import nn as snn
from splince_fast.evaluation import leakage
from splince_fast.exceptions import LabelError


def texts(n: int, seed: int) -> list[dict[str, Any]]:
    """Batches of 20 sequences whose second token tells z and whose third one tells y."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n // 20):
        z, y = (torch.randint(0, 2, (20,), generator=g) for _ in range(2))
        ids = torch.randint(10, 50, (20, 6), generator=g)
        ids[:, 1:3] = torch.stack([3 + z, 5 + y], dim=1)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "z": z, "y": y})
    found[0]["attention_mask"][:3, 4:] = 0
    return found


SITES = ["model.layers.0.post_attention_layernorm", "model.norm"]


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, Any]:
    model = tiny("llama")
    return model, snn.fit_layers(
        model, texts(400, 0), SITES, sf.splince, erase="z", keep="y", tokens="last",
        apply_to="all",
    )  # fmt: skip


def nothing(width: int) -> sf.Projection:
    """A projection that changes no row."""
    return sf.Projection(np.zeros((width, 1)), np.ones((width, 1)), np.zeros(width))


def value(records: Any, metric: str, site: Any = None, variable: Any = None) -> Any:
    """The record of a metric."""
    wanted = {"metric": metric, "site": site, "variable": variable}
    (record,) = (r for r in records if wanted.items() <= r.items())
    return record


def own_losses(model: Any, erasers: Any, batches: list[dict[str, Any]]) -> list[float]:
    """The loss of transformers itself, which masks by labels, without and with erasers."""
    losses = []
    for given in ({}, erasers):
        found, counts = [], []
        with torch.no_grad(), snn.install(model, given):
            for batch in batches:
                call = {k: batch[k] for k in ("input_ids", "attention_mask")}
                target = call["input_ids"].masked_fill(call["attention_mask"] == 0, -100)
                found.append(float(model(**call, labels=target).loss))
                counts.append(int((target[:, 1:] != -100).sum()))
        losses.append(float(np.average(found, weights=counts)))
    return losses


def test_figures_are_those_of_separate_passes(fitted: tuple[Any, Any]) -> None:
    (model, erasers), test = fitted, texts(100, 1)
    found = snn.effect(model, erasers, test, tokens="all")
    assert hooks_in(model) == 0
    counts = torch.cat([b["attention_mask"].sum(1) for b in test]).numpy()
    groups = np.repeat(np.arange(100), counts)
    labels = {k: np.repeat(np.concatenate([b[k].numpy() for b in test]), counts) for k in "zy"}
    for site in SITES:
        before = attended_rows(model, test, site)
        with snn.install(model, erasers):
            after = attended_rows(model, test, site)
        change = ((after - before) ** 2).sum() / ((before - before.mean(0)) ** 2).sum()
        np.testing.assert_allclose(value(found, "change", site)["after"], change, rtol=1e-5)
        for name, z in labels.items():
            probe = value(found, "accuracy", site, name)
            assert probe["n"] == len(groups)
            for rows, shown in ((before, probe["before"]), (after, probe["after"])):
                expected = leakage(rows, z, probes=("linear",), groups=groups)["linear"].accuracy
                assert abs(shown - expected) < 0.01  # a few rows at the boundary, in float32
        erased = value(found, "accuracy", site, "z")
        assert erased["after"] < erased["before"]
    losses = own_losses(model, erasers, test)
    for metric, expected in (("loss", losses), ("perplexity", np.exp(losses))):
        record = value(found, metric)
        np.testing.assert_allclose([record["before"], record["after"]], expected, rtol=1e-5)


def test_texts_without_labels_give_loss_and_perplexity_alone(
    fitted: tuple[Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the erasers tell of their variables, and whatever the form of a batch."""
    model, erasers = fitted
    bare = {n: sf.Projection(p.left, p.right, p.mean) for n, p in erasers.items()}
    batches = [{k: v for k, v in batch.items() if k not in "zy"} for batch in texts(60, 1)]
    pairs = [(b["input_ids"], b["attention_mask"]) for b in batches]
    losses = own_losses(model, erasers, batches)
    for given, data in ((erasers, batches), (bare, batches), (bare, texts(60, 1))):
        found = snn.effect(model, given, data, tokens="all")
        assert [r["metric"] for r in found] == ["loss", "perplexity"]
        before, after = (found[0][k] for k in ("before", "after"))
        np.testing.assert_allclose([before, after], losses, rtol=1e-5)
        loss, perplexity = capsys.readouterr().out.splitlines()
        assert loss == f"loss per token {before:.4g}, with erasers {after:.4g}"
        assert perplexity.startswith("perplexity per token")
    with pytest.raises(sf.exceptions.InputError, match=r"nothing can be measured.*pass labels="):
        snn.effect(model, erasers, pairs, tokens="all")  # no input_ids
    snn.effect(model, erasers, batches, progress=False)
    assert not capsys.readouterr().out
    # Control: labels that are there are probed, after the loss is printed.
    found = snn.effect(model, bare, texts(60, 1), labels="y", tokens="all")
    assert {r["variable"] for r in found} == {None, "y"}
    capsys.readouterr()
    monkeypatch.setattr("splince_fast.evaluation.leakage", None)
    with pytest.raises(TypeError, match="not callable"):
        snn.effect(*fitted, texts(60, 1))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_sample_has_the_same_rows_everywhere(fitted: tuple[Any, Any]) -> None:
    model, erasers = fitted
    few = snn.effect(model, erasers, texts(200, 1), max_rows=60)
    assert {r["n"] for r in few if r["site"]} == {60}
    assert few == snn.effect(model, erasers, texts(200, 1), max_rows=60)
    assert few != snn.effect(model, erasers, texts(200, 1), max_rows=60, random_state=1)
    unchanged = {name: nothing(16) for name in SITES}
    same = snn.effect(model, unchanged, texts(200, 1), labels="z", max_rows=60)
    for record in same:  # control: rows that are compared are the same ones
        assert record["after"] == (0 if record["metric"] == "change" else record["before"])


def test_calls_of_a_site_in_one_batch_have_their_own_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 of 4800 rows, of 400 different ones: 158 different ones are expected."""
    model = torch.nn.Sequential(*[torch.nn.Identity()] * 12)
    x = torch.arange(800.0).reshape(400, 2)
    batch = {"input": x, "z": x[:, 0].double(), "row": torch.arange(400)}
    rows: list[Any] = []

    def look(values: Any, z: Any, **options: Any) -> Any:
        rows.append(z)
        return leakage(values, z, **options)

    monkeypatch.setattr("splince_fast.evaluation.leakage", look)
    snn.effect(model, {"0": nothing(2)}, [batch], labels="z", max_rows=200)
    assert len(rows[0]) == 200
    assert len(np.unique(rows[0])) > 120


def test_a_site_that_runs_on_other_rows_with_erasers_is_an_error() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x) if float(x[:, 0].max()) > 0.5 else x

    def halting(model: Any, batch: Any) -> None:
        """Run a site up to three times, as a generation that ends early."""
        for _ in range(3):
            if float(model.a(batch["x"])[:, 0].max()) < 0.5:
                return

    routed = module(forward, a=torch.nn.Identity(), b=torch.nn.Identity())
    zero = {"a": sf.Projection(np.eye(2), np.eye(2), np.zeros(2))}
    batch = {"x": torch.ones(20, 2), "z": torch.arange(20) % 2}
    for options in ({"at": ["a", "b"]}, {"forward": halting}):
        with pytest.raises(snn.SiteError, match="runs on other rows"):
            snn.effect(routed, zero, [batch], labels="z", **options)


def test_labels_of_tokens_and_missing_labels_are_probed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    x = torch.randn(60, 5, 3, generator=torch.Generator().manual_seed(0))
    kind = (x[..., 0] > 0).long()
    kind[:, 4] = -100
    batch = {"input": x, "z": x[..., 1].double(), "kind": kind, "one": ["a"] * 60}
    erasers = snn.fit_layers(model, [batch], "0", sf.leace, erase="z")
    found = snn.effect(model, erasers, [batch], labels=["z", "kind", "one"])
    quantity, classes = value(found, "R2", "0", "z"), value(found, "accuracy", "0", "kind")
    assert quantity["before"] > 0.9 > 0.2 > quantity["after"]
    assert (quantity["n"], classes["n"]) == (300, 240)
    assert min(classes["before"], classes["after"]) > 0.9
    constant = value(found, "accuracy", "0", "one")
    assert np.isnan(constant["before"])
    assert "1 class" in constant["reason"]


def test_groups_stay_in_one_fold() -> None:
    """A probe of a label that the noun determines learns the nouns."""
    rng = np.random.default_rng(0)
    noun, z = np.arange(400) % 40, rng.integers(0, 2, 40)
    x = torch.from_numpy(np.eye(40)[noun] + 0.1 * rng.normal(size=(400, 40)))
    batch = {"input": x, "noun": [f"noun {i}" for i in noun], "z": z[noun]}
    records = (
        snn.effect(identity(), {"0": nothing(40)}, [batch], labels="z", groups=groups)
        for groups in (None, "noun")
    )
    alone, grouped = (value(found, "accuracy", "0", "z") for found in records)
    assert alone["before"] > 0.85 > 0.7 > grouped["before"]


def test_invalid_arguments_of_effect_are_errors(fitted: tuple[Any, Any]) -> None:
    model, erasers = fitted
    broken = [{**b, "z": b["z"][:3]} for b in texts(20, 0)]
    one, error = texts(20, 0), sf.exceptions.InputError
    raises(
        (error, "is empty", lambda: snn.effect(model, erasers, [])),
        (error, "mapping of names", lambda: snn.effect(model, erasers[SITES[0]], one)),
        (error, "max_rows", lambda: snn.effect(model, erasers, one, max_rows=1)),
        (LabelError, "age", lambda: snn.effect(model, erasers, one, labels=["z", "age"])),
        (LabelError, "one label per sequence", lambda: snn.effect(model, erasers, broken)),
    )
    model.idle = torch.nn.Linear(16, 16)
    with pytest.raises(snn.NeverCalledError, match="idle"):
        snn.effect(model, erasers, texts(20, 0), at=[*SITES, "idle"])
    del model.idle
    assert hooks_in(model) == 0
