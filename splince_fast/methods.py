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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splince_fast._kernels import solve
from splince_fast._state import EPS32, EPS64, State
from splince_fast._validation import as_rows, check_values
from splince_fast._variables import ClassSums
from splince_fast.exceptions import (
    ConstantVariableError,
    DroppedDirectionsWarning,
    InfeasibleError,
    InputError,
    LabelError,
    NothingErasedWarning,
    SplinceError,
)
from splince_fast.labels import VariableName
from splince_fast.moments import Moments
from splince_fast.projection import Projection
from splince_fast.report import Report, variable_report

Float = NDArray[np.float64]
Selection: TypeAlias = VariableName | Sequence[VariableName]


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
    shrinkage : float in [0, 1] or "oas", optional
        Factor (1 - a) Cov(x) + a (tr Cov(x) / d) I instead of Cov(x). The constraints stay exact;
        only optimality is relative to that matrix. "oas" is the oracle approximating shrinkage
        of Chen, Wiesel, Eldar and Hero (2010).
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
        A variable that was not accumulated.
    ConstantVariableError
        A variable with a single value.
    InfeasibleError
        Kept directions lie in the span of the erased ones.
    NotEnoughDataError
        No rows, or none labelled.
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
    linear concept erasure in closed form", NeurIPS 2023). Parameters, errors and warnings are
    those of :func:`splince`.

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
    kernel that leaves Cov(x, y) as it is. Parameters, errors and warnings are those of
    :func:`splince`. Unlike the others it depends on the units of the features.

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
    for name in _names(erase, "erase"):
        if not isinstance(moments.variable(name), ClassSums):
            raise LabelError(
                f"the variable {name!r} is continuous and has no class means; use sal, or "
                f"accumulate it with kinds={{{name!r}: 'classes'}}"
            )
    policies = Policies(None, "raise", "keep", None, rank_tol, "auto")
    return _fit(moments, "MeanProjection", erase, None, policies, whitened=False)


@dataclass(frozen=True, slots=True)
class Policies:
    """The options of the methods, checked."""

    max_amplification: float | None
    on_infeasible: str
    null_space: str
    shrinkage: float | str | None
    rank_tol: float | str
    solver: str

    def __post_init__(self) -> None:
        _one_of("on_infeasible", self.on_infeasible, ("raise", "drop"))
        _one_of("null_space", self.null_space, ("keep", "drop"))
        _one_of("solver", self.solver, ("auto", "cholesky", "eigh"))
        a = self.max_amplification
        if a is not None and not (isinstance(a, (int, float, np.number)) and a >= 1):
            raise InputError(f"max_amplification is {a!r}; it must be a number of at least 1")
        tol = self.rank_tol
        if tol != "auto" and not (isinstance(tol, (int, float, np.number)) and 0 <= tol < 1):
            raise InputError(f"rank_tol is {tol!r}; it must be 'auto' or a number in [0, 1)")
        s = self.shrinkage
        if (
            s is not None
            and s != "oas"
            and not (isinstance(s, (int, float, np.number)) and 0 <= s <= 1)
        ):
            raise InputError(f"shrinkage is {s!r}; it must be None, 'oas' or a number in [0, 1]")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


@dataclass(slots=True)
class _Span:
    """Cross-covariances of several variables, stacked: rows in units of deviations."""

    names: list[str]
    rows: Float  # (k, d)
    counts: list[int]


def _names(selection: object, role: str) -> list[VariableName]:
    """One variable or a list of them, as a list."""
    if isinstance(selection, (str, tuple)):
        return [selection]
    if (
        isinstance(selection, list)
        and selection
        and all(isinstance(name, (str, tuple)) for name in selection)
    ):
        return selection
    raise InputError(
        f"{role} is {selection!r}; it must be the name of a variable, a tuple of names for joint "
        "cells, or a non-empty list of these"
    )


def _span(moments: Moments, selection: object, role: str, width: int) -> _Span:
    """The cross-covariances that `selection` names, or the directions that it holds."""
    is_names = isinstance(selection, (str, tuple)) or (
        isinstance(selection, list) and any(isinstance(v, (str, tuple)) for v in selection)
    )
    if role == "keep" and not is_names and not (isinstance(selection, list) and not selection):
        return _directions(selection, width)
    names, blocks, counts = _names(selection, role), [], []
    for name in names:
        columns = moments.variable(name).span()
        if not len(columns):
            raise ConstantVariableError(
                f"the variable {name!r}, to be {'erased' if role == 'erase' else 'kept'}, takes a "
                "single value (or carries no label), so x has no covariance with it; check the "
                "labels, or leave the variable out"
            )
        blocks.append(columns)
        counts.append(len(columns))
    rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return _Span([str(name) for name in names], rows, counts)


def _directions(selection: Any, width: int) -> _Span:
    """Explicit directions, one per column of a (d, k) array, each scaled to unit length."""
    if not hasattr(selection, "ndim"):
        selection = np.asarray(selection, dtype=np.float64)
    if selection.ndim == 1:
        selection = selection[:, None]
    array = as_rows(selection, name="keep")
    if len(array) != width:
        raise InputError(
            f"keep has shape {array.shape}; directions are the columns of an array of shape "
            f"({width}, k)"
        )
    check_values(array, "keep")
    rows = np.ascontiguousarray(array.T, dtype=np.float64)
    sizes = np.linalg.norm(rows, axis=1)
    if (sizes == 0).any():
        raise ConstantVariableError("keep holds a direction of zeros; leave it out")
    return _Span(["directions"], rows / sizes[:, None], [len(rows)])


def _shrinkage(state: State, policy: float | str | None) -> float:
    """Share of the isotropic target."""
    if policy is None:
        return 0.0
    if policy != "oas":
        return float(policy)
    # tr(S^2) from the lower triangle, in units where tr(S) = d.
    d, n = state.width, state.weight
    diagonal = np.einsum("ii->i", state.scatter)
    scale = float(diagonal.sum()) / d
    if scale == 0.0:
        return 1.0
    squares = sum(float(np.sum((state.scatter[j + 1 :, j] / scale) ** 2)) for j in range(d))
    mean_square = (2 * squares + float(np.sum((diagonal / scale) ** 2))) / d**2
    gap = (n + 1) * (mean_square - 1 / d)
    return 1.0 if gap <= 0 else min(1.0, (mean_square + 1) / gap)


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
    state = moments.flushed()
    d = state.width
    span_z = _span(moments, erase, "erase", d)
    span_y = _Span([], np.empty((0, d)), []) if keep is None else _span(moments, keep, "keep", d)
    shrinkage = _shrinkage(state, policies.shrinkage)
    per_weight = (1.0 - shrinkage) / state.weight
    variance = float(np.einsum("ii->", state.scatter)) / state.weight
    may_drop = policies.on_infeasible == "drop" or policies.max_amplification is not None
    eps = state.unit_roundoff
    mean = state.mean
    raw = solve.oblique_factors(
        state.scatter,
        mean,
        span_z.rows.T,
        span_y.rows.T,
        whitened=whitened,
        force_eigh=policies.solver == "eigh",
        allow_eigh=policies.solver != "cholesky",
        per_weight=per_weight,
        ridge=shrinkage * variance / d,
        # Noise in a unit-diagonal matrix: d eps bounds it; sqrt(d) eps is its size where errors
        # are independent, as those of float32 products are.
        eigen_tolerance=4.0 * max(d * EPS64, d**0.5 * eps if eps > EPS64 else 0.0),
        rank_tolerance=0.0 if policies.rank_tol == "auto" else float(policies.rank_tol),
        drop_below=1.0 / policies.max_amplification if policies.max_amplification else 0.0,
        may_drop=may_drop,
    )
    status = raw["status"]
    if status == solve.INFEASIBLE:
        _raise_infeasible(raw, span_z.names, span_y.names, method)
    if status != solve.OK:
        _raise_numerical(status, policies.solver)
    left, right = raw["left"], raw["right"]
    notes: list[str] = []
    if not len(left):
        notes.append(
            f"nothing was erased: x has no linear trace of {_listed(span_z.names)} above the "
            f"rounding level ({raw['noise']:.1e} in units of correlation), so the eraser is the "
            "identity. If a trace was expected, check that labels and rows belong together"
        )
        warnings.warn(notes[-1], NothingErasedWarning, stacklevel=3)
    if raw["dropped"]:
        cut = policies.max_amplification
        notes.append(
            f"{raw['dropped']} of {raw['rank_y']} direction(s) of {_listed(span_y.names)} were "
            f"given up: they lie too close to {_listed(span_z.names)} "
            + ("(to rounding)" if cut is None else f"(amplification above {cut:g})")
            + "; the report shows what is left of each variable"
        )
        warnings.warn(notes[-1], DroppedDirectionsWarning, stacklevel=3)
    if policies.null_space == "drop" and whitened:
        left, right = _with_null_space(left, right, raw)
    facts = _Facts(
        method, moments.n_rows, state.weight, variance, shrinkage, policies, whitened, tuple(notes)
    )
    if whitened and not shrinkage:
        distortion, unkept = raw["distortion"], raw["distortion_unkept"]
    else:
        distortion = _distortion(state, raw["left"], raw["right"])
        unkept = None
    report = partial(_report, facts, raw, span_z, span_y, left, right, distortion, unkept)
    return Projection._make(left, right, mean, method=method, report=report)


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
    lower = state.scatter
    product = np.tril(lower) @ right.T + np.tril(lower, -1).T @ right.T
    return float(np.sum((left @ left.T) * (right @ product))) / state.weight


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _raise_infeasible(raw: dict[str, Any], erased: list[str], kept: list[str], method: str) -> None:
    cosine = float(raw["cosines"][0]) if len(raw["cosines"]) else 1.0
    sine = float(np.min(raw["sines"]))
    amplification = np.inf if sine == 0 else 1 / sine
    raise InfeasibleError(
        f"{method} cannot keep {_listed(kept)} while it erases {_listed(erased)}: a direction of "
        f"what is kept lies in the span of what is erased (largest principal cosine "
        f"{cosine:.12g}, amplification {amplification:.1e}; ranks {raw['rank_y']} and "
        f"{raw['rank_z']}). Erasing would destroy it. Typical causes: both are the same variable "
        "or functions of each other, or there are fewer rows or features than classes. Keep "
        "fewer variables, pass on_infeasible='drop' to keep what can be kept, cap the cost with "
        "max_amplification=, or use leace, which keeps none of it",
        cosine,
    )


def _raise_numerical(status: int, solver: str) -> None:
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


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the report says beyond the figures of the solve."""

    method: str
    n_rows: int
    weight: float
    variance: float
    shrinkage: float
    policies: Policies
    whitened: bool
    warnings: tuple[str, ...]


def _report(
    facts: _Facts,
    raw: dict[str, Any],
    span_z: _Span,
    span_y: _Span,
    left: Float,
    right: Float,
    distortion: float,
    unkept: float | None,
) -> Report:
    """The report, made when it is first asked for."""
    d = left.shape[1]
    sines = raw["sines"]
    smallest = float(np.min(sines)) if len(sines) else 1.0
    amplification = 1.0 / smallest
    kept = bool(span_y.names) and facts.whitened
    rho = max(0.0, 1.0 - smallest**2) if kept else None
    removed, coefficients = raw["left"], raw["right"]
    norm_squared = 1.0
    if len(removed):
        gram = (removed @ removed.T) @ (coefficients @ coefficients.T)
        norm_squared = max(1.0, float(np.max(np.abs(np.linalg.eigvals(gram)))))
    spread = 1.0
    for sigma, rank in ((raw["sigma_z"], raw["rank_z"]), (raw["sigma_y"], raw["rank_y"])):
        if rank:
            spread = max(spread, float(sigma[0] / sigma[rank - 1]))
    bound = 8 * d * EPS64 * spread * norm_squared
    variables = []
    for role, span, white in (
        ("erased", span_z, raw["whitened_z"]),
        ("kept", span_y, raw["whitened_y"]),
    ):
        start = 0
        for name, count in zip(span.names, span.counts, strict=True):
            part = slice(start, start + count)
            variables.append(
                variable_report(name, role, span.rows[part], white[part], left, right,
                                raw["noise"], bound)
            )  # fmt: skip
            start += count
    constants = int(raw["constants"])
    null = 0 if raw["null_basis"] is None else raw["null_basis"].shape[1]
    share = 1.0 / facts.variance if facts.variance else 0.0
    return Report(
        method=facts.method,
        n_rows=facts.n_rows,
        weight=facts.weight,
        n_features=d,
        rank_covariance=d - constants - null if facts.whitened else None,
        rank=len(left),
        variables=tuple(variables),
        dropped=int(raw["dropped"]),
        cosines=tuple(map(float, raw["cosines"])),
        amplification=amplification,
        rho=rho,
        frozen_head_penalty=None if rho is None else amplification**2,
        head_shrinkage_threshold=None if rho is None else 2 * (1 - rho) / (2 - rho),
        distortion=distortion * share,
        distortion_leace=None if unkept is None else unkept * share,
        solver=raw["solver"],
        tolerance=float(raw["noise"]),
        shrinkage=facts.shrinkage,
        warnings=facts.warnings,
    )
