"""Functions that raise the errors of failed solves; the messages name cause and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from splince_fast._kernels import factor as status
from splince_fast._solve.oblique import Solution
from splince_fast.exceptions import InfeasibleError, SplinceError
from splince_fast.labels.names import VariableName, listed


def common_text(erased: Sequence[VariableName], kept: Sequence[VariableName]) -> str:
    """Return the sentence that names variables both erased and kept; "" without such variables."""
    both = [name for name in kept if name in erased]
    if not both:
        return ""
    return f"{listed(both)} is to be erased and to be kept: name it in one of erase= and keep=. "


def raise_failure(
    solution: Solution, erased: list[str], kept: list[str], method: str, solver: str
) -> NoReturn:
    """Raise the error for the status of a failed solve, with cause and remedy."""
    if solution.status != status.STATUS_INFEASIBLE:
        raise_numerical(solution.status, solver)
    cosine = float(solution.cosines[0]) if len(solution.cosines) else 1.0
    sine = float(solution.sines.min())
    amplification = np.inf if sine == 0 else 1 / sine
    raise InfeasibleError(
        f"{common_text(erased, kept)}"
        f"{method} cannot keep {listed(kept)} while it erases {listed(erased)}: a direction of "
        "the kept variables lies in the span of the erased variables, and erasure removes this "
        f"direction (largest principal cosine {cosine:.12g}, amplification {amplification:.1e}; "
        f"ranks {solution.rank_y} and {solution.rank_z}). Typical causes: a kept and an erased "
        "variable are the same or functions of each other, or there are fewer rows or features "
        "than classes. Keep fewer variables, pass on_infeasible='drop' to keep the other "
        "directions, limit the cost with max_amplification=, or use leace, which keeps no variable",
        cosine,
    )


def raise_numerical(code: int, solver: str) -> NoReturn:
    """Raise SplinceError for the status `code` of a factorisation, with cause and remedy."""
    if code == status.STATUS_RANK_DEFICIENT:
        raise SplinceError(
            "the covariance of x is not positive definite at its rounding level (fewer rows than "
            "features, or duplicated features), which solver='cholesky' cannot factor; use "
            "solver='auto', or shrinkage="
        )
    event = "did not converge" if code == status.STATUS_NO_CONVERGENCE else "met a singular matrix"
    raise SplinceError(
        f"the solver ({solver}) {event}. The moments may be damaged: check that "
        "moments.covariance() is finite and positive semi-definite, or pass shrinkage=1e-6"
    )
