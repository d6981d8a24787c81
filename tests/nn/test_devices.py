"""nn.accumulate, nn.installed: several devices, by tensors with a device and no memory."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nn.conftest import projection
from splince_fast import nn as snn
from splince_fast.exceptions import NonFiniteError
from splince_fast.moments.block import Workspace
from splince_fast.moments.parameters import Parameters
from splince_fast.nn import accumulate
from splince_fast.nn.accumulate import SelectedRows, SiteSums
from splince_fast.nn.calls import Selection, TokenRule, batch_to, select
from splince_fast.nn.installed import SiteHook

PARAMETERS = Parameters.of(None, None, ())
CPU = torch.device("cpu")
GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]


class Operations(TorchDispatchMode):
    """Options of the copies between devices that run."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._to_copy:
            self.copies.append(kwargs)
        return func(*args, **(kwargs or {}))

    def copies_that_block(self) -> list[bool]:
        return [not options.get("non_blocking", False) for options in self.copies]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """List of the pinned tensors, in a mode in which tensors of any device hold no memory."""
    pinned: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield pinned


# --- rows that are taken -------------------------------------------------------------------------


def test_an_index_is_copied_to_the_device_of_the_rows(fake: list[Any]) -> None:
    selected = SelectedRows(2, 0, None, {}, torch.tensor([0, 2]))
    for device in (*GPUS, CPU):
        # An index on another device would be an error here as it is there.
        assert selected.rows_of(torch.empty(3, 4, device=device)).device == device
    with pytest.raises(RuntimeError, match="same device"):  # control
        torch.empty(3, 4, device=GPUS[0]).index_select(0, torch.tensor([0, 2]))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the sums of a site by torch, with a buffer of 4096 rows."""
    monkeypatch.setattr(accumulate, "on_host", lambda home: False)
    monkeypatch.setattr(accumulate, "_BUFFER_ROWS", (4096, 4096))
    return lambda: SiteSums("a", 8, torch.float32, CPU, PARAMETERS, Workspace())


@pytest.mark.parametrize("bad", [0, 1023, 1024, 4000])
@pytest.mark.parametrize("size", [512, 8192])
def test_any_row_of_a_block_that_is_not_finite_is_named(bad: int, size: int, sums: Any) -> None:
    found, rows = sums(), torch.randn(8192, 8)
    rows[bad, 3] = torch.nan

    def feed() -> None:
        for i in range(8192 // size):
            found.add(rows[i * size : (i + 1) * size], SelectedRows(size, i, None, {}))

    with pytest.raises(NonFiniteError) as caught:
        feed()
    assert f"row {bad % size} of batch {bad // size} " in str(caught.value)
    assert found.accumulator.state is None or not found.accumulator.state.n_rows


# --- copies --------------------------------------------------------------------------------------


def test_erasers_are_copied_when_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: dict[str, list[Any]] = {}

    def copy_on(self: SiteHook, device: Any) -> None:
        copied.setdefault(self.name, []).append(device)

    monkeypatch.setattr(SiteHook, "copy_on", copy_on)
    parts = [torch.nn.Linear(16, 16, device="meta") for device in GPUS]
    with FakeTensorMode():
        for part, device in zip(parts, GPUS, strict=True):
            part.weight = torch.nn.Parameter(torch.empty(16, 16, device=device))
    snn.install(torch.nn.Sequential(*parts, torch.nn.ReLU()), {"?": projection()})
    # A module without weights may get its input from any of them.
    assert copied == {"0": GPUS[:1], "1": GPUS[1:], "2": GPUS}


def test_copies_to_a_gpu_are_asynchronous_and_those_to_the_host_are_not(fake: list[Any]) -> None:
    here, there = torch.zeros(2, 3), torch.zeros(2, 3, device=GPUS[0])
    near = torch.zeros(2, 3, dtype=torch.bool)
    rows, far_rows = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, device=GPUS[0])
    for run, blocks, pinned in (
        (lambda: accumulate.to_device(here, GPUS[0]), False, [here]),
        (lambda: batch_to({"a": [here]}, GPUS[0]), False, []),
        (lambda: Selection(near, "body").mask_for("a", far_rows), False, []),
        # The host may read a copy only after its end.
        (lambda: accumulate.to_device(there, CPU), True, []),
        (lambda: batch_to(there, CPU), True, []),
        (lambda: Selection(near.to(GPUS[0]), "body").mask_for("a", rows), True, []),
    ):
        fake.clear()
        with Operations() as operations:
            run()
        assert operations.copies_that_block()[-1:] == [blocks]
        assert fake == pinned


@pytest.mark.parametrize("rule", ["body", "all", "first", "last"])
def test_the_selection_of_tokens_does_not_wait_for_a_gpu(rule: str) -> None:
    device = torch.device("meta")  # the host cannot read its tensors
    masks = [
        torch.ones(2, 8, device=device),
        torch.ones(2, 3, 8, device=device),
        torch.ones(2, 1, 3, 8, dtype=torch.bool, device=device),
    ]
    with pytest.raises(RuntimeError):  # control
        bool(masks[0].any())
    for mask in masks:
        for n in (0, 5, torch.zeros((), dtype=torch.long, device=device)):
            call = {
                "input_ids": torch.ones(2, 3, device=device),
                "attention_mask": mask,
                "past_key_values": types.SimpleNamespace(get_seq_length=lambda n=n: n),
            }
            selected = select(TokenRule(rule), call).mask
            assert selected is not None
            assert (selected.device, tuple(selected.shape)) == (device, (2, 3))


def test_memory_that_torch_reserves_without_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 20}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert accumulate.free_memory(GPUS[0]) == 150
