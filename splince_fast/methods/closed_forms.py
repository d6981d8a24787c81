"""The methods with a closed form: SPLINCE, LEACE, SAL and mean projection."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from splince_fast._solve.options import Options
from splince_fast._solve.selection import Kept, Selection, kept_of, names_of
from splince_fast.exceptions import InputError
from splince_fast.labels import VariableName
from splince_fast.methods.fit import MethodCall
from splince_fast.methods.folds import eraser_of_folds
from splince_fast.methods.refine import Refinement
from splince_fast.moments import Folds, Moments
from splince_fast.moments.statistics import Factored, check_moments
from splince_fast.projection import Projection


def splince(
    moments: Moments | Factored | Folds,
    *,
    erase: Selection,
    keep: Selection | ArrayLike,
    max_amplification: float | None = None,
    on_infeasible: str = "raise",
    null_space: str = "keep",
    shrinkage: float | str | None = None,
    rank_tol: float | str = "auto",
    solver: str = "auto",
    strength: float = 1,
    refine: object = None,
    passes: int = 1,
) -> Projection:
    """Erase variables and keep the covariance with others, with the least change of x.

    P minimises E|P x - x|^2 subject to P Cov(x, z) = 0 and P Cov(x, y) = Cov(x, y), for variables z
    to erase and y to keep (Theorem 1 of Holstege, Ravfogel and Wouters, NeurIPS 2025). With
    Cov(x) = L L^T, A = L^+ Cov(x, z), B = L^+ Cov(x, y), Qz = orth(A), Qy = orth(B) and
    N = (I - Qy Qy^T) Qz::

        P = I - L Qz (N^T Qz)^{-1} N^T L^+

    Parameters
    ----------
    moments : Moments, Factored or Folds
        Moments of x and of the variables. For folds, the report includes the effect on held-out
        rows.
    erase : str, tuple or list of them
        Variables to erase, jointly; a tuple names joint cells (see :class:`Moments`).
    keep : str, tuple or list of them, or array of shape (d, k)
        Variables whose covariance with x stays exact; or directions y_j such that P y_j = y_j.
    max_amplification : float, optional
        Drop the kept directions whose angle to the erased span has 1 / sin(angle) above this value.
    on_infeasible : {"raise", "drop"}
        Raise InfeasibleError, or drop the kept directions that lie in the erased span, and warn.
    null_space : {"keep", "drop"}
        Leave the component of x - E x off the support of x unchanged, or set it to 0, as the
        formula in the paper does; the fitted rows have none.
    shrinkage : float in [0, 1], "oas" or "cv", optional
        Intensity a: (1 - a) Cov(x) + a (tr Cov(x) / d) I is factored; the constraints remain exact.
        "oas" is the oracle approximating shrinkage of Chen, Wiesel, Eldar and Hero (2010). "cv",
        for folds, selects 0, 1e-6, 1e-4, 1e-3, 0.01, 0.1 or "oas" by the distortion of held-out
        rows.
    rank_tol : "auto" or float in [0, 1)
        Ignore singular values of the concept below this value times the largest; "auto" ignores
        those at the rounding level.
    solver : {"auto", "cholesky", "eigh"}
        Factorisation of Cov(x). "auto" is Cholesky, or "eigh" if Cov(x) is rank deficient.
    strength : float in [0, 1]
        Fraction b that is restored of X = Cov(x, y) - P_LEACE Cov(x, y), the covariance that LEACE
        removes: P_b = (1 - b) P_LEACE + b P. The distortion in addition to that of LEACE is
        multiplied by b^2. 0 is LEACE.
    refine : Source or iterable of blocks, optional
        The accumulated rows, for extra passes with ``covariance_type="diag"``. Each pass takes
        O(n d k) for k columns, and never increases the distortion, which is then exact.
    passes : int
        Number of passes over `refine`; the distortion tends to its minimum.

    Returns
    -------
    Projection
        The eraser; :attr:`~Projection.report` is its report.

    Raises
    ------
    UnknownVariableError, ConstantVariableError
        A variable was not accumulated or has no labels; or it has a single value.
    InfeasibleError
        Kept directions lie in the erased span.
    NotEnoughDataError, InputError
        The moments have no rows; a parameter is out of range, or `refine` has other rows.

    Warns
    -----
    NothingErasedWarning, DroppedDirectionsWarning, UnseenRowsWarning
        x has no linear association with the concept; kept directions were dropped; there are fewer
        than two rows per dimension of x, or the distortion is much larger in held-out folds.
    PrecisionWarning
        An amplification above 1e4; a residual above its bound, or a bound of 1 or more; an
        association with directions at the rounding level (for SAL: with features far smaller than
        others); or a sensitivity (:class:`Report`) above 1e-3.
    ManyClassesWarning, LabelFeatureWarning
        An integer variable with more than 24 classes, which may be a quantity, takes half of the
        rank or of the variance of x; or all of x is erased; a feature equals a label.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=1000)
    >>> y = np.where(rng.random(1000) < 0.8, z, 1 - z)
    >>> X = rng.normal(size=(1000, 8)) + np.outer(z, np.eye(8)[0]) + np.outer(y, np.eye(8)[1])
    >>> moments = sf.Moments().update(X, {"z": z, "y": y})
    >>> eraser = sf.splince(moments, erase="z", keep="y")
    >>> after = sf.Moments().update(eraser(X), {"z": z, "y": y})
    >>> bool(np.abs(after.cross_covariance("z")).max() < 1e-12)
    True
    """
    if keep is None:
        raise InputError("keep is None; pass the variables to keep, or use leace, which keeps none")
    options = Options(
        max_amplification, on_infeasible, null_space, shrinkage, rank_tol, solver, strength
    )
    return eraser_of(moments, "SPLINCE", erase, keep, options, refine=refine, passes=passes)


def leace(
    moments: Moments | Factored | Folds,
    *,
    erase: Selection,
    null_space: str = "keep",
    shrinkage: float | str | None = None,
    rank_tol: float | str = "auto",
    solver: str = "auto",
    refine: object = None,
    passes: int = 1,
) -> Projection:
    """Erase variables with the least change of x: P = I - L Qz Qz^T L^+.

    P minimises E|P x - x|^2 subject to P Cov(x, z) = 0 (Belrose et al., "LEACE: Perfect linear
    concept erasure in closed form", NeurIPS 2023). L and Qz are those of :func:`splince`, as are
    errors and warnings.

    Parameters
    ----------
    moments, erase, null_space, shrinkage, rank_tol, solver, refine, passes
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
    options = Options(None, "raise", null_space, shrinkage, rank_tol, solver)
    return eraser_of(moments, "LEACE", erase, None, options, refine=refine, passes=passes)


def sal(
    moments: Moments | Factored | Folds,
    *,
    erase: Selection,
    keep: Selection | ArrayLike | None = None,
    max_amplification: float | None = None,
    on_infeasible: str = "raise",
    rank_tol: float | str = "auto",
) -> Projection:
    """Erase variables by the projection onto the orthogonal complement of colsp(Cov(x, z)).

    Spectral attribute removal, P = I - Q Q^T with Q = orth(Cov(x, z)), without whitening (Shao,
    Ziser and Cohen, "Gold doesn't always glitter", EACL 2023). With `keep`, P is the oblique
    projection with the same null space and P Cov(x, y) = Cov(x, y). The result depends on the units
    of the features. Errors and warnings are those of :func:`splince`.

    Parameters
    ----------
    moments, erase, keep, max_amplification, on_infeasible, rank_tol
        As for :func:`splince`; without `keep`, nothing is kept.

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
    return eraser_of(moments, "SAL", erase, keep, options, whitened=False)


def mean_projection(
    moments: Moments | Factored | Folds, *, erase: Selection, rank_tol: float | str = "auto"
) -> Projection:
    """Erase classes by the orthogonal projection that equates the class means.

    For a binary concept, P projects along the difference of the two class means (Haghighatkhah et
    al., "Better hit the nail on the head than beat around the bush", 2022). The result equals that
    of :func:`sal` for classes, because the differences of their means span colsp(Cov(x, z)).

    Parameters
    ----------
    moments, erase, rank_tol
        As for :func:`splince`.

    Raises
    ------
    LabelError
        A variable is continuous and has no class means.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> z = np.array(["a", "b"] * 50)
    >>> X = np.random.default_rng(0).normal(size=(100, 3)) + (z == "a")[:, None]
    >>> sf.mean_projection(sf.Moments().update(X, {"z": z}), erase="z").rank
    1
    """
    options = Options(rank_tol=rank_tol)
    return eraser_of(
        moments, "MeanProjection", erase, None, options, whitened=False, classes_only=True
    )


def eraser_of(
    moments: Moments | Factored | Folds, method: str, erase: Selection,
    keep: Selection | ArrayLike | None, options: Options, *, refine: object = None,
    passes: int = 1, **fields: Any,
) -> Projection:  # fmt: skip
    """Return the eraser of a method; `fields` are further fields of :class:`MethodCall`."""
    if type(moments) is not Moments:
        check_moments(moments)
    options.checked()
    refinement = None
    if refine is not None or passes != 1 or type(passes) is not int:
        refinement = Refinement.of(refine, passes)
    erased: list[VariableName] = [erase] if isinstance(erase, str) else names_of(erase, "erase")
    kept: Kept = [keep] if isinstance(keep, str) else kept_of(keep)
    call = MethodCall(method, erased, kept, options, refinement=refinement, **fields)
    # `isinstance(moments, Folds)` is slow, because `Folds` is an abstract Sequence.
    if isinstance(moments, Moments) or not isinstance(moments, Folds):
        return call.fit(moments)
    return eraser_of_folds(moments, call)
