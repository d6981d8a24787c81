"""A solve that failed, as a status, turned into an error that says what to do."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from splince_fast._kernels import solve
from splince_fast.exceptions import InfeasibleError, SplinceError
from splince_fast.labels.names import listed


def check_solved(
    raw: dict[str, Any], erased: list[str], kept: list[str], method: str, solver: str
) -> None:
    """Raise what the status of a solve calls for."""
    if raw["status"] == solve.INFEASIBLE:
        raise_infeasible(raw, erased, kept, method)
    if raw["status"] != solve.OK:
        raise_numerical(raw["status"], solver)


def raise_infeasible(
    raw: dict[str, Any], erased: list[str], kept: list[str], method: str
) -> NoReturn:
    """Say which variables collide, how closely, and what can be done."""
    cosine = float(raw["cosines"][0]) if len(raw["cosines"]) else 1.0
    sine = float(np.min(raw["sines"]))
    amplification = np.inf if sine == 0 else 1 / sine
    raise InfeasibleError(
        f"{method} cannot keep {listed(kept)} while it erases {listed(erased)}: a direction of "
        f"what is kept lies in the span of what is erased (largest principal cosine "
        f"{cosine:.12g}, amplification {amplification:.1e}; ranks {raw['rank_y']} and "
        f"{raw['rank_z']}). Erasing would destroy it. Typical causes: both are the same variable "
        "or functions of each other, or there are fewer rows or features than classes. Keep "
        "fewer variables, pass on_infeasible='drop' to keep what can be kept, cap the cost with "
        "max_amplification=, or use leace, which keeps none of it",
        cosine,
    )


def raise_numerical(status: int, solver: str) -> NoReturn:
    """Say what the factorisation met, and what can be done."""
    if status == solve.RANK_DEFICIENT:
        raise SplinceError(
            "the covariance of x is not positive definite at its rounding level (fewer rows than "
            "features, or duplicated features), which solver='cholesky' cannot factor; use "
            "solver='auto', or shrinkage="
        )
    what = "did not converge" if status == solve.NO_CONVERGENCE else "met a singular matrix"
    raise SplinceError(
        f"the solver ({solver}) {what}. The moments may be damaged: check that "
        "moments.covariance() is finite and positive semi-definite, or pass shrinkage=1e-6"
    )
