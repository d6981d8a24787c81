"""Functions that raise the errors of failed solves; the messages name cause and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from splince_fast._kernels import factor as status
from splince_fast._runtime.names import VariableName, listed
from splince_fast.exceptions import SplinceError


def common_text(erased: Sequence[VariableName], kept: Sequence[VariableName]) -> str:
    """Return the sentence that names variables both erased and kept; "" without such variables."""
    both = [name for name in kept if name in erased]
    if not both:
        return ""
    return f"{listed(both)} is to be erased and to be kept: name it in one of erase= and keep=. "


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
