"""Accumulation of activations: with the NumPy accumulator on a CPU, with torch on other devices.

On a device, buffered rows and the scatter are tensors: a full buffer is centred and multiplied
there, and the weighted sums are copied to the host in one transfer. Products are float32, summed in
float64; they are float64 for float64 rows, or where the GPU computes them about as fast.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splince_fast._kernels.row_kernels import Call, Change, add
from splince_fast._runtime.rows import Rows, eps_of, torch_to_numpy
from splince_fast.exceptions import InputError, NonFiniteError, NotEnoughMemoryError
from splince_fast.labels import Encoded, VariableName
from splince_fast.moments import Moments
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.block import Block, BlockSums, Buffer, Workspace
from splince_fast.moments.moments import from_accumulator
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.state import EPS32, EPS64, Scatter, State
from splince_fast.nn.eraser import no_autocast

Float = NDArray[np.float64]

# Size of a buffer of rows with d features, as a fraction of the size of a d x d float64 matrix.
_BUFFER_FRACTION = 0.25
# Minimum and maximum number of rows in a buffer.
_BUFFER_ROWS = (256, 4096)
# Compute capabilities of GPUs whose float64 products are about as fast as float32 products.
_FAST_FLOAT64 = ((8, 0), (9, 0), (10, 0))


@dataclass(frozen=True)
class SelectedRows:
    """Labels, weights and indices of the n rows that one call selects."""

    n: int
    batch_index: int
    weight: Float | None  # (n,), None if all weights are 1
    encoded: Mapping[VariableName, Encoded]
    index: Tensor | None = None  # on the host; None for all rows

    def rows_of(self, flat: Tensor) -> Tensor:
        """Return the selected rows of a tensor (n, d)."""
        if self.index is None:
            return flat
        return flat.index_select(0, to_device(self.index, flat.device))


def on_host(device: torch.device) -> bool:
    """Return whether NumPy can view tensors on a device."""
    return bool(device.type == "cpu")


class SiteSums:
    """Moments of one site, accumulated during a collection."""

    def __init__(
        self,
        name: str,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        parameters: Parameters,
        work: Workspace,
    ) -> None:
        self.name, self.width, self.device = name, width, device
        self._parameters, self._work = parameters, work
        self._batch_starts: list[tuple[int, int]] = []  # first row and number of each batch
        self._on_host = on_host(device)
        itemsize = max(4, dtype.itemsize) if self._on_host else dtype.itemsize
        n_rows = int(np.clip(_BUFFER_FRACTION * 8 * width / itemsize, *_BUFFER_ROWS))
        buffered = replace(parameters, block_rows=n_rows)
        self.accumulator = (
            Accumulator(buffered, work) if self._on_host else DeviceAccumulator(buffered, device)
        )

    def add(self, rows: Tensor, labels: SelectedRows) -> None:
        """Add rows (n, d) from any device."""
        start = self.accumulator.n_rows
        self._batch_starts.append((start, labels.batch_index))
        rows = rows.to(self.device)
        try:
            changes = self.accumulator.prepare(
                Rows.from_array(torch_to_numpy(rows), rows.dtype)
                if self._on_host
                else Rows(rows, rows.dtype, True, eps_of(rows.dtype)),
                labels.weight,
                labels.encoded,
                in_order=True,
                checked=not self._on_host,
            )
            add(changes)
        except _NonFiniteRow as error:
            raise self._non_finite_error(error.args[0]) from None
        except NonFiniteError:
            raise self._non_finite_error(start + _first_non_finite(rows)) from None

    def _non_finite_error(self, row: int) -> NonFiniteError:
        """Return an error with the site, the batch and the position in the batch of a row."""
        i = bisect_right(self._batch_starts, row, key=itemgetter(0)) - 1
        start, batch_index = self._batch_starts[i]
        return NonFiniteError(
            f"the site {self.name!r} gave NaN or infinity in row {row - start} of batch "
            f"{batch_index} (rows count the selected tokens); in float16 this is often an "
            "overflow: run the model in bfloat16 or float32"
        )

    def result(self) -> Moments:
        """Return the moments of all rows; no rows can be added afterwards."""
        try:
            self.accumulator.merge_pending()
        except _NonFiniteRow as error:
            raise self._non_finite_error(error.args[0]) from None
        state = self.accumulator.state
        if state is not None and not np.isfinite(state.second.diagonal()).all():
            raise NonFiniteError(
                f"the products at the site {self.name!r} exceed the range of float32 (activations "
                "above 1e18); run the model in float64, or find the operation that overflows"
            )
        return from_accumulator(self.accumulator, self._parameters)


def free_memory(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes, or None if it is unknown."""
    if device.type == "cuda":
        # Memory that torch has reserved but does not use is free for new tensors.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type != "cpu" or not os.path.exists("/proc/meminfo"):
        return None
    with open("/proc/meminfo") as file:
        sizes = dict(line.split(":") for line in file)
    return int(sizes["MemAvailable"].split()[0]) * 1024  # the file has kibibytes


def check_memory(device: torch.device, n_sites: int, width: int) -> None:
    """Raise NotEnoughMemoryError unless the states of `n_sites` sites fit in free memory."""
    needed, free = 8 * n_sites * width * width, free_memory(device)
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"the states of {n_sites} sites of {width} features take {needed:,} bytes, and "
            f"{device} has {free:,} free; collect at fewer sites at a time, or on a device with "
            "more memory (device='cpu')"
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; a copy from the CPU to a GPU is asynchronous."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# -- devices ---------------------------------------------------------------------------------


class _NonFiniteRow(Exception):
    """Error for a buffered row with NaN or infinity; its argument is the index at the site."""


def _first_non_finite(rows: Tensor) -> int:
    """Return the index of the first row with NaN or infinity, or 0 if all rows are finite."""
    return int((~torch.isfinite(rows).all(1)).int().argmax())


class DeviceAccumulator(Accumulator):
    """Accumulator of deviations from the mean of the first block, as tensors on one device."""

    def __init__(self, parameters: Parameters, device: torch.device) -> None:
        super().__init__(parameters)
        self.device = device
        self._precision_checked = False

    def merge_pending(self) -> None:
        """Merge the buffered rows, and copy the scatter to the host."""
        self.flush()
        if self.state is not None and isinstance(self.state.second, DeviceScatter):
            self.state.second = self.state.second.to_host()

    def prepare(self, rows: Rows, weight: Any, encoded: Any, **options: Any) -> list[Change]:
        """Add rows, one block after the other, and return no further changes."""
        capacity = self._reserve(rows.width, rows.dtype)
        self._add_rows(rows, len(rows), weight, encoded, True, None, add, capacity)
        return []

    def _empty_state(self, width: int) -> State:
        second = DeviceScatter(width, self.device)
        return State(np.zeros(width), 0, 0.0, np.zeros(width), second)

    def _reserve(self, width: int, dtype: Any) -> int:
        return self.parameters.capacity(width, dtype.itemsize)

    def _buffer_for(self, capacity: int, rows: Rows) -> Buffer:
        buffer = self.buffer
        if buffer is None or buffer.rows.dtype != rows.dtype:
            self.flush()
            allocate = partial(torch.empty, device=self.device)
            return Buffer(capacity, rows.width, rows.dtype, allocate)
        return buffer

    def _reduce(
        self, block: Block, codes: NDArray[np.intp], class_weights: Float, values: Float
    ) -> BlockSums:
        """Reduce a block of rows on the device to sums about its mean, on the host."""
        # With the block X (n, d), its mean c and coefficients C, the sums are C (X - 1 c^T).
        # The host waits once for the device, when it copies the sums.
        n, n_sums = block.n, len(class_weights)
        rows: Tensor = block.rows
        use_float64 = rows.dtype == torch.float64 or (
            rows.is_cuda and torch.cuda.get_device_capability(self.device) in _FAST_FLOAT64
        )
        weights = np.zeros((1 + n_sums, n))
        weights[0] = 1.0 if block.weight is None else block.weight
        weights[codes + 1, np.arange(n)] = weights[0]
        coefficients = np.concatenate([weights, values])
        with no_autocast(rows):
            if not (use_float64 or self._precision_checked):
                _check_precision(self.device, n, rows.shape[1])
                self._precision_checked = True
            rows64 = rows.to(torch.float64)
            mean = rows64.mean(0)
            y = rows64 - mean
            c = to_device(torch.from_numpy(coefficients), self.device)
            sums = torch.cat([mean.unsqueeze(0), c @ y]).cpu().numpy()
            if not np.isfinite(sums[0]).all():
                n_merged = 0 if self.state is None else self.state.n_rows
                raise _NonFiniteRow(n_merged + _first_non_finite(rows))
            if block.weight is not None:
                y *= c[0].sqrt().unsqueeze(1)
        shift, total, class_sums, products = np.split(sums, [1, 2, 2 + n_sums])
        return BlockSums(
            n, float(coefficients[0].sum()), shift[0], total[0], np.full(rows.shape[1], np.nan),
            class_sums, products, y if use_float64 else y.to(torch.float32),
        )  # fmt: skip


def _check_precision(device: torch.device, n_rows: int, width: int) -> None:
    """Raise InputError if float32 products of this shape are rounded to fewer bits."""
    test_matrix = torch.zeros(n_rows, width, dtype=torch.float32, device=device)
    test_matrix[0] = 1.0 + 2.0**-12
    product = torch.mm(test_matrix.T, test_matrix).to(torch.float64)
    if not bool(((product - (1.0 + 2.0**-11)).abs() < 2.0**-13).all()):
        raise InputError(
            f"matrix products of float32 on {device} are rounded to fewer bits (TF32 or "
            "bfloat16), which would spoil covariances; call "
            "torch.set_float32_matmul_precision('highest') before collecting"
        )


class DeviceScatter(Scatter):
    """Scatter on a device."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(np.empty((width, 0)), EPS64)
        self._sums = torch.zeros(width, width, dtype=torch.float64, device=device)

    @property
    def nbytes(self) -> int:
        return int(self._sums.nbytes)

    def diagonal(self) -> Float:
        """Return NaN: the variances are on the device."""
        return np.full(len(self.matrix), np.nan)

    def added(
        self, sums: BlockSums, difference: Float, coefficient: float, work: Any
    ) -> list[Change]:
        """Return a change that adds a block on the device, as `Scatter.added` does."""
        vectors = np.stack([difference, sums.total / sums.weight_sum])
        scaled = np.array([[coefficient], [-sums.weight_sum]]) * vectors
        return [Call(self._add, sums.shifted, np.stack([scaled, vectors]))]

    def _add(self, shifted: Tensor, vectors: Float) -> None:
        with no_autocast(shifted):
            factors = to_device(torch.from_numpy(vectors), shifted.device)
            if shifted.dtype == torch.float64:
                self._sums.addmm_(shifted.T, shifted)
            else:
                self._sums += torch.mm(shifted.T, shifted)
                self.unit_roundoff = EPS32
            self._sums.addmm_(factors[0].T, factors[1])

    def to_host(self) -> Scatter:
        """Return a copy of the scatter on the host."""
        scatter = Scatter(np.array(self._sums.cpu().numpy(), order="F"), self.unit_roundoff)
        # Rounding can make the variance of a constant column negative: replace it by 0.
        np.maximum(scatter.diagonal(), 0.0, out=scatter.diagonal())
        return scatter
