"""nn.accumulate, nn.memory, nn.hooks: several devices, by tensors with a device and no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import splince_fast as sf  # noqa: E402
from splince_fast.exceptions import NonFiniteError  # noqa: E402
from splince_fast.labels import encode  # noqa: E402
from splince_fast.moments.block import Workspace  # noqa: E402
from splince_fast.moments.parameters import Parameters  # noqa: E402
from splince_fast.moments.state import Scatter  # noqa: E402
from splince_fast.nn import accumulate, memory  # noqa: E402
from splince_fast.nn.accumulate import RowLabels, SiteSums  # noqa: E402

PARAMETERS = Parameters.of(None, None, (), False)
CPU = torch.device("cpu")
GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]


# --- rows that are taken -------------------------------------------------------------------------


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
            found.add(
                rows[i * size : (i + 1) * size], RowLabels(size, i, None, {}, np.arange(size))
            )

    with pytest.raises(NonFiniteError) as caught:
        feed()
    assert f"row {bad % size} of batch {bad // size} " in str(caught.value)
    assert found.accumulator.state is None or not found.accumulator.state.n_rows


@pytest.mark.parametrize("width", [8, 70])
def test_sums_on_a_device_equal_those_of_the_core(width: int, sums: Any) -> None:
    """Weights, classes, columns and a reference point far away, to the rounding of float32."""
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(9000, width)) + 50 + np.linspace(0, 3, 9000)[:, None]).astype(np.float32)
    labels = {"z": rng.integers(0, 3, 9000), "y": rng.normal(size=(9000, 2))}
    weight = rng.uniform(0.5, 2, 9000)
    found = SiteSums("a", width, torch.float32, CPU, PARAMETERS, Workspace())
    for batch, part in enumerate(np.split(np.arange(9000), [10, 5000, 5001])):
        encoded = encode({k: v[part] for k, v in labels.items()}, len(part))
        row_labels = RowLabels(len(part), batch, weight[part], encoded, part)
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
    pairs, expected = ours._accumulator.pairs, exact._accumulator.pairs
    assert pairs.gram.size
    np.testing.assert_allclose(pairs.gram, expected.gram, rtol=1e-10, atol=1e-10)
    for name in labels:
        expected = exact.cross_covariance(name)
        np.testing.assert_allclose(ours.cross_covariance(name), expected, atol=1e-11)


# --- copies --------------------------------------------------------------------------------------


def test_memory_that_torch_reserves_without_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 20}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory.free_memory(GPUS[0]) == 150
