"""Sketch of a scatter that is too large to keep: its diagonal, and its products with r signs.

With O a fixed (d, r) matrix of random signs and S the scatter about the mean, the state is diag(S)
and Y = S O: linear in the data, so that states are added, subtracted and weighted. From it

    U U^T = Y (O^T Y)^+ Y^T <= S,    D = diag(S) - diag(U U^T) >= 0

(Nystroem approximation), and D + U U^T is the metric of an eraser: positive definite, with the
exact variances. See :mod:`splince_fast._solve.low_rank`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import is_sparse
from splince_fast._runtime.hashing import splitmix64
from splince_fast._runtime.sparse import parts
from splince_fast.moments.scatter import Diagonal, Scatter

Float = NDArray[np.float64]
Signs = NDArray[np.int8]

# Numbers of a piece of a block that is centred at a time.
_PIECE = 1 << 20
# Rows of (d, r) matrices that are worked on at a time.
_STRIPE = 1 << 12


@lru_cache(maxsize=2)
def signs(width: int, rank: int, seed: int) -> Signs:
    """(width, rank) of -1 and 1: bits of hashes of `seed`, the feature and the column.

    The array is shared, and read-only.
    """
    words = -(-rank // 64)
    key = splitmix64(splitmix64(np.array([seed], np.uint64)))[0]
    numbers = splitmix64(np.arange(width * words, dtype=np.uint64) + key)
    octets = numbers.astype("<u8").view(np.uint8).reshape(width, 8 * words)
    found = np.unpackbits(octets, axis=1, count=rank).view(np.int8)
    found *= 2
    found -= 1
    found.flags.writeable = False
    return found


def times(rows: Float, vectors: NDArray[Any]) -> Float:
    """rows @ vectors, (k, d) times (d, m), where `vectors` may hold signs: by stripes of d."""
    out = np.zeros((len(rows), vectors.shape[1]))
    if out.size:
        for start in range(0, len(vectors), _STRIPE):
            part = slice(start, start + _STRIPE)
            out += rows[:, part] @ vectors[part].astype(np.float64, copy=False)
    return out


def add_outer(out: Float, sign: float, column: Float, row: Float) -> None:
    """out += sign column row^T, by stripes."""
    if out.size:
        for start in range(0, len(out), _STRIPE):
            part = slice(start, start + _STRIPE)
            out[part] += np.outer(sign * column[part], row)


def add_images(
    rows: Any, weight: Float | None, shift: Float, vectors: NDArray[Any], out: Float
) -> Float:
    """Add sum w (x - s)(x - c)^T V to `out`, of dense or sparse rows, in float64.

    For dense rows s = c = `shift`. For sparse ones c is `shift` and s = 0: the caller takes away
    s t^T, with t the sum that is returned.

    Parameters
    ----------
    rows : (n, d) array, or CSR matrix
    weight : (n,) float64 or None
    shift : (d,) float64
    vectors : (d, m) int8 or float64
    out : (d, m) float64

    Returns
    -------
    (m,) float64
        sum w V^T (x - c).
    """
    m = vectors.shape[1]
    if not m:
        return np.zeros(0)
    if is_sparse(rows):
        import splince_fast._kernels.sparse as kernels

        total = np.zeros(m)
        given = np.empty(0) if weight is None else weight
        centre = times(shift[None], vectors)[0]
        kernels.add_images(*parts(rows), given, vectors, centre, np.empty(m), total, out)
        return total
    n, d = rows.shape
    step = max(64, _PIECE // n)
    coordinates = np.zeros((n, m))
    centred = np.empty((n, min(step, d)))
    for start in range(0, d, step):
        part = slice(start, min(d, start + step))
        piece = centred[:, : part.stop - start]
        np.subtract(rows[:, part], shift[part], out=piece)
        coordinates += piece @ vectors[part].astype(np.float64, copy=False)
    if weight is not None:
        coordinates *= weight[:, None]
    for start in range(0, d, step):
        part = slice(start, min(d, start + step))
        piece = centred[:, : part.stop - start]
        if step < d:
            np.subtract(rows[:, part], shift[part], out=piece)
        out[part] += piece.T @ coordinates
    return np.asarray(coordinates.sum(axis=0))


@dataclass(slots=True)
class Sketch(Diagonal):
    """diag(S), (d,), in `matrix`, and Y = S O.

    Attributes
    ----------
    images : ndarray of shape (d, r)
        Y.
    signs : ndarray of int8, shape (d, r)
        O; shared.
    """

    images: Float = None  # type: ignore[assignment]
    signs: Signs = None  # type: ignore[assignment]

    @classmethod
    def of(cls, width: int, rank: int, seed: int) -> Sketch:
        """No rows."""
        own = signs(width, rank, seed)
        return cls(np.zeros(width), images=np.zeros((width, rank)), signs=own)

    @classmethod
    def of_block(cls, like: Sketch, squares: Float) -> Sketch:
        """That of a block of such squares, its images yet to be added."""
        return cls(squares, images=np.zeros(like.images.shape), signs=like.signs)

    @property
    def rank(self) -> int:
        return int(self.images.shape[1])

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.images.nbytes + self.signs.nbytes

    def copy(self) -> Sketch:
        return Sketch(
            self.matrix.copy(), self.unit_roundoff, images=self.images.copy(), signs=self.signs
        )

    def merge(self, other: Scatter, sign: int, gap: Float, coefficient: float) -> None:
        assert isinstance(other, Sketch)
        self.matrix += sign * (other.matrix + coefficient * gap * gap)
        (np.add if sign > 0 else np.subtract)(self.images, other.images, out=self.images)
        if coefficient:
            add_outer(self.images, sign * coefficient, gap, times(gap[None], self.signs)[0])

    def clear(self, features: NDArray[np.intp]) -> None:
        self.matrix[features] = 0.0
        self.images[features] = 0.0

    def reset(self) -> None:
        self.matrix[...] = 0.0
        self.images[...] = 0.0
