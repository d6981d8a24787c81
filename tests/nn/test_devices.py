"""nn: models that are offloaded, sharded by FSDP2, or on several devices; sums over processes."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import splince_fast as sf
from nn.conftest import hooks_in, labelled, module, outputs, projection, tiny
from splince_fast import nn as snn
from splince_fast.nn import accumulate
from splince_fast.nn.accumulate import SelectedRows
from splince_fast.nn.calls import Selection, batch_to
from splince_fast.nn.installed import SiteHook

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
        assert operations.copies[-1].get("non_blocking", False) != blocks
        assert fake == pinned


def test_memory_that_torch_reserves_without_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 20}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert accumulate.free_memory(GPUS[0]) == 150


# --- offloaded and moved -------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_models_offloaded_by_accelerate_are_erased(to: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    site, batch, erasers = "model.layers.1", labelled("llama", 6), {"model.layers.*": projection()}
    call = {k: v for k, v in batch.items() if k != "z"}
    found = []
    for model in (tiny("llama"), tiny("llama")):
        if found and to == "cpu":
            accelerate.cpu_offload(model, execution_device="cpu")
        elif found:
            accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
        collected = snn.collect(model, [batch], site, labels="z", tokens="all")[site]
        found.append((outputs(model, call, erasers), collected.covariance()))
    (expected, plain), (logits, covariance) = found
    assert torch.allclose(logits, expected)
    assert np.allclose(covariance, plain, atol=1e-6)
    with pytest.raises(snn.FoldError, match="offloaded"):
        snn.fold(model, {"model.norm": projection()}, {"model.norm": "lm_head"}, example=call)


def test_a_model_that_changes_its_dtype_later() -> None:
    model, p = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Linear(16, 16)), projection()
    x = torch.randn(30, 5)
    with snn.install(model, {"0": p}):
        model.to(torch.bfloat16)
        narrow = torch.nn.functional.linear(x.bfloat16(), model[0].weight, model[0].bias)
        assert torch.equal(model(x.bfloat16()), model[1](snn.Eraser(p)(narrow)))
        model.double()
        assert model(x.double()).dtype == torch.float64


# --- sharded -------------------------------------------------------------------------------------


def text() -> Any:
    """A model of tokens through three blocks; its last statement counts the calls that reach it."""

    def forward(self: Any, input_ids: Any, attention_mask: Any = None) -> Any:
        h = self.embed(input_ids)
        for block in self.blocks:
            h = torch.tanh(block(h))
        self.ends += 1
        return h

    torch.manual_seed(0)
    embed = torch.nn.Embedding(50, 16)
    blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
    return module(forward, embed=embed, blocks=blocks, ends=0)


def batches() -> list[dict[str, Any]]:
    """Left-padded batches; the label is a number that the tokens tell."""
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(8, 5, dtype=torch.long)
    mask[:3, :2] = 0
    ids = torch.randint(0, 50, (6, 8, 5), generator=g)
    return [{"input_ids": i, "attention_mask": mask, "z": (i[:, -1] > 25).long()} for i in ids]


SITES = ["blocks.0", "blocks.1"]


def sharded(model: Any) -> Any:
    """The same model with its weights spread over the processes of the group."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@torch.no_grad()
def test_sharded_weights_before_and_after_installing() -> None:
    ids, at, plain = batches()[0]["input_ids"], {"blocks.*": projection(rank=2)}, text()
    before, expected = (outputs(plain, {"input_ids": ids}, erasers) for erasers in ({}, at))
    first, later = sharded(text()), text()
    with snn.install(first, at) as installed:
        assert torch.allclose(first(ids), expected, atol=1e-6)
        assert installed.counts == {f"blocks.{i}": 1 for i in range(3)}
    assert torch.allclose(first(ids), before, atol=1e-6)
    with snn.install(later, at):
        assert torch.allclose(sharded(later)(ids), expected, atol=1e-6)
    assert not torch.allclose(expected, before, atol=1e-3)


@pytest.mark.usefixtures("alone")
def test_no_early_end_and_no_fold_of_sharded_weights() -> None:
    model, plain = sharded(text()), text()
    for one in (model, plain):
        snn.fit_layers(one, batches(), SITES, sf.leace, erase="z")
    assert model.ends == 1 + 6 + 6  # a rank that ends early would leave the others waiting
    assert plain.ends == 1 + 6  # control: the order of the sites, and the first pass
    found = snn.collect(model, batches(), SITES, labels="z")
    total = found.all_reduce()  # over a group of one
    assert total.n_sequences == 48
    assert all(np.array_equal(total[s].covariance(), found[s].covariance()) for s in SITES)
    before = hooks_in(model)
    with pytest.raises(snn.FoldError, match="distributed"):
        snn.fold(model, {"blocks.1": projection()}, example=batches()[0]["input_ids"])
    assert hooks_in(model) == before


# --- several processes ---------------------------------------------------------------------------

WORLD = 3  # not a power of two


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    own = batches()[rank::WORLD]
    for kind, model in (("plain", text()), ("sharded", sharded(text()))):
        found = snn.collect(model, own, SITES, labels="z").all_reduce()
        found.save(f"{folder}/{kind}{rank}.safetensors")
    other = snn.collect(text(), own, SITES[:1] if rank else SITES, labels="z")
    try:
        other.all_reduce()
    except sf.exceptions.IncompatibleMomentsError:
        Path(f"{folder}/refused{rank}").touch()
    dist.destroy_process_group()
    # FSDP keeps the group, so gloo's threads run on and may abort the interpreter's own end.
    os._exit(0)


@pytest.mark.slow
def test_all_reduce_sums_over_processes() -> None:
    totals = []
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_worker, args=(r, folder)) for r in range(WORLD)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(240)
        assert [worker.exitcode for worker in workers] == [0] * WORLD
        assert len(list(Path(folder).glob("refused*"))) == WORLD
        for kind in ("plain", "sharded"):
            files = [Path(f"{folder}/{kind}{r}.safetensors") for r in range(WORLD)]
            assert len({file.read_bytes() for file in files}) == 1
            totals.append(snn.Collected.load(files[0]))
    whole = snn.collect(text(), batches(), SITES, labels="z")
    for total in totals:
        assert total.n_sequences == whole.n_sequences == 48
        for site, moments in whole.items():
            assert total[site].n_rows == moments.n_rows
            scale = np.abs(moments.covariance()).max()
            # Products are float32.
            assert np.allclose(total[site].covariance(), moments.covariance(), atol=1e-6 * scale)
