"""Fair PCA: the principal components of x that have no covariance with the variables to erase."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve.options import Options, is_integer, is_number
from splince_fast._solve.selection import Selection, names_of
from splince_fast.exceptions import InputError
from splince_fast.methods.closed_forms import eraser_of
from splince_fast.moments import Folds, Moments
from splince_fast.moments.statistics import Factored, Statistics
from splince_fast.projection import Projection

Float = NDArray[np.float64]


def fair_pca(
    moments: Moments | Factored | Folds,
    *,
    erase: Selection,
    n_components: float = 0.95,
    n_candidates: int | None = None,
    rank_tol: float | str = "auto",
) -> Projection:
    """Project onto the leading principal components of x that have no covariance with variables.

    P = U U^T minimises E|P c - c|^2, c = x - E x, over the orthogonal projections of rank m with
    P Cov(x, z) = 0: the columns of R are an orthonormal basis of the orthogonal complement of
    colsp(Cov(x, z)), those of V the leading m eigenvectors of R^T Cov(x) R, and U = R V
    (Kleindessner, Donini, Russell and Zafar, "Efficient fair PCA for fair representation learning",
    AISTATS 2023). With all components, P is that of :func:`sal`.

    Parameters
    ----------
    moments, erase
        As for :func:`splince`; ``covariance_type="diag"`` has no components.
    n_components : int, or float in (0, 1)
        Number m of components; or the fraction of the variance of R^T x that they explain at least.
    n_candidates : int, optional
        Number of directions from which the components are taken, at least m: those in which the
        class covariances differ least, which are the eigenvectors of the smallest eigenvalues of
        sum_c p_c (R^T (C_c - C) R)^2, with the covariance C_c and the weight p_c of each class, and
        C = sum_c p_c C_c. `erase` is then the variable of ``Moments(by=)``. The paper does this for
        two classes, with C_0 - C_1.
    rank_tol
        As for :func:`splince`.

    Returns
    -------
    Projection
        The eraser, of rank d - m, in the coordinates of x; :attr:`~Projection.report` is its
        report. Its `distortion` is the fraction of the variance that the components lose.

    Raises
    ------
    UnknownVariableError, ConstantVariableError, NotEnoughDataError
        As :func:`splince`.
    InputError
        A number is out of range; or the moments have no covariance, or none of each class.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=500)
    >>> X = rng.normal(size=(500, 6)) * [3, 2, 1, 1, 1, 1] + z[:, None]
    >>> eraser = sf.fair_pca(sf.Moments().update(X, {"z": z}), erase="z", n_components=2)
    >>> clean = eraser(X)
    >>> bool(np.allclose(clean[z == 0].mean(axis=0), clean[z == 1].mean(axis=0)))
    True
    >>> int(np.linalg.matrix_rank(clean - clean.mean(axis=0)))
    2
    """
    is_fraction = is_number(n_components) and 0 < n_components < 1
    if not is_fraction and not (is_integer(n_components) and n_components > 0):
        raise InputError(
            f"n_components is {n_components!r}; it must be a positive integer, or a fraction of "
            "the variance in (0, 1)"
        )
    classes = None if n_candidates is None else _class_covariances(moments, erase)
    discard = partial(
        _discarded, n_components=n_components, n_candidates=n_candidates, classes=classes
    )
    options = Options(rank_tol=rank_tol)
    return eraser_of(moments, "FairPCA", erase, None, options, whitened=False, discard=discard)


def _class_covariances(moments: object, erase: Selection) -> tuple[Float, Float]:
    """Return the weights (k,) and the covariances (k, d, d) of the classes to erase."""
    names = names_of(erase, "erase")
    if not isinstance(moments, Moments) or names != [moments.parameters.by]:
        raise InputError(
            "n_candidates needs the covariance of x in each class; pass moments made with by= the "
            "one variable to erase"
        )
    parts = [part for name, part in moments.by_class.items() if name is not None]
    weights = np.array([part.weight for part in parts])
    return weights / weights.sum(), np.stack([part.covariance(ddof=0) for part in parts])


def _discarded(
    stats: Statistics, erased: Float, *, n_components: float, n_candidates: int | None,
    classes: tuple[Float, Float] | None,
) -> Float:  # fmt: skip
    """Return an orthonormal basis (r, d) of the directions without concept or component."""
    if stats.is_diagonal:
        raise InputError(
            "fair_pca needs the covariance of x, which moments with covariance_type='diag' do not "
            "hold; make moments without it"
        )
    r, d = erased.shape
    if r == d:
        raise InputError(
            f"the variables are associated with all {d} dimensions, so that no component is left; "
            "erase fewer of them"
        )
    least = int(n_components) if is_integer(n_components) else 1
    for name, value, low in (("n_components", least, 1), ("n_candidates", n_candidates, least)):
        if value is not None and not (is_integer(value) and low <= value <= d - r):
            raise InputError(
                f"{name} is {value!r}; it must be an integer from {low} to {d - r}: {r} of {d} "
                "dimensions are erased"
            )
    basis = np.linalg.qr(erased.T, mode="complete")[0][:, r:].T  # R^T
    rest = basis[:0]
    if classes is not None:
        weights, covariances = classes
        differences = basis @ (covariances - np.tensordot(weights, covariances, 1)) @ basis.T
        squares = np.einsum("c,cij,cjk->ik", weights, differences, differences)
        rotated = np.linalg.eigh(squares)[1].T @ basis
        basis, rest = rotated[:n_candidates], rotated[n_candidates:]
    values, vectors = np.linalg.eigh(stats.gram(np.ascontiguousarray(basis)))
    count = int(n_components)
    if not is_integer(n_components):
        explained = np.cumsum(values[::-1])  # rounding may change the order of the last
        count = min(int(np.searchsorted(explained, n_components * explained[-1])) + 1, len(basis))
    return np.concatenate([rest, vectors[:, : len(basis) - count].T @ basis])
