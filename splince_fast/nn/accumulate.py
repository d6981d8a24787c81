"""Moments of activations: the core's accumulator on a CPU, its subclass for torch elsewhere.

Both take labels, classes, merging and files from :mod:`splince_fast.moments`. On a device only
the buffered rows and the scatter are tensors: a full buffer is centred and multiplied there, and
its sums reach the host in one transfer. Products are float32 and are added in float64, except on
GPUs whose float64 products are as fast.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splince_fast._runtime.arrays import Rows, torch_to_numpy
from splince_fast.exceptions import InputError, NonFiniteError
from splince_fast.labels import Encoded, VariableName
from splince_fast.moments import Moments
from splince_fast.moments.accumulator import Accumulator, Batch, sweep_of
from splince_fast.moments.block import Reduced
from splince_fast.moments.buffer import Buffer, LabelledRows, Workspace
from splince_fast.moments.moments import from_accumulator
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.scatter import EPS32, EPS64, Scatter
from splince_fast.moments.state import State
from splince_fast.nn.eraser import no_autocast
from splince_fast.nn.memory import on_device

Tensor = Any
Float = NDArray[np.float64]

# Fraction of d^2 float64 numbers that buffered rows may take, and their least and greatest number.
_BUFFER_FRACTION = 0.25
_BUFFER_ROWS = (256, 4096)
# Column panels of a scatter on a device, of which the part right of the diagonal is computed.
_PANELS = 4
# Widths below which there is one panel.
_LEAST_WIDTH = 64
# Compute capabilities whose float64 products are about as fast as float32.
_FAST_FLOAT64 = ((8, 0), (9, 0), (10, 0))


@dataclass(frozen=True)
class RowLabels:
    """Labels of the rows that one call of a module adds; all sites share them.

    `sequence` (n,) numbers the sequences of the batch.
    """

    n: int
    batch: int
    weight: Float | None
    encoded: Mapping[VariableName, Encoded]
    sequence: NDArray[np.intp]


def home_of(device: Any) -> Any:
    """The device itself, or the CPU where a device has no float64."""
    return torch.device("cpu") if device.type in ("mps", "meta") else device


def on_host(home: Any) -> bool:
    """Whether NumPy can view the rows there, for the core's kernels."""
    return bool(home.type == "cpu")


def _fast_float64(device: Any) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in _FAST_FLOAT64


def buffer_rows(width: int, itemsize: int) -> int:
    """Rows that a site buffers: few beside its d^2 numbers, enough for a fast product."""
    rows = int(_BUFFER_FRACTION * 8 * width / itemsize)
    return min(max(rows, _BUFFER_ROWS[0]), _BUFFER_ROWS[1])


class SiteSums:
    """The moments of one site, while it is collected.

    Parameters
    ----------
    name : str
        For messages.
    width : int
    dtype : torch.dtype
        Of the first rows.
    home : torch.device
        Where the scatter lives.
    parameters : Parameters
        Of the moments that result.
    work : Workspace
        Shared by all sites on a CPU.
    """

    def __init__(
        self, name: str, width: int, dtype: Any, home: Any, parameters: Parameters, work: Workspace
    ) -> None:
        self.name, self.width, self.home = name, width, home
        self._parameters, self._work = parameters, work
        self._batches: list[tuple[int, int]] = []  # the first row and the number of each
        self._on_host = on_host(home)
        itemsize = max(4, dtype.itemsize) if self._on_host else dtype.itemsize
        own = replace(parameters, block_rows=buffer_rows(width, itemsize))
        self.accumulator = Accumulator(own, work) if self._on_host else DeviceAccumulator(own, home)

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the rows that are buffered."""
        return self.accumulator.nbytes - (self._work.nbytes if self._on_host else 0)

    def feed(self, rows: Tensor, labels: RowLabels) -> None:
        """Add rows (n, d) from any device.

        Raises
        ------
        NonFiniteError
            Rows hold NaN or infinity; on a device raised when the buffer is full.
        """
        start = self.accumulator.n_rows
        self._batches.append((start, labels.batch))
        rows = rows.to(self.home)
        try:
            if self._on_host:
                given, device = Rows.known(torch_to_numpy(rows)), False
            else:
                given, device = Rows(rows, rows.dtype, True), True
            self.accumulator.update(
                given, labels.weight, labels.encoded, in_order=True, checked=device
            )
        except _NonFiniteRow as error:
            raise self._named(error.row) from None
        except NonFiniteError:
            raise self._named(start + _first_bad(rows)) from None

    def _named(self, row: int) -> NonFiniteError:
        """The error that names site, batch and row."""
        first, batch = self._batches[bisect_right(self._batches, row, key=itemgetter(0)) - 1]
        return NonFiniteError(
            f"the site {self.name!r} gave NaN or infinity in row {row - first} of batch {batch} "
            "(rows count the selected tokens); in float16 this is often an overflow: run the "
            "model in bfloat16 or float32"
        )

    def result(self) -> Moments:
        """The moments of all rows; these sums are used up.

        Raises
        ------
        NonFiniteError
            Buffered rows hold NaN or infinity, or products on a device have overflowed.
        """
        try:
            self.accumulator.settle()
        except _NonFiniteRow as error:
            raise self._named(error.row) from None
        state = self.accumulator.state
        if state is not None and not np.isfinite(state.second.diagonal()).all():
            raise NonFiniteError(
                f"the products at the site {self.name!r} leave the range of float32 (activations "
                "beyond 1e18); run the model in float64, or look for what overflows"
            )
        return from_accumulator(self.accumulator, self._parameters)


# -- on a device -----------------------------------------------------------------------------


class _NonFiniteRow(Exception):
    """A buffer holds NaN or infinity; `row` counts from the first row of the site."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def _first_bad(rows: Tensor) -> int:
    """Number of the first row that holds NaN or infinity; 0 for none."""
    return int((~torch.isfinite(rows).all(1)).int().argmax())


class DeviceAccumulator(Accumulator):
    """An accumulator whose rows and scatter are tensors on one device.

    Rows are added in their order with `checked=True`. Sums are about the mean of the first block.
    """

    def __init__(self, parameters: Parameters, device: Any) -> None:
        super().__init__(parameters)
        self.device = device
        self._probed = False

    def settle(self) -> None:
        """Reduce the buffered rows, and move the scatter to the host."""
        self.flush()
        if self.state is not None and isinstance(self.state.second, DeviceScatter):
            self.state.second = self.state.second.on_host()

    def _empty_state(self, width: int) -> State:
        second = DeviceScatter(width, self.device)
        return State(np.zeros(width), 0, 0.0, np.zeros(width), second, None)

    def _reserve(self, width: int, dtype: Any) -> int:
        return self.parameters.capacity(width, dtype.itemsize)

    def _buffer_for(self, width: int, dtype: Any) -> Buffer:
        buffer = self.buffer
        if buffer is None or buffer.rows.dtype != dtype:
            self.flush()
            empty = partial(torch.empty, dtype=torch.float64, device=self.device)
            return Buffer(self._reserve(width, dtype), width, dtype, empty)
        return buffer

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Reduce a block on the device; the host waits once, for its sums.

        With c the mean of the block, Y = X - c and C the coefficients of weights, classes and
        values, the sums about the reference point r are C Y + (C 1) (c - r)^T.
        """
        state, n = batch.state, len(block)
        rows: Tensor = block.rows
        exact = rows.dtype == torch.float64 or _fast_float64(self.device)
        asked = [batch.variables[name].ask(z, block.weight) for name, z in block.labels.items()]
        codes, n_sums, values = sweep_of(asked, n)
        coefficients = _coefficients(block.weight, codes, n_sums, values)
        totals = coefficients.sum(axis=1)
        with no_autocast(rows):
            if not (exact or self._probed):
                _check_products(self.device, n, state.width)
                self._probed = True
            wide = rows.to(torch.float64)
            centre = wide.mean(0)
            y = wide - centre
            moved = on_device(torch.from_numpy(coefficients), self.device)
            sums = torch.cat([centre.unsqueeze(0), moved @ y]).cpu().numpy()
            if not np.isfinite(sums[0]).all():
                raise _NonFiniteRow(state.n_rows + _first_bad(rows))
            if block.weight is not None:
                y *= moved[0].sqrt().unsqueeze(1)
            reference = state.reference if state.weight else sums[0]
            residual = sums[1] / totals[0]
            sums = sums[1:] + np.outer(totals, sums[0] - reference)
            reduced = Reduced(
                n, float(totals[0]), sums[0], residual, y if exact else y.to(torch.float32), None,
                sums[1 : 1 + n_sums], sums[1 + n_sums :],
            )  # fmt: skip
            state.merge_block(reference, reduced, None)
        self._commit(batch, block, {}, asked, reduced.class_sums, reduced.products)
        if len(block.labels) > 1:
            self.pairs.add(block.labels, batch.variables, block.weight, within=False)


def _coefficients(
    weight: Float | None, codes: NDArray[np.intp], n_sums: int, values: Float
) -> Float:
    """(1 + n_sums + q, n): the weights, those of each class, and the weighted values."""
    n = codes.shape[1]
    by_class = np.zeros((2 + n_sums, n))
    by_class[0] = 1.0 if weight is None else weight
    by_class[codes + 1, np.arange(n)] = by_class[0]
    return np.concatenate([by_class[:-1], values])


def _check_products(device: Any, rows: int, width: int) -> None:
    """Raise InputError unless float32 products are float32: TF32 and bf16 modes are refused.

    The shapes are those of the first panel, since libraries choose by shape how they multiply.
    """
    probe = torch.zeros(rows, width, dtype=torch.float32, device=device)
    probe[0] = 1.0 + 2.0**-12
    product = torch.mm(probe[:, : _panel_width(width)].T, probe).to(torch.float64)
    if not bool(((product - (1.0 + 2.0**-11)).abs() < 2.0**-13).all()):
        raise InputError(
            f"matrix products of float32 on {device} are rounded to fewer bits (TF32 or "
            "bfloat16), which would spoil covariances; call "
            "torch.set_float32_matmul_precision('highest') before collecting"
        )


def _panel_width(width: int) -> int:
    return -(-width // _PANELS) if width >= _LEAST_WIDTH else width


class DeviceScatter(Scatter):
    """A scatter on a device: column panels of its part right of the diagonal."""

    def __init__(self, width: int, device: Any) -> None:
        super().__init__(np.empty((width, 0)), EPS64)
        self._step = _panel_width(width)
        self._panels = [
            torch.zeros(min(self._step, width - i), width - i, dtype=torch.float64, device=device)
            for i in range(0, width, self._step)
        ]

    @property
    def nbytes(self) -> int:
        return sum(panel.nbytes for panel in self._panels)

    def add_block(self, shifted: Any, product: object, vectors: Float, coefficients: Float) -> None:
        """Add shifted^T shifted + sum_k coefficients[k] vectors[k] vectors[k]^T."""
        signed = coefficients[:, None] * vectors
        outer = on_device(torch.from_numpy(np.stack([signed, vectors])), shifted.device)
        for k, panel in enumerate(self._panels):
            i = k * self._step
            part = shifted[:, i : i + len(panel)].T
            if shifted.dtype == torch.float64:
                panel.addmm_(part, shifted[:, i:])
            else:
                panel += torch.mm(part, shifted[:, i:])
            panel.addmm_(outer[0, :, i : i + len(panel)].T, outer[1, :, i:])
        if shifted.dtype == torch.float32:
            self.unit_roundoff = EPS32

    def on_host(self) -> Scatter:
        """The same in memory of the host."""
        upper = np.zeros((self.width, self.width))
        for k, panel in enumerate(self._panels):
            i = k * self._step
            upper[i : i + len(panel), i:] = panel.cpu().numpy()
        found = Scatter(upper.T, self.unit_roundoff)
        # The variance of a constant column can round below 0.
        np.maximum(found.diagonal(), 0.0, out=found.diagonal())
        return found
