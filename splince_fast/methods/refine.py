"""Refinement of erasers without a stored covariance, by extra passes over the rows.

The covariance S is not stored, but a pass over the rows gives S V for a matrix V with few columns.
Let the columns of C be the erased and kept cross-covariances, and D = diag(S). The first pass
computes S V for V = [D^-1 C, C], and then the eraser of the least distortion with `right` in the
column space of V (Rayleigh-Ritz), which contains the solutions that follow from D and without
whitening. Each further pass extends the column space by D^-1 (C - S R), the preconditioned residual
of the current solution R: it then contains the iterates of conjugate gradients for S R = C with the
preconditioner D, and the distortion never increases.

A map is feasible if P = I - left right^T with colsp(left) = colsp(Cov(x, z)); its distortion is
tr(left^T left right^T S right). Let the columns of B span the column space of V, with B^T S B = I.
Whitening by B^T in place of L^+, with S = L L^T, minimises the distortion over all `right` with
columns in this space, and the computed distortion is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import STATUS_OK, Factor, of_columns
from splince_fast._runtime.rows import Rows, SparseRows, subtracted
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import oblique
from splince_fast._solve.options import MAX_PASSES, Options, check_moment_options, is_integer
from splince_fast._solve.restore import inverse_units
from splince_fast.exceptions import InputError
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.moments import read_update
from splince_fast.moments.scatters import far_from_zero, sum_stored
from splince_fast.moments.statistics import Statistics
from splince_fast.sources.base import Source, StreamSource, prefetched

Float = NDArray[np.float64]

# Combinations of columns with a variance below this fraction of the largest are rounding error.
_LEAST_VARIANCE = 1e-10
# Number of elements of dense rows that are centred at once.
_PIECE = 1 << 20


def _images(source: Source, stats: Statistics, columns: Float) -> Float:
    """Return V^T Cov(x), (m, d), for V^T = `columns`, (m, d), by one pass over the rows."""
    accumulator, vectors = cast(Accumulator, stats.accumulator), np.ascontiguousarray(columns.T)
    out, sums, n_rows = np.zeros(vectors.shape), np.zeros((2, len(vectors))), 0
    with prefetched(source) as blocks:
        for block in blocks:
            batch = read_update(block.X, None, block.sample_weight, None, accumulator)
            batch.rows.check()
            add = _add_sparse if isinstance(batch.rows, SparseRows) else _add_dense
            add(batch.rows, batch.weight, stats, vectors, out, sums)
            n_rows += batch.n
    _compare(source, stats, n_rows, sums / stats.weight)
    return np.ascontiguousarray(out.T / stats.weight)


# Both functions add the products S V of a block to `out`, (d, m), with V = `vectors` and S the
# scatter of the block about the mean of the moments, and the sums of x - mean and of its squares to
# the rows of `sums`, (2, d).


def _add_sparse(
    rows: Any, weight: Float | None, stats: Statistics, vectors: Float, out: Float, sums: Float
) -> None:
    # Columns with means far from zero are centred first: uncentred products would lose digits.
    n, shift = len(rows), np.zeros(len(vectors))
    far = far_from_zero(stats.mean, stats.variances)
    shift[far] = stats.mean[far]
    array = subtracted(rows.array, shift) if len(far) else rows.array
    mean = stats.mean - shift
    found = sum_stored(array, weight, np.empty((0, n), np.intp), 0, np.empty((0, n)), mean)
    sums += found.total - found.weight_sum * mean, found.squares
    coordinates = array @ vectors - mean @ vectors
    if weight is not None:
        coordinates *= weight[:, None]
    out += array.T @ coordinates
    out -= np.outer(mean, coordinates.sum(axis=0))


def _add_dense(
    rows: Rows, weight: Float | None, stats: Statistics, vectors: Float, out: Float, sums: Float
) -> None:
    step = max(1, _PIECE // len(vectors))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        deviations = rows.array[part].astype(np.float64) - stats.mean
        w = np.ones(len(deviations)) if weight is None else weight[part]
        out += deviations.T @ (w[:, None] * (deviations @ vectors))
        sums += w @ deviations, np.einsum("i,ij,ij->j", w, deviations, deviations)


def _compare(source: Source, stats: Statistics, n_rows: int, moments: Float) -> None:
    """Raise InputError unless the sums of a pass equal those of the moments, up to rounding."""
    # `moments`, (2, d), are the means of x - mean and of its squares.
    roundings = tolerances.EPS * (512 + 8 * n_rows**0.5)
    if n_rows != stats.n_rows:
        raise _other_rows_error(source, f"{n_rows:,} rows, not {stats.n_rows:,}")
    deviation = np.sqrt(stats.variances)
    offset = 64 * tolerances.EPS * (np.abs(stats.mean) + deviation)
    errors = np.abs(moments[0]), np.abs(moments[1] - stats.variances)
    of_variance = roundings * stats.variances + (2 * deviation + offset) * offset
    bounds = roundings * deviation + offset, of_variance
    for name, error, bound in zip(("mean", "variance"), errors, bounds, strict=True):
        features = np.flatnonzero(error > bound)
        if len(features):
            raise _other_rows_error(source, f"another {name} of feature {features[0]}")


def _other_rows_error(source: Source, found: str) -> InputError:
    return InputError(
        f"refine is {source.name}, which does not have the accumulated rows: it has {found}; pass "
        "the source of the moments, with all rows and the same weights"
    )


def _basis(columns: Float, images: Float) -> tuple[Float, Float]:
    """Return B^T and (S B)^T with B^T S B = I, from V^T = `columns` and (S V)^T = `images`."""
    gram = columns @ images.T
    sizes = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
    units = inverse_units(sizes)
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
                raise InputError("passes needs refine=, the source of the passes")
            return None
        from splince_fast.sources import as_source

        return cls(as_source(source, argument="refine"), int(passes))

    def _check(self, stats: Statistics, options: Options) -> None:
        """Raise InputError before a row is read, if the passes are not possible."""
        if not stats.is_diagonal or stats.factor is not None:
            remedy = "pass these moments, not a snapshot of them"
            raise InputError(
                "refine= improves erasers of moments made with covariance_type='diag', which keep "
                f"no covariance; {remedy if stats.is_diagonal else 'leave it out'}"
            )
        check_moment_options(1.0, "diag", self.passes, options.shrinkage, options.solver)
        source, d = self.source, len(stats.mean)
        if source.n_features not in (None, d):
            raise _other_rows_error(source, f"{source.n_features} features, not {d}")
        if self.passes > 1 and isinstance(source, StreamSource) and source.once:
            raise InputError(
                f"passes is {self.passes}, and {source.name} can be read only once; pass a list"
            )

    def factor(
        self, stats: Statistics, span_z: Float, span_y: Float, options: Options
    ) -> tuple[Factor, float]:
        """Return the factor after all passes, and the distortion reduction of the last pass."""
        # The factor whitens by B^T; the reduction is a fraction of the distortion before that pass.
        self._check(stats, options)
        first = stats.factored(options, 0.0)
        varies, k = first.inverse_scale > 0, len(span_z) + len(span_y)
        floor = np.where(varies, 0.0, np.inf)  # the same features count as constant
        spans = np.where(varies, np.concatenate([span_z, span_y]), 0.0)

        def evaluate(basis: Float) -> tuple[Factor, float]:
            factor = of_columns(basis, stats.variances, floor, smallest=first.smallest)
            factor.rounding = first.rounding
            solution = oblique(factor, spans[: len(span_z)], spans[len(span_z) :], options)
            return factor, solution.distortion if solution.status == STATUS_OK else np.inf

        new, after = np.concatenate([first.solve(spans), spans]), np.inf
        columns = images = np.empty((0, spans.shape[1]))
        for _ in range(self.passes):
            images = np.concatenate([images, _images(self.source, stats, new)])
            if not len(columns):  # before the first pass: the solution that follows from D
                after = evaluate(_basis(new[:k], images[:k])[0])[1]
            columns = np.concatenate([columns, new])
            basis, basis_images = _basis(columns, images)
            before, (factor, after) = after, evaluate(basis)
            # C - S R, with R = B B^T C the Rayleigh-Ritz solution of S R = C
            new = first.solve((spans - (spans @ basis.T) @ basis_images) * varies)
        gain = 1.0 - after / before if 0.0 < before < np.inf else 0.0
        return factor, max(0.0, gain)
