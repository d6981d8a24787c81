"""nn.layers, nn.activation_cache, nn.spec: layer-by-layer fits of tiny models, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import hooks_in, inputs, tiny  # noqa: E402
from splince_fast import nn as snn  # noqa: E402
from splince_fast.nn.placeholder import Placeholder, PlaceholderError  # noqa: E402


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


def left(model: Any, batches: Any, erasers: Any, name: str = "z") -> dict[str, float]:
    """Per site, the norm of the covariance with erasers over that without."""
    before = snn.collect(model, batches, SITES, labels=["z", "y"])
    with snn.install(model, erasers):
        after = snn.collect(model, batches, SITES, labels=["z", "y"])
    norm = np.linalg.norm
    return {
        s: norm(after[s].cross_covariance(name)) / norm(before[s].cross_covariance(name))
        for s in SITES
    }


def test_layers_fitted_in_order_hold_together() -> None:
    model, batches = model_and_batches()
    # Named in another order than they run.
    erasers = snn.fit_layers(model, batches, SITES[::-1], sf.leace, erase="z", labels=["z", "y"])
    assert list(erasers) == SITES
    assert erasers.sequential
    assert hooks_in(model) == 0
    assert max(left(model, batches, erasers).values()) < 1e-6


def test_fitted_on_last_tokens_and_applied_to_all(tmp_path: Path) -> None:
    model = tiny("llama")
    options: dict[str, Any] = {"labels": "z", "tokens": "last"}
    batches = [{**inputs("llama", 40, seed=i)} for i in range(10)]
    for batch in batches:
        batch["z"] = batch["input_ids"][:, 2:].double().sum(1)  # what the last token reads
    at = ["model.layers.0", "model.layers.1"]

    def rest(erasers: snn.Erasers) -> float:
        before, after = (found[at[1]].cross_covariance("z") for found in both(erasers))
        return float(np.linalg.norm(after) / np.linalg.norm(before))

    def both(erasers: snn.Erasers) -> tuple[snn.Collected, snn.Collected]:
        before = snn.collect(model, batches, at, **options)
        with snn.install(model, erasers):
            return before, snn.collect(model, batches, at, **options)

    erasers = snn.fit_layers(model, batches, at, sf.leace, erase="z", apply_to="all", **options)
    assert (erasers.tokens, erasers.apply_to) == ("last", "all")
    assert "tokens last, applied to all" in str(erasers)
    assert rest(erasers) < 1e-5  # float32 states
    erasers.save(tmp_path / "a.safetensors")
    loaded = snn.Erasers.load(tmp_path / "a.safetensors")
    assert loaded.apply_to == "all"
    assert rest(loaded) == rest(erasers)
    # Control: fitted behind erasers of last tokens only, the second does not hold at all tokens.
    narrow = snn.fit_layers(model, batches, at, sf.leace, erase="z", **options)
    assert rest(narrow) < 1e-5
    with (
        pytest.warns(snn.OtherTokensWarning, match=r"'last' erased.*apply_to='all'"),
        snn.install(model, narrow, tokens="all"),
    ):
        after = snn.collect(model, batches, at, **options)[at[1]].cross_covariance("z")
    before = snn.collect(model, batches, at, **options)[at[1]].cross_covariance("z")
    assert np.linalg.norm(after) > 1e-3 * np.linalg.norm(before)
    for wrong, change in (("mean", {}), (None, {"tokens": "mean"})):
        with pytest.raises(sf.InputError, match=r"tokens"):
            snn.fit_layers(
                model, batches, at, sf.leace, erase="z", **{**options, **change}, apply_to=wrong
            )


def test_other_tokens_than_in_the_fit_warn(tmp_path: Path) -> None:
    model = tiny("llama")
    batch = {**inputs("llama", 100), "z": torch.arange(100) % 2}
    at = ["model.layers.0", "model.layers.1"]

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


def test_control_one_pass_does_not_hold() -> None:
    model, batches = model_and_batches()
    with pytest.warns(snn.OnePassWarning):
        erasers = snn.collect(model, batches, SITES, labels=["z", "y"]).erasers(sf.leace, erase="z")
    found = left(model, batches, erasers)
    assert found["2"] < 1e-6
    assert max(found.values()) > 0.01  # four orders above; on a real model 0.3 and more


def test_the_default_is_splince_and_errors_name_the_layer() -> None:
    model, batches = model_and_batches()
    erasers = snn.fit_layers(model, batches, SITES, erase="z", keep="y", labels=["z", "y"])
    assert all(p.method == "SPLINCE" for p in erasers.values())
    # Labels are those that are erased and kept; of joint cells, each.
    same = snn.fit_layers(model, batches, SITES, erase="z", keep=["y"])
    assert all(np.array_equal(same[site].left, p.left) for site, p in erasers.items())
    cells = snn.fit_layers(model, batches, "2", sf.leace, erase=("z", "y"), joint=[("z", "y")])
    assert cells["2"].rank == 3
    with pytest.raises(sf.InfeasibleError, match="at the site '2'"):
        snn.fit_layers(model, batches, SITES, erase="z", keep="z", labels=["z", "y"])
    with pytest.warns(sf.DroppedDirectionsWarning):
        snn.fit_layers(
            model, batches, ["2"], erase="z", keep="z", labels=["z", "y"], on_infeasible="drop"
        )
    assert hooks_in(model) == 0


def test_a_site_without_association_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    z = torch.arange(60) % 2
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) + z[:, None]
    batches = [{"input": x, "z": z}]
    with pytest.warns(sf.NothingErasedWarning, match=r"^at the site '1': .*sites before it"):
        snn.fit_layers(model, batches, ["0", "1"], "leace", erase="z")
    constant = [{"input": torch.ones(60, 4), "z": z}]
    with pytest.warns(sf.NothingErasedWarning) as caught:
        snn.fit_layers(model, constant, ["0", "1"], "leace", erase="z")
    texts = [str(w.message) for w in caught]
    assert [text.partition(":")[0] for text in texts] == ["at the site '0'", "at the site '1'"]
    assert all("all features of x are constant" in text for text in texts)


def test_batches_that_differ_between_passes_are_errors() -> None:
    model, batches = model_and_batches()
    options = {"erase": "z", "labels": ["z", "y"]}
    with pytest.raises(sf.InputError, match="is an iterator"):
        snn.fit_layers(model, iter(batches), SITES, sf.leace, **options)

    class Fewer:
        def __init__(self) -> None:
            self.n = len(batches) + 3

        def __iter__(self) -> Any:
            self.n -= 1
            return iter(batches[: self.n])

    class Shuffled:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def __iter__(self) -> Any:
            for batch in batches:
                order = self.rng.permutation(100)
                yield {k: v[order] for k, v in batch.items()}

    with pytest.raises(sf.InputError, match="batches instead of"):
        snn.fit_layers(model, Fewer(), SITES, sf.leace, **options)
    with pytest.raises(sf.InputError, match="labels in the first batch"):
        snn.fit_layers(model, Shuffled(), SITES, sf.leace, **options)
    with pytest.raises(sf.InputError, match="no token"):
        snn.fit_layers(model, batches, SITES, sf.leace, tokens="mean", **options)
    assert hooks_in(model) == 0


# -- passes that begin where the last one ended ----------------------------------------------------


def calls_of(model: Any, act: Any) -> dict[str, int]:
    """How often the forward of each submodule ran meanwhile, hooks that skip it not counted."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():

        def counted(*args: Any, _run: Any = module.forward, _name: str = name, **kw: Any) -> Any:
            counts[_name] = counts.get(_name, 0) + 1
            return _run(*args, **kw)

        module.forward = counted
    try:
        act()
    finally:
        for module in model.modules():
            del module.forward
    return counts


def same(first: snn.Erasers, second: snn.Erasers) -> bool:
    return list(first) == list(second) and all(
        np.array_equal(p.left, second[name].left) and np.array_equal(p.bias, second[name].bias)
        for name, p in first.items()
    )


def test_modules_before_a_fitted_site_run_once() -> None:
    model, batches = model_and_batches()
    found: dict[Any, snn.Erasers] = {}

    def fit(memory: int | None) -> Any:
        options = {"erase": "z", "memory": memory}
        found[memory] = snn.fit_layers(model, batches, SITES, sf.leace, **options)

    n = len(batches)
    whole = calls_of(model, lambda: fit(0))
    kept = calls_of(model, lambda: fit(None))
    # On the first batch twice more: to trace the order of modules, and to test the cache points.
    assert {name: kept[name] for name in ("0", *SITES)} == dict.fromkeys(("0", *SITES), n + 2)
    assert [whole[name] for name in ("0", *SITES)] == [4 * n + 1, 4 * n + 1, 3 * n + 1, 2 * n + 1,
                                                       n + 1]  # fmt: skip
    assert same(found[0], found[None])
    # Two batches of 100 rows of 16 float32 have a place: the other four run from the beginning.
    some = calls_of(model, lambda: fit(2 * 100 * 16 * 4))
    assert some["0"] == 2 + n + 3 * (n - 2)
    assert same(found[0], found[2 * 100 * 16 * 4])
    assert hooks_in(model) == 0
    assert not any("forward" in module.__dict__ for module in model.modules())


class Forked(torch.nn.Module):
    """Blocks whose first output, or a share of it, is read again behind the second one."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.rule = rule

    def forward(self, input: Any) -> Any:
        first = self.blocks[0](input)
        second = self.blocks[1](torch.tanh(first))
        return self.blocks[2](self.rule(torch.tanh(second), first, input))


@pytest.mark.parametrize(
    ("rule", "again"),
    [
        (lambda x, first, input: x, False),
        (lambda x, first, input: x + first, True),
        # Read on the last batch only, so that the first one cannot tell.
        (lambda x, first, input: x + first if float(input.mean()) > 1 else x, True),
        # Written into: what was kept is not what it was.
        (lambda x, first, input: x.add_(1.0), False),
    ],
    ids=["chain", "skip", "skip on one batch", "in place"],
)
def test_a_model_that_reads_a_skipped_output_is_run_again(rule: Any, again: bool) -> None:
    model = Forked(rule).eval()
    torch.manual_seed(1)
    z = torch.arange(300) % 2
    x = torch.randn(300, 6) + z[:, None]
    x[200:] += 2
    batches = [{"input": x[i : i + 100], "z": z[i : i + 100]} for i in range(0, 300, 100)]
    sites = ["blocks.0", "blocks.1", "blocks.2"]
    found: dict[Any, snn.Erasers] = {}

    def fit(memory: int | None) -> Any:
        found[memory] = snn.fit_layers(model, batches, sites, sf.leace, erase="z", memory=memory)

    fit(0)
    counts = calls_of(model, lambda: fit(None))
    assert (counts["blocks.0"] > len(batches) + 2) == again
    assert same(found[0], found[None])


class Storing(torch.nn.Sequential):
    """Layers that store their last output."""

    def forward(self, input: Any) -> Any:
        self.last = super().forward(input)
        return self.last


class Varying(torch.nn.Module):
    """A model that reads skipped outputs, or runs them again, in batches after the first one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        layers = Storing if kind == "attribute" else torch.nn.Sequential
        self.first = layers(torch.nn.Linear(3, 5), torch.nn.Tanh())
        self.second = torch.nn.Linear(5, 5)
        self.third = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh(),
                                         torch.nn.Linear(5, 5))  # fmt: skip

    def forward(self, x: Any) -> Any:
        if self.kind == "chunks":
            return self.third(torch.cat([self.second(self.first(c)) for c in x.split(4, 1)], 1))
        encoded = self.first(x)
        h = torch.tanh(self.second(encoded))
        if self.kind == "mask":  # comparisons turn NaN into a valid value
            h = h.masked_fill((encoded > 0.9).any(-1, keepdim=True), 0.0)
        elif self.kind == "number" and float(encoded.max()) > 0.9:
            h = 2 * h
        elif self.kind == "shape":
            h = h * (1 + len((encoded > 0.9).nonzero()))
        elif self.kind == "array":
            h = h * (1 + float((encoded.numpy() > 0.9).mean()))
        elif self.kind == "error" and x.shape[1] > 4:
            h = h + encoded.numpy().mean()
        elif self.kind == "write":
            h = torch.zeros_like(h).copy_(encoded.clamp(min=0.9)) + h
        elif self.kind == "attribute":
            h = h * (1 + self.first.last.mean())
        elif self.kind == "again" and x.shape[1] > 4:
            h = h + self.second(self.first(x.flip(1)))
        return self.third(h)


@pytest.mark.parametrize(
    "kind", ["chunks", "mask", "number", "shape", "array", "error", "write", "attribute", "again"]
)
def test_the_result_does_not_depend_on_memory(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    z = torch.arange(40) % 2
    batches = [
        {"x": scale * torch.randn(40, n, 3, generator=g) + scale * z[:, None, None], "z": z}
        for scale, n in ((0.1, 4), (1.0, 8), (1.0, 8))
    ]
    model = Varying(kind).eval()
    sites = ["third.0", "third.2"]
    if kind not in ("chunks", "again"):
        sites.insert(0, "second")
    found = [
        snn.fit_layers(model, batches, sites, sf.leace, erase="z", memory=memory)
        for memory in (0, None, 4 * 40 * 4 * 5)
    ]
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    with snn.install(model, found[1]):
        after = snn.collect(model, batches, sites, labels="z")
    assert max(after.trace("z").values()) < 1e-6
    assert hooks_in(model) == 0


def test_operations_with_placeholders_give_placeholders_or_errors() -> None:
    x = Placeholder(torch.ones(2, 3))
    mask = torch.tensor([True, False])[:, None]
    for result in (x > 0, x.argmax(1), torch.nan_to_num(x), torch.where(mask, x, torch.ones(2, 3)),
                   torch.ones(2, 3).masked_fill(x == 0, 0.0), x.sum(), *x.split(1)):  # fmt: skip
        assert type(result) is Placeholder
    assert (x @ torch.ones(3, 4)).shape == (2, 4)
    assert (x.to(torch.float64) + 1).dtype == torch.float64
    for read in (bool, float, lambda x: x.sum().item(), lambda x: torch.ones(2, 3).add_(x),
                 lambda x: x.add_(1), lambda x: x.nonzero(), lambda x: torch.ones(2, 3)[x > 0],
                 lambda x: torch.equal(x, x)):  # fmt: skip
        with pytest.raises(PlaceholderError, match="skipped module"):
            read(x.sum() if read in (bool, float) else x)
    for read in (lambda x: x.numpy(), lambda x: x.tolist()):
        with pytest.raises((RuntimeError, TypeError)):
            read(x)
    other = torch.empty(2, 3)
    other.data = x
    with pytest.raises(RuntimeError):
        other + 1


class Recurrent(torch.nn.Module):
    """A model that runs one layer three times."""

    def __init__(self, independent: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.independent = torch.nn.Linear(6, 6), independent

    def forward(self, input: Any) -> Any:
        x = input
        for i in range(3):
            x = torch.tanh(self.layer(input + i if self.independent else x))
        return x


def test_a_site_that_depends_on_its_own_output_warns() -> None:
    z = torch.arange(200) % 2
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) + 2 * z[:, None]
    batches = [{"input": x, "z": z}]

    def rest(model: Any, erasers: snn.Erasers) -> float:
        with snn.install(model, erasers):
            return snn.collect(model, batches, "layer", labels="z").trace("z")["layer"]

    with pytest.warns(snn.OnePassWarning, match="'layer' runs several times per batch"):
        erasers = snn.fit_layers(Recurrent(False), batches, "layer", sf.leace, erase="z")
    assert rest(Recurrent(False), erasers) > 1e-4
    # No warning if the runs are independent of each other: the eraser is exact.
    erasers = snn.fit_layers(Recurrent(True), batches, "layer", sf.leace, erase="z")
    assert rest(Recurrent(True), erasers) < 1e-7


def test_the_pass_of_a_site_after_a_norm_starts_before_its_block() -> None:
    """The residual stream around a norm is read again: the block before is what is kept."""
    model = tiny("llama")
    batches = [{**inputs("llama", 60, seed=i)} for i in range(3)]
    for batch in batches:
        batch["z"] = batch["input_ids"][:, 1:].double().sum(1)
    at = ["model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm"]
    for side in ("output", "input"):
        found: dict[Any, snn.Erasers] = {}

        def fit(memory: int | None, found: Any = found, side: str = side) -> Any:
            found[memory] = snn.fit_layers(
                model, batches, at, sf.leace, erase="z", side=side, memory=memory
            )

        fit(0)
        counts = calls_of(model, lambda: fit(None))
        assert counts["model.layers.0"] == 3 + 2
        assert same(found[0], found[None])


class InPlace(torch.nn.Module):
    """A block that adds to its input in place where a batch is short."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(2))
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(self.norms[0](x)))
        x = x.add_(y) if len(x) < 100 else x + y
        return x + self.b(self.norms[1](x))


def test_a_cached_output_that_was_modified_in_place_is_not_used() -> None:
    """It writes into the output that is kept, which then must not serve as it is."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    model = torch.nn.Sequential(first, InPlace(), InPlace()).eval()
    (whole, *others), z = model_and_batches()[1], "z"
    batches = [whole] + [{k: v[:50] for k, v in b.items()} for b in others]
    at = ["1.norms.0", "1.norms.1", "2.norms.0"]
    found: dict[Any, snn.Erasers] = {}

    def fit(memory: int | None) -> None:
        found[memory] = snn.fit_layers(model, batches, at, sf.leace, erase=z, memory=memory)

    fit(0)
    counts = calls_of(model, lambda: fit(None))
    assert same(found[0], found[None])
    # The trace and the trials aside, six batches ran it once, and five of them again.
    again = calls_of(model, lambda: snn.fit_layers(model, batches, at[:2], sf.leace, erase=z))
    assert counts["0"] == again["0"] + 5


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_module_that_takes_no_hooks_runs_in_each_pass() -> None:
    model, batches = model_and_batches()
    expected = snn.fit_layers(model, batches, SITES, sf.leace, erase="z", memory=0)
    model[1] = torch.jit.trace(model[1], torch.randn(2, 16))
    found = snn.fit_layers(model, batches, SITES, sf.leace, erase="z")
    assert same(found, expected)


def test_activations_that_are_not_finite_are_named() -> None:
    model, batches = model_and_batches()
    batches[3]["input"] = batches[3]["input"] * torch.tensor([1e38, 1, 1, 1, 1, 1]) * 1e38
    with pytest.raises(sf.NonFiniteError, match=r"'6'.*|'2'.*batch 3"):
        snn.fit_layers(model, batches, SITES, sf.leace, erase="z")
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_erasers_survive_a_file(tmp_path: Path) -> None:
    model, batches = model_and_batches()
    erasers = snn.fit_layers(model, batches, SITES, erase="z", keep="y", labels=["z", "y"])
    path = tmp_path / "erasers.safetensors"
    erasers.save(path)
    loaded = snn.Erasers.load(path)
    assert list(loaded) == list(erasers)
    assert str(loaded) == str(erasers)
    assert (loaded.sequential, loaded.tokens, loaded.sites) == (True, "all", erasers.sites)
    for name, p in erasers.items():
        assert np.array_equal(loaded[name].left, p.left)
        assert loaded[name].report == p.report
    x = batches[0]["input"]
    with snn.install(model, erasers):
        expected = model(x)
    with snn.install(model, path):
        assert torch.equal(model(x), expected)
    with pytest.raises(snn.SiteError, match="nearest names"):
        snn.install(tiny("llama"), path)
    with pytest.raises(snn.SiteError, match="the model has no submodules"):
        snn.install(torch.nn.Linear(8, 8), path)
    other = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(9)))
    with pytest.raises(snn.SiteError, match="another model"):
        snn.install(other, path)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(sf.FileFormatError):
        snn.Erasers.load(path)


def test_a_transformer_is_erased_layer_by_layer() -> None:
    model = tiny("llama")
    batch = inputs("llama", n=200, length=6)
    batch["z"] = (batch["input_ids"] % 2).where(batch["attention_mask"] == 1, torch.tensor(-100))
    at = ["model.layers.*", "model.norm"]
    erasers = snn.fit_layers(model, [batch], at, sf.leace, erase="z", labels="z")
    assert list(erasers) == ["model.layers.0", "model.layers.1", "model.norm"]
    before = snn.collect(model, [batch], at, labels="z")
    with snn.install(model, erasers):
        after = snn.collect(model, [batch], at, labels="z")
    for site in erasers:
        assert after.trace("z")[site] < 1e-6 * before.trace("z")[site]
