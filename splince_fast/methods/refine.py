"""Refinement of erasers without a stored covariance, by extra passes over the rows.

The covariance S is not stored, but a pass over the rows gives the exact product S V for a matrix V
with few columns. Let the columns of C be the erased and kept cross-covariances, M the low-rank
approximation of S from the sketch, and O the sign matrix of the sketch, whose product S O is
stored. The first pass computes S V for

    V = [M^-1 C, diag(S)^-1 C, C]

and then the eraser of the least distortion with `right` in the column space of [V, O]. The column
space contains the solutions that follow from M, from diag(S) and without whitening. The distortion
of the eraser is therefore at most that of any of the three solutions. Each further pass extends the
column space by M^-1 (C - S R), the preconditioned residual of the current solution R. The column
space then contains the iterates of conjugate gradients for S R = C with the preconditioner M, and
the distortion never increases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import STATUS_OK, Factor
from splince_fast._runtime.rows import NO_WEIGHT
from splince_fast._runtime.sparse import SparseRows, parts, subtracted
from splince_fast._solve.oblique import oblique
from splince_fast._solve.options import MAX_PASSES, Options, is_integer
from splince_fast._solve.ritz import Subspace
from splince_fast.exceptions import InputError
from splince_fast.moments.block_sums import sum_block
from splince_fast.moments.inputs import read_update
from splince_fast.moments.sketch import add_images, add_outer, far_from_zero
from splince_fast.moments.snapshot import Factored, SketchSnapshot, Statistics
from splince_fast.moments.state import EPS64
from splince_fast.sources._prefetch import prefetched
from splince_fast.sources.base import Source, StreamSource

Float = NDArray[np.float64]


class ExtraPasses:
    """Extra passes over the accumulated rows."""

    def __init__(self, source: Source, stats: SketchSnapshot, passes: int) -> None:
        self._source, self._stats = source, stats
        d = len(stats.mean)
        if source.n_features not in (None, d):
            raise _other_rows_error(
                source, f"it has {source.n_features} features, and the moments have {d}"
            )
        if source.n_rows is not None and source.n_rows < stats.n_rows:
            raise _other_rows_error(
                source, f"it has {source.n_rows:,} rows, and the moments have {stats.n_rows:,}"
            )
        if passes > 1 and isinstance(source, StreamSource) and source.once:
            raise InputError(
                f"passes is {passes}, and {source.name} can be read only once; pass a list of "
                "blocks, or one of splince_fast.sources"
            )

    def images(self, columns: Float) -> Float:
        """Compute V^T Cov(x), (m, d), for V^T = `columns`, (m, d), in one pass over the rows."""
        stats, d, m = self._stats, len(self._stats.mean), len(columns)
        # The product with the first sign vector of the sketch is compared with the stored product.
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
        """Add a block's products to `out`; return column sums, sums of squares and weight sum."""
        # The products are S_b V, where V = `vectors`, (d, m), and S_b is the scatter matrix of the
        # block about the mean of the moments.
        mean = self._stats.mean
        if isinstance(rows, SparseRows):
            import splince_fast._kernels.sparse as kernels

            shift = np.zeros(len(mean))
            far = far_from_zero(mean, self._stats.variances)
            shift[far] = mean[far]
            array = subtracted(rows.array, shift) if len(far) else rows.array
            mean = mean - shift
            csr, batch = parts(array), NO_WEIGHT if weight is None else weight
            weight_sum = float(len(rows)) if weight is None else float(weight.sum())
            total, squares = np.zeros(len(mean)), np.empty(len(mean))
            no_labels = np.empty((0, len(rows)), np.intp), np.empty((0, len(rows)))
            no_sums = np.empty((0, len(mean)))
            kernels.sum_rows(*csr, batch, *no_labels, total, no_sums, no_sums)
            kernels.sum_squares(*csr, batch, mean, weight_sum, squares)
            weighted_sum = add_images(array, weight, mean, vectors, out)
            add_outer(out, -1.0, mean, weighted_sum)
            return total - weight_sum * mean, squares, weight_sum
        array = np.ascontiguousarray(rows.array, rows.dtype)
        no_codes, no_values = np.empty((0, len(array)), np.intp), np.empty((0, len(array)))
        sums = sum_block(array, weight, mean, no_codes, 0, no_values)
        add_images(array, weight, mean, vectors, out)
        return sums.total, sums.squares, sums.weight_sum

    def _compare(
        self, n_rows: int, weight: float, total: Float, squares: Float, image: Float
    ) -> None:
        """Raise InputError unless the sums of a pass equal those of the moments, up to rounding."""
        stats, name = self._stats, self._source
        if n_rows != stats.n_rows:
            raise _other_rows_error(
                name, f"it has {n_rows:,} rows, and the moments have {stats.n_rows:,}"
            )
        roundings = EPS64 * (512 + 8 * n_rows**0.5)
        if abs(weight - stats.weight) > roundings * stats.weight:
            raise _other_rows_error(
                name,
                f"its weight sum is {weight:.12g}, and that of the moments {stats.weight:.12g}",
            )
        deviation = np.sqrt(stats.variances)
        offset = 64 * EPS64 * (np.abs(stats.mean) + deviation)
        mean_differs = np.abs(total) / weight > roundings * deviation + offset
        bound = roundings * stats.variances + 2 * deviation * offset + offset**2
        variance_differs = np.abs(squares / weight - stats.variances) > bound
        features = np.flatnonzero(mean_differs | variance_differs)
        if len(features):
            moment = "mean" if mean_differs[features[0]] else "variance"
            raise _other_rows_error(name, f"the {moment} of feature {features[0]} differs")
        # The product with a sign vector is a sum over all features; its error bound is, too.
        all_deviations, all_offsets = deviation.sum(), offset.sum()
        allowed = (roundings * deviation + offset) * all_deviations
        allowed += (deviation + offset) * all_offsets
        gap = np.abs(image - stats.sketch.images[:, : image.shape[1]]) / weight
        if (gap > allowed[:, None]).any():
            units = deviation[:, None]
            gaps = np.divide(gap, units, out=np.zeros_like(gap), where=units > 0)
            raise _other_rows_error(
                name,
                f"the covariances of feature {gaps.max(axis=1).argmax()} with the other features "
                "differ; a column may be shuffled",
            )


def _other_rows_error(source: Source, why: str) -> InputError:
    return InputError(
        f"refine is {source.name}, which does not have the accumulated rows: {why}. Pass the "
        "source from which the moments were accumulated, with all rows and the same weights"
    )


@dataclass(frozen=True, slots=True)
class Refinement:
    """The arguments `refine` and `passes` of a method: extra passes over the accumulated rows."""

    source: Any
    passes: int

    @classmethod
    def of(cls, source: Any, passes: Any) -> Refinement | None:
        """Validate the arguments `refine` and `passes`; return None if there is no source."""
        if not is_integer(passes) or not 1 <= passes <= MAX_PASSES:
            raise InputError(f"passes is {passes!r}; it must be an integer from 1 to {MAX_PASSES}")
        if source is None:
            if passes != 1:
                raise InputError(
                    "passes is the number of passes over refine=; pass the source, too"
                )
            return None
        from splince_fast.sources import as_source

        return cls(as_source(source, argument="refine"), int(passes))

    def factor(
        self, stats: Statistics, span_z: Float, span_y: Float, options: Options
    ) -> tuple[Factor, float]:
        """Return the factor after all passes, and the distortion reduction of the last pass."""
        # The factor whitens in the subspace of the last pass (:mod:`splince_fast._solve.ritz`). The
        # reduction is a fraction of the distortion before the last pass.
        if not isinstance(stats, SketchSnapshot):
            raise InputError(
                "refine= improves erasers of moments made with sketch_size=, which keep no "
                "covariance; "
                + (
                    "pass these moments, not a snapshot of them"
                    if isinstance(stats, Factored) and stats.low_rank is not None
                    else "leave it out"
                )
            )
        if options.shrinkage:
            raise InputError("refine= does not shrink the covariance; leave shrinkage= out")
        reader = ExtraPasses(self.source, stats, self.passes)
        first = stats.factored(options, stats.intensity(options))
        low_rank, sketch = stats.low_rank, stats.sketch
        inverse = first.inverse_scale
        spans = np.where(inverse > 0, np.concatenate([span_z, span_y]), 0.0)
        n_erased = len(span_z)
        blocks = [first.solve(np.ascontiguousarray(spans)), spans]
        if low_rank.rank:
            blocks.append(spans * inverse**2)
        columns = np.concatenate(blocks)
        k, signs = len(spans), sketch.signs.T * (inverse > 0.0)
        images = reader.images(columns)

        def evaluate(subspace: Subspace) -> tuple[Factor, float]:
            factor = subspace.factor(low_rank, first)
            solution = oblique(factor, spans[:n_erased], spans[n_erased:], options)
            return factor, solution.distortion if solution.status == STATUS_OK else np.inf

        before = evaluate(Subspace(columns[:k], images[:k]))[1]
        columns = np.concatenate([columns, signs])
        images = np.concatenate([images, sketch.images.T / stats.weight])
        subspace = Subspace(columns, images)
        factor, after = evaluate(subspace)
        for _ in range(1, self.passes):
            new_columns = first.solve(
                np.ascontiguousarray(subspace.residual(spans) * (inverse > 0))
            )
            columns = np.concatenate([columns, new_columns])
            images = np.concatenate([images, reader.images(new_columns)])
            subspace, before = Subspace(columns, images), after
            factor, after = evaluate(subspace)
        gain = 1.0 - after / before if 0.0 < before < np.inf else 0.0
        return factor, max(0.0, gain)
