"""nn.collection, nn.accumulate, nn.running: moments of activations.

The reference is two passes over stored activations.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import hooks_in, identity, module, state_of, tiny  # noqa: E402
from splince_fast import nn as snn  # noqa: E402
from splince_fast.nn import accumulate  # noqa: E402
from splince_fast.nn.collection import Collector  # noqa: E402

SITE = "model.layers.0"


def text_batches(
    n: int = 64, size: int = 16, side: str = "left", seed: int = 0
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
        batch = {
            "input_ids": np.zeros((len(rows), wide), np.int64),
            "attention_mask": np.zeros((len(rows), wide), np.int64),
            "tag": np.full((len(rows), wide), -100),
        }
        for r, i in enumerate(rows):
            place = slice(wide - lengths[i], None) if side == "left" else slice(lengths[i])
            batch["input_ids"][r, place] = ids[i]
            batch["attention_mask"][r, place] = 1
            batch["tag"][r, place] = per_token[i]
        tensors: dict[str, Any] = {k: torch.from_numpy(v) for k, v in batch.items()}
        tensors["gender"] = torch.from_numpy(gender[start : start + size])
        tensors["score"] = torch.from_numpy(score[start : start + size])
        tensors["name"] = [["a", "b"][g] for g in gender[start : start + size]]
        found.append(tensors)
    return found


LABELS = ["gender", "score", "tag", "name"]


@pytest.fixture(params=["core", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which accumulator takes the rows: the core's, or that of devices, here on the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(accumulate, "on_host", lambda home: False)
    return str(request.param)


def stored(model: Any, batches: list[dict[str, Any]], site: str, tokens: str) -> dict[str, Any]:
    """Rows and labels of the selected tokens, kept in float64, sequence by sequence."""
    rows, labels, weights = [], {k: [] for k in LABELS}, []
    for batch in batches:
        call = {key: batch[key] for key in ("input_ids", "attention_mask")}
        seen = state_of(model, site, call)
        for i in range(len(batch["input_ids"])):
            places = np.flatnonzero(batch["attention_mask"][i].numpy())
            chosen = {"body": places[1:], "all": places, "first": places[:1],
                      "last": places[-1:]}[tokens]  # fmt: skip
            own = seen[i, chosen].double().numpy()
            rows.append(own)
            weights.append(np.full(len(own), 1 / max(len(own), 1)))
            for key in ("gender", "score"):
                labels[key].append(np.full(len(own), float(batch[key][i])))
            labels["name"].append(np.full(len(own), batch["name"][i]))
            labels["tag"].append(batch["tag"][i].numpy()[chosen])
    joined = {k: np.concatenate(v) for k, v in labels.items()}
    return {"X": np.concatenate(rows), "w": np.concatenate(weights), **joined}


def check_moments(
    found: sf.Moments, X: np.ndarray, w: np.ndarray, labels: dict[str, Any], rounding: float = 1e-9
) -> None:
    """Compare with float64 moments; products were float32, 2^-24 for each of a few sums.

    `rounding` is larger where the rows themselves were computed in another order in float32.
    """
    total = w.sum()
    mean = w @ X / total
    centred = X - mean
    cov = (centred.T * w) @ centred / total
    sd = np.sqrt(np.diag(cov))
    assert found.n_rows == len(X)
    assert np.isclose(found.weight, total)
    assert np.allclose(found.mean, mean, rtol=0, atol=1e-9 + 1e-12 * np.abs(mean).max())
    assert np.abs((found.covariance(ddof=0) - cov) / np.outer(sd, sd)).max() < 1e-6
    for name, z in labels.items():
        shown = np.ones(len(z), bool)
        if z.dtype.kind == "i":
            shown = z != -100
        if z.dtype.kind == "f":
            columns = z[:, None]
        else:
            columns = (z[:, None] == np.array(found.classes(name))).astype(float)
        own = w * shown
        c = columns - own @ columns / own.sum()
        cross = ((X - own @ X / own.sum()).T * own) @ c / own.sum()
        error = np.abs(found.cross_covariance(name, ddof=0) - cross) / sd[:, None]
        assert error.max() < rounding, name


@pytest.mark.parametrize("weight", ["token", "sequence"])
@pytest.mark.parametrize("tokens", ["body", "all", "first", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_moments_are_those_of_stored_activations(
    side: str, tokens: str, weight: str, path: str
) -> None:
    model = tiny("llama")
    batches = text_batches(side=side)
    found = snn.collect(model, batches, SITE, labels=LABELS, tokens=tokens, weight=weight)
    rows = stored(model, batches, SITE, tokens)
    w = rows["w"] if weight == "sequence" else np.ones(len(rows["X"]))
    typed = {k: rows[k].astype(int) if k == "gender" else rows[k] for k in LABELS}
    check_moments(found[SITE], rows["X"], w, typed)
    assert found.tokens == tokens
    assert hooks_in(model) == 0


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_size_of_batches_does_not_matter(size: int, path: str) -> None:
    model = tiny("llama")
    rows = stored(model, text_batches(size=64), SITE, "body")
    found = snn.collect(model, text_batches(size=size), SITE, labels=["score"])
    check_moments(found[SITE], rows["X"], np.ones(len(rows["X"])), {"score": rows["score"]}, 1e-7)
    assert found.n_sequences == 64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_every_dtype_have_exact_moments(dtype: torch.dtype, path: str) -> None:
    """Rows that fill many blocks, with a drift, and an offset that 16 bits would not resolve."""
    rng, offset = np.random.default_rng(0), 1e4 if dtype.itemsize > 2 else 0
    X = offset + np.linspace(0, 50, 6000)[:, None] + rng.normal(size=(6000, 12))
    x, z = torch.from_numpy(X).to(dtype), rng.integers(0, 3, 6000)
    batches = [{"input": x[i : i + n], "z": z[i : i + n]}
               for i, n in ((0, 10), (10, 3000), (3010, 1), (3011, 2989))]  # fmt: skip
    found = snn.collect(identity(), batches, "0", labels="z")
    check_moments(found["0"], x.double().numpy(), np.ones(6000), {"z": z})
    assert found.tokens == "all"


def test_variances_of_nearly_constant_columns_are_not_negative(path: str) -> None:
    """A variance at the rounding level never becomes negative."""
    g = torch.Generator().manual_seed(0)
    x = torch.ones(900, 6) + torch.randn(900, 6, generator=g) * torch.logspace(-9, 0, 6)
    x[:, 0] = 0.1
    model = identity()
    batches = [{"input": x[i : i + 37], "z": np.arange(len(x[i : i + 37])) % 2}
               for i in range(0, 900, 37)]  # fmt: skip
    found = snn.collect(model, batches, "0", labels="z")["0"]
    variances = np.diag(found.covariance(ddof=0))
    exact = x.double().numpy().var(axis=0)
    assert (variances >= 0).all()
    assert np.allclose(variances, exact, rtol=1e-6, atol=1e-16)
    assert found.n_rows == 900


def test_collected_moments_merge_with_other_moments(path: str) -> None:
    rng = np.random.default_rng(1)
    X, z, y = (
        rng.normal(size=(400, 8)).astype(np.float32),
        rng.integers(0, 3, 400),
        rng.normal(size=400),
    )
    model = identity()

    def batch(part: slice) -> dict[str, Any]:
        return {"input": torch.from_numpy(X[part]), "z": z[part], "y": y[part]}

    half = slice(0, 200), slice(200, 400)
    ours = snn.collect(model, [batch(half[0])], "0", labels=["z", "y"])["0"]
    host = sf.Moments().update(X[half[1]], {"z": z[half[1]], "y": y[half[1]]})
    whole = sf.Moments().update(X.astype(np.float64), {"z": z, "y": y})
    for merged in (ours + host, host + ours):
        assert np.allclose(merged.covariance(), whole.covariance(), atol=1e-6)
        assert np.allclose(merged.cross_covariance("y"), whole.cross_covariance("y"), atol=1e-7)
    a, b = (sf.splince(m, erase="z", keep="y") for m in (ours + host, whole))
    assert np.allclose(a.matrix(), b.matrix(), atol=1e-5)
    ours.update(X[half[1]], {"z": z[half[1]], "y": y[half[1]]})
    assert np.allclose(ours.covariance(), whole.covariance(), atol=1e-6)


def test_joint_cells_and_kinds_are_arguments_of_collect(path: str) -> None:
    batch = {"input": torch.randn(60, 4), "a": np.arange(60) % 2, "b": np.arange(60) % 3}
    joint, kinds = [("a", "b")], {"b": "continuous"}
    found = snn.collect(identity(), [batch], "0", labels=["a", "b"], joint=joint)["0"]
    assert len(found.classes(("a", "b"))) == 6
    numbers = snn.collect(identity(), [batch], "0", labels=["b"], kinds=kinds)
    assert numbers["0"].variables == kinds


def test_classes_and_missing_labels_may_appear_later(path: str) -> None:
    model = identity()
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(300, 5, generator=g) for _ in range(3)]
    names = [["a"] * 150 + ["b"] * 150, [None] * 300, ["c"] * 100 + ["a"] * 200]
    batches = [{"input": x, "z": n} for x, n in zip(parts, names, strict=True)]
    found = snn.collect(model, batches, "0", labels="z")["0"]
    want = sf.Moments()
    for x, n in zip(parts, names, strict=True):
        want.update(x.double().numpy(), {"z": n})
    assert found.classes("z") == want.classes("z")
    assert found.class_counts("z") == want.class_counts("z")
    assert np.allclose(found.cross_covariance("z"), want.cross_covariance("z"), atol=1e-12)


def test_inputs_of_modules_and_channels_have_moments() -> None:
    conv = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU())
    x = torch.randn(10, 3, 8, 8)
    z = np.arange(10) % 2
    found = snn.collect(conv, [{"input": x, "z": z}], "1", labels="z", side="input", feature_dim=1)
    rows = conv[0](x).movedim(1, -1).reshape(-1, 6).detach().double().numpy()
    check_moments(found["1"], rows, np.ones(len(rows)), {"z": np.repeat(z, 36)})
    assert found.n_sequences == 10


def test_evaluation_mode_is_restored_and_dropout_is_off() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).train()
    model[1].eval()
    x, z = torch.randn(20, 4), torch.arange(20) % 2
    found = snn.collect(model, [{"input": x, "z": z}], ["0", "1"], labels="z")
    assert np.array_equal(found["0"].covariance(), found["1"].covariance())
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_a_shared_module_gives_every_call() -> None:
    block = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(block, torch.nn.Tanh(), block)
    found = snn.collect(
        model, [{"input": torch.randn(8, 4), "z": np.arange(8) % 2}] * 3, "0", labels="z"
    )
    assert found["0"].n_rows == 48
    assert found.sites[0].calls == 6
    assert " 6 " in str(found)


def test_compiled_models_run_eagerly() -> None:
    model = tiny("llama")
    batches = text_batches(n=16)
    plain = snn.collect(model, batches, SITE, labels="gender")
    compiled = torch.compile(model, backend="eager")
    found = snn.collect(compiled, batches, SITE, labels="gender")
    assert np.array_equal(found[SITE].covariance(), plain[SITE].covariance())


def test_rows_of_a_recomputation_are_not_counted() -> None:
    model = tiny("llama").train()
    older = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", older)()
    batch, before = text_batches(n=8)[0], hooks_in(model)
    collector = Collector(
        model, SITE, labels="gender", tokens="body", side="output", feature_dim=-1,
        output=None, heads=None, weight="token", skip_ids=(), device="model", options={},
    )  # fmt: skip
    with collector.attached(model):
        with collector.batch_scope(batch):
            out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                        use_cache=False)  # fmt: skip
        out.logits.sum().backward()
    assert collector.calls[SITE] == 1
    assert hooks_in(model) == before  # those that a call with gradients adds are gone, too


# --- refusals ------------------------------------------------------------------------------------


def test_a_site_without_selected_rows_has_empty_moments(path: str) -> None:
    model = tiny("llama")
    one = {"input_ids": torch.tensor([[5], [6]]), "attention_mask": torch.tensor([[1], [0]]),
           "gender": torch.tensor([0, 1])}  # fmt: skip
    found = snn.collect(model, [one], SITE, labels="gender")
    assert found[SITE].n_rows == 0
    assert found.n_sequences == 0
    assert found.sites[0].calls == 1
    both = snn.collect(model, [one, *text_batches(n=8)], SITE, labels="gender")
    assert (
        both[SITE].n_rows
        == snn.collect(model, text_batches(n=8), SITE, labels="gender")[SITE].n_rows
    )


def test_rows_of_all_tokens_on_one_axis_are_those_of_sequences() -> None:
    """As routers of experts receive them."""
    model, batches = tiny("mixtral"), text_batches()
    block = next(n for n, m in model.named_modules() if "Sparse" in type(m).__name__)
    flat, rows = (
        snn.collect(model, batches, at, labels=["name"], side="input")[at]
        for at in (f"{block}.gate", block)
    )
    assert flat.n_rows == rows.n_rows
    assert np.array_equal(flat.mean, rows.mean)
    assert np.array_equal(flat.cross_covariance("name"), rows.cross_covariance("name"))
    router = f"{block}.gate"
    erasers = snn.fit_layers(model, batches, router, "leace", erase="gender", side="input")
    change = next(r for r in snn.effect(model, erasers, batches) if r["metric"] == "change")
    assert change["n"] == flat.n_rows


def test_non_finite_rows_are_named(path: str) -> None:
    x = torch.randn(700, 4)
    x[650, 2] = float("inf")
    model = identity()
    batches = [{"input": torch.randn(9, 4), "z": np.arange(9)}, {"input": x, "z": np.arange(700)}]
    with pytest.raises(
        sf.exceptions.NonFiniteError, match=r"'0' gave NaN or infinity in row 650 of batch 1"
    ):
        snn.collect(model, batches, "0", labels="z", kinds={"z": "continuous"})
    half = torch.nn.Sequential(torch.nn.Linear(4, 4)).half()
    big = {"input": torch.full((8, 4), 6e4).half(), "z": np.arange(8) % 2}
    half[0].weight.data.fill_(60.0)
    with pytest.raises(sf.exceptions.NonFiniteError, match="float16"):
        snn.collect(half, [big], "0", labels="z")


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
    model = identity()

    def collect(n: int) -> Any:
        return snn.collect(model, [{"input": torch.randn(n, 64), "z": np.arange(n) % 2}], "0",
                           labels="z")  # fmt: skip

    collect(300)
    assert seen[:2] == [((64, 300), (300, 64))] * 2  # the probe and the product
    with pytest.raises(sf.exceptions.InputError, match="TF32"):
        collect(4000)
    # Doubles are not concerned.
    double = {"input": torch.randn(4000, 64).double(), "z": np.arange(4000) % 2}
    assert snn.collect(model, [double], "0", labels="z")["0"].n_rows == 4000


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_rows_are_taken_without_autocast(weight: str, path: str) -> None:
    """The model runs under it as its caller wants, and products are float32."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Identity())
    g = torch.Generator().manual_seed(0)
    batch = {"input": torch.randn(400, 6, generator=g), "z": np.arange(400) % 2}
    batch["input"].requires_grad_(False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = model(batch["input"])
        assert states.dtype == torch.bfloat16  # control: autocast is on
        found = snn.collect(model, [batch], "1", labels="z", weight=weight)["1"]
    exact = np.cov(states.double().numpy().T, ddof=0)
    assert np.allclose(found.covariance(ddof=0), exact, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"batches": iter(())}, sf.exceptions.InputError, "is empty"),
        ({"weight": "row"}, sf.exceptions.InputError, "weight is"),
        ({"device": "gpu9"}, sf.exceptions.InputError, "device is"),
        ({"device": 1.5}, sf.exceptions.InputError, "device is"),
        ({"device": "cuda:99"}, sf.exceptions.InputError, "device is"),
        ({"skip_ids": [1.5]}, sf.exceptions.InputError, "skip_ids is"),
        ({"skip_ids": 3}, sf.exceptions.InputError, "skip_ids is"),
        ({"labels": None}, sf.exceptions.InputError, "labels is None"),
        ({"unknown": True}, sf.exceptions.InputError, "unknown"),
        ({"at": None}, snn.SiteError, "at holds None"),
        ({"gender": torch.arange(7)}, sf.exceptions.LabelError, "one label per sequence"),
        ({"gender": torch.zeros(8, 3).long()}, sf.exceptions.LabelError, "one label per sequence"),
        (
            {"at": "lm_head", "forward": lambda m, b: m.model(input_ids=b["input_ids"])},
            snn.NeverCalledError,
            "never ran",
        ),
    ],
)
def test_invalid_arguments_of_collect_are_errors(
    change: dict[str, Any], error: Any, match: str
) -> None:
    model, (batch,) = tiny("llama"), text_batches(n=8)
    if "gender" in change:
        batch["gender"] = change["gender"]
        change = {}
    with pytest.raises(error, match=match):
        snn.collect(model, **{"batches": [batch], "at": SITE, "labels": "gender", **change})
    assert hooks_in(model) == 0


def test_a_variable_of_another_kind_in_a_later_batch_is_an_error() -> None:
    batches = [{"input": torch.randn(4, 2), "z": z} for z in ([0, 1, 0, 1], [0.5, 1.0, 2.0, 3.0])]
    with pytest.raises(sf.exceptions.LabelError, match="classes in earlier"):
        snn.collect(identity(), batches, "0", labels="z")


# --- together ------------------------------------------------------------------------------------


def test_collections_add_and_survive_a_file(tmp_path: Path) -> None:
    model = tiny("llama")
    at = "model.layers.*"
    whole = snn.collect(model, text_batches(n=64), at, labels=LABELS)
    parts = [snn.collect(model, text_batches(n=64)[i::2], at, labels=LABELS) for i in (0, 1)]
    both = parts[0] + parts[1]
    assert both.n_sequences == whole.n_sequences == 64
    for name in whole:
        assert np.allclose(both[name].covariance(), whole[name].covariance(), atol=1e-6)
    whole.save(tmp_path / "a.safetensors")
    loaded = snn.Collected.load(tmp_path / "a.safetensors")
    assert list(loaded) == list(whole)
    assert str(loaded) == str(whole)
    for name in whole:
        assert np.array_equal(loaded[name].covariance(), whole[name].covariance())
    other = snn.collect(model, text_batches(n=64), at, labels=LABELS, tokens="last")
    with pytest.raises(
        sf.exceptions.IncompatibleMomentsError, match="different sites or arguments"
    ):
        whole + other
    with pytest.raises(sf.exceptions.FileFormatError):
        snn.Erasers.load(tmp_path / "a.safetensors")
    with pytest.raises(KeyError, match="the sites are"):
        whole["model.norm"]


def test_options_of_the_method_are_passed_on() -> None:
    """As ``functools.partial``, which has no name; the same bits as with the option itself."""
    found = snn.collect(tiny("llama"), text_batches(), SITE, labels="gender")
    of_its_own = found.erasers(functools.partial(sf.leace, shrinkage=0.5), erase="gender")
    given = found.erasers(sf.leace, erase="gender", shrinkage=0.5)
    assert np.array_equal(of_its_own[SITE].matrix(), given[SITE].matrix())
    plain = found.erasers(sf.leace, erase="gender")
    assert not np.array_equal(of_its_own[SITE].matrix(), plain[SITE].matrix())  # control


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"erase": "age"}, sf.exceptions.UnknownVariableError, r"at the site 'model\.layers\.0'"),
        (
            {"shrinkge": 1},
            sf.exceptions.InputError,
            "leace takes no shrinkge=; did you mean shrinkage=",
        ),
    ],
)
def test_one_pass_over_several_sites_warns(options: Any, error: Any, match: str) -> None:
    found = snn.collect(tiny("llama"), text_batches(), "model.layers.*", labels="gender")
    with pytest.warns(snn.OnePassWarning, match="fit_layers"):
        erasers = found.erasers(sf.leace, erase="gender")
    assert not erasers.sequential
    with pytest.raises(error, match=match), pytest.warns(snn.OnePassWarning):
        found.erasers(sf.leace, **{"erase": "gender", **options})


def test_cuda_states_equal_those_of_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model, batches = tiny("llama"), text_batches()
    plain = snn.collect(model, batches, "model.layers.*", labels=LABELS)
    model.cuda()
    found = snn.collect(model, batches, "model.layers.*", labels=LABELS)
    for name in plain:
        scale = np.abs(plain[name].covariance()).max()
        assert np.allclose(found[name].covariance(), plain[name].covariance(), atol=1e-5 * scale)


# --- pairs (inputs, labels) -----------------------------------------------------------------------


def test_pairs_of_inputs_and_labels_equal_mappings() -> None:
    """As data loaders give them: the same moments and erasers as from mappings."""
    x, z = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    expected = snn.collect(model, [{"input": x, "z": z}], ["0", "2"], labels="z")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, z), batch_size=60)
    alternatives: list[tuple[Any, ...]] = [
        (loader, "z"),
        ([(x, z)], ["z"]),
        ([(x, {"z": z, "other": z})], "z"),
        ([({"input": x}, {"z": z})], "z"),
        ([(x, z)], lambda batch: {"z": batch[1]}),
        ([x], lambda batch: {"z": z}),
        ([(x,)], lambda batch: {"z": z}),
        ([{"input": x, "z": z, "other": 3}], "z"),
        ([(x, z, 3)], lambda batch: {"z": batch[1]}, lambda model, batch: model(batch[0])),
    ]
    for batches, labels, *forward in alternatives:
        (run,) = forward or [None]
        found = snn.collect(model, batches, ["0", "2"], labels=labels, forward=run)
        for site in ("0", "2"):
            np.testing.assert_array_equal(found[site].covariance(), expected[site].covariance())
            assert found[site].class_counts("z") == {0: 30, 1: 30}
    erasers = snn.fit_layers(model, [(x, z)], ["0", "2"], sf.leace, erase="z")
    mapped = snn.fit_layers(model, [{"input": x, "z": z}], ["0", "2"], sf.leace, erase="z")
    for site in ("0", "2"):
        np.testing.assert_array_equal(erasers[site].matrix(), mapped[site].matrix())


def test_pairs_that_cannot_be_read() -> None:
    x, z = torch.randn(60, 3), torch.arange(60) % 2
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    for batch, labels in (((x, z), ["z", "y"]), ((x, z, z), "z"), (x, "z"), ((x, x, z), "z")):
        with pytest.raises(sf.exceptions.LabelError, match=r"pairs \(inputs, labels\)"):
            snn.collect(model, [batch], "0", labels=labels)
    for batch, labels, message in (
        ({"input": x}, "z", "has no labels"),
        ((x,), "z", "function of the batch"),
        ((x,), lambda batch: z, "must return a mapping"),
    ):
        with pytest.raises(sf.exceptions.LabelError, match=message):
            snn.collect(model, [batch], "0", labels=labels)
    with pytest.raises(
        sf.exceptions.InputError, match=r"3 entries and Sequential\.forward takes 1"
    ):
        snn.collect(model, [(x, z, z)], "0", labels=lambda batch: {"z": batch[1]})


def test_tuples_are_positional_arguments_of_a_model_that_takes_them() -> None:
    x, z = torch.randn(60, 3), torch.arange(60) % 2
    model = module(lambda self, a, b: self.linear(a + b), linear=torch.nn.Linear(3, 4))
    found = snn.collect(model, [(x, x)], "linear", labels=lambda batch: {"z": z})
    expected = np.cov(model.linear(2 * x).detach().double().numpy().T)
    np.testing.assert_allclose(found["linear"].covariance(), expected, rtol=1e-5, atol=1e-6)
