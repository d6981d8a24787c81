"""nn.installed, nn.hooks, nn.sites, nn.tokens: erasers inside models.

Forms of outputs, names of sites, tokens, generation, checkpointing, removal.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import (  # noqa: E402
    hooks_in,
    identity,
    inputs,
    is_erased,
    model_of,
    module,
    projection,
    refused,
    state_of,
    tiny,
)
from splince_fast import nn as snn  # noqa: E402

# --- every form of output ------------------------------------------------------------------------


Pair = collections.namedtuple("Pair", ["first", "second"])
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x + 1,
    "tuple": lambda x: (x + 1, 3),
    "list": lambda x: [x + 1, None],
    "namedtuple": lambda x: Pair(x + 1, "b"),
    "dict": lambda x: {"size": 3, "states": x + 1},
    "view": lambda x: x[:],
    "identity": lambda x: x,
}


@pytest.mark.parametrize("form", FORMS)
def test_containers_keep_their_type(form: str) -> None:
    model, p, x = model_of(FORMS[form]), projection(), torch.randn(4, 16)
    kept, plain = x.clone(), model(x)
    with snn.install(model, {"0": p}):
        found = model(x)
    assert type(found) is type(plain)
    get = {"dict": lambda v: v["states"]}.get(form, lambda v: v if torch.is_tensor(v) else v[0])
    assert is_erased(get(found), get(plain), p)
    assert torch.equal(x, kept)
    if form == "namedtuple":
        assert found.second == "b"


def test_model_output_keeps_attribute_and_key() -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny("bert")
    batch = inputs("bert")
    with snn.install(model, {"": projection()}, tokens="all"):
        found = model(**batch)
    assert isinstance(
        found, transformers.modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions
    )
    assert torch.equal(found.last_hidden_state, found["last_hidden_state"])
    assert not torch.equal(found.last_hidden_state, model(**batch).last_hidden_state)


@pytest.mark.parametrize(
    "form", [lambda x: None, lambda x: x.long(), lambda x: (x.long(), x)],
    ids=["none", "integer", "second"],
)  # fmt: skip
def test_outputs_without_a_tensor_are_named(form: Callable[[torch.Tensor], Any]) -> None:
    model, x = model_of(form), torch.randn(2, 16)
    error = refused(sf.exceptions.InputError, "'0'", model, {"0": projection()}, x)
    assert hooks_in(model) == 0
    if isinstance(form(x), tuple):
        assert "output= can be 1" in str(error)
        with snn.install(model, {"0": projection()}, output=1):
            assert torch.is_tensor(model(x)[1])


def test_several_fields_of_the_width_are_an_error() -> None:
    """As sentence-transformers returns them."""
    model = model_of(lambda x: {"tokens": x, "sentence": x.mean(1), "logits": x[..., :3]})
    p, x = projection(), torch.randn(4, 7, 16)
    plain, batch = model(x), {"input": x, "z": torch.arange(4) % 2}
    message = "same width, 'tokens', 'sentence'.*output="
    refused(snn.SiteError, message, model, {"0": p}, x)
    for run in (
        lambda: snn.collect(model, [batch], "0", labels="z"),
        lambda: snn.fit_layers(model, [batch], "0", sf.leace, erase="z"),
    ):
        with pytest.raises(snn.SiteError, match=message):
            run()
    for field in ("tokens", "sentence"):
        with snn.install(model, {"0": p}, output=field):
            found = model(x)
        assert is_erased(found[field], plain[field], p)
        assert all(torch.equal(found[k], plain[k]) for k in plain if k != field)
    assert snn.collect(model, [batch], "0", labels="z", output="sentence")["0"].n_rows == 4


def test_unambiguous_fields_are_erased() -> None:
    p, x = projection(), torch.randn(4, 7, 16)
    for form, field in (
        (lambda x: {"pooler_output": x.mean(1), "last_hidden_state": x}, "last_hidden_state"),
        (lambda x: {"ids": x[..., 0].long(), "states": x, "logits": x[..., :3]}, "states"),
    ):
        model = model_of(form)
        with snn.install(model, {"0": p}):
            assert is_erased(model(x)[field], x, p)
    # Along another axis other fields are alike.
    model = model_of(lambda x: {"a": x, "b": x[:, :, :3], "c": x[:, :2]})
    refused(snn.SiteError, "width, 'a', 'b'", model, {"0": projection(7)}, x, feature_dim=1)


def test_inputs_are_erased_by_position_and_by_keyword() -> None:
    p, x = projection(), torch.randn(3, 16)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with snn.install(model, {"0": p}, side="input"):
        found = model(x)
    assert torch.allclose(found, model(snn.Eraser(p)(x)), atol=1e-5)

    pair = module(lambda self, x: self.inner(x, x), inner=torch.nn.Bilinear(16, 16, 3))
    with snn.install(pair, {"inner": p}, side="input"):
        found = pair(x)  # of several by position the first is erased
    assert torch.allclose(found, pair.inner(snn.Eraser(p)(x), x), atol=1e-5)
    llama = tiny("llama")  # calls self_attn by keywords only
    batch = inputs("llama")
    with snn.install(
        llama, {"model.layers.1.self_attn": p}, tokens="all", side="input"
    ) as installed:
        changed = llama(**batch).logits
    assert installed.counts == {"model.layers.1.self_attn": 1}
    assert not torch.equal(changed, llama(**batch).logits)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [1, 0.5])
def test_an_eraser_that_needs_labels_is_refused_with_that_reason(strength: float) -> None:
    X, z = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2
    moments = sf.Moments().update(X, {"gender": z})
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    eraser = sf.oracle(moments, erase="gender")
    needed = "needs the labels of gender for every row.*such as sf.splince or sf.leace"
    for make in (
        lambda e: snn.install(model, e, at="0", strength=strength).remove(),
        lambda e: snn.install(model, {"0": e}, strength=strength).remove(),
        lambda e: snn.fold(model, {"0": e}, example=torch.randn(2, 4)),
        lambda e: snn.Eraser(e.scaled(strength) if isinstance(e, sf.Projection) else e),
    ):
        with pytest.raises(sf.exceptions.InputError, match=needed):
            make(eraser)
        make(sf.leace(moments, erase="gender"))  # the control


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_and_exported_models_are_refused() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    scripted = torch.nn.Sequential(torch.jit.trace(inner, torch.randn(2, 16)))
    with pytest.raises(snn.SiteError, match="ScriptModule"):
        snn.install(scripted, {"0.0": projection()})
    exported = torch.export.export(inner, (torch.randn(2, 16),)).module()
    with pytest.raises(snn.SiteError, match="exported"):
        snn.install(exported, {"0": projection()})


def test_another_width_than_that_of_an_output_is_refused() -> None:
    """Where weights do not show the width, the first call does."""
    match = "axis -1 must have width 24"
    refused(snn.SiteError, match, identity(), {"0": projection(24)}, torch.randn(2, 16))


def test_an_output_wider_than_its_weights_is_erased() -> None:
    """Weights do not show the width of a module that joins outputs."""
    rnn = torch.nn.LSTM(5, 8, bidirectional=True, batch_first=True)
    model = module(lambda self, x: self.rnn(x)[0], rnn=rnn)
    batch = {"x": torch.randn(40, 3, 5), "z": torch.arange(40) % 2}
    erasers = snn.fit_layers(model, [batch], "rnn", sf.leace, erase="z")
    plain = model(batch["x"])
    with snn.install(model, erasers):
        assert is_erased(model(batch["x"]), plain, erasers["rnn"])


# --- life of a handle ----------------------------------------------------------------------------


def live_tensors() -> int:
    """Tensors that the interpreter knows of."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    return sum(type(o) in kinds for o in gc.get_objects())


def test_leaving_restores_everything() -> None:
    model, p = tiny("llama"), projection()
    batch = inputs("llama")
    own = model.model.norm.register_forward_hook(lambda m, a, o: None)
    before, keys = hooks_in(model), {k: v.clone() for k, v in model.state_dict().items()}
    reference = model(**batch).logits
    tensors = live_tensors()
    for i in range(1000):
        with pytest.raises(ZeroDivisionError), snn.install(model, {"model.norm": p}):  # noqa: PT012
            if i % 100 == 0:
                model(**batch)
            raise ZeroDivisionError
    assert live_tensors() <= tensors + 2
    assert hooks_in(model) == before
    assert torch.equal(model(**batch).logits, reference)
    assert all(torch.equal(v, keys[k]) for k, v in model.state_dict().items())
    own.remove()


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


def test_a_handle_removes_its_erasers_and_installs_them_again() -> None:
    model = tiny("sequential")
    x = inputs("sequential")
    plain = model(**x)
    installed = snn.install(model, {"2": projection()})
    erased = model(**x)
    installed.remove()
    installed.remove()
    assert torch.equal(model(**x), plain)
    with installed, installed:
        assert torch.equal(model(**x), erased)
    assert torch.equal(model(**x), plain)


@pytest.mark.parametrize("heads", [None, 2])
def test_a_partial_strength_steers(heads: int | None) -> None:
    """Covariances shrink by the rest, class means move by the fraction, and a probe undoes it."""
    model = tiny("llama")
    batches = [{**inputs("llama", n=200), "z": torch.arange(200) % 2}]
    options = {"side": "input", "heads": heads} if heads else {}
    at = "model.layers.1.self_attn.o_proj" if heads else "model.norm"
    erasers = snn.fit_layers(model, batches, at, sf.leace, erase="z", **options)

    def cross(strength: float | None) -> np.ndarray:
        with (
            contextlib.nullcontext()
            if strength is None
            else snn.install(model, erasers, strength=strength)
        ):
            found = snn.collect(model, batches, at, labels="z", **options)
        return np.concatenate([m.cross_covariance("z") for m in found.values()])

    before = cross(None)
    size = np.abs(before).max()
    np.testing.assert_allclose(cross(0.75), 0.25 * before, atol=1e-6 * size)
    assert np.abs(cross(1.0)).max() < 1e-6 * size  # control: erased
    installed = snn.install(model, erasers, strength=np.float32(0.75))
    assert installed.strength == 0.75
    assert "steering at strength 0.75" in repr(installed)
    installed.remove()
    assert "steering" not in repr(snn.install(model, erasers))


def test_a_site_that_did_not_run_is_an_error() -> None:
    used, idle = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    model = module(lambda self, x: self.used(x), used=used, idle=idle)
    refused(snn.NeverCalledError, "'idle'", model, {"*": projection()}, torch.randn(2, 16))
    with snn.install(model, {"*": projection()}):
        pass  # nothing ran at all
    assert hooks_in(model) == 0


def test_hooks_removed_by_other_code_are_an_error() -> None:
    model = tiny("sequential")
    installed = snn.install(model, {"2": projection()})
    model[2]._forward_hooks.clear()
    with pytest.raises(snn.NeverCalledError, match="other code removed"):
        installed.check()
    installed.remove()


def test_copies_and_pickles_of_a_model_erase_too() -> None:
    model = tiny("llama")
    batch = inputs("llama")
    with snn.install(model, {"model.layers.0": projection()}) as installed:
        erased = model(**batch).logits
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with installed.disabled():  # a copy erases, because no handle could enable it again
            copies += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        assert torch.equal(other(**batch).logits, erased)
    assert not torch.equal(model(**batch).logits, erased)


def test_rank_zero_warns_once() -> None:
    with pytest.warns(sf.exceptions.NothingErasedWarning, match="rank 0") as caught:
        snn.install(tiny("llama"), {"model.layers.*": projection(rank=0)}).remove()
    assert len(caught) == 1


class Bare(torch.nn.Module):
    """Holds modules, and has no forward."""


def test_invalid_arguments_of_install_are_errors() -> None:
    p, other = projection(), torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(
        torch.nn.ModuleList([torch.nn.Linear(16, 16)]), torch.nn.MultiheadAttention(16, 2),
        torch.nn.ParameterList([torch.nn.Parameter(torch.ones(16))]), Bare(),
        torch.nn.LayerNorm(16),
    )  # fmt: skip
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        (p, {}, sf.exceptions.InputError, "at="),
        ({"4": p}, {"at": "4"}, sf.exceptions.InputError, "name their sites"),
        ([p], {}, sf.exceptions.InputError, "erasers is a list"),
        ({"4": p}, {"tokens": "head"}, sf.exceptions.InputError, "tokens is 'head'"),
        ({"4": p}, {"side": "both"}, sf.exceptions.InputError, "side"),
        *(({"4": p}, {"strength": wrong}, sf.exceptions.InputError, "strength is")
          for wrong in (0, 1.5, True, "half", float("nan"))),
        (p, {"at": 2}, snn.SiteError, "at holds 2"),
        (p, {"at": other}, snn.SiteError, "that is not in this model"),
        ({"4.nrom": p}, {}, snn.SiteError, r"'4\.nrom'.*named_modules\(\) has all"),
        ({"4": projection(24)}, {}, snn.SiteError, "'4' has width 24"),
        *(({site: p}, {}, snn.SiteError, "never called") for site in "023"),
        ({"1.out_proj": p}, {}, snn.SiteError, "output of '1'"),
    ]  # fmt: skip
    for erasers, options, error, match in cases:
        with pytest.raises(error, match=match):
            snn.install(model, erasers, **options)
    assert hooks_in(model) == 0
    with pytest.raises(snn.SiteError, match="must be a torch"):
        snn.install("model", {"4": p})
    model = tiny("sequential")
    batch = {"input": torch.randn(50, 5), "z": np.arange(50) % 2}
    erasers = snn.collect(model, [batch], "2", labels="z").erasers(sf.leace, erase="z")
    for placement in ({"side": "input"}, {"feature_dim": 0}, {"output": 0}):
        with pytest.raises(sf.exceptions.InputError, match="store the values of their fit"):
            snn.install(model, erasers, **placement)
    assert hooks_in(model) == 0


# --- tokens --------------------------------------------------------------------------------------


def changed_tokens(model: Any, site: str, batch: dict[str, Any], tokens: Any) -> torch.Tensor:
    plain = state_of(model, site, batch)
    with snn.install(model, {site: projection()}, tokens=tokens):
        erased = state_of(model, site, batch)
    return (erased != plain).any(-1)


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
            labelled = {**batch, "z": torch.tensor([0, 1, 1])}
            found = snn.collect(model, [labelled], site, labels="z", tokens=tokens)
            assert found[site].n_rows == np.sum(reference)


def test_rules_need_no_mask() -> None:
    model, site, ids = tiny("llama"), "model.layers.0", torch.randint(3, 50, (3, 5))
    assert (
        changed_tokens(model, site, {"input_ids": ids}, "body").tolist()
        == [[False, *[True] * 4]] * 3
    )
    packed = {"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    assert changed_tokens(model, site, packed, "body").tolist() == [
        [False, True, False, True, True]
    ]
    call, erasers = {"input_ids": ids}, {site: projection()}
    refused(snn.SiteError, "bool tensor", model, erasers, call, tokens=lambda call: 1)


def test_skipped_ids_travel_with_the_erasers() -> None:
    model = tiny("llama")
    ids = torch.randint(3, 50, (40, 5))
    batch = {"input_ids": ids, "z": torch.arange(40) % 2}
    found = snn.collect(model, [batch], "model.layers.0", labels="z", skip_ids=[7, 9])
    body = torch.ones_like(ids).bool()
    body[:, 0] = False
    body &= (ids != 7) & (ids != 9)
    assert found["model.layers.0"].n_rows == int(body.sum())
    erasers = found.erasers(sf.leace, erase="z")
    plain = state_of(model, "model.layers.0", {"input_ids": ids})
    with snn.install(model, erasers):
        changed = (state_of(model, "model.layers.0", {"input_ids": ids}) != plain).any(-1)
    assert torch.equal(changed, body)


def test_a_rule_without_its_call_is_an_error() -> None:
    llama = tiny("llama")
    with (
        pytest.raises(snn.SiteError, match="outside of a call"),
        snn.install(llama, {"model.norm": projection()}, tokens="body"),
    ):
        llama.model.norm(torch.randn(1, 2, 16))
    rotary = {"model.rotary_emb": projection(8)}
    refused(
        snn.SiteError, "tokens of shape", llama, rotary, inputs("llama"), tokens="body", output=0
    )


def test_the_base_model_may_be_called_itself() -> None:
    model = tiny("llama")
    batch = inputs("llama")
    with snn.install(model, {"model.layers.0": projection()}, tokens="body"):
        whole = model(**batch, output_hidden_states=True).hidden_states
        inner = model.model(**batch, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(whole, inner, strict=True))


def test_threads_get_their_own_tokens() -> None:
    model = tiny("llama")
    batches = [inputs("llama", n=6, length=4 + i, seed=i) for i in range(2)]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    with snn.install(model, {"model.layers.*": projection()}, tokens="body"):
        reference = [model(**b).logits for b in batches]

        def work(i: int) -> None:
            with torch.no_grad():
                for _ in range(30):
                    found[i].append(model(**batches[i]).logits)

        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in (0, 1):
        assert len(found[i]) == 30
        assert all(torch.allclose(f, reference[i], atol=1e-5) for f in found[i])


# --- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["body", "last", "all"])
def test_generation_is_erased_with_and_without_cache_and_padding(tokens: str) -> None:
    model = tiny("llama")
    single = torch.randint(3, 50, (1, 6), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ones = torch.ones_like(single)
    plain = model.generate(input_ids=single, attention_mask=ones, **options)
    with snn.install(model, {"model.layers.*": projection(rank=2)}, tokens=tokens) as installed:
        cached = model.generate(input_ids=single, attention_mask=ones, **options)
        assert installed.counts["model.layers.0"] == 8
        padded = model.generate(
            input_ids=torch.cat([torch.zeros(1, 3, dtype=torch.long), single], 1),
            attention_mask=torch.cat([torch.zeros(1, 3, dtype=torch.long), ones], 1),
            **options,
        )
        slow = model.generate(input_ids=single, attention_mask=ones, use_cache=False, **options)
        static = model.generate(
            input_ids=single, attention_mask=ones, cache_implementation="static",
            disable_compile=True, **options,
        )  # fmt: skip
        beams = [
            model.generate(
                input_ids=single, attention_mask=ones, num_beams=3, use_cache=c, **options
            )
            for c in (True, False)
        ]
    assert torch.equal(padded[:, 3:], cached)
    assert torch.equal(static, cached)
    assert not torch.equal(cached, plain)
    if tokens != "last":  # without a cache only the last token of each call is erased
        assert torch.equal(slow, cached)
        assert torch.equal(beams[0], beams[1])


def test_assisted_generation_is_erased() -> None:
    model = tiny("llama")
    ids = torch.randint(3, 50, (1, 6), generator=torch.Generator().manual_seed(3))
    options = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False,
        "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    assistant = copy.deepcopy(model)
    with snn.install(model, {"model.layers.*": projection(rank=2)}):
        plain = model.generate(input_ids=ids, **options)
        helped = model.generate(input_ids=ids, assistant_model=assistant, **options)
    assert torch.equal(plain, helped)


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
    for site in ("model.layers.*", norms):
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
    model = tiny("llama")
    batch = inputs("llama")
    with snn.install(model, {"model.layers.*": projection()}):
        plain = model(**batch).logits
        with torch.inference_mode():
            assert torch.allclose(model(**batch).logits, plain, atol=1e-5)
        model(**batch).logits.sum().backward()  # nothing that was made there is kept
    with torch.inference_mode():
        installed = snn.install(model, {"model.layers.*": projection()})
    with installed.disabled():
        model(**batch)
    model(**batch).logits.sum().backward()
    installed.remove()


def test_erasers_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model, batch = tiny("llama"), inputs("llama")
    with snn.install(model, {"model.layers.*": projection()}):
        reference = model(**batch).logits
        model.cuda()
        found = model(**{k: v.cuda() for k, v in batch.items()}).logits
    assert torch.allclose(found.cpu(), reference, atol=1e-4)


@pytest.mark.parametrize("wrong", [None, 3, np.float32(0.5), "a"])
def test_arguments_of_other_types_are_refused(wrong: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    batches = [{"input": torch.randn(40, 3), "z": torch.arange(40) % 2}]
    erasers = snn.fit_layers(model, batches, "0", "leace", erase="z")
    for call in (
        lambda: snn.collect(model, wrong, "0", labels="z"),
        lambda: snn.fit_layers(model, wrong, "0", "leace", erase="z"),
        lambda: snn.effect(model, erasers, wrong),
    ):
        with pytest.raises(sf.exceptions.InputError, match="pass the batches themselves"):
            call()
    if wrong != "a":
        with pytest.raises(sf.exceptions.InputError, match="the path is"):
            snn.Erasers.load(wrong)
    if wrong is not None:
        for forward in (
            lambda: snn.collect(model, batches, "0", labels="z", forward=wrong),
            lambda: snn.effect(model, erasers, batches, forward=wrong),
        ):
            with pytest.raises(sf.exceptions.InputError, match="forward is"):
                forward()
