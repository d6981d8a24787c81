"""Closed forms of erasers, independent of the library: covariances in, d x d projectors out.

Notation: S = Cov(x), Sz = Cov(x, z), Sy = Cov(x, y), all centred; C_ab = Sa^T S^+ Sb for a and b
among z and y. An eraser P is feasible if P Sz = 0 and P Sy = Sy; E = I - P is the erased part.
Functions compute in the arithmetic of their input: exactly for fractions, to 60 digits for mpf.

Derivation: let A = S^{+1/2} Sz, B = S^{+1/2} Sy and F = E S^{1/2}. P is feasible if and only if
F [A, B] = [Sz, 0]. One solution F has its rows in colsp[A, B]. Every other solution is F + N with
N [A, B] = 0, which adds N N^T to F F^T. So the first solution minimises tr(M F F^T) for every
positive semi-definite M. With G = C_zz - C_zy C_yy^+ C_yz and R = S^+ Sz - S^+ Sy C_yy^+ C_yz, the
first solution has

    E = Sz G^+ R^T    (SPLINCE),        E = Sz C_zz^+ Sz^T S^+    (LEACE: no y).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from proofs_check._linalg import (
    Matrix,
    Number,
    column_basis,
    complement,
    eye,
    high_precision,
    hstack,
    inverse,
    kron,
    null_basis,
    pinv,
    rank,
    solve,
    trace,
    zeros,
)


@dataclass(frozen=True, eq=False)
class Covariances:
    """Mean and covariances of one problem: S (d, d), Sz (d, k_z), Sy (d, k_y), mean (d, 1)."""

    s: Matrix
    sz: Matrix
    sy: Matrix
    mean: Matrix

    @property
    def d(self) -> int:
        """Number of features."""
        return len(self.s)

    @cached_property
    def s_pinv(self) -> Matrix:
        """Moore-Penrose inverse of S."""
        return pinv(self.s)

    @cached_property
    def support(self) -> Matrix:
        """Orthogonal projector onto the column space of S, the support of x - E x."""
        return self.s @ self.s_pinv

    @cached_property
    def z(self) -> Matrix:
        """Independent columns of Sz; the erasers do not depend on redundant columns."""
        return column_basis(self.sz)

    @cached_property
    def y(self) -> Matrix:
        """Independent columns of Sy; the erasers do not depend on redundant columns."""
        return column_basis(self.sy)

    @property
    def ranks(self) -> tuple[int, int, int]:
        """Ranks of S, Sz and Sy."""
        return rank(self.s), self.z.shape[1], self.y.shape[1]

    @property
    def feasible(self) -> bool:
        """Whether colsp(Sz) and colsp(Sy) intersect in 0 only.

        The whitened spaces then intersect in 0 only, too.
        """
        return bool(rank(hstack(self.z, self.y)) == self.z.shape[1] + self.y.shape[1])

    def gram(self, a: Matrix, b: Matrix) -> Matrix:
        """Return C_ab = a^T S^+ b."""
        return a.T @ self.s_pinv @ b

    def high_precision(self) -> Covariances:
        """Return the problem in mpf numbers of the working precision."""
        return Covariances(*map(high_precision, (self.s, self.sz, self.sy, self.mean)))


Eraser = Callable[[Covariances], Matrix]


def erased_by_leace(c: Covariances) -> Matrix:
    """Return E of LEACE, Sz C_zz^+ Sz^T S^+."""
    return c.z @ inverse(c.gram(c.z, c.z)) @ c.z.T @ c.s_pinv if c.z.size else zeros(c.d, c.d, c.s)


def erased_by_splince(c: Covariances) -> Matrix:
    """Return E of SPLINCE, Sz G^+ R^T; raise ValueError if G is singular (infeasible)."""
    if not c.z.size:
        return zeros(c.d, c.d, c.s)
    if not c.y.size:
        return erased_by_leace(c)
    gain = inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)  # C_yy^+ C_yz
    g = c.gram(c.z, c.z) - c.gram(c.z, c.y) @ gain
    r = c.s_pinv @ (c.z - c.y @ gain)
    return c.z @ inverse(g) @ r.T


def leace(c: Covariances) -> Matrix:
    """Return LEACE with the identity on the orthogonal complement of the support of x."""
    return eye(c.d, c.s) - erased_by_leace(c)


def splince(c: Covariances) -> Matrix:
    """Return SPLINCE with the identity on the orthogonal complement of the support of x."""
    return eye(c.d, c.s) - erased_by_splince(c)


def sal(c: Covariances) -> Matrix:
    """Return SAL, the orthogonal projector with kernel colsp(Sz)."""
    if not c.z.size:
        return eye(c.d, c.s)
    return eye(c.d, c.s) - c.z @ inverse(c.z.T @ c.z) @ c.z.T


def splince_drop(c: Covariances) -> Matrix:
    """Return SPLINCE as printed: zero on the orthogonal complement of the support of x."""
    return c.support - erased_by_splince(c)


def leace_drop(c: Covariances) -> Matrix:
    """Return LEACE as printed: zero on the orthogonal complement of the support of x."""
    return c.support - erased_by_leace(c)


def printed_splince(root: Matrix, c: Covariances) -> Matrix:
    """Return the printed SPLINCE, W^+ V (U^T V)^{-1} U^T W, where ``root`` is S^{1/2}.

    W = root^+; U is a basis of colsp(W Sz)^perp, V a basis of colsp(W Sy) plus
    colsp[W Sz, W Sy]^perp. The matrix does not depend on the choice of the bases. Raises ValueError
    if U^T V is not invertible.
    """
    w = pinv(root)
    a, b = column_basis(w @ c.sz), column_basis(w @ c.sy)
    u = complement(a)
    v = hstack(b, complement(hstack(a, b)))
    return root @ v @ inverse(u.T @ v) @ u.T @ w


def printed_leace(root: Matrix, c: Covariances) -> Matrix:
    """Return the printed LEACE, W^+ U U^T W with orthonormal U; ``root`` is S^{1/2}."""
    w = pinv(root)
    a = column_basis(w @ c.sz)
    u = complement(a)
    return root @ u @ inverse(u.T @ u) @ u.T @ w


def erased(c: Covariances, p: Matrix, x: Matrix) -> Matrix:
    """Return the erased rows r(x) = P x + b with b = E x - P E x."""
    return (x - c.mean.T) @ p.T + c.mean.T


def distortion(c: Covariances, p: Matrix, m: Matrix) -> Number:
    """Return E |P x - x|_M^2 = tr(M (I - P) S (I - P)^T) for centred x."""
    e = eye(c.d, c.s) - p
    return trace(m @ e @ c.s @ e.T)


def lost(c: Covariances) -> Matrix:
    """Return T = E_L Sy, the task covariance that LEACE removes (E_L: E of LEACE).

    The columns of T belong to independent columns of Sy.
    """
    return erased_by_leace(c) @ c.y


def unexplained(c: Covariances) -> Matrix:
    """Return H = C_yy - C_yz C_zz^+ C_zy, the part of C_yy that z does not explain."""
    if not c.z.size:
        return c.gram(c.y, c.y)
    return c.gram(c.y, c.y) - c.gram(c.y, c.z) @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.y)


def repair(c: Covariances) -> Matrix:
    """Return SPLINCE - LEACE as T H^{-1} K^T, with K = S^+ Sy - S^+ Sz C_zz^+ C_zy.

    T is returned by `lost`, H by `unexplained`.
    """
    k = c.s_pinv @ (c.y - c.z @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.y))
    return lost(c) @ inverse(unexplained(c)) @ k.T


def squared_cosine(c: Covariances) -> Number:
    """Return rho = C_yz C_zz^+ C_zy / C_yy of a scalar task."""
    return 1 - unexplained(c)[0, 0] / c.gram(c.y, c.y)[0, 0]


def restored(t: Matrix, ty: Matrix, sy: Matrix) -> Matrix:
    """Return the repair B = I + X H^+ K^T with X = Sy - Ty, K = T^+ Ty and H = Ty^T K.

    T = Cov(t) and Ty = Cov(t, y) are covariances of the erased features t.
    """
    k = pinv(t) @ ty
    return eye(len(t), t) + (sy - ty) @ pinv(ty.T @ k) @ k.T


def null_space_minimum(c: Covariances, m: Matrix) -> Number:
    """Return the smallest tr(M E S E^T) over the E of all feasible erasers."""
    values = hstack(c.z, zeros(c.d, c.y.shape[1], c.s))
    return constrained_minimum(c.s, m, hstack(c.z, c.y), values)


def constrained_minimum(s: Matrix, m: Matrix, constraints: Matrix, values: Matrix) -> Number:
    """Return the smallest tr(M E S E^T) over all E with E C = W.

    C is ``constraints`` and W is ``values``. The computation uses neither S^+ nor whitening. Every
    E is E0 + N Z^T, with a particular solution E0 and a basis Z of colsp(C)^perp. The normal
    equations for N, M N (Z^T S Z) = -M E0 S Z, are one linear system in vec(N). Raises ValueError
    if no E exists.
    """
    e0 = solve(constraints.T, values.T).T
    basis = null_basis(constraints.T)
    inner = basis.T @ s @ basis
    target = -(m @ e0 @ s @ basis)
    step = solve(kron(inner.T, m), target.T.reshape(-1, 1))
    e = e0 + step.reshape(basis.shape[1], len(s)).T @ basis.T
    return trace(m @ e @ s @ e.T)
