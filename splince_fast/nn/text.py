"""Tokenisation of texts into padded batches that can be read repeatedly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from splince_fast._runtime.keywords import as_names
from splince_fast._solve.options import is_integer, is_number
from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels.names import listed
from splince_fast.nn.tokens import MISSING_LABEL


class TextBatches:
    """Batches of token ids with labels, which can be read repeatedly; made by :func:`text_batches`.

    A batch is a dictionary of the tensors of the tokenizer (``input_ids``, ``attention_mask``, ...)
    and of the labels.

    Parameters
    ----------
    encoded : sequence of mappings
        Output of the tokenizer for each text.
    labels : mapping of str to sequence
        Labels of each text.
    tokenizer : transformers tokenizer
        Tokenizer that pads the batches.
    batches : sequence of sequences of int
        Indices of the texts in each batch.

    Examples
    --------
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> from splince_fast import nn as snn
    >>> words = {"[PAD]": 0, "[UNK]": 1, "the": 2, "nurse": 3, "slept": 4}
    >>> model = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    >>> model.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]")
    >>> texts = {"prompt": ["the nurse slept", "slept"], "gender": [1, 0]}
    >>> batches = snn.text_batches(texts, tokenizer, text="prompt", labels="gender")
    >>> batches
    TextBatches(2 texts, 1 batches)
    >>> [batch["gender"].tolist() for batch in batches] * 2 == [
    ...     batch["gender"].tolist() for _ in range(2) for batch in batches
    ... ]
    True
    """

    def __init__(
        self,
        encoded: Sequence[Mapping[str, Any]],
        labels: Mapping[str, Sequence[Any]],
        tokenizer: Any,
        batches: Sequence[Sequence[int]],
    ) -> None:
        self._encoded, self._labels = encoded, labels
        self._tokenizer, self._batches = tokenizer, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __repr__(self) -> str:
        return f"TextBatches({len(self._encoded)} texts, {len(self)} batches)"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in self._batches:
            padded = self._tokenizer.pad(
                {key: [self._encoded[i][key] for i in index] for key in self._encoded[index[0]]},
                return_tensors="pt",
            )
            batch = dict(padded)
            length = batch["input_ids"].shape[1]
            for name, values in self._labels.items():
                batch[name] = self._collate([values[i] for i in index], length)
            yield batch

    def _collate(self, values: list[Any], length: int) -> object:
        """Return the labels of a batch as a tensor if they are numbers, otherwise as a list."""
        if isinstance(values[0], np.ndarray):  # one label per token
            missing = np.nan if values[0].dtype.kind == "f" else MISSING_LABEL
            padded = np.full((len(values), length), missing, values[0].dtype)
            for row, text_labels in zip(padded, values, strict=True):
                if self._tokenizer.padding_side == "left":
                    row[length - len(text_labels) :] = text_labels
                else:
                    row[: len(text_labels)] = text_labels
            return torch.from_numpy(padded)
        array = np.asarray(values)
        return torch.from_numpy(array) if array.dtype.kind in "biuf" else values


def text_batches(
    dataset: Any,
    tokenizer: Any,
    *,
    text: str,
    labels: Sequence[str] | str = (),
    batch_size: int = 32,
    max_length: int | None = None,
    words: bool = False,
    random_state: int | None = None,
) -> TextBatches:
    """Tokenise the texts of a data set, and pad batches of texts of similar length.

    Parameters
    ----------
    dataset : datasets.Dataset, data frame, mapping of columns, or list of rows
        Texts and labels.
    tokenizer : transformers tokenizer
        Tokenizer with a padding token, which may pad on either side.
    text : str
        Column of texts; if `words` is True, of lists of words.
    labels : str or sequence of str
        Columns of labels, one per text; if `words` is True, also lists of integers or floats, one
        per word.
    batch_size : int
        Number of texts per batch.
    max_length : int, optional
        Number of tokens at which texts are truncated; by default the maximum of the tokenizer.
    words : bool
        Whether to align labels of words with tokens: the first token of a word gets the label of
        the word, the other tokens have missing labels (-100 for integers, NaN for floats).
    random_state : int, optional
        Seed to shuffle the batches once, so that all passes have the same order; by default batches
        are ordered from short to long.

    Returns
    -------
    TextBatches
        An iterable of dictionaries, which can be read repeatedly.

    Raises
    ------
    InputError
        A column is missing or has another length, or an entry is not a text; the tokenizer has no
        padding token, or returns a tensor with the name of a label.
    LabelError
        The number of labels of a text differs from the number of words.

    Examples
    --------
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> from splince_fast import nn as snn
    >>> words = {"[PAD]": 0, "[UNK]": 1, "the": 2, "nurse": 3, "slept": 4}
    >>> model = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    >>> model.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]")
    >>> texts = {"prompt": ["the nurse slept", "slept"], "gender": [1, 0]}
    >>> batches = snn.text_batches(texts, tokenizer, text="prompt", labels="gender")
    >>> (batch,) = batches
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    ([[4, 0, 0], [2, 3, 4]], [[1, 0, 0], [1, 1, 1]])
    >>> batch["gender"].tolist()  # from short to long
    [0, 1]
    """
    names = as_names(labels, "labels")
    columns = _columns(dataset, [text, *names])
    if getattr(tokenizer, "pad_token", None) is None:
        raise InputError(
            "the tokenizer has no padding token; set any token, for instance tokenizer.pad_token = "
            "tokenizer.eos_token (padding is masked)"
        )
    if not is_integer(batch_size) or batch_size < 1:
        raise InputError(f"batch_size is {batch_size!r}; it must be a positive integer")
    texts = list(columns.pop(text))
    if not texts:
        raise InputError("the data set holds no texts")
    for i, value in enumerate(texts):
        if not isinstance(value, str) and not (words and isinstance(value, Sequence)):
            kind = "list of words" if words else "text"
            raise InputError(f"text {i} is {value!r}, not a {kind}; leave it out")
    for name, values in columns.items():
        if len(values) != len(texts):
            raise InputError(
                f"{len(texts)} texts have {len(values)} labels {name!r}; pass one label per text"
            )
    options: dict[str, Any] = {"truncation": True}
    if max_length:
        options["max_length"] = max_length
    elif getattr(tokenizer, "model_max_length", 0) > 1 << 30:  # the tokenizer has no maximum
        options = {}
    encodings = tokenizer(texts, is_split_into_words=words, **options)
    if name_clashes := columns.keys() & encodings.keys():
        raise InputError(
            f"a label is named {min(name_clashes)!r}, as is a tensor that the tokenizer returns; "
            "rename the label"
        )
    encoded = [{key: encodings[key][i] for key in encodings} for i in range(len(texts))]
    for name, values in columns.items():
        if words:
            values = [
                _align_labels(name, i, encodings.word_ids(i), values[i], len(texts[i]))
                for i in range(len(texts))
            ]
        columns[name] = _common_dtype(values)
    order = np.argsort([len(encoding["input_ids"]) for encoding in encoded], kind="stable")
    batches = [order[i : i + batch_size].tolist() for i in range(0, len(order), batch_size)]
    if random_state is not None:
        permutation = np.random.default_rng(random_state).permutation(len(batches))
        batches = [batches[i] for i in permutation]
    return TextBatches(encoded, columns, tokenizer, batches)


def _columns(dataset: Any, names: list[str]) -> dict[str, Any]:
    """Return columns of a data set as lists; raise InputError if a column is missing."""
    if isinstance(dataset, list | tuple):
        first = dataset[0] if dataset else {}
        available = list(first) if isinstance(first, Mapping) else []
        if all(name in available for name in names):
            for i, row in enumerate(dataset):
                if absent := [name for name in names if name not in row]:
                    raise InputError(
                        f"row {i} of the data set has no {listed(absent)}; it has {listed(row)}"
                    )
            return {name: [row[name] for row in dataset] for name in names}
    else:
        columns = getattr(dataset, "column_names", getattr(dataset, "columns", dataset))
        columns = dataset if columns is None else columns
        if not isinstance(columns, Iterable):
            raise InputError(
                f"the data set is {dataset!r}; pass a Hugging Face data set, a data frame, a "
                "mapping of columns, or a list of rows"
            )
        available = list(columns)
        if all(name in available for name in names):
            return {name: _as_list(dataset[name]) for name in names}
    missing = [name for name in names if name not in available]
    raise InputError(f"the data set has no columns {missing}; it has {available}")


def _as_list(column: Any) -> list[Any]:
    return list(column.tolist() if hasattr(column, "tolist") else column)


def _common_dtype(labels: list[Any]) -> list[Any]:
    """Return the labels of all texts; numbers become floats if any text has floats."""
    if not all(isinstance(values, np.ndarray) or is_number(values) for values in labels):
        return labels
    arrays = [np.asarray(values) for values in labels]
    if not any(a.dtype.kind == "f" for a in arrays):
        return labels
    return [
        (a if a.dtype.kind == "f" else np.where(a == MISSING_LABEL, np.nan, a))[()] for a in arrays
    ]


def _align_labels(name: str, i: int, word_ids: Any, values: Any, n_words: int) -> Any:
    """Return one label per token of text `i`, computed from one label per word.

    A single label for the text is returned unchanged.
    """
    array = np.asarray(values)
    if array.ndim == 0:
        return array[()]
    if len(array) != n_words or array.dtype.kind not in "biuf":
        raise LabelError(
            f"text {i} has {n_words} words, and its labels {name!r} are {values!r}; pass one "
            "integer or float per word"
        )
    real = array.dtype.kind == "f"
    labels = np.full(len(word_ids), np.nan if real else MISSING_LABEL, float if real else np.int64)
    previous = None
    for position, word in enumerate(word_ids):
        if word is not None and word != previous:
            labels[position] = array[word]
        previous = word
    return labels
