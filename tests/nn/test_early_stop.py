"""nn.early_stop: passes over batches of several sizes, in which sites run once or repeatedly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import splince_fast as sf  # noqa: E402
from nn.conftest import hooks_in  # noqa: E402
from splince_fast import nn as snn  # noqa: E402
from splince_fast.nn.early_stop import sizes_of  # noqa: E402


class Chunks(torch.nn.Module):
    """A model that encodes long inputs in chunks of 4 tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.tanh, self.head = (
            torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5),
        )  # fmt: skip
        self.n_head_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded = torch.cat([self.encoder(chunk) for chunk in x.split(4, 1)], 1)
        self.n_head_calls += 1
        return self.head(self.tanh(encoded))


def batches_of(*lengths: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    z = torch.arange(40) % 2
    return [
        {
            "x": torch.randn(40, n, 3, generator=g)
            + z[:, None, None] * torch.randn(1, n, 3, generator=g),
            "z": z,
        }
        for n in lengths
    ]


@pytest.mark.parametrize("lengths", [(4, 8, 8), (8, 8, 4)])
def test_all_calls_are_collected_in_any_order_of_batches(lengths: tuple[int, ...]) -> None:
    batches = batches_of(*lengths)
    collected = snn.collect(Chunks(), batches, "encoder", labels="z")
    assert (collected["encoder"].n_rows, collected.sites[0].calls) == (800, 5)
    model = Chunks()
    # The chunks are independent: the eraser is exact, and no warning is given.
    erasers = snn.fit_layers(model, batches, ["encoder", "head"], sf.leace, erase="z")
    with snn.install(model, erasers):
        after = snn.collect(model, batches, ["encoder", "head"], labels="z")
    for name, moments in after.items():
        assert erasers[name].report.n_rows == moments.n_rows == 800
        assert np.linalg.norm(moments.cross_covariance("z")) < 1e-7
    assert hooks_in(model) == 0


def test_a_pass_over_a_batch_ends_early_after_a_complete_pass_over_a_larger_batch() -> None:
    model = Chunks()
    snn.collect(model, batches_of(3, 2, 4, 3, 4), "encoder", labels="z")
    assert model.n_head_calls == 2  # batches of lengths 3 and 4
    model.n_head_calls = 0
    snn.collect(model, batches_of(8, 8, 4), "encoder", labels="z")
    assert model.n_head_calls == 3  # the site runs repeatedly
    model.n_head_calls = 0
    snn.fit_layers(model, batches_of(3, 4, 3, 4), ["encoder"], sf.leace, erase="z")
    assert model.n_head_calls == 2


class Budget(torch.nn.Module):
    """A model of at most 12 tokens per call; without `extra` it runs its site twice."""

    def __init__(self) -> None:
        super().__init__()
        self.site = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, extra: object = None, flag: float = 1.0) -> torch.Tensor:
        parts = x.split(12 // x.shape[0], 1)
        y = torch.cat([self.site(part) for part in parts], 1)
        return y if extra is not None and flag else self.site(y)


@pytest.mark.parametrize(
    ("batches", "n_rows"),
    [
        ([{"x": (6, 2), "extra": 1}, {"x": (2, 6), "extra": 1}, {"x": (6, 6), "extra": 1}], 60),
        ([{"x": (6, 2), "extra": 1}, {"x": (6, 2)}, {"x": (6, 2), "extra": None}], 60),
        ([{"x": (6, 2), "extra": "aa"}, {"x": (6, 2), "extra": "b", "flag": 0.0}], 36),
        ([{"x": (6, 2), "extra": 1, "flag": True}, {"x": (6, 2), "extra": 1, "flag": False}], 36),
    ],
)
def test_other_combinations_of_sizes_and_arguments_run_to_the_end(
    batches: list[dict[str, Any]], n_rows: int
) -> None:
    batches = [{**b, "x": torch.ones(*b["x"], 3), "z": [0, 1] * (b["x"][0] // 2)} for b in batches]
    collected = snn.collect(Budget(), batches, "site", labels="z", tokens="all")
    assert collected["site"].n_rows == n_rows


def test_sizes_are_those_of_tensors_lists_and_integers() -> None:
    assert sizes_of(torch.ones(2, 3)) == sizes_of(np.ones((2, 3)))
    small = sizes_of({"x": (torch.ones(2, 3),), "steps": 4, "texts": ["a", "bcd"], "flag": None})
    large = sizes_of({"x": (torch.ones(2, 4),), "steps": 5, "texts": ["ab", "bcde"], "flag": None})
    assert small is not None
    assert large is not None
    assert small.keys() == large.keys()
    assert sum(small[key] < large[key] for key in small) == 3
    assert sizes_of({"flag": 0.5}).keys() != sizes_of({"flag": None}).keys()  # type: ignore[union-attr]
    assert sizes_of({"x": object()}) is None
