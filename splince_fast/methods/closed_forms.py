"""The closed forms: moments in, projection out; one routine with two switches.

==============================  ==============  ==============================
..                              no task kept    task kept
==============================  ==============  ==============================
whitened (a factor of Cov(x))   ``leace``       ``splince``
not whitened                    ``sal``         ``sal`` with ``keep=``
==============================  ==============  ==============================
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from splince_fast._solve.options import Options
from splince_fast._solve.selection import Selection, kept_of, names_of
from splince_fast.exceptions import InputError
from splince_fast.methods.folds import eraser_of
from splince_fast.methods.method_call import MethodCall
from splince_fast.methods.refine import Refinement
from splince_fast.moments import Folds, Moments
from splince_fast.moments.snapshot import Factored
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
    min_scale: float | str = "auto",
    strength: float = 1,
    refine: object = None,
    passes: int = 1,
) -> Projection:
    """Erase variables and keep the covariance with others, changing x as little as possible.

    The minimiser of E|P x - x|^2 subject to P Cov(x, z) = 0 and P Cov(x, y) = Cov(x, y)
    (Theorem 1 of Holstege, Ravfogel and Wouters, NeurIPS 2025). With Cov(x) = L L^T,
    A = L^+ Cov(x, z), B = L^+ Cov(x, y), Qz = orth(A), Qy = orth(B), N = (I - Qy Qy^T) Qz::

        P = I - L Qz (N^T Qz)^{-1} N^T L^+

    Parameters
    ----------
    moments : Moments, Factored or Folds
        Of the data, with the variables that are named below; :meth:`Moments.factored` saves
        factoring Cov(x) again for every eraser, and folds add to the report what happens to rows
        not seen.
    erase : str, tuple or list of them
        Variables to erase, jointly; a tuple names joint cells (see :class:`Moments`).
    keep : str, tuple or list of them, or array of shape (d, k)
        Variables whose covariance with x stays exactly as it is; or directions y_j such that
        P y_j = y_j.
    max_amplification : float, optional
        Give up kept directions at an angle to the erased ones with 1 / sin above this.
    on_infeasible : {"raise", "drop"}
        Policy where kept directions lie in the span of the erased ones, to rounding:
        raise InfeasibleError, or give that part up, with a warning.
    null_space : {"keep", "drop"}
        Effect of the map off the support of x: none, or annihilation as in the formula printed
        in the paper does. On the data the two agree.
    shrinkage : float in [0, 1], "oas", "ledoit-wolf" or "cv", optional
        Factor (1 - a) Cov(x) + a (tr Cov(x) / d) I instead of Cov(x). The constraints stay exact;
        only optimality is relative to that matrix. "oas" is the oracle approximating shrinkage
        of Chen, Wiesel, Eldar and Hero (2010); "ledoit-wolf" that of Ledoit and Wolf (2004), for
        moments made with ``ledoit_wolf=True``; "cv", for folds, the one of the least change of
        held-out rows, of 0, 1e-6, 1e-4, 1e-3, 0.01, 0.1 and "oas".
    rank_tol : "auto" or float in [0, 1)
        Directions of the concept weaker than this times the strongest are left alone, on top of
        those at the rounding level, which "auto" leaves alone.
    solver : {"auto", "cholesky", "eigh"}
        "auto" takes Cholesky unless Cov(x) is rank deficient at its rounding level.
    min_scale : "auto" or float in [0, 1)
        Features whose deviation is below this times the root mean square deviation are left out
        of the whitening: nothing is read from them, and what the others predict of their
        covariance with the concept is removed from them, so that both constraints stay exact. Where
        directions of the concept are in such features alone they are read, with Cov(x) as block
        diagonal. "auto" leaves out deviations below 1e-26, and in rows of at most 32 bits those
        below eps32 times the mean of the feature, unless the covariance is shrunk.
    strength : float in [0, 1]
        Fraction b of X = Cov(x, y) - P_LEACE Cov(x, y) that is given back, at b^2 times the cost:
        P_b Cov(x, y) = Cov(x, y) - (1 - b) X, and P_b = (1 - b) P_LEACE + b P. 0 is LEACE. A
        frozen head has a strength of least squared error, :meth:`Report.strength_for`.
    refine : Source or iterable of blocks, optional
        For moments made with ``sketch_size``, which keep no covariance: the rows that they have
        seen, to be read again. Each pass takes products of Cov(x) with a few columns, O(n d k), and
        the best eraser that they allow; it measures the distortion and never increases it.
    passes : int
        How often `refine` is read; with more passes the distortion tends to the least possible.

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
        A parameter out of range; `refine` is not what the moments have seen.

    Warns
    -----
    NothingErasedWarning
        The data hold no linear association with the concept: the eraser is the identity.
    DroppedDirectionsWarning
        Kept directions were given up, as the policies allow.
    UnseenRowsWarning
        Of folds: held-out rows fare much worse (:func:`splince_fast.cross_report`).
    PrecisionWarning
        The result stands on few digits: an amplification above 1e4, a residual above its bound, a
        bound of 1 or more, an association in directions of less variance than rounding (for SAL: in
        features that are tiny beside others), or a sensitivity above 1e-3 (:class:`Report`) and 10
        times that of an orthogonal projection.
    ManyClassesWarning
        An integer variable of more than 24 classes has at least half the rank of x, or takes more
        than half of its variance: it may be a quantity.
    LabelFeatureWarning
        A feature equals a variable up to offset, scale and coding of classes: a label in x.

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
    options = Options(
        max_amplification, on_infeasible, null_space, shrinkage, rank_tol, solver, min_scale,
        strength,
    )  # fmt: skip
    if keep is None:
        raise InputError(
            "keep is None; name what SPLINCE is to keep, or use leace, which keeps none"
        )
    again = Refinement.of(refine, passes)
    erased, kept = names_of(erase, "erase"), kept_of(keep)
    return eraser_of(moments, MethodCall("SPLINCE", True, erased, kept, options, again))


def leace(
    moments: Moments | Factored | Folds,
    *,
    erase: Selection,
    null_space: str = "keep",
    shrinkage: float | str | None = None,
    rank_tol: float | str = "auto",
    solver: str = "auto",
    min_scale: float | str = "auto",
    refine: object = None,
    passes: int = 1,
) -> Projection:
    """Erase variables, changing x as little as possible: P = I - L Qz Qz^T L^+.

    The minimiser of E|P x - x|^2 subject to P Cov(x, z) = 0 (Belrose et al., "LEACE: Perfect
    linear concept erasure in closed form", NeurIPS 2023). Errors and warnings are those of
    :func:`splince`.

    Parameters
    ----------
    moments : Moments, Factored or Folds
        Of the data, with the variables that are named below; :meth:`Moments.factored` saves
        factoring Cov(x) again for every eraser, and folds add to the report what happens to rows
        not seen.
    erase : str, tuple or list of them
        Variables to erase, jointly; a tuple names joint cells (see :class:`Moments`).
    null_space, shrinkage, rank_tol, solver, min_scale, refine, passes
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
    options = Options(None, "raise", null_space, shrinkage, rank_tol, solver, min_scale)
    again = Refinement.of(refine, passes)
    erased = names_of(erase, "erase")
    return eraser_of(moments, MethodCall("LEACE", True, erased, None, options, again))


def sal(
    moments: Moments | Factored | Folds,
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
    moments : Moments, Factored or Folds
        Of the data, with the variables that are named below; :meth:`Moments.factored` saves
        factoring Cov(x) again for every eraser, and folds add to the report what happens to rows
        not seen.
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
    erased, kept = names_of(erase, "erase"), kept_of(keep)
    return eraser_of(moments, MethodCall("SAL", False, erased, kept, options))


def mean_projection(
    moments: Moments | Factored | Folds, *, erase: Selection, rank_tol: float | str = "auto"
) -> Projection:
    """Erase classes by the orthogonal projection off the differences of their means.

    For a binary concept this is the projection along the difference of the two class means
    (Haghighatkhah et al., "Better hit the nail on the head than beat around the bush", 2022).
    The class means span colsp(Cov(x, z)), so it is :func:`sal` for class-coded variables.

    Parameters
    ----------
    moments : Moments, Factored or Folds
        Of the data, with the variables that are named below; :meth:`Moments.factored` saves
        factoring Cov(x) again for every eraser, and folds add to the report what happens to rows
        not seen.
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
    options = Options(rank_tol=rank_tol)
    erased = names_of(erase, "erase")
    call = MethodCall("MeanProjection", False, erased, None, options, classes_only=True)
    return eraser_of(moments, call)
