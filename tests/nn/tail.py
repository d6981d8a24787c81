"""The last blocks of SmolLM2 as a model, with batches of the states that reach them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nn.conftest import Professions, SmolLM2
from splince_fast import nn as snn

LABELS = ["stereotype", "factual"]
LAST_BLOCK = 29


class Tail:
    """A model of the blocks from `start` on, with batches of the states that reach them.

    Attributes
    ----------
    model : torch.nn.Module
        Sites are ``layers.<i - start>`` and ``norm``; weights are shared with the whole model.
    train, test : list of dict
        Batches of arguments and labels; 70 % of the professions are for training.
    """

    def __init__(
        self,
        smollm2: SmolLM2,
        batches_of: Callable[..., Any],
        professions: Professions,
        rows: Any,
        start: int,
    ) -> None:
        inner = smollm2.model.model
        self.start = start
        order = list(dict.fromkeys(professions.names))
        shuffled = np.random.default_rng(0).permutation(len(order))
        train = {order[i] for i in shuffled[: int(0.7 * len(order))]}
        first = copy.copy(inner)
        first._modules = dict(inner._modules)
        first.layers = torch.nn.ModuleList(list(inner.layers[:start]))
        first.norm = torch.nn.Identity()
        batches: dict[bool, list[Any]] = {True: [], False: []}
        for known in (True, False):
            chosen = [r for r in rows if (professions.names[r] in train) == known]
            chosen.sort(key=lambda r: len(professions.prompts[r].split()))
            for batch in batches_of(chosen, size=64):
                with torch.no_grad():
                    states = first(
                        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                        use_cache=False,
                    ).last_hidden_state  # fmt: skip
                batches[known].append(
                    {"inputs_embeds": states, "attention_mask": batch["attention_mask"],
                     "use_cache": False, **{k: batch[k] for k in LABELS}}
                )  # fmt: skip
        self.train, self.test = batches[True], batches[False]
        self.model = copy.copy(inner)
        self.model._modules = dict(inner._modules)
        self.model.layers = torch.nn.ModuleList(list(inner.layers[start:]))
        self.model.config = copy.deepcopy(inner.config)
        self.model.config.num_hidden_layers = len(inner.layers) - start
        head = smollm2.model.lm_head.weight.detach()
        ids = [
            smollm2.tokenizer(word, add_special_tokens=False)["input_ids"]
            for word in (" he", " she")
        ]
        assert [len(i) for i in ids] == [1, 1]
        self.direction = (head[ids[0][0]] - head[ids[1][0]]).double().numpy()

    @property
    def all(self) -> list[Any]:
        """Every batch."""
        return self.train + self.test

    def blocks(self, first: int, last: int = LAST_BLOCK) -> list[str]:
        """Names of the blocks of these numbers in the whole model."""
        return [f"layers.{i - self.start}" for i in range(first, last + 1)]

    def in_whole(self, erasers: snn.Erasers) -> dict[str, Any]:
        """The projections by the names of the whole model."""
        found = {}
        for name, projection in erasers.items():
            kind, _, number = name.partition(".")
            whole = f"layers.{int(number) + self.start}" if number else kind
            found[f"model.{whole}"] = projection
        return found

    def coefficients(self, erasers: Any) -> tuple[float, float]:
        """Stereotype and factual coefficient of log p(he) / p(she) on the test prompts."""
        odds, scores = [], []
        with snn.install(self.model, erasers) if erasers else torch.no_grad():
            for batch in self.test:
                with torch.no_grad():
                    inputs = {k: v for k, v in batch.items() if k not in LABELS}
                    states = self.model(**inputs).last_hidden_state[:, -1]
                odds.append(states.double().numpy() @ self.direction)
                scores.append(np.stack([batch[k].numpy() for k in LABELS], 1))
        z = np.concatenate(scores)
        design = np.column_stack([np.ones(len(z)), z])
        found = np.linalg.lstsq(design, np.concatenate(odds), rcond=None)[0]
        return float(found[1]), float(found[2])
