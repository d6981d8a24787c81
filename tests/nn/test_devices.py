"""nn.accumulate, nn.hooks: several devices, by tensors with a device and no memory."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import splince_fast as sf  # noqa: E402
from nn.conftest import projection  # noqa: E402
from splince_fast import nn as snn  # noqa: E402
from splince_fast.exceptions import NonFiniteError  # noqa: E402
from splince_fast.labels import encode  # noqa: E402
from splince_fast.moments.block import Workspace  # noqa: E402
from splince_fast.moments.parameters import Parameters  # noqa: E402
from splince_fast.moments.state import Scatter  # noqa: E402
from splince_fast.nn import accumulate  # noqa: E402
from splince_fast.nn.accumulate import SelectedRows, SiteSums  # noqa: E402
from splince_fast.nn.hooks import SiteHook  # noqa: E402
from splince_fast.nn.running import batch_to  # noqa: E402
from splince_fast.nn.tokens import Selection, TokenRule, select  # noqa: E402

PARAMETERS = Parameters.of(None, None, ())
CPU = torch.device("cpu")
GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Names and options of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func.overloadpacket), kwargs or {}))
        return func(*args, **(kwargs or {}))

    def options(self, name: str) -> list[dict[str, Any]]:
        return [options for seen, options in self.seen if seen == f"aten.{name}"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of any device, which pinning leaves as they are."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


# --- rows that are taken -------------------------------------------------------------------------


def test_an_index_is_copied_to_the_device_of_the_rows(fake: None) -> None:
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


def test_sums_on_a_device_equal_those_of_the_core(sums: Any) -> None:
    """Weights, classes, missing labels, columns and a reference point far away, in float32."""
    rng, width = np.random.default_rng(0), 70
    X = (rng.normal(size=(9000, width)) + 50 + np.linspace(0, 3, 9000)[:, None]).astype(np.float32)
    labels = {"z": rng.integers(0, 3, 9000), "y": rng.normal(size=(9000, 2))}
    labels["missing"] = np.ma.masked_equal(rng.integers(0, 3, 9000), 0)
    weight = rng.uniform(0.5, 2, 9000)
    found = SiteSums("a", width, torch.float32, CPU, PARAMETERS, Workspace())
    for batch, part in enumerate(np.split(np.arange(9000), [10, 5000, 5001])):
        encoded = encode({k: v[part] for k, v in labels.items()}, len(part))
        row_labels = SelectedRows(len(part), batch, weight[part], encoded)
        found.add(torch.from_numpy(X[part]), row_labels)
    ours = found.result()
    exact = sf.Moments().update(X.astype(float), labels, sample_weight=weight)
    assert isinstance(ours._accumulator.state.second, Scatter)
    assert ours.n_rows == 9000
    np.testing.assert_allclose(ours.weight, exact.weight, rtol=1e-12)
    np.testing.assert_allclose(ours.mean, exact.mean, rtol=1e-12)
    sd = np.sqrt(np.diag(exact.covariance()))
    np.testing.assert_allclose(ours.covariance(), exact.covariance(), atol=1e-6 * sd.max() ** 2)
    assert not np.array_equal(ours.covariance(), exact.covariance())  # control: float32 products
    pairs, expected = (m._accumulator.label_products for m in (ours, exact))
    assert pairs.cells.keys() == expected.cells.keys() != set()
    for pair, cells in expected.cells.items():
        np.testing.assert_allclose(pairs.cells[pair], cells, rtol=1e-10, atol=1e-10)
    for name in labels:
        expected = exact.cross_covariance(name)
        np.testing.assert_allclose(ours.cross_covariance(name), expected, atol=1e-11)


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


def test_copies_to_a_gpu_are_asynchronous_and_those_to_the_host_are_not(fake: None) -> None:
    def blocks(run: Any) -> list[bool]:
        with Operations() as operations:
            run()
        copies = operations.options("_to_copy")
        return [not options.get("non_blocking", False) for options in copies]

    here, there = torch.zeros(2, 3), torch.zeros(2, 3, device=GPUS[0])
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert blocks(lambda: accumulate.to_device(here, GPUS[0])) == [False]
    assert blocks(lambda: batch_to({"a": [here]}, GPUS[0])) == [False]
    rows = torch.zeros(2, 3, 4)
    assert blocks(lambda: Selection(mask, "body").mask_for("a", rows.to(GPUS[0])))[1:] == [False]
    # What the host reads has to be there.
    assert blocks(lambda: accumulate.to_device(there, CPU)) == [True]
    assert blocks(lambda: batch_to(there, CPU)) == [True]
    far = torch.zeros(2, 3, dtype=torch.bool, device=GPUS[0])
    assert blocks(lambda: Selection(far, "body").mask_for("a", rows)) == [True]


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


def test_a_copy_to_a_gpu_comes_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = torch.zeros(2)
        accumulate.to_device(values, CPU)
        assert not pinned
        accumulate.to_device(values, GPUS[0])
    assert pinned == [values]


def test_memory_that_torch_reserves_without_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 20}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert accumulate.free_memory(GPUS[0]) == 150
