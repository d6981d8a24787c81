"""Refinement of erasers without a stored covariance, by extra passes over the rows.

The covariance S is not stored, but a pass over the rows gives the exact product S V for a matrix V
with few columns. Let the columns of C be the erased and kept cross-covariances, and D = diag(S).
The first pass computes S V for V = [D^-1 C, C], and then the eraser of the least distortion with
`right` in the column space of V (Rayleigh-Ritz). The column space contains the solutions that
follow from D and without whitening: the distortion is at most that of either. Each further pass
extends the column space by D^-1 (C - S R), the preconditioned residual of the current solution R.
The column space then contains the iterates of conjugate gradients for S R = C with the
preconditioner D, and the distortion never increases.

A map is feasible if P = I - left right^T with colsp(left) = colsp(Cov(x, z)); its distortion is
tr(left^T left right^T S right). Let the columns of B span the column space of V, with B^T S B = I.
Whitening by B^T in place of L^+, with S = L L^T, minimises the distortion over all `right` with
columns in this space, and the computed distortion is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import STATUS_OK, Factor, of_columns
from splince_fast._runtime.rows import NO_WEIGHT, SparseRows, parts, subtracted
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import oblique
from splince_fast._solve.options import MAX_PASSES, Options, is_integer
from splince_fast.exceptions import InputError
from splince_fast.moments.block_sums import sum_block
from splince_fast.moments.diagonal import far_from_zero, sum_stored
from splince_fast.moments.inputs import read_update
from splince_fast.moments.snapshot import DiagonalSnapshot, Factored, Statistics
from splince_fast.moments.state import EPS64
from splince_fast.sources._prefetch import prefetched
from splince_fast.sources.base import Source, StreamSource

Float = NDArray[np.float64]

# Combinations of columns with a variance below this fraction of the largest are rounding error.
_LEAST_VARIANCE = 1e-10
# Number of elements of dense rows that are centred at once.
_PIECE = 1 << 20


class ExtraPasses:
    """Extra passes over the accumulated rows."""

    def __init__(self, source: Source, stats: DiagonalSnapshot, passes: int) -> None:
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
        stats, (m, d) = self._stats, columns.shape
        vectors = np.ascontiguousarray(columns.T)
        out, total, squares = np.zeros((d, m)), np.zeros(d), np.zeros(d)
        n_rows, weight = 0, 0.0
        with prefetched(self._source) as blocks:
            for block in blocks:
                batch = read_update(block.X, None, block.sample_weight, None, stats.accumulator)
                if not batch.n:
                    continue
                batch.rows.check()
                add = self._add_sparse if isinstance(batch.rows, SparseRows) else self._add_dense
                sums = add(batch.rows, batch.weight, vectors, out)
                total += sums[0]
                squares += sums[1]
                n_rows += batch.n
                weight += sums[2]
        self._compare(n_rows, weight, total, squares)
        out /= stats.weight
        return np.ascontiguousarray(out.T)

    # Both add the products S_b V of a block to `out`, (d, m), with V = `vectors` and S_b the
    # scatter of the block about the mean of the moments; they return the sums of x - mean and of
    # its squares, and the weight sum.

    def _add_sparse(
        self, rows: Any, weight: Float | None, vectors: Float, out: Float
    ) -> tuple[Float, Float, float]:
        import splince_fast._kernels.sparse as kernels

        mean, shift, n = self._stats.mean, np.zeros(len(vectors)), len(rows)
        far = far_from_zero(mean, self._stats.variances)
        shift[far] = mean[far]
        array = subtracted(rows.array, shift) if len(far) else rows.array
        mean = mean - shift
        no_labels = np.empty((0, n), np.intp), 0, np.empty((0, n))
        sums = sum_stored(array, weight, *no_labels, mean)
        weighted = np.zeros(vectors.shape[1])
        kernels.add_images(
            *parts(array), NO_WEIGHT if weight is None else weight, vectors, mean @ vectors,
            np.empty(len(weighted)), weighted, out,
        )  # fmt: skip
        out -= np.outer(mean, weighted)
        return sums.total - sums.weight_sum * mean, sums.squares, sums.weight_sum

    def _add_dense(
        self, rows: Any, weight: Float | None, vectors: Float, out: Float
    ) -> tuple[Float, Float, float]:
        array, mean = np.ascontiguousarray(rows.array, rows.dtype), self._stats.mean
        (n, d), step = array.shape, max(64, _PIECE // len(array))
        no_labels = np.empty((0, n), np.intp), 0, np.empty((0, n))
        sums = sum_block(array, weight, mean, *no_labels)
        stripes = [slice(start, min(d, start + step)) for start in range(0, d, step)]
        coordinates = np.zeros((n, vectors.shape[1]))
        for part in stripes:
            coordinates += (array[:, part] - mean[part]) @ vectors[part]
        if weight is not None:
            coordinates *= weight[:, None]
        for part in stripes:
            out[part] += (array[:, part] - mean[part]).T @ coordinates
        return sums.total, sums.squares, sums.weight_sum

    def _compare(self, n_rows: int, weight: float, total: Float, squares: Float) -> None:
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


def _other_rows_error(source: Source, why: str) -> InputError:
    return InputError(
        f"refine is {source.name}, which does not have the accumulated rows: {why}. Pass the "
        "source from which the moments were accumulated, with all rows and the same weights"
    )


def _basis(columns: Float, images: Float) -> tuple[Float, Float]:
    """Return B^T and (S B)^T with B^T S B = I, from V^T = `columns` and (S V)^T = `images`."""
    gram = columns @ images.T
    sizes = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
    units = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    values, eigenvectors = np.linalg.eigh((gram + gram.T) / 2 * units * units[:, None])
    kept = values > _LEAST_VARIANCE * max(values.max(initial=0.0), 0.0)
    weights = (eigenvectors[:, kept] / np.sqrt(values[kept])).T * units
    return weights @ columns, weights @ images


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
        # The factor whitens by B^T. The reduction is a fraction of the distortion before the last
        # pass.
        if not isinstance(stats, DiagonalSnapshot):
            raise InputError(
                "refine= improves erasers of moments made with covariance_type='diag', which keep "
                "no covariance; "
                + (
                    "pass these moments, not a snapshot of them"
                    if isinstance(stats, Factored) and stats.is_diagonal
                    else "leave it out"
                )
            )
        if options.shrinkage:
            raise InputError("refine= does not shrink the covariance; leave shrinkage= out")
        reader = ExtraPasses(self.source, stats, self.passes)
        floor = tolerances.floor(stats.variances, stats.mean, stats.row_eps)
        first = stats.factored(options, 0.0, floor)
        varies, k = first.inverse_scale > 0, len(span_z) + len(span_y)
        spans = np.where(varies, np.concatenate([span_z, span_y]), 0.0)
        columns = np.concatenate([first.solve(np.ascontiguousarray(spans)), spans])
        images = reader.images(columns)

        def evaluate(basis: Float) -> tuple[Factor, float]:
            factor = of_columns(
                np.ascontiguousarray(basis), stats.variances, floor, smallest=first.smallest
            )
            factor.rounding = first.rounding
            solution = oblique(factor, spans[: len(span_z)], spans[len(span_z) :], options)
            return factor, solution.distortion if solution.status == STATUS_OK else np.inf

        before = evaluate(_basis(columns[:k], images[:k])[0])[1]
        basis, basis_images = _basis(columns, images)
        factor, after = evaluate(basis)
        for _ in range(1, self.passes):
            # C - S R, with R = B B^T C the Rayleigh-Ritz solution of S R = C
            residual = spans - (spans @ basis.T) @ basis_images
            new = first.solve(np.ascontiguousarray(residual * varies))
            columns = np.concatenate([columns, new])
            images = np.concatenate([images, reader.images(new)])
            basis, basis_images = _basis(columns, images)
            before = after
            factor, after = evaluate(basis)
        gain = 1.0 - after / before if 0.0 < before < np.inf else 0.0
        return factor, max(0.0, gain)
