"""Another pass over the rows that moments have seen: products of the covariance with columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import NO_WEIGHT
from splince_fast._runtime.sparse import SparseRows, parts, subtracted
from splince_fast.exceptions import InputError
from splince_fast.moments.inputs import read_update
from splince_fast.moments.scatter import EPS64
from splince_fast.moments.sketch import add_images, add_outer, far_from_zero
from splince_fast.moments.snapshot import SketchSnapshot
from splince_fast.moments.swept import Sweep
from splince_fast.sources._prefetch import prefetched
from splince_fast.sources.base import Source, StreamSource

Float = NDArray[np.float64]


class ExtraPasses:
    """Extra passes over the rows of a source.

    Parameters
    ----------
    source : Source
    stats : SketchSnapshot
        Of the moments that have seen it.
    passes : int

    Raises
    ------
    InputError
        It cannot be the source that the moments have seen: other features, or fewer rows; more
        than one pass over what can be read once.
    """

    def __init__(self, source: Source, stats: SketchSnapshot, passes: int) -> None:
        self._source, self._known = source, stats
        d = len(stats.mean)
        if source.n_features not in (None, d):
            raise _other(source, f"it has {source.n_features} features, and they have {d}")
        if source.n_rows is not None and source.n_rows < stats.n_rows:
            raise _other(source, f"it has {source.n_rows:,} rows, and they {stats.n_rows:,}")
        if passes > 1 and isinstance(source, StreamSource) and source.once:
            raise InputError(
                f"passes is {passes}, and {source.name} can be read only once; pass a list of "
                "blocks, or one of splince_fast.sources"
            )

    def images(self, columns: Float) -> Float:
        """(m, d): Cov(x) V for V^T = `columns`, (m, d), in float64.

        Raises
        ------
        InputError
            The rows are not those of the moments: their number, weight, sums, squares or, where
            the moments have a sketch, products of two features differ.
        """
        stats, d, m = self._known, len(self._known.mean), len(columns)
        # The sketch holds the image of its first sign vector: that of these rows must equal it.
        vectors = np.hstack([columns.T, stats.sketch.signs[:, :1]])
        out, total, squares = np.zeros((d, vectors.shape[1])), np.zeros(d), np.zeros(d)
        n_rows, weight = 0, 0.0
        with prefetched(self._source) as blocks:
            for block in blocks:
                batch = read_update(block.X, None, block.sample_weight, None, stats.accumulator)
                if not batch.n:
                    continue
                batch.rows.check()
                sums = self._sums(batch.rows, batch.weight, vectors, out)
                total += sums[0]
                squares += sums[1]
                n_rows += batch.n
                weight += sums[2]
        self._compare(n_rows, weight, total, squares, out[:, m:])
        out /= stats.weight
        return np.ascontiguousarray(out[:, :m].T)

    def _sums(
        self, rows: Any, weight: Float | None, vectors: Float, out: Float
    ) -> tuple[Float, Float, float]:
        """Add the images of a block to `out`; return its sums, sums of squares and weight."""
        mean = self._known.mean
        if isinstance(rows, SparseRows):
            import splince_fast._kernels.sparse as kernels

            shift = np.zeros(len(mean))
            far = far_from_zero(mean, self._known.variances)
            shift[far] = mean[far]
            array = subtracted(rows.array, shift) if len(far) else rows.array
            mean = mean - shift
            csr, batch = parts(array), NO_WEIGHT if weight is None else weight
            whole = float(len(rows)) if weight is None else float(weight.sum())
            total, squares = np.zeros(len(mean)), np.empty(len(mean))
            none = np.empty((0, len(rows)), np.intp), np.empty((0, len(rows)))
            nothing = np.empty((0, len(mean)))
            kernels.sum_rows(*csr, batch, *none, total, nothing, nothing)
            kernels.sum_squares(*csr, batch, mean, whole, squares)
            left = add_images(array, weight, mean, vectors, out)
            add_outer(out, -1.0, mean, left)
            return total - whole * mean, squares, whole
        array = np.ascontiguousarray(rows.array, rows.dtype)
        no_codes, no_values = np.empty((0, len(array)), np.intp), np.empty((0, len(array)))
        sweep = Sweep(array, weight, mean, no_codes, 0, no_values)
        sweep.run(np.zeros(len(mean)))
        add_images(array, weight, mean, vectors, out)
        return sweep.total, sweep.squares, sweep.whole

    def _compare(
        self, n_rows: int, weight: float, total: Float, squares: Float, image: Float
    ) -> None:
        """Raise InputError unless these are the sums that the moments have, to rounding."""
        stats, name = self._known, self._source
        if n_rows != stats.n_rows:
            raise _other(name, f"it has {n_rows:,} rows, and they {stats.n_rows:,}")
        roundings = EPS64 * (512 + 8 * n_rows**0.5)
        if abs(weight - stats.weight) > roundings * stats.weight:
            raise _other(name, f"its rows weigh {weight:.12g}, and theirs {stats.weight:.12g}")
        deviation = np.sqrt(stats.variances)
        offset = 64 * EPS64 * (np.abs(stats.mean) + deviation)
        shifted = np.abs(total) / weight > roundings * deviation + offset
        bound = roundings * stats.variances + 2 * deviation * offset + offset**2
        spread = np.abs(squares / weight - stats.variances) > bound
        found = np.flatnonzero(shifted | spread)
        if len(found):
            what = "mean" if shifted[found[0]] else "variance"
            raise _other(name, f"the {what} of feature {found[0]} differs")
        # An image of a sign vector sums over all features: its bound is the sum of their roundings.
        all_deviations, all_offsets = deviation.sum(), offset.sum()
        allowed = (roundings * deviation + offset) * all_deviations
        allowed += (deviation + offset) * all_offsets
        gap = np.abs(image - stats.sketch.images[:, : image.shape[1]]) / weight
        if (gap > allowed[:, None]).any():
            units = deviation[:, None]
            gaps = np.divide(gap, units, out=np.zeros_like(gap), where=units > 0)
            raise _other(
                name,
                f"its values of feature {gaps.max(axis=1).argmax()} stand beside other values of "
                "other features; was a column of it shuffled?",
            )


def _other(source: Source, why: str) -> InputError:
    return InputError(
        f"refine is {source.name}, which is not what the moments have seen: {why}. Pass the source "
        "that they were accumulated from, all of it, with the same weights"
    )
