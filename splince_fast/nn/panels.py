"""A symmetric matrix of sums, float64 on a device, without the half that mirrors the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splince_fast.nn.memory import Arena, on_device

Tensor = Any
Float = NDArray[np.float64]

# Column panels, of which only what is on and above the diagonal blocks is kept and computed.
_PANELS = 4
# Widths below which one panel is taken.
_LEAST_WIDTH = 64
# Vectors whose products wait: a pass over the matrix costs as much as a product of many rows.
_PENDING = 16


class Panels:
    """The sum of Y^T Y over blocks Y (n, d), and of products of single vectors.

    Parameters
    ----------
    width : int
    arena : Arena

    Attributes
    ----------
    panel : int
        Width of the first column panel, the widest one.
    """

    def __init__(self, width: int, arena: Arena) -> None:
        step = -(-width // _PANELS) if width >= _LEAST_WIDTH else max(width, 1)
        self.width = width
        self._bounds = [(i, min(width, i + step)) for i in range(0, width, step)]
        self._parts = [arena.empty(torch.float64, j - i, width - i) for i, j in self._bounds]
        self.panel = min(step, width)
        self._fresh = True  # nothing was written yet
        self._vectors = arena.empty(torch.float64, _PENDING, width)
        self._signs: list[float] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(8 * t.numel() for t in (*self._parts, self._vectors))

    def add_block(self, y: Tensor, product: Tensor) -> None:
        """Add Y^T Y. `product` has room for a panel, in the dtype of `y`, if that is float32."""
        fresh, self._fresh = self._fresh, False
        for (i, j), part in zip(self._bounds, self._parts, strict=True):
            if y.dtype == torch.float64:
                torch.addmm(part, y[:, i:j].T, y[:, i:], beta=0 if fresh else 1, out=part)
                continue
            room = product[: part.numel()].view(part.shape)
            torch.mm(y[:, i:j].T, y[:, i:], out=room)
            if fresh:
                part.copy_(room)
            else:
                part += room

    def add_vector(self, vector: Tensor, sign: float) -> None:
        """Add sign v v^T."""
        if len(self._signs) == _PENDING:
            self._add_pending()
        self._vectors[len(self._signs)] = vector
        self._signs.append(sign)

    def _add_pending(self) -> None:
        """Add the products that wait."""
        vectors = self._vectors[: len(self._signs)]
        signs = torch.tensor(self._signs, dtype=torch.float64).unsqueeze(1)
        signed = vectors * on_device(signs, vectors.device)
        for (i, j), part in zip(self._bounds, self._parts, strict=True):
            part.addmm_(signed[:, i:j].T, vectors[:, i:])
        self._signs = []

    def matrix(self) -> Float:
        """The sum on the host: its upper triangle and the diagonal blocks, zeros elsewhere."""
        self._add_pending()
        found = np.zeros((self.width, self.width))
        for (i, j), part in zip(self._bounds, self._parts, strict=True):
            found[i:j, i:] = part.cpu().numpy()
        return found
