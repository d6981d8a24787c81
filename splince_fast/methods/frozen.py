"""The strength of SPLINCE at which a frozen head has the least squared error."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import ArrayLike

from splince_fast._solve import tolerances
from splince_fast.exceptions import InputError, SplinceWarning
from splince_fast.methods.closed_forms import leace, splince
from splince_fast.moments import Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.factored import Factored, statistics
from splince_fast.report import Report


def strength_for(report: Report, head: ArrayLike, moments: Moments | Factored) -> float:
    """The strength behind :meth:`splince_fast.Report.strength_for`.

    With a = P_L^T theta and g = (P_S - P_L)^T theta the squared error of theta^T P_b x is, but for
    a constant, Var(a^T x + b g^T x) - 2 Cov(a^T x + b g^T x, y): least at
    b = (g^T Sy - a^T S g) / (g^T S g), whatever matrix the erasers were made with.
    """
    with statistics(moments) as known:
        names = {str(name): name for name in moments.variables}
        erase, keep = (
            [names[v.name] for v in report.variables if v.role == role and v.name in names]
            for role in ("erased", "kept")
        )
        if (
            report.method != "SPLINCE"
            or len(keep) != 1
            or len(erase) + 1 < len(report.variables)
            or report.n_features != len(known.mean)
        ):
            raise InputError(
                "strength_for needs a report of splince on one kept variable, and the moments that "
                f"the eraser was fitted to; this one is of {report.method} on "
                f"{report.n_features} features, and the variables are "
                f"{[v.name for v in report.variables]}"
            )
        task, width = known.variable(keep[0]), len(known.mean)
        cross = task.cross_covariance(0.0, keep[0])
        if cross.shape[1] != (2 if isinstance(task, ClassSums) else 1):
            raise InputError(
                f"strength_for is for one task column or two classes, and {keep[0]!r} is "
                f"{task.described}; a head with several outputs has no single strength"
            )
        theta = np.asarray(head, dtype=np.float64)
        if theta.shape != (width,) or not np.isfinite(theta).all():
            raise InputError(
                f"head has shape {theta.shape}; it must be {width} finite coefficients, one per "
                "feature, of one score"
            )
        if report.dropped:  # what was kept: LEACE's is the only map
            return 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplinceWarning)
            # A snapshot has its own.
            shrinkage = None if isinstance(moments, Factored) else report.shrinkage or None
            plain = leace(moments, erase=erase, shrinkage=shrinkage)
            full = splince(moments, erase=erase, keep=keep, shrinkage=shrinkage)
        removed, other = (p.right @ (p.left.T @ theta) for p in (plain, full))
        a, g = theta - removed, removed - other
        (_, mixed), (_, square) = known.gram(np.stack([a, g]))
        # Rounding of the two removed scores, whose difference g is.
        size = float(np.trace(known.gram(np.stack([removed, other]))))
        if square <= (16.0 * width * tolerances.EPS) ** 2 * size:
            return 0.0
        return float(np.clip((g @ cross[:, -1] - mixed) / square, 0.0, 1.0))
