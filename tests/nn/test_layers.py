"""nn.layers, nn.eraser: layer-by-layer fits of tiny models, and their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import hooks_in, inputs, labelled, left, module, outputs, rows_with, tiny
from splince_fast import nn as snn


def model_and_batches() -> tuple[Any, list[dict[str, Any]]]:
    """Layers that read a concept from their input and write it again."""
    torch.manual_seed(0)
    layers: list[Any] = [torch.nn.Linear(6, 16)]
    for _ in range(4):
        layers += [torch.nn.Tanh(), torch.nn.Linear(16, 16)]
    model = torch.nn.Sequential(*layers).eval()
    z = torch.arange(600) % 2
    y = (torch.arange(600) // 2) % 2
    x = torch.randn(600, 6) + z[:, None] * torch.tensor([1.0, 1, 0, 0, 0, 0])
    x[:, 2] += 1.5 * y
    batches = [{"input": x[i : i + 100], "z": z[i : i + 100], "y": y[i : i + 100]}
               for i in range(0, 600, 100)]  # fmt: skip
    return model, batches


SITES = ["2", "4", "6", "8"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_fitted_in_order_hold_together_and_those_of_one_pass_do_not(
    dtype: torch.dtype,
) -> None:
    model, batches = model_and_batches()
    model = model.to(dtype)
    batches = [{**batch, "input": batch["input"].to(dtype)} for batch in batches]
    # Named in another order than they run.
    erasers = snn.fit_layers(model, batches, SITES[::-1], sf.leace, erase="z", labels=["z", "y"])
    assert list(erasers) == SITES
    assert erasers.sequential
    assert hooks_in(model) == 0
    rest = max(left(model, batches, erasers).values())
    # Rounding to 8 bits: between float32's residual and a few spacings (2^-8) of |x| / sd.
    assert rest < 1e-6 if dtype == torch.float32 else 1e-6 < rest < 2e-2
    with pytest.warns(snn.OnePassWarning):
        erasers = snn.collect(model, batches, SITES, labels=["z", "y"]).erasers(sf.leace, erase="z")
    found = left(model, batches, erasers)
    assert found["2"] <= rest
    assert max(found.values()) > 0.01  # far above; on a real model 0.3 and more


def test_fitted_on_last_tokens_and_applied_to_all() -> None:
    model = tiny("llama")
    options: dict[str, Any] = {"labels": "z", "tokens": "last"}
    batches = [inputs("llama", 40, seed=i) for i in range(10)]
    for batch in batches:
        batch["z"] = batch["input_ids"][:, 2:].double().sum(1)  # what the last token reads
    at = ["model.layers.0", "model.layers.1"]
    erasers, narrow = (
        snn.fit_layers(model, batches, at, sf.leace, erase="z", **more, **options)
        for more in ({"apply_to": "all"}, {})
    )
    assert (erasers.tokens, erasers.apply_to) == ("last", "all")
    assert "tokens last, applied to all" in str(erasers)
    for given in (erasers, narrow):
        assert left(model, batches, given, at, **options)[at[1]] < 1e-5  # float32 states
    # Control: fitted behind erasers of last tokens only, the second does not hold at all tokens.
    with (
        pytest.warns(snn.OtherTokensWarning, match=r"'last' erased.*apply_to='all'"),
        snn.install(model, narrow, tokens="all"),
    ):
        after = snn.collect(model, batches, at, **options)[at[1]].cross_covariance("z")
    before = snn.collect(model, batches, at, **options)[at[1]].cross_covariance("z")
    assert np.linalg.norm(after) > 1e-3 * np.linalg.norm(before)
    with pytest.raises(sf.exceptions.InputError, match=r"tokens"):
        snn.fit_layers(model, batches, at, sf.leace, erase="z", apply_to="mean", **options)


def test_other_tokens_than_in_the_fit_warn(tmp_path: Path) -> None:
    model, batch, at = tiny("llama"), labelled("llama"), ["model.layers.0", "model.layers.1"]

    def rule(call: Any) -> torch.Tensor:
        return torch.ones_like(call["input_ids"], dtype=torch.bool)

    def fit(sites: Any, **options: Any) -> snn.Erasers:
        return snn.fit_layers(model, [batch], sites, sf.leace, erase="z", **options)

    both, own = fit(at), fit(at, apply_to=rule)
    # No tokens differ here, as far as they are known: a warning would be an error.
    for erasers, tokens in [
        (both, None), (both, "body"), (fit(at[0]), "all"), (fit(at, apply_to="all"), "all"),
        (own, None), (own, rule),
    ]:  # fmt: skip
        snn.install(model, erasers, tokens=tokens).remove()
    own.save(tmp_path / "own.safetensors")  # the function itself is not filed
    snn.install(model, tmp_path / "own.safetensors", tokens=rule).remove()
    for erasers, tokens in [(both, "all"), (both, rule), (own, "body")]:
        with pytest.warns(snn.OtherTokensWarning, match="fitted one after the other"):
            snn.install(model, erasers, tokens=tokens).remove()


def test_the_default_is_splince_and_errors_name_the_layer() -> None:
    model, batches = model_and_batches()
    erasers = snn.fit_layers(model, batches, SITES, erase="z", keep="y", labels=["z", "y"])
    assert all(p.method == "SPLINCE" for p in erasers.values())
    # Labels are those that are erased and kept; of joint cells, each.
    assert same(snn.fit_layers(model, batches, SITES, erase="z", keep=["y"]), erasers)
    cells = snn.fit_layers(model, batches, "2", sf.leace, erase=("z", "y"), joint=[("z", "y")])
    assert cells["2"].rank == 3
    with pytest.raises(sf.exceptions.InfeasibleError, match="at the site '2'"):
        snn.fit_layers(model, batches, SITES, erase="z", keep="z", labels=["z", "y"])
    with pytest.warns(sf.exceptions.DroppedDirectionsWarning):
        snn.fit_layers(
            model, batches, ["2"], erase="z", keep="z", labels=["z", "y"], on_infeasible="drop"
        )
    assert hooks_in(model) == 0


def test_a_site_without_association_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    batch = rows_with(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)))
    for shift, expected in (
        (batch["z"][:, None], [r"at the site '1': .*sites before it"]),
        (-batch["input"], [rf"at the site '{i}': .*all features of x are constant" for i in "01"]),
    ):
        shifted = [{**batch, "input": batch["input"] + shift}]
        with pytest.warns(sf.exceptions.NothingErasedWarning) as caught:
            snn.fit_layers(model, shifted, ["0", "1"], "leace", erase="z")
        for warning, match in zip(caught, expected, strict=True):
            assert re.match(match, str(warning.message))


def test_batches_that_differ_between_passes_are_errors() -> None:
    model, batches = model_and_batches()
    n_reads, rng = iter(range(3, -9, -1)), np.random.default_rng(0)

    def fewer(self: Any) -> Any:
        return iter(batches[: len(batches) + next(n_reads)])

    def shuffled(self: Any) -> Any:
        for batch in batches:
            order = rng.permutation(100)
            yield {k: v[order] for k, v in batch.items()}

    for changing, match in (
        (iter(batches), "is an iterator"),
        (type("Fewer", (), {"__iter__": fewer})(), "batches instead of"),
        (type("Shuffled", (), {"__iter__": shuffled})(), "labels in the first batch"),
    ):
        with pytest.raises(sf.exceptions.InputError, match=match):
            snn.fit_layers(model, changing, SITES, sf.leace, erase="z", labels=["z", "y"])
    assert hooks_in(model) == 0


# -- passes that end at their site -----------------------------------------------------------------


def same(first: snn.Erasers, second: snn.Erasers) -> bool:
    return list(first) == list(second) and all(
        np.array_equal(p.left, second[name].left) and np.array_equal(p.bias, second[name].bias)
        for name, p in first.items()
    )


def blocks(kind: str) -> Any:
    """Blocks in a list, which run once per batch, or again in some batches."""

    def run(self: Any, h: Any) -> Any:
        is_repeated = kind == "again" and float(h.mean()) > 0.3
        for block in self.blocks:
            h = block(block(h)) if is_repeated else block(h)
        return h

    def forward(self: Any, x: Any) -> Any:
        parts = x.split(4, 1) if kind == "chunks" else [x]
        return torch.cat([run(self, self.first(part)) for part in parts], 1)

    torch.manual_seed(0)
    each = [torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()) for _ in range(4)]
    return module(forward, first=torch.nn.Linear(3, 5), blocks=torch.nn.ModuleList(each)).eval()


@pytest.mark.filterwarnings("ignore:.*several times per batch", "ignore:.*nothing was erased")
@pytest.mark.parametrize("kind", ["once", "again", "chunks"])
@pytest.mark.parametrize("side", ["output", "input"])
def test_passes_that_end_at_their_site_fit_the_same_erasers(kind: str, side: str) -> None:
    """As whole passes, which run with a function `forward`."""
    g = torch.Generator().manual_seed(1)
    z = torch.arange(40) % 2
    batches = [
        {"x": shift + torch.randn(40, n, 3, generator=g) + z[:, None, None], "z": z}
        for shift, n in ((0.0, 4), (2.0, 8), (-2.0, 8))
    ]
    model, at = blocks(kind), ["first", "blocks.*", "blocks.*.0"]
    whole, found = (
        snn.fit_layers(model, batches, at, "leace", erase="z", side=side, forward=forward)
        for forward in (lambda m, b: m(b["x"]), None)
    )
    assert same(found, whole)
    assert hooks_in(model) == 0


@pytest.mark.parametrize("independent", [False, True])
def test_a_site_that_runs_several_times_warns(independent: bool) -> None:
    def forward(self: Any, input: Any) -> Any:
        x = input
        for i in range(3):
            x = torch.tanh(self.layer(input + i if independent else x))
        return x

    torch.manual_seed(0)
    model, z = module(forward, layer=torch.nn.Linear(6, 6)), torch.arange(200) % 2
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) + 2 * z[:, None]
    batches = [rows_with(x)]
    with pytest.warns(snn.OnePassWarning, match="'layer' runs several times per batch"):
        erasers = snn.fit_layers(model, batches, "layer", sf.leace, erase="z")
    with snn.install(model, erasers):
        rest = snn.collect(model, batches, "layer", labels="z").trace("z")["layer"]
    assert rest < 1e-7 if independent else rest > 1e-4  # exact, or not


def test_erasers_for_a_fold_are_linear_and_for_all_tokens() -> None:
    model, batches = model_and_batches()
    found, chosen = (
        snn.fit_layers(model, batches, SITES, "leace", erase="z", **options)
        for options in ({"for_fold": True}, {"apply_to": "all", "bias": "drop"})
    )
    assert same(found, chosen)
    assert found.recipe == chosen.recipe
    assert not any(p.bias.any() for p in found.values())
    snn.fold(model, found, example=batches[0]["input"][:4])
    with pytest.raises(sf.exceptions.InputError, match="for_fold=True erases at every token"):
        snn.fit_layers(model, batches, SITES, "leace", erase="z", for_fold=True, apply_to="body")


@pytest.mark.parametrize(
    ("site", "options"),
    [
        ("model.layers.*", {}),
        ("model.layers.*", {"tokens": "last", "apply_to": "all"}),
        ("model.layers.*.mlp", {"side": "input", "skip_ids": [7, 9]}),
        ("model.layers.*.self_attn.o_proj", {"side": "input", "heads": 2, "tokens": "all"}),
        ("model.norm", {"for_fold": True}),
    ],
)
def test_erasers_survive_a_file(site: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, batch, path = tiny("llama"), labelled("llama"), tmp_path / "erasers.safetensors"
    erasers = snn.fit_layers(model, [batch], site, "leace", erase="z", **options)
    erasers.save(path)
    with pytest.raises(sf.exceptions.InputError, match="names another format"):
        erasers.save(tmp_path / "erasers.onnx")
    loaded = snn.Erasers.load(path)
    assert same(loaded, erasers)
    assert str(loaded) == str(erasers)
    assert [p.report for p in loaded.values()] == [p.report for p in erasers.values()]
    for name in ("sequential", "tokens", "apply_to", "sites", "placement", "recipe"):
        assert getattr(loaded, name) == getattr(erasers, name), name
    call = {k: v for k, v in batch.items() if k != "z"}
    assert torch.equal(outputs(model, call, path), outputs(model, call, erasers))
    with pytest.raises(snn.SiteError, match="no module of this model"):
        snn.install(torch.nn.Sequential(torch.nn.Linear(6, 6)), path)


@pytest.mark.filterwarnings("ignore:.*nothing was erased")
def test_a_model_that_catches_the_end_of_a_pass_counts_rows_once() -> None:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        hidden = self.a(input)
        try:
            return self.b(hidden)
        except Exception:  # the exception that ends a pass after its site
            return self.b(hidden)

    model = module(forward, a=torch.nn.Linear(8, 8), b=torch.nn.Linear(8, 8))
    batch = rows_with(torch.randn(40, 8))
    batch["input"] += batch["z"][:, None]
    erasers = snn.fit_layers(model, [batch], ["a", "b"], "leace", erase="z")
    assert [erasers[name].report.n_rows for name in ("a", "b")] == [40, 40]
