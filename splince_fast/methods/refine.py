"""Refining an eraser of moments without a covariance, by further passes over their rows.

The covariance S is not known, but a pass over the rows gives S V for some columns V, exactly. With
C what is erased and kept and M the metric of the moments, the first pass takes

    V = [M^-1 C, diag(S)^-1 C, C],    beside the signs O, whose images S O the moments have,

and the best eraser with `right` in the span of [V, O] is taken: no worse than that of M, of the
diagonal, and of no metric at all, which lie in it. Every further pass adds M^-1 (C - S R), the
preconditioned residual of the solution R so far: the span then holds the iterates of conjugate
gradients for S R = C, preconditioned by M, and the distortion never grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import STATUS_OK, Factor
from splince_fast._solve.oblique import oblique
from splince_fast._solve.options import MOST_PASSES, Options, is_integer
from splince_fast._solve.ritz import Subspace
from splince_fast.exceptions import InputError
from splince_fast.moments.extra_passes import ExtraPasses
from splince_fast.moments.factored import Factored, Statistics
from splince_fast.moments.snapshot import SketchSnapshot

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Refinement:
    """Source and number of the extra passes.

    Attributes
    ----------
    source : Source or iterable of blocks
    passes : int
    """

    source: Any
    passes: int

    @classmethod
    def of(cls, source: Any, passes: Any) -> Refinement | None:
        """Check the arguments of a method; None without a source."""
        if not is_integer(passes) or not 1 <= passes <= MOST_PASSES:
            raise InputError(f"passes is {passes!r}; it must be an integer from 1 to {MOST_PASSES}")
        if source is None:
            if passes != 1:
                raise InputError("passes says how often refine= is read; pass the source, too")
            return None
        from splince_fast.sources import as_source

        return cls(as_source(source), int(passes))

    def factor(
        self, stats: Statistics, span_z: Float, span_y: Float, options: Options
    ) -> tuple[Factor, float]:
        """The factor after the last pass, and the fraction of the distortion it removed.

        Raises
        ------
        InputError
            The moments have a covariance, or are a snapshot; shrinkage; another source.
        """
        if not isinstance(stats, SketchSnapshot):
            raise InputError(
                "refine= improves erasers of moments made with sketch_size=, which keep no "
                "covariance; "
                + (
                    "pass these moments, not a snapshot of them"
                    if isinstance(stats, Factored) and stats.metric is not None
                    else "leave it out"
                )
            )
        if options.shrinkage:
            raise InputError("refine= takes the covariance as it is; leave shrinkage= out")
        reader = ExtraPasses(self.source, stats, self.passes)
        first = stats.factored(options, stats.share(options), None)
        metric, sketch = stats.metric, stats.sketch
        inverse = first.inverse_scale
        spans = np.where(inverse > 0, np.concatenate([span_z, span_y]), 0.0)
        n_erased = len(span_z)
        parts = [first.solve(np.ascontiguousarray(spans)), spans]
        if metric.rank:
            parts.append(spans * inverse**2)
        columns = np.concatenate(parts)
        k, signs = len(spans), sketch.signs.T * (inverse > 0.0)
        images = reader.images(columns)

        def change(subspace: Subspace) -> tuple[Factor, float]:
            factor = subspace.factor(metric, first)
            solution = oblique(factor, spans[:n_erased], spans[n_erased:], options)
            return factor, solution.distortion if solution.status == STATUS_OK else np.inf

        before = change(Subspace(columns[:k], images[:k]))[1]
        columns = np.concatenate([columns, signs])
        images = np.concatenate([images, sketch.images.T / stats.weight])
        subspace = Subspace(columns, images)
        factor, after = change(subspace)
        for _ in range(1, self.passes):
            fresh = first.solve(np.ascontiguousarray(subspace.residual(spans) * (inverse > 0)))
            columns = np.concatenate([columns, fresh])
            images = np.concatenate([images, reader.images(fresh)])
            subspace, before = Subspace(columns, images), after
            factor, after = change(subspace)
        gain = 1.0 - after / before if 0.0 < before < np.inf else 0.0
        return factor, max(0.0, gain)
