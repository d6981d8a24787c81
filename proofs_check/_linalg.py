"""Linear algebra in exact or 60-digit arithmetic: object arrays of Fraction or of mpf.

All routines accept both kinds of number. Results with fractions are exact, including ranks. With
mpf, a pivot counts as zero if it is at most eps^(2/3) times the largest entry, where eps is the
working precision. All entries of a matrix are of one kind, because mpmath 1.3 neither subtracts nor
compares a fraction and an mpf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

Matrix: TypeAlias = Any  # object array; products of object arrays have type Any
Number: TypeAlias = Any  # Fraction or mpf, which have no common base class


def rational(values: Any) -> Matrix:
    """Convert integers, floats or fractions to a 2-D array of fractions, exactly."""
    array = np.atleast_2d(np.asarray(values, dtype=object))
    out = np.empty(array.shape, dtype=object)
    for index, value in np.ndenumerate(array):
        out[index] = value if isinstance(value, Fraction) else Fraction(value)
    return out


def column(values: Iterable[object]) -> Matrix:
    """Return a column of fractions."""
    return rational([[value] for value in values])


def mpf(value: Number) -> Number:
    """Convert a fraction, integer, float or mpf to an mpf of the working precision."""
    if isinstance(value, Fraction):
        return mpmath.mpf(value.numerator) / value.denominator
    return mpmath.mpf(value)


def high_precision(a: Matrix) -> Matrix:
    """Convert a matrix to mpf numbers of the working precision."""
    out = np.empty(a.shape, dtype=object)
    for index, value in np.ndenumerate(a):
        out[index] = mpf(value)
    return out


def to_float(a: Matrix) -> NDArray[np.float64]:
    """Round a matrix to float64."""
    return np.array([[float(v) for v in row] for row in a], dtype=np.float64).reshape(a.shape)


def _of_mpf(a: Matrix | None) -> bool:
    """Return whether the entries of a matrix are mpf numbers."""
    return a is not None and isinstance(next(iter(a.flat), None), mpmath.mpf)


def eye(d: int, like: Matrix | None = None) -> Matrix:
    """Return the d x d identity in the kind of number of ``like``; fractions by default."""
    out = zeros(d, d, like)
    np.fill_diagonal(out, mpmath.mpf(1) if _of_mpf(like) else Fraction(1))
    return out


def zeros(rows: int, columns: int, like: Matrix | None = None) -> Matrix:
    """Return a zero matrix in the kind of number of ``like``; dimensions may be 0."""
    out = np.empty((rows, columns), dtype=object)
    out[...] = mpmath.mpf(0) if _of_mpf(like) else Fraction(0)
    return out


def hstack(a: Matrix, b: Matrix) -> Matrix:
    """Return [a, b], the columns of a and of b; a or b may have no columns."""
    out = zeros(a.shape[0], a.shape[1] + b.shape[1])
    out[:, : a.shape[1]], out[:, a.shape[1] :] = a, b
    return out


def diagonal(values: Sequence[Number]) -> Matrix:
    """Return a diagonal matrix."""
    out = zeros(len(values), len(values))
    for i, value in enumerate(values):
        out[i, i] = Fraction(value)
    return out


def is_zero(a: Matrix) -> bool:
    """Return whether all entries are exactly zero; True for an empty matrix."""
    return all(value == 0 for value in a.flat)


def equal(a: Matrix, b: Matrix) -> bool:
    """Return whether two matrices have the same shape and exactly equal entries."""
    return a.shape == b.shape and is_zero(a - b)


def trace(a: Matrix) -> Number:
    """Return the trace of a matrix."""
    return sum(a[i, i] for i in range(len(a)))


def _negligible(a: Matrix) -> Number:
    """Return the largest magnitude that counts as zero in ``a``; 0 for fractions."""
    if not _of_mpf(a):
        return 0
    return max(abs(v) for v in a.flat) * mpmath.eps ** (mpmath.mpf(2) / 3)


def row_reduce(a: Matrix) -> tuple[Matrix, list[int]]:
    """Return the reduced row echelon form and the indices of the pivot columns."""
    r = a.copy()
    tiny = _negligible(a)
    rows, columns = r.shape
    pivots: list[int] = []
    for j in range(columns):
        top = len(pivots)
        if top == rows:
            break
        best = max(range(top, rows), key=lambda i: abs(r[i, j]))
        if abs(r[best, j]) <= tiny:
            continue
        if best != top:
            r[[top, best]] = r[[best, top]]
        r[top] = r[top] / r[top, j]
        for i in range(rows):
            if i != top and r[i, j] != 0:
                r[i] = r[i] - r[i, j] * r[top]
        pivots.append(j)
    return r, pivots


def rank(a: Matrix) -> int:
    """Return the rank of a matrix."""
    return len(row_reduce(a)[1]) if a.size else 0


def column_basis(a: Matrix) -> Matrix:
    """Return columns of ``a`` that form a basis of its column space."""
    return a[:, row_reduce(a)[1]] if a.size else a[:, :0]


def null_basis(a: Matrix) -> Matrix:
    """Return a basis of ``{v : a v = 0}``, one column per vector."""
    reduced, pivots = row_reduce(a)
    free = [j for j in range(a.shape[1]) if j not in pivots]
    basis = zeros(a.shape[1], len(free), a)
    for k, j in enumerate(free):
        basis[j, k] = basis[j, k] + 1
        for i, pivot in enumerate(pivots):
            basis[pivot, k] = -reduced[i, j]
    return basis


def complement(a: Matrix) -> Matrix:
    """Return a basis of the orthogonal complement of the column space of ``a``."""
    return null_basis(a.T) if a.shape[1] else eye(a.shape[0], a)


def solve(a: Matrix, b: Matrix) -> Matrix:
    """Return one solution X of ``a X = b``; raise ValueError if none exists."""
    n = a.shape[1]
    reduced, pivots = row_reduce(np.hstack([a, b]))
    if any(pivot >= n for pivot in pivots):
        raise ValueError("the linear system has no solution")
    x = zeros(n, b.shape[1], a)
    for i, pivot in enumerate(pivots):
        x[pivot] = reduced[i, n:]
    return x


def inverse(a: Matrix) -> Matrix:
    """Return the inverse of a square matrix; raise ValueError if it is singular."""
    n = len(a)
    reduced, pivots = row_reduce(np.hstack([a, eye(n, a)]))
    if pivots != list(range(n)):
        raise ValueError("the matrix is singular")
    return reduced[:, n:]


def projector(a: Matrix) -> Matrix:
    """Return the orthogonal projector onto the column space of ``a``."""
    c = column_basis(a)
    return c @ inverse(c.T @ c) @ c.T if c.size else zeros(a.shape[0], a.shape[0], a)


def pinv(a: Matrix) -> Matrix:
    """Return the Moore-Penrose inverse, by the full-rank factorisation a = C F."""
    reduced, pivots = row_reduce(a)
    if not pivots:
        return zeros(a.shape[1], a.shape[0], a)
    c, f = a[:, pivots], reduced[: len(pivots)]
    return f.T @ inverse(f @ f.T) @ inverse(c.T @ c) @ c.T


def oblique(onto: Matrix, along: Matrix) -> Matrix:
    """Return the projector with range colsp(onto) and kernel colsp(along).

    Raises ValueError if the two spaces are not complementary.
    """
    v, u = column_basis(onto), complement(along)
    return v @ inverse(u.T @ v) @ u.T


def kron(a: Matrix, b: Matrix) -> Matrix:
    """Return the Kronecker product.

    ``kron(B.T, A) vec(X) = vec(A X B)``, where vec stacks the columns of a matrix.
    """
    return np.block([[value * b for value in row] for row in a])
