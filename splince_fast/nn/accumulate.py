"""Moments of activations, accumulated by torch where the activations are.

The state of a site is float64 and lives on the device of the model; rows wait in a small buffer of
their own dtype until a block is full, and one workspace per device serves all sites. With c the
mean of a block in the dtype of its products, y = x - c, a = c - reference and W = sum w::

    sum w (x - reference)(x - reference)^T = Y^T Y + W ((a + r)(a + r)^T - r r^T),  r = sum w y / W

so that products are taken of centred numbers only, whatever the offset of the data. Products are
float32 and are added up in float64, but on GPUs whose float64 products are as fast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splince_fast.exceptions import InputError, NonFiniteError
from splince_fast.labels import VariableName
from splince_fast.moments import Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.record import from_sums
from splince_fast.nn.eraser import no_autocast
from splince_fast.nn.labelled import Design, LabelledRows, Part, Registry
from splince_fast.nn.memory import Arena
from splince_fast.nn.panels import Panels

Tensor = Any
Float = NDArray[np.float64]

# Rows of the workspace; larger batches are reduced piece by piece.
_BLOCK_ROWS = 1024
# Share of d^2 float64 that the rows which wait may take, and how many wait at least and at most.
_STAGE_SHARE = 0.55
_STAGE_ROWS = (256, 4096)
# Rows that are widened to float64 at a time, where a cache has to hold them.
_CHUNK_ROWS = 128
# Compute capabilities whose float64 products are about as fast as float32.
_FAST_FLOAT64 = ((8, 0), (9, 0), (10, 0))


class Workspace:
    """Work arrays for the blocks of all sites on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.arena = Arena(device)
        self._arrays: dict[tuple[str, Any], Tensor] = {}
        self._design: tuple[list[Part], Design] | None = None
        self._checked: set[int] = set()

    def array(self, what: str, dtype: Any, rows: int, width: int) -> Tensor:
        """A matrix (rows, width); what it held is lost."""
        found = self._arrays.get((what, dtype))
        if found is None or found.numel() < rows * width:
            found = self.arena.empty(dtype, rows * width)
            self._arrays[what, dtype] = found
        return found[: rows * width].view(rows, width)

    def design(self, parts: list[Part], registry: Registry) -> Design:
        """The coefficients of a block; all sites ask for the same one in turn."""
        last = self._design
        if last is None or not _same(last[0], parts):
            last = self._design = (parts, registry.design(parts, self.device))
        return last[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(a.numel() * a.element_size() for a in self._arrays.values())

    def check_products(self, rows: int, width: int, panel: int) -> None:
        """Raise InputError unless float32 products are float32: TF32 and bf16 modes are refused.

        Once per width, of the shapes (panel, rows) and (rows, width), since libraries choose by
        shape how they multiply.
        """
        if width in self._checked:
            return
        probe = self.array("block", torch.float32, rows, width).zero_()
        probe[0] = 1.0 + 2.0**-12
        product = torch.mm(probe[:, :panel].T, probe).to(torch.float64)
        if not bool(((product - (1.0 + 2.0**-11)).abs() < 2.0**-13).all()):
            raise InputError(
                f"matrix products of float32 on {self.device} are rounded to fewer bits (TF32 or "
                "bfloat16), which would spoil covariances; call "
                "torch.set_float32_matmul_precision('highest') before collecting"
            )
        self._checked.add(width)


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
        rows = int(_STAGE_SHARE * 8 * width / dtype.itemsize)
        self._capacity = min(max(rows, _STAGE_ROWS[0]), _STAGE_ROWS[1])
        self._stage = work.arena.empty(dtype, self._capacity, width)
        self._waiting: list[Part] = []
        self._filled = 0
        self._reference: Tensor | None = None
        self._scatter = Panels(width, work.arena)
        self._sums = torch.zeros(1, width, dtype=torch.float64, device=work.device)
        self._classes: dict[VariableName, tuple[NDArray[np.int64], Float]] = {}
        self._columns: dict[VariableName, tuple[int, float, Float, Float]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, the waiting rows included."""
        tensors = (self._stage, self._sums)
        return self._scatter.nbytes + sum(int(t.nbytes) for t in tensors)

    def feed(self, rows: Tensor, labels: LabelledRows) -> None:
        """Add rows (n, d); full blocks are reduced, the others wait.

        Raises
        ------
        NonFiniteError
            When a block is reduced that holds NaN or infinity.
        """
        if rows.dtype.itemsize > self._stage.dtype.itemsize:  # a later batch is wider
            self.flush()
            self._stage = self.work.arena.empty(rows.dtype, self._capacity, self.width)
        start, n = 0, labels.n
        while start < n:
            if not self._filled and n - start >= self._capacity:
                blocks = (n - start - self._capacity) // _BLOCK_ROWS + 1
                stop = min(n, start + blocks * _BLOCK_ROWS)
                self._reduce(rows[start:stop], [(labels, start, stop)])
            else:
                stop = min(n, start + self._capacity - self._filled)
                filled = self._filled + stop - start
                self._stage[self._filled : filled].copy_(rows[start:stop])
                self._waiting.append((labels, start, stop))
                self._filled = filled
                if filled == self._capacity:
                    self.flush()
            start = stop

    def flush(self) -> None:
        """Reduce the rows that wait."""
        if self._filled:
            self._reduce(self._stage[: self._filled], self._waiting)
            self._filled = 0
            self._waiting = []

    def _reduce(self, rows: Tensor, parts: list[Part]) -> None:
        """Add the sums of rows, block by block; the device is asked once if they are finite."""
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        blocks = rows.split(_BLOCK_ROWS)
        means = [block.to(wide).mean(0) for block in blocks]
        if not bool(torch.isfinite(torch.stack(means)).all()):
            self._refuse(rows, parts)
        start = 0
        with no_autocast(rows):
            for block, mean in zip(blocks, means, strict=True):
                stop = start + len(block)
                self._reduce_block(block, mean, _between(parts, start, stop))
                start = stop

    def _reduce_block(self, rows: Tensor, mean: Tensor, parts: list[Part]) -> None:
        """Add the sums of one block with its mean."""
        n, d = len(rows), self.width
        wide = mean.dtype
        centre = mean.to(torch.float64)
        if self._reference is None:
            self._reference = centre
        shift = centre - self._reference
        exact = wide == torch.float64 or _fast_float64(self.work.device)
        if not exact:
            self.work.check_products(n, d, self._scatter.panel)
        design = self.work.design(parts, self.registry)
        y = self.work.array("block", torch.float64 if exact else torch.float32, n, d)
        sums = centre.new_zeros(len(design.rows), d)
        step = _CHUNK_ROWS if self.work.device.type == "cpu" else n
        for start in range(0, n, step):
            stop = min(n, start + step)
            room = self.work.array("chunk", torch.float64, stop - start, d)
            part = y[start:stop] if exact else room
            part.copy_(rows[start:stop])
            part -= centre
            sums.addmm_(design.rows[:, start:stop], part)
            if design.roots is not None:
                part *= design.roots[start:stop]
            if not exact:
                y[start:stop].copy_(part)
        self._scatter.add_block(y, self.work.array("product", torch.float32, d, d).view(-1))
        root, rest = design.whole**0.5, sums[0] / design.whole
        self._scatter.add_vector(root * (shift + rest), 1.0)
        self._scatter.add_vector(root * rest, -1.0)
        self._add(design, sums.addr_(design.sums, shift))
        self.n_rows += n
        self.weight += design.whole
        self.float32_products |= not exact

    def _add(self, design: Design, sums: Tensor) -> None:
        """Add the sums of rows about the reference point, and those of labels alone."""
        self._grow()
        self._sums.index_add_(0, design.slots, sums)
        for name, (rows, weights) in design.classes.items():
            before = self._classes.get(name, (rows[:0], weights[:0]))
            self._classes[name] = (
                _longer(before[0], len(rows)) + rows, _longer(before[1], len(rows)) + weights
            )  # fmt: skip
        for name, own in design.columns.items():
            old = self._columns.get(name, (0, 0.0, 0.0 * own[2], 0.0 * own[3]))
            self._columns[name] = (
                old[0] + own[0], old[1] + own[1], old[2] + own[2], old[3] + own[3]
            )  # fmt: skip

    def _grow(self) -> None:
        """Make room for all sums that are known by now."""
        missing = self.registry.n_slots - len(self._sums)
        if missing:
            self._sums = torch.cat([self._sums, self._sums.new_zeros(missing, self.width)])

    def _refuse(self, rows: Tensor, parts: list[Part]) -> None:
        """Raise NonFiniteError with site, batch and row."""
        finite = torch.isfinite(rows).all(1)
        if bool(finite.all()):
            raise self._overflow()
        bad = int((~finite).int().argmax())
        for part, start, stop in parts:
            if bad < stop - start:
                raise NonFiniteError(
                    f"the site {self.name!r} gave NaN or infinity in row {start + bad} of "
                    f"batch {part.batch} (rows count the selected tokens); in float16 this is "
                    "often an overflow: run the model in bfloat16 or float32"
                )
            bad -= stop - start

    def _overflow(self) -> NonFiniteError:
        return NonFiniteError(
            f"the products at the site {self.name!r} leave the range of float32 (activations "
            "beyond 1e18); run the model in float64, or look for what overflows"
        )

    def result(self) -> Moments:
        """The moments of all rows; these sums are used up."""
        if not self.n_rows or self._reference is None:
            return Moments(kinds=self.registry.kinds, joint=self.registry.joint)
        self._grow()
        self._scatter.add_vector(self._sums[0] / self.weight**0.5, -1.0)
        scatter = self._scatter.matrix()
        if not np.isfinite(scatter.trace()):
            raise self._overflow()
        # The last subtraction may leave less than nothing of a column that hardly varies.
        diagonal = np.einsum("ii->i", scatter)
        np.maximum(diagonal, 0.0, out=diagonal)
        sums = _host(self._sums)
        return from_sums(
            n_rows=self.n_rows,
            weight=self.weight,
            reference=_host(self._reference),
            deviation=sums[0].copy(),
            scatter=scatter,
            variables=self._variables(sums),
            kinds=self.registry.kinds,
            joint=self.registry.joint,
            float32_products=self.float32_products,
        )

    def _variables(self, sums: Float) -> dict[VariableName, Any]:
        """The sums of the variables that this site has seen."""
        slots, found = self.registry.slots, dict[VariableName, Any]()
        for name, (rows, weights) in self._classes.items():
            names = self.registry.classes[name][: len(rows)]
            own = sums[slots(name, range(len(rows)))]
            found[name] = ClassSums(self.width, names, rows, weights, own)
        for name, (n, weight, z_sum, squares) in self._columns.items():
            columns, reference = self.registry.columns[name]
            x_sum, *products = sums[slots(name, range(-1, len(columns)))]
            found[name] = ColumnSums(
                self.width, list(columns), n, weight, reference, x_sum, z_sum,
                np.array(products), squares,
            )  # fmt: skip
        return found


def _host(tensor: Tensor) -> Float:
    array: Float = tensor.cpu().numpy()
    return array


def _longer(values: NDArray[Any], n: int) -> NDArray[Any]:
    """The same with zeros behind, up to `n`."""
    return np.pad(values, (0, n - len(values)))


def _same(first: list[Part], second: list[Part]) -> bool:
    """Whether two blocks are the same rows of the same batches."""
    return len(first) == len(second) and all(
        a[0] is b[0] and a[1:] == b[1:] for a, b in zip(first, second, strict=True)
    )


def _between(parts: list[Part], start: int, stop: int) -> list[Part]:
    """The rows from `start` to `stop` of several runs."""
    found, at = [], 0
    for part, first, last in parts:
        n = last - first
        a, b = max(start - at, 0), min(stop - at, n)
        if a < b:
            found.append((part, first + a, first + b))
        at += n
    return found
