"""Closed forms, written independently of the library: covariances in, d x d projectors out.

Notation: S = Cov(x), Sz = Cov(x, z), Sy = Cov(x, y), all centred; C_ab = Sa^T S^+ Sb. An eraser P
is feasible when P Sz = 0 and P Sy = Sy; E = I - P is the part it takes away. Functions run in the
arithmetic of their input: exact for fractions, 60 digits for mpf.

For the eraser put A = S^{+1/2} Sz, B = S^{+1/2} Sy and F = E S^{1/2}. Feasibility reads
F [A, B] = [Sz, 0]. One solution has its rows in colsp[A, B]; any other adds N with N [A, B] = 0 and
so adds N N^T to F F^T. Hence the first minimises tr(M F F^T) for every positive semi-definite M.
Writing it out, with G = C_zz - C_zy C_yy^+ C_yz and R = S^+ Sz - S^+ Sy C_yy^+ C_yz,

    E = Sz G^+ R^T    (SPLINCE),        E = Sz C_zz^+ Sz^T S^+    (LEACE: no y).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from proofs_check._linalg import (
    Matrix,
    Number,
    beside,
    column_basis,
    complement,
    eye,
    high_precision,
    inverse,
    kron,
    null_basis,
    oblique,
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
        """Orthogonal projector onto the column space of S, where x - E x lies."""
        return self.s @ self.s_pinv

    @cached_property
    def z(self) -> Matrix:
        """Independent columns of Sz: redundant ones change nothing."""
        return column_basis(self.sz)

    @cached_property
    def y(self) -> Matrix:
        """Independent columns of Sy."""
        return column_basis(self.sy)

    @property
    def ranks(self) -> tuple[int, int, int]:
        """Ranks of S, Sz and Sy."""
        return rank(self.s), self.z.shape[1], self.y.shape[1]

    @property
    def feasible(self) -> bool:
        """True iff colsp(Sz) and colsp(Sy) meet in 0 only; then so do the whitened spaces."""
        return bool(rank(beside(self.z, self.y)) == self.z.shape[1] + self.y.shape[1])

    def gram(self, a: Matrix, b: Matrix) -> Matrix:
        """C_ab = a^T S^+ b."""
        return a.T @ self.s_pinv @ b

    def high_precision(self) -> Covariances:
        """The same problem in mpf numbers of the working precision."""
        return Covariances(*map(high_precision, (self.s, self.sz, self.sy, self.mean)))


Eraser = Callable[[Covariances], Matrix]


def erased_by_leace(c: Covariances) -> Matrix:
    """E of LEACE: Sz C_zz^+ Sz^T S^+."""
    return c.z @ inverse(c.gram(c.z, c.z)) @ c.z.T @ c.s_pinv if c.z.size else zeros(c.d, c.d, c.s)


def erased_by_splince(c: Covariances) -> Matrix:
    """E of SPLINCE: Sz G^+ R^T. ``ValueError`` where the problem is infeasible (G singular)."""
    if not c.z.size:
        return zeros(c.d, c.d, c.s)
    if not c.y.size:
        return erased_by_leace(c)
    gain = inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)  # C_yy^+ C_yz
    g = c.gram(c.z, c.z) - c.gram(c.z, c.y) @ gain
    r = c.s_pinv @ (c.z - c.y @ gain)
    return c.z @ inverse(g) @ r.T


def leace(c: Covariances) -> Matrix:
    """LEACE, identity off the support of x."""
    return eye(c.d, c.s) - erased_by_leace(c)


def splince(c: Covariances) -> Matrix:
    """SPLINCE, identity off the support of x."""
    return eye(c.d, c.s) - erased_by_splince(c)


def sal(c: Covariances) -> Matrix:
    """SAL: the orthogonal projector along colsp(Sz)."""
    if not c.z.size:
        return eye(c.d, c.s)
    return eye(c.d, c.s) - c.z @ inverse(c.z.T @ c.z) @ c.z.T


def splince_drop(c: Covariances) -> Matrix:
    """SPLINCE as the paper prints it: zero off the support of x."""
    return c.support - erased_by_splince(c)


def leace_drop(c: Covariances) -> Matrix:
    """LEACE as the paper prints it: zero off the support of x."""
    return c.support - erased_by_leace(c)


def printed_splince(root: Matrix, c: Covariances) -> Matrix:
    """W^+ V (U^T V)^{-1} U^T W, the paper's equation, from a square root of S.

    W = (S^{1/2})^+; U spans colsp(W Sz)^perp; V spans colsp(W Sy) plus the part of U orthogonal to
    both whitened spaces. Any bases of U and V give the same matrix. ``ValueError`` where U^T V is
    not invertible.
    """
    w = pinv(root)
    a, b = column_basis(w @ c.sz), column_basis(w @ c.sy)
    u = complement(a)
    v = beside(b, complement(beside(a, b)))
    return root @ v @ inverse(u.T @ v) @ u.T @ w


def printed_leace(root: Matrix, c: Covariances) -> Matrix:
    """W^+ U U^T W with orthonormal U, the paper's LEACE, from a square root of S."""
    w = pinv(root)
    a = column_basis(w @ c.sz)
    u = complement(a)
    return root @ u @ inverse(u.T @ u) @ u.T @ w


def erased(c: Covariances, p: Matrix, x: Matrix) -> Matrix:
    """Rows of r(x) = P x + b with b = E x - P E x."""
    return (x - c.mean.T) @ p.T + c.mean.T


def distortion(c: Covariances, p: Matrix, m: Matrix) -> Number:
    """E |P x - x|_M^2 for centred x, straight from the definition: tr(M (I-P) S (I-P)^T)."""
    e = eye(c.d, c.s) - p
    return trace(m @ e @ c.s @ e.T)


def lost(c: Covariances) -> Matrix:
    """T = E_L Sy, the task covariance that LEACE destroys (for the independent columns of Sy)."""
    return erased_by_leace(c) @ c.y


def unexplained(c: Covariances) -> Matrix:
    """H = C_yy - C_yz C_zz^+ C_zy: the part of the predicted task beyond the concept."""
    if not c.z.size:
        return c.gram(c.y, c.y)
    return c.gram(c.y, c.y) - c.gram(c.y, c.z) @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.y)


def repair(c: Covariances) -> Matrix:
    """T H^{-1} K^T with K = S^+ Sy - S^+ Sz C_zz^+ C_zy: SPLINCE minus LEACE."""
    k = c.s_pinv @ (c.y - c.z @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.y))
    return lost(c) @ inverse(unexplained(c)) @ k.T


def squared_cosine(c: Covariances) -> Number:
    """rho for a scalar task: C_yz C_zz^+ C_zy / C_yy, the fraction of yhat that zhat explains."""
    return 1 - unexplained(c)[0, 0] / c.gram(c.y, c.y)[0, 0]


def same_kernel_projector(c: Covariances, onto: Matrix) -> Matrix:
    """Projector with kernel colsp(Sz) and the given range."""
    return oblique(onto, c.z)


def restored(t: Matrix, ty: Matrix, sy: Matrix) -> Matrix:
    """B = I + X H^+ K^T, X = Sy - Ty, K = T^+ Ty, H = Ty^T K: T = Cov(t), Ty = Cov(t, y)."""
    k = pinv(t) @ ty
    return eye(len(t), t) + (sy - ty) @ pinv(ty.T @ k) @ k.T


def null_space_minimum(c: Covariances, m: Matrix) -> Number:
    """Smallest tr(M E S E^T) over all feasible E."""
    values = beside(c.z, zeros(c.d, c.y.shape[1], c.s))
    return constrained_minimum(c.s, m, beside(c.z, c.y), values)


def constrained_minimum(s: Matrix, m: Matrix, constraints: Matrix, values: Matrix) -> Number:
    """Smallest tr(M E S E^T) with E C = W, from a particular solution and a null space.

    Uses neither S^+ nor whitening. E = E0 + N Z^T with Z a basis of colsp(C)^perp; the normal
    equations for N read M N (Z^T S Z) = -M E0 S Z, one linear system in vec(N). ``ValueError``
    where no E exists.
    """
    e0 = solve(constraints.T, values.T).T
    basis = null_basis(constraints.T)
    inner = basis.T @ s @ basis
    target = -(m @ e0 @ s @ basis)
    step = solve(kron(inner.T, m), target.T.reshape(-1, 1))
    e = e0 + step.reshape(basis.shape[1], len(s)).T @ basis.T
    return trace(m @ e @ s @ e.T)
