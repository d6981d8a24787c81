"""nn.text: batches of texts, which are equal in each pass, with labels of texts or words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

import splince_fast as sf  # noqa: E402
from splince_fast import nn as snn  # noqa: E402

WORDS = ["the", "nurse", "said", "that", "he", "she", "is", "a", "doctor", "fore", "man"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{w: i + 2 for i, w in enumerate(WORDS)}, "##man": 20}
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]"
    )


DATA = {
    "text": ["the nurse said that he", "she", "a doctor", "the doctor is a nurse"],
    "gender": [0, 1, 0, 1],
    "score": [0.5, 1.0, 0.0, -1.0],
    "kind": ["x", "y", "x", "y"],
}


def forms() -> dict[str, Any]:
    found: dict[str, Any] = {
        "mapping": DATA,
        "rows": [dict(zip(DATA, row, strict=True)) for row in zip(*DATA.values(), strict=True)],
    }
    return found


@pytest.mark.parametrize("form", ["mapping", "rows", "pandas", "polars", "datasets"])
def test_batches_from_any_container(form: str, tokenizer: Any) -> None:
    if form in ("pandas", "polars", "datasets"):
        package = pytest.importorskip(form)
        data = package.Dataset.from_dict(DATA) if form == "datasets" else package.DataFrame(DATA)
    else:
        data = forms()[form]
    batches = snn.text_batches(
        data, tokenizer, text="text", labels=["gender", "score", "kind"], batch_size=2
    )
    first, again = list(batches), list(batches)
    assert len(batches) == len(first) == 2
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a)
    assert first[0]["attention_mask"].sum(1).tolist() == [1, 2]  # from short to long
    assert first[0]["gender"].tolist() == [1, 0]
    assert first[0]["score"].dtype == torch.float64
    assert first[0]["kind"] == ["y", "x"]
    assert "4 texts" in repr(batches)


def test_seed_shuffles_batches_the_same_way(tokenizer: Any) -> None:
    data = {"text": [" ".join(["the"] * n) for n in range(1, 30)], "n": list(range(1, 30))}
    make = lambda seed: [  # noqa: E731
        b["n"].tolist()
        for b in snn.text_batches(
            data, tokenizer, text="text", labels="n", batch_size=3, random_state=seed
        )
    ]
    assert make(1) == make(1) != make(None)
    assert sorted(make(1)) == make(None)


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_of_words_are_aligned_with_tokens(side: str, tokenizer: Any) -> None:
    tokenizer.padding_side = side
    data = {
        "words": [["the", "foreman", "said"], ["she"]],
        "tag": [[0, 1, 2], [3]],
        "score": [[0.0, 0.5, 1.0], [2.0]],
    }
    (batch,) = snn.text_batches(
        data, tokenizer, text="words", labels=["tag", "score"], words=True, batch_size=2
    )
    tokenizer.padding_side = "right"
    short, long = batch["tag"].tolist()
    assert long == [0, 1, -100, 2]  # the second token of "foreman" has no label
    assert short == ([-100, -100, -100, 3] if side == "left" else [3, -100, -100, -100])
    assert np.isnan(float(batch["score"][1, 2]))
    with pytest.raises(sf.LabelError, match="text 0 has 3 words"):
        snn.text_batches(
            {**data, "tag": [[0], [3]]}, tokenizer, text="words", labels="tag", words=True
        )


def test_texts_are_truncated_and_invalid_arguments_are_errors(tokenizer: Any) -> None:
    (batch,) = snn.text_batches(DATA, tokenizer, text="text", max_length=2, batch_size=4)
    assert batch["input_ids"].shape == (4, 2)
    with pytest.raises(sf.InputError, match="no columns"):
        snn.text_batches(DATA, tokenizer, text="prompt")
    with pytest.raises(sf.InputError, match="no columns"):
        snn.text_batches([], tokenizer, text="prompt")
    with pytest.raises(sf.InputError, match="batch_size"):
        snn.text_batches(DATA, tokenizer, text="text", batch_size=0)
    with pytest.raises(sf.InputError, match="no texts"):
        snn.text_batches({"text": []}, tokenizer, text="text")
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(sf.InputError, match="padding token"):
        snn.text_batches(DATA, bare, text="text")


@pytest.mark.parametrize("labels", [["x"], ["x", "y", "z"]])
def test_another_number_of_labels_than_of_texts_is_refused(labels: Any, tokenizer: Any) -> None:
    data = {"text": ["the nurse", "a"], "kind": labels}
    with pytest.raises(sf.InputError, match=f"2 texts have {len(labels)} labels 'kind'"):
        snn.text_batches(data, tokenizer, text="text", labels="kind")


def test_invalid_rows_and_names_of_labels_are_refused(tokenizer: Any) -> None:
    data = {"text": ["the nurse", "a"], "input_ids": [0, 1]}
    with pytest.raises(sf.InputError, match="named 'input_ids'"):
        snn.text_batches(data, tokenizer, text="text", labels="input_ids")
    with pytest.raises(sf.InputError, match="text 1 is None"):
        snn.text_batches({"text": ["a", None]}, tokenizer, text="text")
    with pytest.raises(sf.InputError, match="row 1 of the data set has no 'z'; it has 'text'"):
        snn.text_batches([{"text": "a", "z": 1}, {"text": "a"}], tokenizer, text="text", labels="z")


def test_integers_beside_floats_are_not_rounded(tokenizer: Any) -> None:
    """Labels of words: some texts hold whole numbers alone, others fractions."""
    data = {"words": [["she"], ["a", "foreman"]], "score": [[1], [0.5, 1.5]]}
    for order in ([0, 1], [1, 0]):
        rows = {name: [values[i] for i in order] for name, values in data.items()}
        (batch,) = snn.text_batches(rows, tokenizer, text="words", labels="score", words=True)
        short, long = batch["score"].tolist()  # from short to long
        assert [value for value in short if value == value] == [1.0]
        assert [value for value in long if value == value] == [0.5, 1.5]


def test_numbers_of_texts_have_one_kind_in_all_batches(tokenizer: Any) -> None:
    """Batches of whole numbers alone would be classes, beside batches of continuous values."""
    data = [{"text": "the " * (i + 1), "y": y} for i, y in enumerate([0, 1, 0.5, -100])]
    batches = snn.text_batches(data, tokenizer, text="text", labels="y", batch_size=2)
    first, second = (batch["y"] for batch in batches)
    assert first.dtype == second.dtype == torch.float64
    assert [*first.tolist(), second[0].item()] == [0, 1, 0.5]
    assert second[1].isnan()  # a missing label
