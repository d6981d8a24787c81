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

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splince_fast._kernels.factor import STATUS_INFEASIBLE, STATUS_OK
from splince_fast._solve.messages import raise_infeasible, raise_numerical
from splince_fast._solve.oblique import Solution, oblique, with_null_space
from splince_fast._solve.options import Options
from splince_fast._solve.selection import Selection, names_of, span_of
from splince_fast._solve.tolerances import AMPLIFICATION, NOISE_SHARE
from splince_fast.exceptions import (
    DroppedDirectionsWarning,
    InputError,
    LabelError,
    NothingErasedWarning,
    PrecisionWarning,
)
from splince_fast.labels.names import listed
from splince_fast.moments import Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.factored import Factored, Live, statistics
from splince_fast.projection import Projection
from splince_fast.report import Facts, build_report

Float = NDArray[np.float64]


def splince(
    moments: Moments | Factored,
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
    moments : Moments or Factored
        Of the data, with the variables that are named below; :meth:`Moments.factored` saves
        factoring Cov(x) again for every eraser.
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
    PrecisionWarning
        The result stands on few digits: an amplification above 1e4, a residual above its bound, a
        bound of 1 or more, or a trace in what x varies by less than rounding.

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
    options = Options(max_amplification, on_infeasible, null_space, shrinkage, rank_tol, solver)
    if keep is None:
        raise InputError(
            "keep is None; name what SPLINCE is to keep, or use leace, which keeps none"
        )
    return _fit(moments, "SPLINCE", erase, keep, options, whitened=True)


def leace(
    moments: Moments | Factored,
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
    moments : Moments or Factored
        Of the data, with the variables that are named below; :meth:`Moments.factored` saves
        factoring Cov(x) again for every eraser.
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
    options = Options(null_space=null_space, shrinkage=shrinkage, rank_tol=rank_tol, solver=solver)
    return _fit(moments, "LEACE", erase, None, options, whitened=True)


def sal(
    moments: Moments | Factored,
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
    moments : Moments or Factored
        Of the data, with the variables that are named below; :meth:`Moments.factored` saves
        factoring Cov(x) again for every eraser.
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
    options = Options(max_amplification, on_infeasible, rank_tol=rank_tol)
    return _fit(moments, "SAL", erase, keep, options, whitened=False)


def mean_projection(
    moments: Moments | Factored, *, erase: Selection, rank_tol: float | str = "auto"
) -> Projection:
    """Erase classes by the orthogonal projection off the differences of their means.

    For a binary concept this is the projection along the difference of the two class means
    (Haghighatkhah et al., "Better hit the nail on the head than beat around the bush", 2022).
    The class means span colsp(Cov(x, z)), so it is :func:`sal` for class-coded variables.

    Parameters
    ----------
    moments : Moments or Factored
        Of the data, with the variables that are named below; :meth:`Moments.factored` saves
        factoring Cov(x) again for every eraser.
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
    options = Options(rank_tol=rank_tol)
    return _fit(moments, "MeanProjection", erase, None, options, whitened=False)


def _fit(
    moments: Moments | Factored,
    method: str,
    erase: object,
    keep: object,
    options: Options,
    *,
    whitened: bool,
) -> Projection:
    """Factors, warnings and report for any method of the family."""
    with statistics(moments) as known, known.memory(whitened) as memory:
        span_z = span_of(known, erase, "erase", whitened)
        span_y = span_of(known, keep, "keep", whitened)
        share = known.share(options) if whitened else 0.0
        factor = known.factored(options, whitened, memory)
        spans = np.concatenate([span_z.rows, span_y.rows]) if span_y.names else span_z.rows
        solution = oblique(factor, spans, len(span_z.rows), options)
        _check(solution, span_z.names, span_y.names, method, options)
        distortion, unkept = solution.distortion, solution.distortion_unkept
        sampled, excess = known.sample if whitened else None, None
        # The matrix that was factored is Cov(x) itself: then the solve knows what it changes.
        if solution.solver != "cholesky" or share or sampled is not None:
            distortion, excess = _change(known, solution, bool(share))
            if (solution.admitted or sampled is not None) and span_y.names:
                # Nor is LEACE's then what the factor says.
                plain = oblique(factor, span_z.rows, len(span_z.rows), options)
                unkept = _change(known, plain, bool(share))[0]
        if not span_y.names:
            unkept = distortion
        left, right = solution.left, solution.right
        if solution.null_basis is not None:
            left, right = with_null_space(solution, span_y.rows)
        traced = 0
        if solution.admitted:
            # Explicit directions off the support are the caller's choice, and no trace.
            told = np.concatenate([s.rows for s in (span_z, span_y) if s.names != ["directions"]])
            full = factor.admit(told)
            seen, whole = (float(np.sum(f.whiten(told) ** 2)) for f in (factor, full))
            if whole - seen > NOISE_SHARE * whole:
                traced = full.admitted
        notes = _warn(solution, span_z.names, span_y.names, options, traced)
        mean = known.mean
        # All rows know the variance of x, whatever its covariance rests on.
        variance = solution.variance if sampled is None else float(known.variances.sum())
        facts = Facts(
            method, known.n_rows, known.weight, share, whitened, distortion, unkept, notes,
            variance, None if sampled is None else sampled.n_rows, excess,
        )  # fmt: skip
    report = partial(build_report, facts, solution, span_z, span_y, left, right)
    return Projection._make(left, right, mean, method=method, report=report)


def _change(known: Live | Factored, solution: Solution, shrunk: bool) -> tuple[float, float | None]:
    """E|P x - x|^2, and where Cov(x) is that of a sample, the share of it that is excess."""
    left, right, sample = solution.left, solution.right, known.sample
    gram = known.gram(right)
    if sample is None or shrunk or solution.solver == "none":
        return float(np.sum((left @ left.T) * gram)), None
    kept = solution.rank_y - solution.dropped
    regressors = solution.rank_covariance - solution.rank_z - kept
    return sample.change(left, right, gram, regressors)


def _check(
    solution: Solution, erased: list[str], kept: list[str], method: str, options: Options
) -> None:
    """Raise what the status of a solve calls for."""
    if solution.status == STATUS_INFEASIBLE:
        cosine = float(solution.cosines[0]) if len(solution.cosines) else 1.0
        sine = float(solution.sines.min())
        raise_infeasible(cosine, sine, solution.rank_y, solution.rank_z, erased, kept, method)
    if solution.status != STATUS_OK:
        raise_numerical(solution.status, options.solver)


def _warn(
    solution: Solution, erased: list[str], kept: list[str], options: Options, traced: int
) -> tuple[str, ...]:
    """Warn of what the caller has to know, and return it for the report."""
    notes = []
    if not solution.rank_z:
        notes.append(
            f"nothing was erased: x has no linear trace of {listed(erased)} above the "
            f"rounding level ({solution.noise:.1e} in units of correlation), so the eraser is the "
            "identity. If a trace was expected, check that labels and rows belong together"
        )
        warnings.warn(notes[-1], NothingErasedWarning, stacklevel=4)
    if solution.dropped:
        cut = options.max_amplification
        notes.append(
            f"{solution.dropped} of {solution.rank_y} direction(s) of {listed(kept)} were "
            f"given up: they lie too close to {listed(erased)} "
            + ("(to rounding)" if cut is None else f"(amplification above {cut:g})")
            + "; the report shows what is left of each variable"
        )
        warnings.warn(notes[-1], DroppedDirectionsWarning, stacklevel=4)
    for note in _imprecise(solution, erased, kept, traced):
        notes.append(note)
        warnings.warn(note, PrecisionWarning, stacklevel=4)
    return tuple(notes)


def _imprecise(solution: Solution, erased: list[str], kept: list[str], traced: int) -> list[str]:
    """What makes the result stand on few digits, in words."""
    notes = []
    amplification, bound = solution.amplification, solution.bound
    if amplification > AMPLIFICATION:
        notes.append(
            f"{listed(kept)} nearly lies in the span of {listed(erased)}: the longest correction "
            f"is {amplification:.1e} times LEACE's, and so is what rounding, noise and new rows "
            "add to it. Cap it with max_amplification= (for example 100), keep fewer variables, "
            "or use leace"
        )
    worst = max(solution.residual_z, solution.residual_y)
    if solution.rank_z and (bound >= 1 or worst > bound):
        notes.append(
            f"rounding may undo what was erased or kept: residual {worst:.1e}, bound {bound:.1e} "
            "(relative to the cross-covariances). Typical causes: variables that nearly determine "
            "each other, or features that are combinations of others; drop such columns, pass "
            "shrinkage=1e-6, or cap max_amplification="
        )
    if traced:
        notes.append(
            f"x varies by less than its rounding level in {traced} direction(s) in "
            "which the labels show a trace; their variance was set to that level. What is erased "
            "and kept is exact, but x is changed more than the least possible, and new rows may "
            "be changed far more: drop features that are copies of others, accumulate in float64, "
            "or pass shrinkage=1e-6"
        )
    return notes
