"""nn.effects: loss, probes and change equal figures of separate passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import hooks_in, inputs, tiny  # noqa: E402
from splince_fast import nn as snn  # noqa: E402
from splince_fast.evaluation import leakage  # noqa: E402
from splince_fast.nn import effects  # noqa: E402


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


def stored(model: Any, batches: list[dict[str, Any]], site: str) -> np.ndarray:
    """Rows of attended tokens at a site."""
    rows: list[Any] = []
    keep: list[Any] = []
    handle = model.get_submodule(site).register_forward_hook(lambda m, a, o: rows.append(o))
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            keep.append(rows.pop()[batch["attention_mask"] != 0].double().numpy())
    handle.remove()
    return np.concatenate(keep)


def test_figures_are_those_of_separate_passes(fitted: tuple[Any, Any]) -> None:
    model, erasers = fitted
    test = texts(100, 1)
    found = snn.effect(model, erasers, test, tokens="all")
    assert hooks_in(model) == 0
    assert [site.site for site in found.sites] == SITES
    assert found.n_sequences == 100
    counts = [int(b["attention_mask"].sum(1)[i]) for b in test for i in range(20)]
    groups = np.repeat(np.arange(100), counts)
    z = np.repeat(np.concatenate([b["z"].numpy() for b in test]), counts)
    for site in found.sites:
        before = stored(model, test, site.site)
        with snn.install(model, erasers):
            after = stored(model, test, site.site)
        change = ((after - before) ** 2).sum() / ((before - before.mean(0)) ** 2).sum()
        np.testing.assert_allclose(site.change, change, rtol=1e-5)
        assert site.n_rows == len(groups)
        probe, kept = site.probes
        assert (probe.variable, probe.role, kept.variable, kept.role) == (
            "z",
            "erased",
            "y",
            "kept",
        )
        for rows, shown in ((before, probe.before), (after, probe.after)):
            expected = leakage(rows, z, probes=("linear",), groups=groups)["linear"].accuracy
            assert abs(shown - expected) < 0.01  # a few rows at the boundary, in float32
        assert probe.after < probe.before
    # The loss of transformers itself, which masks by labels.
    for installed, shown in ((False, found.loss[0]), (True, found.loss[1])):  # type: ignore[index]
        total = weight = 0.0
        handle = snn.install(model, erasers) if installed else None
        for batch in test:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            target = ids.masked_fill(mask == 0, -100)
            with torch.no_grad():
                own = model(input_ids=ids, attention_mask=mask, labels=target).loss
            n = int((target[:, 1:] != -100).sum())
            total, weight = total + n * float(own), weight + n
        if handle is not None:
            handle.remove()
        np.testing.assert_allclose(shown, total / weight, rtol=1e-5)


def test_a_sample_has_the_same_rows_everywhere(fitted: tuple[Any, Any]) -> None:
    model, erasers = fitted
    few = snn.effect(model, erasers, texts(400, 1), max_rows=60)
    assert {site.n_rows for site in few.sites} == {60}
    assert few.sites == snn.effect(model, erasers, texts(400, 1), max_rows=60).sites
    other = snn.effect(model, erasers, texts(400, 1), max_rows=60, random_state=1)
    assert few.sites != other.sites
    nothing = {name: sf.Projection(np.zeros((16, 1)), np.ones((16, 1)), np.zeros(16))
               for name in SITES}  # fmt: skip
    same = snn.effect(model, nothing, texts(400, 1), erase="z", max_rows=60)
    for site in same.sites:  # control: rows that are compared are the same ones
        assert site.change == 0
        assert site.probes[0].before == site.probes[0].after
    assert same.loss is not None
    assert same.loss[0] == same.loss[1]


def test_an_effect_is_shown_as_table_frame_json_and_plot(
    fitted: tuple[Any, Any], tmp_path: Path
) -> None:
    model, erasers = fitted
    found = snn.effect(model, erasers, texts(100, 1), at=[*SITES, "model.layers.*"])
    assert len(found.sites) == 4
    lines = str(found).splitlines()
    assert lines[0].startswith("effect of erasers on 100 sequences; loss ")
    assert "z (erased, accuracy)" in lines[1]
    assert "<table>" in found._repr_html_()
    read = json.loads(found.to_json(tmp_path / "effect.json"))
    assert read == json.loads((tmp_path / "effect.json").read_text())
    assert read["sites"][0]["probes"][0]["before"] == found.sites[0].probes[0].before
    pytest.importorskip("pandas")
    frame = found.to_frame()
    assert list(frame.columns) == [
        "site", "variable", "role", "metric", "chance", "before", "after"
    ]  # fmt: skip
    assert len(frame) == 1 + 4 * 3
    with pytest.raises(sf.InputError, match="backend"):
        found.to_frame("R")
    pytest.importorskip("matplotlib")
    figure = found.plot()
    assert len(figure.axes[0].lines) == 4
    figure.savefig(tmp_path / "effect.png")


@pytest.mark.parametrize("name", ["bert", "t5", "vit", "whisper", "mamba", "sequential"])
def test_effects_on_models_that_generate_no_text(name: str) -> None:
    model = tiny(name)
    norms = {"bert": "encoder.layer.0.output", "t5": "decoder.final_layer_norm",
             "vit": "layernorm", "whisper": "model.decoder.layer_norm",
             "mamba": "backbone.norm_f", "sequential": "2"}  # fmt: skip
    batch, other = ({**inputs(name, n=40, seed=i), "z": torch.arange(40) % 2} for i in (0, 1))
    tokens = "body" if name == "sequential" else "all"
    erasers = snn.fit_layers(model, [batch], norms[name], sf.leace, erase="z", tokens=tokens)
    found = snn.effect(model, erasers, [other])
    assert found.sites[0].change > 0
    assert (found.loss is not None) == (name == "mamba")
    scored = snn.effect(model, erasers, [other], loss=lambda output, batch: 2.5)
    assert scored.loss == (2.5, 2.5)
    infinite = snn.effect(model, erasers, [other], loss=lambda output, batch: float("inf"))
    assert json.loads(infinite.to_json())["loss"] == [None, None]


def halting(model: Any, batch: Any) -> None:
    """Run a model twelve times on shifted inputs; stop if the first feature is constant."""
    for i in range(12):
        if model(batch["x"] + 0.01 * i)[:, 0].std() < 0.5 and i > 1:
            return


@pytest.mark.parametrize("max_rows", [10_000, 300])
def test_runs_of_different_lengths_have_their_own_rows_and_labels(max_rows: int) -> None:
    g = torch.Generator().manual_seed(0)
    data = []
    for _ in range(4):
        z, k = (torch.randint(0, 2, (50,), generator=g) for _ in range(2))
        x = 0.3 * torch.randn(50, 4, generator=g)
        x[:, 0] += 2 * z
        x[:, 1] += 3 * k
        data.append({"x": x, "z": z, "k": k})
    model = torch.nn.Sequential(torch.nn.Identity())
    erasers = snn.collect(
        model, data, "0", labels=["z", "k"], forward=lambda m, b: m(b["x"])
    ).erasers(sf.leace, erase="z")
    found = snn.effect(model, erasers, data, erase="z", keep="k", forward=halting,
                       max_rows=max_rows).sites[0]  # fmt: skip
    erased, kept = found.probes
    assert found.n_rows == min(max_rows, 4 * 12 * 50)
    assert erased.after < 0.7 < 0.95 < min(erased.before, kept.before, kept.after)
    if max_rows == 10_000:  # the rows of both runs are those of three calls
        x = torch.cat([batch["x"] + 0.01 * i for batch in data for i in range(3)]).double().numpy()
        change = (
            ((x - erasers["0"].mean) @ erasers["0"].matrix().T + erasers["0"].mean - x) ** 2
        ).sum() / ((x - x.mean(0)) ** 2).sum()
        np.testing.assert_allclose(found.change, change, rtol=1e-4)


def test_calls_of_a_site_in_one_batch_have_their_own_sample(monkeypatch: Any) -> None:
    rows = []
    columns = effects._RowSample.columns

    def seen(self: Any) -> Any:
        rows.append(columns(self)[effects._ROWS])
        return columns(self)

    monkeypatch.setattr(effects._RowSample, "columns", seen)
    model = torch.nn.Sequential(*[torch.nn.Identity()] * 12)
    x = torch.arange(800.0).reshape(400, 2)
    nothing = {"0": sf.Projection(np.zeros((2, 1)), np.ones((2, 1)), np.zeros(2))}
    batch = {"input": x, "z": torch.arange(400) % 2}
    snn.effect(model, nothing, [batch], erase="z", max_rows=200)
    # 200 of 4800 rows: 158 of the 400 different ones are expected.
    assert len(np.unique(rows[-1][:, 0])) > 120


def test_a_site_that_runs_only_without_erasers_is_an_error() -> None:
    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Identity(), torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.b(x) if float(x[:, 0].max()) > 0.5 else x

    zero = {"a": sf.Projection(np.eye(2), np.eye(2), np.zeros(2))}
    batch = {"x": torch.ones(20, 2), "z": torch.arange(20) % 2}
    with pytest.raises(snn.NeverCalledError, match=r"'b'.*only without or only with"):
        snn.effect(Routed(), zero, [batch], erase="z", at=["a", "b"])


def test_continuous_labels_and_labels_without_a_probe() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=g)
    batch = {"input": x, "z": x[:, 0].double(), "one": ["a"] * 60}
    erasers = snn.fit_layers(model, [batch], "0", sf.leace, erase="z")
    found = snn.effect(model, erasers, [batch], keep="one")
    probe, constant = found.sites[0].probes
    assert probe.metric == "R2"
    assert probe.before > 0.9 > 0.2 > probe.after
    assert np.isnan(constant.before)
    assert "1 class" in constant.reason
    assert json.loads(found.to_json())["sites"][0]["probes"][1]["before"] is None
    assert "1 class" in str(found)


def test_invalid_arguments_of_effect_are_errors(fitted: tuple[Any, Any]) -> None:
    model, erasers = fitted
    plain = dict(erasers)
    with pytest.raises(sf.InputError, match="is empty"):
        snn.effect(model, erasers, [])
    with pytest.raises(sf.InputError, match="mapping of names"):
        snn.effect(model, plain[SITES[0]], texts(20, 0))
    with pytest.raises(sf.InputError, match="max_rows"):
        snn.effect(model, erasers, texts(20, 0), max_rows=1)
    bare = {n: sf.Projection(p.left, p.right, p.mean) for n, p in plain.items()}
    with pytest.raises(sf.InputError, match="erase="):
        snn.effect(model, bare, texts(20, 0))
    with pytest.raises(sf.LabelError, match="age"):
        snn.effect(model, erasers, texts(20, 0), keep="age")
    model.idle = torch.nn.Linear(16, 16)
    with pytest.raises(snn.NeverCalledError, match="idle"):
        snn.effect(model, erasers, texts(20, 0), at=[*SITES, "idle"])
    del model.idle
    assert hooks_in(model) == 0
