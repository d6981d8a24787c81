"""Moments of activations, accumulated by torch where the activations are.

The state of a site is float64 and lives on the device of the model; rows wait in a small buffer of
their own dtype until a block is full, and one workspace per device serves all sites. With c the
mean of a block in the dtype of its products, y = x - c, a = c - reference and W = sum w::

    sum w (x - reference)(x - reference)^T = Y^T Y + W ((a + r)(a + r)^T - r r^T),  r = sum w y / W

so that products are taken of centred numbers only, whatever the offset of the data. Products are
float32 and are added up in float64, but on GPUs whose float64 products are as fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splince_fast.exceptions import InputError, NonFiniteError, NotEnoughMemoryError
from splince_fast.labels import VariableName
from splince_fast.moments import Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.record import from_sums
from splince_fast.nn.labelled import LabelledRows, Registry

Tensor = Any
Float = NDArray[np.float64]

# Rows of the workspace; larger batches are reduced piece by piece.
_BLOCK_ROWS = 1024
# Share of a state that its waiting rows may take, and how many rows wait at least and at most.
_STAGE_SHARE = 0.2
_STAGE_ROWS = (256, 4096)
# Column panels of Y^T Y, of which only those on and above the diagonal are taken.
_PANELS = 4
# Compute capabilities whose float64 products are about as fast as float32.
_FAST_FLOAT64 = ((8, 0), (9, 0), (10, 0))


# -- memory --------------------------------------------------------------------------------


def free_memory(device: Any) -> int | None:
    """Bytes that are free on a device; None where it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def check_memory(device: Any, n_sites: int, width: int) -> None:
    """Raise NotEnoughMemoryError unless the states of all sites fit, before any is made."""
    needed, free = 8 * n_sites * width * width, free_memory(device)
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"the states of {n_sites} sites of {width} features take {needed:,} bytes, and "
            f"{device} has {free:,} free; collect at fewer sites at a time, or on a device with "
            "more memory (device='cpu')"
        )


class Workspace:
    """Work arrays for the blocks of all sites on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._arrays: dict[tuple[str, Any], Tensor] = {}
        self._checked = False

    def array(self, what: str, dtype: Any, rows: int, width: int) -> Tensor:
        """A matrix (rows, width); what it held is lost."""
        found = self._arrays.get((what, dtype))
        if found is None or found.numel() < rows * width:
            found = torch.empty(rows * width, dtype=dtype, device=self.device)
            self._arrays[what, dtype] = found
        return found[: rows * width].view(rows, width)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(a.numel() * a.element_size() for a in self._arrays.values())

    def check_products(self) -> None:
        """Raise InputError unless float32 products are float32: TF32 and bf16 modes are refused."""
        if self._checked:
            return
        probe = torch.full((64, 64), 1.0 + 2.0**-12, device=self.device)
        if not torch.equal(probe @ torch.eye(64, device=self.device), probe):
            raise InputError(
                f"matrix products of float32 on {self.device} are rounded to fewer bits (TF32 or "
                "bfloat16), which would spoil covariances; call "
                "torch.set_float32_matmul_precision('highest') before collecting"
            )
        self._checked = True


def home_of(device: Any) -> Any:
    """The device itself, or the CPU where a device has no float64."""
    return torch.device("cpu") if device.type in ("mps", "meta") else device


def _fast_float64(device: Any) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in _FAST_FLOAT64


# -- sums ----------------------------------------------------------------------------------


class SiteSums:
    """The sums of one site, about a fixed reference point near the mean of its first block."""

    def __init__(
        self, name: str, width: int, dtype: Any, work: Workspace, registry: Registry
    ) -> None:
        self.name, self.width, self.work, self.registry = name, width, work, registry
        self.n_rows, self.weight = 0, 0.0
        self.float32_products = False
        device = work.device
        rows = int(_STAGE_SHARE * 8 * width / dtype.itemsize)
        self._capacity = min(max(rows, _STAGE_ROWS[0]), _STAGE_ROWS[1])
        self._stage = torch.empty(self._capacity, width, dtype=dtype, device=device)
        self._waiting: list[LabelledRows] = []
        self._filled = 0
        self._reference: Tensor | None = None
        self._deviation = torch.zeros(width, dtype=torch.float64, device=device)
        self._scatter = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._classes: dict[VariableName, tuple[NDArray[np.int64], Float, Tensor]] = {}
        self._columns: dict[VariableName, _ColumnSums] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, the waiting rows included."""
        tensors = [self._stage, self._deviation, self._scatter]
        tensors += [sums for _, _, sums in self._classes.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def feed(self, rows: Tensor, labels: LabelledRows) -> None:
        """Add rows (n, d); full blocks are reduced, the others wait.

        Raises
        ------
        NonFiniteError
            When a block is reduced that holds NaN or infinity.
        """
        if rows.dtype.itemsize > self._stage.dtype.itemsize:  # a later batch is wider
            self.flush()
            self._stage = torch.empty_like(self._stage, dtype=rows.dtype)
        start, n = 0, labels.n
        while start < n:
            if not self._filled and n - start >= self._capacity:
                stop = min(n, start + _BLOCK_ROWS)
                self._reduce(rows[start:stop], [labels.slice(start, stop)])
            else:
                stop = min(n, start + self._capacity - self._filled)
                filled = self._filled + stop - start
                self._stage[self._filled : filled].copy_(rows[start:stop])
                self._waiting.append(labels.slice(start, stop))
                self._filled = filled
                if filled == self._capacity:
                    self.flush()
            start = stop

    def flush(self) -> None:
        """Reduce the rows that wait."""
        if self._filled:
            for start in range(0, self._filled, _BLOCK_ROWS):
                stop = min(self._filled, start + _BLOCK_ROWS)
                self._reduce(self._stage[start:stop], _between(self._waiting, start, stop))
            self._filled = 0
            self._waiting = []

    def _reduce(self, rows: Tensor, parts: list[LabelledRows]) -> None:
        """Add the sums of one block."""
        n, d = len(rows), self.width
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        y64 = self.work.array("block", torch.float64, n, d)
        y64.copy_(rows)
        mean = y64.mean(0)
        if not bool(torch.isfinite(mean).all()):
            self._refuse(rows, parts)
        centre = mean.to(wide).to(torch.float64)
        y64 -= centre
        if self._reference is None:
            self._reference = centre
        shift = centre - self._reference
        weight = _joined([p.weight if p.weight is not None else np.ones(p.n) for p in parts])
        weighted = any(p.weight is not None for p in parts)
        w = self._device(weight)
        total = w @ y64
        whole = float(weight.sum())
        self._add_labels(parts, weight, y64, shift)
        exact = wide == torch.float64 or _fast_float64(self.work.device)
        if weighted:
            y64 *= w.sqrt().unsqueeze(1)
        if exact:
            y = y64
        else:
            self.work.check_products()
            y = self.work.array("block", torch.float32, n, d)
            y.copy_(y64)
        self._add_products(y, shift, total / whole, whole)
        self._deviation += total + whole * shift
        self.n_rows += n
        self.weight += whole
        self.float32_products |= not exact

    def _add_products(self, y: Tensor, shift: Tensor, rest: Tensor, whole: float) -> None:
        """Add Y^T Y and what centring takes, on and above the diagonal panels."""
        d = self.width
        step = -(-d // _PANELS) if d >= 64 else d
        first = torch.stack([shift + rest, rest])
        second = torch.stack([whole * (shift + rest), -whole * rest])
        for i in range(0, d, step):
            j = min(d, i + step)
            target = self._scatter[i:j, i:]
            if y.dtype == torch.float64:
                target.addmm_(y[:, i:j].T, y[:, i:])
            else:
                product = self.work.array("product", torch.float32, j - i, d - i)
                torch.mm(y[:, i:j].T, y[:, i:], out=product)
                target += product
            target.addmm_(first[:, i:j].T, second[:, i:])

    def _add_labels(
        self, parts: list[LabelledRows], weight: Float, y64: Tensor, shift: Tensor
    ) -> None:
        names: dict[VariableName, None] = {}
        for part in parts:
            names |= dict.fromkeys(part.codes) | dict.fromkeys(part.values)
        for name in names:
            if name in self.registry.classes:
                missing = [np.full(p.n, -1, np.intp) for p in parts]
                codes = [p.codes.get(name, gap) for p, gap in zip(parts, missing, strict=True)]
                self._add_classes(name, _joined(codes), weight, y64, shift)
            else:
                width = len(self.registry.columns[name][0])
                gaps = [np.full((p.n, width), np.nan) for p in parts]
                values = [p.values.get(name, gap) for p, gap in zip(parts, gaps, strict=True)]
                self._add_columns(name, _joined(values), weight, y64, shift)

    def _add_classes(
        self, name: VariableName, codes: NDArray[np.intp], weight: Float, y64: Tensor, shift: Tensor
    ) -> None:
        k = len(self.registry.classes[name])
        rows, weights, sums = self._classes.get(
            name, (np.zeros(0, np.int64), np.zeros(0), y64.new_zeros(0, self.width))
        )
        if len(rows) < k:
            rows = np.concatenate([rows, np.zeros(k - len(rows), np.int64)])
            weights = np.concatenate([weights, np.zeros(k - len(weights))])
            sums = torch.cat([sums, sums.new_zeros(k - len(sums), self.width)])
        shown = np.flatnonzero(codes >= 0)
        own: Float = np.bincount(codes[shown], weight[shown], k).astype(np.float64)
        rows = rows + np.bincount(codes[shown], minlength=k)
        weights = weights + own
        # One row of coefficients per class that occurs: a product, which is the same every time.
        present = np.flatnonzero(np.asarray(own))
        mix = np.where(np.equal(codes, present[:, None]), weight, 0.0)
        where = self._device(present)
        sums[where] += self._device(mix) @ y64 + torch.outer(self._device(own[present]), shift)
        self._classes[name] = rows, weights, sums

    def _add_columns(
        self, name: VariableName, values: Float, weight: Float, y64: Tensor, shift: Tensor
    ) -> None:
        columns, reference = self.registry.columns[name]
        sums = self._columns.setdefault(name, _ColumnSums.empty(len(columns), y64))
        missing = np.asarray(np.isnan(values).any(axis=1))
        shown = np.where(missing, 0.0, weight)
        deviations = np.where(missing[:, None], 0.0, values - reference)
        weighted = shown[:, None] * deviations
        z_sum = weighted.sum(axis=0)
        sums.n_rows += int(len(values) - np.count_nonzero(missing))
        sums.weight += float(shown.sum())
        sums.z_sum += z_sum
        sums.squares += weighted.T @ deviations
        sums.x_sum += self._device(shown) @ y64 + float(shown.sum()) * shift
        sums.products += self._device(weighted.T) @ y64 + torch.outer(self._device(z_sum), shift)

    def _device(self, values: NDArray[Any]) -> Tensor:
        """An array on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.work.device)

    def _refuse(self, rows: Tensor, parts: list[LabelledRows]) -> None:
        """Raise NonFiniteError with site, batch and row."""
        bad = int((~torch.isfinite(rows).all(1)).int().argmax())
        for part in parts:
            if bad < part.n:
                raise NonFiniteError(
                    f"the site {self.name!r} gave NaN or infinity in row {part.first + bad} of "
                    f"batch {part.batch} (rows count the selected tokens); in float16 this is "
                    "often an overflow: run the model in bfloat16 or float32"
                )
            bad -= part.n

    def result(self) -> Moments:
        """The moments of all rows; these sums are used up."""
        if not self.n_rows or self._reference is None:
            return Moments(kinds=self.registry.kinds, joint=self.registry.joint)
        variables: dict[VariableName, Any] = {}
        for name, (rows, weights, sums) in self._classes.items():
            names = self.registry.classes[name][: len(rows)]
            variables[name] = ClassSums(self.width, names, rows, weights, _host(sums))
        for name, own in self._columns.items():
            columns, reference = self.registry.columns[name]
            variables[name] = ColumnSums(
                self.width, list(columns), own.n_rows, own.weight, reference, _host(own.x_sum),
                own.z_sum, _host(own.products), own.squares,
            )  # fmt: skip
        centre = self._deviation / self.weight
        self._scatter.addr_(self._deviation, centre, alpha=-1)
        scatter = _host(self._scatter)
        if not np.isfinite(scatter.trace()):
            raise NonFiniteError(
                f"the products at the site {self.name!r} leave the range of float32 (activations "
                "beyond 1e18); run the model in float64, or look for what overflows"
            )
        # The last subtraction may leave less than nothing of a column that hardly varies.
        diagonal = np.einsum("ii->i", scatter)
        np.maximum(diagonal, 0.0, out=diagonal)
        return from_sums(
            n_rows=self.n_rows,
            weight=self.weight,
            reference=_host(self._reference),
            deviation=_host(self._deviation),
            scatter=scatter,
            variables=variables,
            kinds=self.registry.kinds,
            joint=self.registry.joint,
            float32_products=self.float32_products,
        )


@dataclass
class _ColumnSums:
    """Sums of a continuous variable: those of z on the host, those with x on the device."""

    n_rows: int
    weight: float
    z_sum: Float
    squares: Float
    x_sum: Tensor
    products: Tensor

    @classmethod
    def empty(cls, k: int, like: Tensor) -> _ColumnSums:
        d = like.shape[1]
        return cls(0, 0.0, np.zeros(k), np.zeros((k, k)), like.new_zeros(d), like.new_zeros(k, d))


def _host(tensor: Tensor) -> Float:
    array: Float = tensor.cpu().numpy()
    return array


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _between(parts: list[LabelledRows], start: int, stop: int) -> list[LabelledRows]:
    """The rows from `start` to `stop` of several runs."""
    found, at = [], 0
    for part in parts:
        first, last = max(start - at, 0), min(stop - at, part.n)
        if first < last:
            found.append(part.slice(first, last))
        at += part.n
    return found
