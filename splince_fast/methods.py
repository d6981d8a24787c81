"""The closed forms: moments in, projection out; one routine with two switches.

==============================  ==============  ==============================
..                              no task kept    task kept
==============================  ==============  ==============================
whitened (a factor of Cov(x))   ``leace``       ``splince``
not whitened                    ``sal``         ``sal`` with ``keep=``
==============================  ==============  ==============================
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import scipy.linalg.blas
from numpy.typing import ArrayLike, NDArray

from splince_fast._kernels import provider, solve
from splince_fast._solve.messages import check_solved
from splince_fast._solve.options import Policies
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.exceptions import (
    DroppedDirectionsWarning,
    InputError,
    LabelError,
    NothingErasedWarning,
)
from splince_fast.labels.names import listed
from splince_fast.moments import Moments
from splince_fast.moments.state import State
from splince_fast.moments.variable import ClassSums
from splince_fast.projection import Projection
from splince_fast.report import Facts, build_report

Float = NDArray[np.float64]


def splince(
    moments: Moments,
    *,
    erase: Selection,
    keep: Selection | ArrayLike,
    max_amplification: float | None = None,
    on_infeasible: str = "raise",
    null_space: str = "keep",
    shrinkage: float | str | None = None,
    rank_tol: float | str = "auto",
    solver: str = "auto",
) -> Projection:
    """Erase variables and keep the covariance with others, changing x as little as possible.

    The minimiser of E|P x - x|^2 subject to P Cov(x, z) = 0 and P Cov(x, y) = Cov(x, y)
    (Theorem 1 of Holstege, Ravfogel and Wouters, NeurIPS 2025). With Cov(x) = L L^T,
    A = L^+ Cov(x, z), B = L^+ Cov(x, y), Qz = orth(A), Qy = orth(B), N = (I - Qy Qy^T) Qz::

        P = I - L Qz (N^T Qz)^{-1} N^T L^+

    Parameters
    ----------
    moments : Moments
        Of the data, with the variables that are named below.
    erase : str, tuple or list of them
        Variables to erase, jointly; a tuple names joint cells (see :class:`Moments`).
    keep : str, tuple or list of them, or array of shape (d, k)
        Variables whose covariance with x stays exactly as it is; or directions y_j such that
        P y_j = y_j.
    max_amplification : float, optional
        Give up kept directions at an angle to the erased ones with 1 / sin above this.
    on_infeasible : {"raise", "drop"}
        What to do where part of what is kept lies in the span of what is erased, to rounding:
        raise InfeasibleError, or give that part up, with a warning.
    null_space : {"keep", "drop"}
        What the map does off the support of x: nothing, or annihilate it as the formula printed
        in the paper does. On the data the two agree.
    shrinkage : float in [0, 1], "oas" or "ledoit-wolf", optional
        Factor (1 - a) Cov(x) + a (tr Cov(x) / d) I instead of Cov(x). The constraints stay exact;
        only optimality is relative to that matrix. "oas" is the oracle approximating shrinkage
        of Chen, Wiesel, Eldar and Hero (2010); "ledoit-wolf" that of Ledoit and Wolf (2004), for
        moments made with ``ledoit_wolf=True``.
    rank_tol : "auto" or float in [0, 1)
        Directions of the concept weaker than this times the strongest are left alone, on top of
        those at the rounding level, which "auto" leaves alone.
    solver : {"auto", "cholesky", "eigh"}
        "auto" takes Cholesky unless Cov(x) is rank deficient at its rounding level.

    Returns
    -------
    Projection
        With its :attr:`~Projection.report`.

    Raises
    ------
    UnknownVariableError
        A variable that was not accumulated, or without a single label.
    ConstantVariableError
        A variable with a single value.
    InfeasibleError
        Kept directions lie in the span of the erased ones.
    NotEnoughDataError
        No rows.
    InputError
        A parameter out of range.

    Warns
    -----
    NothingErasedWarning
        The data hold no linear trace of the concept: the eraser is the identity.
    DroppedDirectionsWarning
        Kept directions were given up, as the policies allow.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=1000)
    >>> y = np.where(rng.random(1000) < 0.8, z, 1 - z)
    >>> X = rng.normal(size=(1000, 8)) + z[:, None] * np.eye(8)[0] + y[:, None] * np.eye(8)[1]
    >>> moments = sf.Moments().update(X, {"z": z, "y": y})
    >>> eraser = sf.splince(moments, erase="z", keep="y")
    >>> after = sf.Moments().update(eraser(X), {"z": z, "y": y})
    >>> bool(np.abs(after.cross_covariance("z")).max() < 1e-12)
    True
    >>> bool(np.allclose(after.cross_covariance("y"), moments.cross_covariance("y")))
    True
    """
    policies = Policies(max_amplification, on_infeasible, null_space, shrinkage, rank_tol, solver)
    if keep is None:
        raise InputError(
            "keep is None; name what SPLINCE is to keep, or use leace, which keeps none"
        )
    return _fit(moments, "SPLINCE", erase, keep, policies, whitened=True)


def leace(
    moments: Moments,
    *,
    erase: Selection,
    null_space: str = "keep",
    shrinkage: float | str | None = None,
    rank_tol: float | str = "auto",
    solver: str = "auto",
) -> Projection:
    """Erase variables, changing x as little as possible: P = I - L Qz Qz^T L^+.

    The minimiser of E|P x - x|^2 subject to P Cov(x, z) = 0 (Belrose et al., "LEACE: Perfect
    linear concept erasure in closed form", NeurIPS 2023). Errors and warnings are those of
    :func:`splince`.

    Parameters
    ----------
    moments : Moments
        Of the data, with the variables that are named below.
    erase : str, tuple or list of them
        Variables to erase, jointly; a tuple names joint cells (see :class:`Moments`).
    null_space, shrinkage, rank_tol, solver
        As for :func:`splince`.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 3, size=600)
    >>> moments = sf.Moments().update(rng.normal(size=(600, 5)) + z[:, None], {"z": z})
    >>> sf.leace(moments, erase="z").rank
    2
    """
    policies = Policies(None, "raise", null_space, shrinkage, rank_tol, solver)
    return _fit(moments, "LEACE", erase, None, policies, whitened=True)


def sal(
    moments: Moments,
    *,
    erase: Selection,
    keep: Selection | ArrayLike | None = None,
    max_amplification: float | None = None,
    on_infeasible: str = "raise",
    rank_tol: float | str = "auto",
) -> Projection:
    """Erase variables by the orthogonal projection off colsp(Cov(x, z)); nothing is whitened.

    P = I - Q Q^T with Q = orth(Cov(x, z)) (spectral attribute removal: Shao, Ziser and Cohen,
    "Gold doesn't always glitter", EACL 2023). With `keep`, the oblique projection with the same
    kernel that leaves Cov(x, y) as it is. Errors and warnings are those of :func:`splince`.
    Unlike the others it depends on the units of the features.

    Parameters
    ----------
    moments : Moments
        Of the data, with the variables that are named below.
    erase : str, tuple or list of them
        Variables to erase, jointly; a tuple names joint cells (see :class:`Moments`).
    keep : str, tuple or list of them, or array of shape (d, k), optional
        Variables, or directions, that stay as they are.
    max_amplification, on_infeasible
        As for :func:`splince`.
    rank_tol : "auto" or float in [0, 1)
        As for :func:`splince`.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=300)
    >>> moments = sf.Moments().update(rng.normal(size=(300, 4)) + z[:, None], {"z": z})
    >>> P = sf.sal(moments, erase="z").matrix()
    >>> bool(np.allclose(P, P.T))
    True
    """
    policies = Policies(max_amplification, on_infeasible, "keep", None, rank_tol, "auto")
    return _fit(moments, "SAL", erase, keep, policies, whitened=False)


def mean_projection(
    moments: Moments, *, erase: Selection, rank_tol: float | str = "auto"
) -> Projection:
    """Erase classes by the orthogonal projection off the differences of their means.

    For a binary concept this is the projection along the difference of the two class means
    (Haghighatkhah et al., "Better hit the nail on the head than beat around the bush", 2022).
    The class means span colsp(Cov(x, z)), so it is :func:`sal` for class-coded variables.

    Parameters
    ----------
    moments : Moments
        Of the data, with the variables that are named below.
    erase : str, tuple or list of them
        Variables to erase, jointly; a tuple names joint cells (see :class:`Moments`).
    rank_tol : "auto" or float in [0, 1)
        As for :func:`splince`.

    Raises
    ------
    LabelError
        A continuous variable, which has no class means.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> z = np.array(["a", "b"] * 50)
    >>> X = np.random.default_rng(0).normal(size=(100, 3)) + (z == "a")[:, None]
    >>> sf.mean_projection(sf.Moments().update(X, {"z": z}), erase="z").rank
    1
    """
    for name in names_of(erase, "erase"):
        if not isinstance(moments.variable(name), ClassSums):
            raise LabelError(
                f"the variable {name!r} is continuous and has no class means; use sal, or "
                f"accumulate it with kinds={{{name!r}: 'classes'}}"
            )
    policies = Policies(None, "raise", "keep", None, rank_tol, "auto")
    return _fit(moments, "MeanProjection", erase, None, policies, whitened=False)


def _shrinkage(state: State, policy: float | str | None) -> float:
    """Share of the isotropic target, between 0 and 1."""
    if policy is None:
        return 0.0
    if not isinstance(policy, str):
        return float(policy)
    # In units where tr(S) = d, so that the target is the identity.
    d, n = state.width, state.weight
    diagonal = np.einsum("ii->i", state.scatter)
    scale = float(diagonal.sum()) / d
    if scale == 0.0:
        return 1.0
    squares = sum(float(np.sum((state.scatter[j + 1 :, j] / scale) ** 2)) for j in range(d))
    frobenius = 2 * squares + float(np.sum((diagonal / scale) ** 2))  # tr(S^2)
    gap = frobenius - d  # |S - I|^2
    if gap <= 0:
        return 1.0
    if policy == "oas":
        return min(1.0, (frobenius / d + d) / ((n + 1) * gap / d))
    if state.fourth is None:
        raise InputError(
            "shrinkage='ledoit-wolf' needs fourth moments, which were not accumulated; make the "
            "moments with Moments(ledoit_wolf=True), or use 'oas', which needs none"
        )
    quartic = state.fourth.centred(state.weight, state.deviation, state.scatter)
    noise = (quartic / (scale / n) ** 2 / n - frobenius) / n
    return float(np.clip(noise / gap, 0.0, 1.0))


def _fit(
    moments: Moments,
    method: str,
    erase: object,
    keep: object,
    policies: Policies,
    *,
    whitened: bool,
) -> Projection:
    """Factors, warnings and report for any method of the family."""
    if not isinstance(moments, Moments):
        raise InputError(
            f"moments is {type(moments).__name__}; pass sf.Moments().update(X, labels)"
        )
    with moments.held() as held:
        state = held.seen()
        provider.ensure_for(state.width)
        span_z = span_of(held, erase, "erase", whitened)
        span_y = span_of(held, keep, "keep", whitened)
        shrinkage = _shrinkage(state, policies.shrinkage)
        mean = state.mean
        with held.workspace(state.width**2 if whitened else 1) as workspace:
            raw = _solve(state, mean, span_z, span_y, workspace, shrinkage, policies, whitened)
        check_solved(raw, span_z.names, span_y.names, method, policies.solver)
        left, right = raw["left"], raw["right"]
        # The factor that was used is one of S itself: then |L^T right| = 1 per column.
        if raw["solver"] != "cholesky" or shrinkage:
            raw["distortion"] = _distortion(state, left, right)
        if policies.null_space == "drop" and whitened:
            left, right = _with_null_space(left, right, raw)
        notes = _warn(raw, span_z.names, span_y.names, policies)
        facts = Facts(method, state.n_rows, state.weight, shrinkage, whitened, notes)
    report = partial(build_report, facts, raw, span_z, span_y, left, right)
    return Projection._make(left, right, mean, method=method, report=report)


def _solve(
    state: State,
    mean: Float,
    span_z: Span,
    span_y: Span,
    workspace: Float,
    shrinkage: float,
    policies: Policies,
    whitened: bool,
) -> dict[str, Any]:
    """The kernel's answer for (1 - a) S + a (tr S / d) I."""
    d, ridge = state.width, 0.0
    if shrinkage:
        ridge = shrinkage * float(np.einsum("ii->", state.scatter)) / (state.weight * d)
    return solve.oblique_factors(
        state.scatter,
        mean,
        span_z.rows.T,
        span_y.rows.T,
        workspace,
        whitened=whitened,
        force_eigh=policies.solver == "eigh",
        allow_eigh=policies.solver != "cholesky",
        per_weight=(1.0 - shrinkage) / state.weight,
        ridge=ridge,
        max_rank=d if shrinkage else state.n_rows - 1,
        eigen_tolerance=state.eigen_tolerance,
        rank_tolerance=0.0 if policies.rank_tol == "auto" else float(policies.rank_tol),
        drop_below=1.0 / policies.max_amplification if policies.max_amplification else 0.0,
        may_drop=policies.on_infeasible == "drop" or policies.max_amplification is not None,
    )


def _warn(
    raw: dict[str, Any], erased: list[str], kept: list[str], policies: Policies
) -> tuple[str, ...]:
    """Warn of what the caller has to know, and return it for the report."""
    notes = []
    if not raw["rank_z"]:
        notes.append(
            f"nothing was erased: x has no linear trace of {listed(erased)} above the "
            f"rounding level ({raw['noise']:.1e} in units of correlation), so the eraser is the "
            "identity. If a trace was expected, check that labels and rows belong together"
        )
        warnings.warn(notes[-1], NothingErasedWarning, stacklevel=4)
    if raw["dropped"]:
        cut = policies.max_amplification
        notes.append(
            f"{raw['dropped']} of {raw['rank_y']} direction(s) of {listed(kept)} were "
            f"given up: they lie too close to {listed(erased)} "
            + ("(to rounding)" if cut is None else f"(amplification above {cut:g})")
            + "; the report shows what is left of each variable"
        )
        warnings.warn(notes[-1], DroppedDirectionsWarning, stacklevel=4)
    return tuple(notes)


def _with_null_space(left: Float, right: Float, raw: dict[str, Any]) -> tuple[Float, Float]:
    """Factors that annihilate the kernel of Cov(x), too: its orthonormal basis joins both."""
    basis = np.eye(len(raw["inverse_scale"]))[raw["inverse_scale"] == 0.0]
    if raw["null_basis"] is not None:
        basis = np.concatenate([basis, raw["null_basis"].T])
    # A basis vector of a rank-deficient rest may touch constant features only by rounding.
    return np.concatenate([left, basis]), np.concatenate([right, basis])


def _distortion(state: State, left: Float, right: Float) -> float:
    """E|left (right^T (x - mean))|^2 = tr(left^T left right^T S right) for any factors."""
    if not len(left):
        return 0.0
    product = scipy.linalg.blas.dsymm(1.0, state.scatter, right.T, lower=1)
    return float(np.sum((left @ left.T) * (right @ product))) / state.weight
