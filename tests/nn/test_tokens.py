"""nn.tokens: tokens of calls with caches, nested calls, and without tokens."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import (  # noqa: E402
    cache_name,
    identity,
    inputs,
    is_erased,
    module,
    projection,
    refused,
    site_of,
    states,
    tiny,
)
from splince_fast import nn as snn  # noqa: E402
from splince_fast.nn.tokens import TokenRule, select  # noqa: E402

# --- states of earlier tokens --------------------------------------------------------------------


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


IDS = torch.tensor([[7], [8]])


def of(**call: Any) -> list[Any]:
    """What tokens="body" selects in a call of one token."""
    selection = select(TokenRule("body"), {"input_ids": IDS, **call})
    return [[True], [True]] if selection.mask is None else selection.mask.tolist()


def test_the_length_of_a_cache_is_read_in_all_its_forms() -> None:
    keys = torch.zeros(2, 1, 3, 4)
    yes, no = [[True], [True]], [[False], [False]]
    assert of() == no
    assert of(past_key_values=[(keys, keys)]) == yes
    assert of(past_key_values=[(keys[:, :, :0], keys)]) == no
    assert of(past_key_values=()) == no
    assert of(cache=[(keys, keys)]) == yes  # as transformers 5.24 names it
    assert of(cache=(), use_cache=True) == no
    assert of(cache_params=types.SimpleNamespace(has_previous_state=True)) == yes
    assert of(cache_params=types.SimpleNamespace(has_previous_state=lambda: False)) == no
    with pytest.raises(snn.SiteError, match=r"\['state'\].*is unknown"):
        of(state=[keys])
    unknown = types.SimpleNamespace(conv_states=keys)
    # With its convolution's width in the first call, as Mamba of transformers 4 has it.
    assert of(cache_params=unknown, cache_position=torch.arange(4)) == no
    assert of(cache_params=unknown, cache_position=torch.tensor([4])) == yes
    assert of(use_cache=True, cache_implementation="static") == no


def test_a_mask_may_cover_the_new_tokens_only() -> None:
    keys, ones = torch.zeros(2, 1, 3, 4), torch.ones(2, 1, dtype=torch.long)
    two = torch.tensor([[7, 9], [8, 9]])
    call = {"input_ids": two, "attention_mask": torch.ones_like(two)}
    assert select(TokenRule("body"), call).mask.tolist() == [[False, True]] * 2
    call["past_key_values"] = [(keys, keys)]
    assert select(TokenRule("body"), call).mask.all()
    seen = types.SimpleNamespace(has_previous_state=True)
    assert of(cache_params=seen, attention_mask=ones) == [[True], [True]]
    assert of(attention_mask=ones) == [[False], [False]]


@pytest.mark.parametrize("rule", ["body", "first", "last", None])
def test_a_cache_of_unknown_length_is_an_error(rule: Any) -> None:
    call = {"input_ids": IDS, "my_cache": types.SimpleNamespace(states=1)}
    paged = {**call, "position_ids": IDS, "attention_mask": torch.ones(2, 1, 1, 4).bool()}
    for unknown in (call, paged):
        with pytest.raises(
            snn.SiteError, match=r"\['my_cache'\].*pass an attention_mask.*tokens='all'"
        ):
            select(TokenRule(rule), unknown)
        # These rules need no position.
        for other in ("all", lambda call: call["input_ids"] > 0):
            mask = select(TokenRule(other), unknown).mask
            assert mask is None or mask.all()
    # A mask over all tokens tells the position.
    long = torch.ones(2, 4, dtype=torch.long)
    found = select(TokenRule(rule), {**call, "attention_mask": long}).mask
    assert bool(found.all()) is (rule != "first")


# --- calls inside calls, and none ----------------------------------------------------------------


def test_a_decoder_inside_a_call_without_ids_has_its_own_tokens() -> None:
    model, site = tiny("whisper"), "model.decoder.layers.1"
    batches = [{**inputs("whisper", n=100, seed=i), "z": torch.arange(100) % 2} for i in range(3)]
    found = snn.collect(model, batches, site, labels="z")
    assert found.tokens == "body"
    assert found[site].n_rows == 3 * 100 * 4  # five tokens, less the first
    erasers = found.erasers(sf.leace, erase="z")
    batch = inputs("whisper")
    (plain,) = states(model, site, lambda: model(**batch))
    with snn.install(model, erasers):
        (erased,) = states(model, site, lambda: model(**batch))
        after = snn.collect(model, batches, site, labels="z")
    body = torch.ones(6, 5, dtype=torch.bool)
    body[:, 0] = False
    assert is_erased(erased, plain, erasers[site], body)
    assert after.trace("z")[site] < 1e-6 * found.trace("z")[site]
    # The encoder has no tokens: all its rows are selected, and a rule that needs ids is an error.
    encoder = "model.encoder.layers.1"
    rows = snn.collect(model, batches, encoder, labels="z")
    assert rows.tokens == "all"
    assert rows[encoder].n_rows == 300 * 10
    match = rf"'{encoder}'.*needs a call with input_ids"
    refused(snn.SiteError, match, model, {encoder: projection()}, batch, tokens="body")


def test_sites_with_tokens_and_without_are_not_mixed() -> None:
    model = tiny("whisper")
    batches = [{**inputs("whisper", n=100), "z": torch.arange(100) % 2}]
    both = ["model.encoder.layers.1", "model.decoder.layers.1"]
    with pytest.raises(snn.SiteError, match="only some calls have tokens"):
        snn.collect(model, batches, both, labels="z")
    with pytest.raises(snn.SiteError, match="only some calls have tokens"):
        snn.fit_layers(model, batches, both, sf.leace, erase="z")
    assert list(snn.fit_layers(model, batches, both, sf.leace, erase="z", tokens="all")) == both


def test_rules_that_need_ids_say_so() -> None:
    vit = tiny("vit")
    for model, site, tokens, x in (
        (vit, site_of("vit", vit), "last", inputs("vit")["pixel_values"]),
        (identity(), "0", "first", torch.randn(3, 16)),
    ):
        match = f"tokens='{tokens}' needs a call with input_ids"
        refused(snn.SiteError, match, model, {site: projection()}, x, tokens=tokens)


@pytest.mark.parametrize(("name", "site"), [("bert", ""), ("t5", "encoder"), ("t5", "decoder")])
def test_a_site_that_takes_tokens_itself_has_those_of_its_own_call(name: str, site: str) -> None:
    """Its hook runs before the call is left; the encoder and the decoder have other masks."""
    model = tiny(name)
    batch = {**inputs(name, n=60), "z": torch.arange(60) % 2}
    inside = {"": "encoder.layer.1", "encoder": "encoder.block.1", "decoder": "decoder.block.1"}
    found = {at: snn.collect(model, [batch], at, labels="z")[at] for at in (site, inside[site])}
    assert len({moments.n_rows for moments in found.values()}) == 1
    assert found[site].n_rows == (60 * 4 if site == "decoder" else 30 * 2 + 30 * 4)


def test_the_head_of_an_encoder_and_decoder_has_the_tokens_of_the_decoder() -> None:
    model, p = tiny("t5"), projection()
    batch = inputs("t5")
    plain = model(**batch).logits
    options = {"side": "input", "tokens": "body"}
    with snn.install(model, {"lm_head": p}, **options) as installed:
        changed = (model(**batch).logits != plain).any(-1)
        generated = {k: batch[k] for k in ("input_ids", "attention_mask")}
        model.generate(**generated, max_new_tokens=3, min_new_tokens=3)
    assert changed.tolist() == [[False, *[True] * 4]] * 6  # not those of the mask of the encoder
    assert installed.counts == {"lm_head": 4}
    made_inside = {**generated, "labels": batch["decoder_input_ids"]}
    needs = "needs a call with input_ids"
    refused(snn.SiteError, needs, model, {"lm_head": p}, made_inside, **options)


def tokens_only() -> Any:
    """A module that takes token ids, and returns their embedding."""

    def forward(self: Any, input_ids: Any, attention_mask: Any = None) -> Any:
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


def test_tokens_by_position_are_seen_through_a_wrapper() -> None:
    """The forward of a wrapper takes any arguments; that of the model names them."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # as of DistributedDataParallel
        return self.module(*args, **kwargs)

    batch = inputs("bert")
    for wrapped in (module(forward, module=tiny("bert")), torch.nn.DataParallel(tiny("bert"))):
        with snn.install(wrapped, {"encoder.layer.1": projection()}):
            by_name = wrapped(**batch).last_hidden_state
            by_place = wrapped(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        assert torch.equal(by_place, by_name)
        assert not torch.equal(wrapped(**batch).last_hidden_state, by_name)


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
        changed = (model(second) != second).any(-1)
    assert torch.equal(changed, second[..., 0] > 0)


def test_ids_of_several_choices_are_tokens_of_the_inner_call() -> None:
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "vocab_size": 50, "intermediate_size": 32}  # fmt: skip
    model = transformers.BertForMultipleChoice(transformers.BertConfig(**config)).eval()
    ids, site = torch.randint(3, 50, (3, 2, 5)), "bert.encoder.layer.1"
    run = lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids))  # noqa: E731
    (plain,) = states(model, site, run)
    with snn.install(model, {site: projection()}):
        (erased,) = states(model, site, run)
    assert (erased != plain).any(-1).tolist() == [[False, *[True] * 4]] * 6


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
@pytest.mark.parametrize("heads", [False, True])
def test_masks_of_queries_and_keys(heads: bool, dtype: Any) -> None:
    """(B, queries, keys), or (B, heads, queries, keys); floats are added to scores."""
    keys = torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()
    mask = keys[:, None].expand(2, 3, 3)
    mask = torch.where(mask, 0.0, -1e9) if dtype == torch.float32 else mask.to(dtype)
    call = {"input_ids": torch.ones(2, 3), "attention_mask": mask[:, None] if heads else mask}
    body = select(TokenRule("body"), call).mask
    assert body.tolist() == [[False, False, True], [False, True, True]]


# --- modules of embeddings -----------------------------------------------------------------------


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


def test_a_nested_call_with_tokens_of_its_own_has_its_own_selection() -> None:
    def outer(self: Any, input_ids: Any, attention_mask: Any, inner: Any, past: Any = None) -> Any:
        return self.masked(input_ids), self.inner(inner, past)

    def within(self: Any, input_ids: Any, past: Any = None) -> Any:
        return self.embed(input_ids)

    inner = module(within, embed=torch.nn.Embedding(50, 16))
    model, ids = (
        module(outer, inner=inner, masked=tokens_only()),
        torch.ones(2, 3, dtype=torch.long),
    )
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    keys = torch.zeros(2, 1, 3, 4)

    def n_erased(model: Any, site: str, *args: Any) -> list[int]:
        (plain,) = states(model, site, lambda: model(*args))
        with snn.install(model, {site: projection()}, tokens="body"):
            (erased,) = states(model, site, lambda: model(*args))
        return (erased != plain).any(-1).sum(1).tolist()

    assert n_erased(model, "inner.embed", ids, mask, ids) == [1, 2]
    assert n_erased(model, "inner.embed", ids, mask, ids[:, :2]) == [1, 1]
    assert n_erased(model, "masked.embed", ids, mask, ids) == [1, 2]  # the same tokens
    assert n_erased(model, "inner.embed", ids, None, ids, [(keys, keys)]) == [3, 3]


# --- masks of other lengths and forms ------------------------------------------------------------


def selected(tokens: str, length: int, mask: Any, n_past: int | None = None, **call: Any) -> Any:
    """What a rule selects in a call after `n_past` cached tokens."""
    cache = {}
    if n_past is not None:
        cache = {"past_key_values": types.SimpleNamespace(get_seq_length=lambda: n_past)}
    n = len(mask)
    call = {"input_ids": torch.ones(n, length), "attention_mask": mask, **cache, **call}
    return select(TokenRule(tokens), call).mask.int().tolist()


def test_a_mask_of_a_static_cache_selects_as_one_of_the_tokens_so_far() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
    ones = mask.clone()
    ones[:, 7:] = 1  # later tokens do not exist yet
    for start, end in ((0, 5), (5, 6), (6, 7), (0, 3), (3, 7)):
        for tokens in ("all", "body", "first", "last"):
            cut = selected(tokens, end - start, mask[:, :end], start)
            for full in (mask, ones):
                assert selected(tokens, end - start, full, start) == cut, (start, end, tokens)
    assert selected("body", 5, mask, 0) == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    # If no argument shows the number of cached tokens, the tokens are the last ones.
    keys = torch.zeros(2, 1, 4, 3).transpose(2, 3)  # with another axis of the tokens
    state = types.SimpleNamespace(has_previous_state=True)
    for cache in ({}, {"cache_params": state}, {"state": [keys]}, {"past": [(keys, keys)]}):
        assert selected("body", 2, mask[:, :5], **cache) == [[1, 1], [1, 1]]
        assert selected("first", 2, mask[:, :4], **cache) == [[1, 0], [0, 0]]


def test_skipped_ids_are_left_out_after_a_cache() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    cache = types.SimpleNamespace(get_seq_length=lambda: 3)
    call = {"input_ids": torch.tensor([[7, 8], [8, 7]]), "past_key_values": cache}
    found = select(TokenRule("body", (7,)), {**call, "attention_mask": mask}).mask
    assert found.tolist() == [[False, True], [True, False]]
    step = {**call, "input_ids": IDS}
    for given in (step, {**step, "attention_mask": mask[:, :4]}):
        assert select(TokenRule("body", (7,)), given).mask.tolist() == [[False], [True]]


def test_steps_of_any_length_select_the_same_tokens() -> None:
    model, site = tiny("llama"), "model.layers.1"
    cache = cache_name(model)
    ids = inputs("llama", n=4, length=6)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2], mask[1, :4] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask, "z": torch.tensor([0, 1, 0, 1])}

    def steps(size: int) -> Any:
        def forward(model: Any, batch: Any) -> None:
            past: dict[str, Any] = {}
            for i in range(0, 6, size):
                output = model(
                    input_ids=batch["input_ids"][:, i : i + size],
                    attention_mask=batch["attention_mask"][:, : i + size], use_cache=True, **past,
                )  # fmt: skip
                past = {cache: output[cache]}

        return forward

    for tokens, n_rows in (("all", 18), ("body", 14), ("first", 4)):
        for size in (6, 2, 1):
            found = snn.collect(
                model, [batch], site, labels="z", tokens=tokens, forward=steps(size)
            )
            assert (found[site].n_rows, found.n_sequences) == (n_rows, 4), (tokens, size)
    # Each call gives each of its sequences the total weight 1.
    found = snn.collect(model, [batch], site, labels="z", weight="sequence", forward=steps(1))
    assert found[site].weight == 14


def test_a_window_leaves_earlier_tokens_attended() -> None:
    whole = torch.ones(6, 6).tril().bool() & torch.ones(6, 6).triu(-2).bool()
    whole = whole.expand(2, 1, 6, 6).clone()
    whole[0, :, :, :2] = False  # padding
    padded = [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert selected("all", 6, whole) == padded
    assert selected("body", 6, whole) == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]
    # In steps, with a mask over all keys, and with one over those in the window.
    for mask in (whole[:, :, 5:], whole[:, :, 5:, 3:]):
        assert selected("body", 1, mask, 5) == selected("last", 1, mask, 5) == [[1], [1]]
        assert selected("first", 1, mask, 5) == [[0], [0]]
    assert selected("first", 1, whole[:, :, 2:3, :3], 2) == [[1], [0]]


# --- sites of other shapes -----------------------------------------------------------------------


def form(function: Any) -> Any:
    """A model that maps the embedding of its tokens by a function before the site."""

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, x: Any = None) -> Any:
        return self.site(function(self.embed(input_ids) if x is None else x))

    return module(forward, embed=torch.nn.Embedding(50, 16), site=torch.nn.Identity())


def test_all_selects_attended_tokens_in_every_form_of_the_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    batch = {"input_ids": torch.ones(3, 4, dtype=torch.long), "attention_mask": mask}
    sound = {"x": torch.randn(3, 4, 16), "attention_mask": mask}

    def n_rows(function: Any, batch: Any) -> int:
        batch = {**batch, "z": torch.tensor([0, 1, 1])}
        found = snn.collect(form(function), [batch], "site", labels="z", tokens="all")
        return found["site"].n_rows

    assert n_rows(lambda h: h, batch) == n_rows(lambda h: h.flatten(0, 1), batch) == 9
    assert n_rows(lambda h: h.unflatten(-1, (2, 8)), batch) == 18  # (B, T, heads, d)
    # Sites without tokens: a pooled state, and another input of the model.
    assert n_rows(lambda h: h.mean(1), batch) == n_rows(lambda h: h.mean(1), sound) == 3
    assert n_rows(lambda h: torch.ones(3, 7, 16), batch) == 21
    # The rows of these sites are padding, too, but the mask does not show which rows.
    for function, call in ((lambda h: h[:, ::2], sound), (lambda h: h.transpose(0, 1), batch)):
        with pytest.raises(snn.SiteError, match=r"\(3, 4\); pass a function"):
            n_rows(function, call)


# --- other ways to call --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tokens", ["body", "first", "last", "all"])
@pytest.mark.parametrize("masked", [True, False])
def test_an_export_with_a_variable_batch_erases(tokens: str, masked: bool) -> None:
    model, keys = tiny("llama"), ["input_ids", *(["attention_mask"] if masked else [])]
    small, large = ({k: inputs("llama", n=n)[k] for k in keys} for n in (6, 9))
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {**{k: {0: batch} for k in keys}, "use_cache": None}
    # By products of vectors, and of matrices.
    erasers = {"model.layers.0": projection(rank=2), "model.layers.1": projection(rank=6, seed=1)}
    with snn.install(model, erasers, tokens=tokens), torch.no_grad():
        exported = torch.export.export(
            model, (), {**small, "use_cache": False}, dynamic_shapes=shapes, strict=False
        ).module()
        expected = model(**large).logits
    assert torch.allclose(exported(**large, use_cache=False).logits, expected, atol=1e-6)
    with torch.no_grad():
        assert not torch.allclose(model(**large).logits, expected, atol=1e-3)  # control
