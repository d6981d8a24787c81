"""nn.collection, nn.accumulate, nn.calls: moments, against two passes over stored activations."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import hooks_in, identity, module, raises, rows_with, state_of, tiny
from splince_fast import nn as snn
from splince_fast.exceptions import InputError, LabelError, NonFiniteError
from splince_fast.nn import accumulate

SITE = "model.layers.0"
LABELS = ["gender", "score", "tag", "name"]


def text_batches(
    n: int = 64, size: int = 15, side: str = "left", seed: int = 0
) -> list[dict[str, Any]]:
    """Batches of random ids of random lengths, padded on one side, with labels of all kinds."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 8, n)
    ids = [rng.integers(3, 50, k) for k in lengths]
    gender, score = rng.integers(0, 2, n), rng.normal(size=n)
    per_token = [np.where(rng.random(k) < 0.3, -100, rng.integers(0, 3, k)) for k in lengths]
    found = []
    for start in range(0, n, size):
        rows = range(start, min(start + size, n))
        wide = max(lengths[i] for i in rows)
        batch = {k: np.zeros((len(rows), wide), np.int64) for k in ("input_ids", "attention_mask")}
        batch["tag"] = np.full((len(rows), wide), -100)
        for r, i in enumerate(rows):
            place = slice(wide - lengths[i], None) if side == "left" else slice(lengths[i])
            batch["input_ids"][r, place] = ids[i]
            batch["attention_mask"][r, place] = 1
            batch["tag"][r, place] = per_token[i]
        batch |= {"gender": gender[rows], "score": score[rows]}
        names = [["a", "b"][g] for g in gender[rows]]
        found.append({**{k: torch.from_numpy(v) for k, v in batch.items()}, "name": names})
    return found


@pytest.fixture(params=["core", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Accumulator of the rows: that of the core, or that of devices, here on the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(accumulate, "on_host", lambda home: False)
    return str(request.param)


def stored(model: Any, batches: list[dict[str, Any]], tokens: str) -> dict[str, Any]:
    """Rows and labels of the selected tokens, kept in float64, sequence by sequence."""
    columns: dict[str, list[Any]] = {k: [] for k in (*LABELS, "X", "w")}
    for batch in batches:
        call = {key: batch[key] for key in ("input_ids", "attention_mask")}
        seen = state_of(model, SITE, call).double().numpy()
        for i, mask in enumerate(batch["attention_mask"].numpy()):
            places = np.flatnonzero(mask)
            chosen = {"body": places[1:], "all": places, "first": places[:1],
                      "last": places[-1:]}[tokens]  # fmt: skip
            n = len(chosen)
            columns["X"].append(seen[i, chosen])
            columns["w"].append(np.full(n, 1 / max(n, 1)))
            columns["tag"].append(batch["tag"][i].numpy()[chosen])
            for key in ("gender", "score", "name"):
                columns[key].append(np.full(n, np.asarray(batch[key])[i]))
    return {k: np.concatenate(v) for k, v in columns.items()}


def check_moments(found: sf.Moments, X: np.ndarray, w: np.ndarray, labels: dict[str, Any]) -> None:
    """Compare with float64 moments; products were float32, 2^-24 for each of a few sums."""
    mean, cov = np.average(X, axis=0, weights=w), np.cov(X.T, ddof=0, aweights=w)
    sd = np.sqrt(np.diag(cov))
    assert found.n_rows == len(X)
    assert np.isclose(found.weight, w.sum())
    assert np.allclose(found.mean, mean, rtol=0, atol=1e-9 + 1e-12 * np.abs(mean).max())
    assert np.abs((found.covariance(ddof=0) - cov) / np.outer(sd, sd)).max() < 1e-6
    for name, z in labels.items():
        own = w * (z != -100) if z.dtype.kind == "i" else w
        columns = z[:, None]
        if z.dtype.kind != "f":
            columns = (columns == np.array(found.classes(name))).astype(float)
        cross = np.cov(X.T, columns.T, ddof=0, aweights=own)[: len(sd), len(sd) :]
        error = np.abs(found.cross_covariance(name, ddof=0) - cross) / sd[:, None]
        assert error.max() < 1e-9, name


@pytest.mark.parametrize("weight", ["token", "sequence"])
@pytest.mark.parametrize("tokens", ["body", "all", "first", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_moments_are_those_of_stored_activations(
    side: str, tokens: str, weight: str, path: str
) -> None:
    model, batches = tiny("llama"), text_batches(side=side)
    found = snn.collect(model, batches, SITE, labels=LABELS, tokens=tokens, weight=weight)
    rows = stored(model, batches, tokens)
    w = rows["w"] if weight == "sequence" else np.ones(len(rows["X"]))
    check_moments(found[SITE], rows["X"], w, {k: rows[k] for k in LABELS})
    assert found.tokens == tokens
    assert found.n_sequences == 64 - (tokens == "body") * sum(
        int((b["attention_mask"].sum(1) < 2).sum()) for b in batches
    )
    assert hooks_in(model) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_every_dtype_have_exact_moments(dtype: torch.dtype, path: str) -> None:
    """Rows that fill many blocks, with a drift, and an offset that 16 bits would not resolve."""
    rng, offset = np.random.default_rng(0), 1e4 if dtype.itemsize > 2 else 0
    X = offset + np.linspace(0, 50, 6000)[:, None] + rng.normal(size=(6000, 12))
    x, z = torch.from_numpy(X).to(dtype), rng.integers(0, 3, 6000)
    parts = (slice(10), slice(10, 3010), slice(3010, 3011), slice(3011, None))
    found = snn.collect(identity(), [{"input": x[p], "z": z[p]} for p in parts], "0", labels="z")
    check_moments(found["0"], x.double().numpy(), np.ones(6000), {"z": z})
    assert found.tokens == "all"


def test_variances_of_nearly_constant_columns_are_not_negative(path: str) -> None:
    """A variance at the rounding level never becomes negative."""
    g = torch.Generator().manual_seed(0)
    x = torch.ones(900, 6) + torch.randn(900, 6, generator=g) * torch.logspace(-9, 0, 6)
    x[:, 0] = 0.1
    found = snn.collect(identity(), map(rows_with, x.split(37)), "0", labels="z")["0"]
    variances = np.diag(found.covariance(ddof=0))
    assert (variances >= 0).all()
    assert np.allclose(variances, x.double().numpy().var(axis=0), rtol=1e-6, atol=1e-16)
    assert found.n_rows == 900


def test_moments_of_labels_are_those_of_an_update(path: str) -> None:
    """Of all kinds, with classes and missing labels in later batches; halves can be merged."""
    rng = np.random.default_rng(0)
    X = (50 + np.linspace(0, 3, 900)[:, None] + rng.normal(size=(900, 5))).astype(np.float32)
    names = np.array(["a"] * 150 + ["b"] * 150 + [None] * 300 + ["c"] * 100 + ["a"] * 200, object)
    labels = {"name": names, "z": rng.integers(0, 3, 900), "y": rng.normal(size=(900, 2)),
              "count": rng.integers(0, 9, 900)}  # fmt: skip
    options: dict[str, Any] = {"kinds": {"count": "continuous"}, "joint": [("name", "z")]}
    parts = [slice(300), slice(300, 600), slice(600, None)]
    blocks = [(X[part], {k: v[part] for k, v in labels.items()}) for part in parts]
    exact = sf.Moments(**options).update(X.astype(float), labels)

    def ours(blocks: Any) -> sf.Moments:
        batches = [{"input": torch.from_numpy(x), **z} for x, z in blocks]
        return snn.collect(identity(), batches, "0", labels=list(labels), **options)["0"]

    host = sf.Moments(**options).update(*blocks[2])
    updated = ours(blocks[:2]).update(*blocks[2])
    for found in (ours(blocks), ours(blocks[:2]) + host, host + ours(blocks[:2]), updated):
        assert found.variables == exact.variables
        assert np.allclose(found.mean, exact.mean, rtol=1e-12)
        assert np.allclose(found.covariance(), exact.covariance(), rtol=0, atol=3e-6)
        for name in (*labels, ("name", "z")):
            cross, order = found.cross_covariance(name), slice(None)
            if exact.variables[name] != "continuous":
                assert found.class_counts(name) == exact.class_counts(name)
                order = [found.classes(name).index(c) for c in exact.classes(name)]
            assert np.allclose(cross[:, order], exact.cross_covariance(name), atol=1e-7)
    a, b = (sf.splince(m, erase="z", keep="y") for m in (updated, exact))
    assert np.allclose(a.matrix(), b.matrix(), atol=1e-5)


def test_inputs_of_modules_and_channels_have_moments() -> None:
    conv, x = (
        torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU()),
        torch.randn(10, 3, 8, 8),
    )
    found = snn.collect(conv, [rows_with(x)], "1", labels="z", side="input", feature_dim=1)
    rows = conv[0](x).movedim(1, -1).reshape(-1, 6).detach().double().numpy()
    check_moments(found["1"], rows, np.ones(len(rows)), {"z": np.repeat(np.arange(10) % 2, 36)})
    assert found.n_sequences == 10


def test_evaluation_mode_is_restored_and_dropout_is_off() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).train()
    model[1].eval()
    found = snn.collect(model, [rows_with(torch.randn(20, 4))], ["0", "1"], labels="z")
    assert np.array_equal(found["0"].covariance(), found["1"].covariance())
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_a_shared_module_gives_every_call() -> None:
    block = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(block, torch.nn.Tanh(), block)
    found = snn.collect(model, [rows_with(torch.randn(8, 4))] * 3, "0", labels="z")
    assert found["0"].n_rows == 48
    assert found.sites[0].calls == 6


def test_compiled_models_run_eagerly() -> None:
    model, batches = tiny("llama"), text_batches(n=16)
    plain, found = (
        snn.collect(one, batches, SITE, labels="gender")
        for one in (model, torch.compile(model, backend="eager"))
    )
    assert np.array_equal(found[SITE].covariance(), plain[SITE].covariance())


def test_rows_of_a_recomputation_are_not_counted() -> None:
    model, batch = tiny("llama"), text_batches(n=8)[0]
    older = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", older)()
    before = hooks_in(model)

    def forward(model: Any, batch: Any) -> None:
        call = {k: batch[k] for k in ("input_ids", "attention_mask")}
        with torch.enable_grad():
            model.train()(**call, use_cache=False).logits.sum().backward()

    found = snn.collect(model, [batch], SITE, labels="gender", forward=forward)
    plain = snn.collect(model, [batch], SITE, labels="gender")
    assert found.sites[0].calls == 1
    assert found[SITE].n_rows == plain[SITE].n_rows
    assert hooks_in(model) == before  # those that a call with gradients adds are gone, too


def test_a_site_without_selected_rows_has_empty_moments(path: str) -> None:
    model = tiny("llama")
    one = {"input_ids": torch.tensor([[5], [6]]), "attention_mask": torch.tensor([[1], [0]]),
           "gender": torch.tensor([0, 1])}  # fmt: skip
    found = snn.collect(model, [one], SITE, labels="gender")
    assert (found[SITE].n_rows, found.n_sequences, found.sites[0].calls) == (0, 0, 1)
    both, other = (
        snn.collect(model, [*first, *text_batches(n=8)], SITE, labels="gender")[SITE].n_rows
        for first in ([one], [])
    )
    assert both == other > 0


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1023, 1024, 4000])
@pytest.mark.parametrize("size", [512, 8192])
def test_any_row_that_is_not_finite_is_named(
    bad: int, size: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulate, "_BUFFER_ROWS", (4096, 4096))
    x = torch.randn(8192, 8)
    x[bad, 3] = torch.nan if bad % 2 else torch.inf
    match = f"'0' gave NaN or infinity in row {bad % size} of batch {bad // size} "
    with pytest.raises(NonFiniteError, match=match):
        snn.collect(identity(), map(rows_with, x.split(size)), "0", labels="z")


def test_a_model_that_overflows_is_named_with_its_dtype(path: str) -> None:
    half = torch.nn.Sequential(torch.nn.Linear(4, 4)).half()
    half[0].weight.data.fill_(60.0)
    with pytest.raises(NonFiniteError, match="float16"):
        snn.collect(half, [rows_with(torch.full((8, 4), 6e4).half())], "0", labels="z")


def test_states_that_do_not_fit_are_an_error_before_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accumulate, "free_memory", lambda device: 3000)
    model = tiny("llama")
    with pytest.raises(snn.NotEnoughMemoryError, match="2 sites of 16 features take 4,096 bytes"):
        snn.collect(model, text_batches(), "model.layers.*", labels="gender")
    assert hooks_in(model) == 0
    snn.collect(model, text_batches(), "model.norm", labels="gender")


def test_products_that_are_rounded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of the shapes of a block, per width; small ones may be taken otherwise."""
    exact, seen = torch.mm, []

    def rounded(a: Any, b: Any, **options: Any) -> Any:
        seen.append((tuple(a.shape), tuple(b.shape)))
        if a.numel() < 64 * 600:
            return exact(a, b, **options)
        return exact(a.bfloat16().float(), b.bfloat16().float(), **options)

    monkeypatch.setattr(torch, "mm", rounded)
    monkeypatch.setattr(accumulate, "on_host", lambda home: False)
    monkeypatch.setattr(accumulate, "_BUFFER_ROWS", (4096, 4096))

    def collect(x: torch.Tensor) -> Any:
        return snn.collect(identity(), [rows_with(x)], "0", labels="z")["0"]

    collect(torch.randn(300, 64))
    assert seen[:2] == [((64, 300), (300, 64))] * 2  # the probe and the product
    with pytest.raises(InputError, match="TF32"):
        collect(torch.randn(4000, 64))
    assert collect(torch.randn(4000, 64).double()).n_rows == 4000  # doubles are not concerned


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_rows_are_taken_without_autocast(weight: str, path: str) -> None:
    """The model runs under autocast of the caller; the products of moments are float32."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Identity())
    batch = rows_with(torch.randn(400, 6, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = model(batch["input"])
        assert states.dtype == torch.bfloat16  # control: autocast is on
        found = snn.collect(model, [batch], "1", labels="z", weight=weight)["1"]
    exact = np.cov(states.double().numpy().T, ddof=0)
    assert np.allclose(found.covariance(ddof=0), exact, atol=1e-6 * np.abs(exact).max())


def test_invalid_arguments_of_collect_are_errors() -> None:
    model, batches, one = tiny("llama"), text_batches(n=8), "one label per sequence"
    without_head = {"at": "lm_head", "forward": lambda m, b: m.model(input_ids=b["input_ids"])}
    of_other_kind = {**batches[0], "gender": torch.rand(8)}
    for error, match, change in (
        (InputError, "is empty", {"batches": iter(())}),
        (InputError, "weight is", {"weight": "row"}),
        *((InputError, "device is", {"device": wrong}) for wrong in ("gpu9", 1.5, "cuda:99")),
        *((InputError, "skip_ids is", {"skip_ids": wrong}) for wrong in ([1.5], 3)),
        (InputError, "labels is None", {"labels": None}),
        (InputError, "unknown", {"unknown": True}),
        (snn.SiteError, "at holds None", {"at": None}),
        (LabelError, one, {"labels": lambda batch: {"z": torch.arange(7)}}),
        (LabelError, one, {"labels": lambda batch: {"z": torch.zeros(8, 3).long()}}),
        (LabelError, "classes in earlier", {"batches": [*batches, of_other_kind]}),
        (snn.NeverCalledError, "never ran", without_head),
    ):
        with pytest.raises(error, match=match):
            snn.collect(model, **{"batches": batches, "at": SITE, "labels": "gender", **change})
    assert hooks_in(model) == 0


# --- together ------------------------------------------------------------------------------------


def test_collections_add_and_survive_a_file(tmp_path: Path) -> None:
    model, at, batches = tiny("llama"), "model.layers.*", text_batches(n=64)
    whole = snn.collect(model, batches, at, labels=LABELS)
    parts = [snn.collect(model, batches[i::2], at, labels=LABELS) for i in (0, 1)]
    both = parts[0] + parts[1]
    file = tmp_path / "a.safetensors"
    whole.save(file)
    loaded = snn.Collected.load(file)
    assert list(loaded) == list(whole)
    assert str(loaded) == str(whole) == "Collected(2 sites, tokens body)"
    assert loaded.sites == whole.sites
    assert both.n_sequences == loaded.n_sequences == whole.n_sequences == 64
    for name in whole:
        assert np.allclose(both[name].covariance(), whole[name].covariance(), atol=1e-6)
        assert np.array_equal(loaded[name].covariance(), whole[name].covariance())
    other = snn.collect(model, batches, at, labels=LABELS, tokens="last")
    raises(
        (sf.exceptions.IncompatibleMomentsError, "different sites or", lambda: whole + other),
        (InputError, "only to a Collected", lambda: whole + whole[SITE]),
        (sf.exceptions.FileFormatError, "collected", lambda: snn.Erasers.load(file)),
        (KeyError, "the sites are", lambda: whole["model.norm"]),
    )


def test_one_pass_fits_with_the_options_of_the_method_and_warns_of_several_sites() -> None:
    found = snn.collect(tiny("llama"), text_batches(), SITE, labels="gender")
    fits = {
        "its own": found.erasers(functools.partial(sf.leace, shrinkage=0.5), erase="gender"),
        "given": found.erasers(sf.leace, erase="gender", shrinkage=0.5),
        "plain": found.erasers(sf.leace, erase="gender"),  # control
    }
    matrices = {name: erasers[SITE].matrix() for name, erasers in fits.items()}
    assert np.array_equal(matrices["its own"], matrices["given"])
    assert not np.array_equal(matrices["its own"], matrices["plain"])
    several = snn.collect(tiny("llama"), text_batches(), "model.layers.*", labels="gender")
    with pytest.warns(snn.OnePassWarning, match="fit_layers"):
        assert not several.erasers(sf.leace, erase="gender").sequential
    with pytest.raises(sf.exceptions.UnknownVariableError, match=rf"at the site '{SITE}'"):
        found.erasers(sf.leace, erase="age")
    with pytest.raises(InputError, match="no shrinkge=; did you mean shrinkage="):
        found.erasers(sf.leace, erase="gender", shrinkge=1)


# --- forms of batches ----------------------------------------------------------------------------


def test_pairs_of_inputs_and_labels_equal_mappings() -> None:
    """Batches of a DataLoader: moments and erasers equal those from mappings."""
    x, z = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    mappings, sites = [{"input": x, "z": z, "other": 3}], ["0", "2"]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, z), batch_size=60)

    def own(batch: Any) -> Any:
        return {"z": z}

    def collected(batches: Any, labels: Any, forward: Any = None) -> list[Any]:
        found = snn.collect(model, batches, sites, labels=labels, forward=forward)
        assert all(moments.class_counts("z") == {0: 30, 1: 30} for moments in found.values())
        return [moments.covariance() for moments in found.values()]

    expected = collected(mappings, "z")
    for arguments in (
        (loader, "z"),
        ([(x, z)], ["z"]),
        ([(x, {"z": z, "other": z})], "z"),
        ([({"input": x}, {"z": z})], "z"),
        ([(x, z)], lambda batch: {"z": batch[1]}),
        ([x], own),
        ([(x,)], own),
        ([(x, z, 3)], own, lambda model, batch: model(batch[0])),
    ):
        np.testing.assert_array_equal(collected(*arguments), expected)
    # Tuples are the arguments of a model that takes several.
    pair = module(lambda self, a, b: self.whole(a + b), whole=model)
    (found,) = snn.collect(pair, [(x / 2, x / 2)], "whole.2", labels=own).values()
    np.testing.assert_array_equal(found.covariance(), expected[1])
    paired, mapped = (
        [p.matrix() for p in snn.fit_layers(model, batches, sites, "leace", erase="z").values()]
        for batches in (loader, mappings)
    )
    np.testing.assert_array_equal(paired, mapped)
    pairs = r"pairs \(inputs, labels\)"
    for batch, labels, error, match in (
        ((x, z), ["z", "y"], LabelError, pairs),
        ((x, z, z), "z", LabelError, pairs),
        (x, "z", LabelError, pairs),
        ({"input": x}, "z", LabelError, "has no labels"),
        ((x,), "z", LabelError, "function of the batch"),
        ((x,), lambda batch: 3, LabelError, "must return a mapping"),
        ((x, z, z), own, TypeError, "positional arguments"),
    ):
        with pytest.raises(error, match=match):
            collected([batch], labels)
