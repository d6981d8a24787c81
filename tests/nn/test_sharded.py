"""nn: models that are offloaded by accelerate, sharded by FSDP2, or moved; sums over processes."""

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

import splince_fast as sf
from nn.conftest import hooks_in, labelled, projection, tiny
from splince_fast import nn as snn

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
        with snn.install(model, erasers):
            found.append((model(**call).logits, collected.covariance()))
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


class Text(torch.nn.Module):
    """Tokens through three blocks; the last statement counts the calls that reach it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.ends = 0

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        h = self.embed(input_ids)
        for block in self.blocks:
            h = torch.tanh(block(h))
        self.ends += 1
        return h


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
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@torch.no_grad()
def test_sharded_weights_before_and_after_installing() -> None:
    ids, p, plain = batches()[0]["input_ids"], projection(rank=2), Text()
    before = plain(ids)
    with snn.install(plain, {"blocks.*": p}):
        expected = plain(ids)
    first, later = sharded(Text()), Text()
    with snn.install(first, {"blocks.*": p}) as installed:
        assert torch.allclose(first(ids), expected, atol=1e-6)
        assert installed.counts == {f"blocks.{i}": 1 for i in range(3)}
    assert torch.allclose(first(ids), before, atol=1e-6)
    with snn.install(later, {"blocks.*": p}):
        assert torch.allclose(sharded(later)(ids), expected, atol=1e-6)
    assert not torch.allclose(expected, before, atol=1e-3)


@pytest.mark.usefixtures("alone")
def test_no_early_end_and_no_fold_of_sharded_weights() -> None:
    model, plain = sharded(Text()), Text()
    for one in (model, plain):
        snn.fit_layers(one, batches(), SITES, sf.leace, erase="z")
    assert model.ends == 1 + 6 + 6  # a rank that ends early would leave the others waiting
    assert plain.ends == 1 + 6  # control: the order of the sites, and the first pass
    before = hooks_in(model)
    with pytest.raises(snn.FoldError, match="distributed"):
        snn.fold(model, {"blocks.1": projection()}, example=batches()[0]["input_ids"])
    assert hooks_in(model) == before


# --- several processes ---------------------------------------------------------------------------

WORLD = 3  # not a power of two


def _worker(rank: int, folder: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    own = batches()[rank::WORLD]
    for kind, model in (("plain", Text()), ("sharded", sharded(Text()))):
        found = snn.collect(model, own, SITES, labels="z").all_reduce()
        found.save(f"{folder}/{kind}{rank}.safetensors")
    other = snn.collect(Text(), own, SITES[:1] if rank else SITES, labels="z")
    try:
        other.all_reduce()
    except sf.exceptions.IncompatibleMomentsError:
        Path(f"{folder}/refused{rank}").touch()
    dist.destroy_process_group()
    # FSDP keeps the group, so gloo's threads run on and may abort the interpreter's own end.
    os._exit(0)


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
    whole = snn.collect(Text(), batches(), SITES, labels="z")
    for total in totals:
        assert total.n_sequences == whole.n_sequences == 48
        for site, moments in whole.items():
            assert total[site].n_rows == moments.n_rows
            scale = np.abs(moments.covariance()).max()
            # Products are float32.
            assert np.allclose(total[site].covariance(), moments.covariance(), atol=1e-6 * scale)
