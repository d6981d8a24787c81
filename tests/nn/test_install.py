"""nn.installed, nn.calls: erasers inside models: installation, tokens, generation, gradients."""

from __future__ import annotations

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import (
    changed,
    hooks_in,
    identity,
    inputs,
    is_erased,
    labelled,
    module,
    outputs,
    projection,
    raises,
    refused,
    rows_with,
    state_of,
    tiny,
)
from splince_fast import nn as snn
from splince_fast.exceptions import InputError, NothingErasedWarning

LAYERS = "model.layers.*"


def test_inputs_are_erased_by_position_and_by_keyword() -> None:
    p, x = projection(), torch.randn(3, 16)
    # Of several inputs by position the first is erased.
    pair = module(lambda self, x: self.inner(x, x), inner=torch.nn.Bilinear(16, 16, 3))
    found = outputs(pair, {"x": x}, {"inner": p}, side="input")
    assert torch.allclose(found, pair.inner(snn.Eraser(p)(x), x), atol=1e-5)
    llama, site, batch = tiny("llama"), "model.layers.1.self_attn", inputs("llama")
    with snn.install(llama, {site: p}, tokens="all", side="input") as installed:
        erased = outputs(llama, batch)  # which calls the site by keywords only
    assert installed.counts == {site: 1}
    assert not torch.equal(erased, outputs(llama, batch))


def test_an_output_wider_than_its_weights_is_erased() -> None:
    """Weights do not show the width of a module that joins outputs."""
    rnn = torch.nn.LSTM(5, 8, bidirectional=True, batch_first=True)
    model = module(lambda self, input: self.rnn(input)[0], rnn=rnn)
    batch = rows_with(torch.randn(40, 3, 5))
    erasers = snn.fit_layers(model, [batch], "rnn", sf.leace, erase="z")
    call = {"input": batch["input"]}
    assert is_erased(outputs(model, call, erasers), outputs(model, call), erasers["rnn"])


# --- life of a handle ----------------------------------------------------------------------------


def live_tensors() -> int:
    """Number of tensors that the garbage collector tracks."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    return sum(type(o) in kinds for o in gc.get_objects())


def test_leaving_restores_everything() -> None:
    model, p, batch = tiny("llama"), projection(), inputs("llama")
    model.model.norm.register_forward_hook(lambda m, a, o: None)
    before, weights = hooks_in(model), {k: v.clone() for k, v in model.state_dict().items()}
    reference, tensors = outputs(model, batch), live_tensors()
    for i in range(200):
        with pytest.raises(ZeroDivisionError), snn.install(model, {"model.norm": p}):  # noqa: PT012
            if i % 50 == 0:
                model(**batch)
            raise ZeroDivisionError
    assert live_tensors() <= tensors + 2
    assert hooks_in(model) == before
    assert torch.equal(outputs(model, batch), reference)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    # A handle may be removed twice, and entered again.
    installed = snn.install(model, {"model.norm": p})
    erased = outputs(model, batch)
    installed.remove()
    installed.remove()
    assert torch.equal(outputs(model, batch), reference)
    with installed, installed:
        assert torch.equal(outputs(model, batch), erased)
    assert torch.equal(outputs(model, batch), reference)


def test_installations_nest_and_act_in_order() -> None:
    model, first, second = tiny("llama"), projection(seed=1), projection(seed=2)
    batch, site = inputs("llama"), "model.layers.0"
    plain, seen = state_of(model, site, batch), []
    # A hook that is older than the erasers runs after them.
    model.get_submodule(site).register_forward_hook(lambda m, args, output: seen.append(output))
    with snn.install(model, {site: first}, tokens="all"):
        with snn.install(model, {site: second}, tokens="all"):
            both = state_of(model, site, batch)
            assert torch.equal(seen[-1], both)
        one = state_of(model, site, batch)
    mask = batch["attention_mask"].bool()
    assert torch.allclose(both[mask], snn.Eraser(second @ first)(plain)[mask], atol=1e-5)
    assert is_erased(one, plain, first, mask)


def test_a_partial_strength_steers() -> None:
    """Covariances shrink by the rest, class means move by the fraction, and a probe undoes it."""
    model, batches, at = tiny("llama"), [labelled("llama", 200)], "model.norm"
    erasers = snn.fit_layers(model, batches, at, sf.leace, erase="z")

    def cross() -> np.ndarray:
        return snn.collect(model, batches, at, labels="z")[at].cross_covariance("z")

    before = cross()
    size = np.abs(before).max()
    with snn.install(model, erasers, strength=np.float32(0.75)) as installed:
        np.testing.assert_allclose(cross(), 0.25 * before, atol=1e-6 * size)
        assert installed.strength == 0.75
        assert "steering at strength 0.75" in repr(installed)
    with snn.install(model, erasers, strength=1.0) as installed:
        assert np.abs(cross()).max() < 1e-6 * size  # control: erased
        assert "steering" not in repr(installed)


def test_erasers_that_did_not_act_are_an_error() -> None:
    used, idle, x = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.randn(2, 16)
    model, p = module(lambda self, x: self.used(x), used=used, idle=idle), projection()
    refused(snn.NeverCalledError, "'idle'", model, {"*": p}, x)
    with snn.install(model, {"*": p}):
        pass  # nothing ran at all
    assert hooks_in(model) == 0
    installed = snn.install(model, {"used": p})
    model(x)  # the hook ran before other code removed it
    used._forward_hooks.clear()
    with pytest.raises(snn.NeverCalledError, match="other code removed"):
        installed.check()


def test_a_copy_made_in_a_call_has_no_tokens_of_that_call() -> None:
    copies: list[Any] = []

    def forward(self: Any, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        copies.append(copy.deepcopy(self.site))
        return self.site(x)

    model, x = module(forward, site=torch.nn.Linear(16, 16)), torch.randn(2, 3, 16)
    with snn.install(model, {"site": projection()}, tokens="last"):
        model(x, attention_mask=torch.ones(2, 3))
        with pytest.raises(snn.SiteError, match="outside of a call"):
            copies[0](x)


def test_copies_and_pickles_of_a_model_erase_too() -> None:
    model, batch = tiny("llama"), inputs("llama")
    with snn.install(model, {"model.layers.0": projection()}) as installed:
        erased = outputs(model, batch)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with installed.disabled():  # a copy erases, because no handle could enable it again
            copies += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        assert torch.equal(outputs(other, batch), erased)
    assert not torch.equal(outputs(model, batch), erased)


def test_rank_zero_warns_once() -> None:
    with pytest.warns(NothingErasedWarning, match="rank 0") as caught:
        snn.install(tiny("llama"), {LAYERS: projection(rank=0)}).remove()
    assert len(caught) == 1


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [1, 0.5])
def test_an_eraser_that_needs_labels_is_refused_with_that_reason(strength: float) -> None:
    X, z = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2
    moments = sf.Moments().update(X, {"gender": z})
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    needed = "needs the labels of gender for every row.*such as sf.splince or sf.leace"
    for make in (
        lambda e: snn.install(model, e, at="0", strength=strength).remove(),
        lambda e: snn.install(model, {"0": e}, strength=strength).remove(),
        lambda e: snn.fold(model, {"0": e}, example=torch.randn(2, 4)),
        snn.Eraser,
    ):
        with pytest.raises(InputError, match=needed):
            make(sf.oracle(moments, erase="gender"))
        make(sf.leace(moments, erase="gender"))  # the control


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_invalid_arguments_of_install_are_errors() -> None:
    p, inner = projection(), torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    model = torch.nn.Sequential(
        torch.nn.ModuleList([torch.nn.Linear(16, 16)]), torch.nn.MultiheadAttention(16, 2),
        torch.nn.ParameterList([torch.nn.Parameter(torch.ones(16))]),
        type("Bare", (torch.nn.Module,), {})(),  # holds modules, and has no forward
        torch.nn.LayerNorm(16), torch.jit.trace(inner, torch.randn(2, 16)),
        torch.export.export(inner, (torch.randn(2, 16),)).module(),
    )  # fmt: skip
    before = hooks_in(model)
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        (p, {}, InputError, "at="),
        ({"4": p}, {"at": "4"}, InputError, "name their sites"),
        ([p], {}, InputError, "erasers is a list"),
        ({"4": p}, {"tokens": "head"}, InputError, "tokens is 'head'"),
        ({"4": p}, {"side": "both"}, InputError, "side"),
        *(({"4": p}, {"strength": wrong}, InputError, "strength is")
          for wrong in (0, 1.5, True, "half", float("nan"))),
        (p, {"at": 2}, snn.SiteError, "at holds 2"),
        (p, {"at": torch.nn.Linear(2, 2)}, snn.SiteError, "at holds a Linear"),
        ({"4.nrom": p}, {}, snn.SiteError, r"'4\.nrom'.*named_modules\(\) has all"),
        *(({site: p}, {}, snn.SiteError, "never called") for site in "023"),
        ({"1.out_proj": p}, {}, snn.SiteError, "output of '1'"),
        ({"5.0": p}, {}, snn.SiteError, "ScriptModule"),
        ({"6.0": p}, {}, snn.SiteError, "exported"),
    ]  # fmt: skip
    for erasers, options, error, match in cases:
        with pytest.raises(error, match=match):
            snn.install(model, erasers, **options)
    with pytest.raises(snn.SiteError, match="must be a torch"):
        snn.install("model", {"4": p})
    refused(snn.SiteError, "must have width 24", identity(), {"0": projection(24)}, torch.ones(16))
    batch = rows_with(torch.randn(50, 16))
    erasers = snn.collect(model[4], [batch], "", labels="z").erasers(sf.leace, erase="z")
    for placement in ({"side": "input"}, {"feature_dim": 0}, {"output": 0}):
        with pytest.raises(InputError, match="store the values of their fit"):
            snn.install(model[4], erasers, **placement)
    assert hooks_in(model) == before


@pytest.mark.parametrize("wrong", [None, 3, np.float32(0.5), "a"])
def test_arguments_of_other_types_are_refused(wrong: Any) -> None:
    model, batches = torch.nn.Sequential(torch.nn.Linear(3, 4)), [rows_with(torch.randn(40, 3))]
    erasers = snn.fit_layers(model, batches, "0", "leace", erase="z")
    batches_are = InputError, "pass the batches themselves"
    raises(
        (*batches_are, lambda: snn.collect(model, wrong, "0", labels="z")),
        (*batches_are, lambda: snn.fit_layers(model, wrong, "0", erase="z")),
        (*batches_are, lambda: snn.effect(model, erasers, wrong)),
    )
    if wrong != "a":
        raises((InputError, "the path is", lambda: snn.Erasers.load(wrong)))
    if wrong is not None:
        run = lambda: snn.effect(model, erasers, batches, forward=wrong)  # noqa: E731
        raises((InputError, "forward is", run))


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "site"),
    [("llama", "model.layers.0"), ("bert", "embeddings"), ("bert", "embeddings.LayerNorm")],
)  # embeddings have the mask of the call around them
def test_rules_select_their_tokens(name: str, site: str) -> None:
    model, ids, p = tiny(name), torch.randint(3, 50, (3, 5)), projection()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask}
    plain = state_of(model, site, batch)
    body = [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    for tokens, reference in (
        (None, body),
        ("body", body),
        ("all", mask.tolist()),
        ("first", [[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]),
        ("last", [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]),
        (lambda call: call["input_ids"] % 2 == 1, (ids % 2).tolist()),
    ):
        with snn.install(model, {site: p}, tokens=tokens):
            erased = state_of(model, site, batch)
        assert is_erased(erased, plain, p, torch.tensor(reference).bool()), tokens
        if tokens is not None:
            found = snn.collect(model, [{**batch, "z": [0, 1, 1]}], site, labels="z", tokens=tokens)
            assert found[site].n_rows == np.sum(reference)


def test_rules_need_no_mask_and_skipped_ids_travel_with_the_erasers() -> None:
    model, site, ids = tiny("llama"), "model.layers.0", torch.randint(3, 50, (40, 5))
    body = torch.ones_like(ids)
    body[:, 0] = 0
    packed = {"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    for call, expected in (({"input_ids": ids}, body.tolist()), (packed, [[0, 1, 0, 1, 1]])):
        assert changed(model, site, lambda call=call: model(**call), tokens="body") == expected
    batch = {"input_ids": ids, "z": torch.arange(40) % 2}
    found = snn.collect(model, [batch], site, labels="z", skip_ids=[7, 9])
    body[(ids == 7) | (ids == 9)] = 0
    assert found[site].n_rows == int(body.sum())
    plain, erasers = state_of(model, site, batch), found.erasers(sf.leace, erase="z")
    with snn.install(model, erasers):
        assert is_erased(state_of(model, site, batch), plain, erasers[site], body.bool())


def test_the_base_model_may_be_called_itself_but_no_site() -> None:
    model, batch, p = tiny("llama"), inputs("llama"), projection()
    with snn.install(model, {"model.layers.0": p, "model.norm": p}, tokens="body"):
        with pytest.raises(snn.SiteError, match="outside of a call"):
            model.model.norm(torch.randn(1, 2, 16))
        whole = model(**batch, output_hidden_states=True).hidden_states
        inner = model.model(**batch, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(whole, inner, strict=True))


def test_threads_get_their_own_tokens() -> None:
    model = tiny("llama")
    batches = [inputs("llama", n=6, length=4 + i, seed=i) for i in range(2)]
    with (
        snn.install(model, {LAYERS: projection()}, tokens="body"),
        ThreadPoolExecutor(2) as pool,
    ):
        expected = [outputs(model, batch) for batch in batches]
        found = list(pool.map(lambda b: [outputs(model, b) for _ in range(30)], batches))
    for logits, one in zip(found, expected, strict=True):
        assert all(torch.allclose(other, one, atol=1e-5) for other in logits)


# --- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["body", "last", "all"])
def test_generation_is_erased_with_and_without_cache_and_padding(tokens: str) -> None:
    model = tiny("llama")
    assistant = copy.deepcopy(model)
    ids = torch.randint(3, 50, (1, 6), generator=torch.Generator().manual_seed(3))
    pads = torch.zeros(1, 3, dtype=torch.long)

    def text(n_pads: int = 0, **options: Any) -> torch.Tensor:
        return model.generate(
            input_ids=torch.cat([pads[:, :n_pads], ids], 1),
            attention_mask=torch.cat([pads[:, :n_pads], torch.ones_like(ids)], 1),
            max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, **options,
        )[:, n_pads:]  # fmt: skip

    plain = text()
    with snn.install(model, {LAYERS: projection(rank=2)}, tokens=tokens) as installed:
        cached = text()
        assert installed.counts["model.layers.0"] == 8
        same = [text(n_pads=3), text(cache_implementation="static", disable_compile=True)]
        if tokens != "last":  # without a cache only the last token of each call is erased
            same += [text(use_cache=False), text(assistant_model=assistant)]
            beams = [text(num_beams=3, use_cache=with_cache) for with_cache in (True, False)]
            assert torch.equal(*beams)
    assert all(torch.equal(found, cached) for found in same)
    assert not torch.equal(cached, plain)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients_or_is_refused(reentrant: bool) -> None:
    """A site that runs again in the backward pass does not know the tokens of its call."""
    whole = {**inputs("llama", seed=1), "attention_mask": torch.ones(6, 5, dtype=torch.long)}
    padded = inputs("llama", seed=2)

    def gradients(model: Any, site: str, batches: Any, tokens: Any) -> Any:
        model.zero_grad()
        with snn.install(model, {site: projection(rank=2)}, tokens=tokens):
            # Two forward passes before one backward pass.
            sum(model(**b, labels=b["input_ids"], use_cache=False).loss for b in batches).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain, replayed = tiny("llama").train(), tiny("llama").train()
    older = replayed.gradient_checkpointing_enable
    enable = getattr(replayed, "activation_checkpointing_enable", older)
    enable({"use_reentrant": reentrant})
    if reentrant:
        plain.enable_input_require_grads()
        replayed.enable_input_require_grads()
    norms = "model.layers.*.post_attention_layernorm"
    for site in (LAYERS, norms):
        expected = gradients(plain, site, [whole, whole], "all")
        found = gradients(replayed, site, [whole, whole], "all")
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
    for batches, tokens in [
        ([whole], "body"), ([whole], None), ([whole], "last"), ([padded, whole], "all"),
        ([whole], lambda call: call["input_ids"] > 3),
    ]:  # fmt: skip
        gradients(plain, norms, batches, tokens)
        with pytest.raises(snn.SiteError, match=r"gradient checkpointing.*tokens='all'"):
            gradients(replayed, norms, batches, tokens)


def test_erasers_act_in_inference_mode() -> None:
    model, batch = tiny("llama"), inputs("llama")
    with snn.install(model, {LAYERS: projection()}):
        plain = model(**batch).logits
        with torch.inference_mode():
            assert torch.allclose(model(**batch).logits, plain, atol=1e-5)
        model(**batch).logits.sum().backward()  # nothing that was made there is kept
    with torch.inference_mode():
        installed = snn.install(model, {LAYERS: projection()})
    with installed.disabled():
        model(**batch)
    model(**batch).logits.sum().backward()
    installed.remove()


def test_models_on_a_gpu_are_those_on_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model, batch = tiny("llama"), labelled("llama")

    def run(device: str) -> tuple[torch.Tensor, Any]:
        model.to(device)
        logits = model(**{k: v.to(device) for k, v in batch.items() if k != "z"}).logits
        return logits.cpu(), snn.collect(model, [batch], "model.layers.1", labels="z")

    with snn.install(model, {"model.layers.0": projection()}):
        (logits, plain), (found, moments) = run("cpu"), run("cuda")
    assert torch.allclose(found, logits, atol=1e-4)
    expected = plain["model.layers.1"].covariance()
    scale = np.abs(expected).max()
    assert np.allclose(moments["model.layers.1"].covariance(), expected, atol=1e-5 * scale)
