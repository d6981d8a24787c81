"""nn.calls: tokens of calls with caches, nested calls, and without tokens."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

import splince_fast as sf
from nn.conftest import (
    cache_name,
    changed,
    identity,
    inputs,
    is_erased,
    labelled,
    left,
    module,
    outputs,
    projection,
    refused,
    states,
    tiny,
)
from splince_fast import nn as snn
from splince_fast.nn.calls import TokenRule, batch_to, select

# --- the arguments of a call ---------------------------------------------------------------------

KEYS = torch.zeros(2, 1, 3, 4)
IDS, TWO = torch.tensor([[7], [8]]), torch.tensor([[7, 9], [8, 9]])
# With its convolution's width in the first call, as Mamba of transformers 4 has it.
UNKNOWN = {"cache_params": types.SimpleNamespace(conv_states=KEYS)}


def cache_of(n: int) -> dict[str, Any]:
    return {"past_key_values": types.SimpleNamespace(get_seq_length=lambda: n)}


def mamba(has_previous: Any) -> dict[str, Any]:
    return {"cache_params": types.SimpleNamespace(has_previous_state=has_previous)}


def selected(
    rule: Any, ids: Any, mask: Any = None, skip_ids: tuple[int, ...] = (), **call: Any
) -> list[list[int]]:
    """The tokens that a rule selects for the arguments of a call."""
    call = {"input_ids": ids, "attention_mask": mask, **call}
    found = select(TokenRule(rule, skip_ids), call).mask
    return (torch.ones_like(ids) if found is None else found).int().tolist()


def test_the_length_of_a_cache_is_read_in_all_its_forms() -> None:
    yes, no, ones = [[1], [1]], [[0], [0]], torch.ones(2, 1, dtype=torch.long)
    for call, expected in (
        ({}, no),
        ({"past_key_values": [(KEYS, KEYS)]}, yes),
        ({"past_key_values": [(KEYS[:, :, :0], KEYS)]}, no),
        ({"past_key_values": ()}, no),
        ({"cache": [(KEYS, KEYS)]}, yes),  # as transformers 5.24 names it
        ({"cache": (), "use_cache": True}, no),
        (mamba(True), yes),
        (mamba(lambda: False), no),
        ({**mamba(True), "mask": ones}, yes),  # a mask of the new tokens
        ({"mask": ones}, no),
        ({**UNKNOWN, "cache_position": torch.arange(4)}, no),
        ({**UNKNOWN, "cache_position": torch.tensor([4])}, yes),
        ({"use_cache": True, "cache_implementation": "static"}, no),
    ):
        assert selected("body", IDS, **call) == expected, call
    with pytest.raises(snn.SiteError, match=r"\['state'\].*is unknown"):
        selected("body", IDS, state=[KEYS])
    two = torch.ones_like(TWO)
    assert selected("body", TWO, two) == [[0, 1]] * 2
    assert selected("body", TWO, two, past_key_values=[(KEYS, KEYS)]) == [[1, 1]] * 2


@pytest.mark.parametrize("rule", ["body", "first", "last", None])
def test_a_cache_of_unknown_length_is_an_error(rule: Any) -> None:
    call = {"ids": IDS, "my_cache": types.SimpleNamespace(states=1)}
    paged = {**call, "position_ids": IDS, "mask": torch.ones(2, 1, 1, 4).bool()}
    for unknown in (call, paged):
        match = r"\['my_cache'\].*pass an attention_mask.*tokens='all'"
        with pytest.raises(snn.SiteError, match=match):
            selected(rule, **unknown)
        for other in ("all", lambda call: call["input_ids"] > 0):  # which need no position
            assert selected(other, **unknown) == [[1], [1]]


# Sequences with padding on the left, without, and with padding on the right.
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])


def by_definition(rule: str, start: int, end: int) -> list[list[int]]:
    """The tokens from `start` to `end` that a rule selects among the attended ones so far."""
    found = []
    for row in MASK[:, :end].tolist():
        attended = [i for i, shown in enumerate(row) if shown]
        chosen = {"all": attended, "body": attended[1:], "first": attended[:1],
                  "last": [i for i in attended if i >= start][-1:]}[rule]  # fmt: skip
        found.append([int(i in chosen) for i in range(start, end)])
    return found


def masks(start: int, end: int) -> dict[str, torch.Tensor]:
    """The mask of a call on these tokens in all forms: floats are added to scores."""
    later = torch.arange(7) >= end  # tokens of a static cache that do not exist yet
    queries = MASK[:, None, :end].bool() & torch.ones(end, end).tril().bool()
    window = (queries & torch.ones(end, end).triu(-2).bool())[:, None, start:]
    queries = queries[:, start:]
    return {
        "so far": MASK[:, :end], "static": MASK, "static of ones": MASK | later,
        "static of zeros": MASK * ~later, "queries": queries, "integers": queries.long(),
        "floats": torch.where(queries, 0.0, -1e9), "heads": queries[:, None], "window": window,
        "keys in the window": window[..., max(0, start - 2) :],
    }  # fmt: skip


@pytest.mark.parametrize("rule", ["all", "body", "first", "last"])
def test_steps_select_the_tokens_of_the_whole_text(rule: str) -> None:
    """On a device, too, without waiting for it: the host cannot read tensors of `meta`."""
    keys = torch.zeros(3, 1, 9, 4)  # of another axis of the tokens
    for start, end in ((0, 7), (0, 5), (5, 6), (6, 7), (0, 3), (3, 7), (2, 3)):
        expected = by_definition(rule, start, end)
        for form, mask in masks(start, end).items():
            caches = [cache_of(start), {**UNKNOWN, "cache_position": torch.arange(start, end)}]
            if form == "so far" and start:  # without their number, the tokens are the last ones
                caches += [{}, mamba(True), {"state": [keys]}, {"past": [(keys, keys)]}]
            for cache in caches:
                ids = torch.ones(3, end - start)
                assert selected(rule, ids, mask, **cache) == expected, (start, end, form, cache)
                call = {"input_ids": ids, "attention_mask": mask, **cache}
                there = select(TokenRule(rule), batch_to(call, torch.device("meta"))).mask
                assert there is not None
                assert (there.device.type, there.shape) == ("meta", ids.shape)
    with pytest.raises(RuntimeError):  # control
        bool(there.any())


def test_skipped_ids_are_left_out_after_a_cache() -> None:
    mask, skip = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]), (7,)
    ids = torch.tensor([[7, 8], [8, 7]])
    assert selected("body", ids, mask, skip, **cache_of(3)) == [[0, 1], [1, 0]]
    for given in (None, mask[:, :4]):
        assert selected("body", IDS, given, skip, **cache_of(3)) == [[0], [1]]


# --- steps of models -----------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_decoding_with_a_state_erases_as_without(padded: bool) -> None:
    model, site, p = tiny("mamba"), "backbone.layers.1", projection()
    state = cache_name(model)
    ids = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, : 2 * padded] = 0

    def whole() -> None:
        model(input_ids=ids, attention_mask=mask)

    def by_steps() -> None:
        found = model(input_ids=ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
        for i in (4, 5):  # without a mask, as `generate` calls it
            found = model(input_ids=ids[:, i : i + 1], use_cache=True, **{state: found[state]})

    (plain,) = states(model, site, whole)
    with snn.install(model, {site: p}, tokens="body"):
        (erased,) = states(model, site, whole)
        steps = torch.cat(states(model, site, by_steps), 1)
    body = mask.bool() & (mask.cumsum(1) > 1)
    assert is_erased(erased, plain, p, body)
    assert torch.allclose(steps[mask.bool()], erased[mask.bool()], atol=1e-5)
    # Control: the difference between erased and plain rows is far above that.
    assert (erased - plain).abs()[body].max() > 0.1


def test_each_call_of_a_text_gives_it_the_weight_one() -> None:
    model, site, batch = tiny("llama"), "model.layers.1", labelled("llama", 4)

    def by_steps(model: Any, batch: Any) -> None:
        past: dict[str, Any] = {}
        for i in range(5):
            mask = batch["attention_mask"][:, : i + 1]
            output = model(batch["input_ids"][:, i : i + 1], mask, use_cache=True, **past)
            past = {cache_name(model): output[cache_name(model)]}

    for weight in ("token", "sequence"):
        options: dict[str, Any] = {"tokens": "body", "weight": weight}
        found = snn.collect(model, [batch], site, labels="z", forward=by_steps, **options)
        assert (found[site].n_rows, found[site].weight, found.n_sequences) == (12, 12, 4)
    whole = snn.collect(model, [batch], site, labels="z", **options)
    assert (whole[site].n_rows, whole[site].weight) == (12, 4)


def test_embeddings_have_the_cache_of_the_call_around_them() -> None:
    model, site = tiny("gemma3"), "model.embed_tokens"  # takes input_ids, and nothing else
    ids = inputs("gemma3", n=2)["input_ids"]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    p = sf.Projection(np.eye(16)[:, :1], np.eye(16)[:, :1], np.r_[50.0, np.zeros(15)])
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with snn.install(model, {site: p}, tokens="body"):
        found = states(
            model, site, lambda: model.generate(ids * mask, attention_mask=mask, **options)
        )
    erased = torch.cat(found, 1)[..., 0] == 50
    assert erased.int().tolist() == [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]


# --- calls inside calls, and none ----------------------------------------------------------------


def test_a_decoder_inside_a_call_without_ids_has_its_own_tokens() -> None:
    model, decoder, encoder = tiny("whisper"), "model.decoder.layers.1", "model.encoder.layers.1"
    batches = [labelled("whisper", seed=i) for i in range(3)]
    found = snn.collect(model, batches, decoder, labels="z")
    assert (found.tokens, found[decoder].n_rows) == ("body", 3 * 100 * 4)  # less the first of five
    erasers = found.erasers(sf.leace, erase="z")
    assert left(model, batches, erasers)[decoder] < 1e-6
    batch = inputs("whisper")
    assert changed(model, decoder, lambda: model(**batch)) == [[0, 1, 1, 1, 1]] * 6
    # The encoder has no tokens: all its rows are selected, and a rule that needs ids is an error.
    rows = snn.collect(model, batches, encoder, labels="z")
    assert (rows.tokens, rows[encoder].n_rows) == ("all", 300 * 10)
    match = rf"'{encoder}'.*needs a call with input_ids"
    refused(snn.SiteError, match, model, {encoder: projection()}, batch, tokens="body")
    # Sites with tokens and without are not mixed.
    both: dict[str, Any] = {"at": [encoder, decoder]}
    for run in (
        lambda: snn.collect(model, batches, **both, labels="z"),
        lambda: snn.fit_layers(model, batches, **both, erase="z"),
    ):
        with pytest.raises(snn.SiteError, match="only some calls have tokens"):
            run()
    fitted = snn.fit_layers(model, batches, **both, method="leace", erase="z", tokens="all")
    assert list(fitted) == both["at"]


def test_rules_that_find_no_tokens_say_so() -> None:
    llama, image, rows = inputs("llama"), inputs("vit"), torch.randn(3, 16)
    needs = "tokens='{}' needs a call with input_ids"
    for model, site, width, batch, options, match in (
        (tiny("vit"), "layernorm", 16, image, {"tokens": "last"}, needs.format("last")),
        (identity(), "0", 16, rows, {"tokens": "first"}, needs.format("first")),
        (tiny("llama"), "model.rotary_emb", 8, llama, {"tokens": "body", "output": 0}, "of shape"),
        (tiny("llama"), "model.norm", 16, llama, {"tokens": lambda call: 1}, "bool tensor"),
    ):
        refused(snn.SiteError, match, model, {site: projection(width)}, batch, **options)


@pytest.mark.parametrize(
    ("name", "site", "inside", "n_rows"),
    [("bert", "", "encoder.layer.1", 180), ("t5", "encoder", "encoder.block.1", 180),
     ("t5", "decoder", "decoder.block.1", 240)],
)  # fmt: skip
def test_a_site_that_takes_tokens_itself_has_those_of_its_own_call(
    name: str, site: str, inside: str, n_rows: int
) -> None:
    """The hook of the site runs inside its call; encoder and decoder have different masks."""
    for at in (site, inside):
        assert snn.collect(tiny(name), [labelled(name, 60)], at, labels="z")[at].n_rows == n_rows


def test_the_head_of_an_encoder_and_decoder_has_the_tokens_of_the_decoder() -> None:
    model, p, batch = tiny("t5"), projection(), inputs("t5")
    plain, options = outputs(model, batch), {"side": "input", "tokens": "body"}
    with snn.install(model, {"lm_head": p}, **options) as installed:
        differs = (outputs(model, batch) != plain).any(-1)
        generated = {k: batch[k] for k in ("input_ids", "attention_mask")}
        model.generate(**generated, max_new_tokens=3, min_new_tokens=3)
    assert differs.tolist() == [[False, *[True] * 4]] * 6  # not those of the mask of the encoder
    assert installed.counts == {"lm_head": 4}
    made_inside = {**generated, "labels": batch["decoder_input_ids"]}
    needs = "needs a call with input_ids"
    refused(snn.SiteError, needs, model, {"lm_head": p}, made_inside, **options)


def tokens_only() -> Any:
    """A module that takes token ids, and returns their embedding."""

    def forward(self: Any, input_ids: Any, past: Any = None, attention_mask: Any = None) -> Any:
        return self.embed(input_ids)

    return module(forward, embed=torch.nn.Embedding(50, 16))


def test_calls_within_a_call_keep_their_own_rows() -> None:
    """The second mask may lie where the first one lay, which is deleted when its call ends."""
    model = module(
        lambda self, first, second: self.a(first) + self.b(second), a=tokens_only(), b=tokens_only()
    )
    g = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, 50, (20, 5), generator=g) for _ in range(2))
    batch = {"first": first, "second": second, "z": torch.arange(20) % 2}
    found = snn.collect(
        model, [batch], ["a.embed", "b.embed"], labels="z",
        tokens=lambda call: call.get("input_ids", first) > 25,
    )  # fmt: skip
    for site, ids in (("a.embed", first), ("b.embed", second)):
        assert found[site].n_rows == int((ids > 25).sum())
        rows = model.get_submodule(site)(ids)[ids > 25].detach().double()
        assert np.allclose(found[site].mean, rows.mean(0), atol=1e-6)


def test_a_nested_call_with_tokens_of_its_own_has_its_own_selection() -> None:
    def outer(self: Any, input_ids: Any, attention_mask: Any, inner: Any, past: Any = None) -> Any:
        return self.masked(input_ids), self.inner(inner, past)

    model = module(outer, inner=tokens_only(), masked=tokens_only())
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 1, 1]])
    cache = [(KEYS, KEYS)]
    for site, args, expected in (
        ("inner", (ids, mask, ids), [1, 2]),  # the same tokens
        ("inner", (ids, mask, ids[:, :2]), [1, 1]),
        ("masked", (ids, mask, ids), [1, 2]),
        ("inner", (ids, None, ids, cache), [3, 3]),
    ):
        found = changed(model, f"{site}.embed", lambda args=args: model(*args), tokens="body")
        assert [sum(row) for row in found] == expected


def test_tokens_by_position_are_seen_through_a_wrapper() -> None:
    """The forward of a wrapper takes any arguments; that of the model names them."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # as of DistributedDataParallel
        return self.module(*args, **kwargs)

    batch = inputs("bert")
    for wrapped in (module(forward, module=tiny("bert")), torch.nn.DataParallel(tiny("bert"))):
        with torch.no_grad(), snn.install(wrapped, {"encoder.layer.1": projection()}):
            by_name = outputs(wrapped, batch)
            by_place = wrapped(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        assert torch.equal(by_place, by_name)
        assert not torch.equal(outputs(wrapped, batch), by_name)


def test_an_interrupted_call_leaves_no_tokens_to_the_next() -> None:
    """Hooks of the end of a call do not run after a KeyboardInterrupt."""

    def forward(self: Any, x: Any, interrupt: bool = False) -> Any:
        x = self.site(x)
        if interrupt:
            raise KeyboardInterrupt
        return x

    model, g = module(forward, site=torch.nn.Identity()), torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 3, 16, generator=g) for _ in range(2))
    with snn.install(model, {"site": projection()}, tokens=lambda call: call["x"][..., 0] > 0):
        with pytest.raises(KeyboardInterrupt):
            model(first, interrupt=True)
        differs = (model(second) != second).any(-1)
    assert torch.equal(differs, second[..., 0] > 0)


def test_ids_of_several_choices_are_tokens_of_the_inner_call() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForMultipleChoice(tiny("bert").config).eval()
    ids = torch.randint(3, 50, (3, 2, 5))
    run = lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids))  # noqa: E731
    assert changed(model, "bert.encoder.layer.1", run) == [[0, 1, 1, 1, 1]] * 6


# --- sites of other shapes -----------------------------------------------------------------------


def test_all_selects_attended_tokens_in_every_form_of_the_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    batch = {"input_ids": torch.arange(12).reshape(3, 4), "attention_mask": mask}
    sound = {"x": torch.randn(3, 4, 16), "attention_mask": mask}

    def collected(form: Any, batch: Any) -> Any:
        """Moments at a site behind a function of the embedded tokens or of another input."""

        def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, x: Any = None):  # type: ignore[no-untyped-def]
            return self.site(form(self.embed(input_ids) if x is None else x))

        torch.manual_seed(0)
        model = module(forward, embed=torch.nn.Embedding(50, 16), site=torch.nn.Identity())
        batch = {**batch, "z": torch.tensor([0, 1, 1])}
        return snn.collect(model, [batch], "site", labels="z", tokens="all")["site"]

    for form, call, expected in (
        (lambda h: h, batch, 9),
        (lambda h: h.flatten(0, 1), batch, 9),
        (lambda h: h.unflatten(-1, (2, 8)), batch, 18),  # (B, T, heads, d)
        # Sites without tokens: a pooled state, and another input of the model.
        (lambda h: h.mean(1), batch, 3),
        (lambda h: h.mean(1), sound, 3),
        (lambda h: torch.ones(3, 7, 16), batch, 21),
    ):
        assert collected(form, call).n_rows == expected
    # The router of a mixture of experts gets the rows (n, d) of all sequences, with their labels.
    flat, rows = (collected(form, batch) for form in (lambda h: h.flatten(0, 1), lambda h: h))
    assert np.array_equal(flat.cross_covariance("z"), rows.cross_covariance("z"))
    # The rows of these sites are padding, too, but the mask does not show which rows.
    for form, call in ((lambda h: h[:, ::2], sound), (lambda h: h.transpose(0, 1), batch)):
        with pytest.raises(snn.SiteError, match=r"\(3, 4\); pass a function"):
            collected(form, call)
