"""Section 2: the lemmas behind Theorems 1 and 2, and the printed proof of Theorem 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import integers, problem, problem_with_root, weight_matrix
from proofs_check._heads import random_projector
from proofs_check._library import Fitted
from proofs_check._linalg import (
    Matrix,
    complement,
    diagonal,
    eye,
    hstack,
    inverse,
    is_zero,
    kron,
    null_basis,
    oblique,
    projector,
    rank,
    rational,
    to_float,
    trace,
    zeros,
)
from proofs_check._reference import Covariances, Eraser, null_space_minimum
from proofs_check._rounding import tolerances


def integer_rows(a: Matrix) -> list[list[int]]:
    """Return an integer matrix as nested lists, for printing."""
    return [[int(v) for v in row] for row in a]


def embed(a: Matrix, d: int) -> Matrix:
    """Return the d x d matrix [[a, 0], [0, 0]]."""
    out = zeros(d, d)
    out[: len(a), : len(a)] = a
    return out


def _padded(c: Covariances, d: int) -> Covariances:
    """Return the problem with constant features appended, so that there are d features."""

    def padded_rows(a: Matrix) -> Matrix:
        return np.vstack([a, zeros(d - len(a), a.shape[1])])

    return Covariances(embed(c.s, d), padded_rows(c.sz), padded_rows(c.sy), padded_rows(c.mean))


@check(
    "2.1",
    Verdict.HOLDS,
    paper=True,
    mutants={
        "LEACE on the support": {"reduced": _reference.leace},
        "transpose on the support": {"reduced": lambda c: _reference.splince(c).T},
        "cost of C without the covariance": {"cost": lambda w, n, s: trace(w @ n @ n.T)},
    },
)
def decomposition(
    bench: Bench,
    *,
    reduced: Eraser = _reference.splince,
    cost: Callable[[Matrix, Matrix, Matrix], object] = lambda w, n, s: trace(w @ n @ s @ n.T),
) -> None:
    """Solve a problem on the support of x, pad with zeros, and compare exactly with the optimum.

    The optimum is that of the quadratic programme of 1.2 in d coordinates.
    """
    for i in bench.repeats(40, 10):
        m, extra = 3, 1 + i % 2
        d = m + extra
        small = problem(bench.rng, m, m)
        c = _padded(small, d)
        w = weight_matrix(bench.rng, d, d - i % 3)
        p = embed(reduced(small), d)
        bench.add_printed(hstack(p @ c.sz, p @ c.sy - c.sy))
        bench.add_printed(_reference.distortion(c, p, w) - null_space_minimum(c, w))
        addend = integers(bench.rng, d, d)
        addend[:, :m] = 0
        value = _reference.distortion(c, p, w)
        bench.add_corrected(
            _reference.distortion(c, p + addend, w) - value, label="B and D are free"
        )
        basis = null_basis(hstack(small.z, small.y).T)
        lower = zeros(d, d)
        lower[m:, :m] = integers(bench.rng, extra, basis.shape[1]) @ basis.T
        rise = _reference.distortion(c, p + lower, w) - value
        bench.add_corrected(rise - cost(w, lower, c.s), label="cost of C")
        definite = weight_matrix(bench.rng, d, d)
        bench.add_corrected(
            int((cost(definite, lower, c.s) == 0) != is_zero(lower)), label="C = 0 is forced"
        )


def _oblique(a: Matrix, b: Matrix) -> Matrix:
    """Return P_obl, the projector with kernel colsp(A) and range colsp(B) + colsp[A, B]^perp."""
    return oblique(hstack(b, complement(hstack(a, b))), a)


@check(
    "2.2",
    Verdict.HOLDS,
    paper=True,
    mutants={
        "orthogonal projector for P_obl": {"projection": lambda a, b: eye(len(a)) - projector(a)},
        "transpose of P_obl": {"projection": lambda a, b: _oblique(a, b).T},
        "roles of concept and task exchanged": {"projection": lambda a, b: _oblique(b, a)},
    },
)
def set_equivalence(
    bench: Bench, *, projection: Callable[[Matrix, Matrix], Matrix] = _oblique
) -> None:
    """Check that the intersection of C1 and C2 is the set {B P_obl : B in C2}, exactly.

    C1 and C2 are the sets of matrices that meet the kernel constraint and the range constraint.
    Random members show both inclusions; the affine sets must also have equal dimensions.
    """
    for i in bench.repeats(40, 10):
        m = 3 + i % 2
        root, c = problem_with_root(bench.rng, m, m, 1, 1 + i % (m - 2) if m > 3 else 1)
        w = inverse(root)
        a, b = w @ c.sz, w @ c.sy
        p = projection(a, b)
        free_basis = null_basis(hstack(a, b).T)
        member = root @ _oblique(a, b) + integers(bench.rng, m, free_basis.shape[1]) @ free_basis.T
        bench.add_corrected(
            hstack(member @ a, w @ member @ b - b), label="member of C1 and C2: constraints"
        )
        bench.add_printed(member @ p - member)
        task_basis = null_basis(b.T)
        member_of_c2 = root + integers(bench.rng, m, task_basis.shape[1]) @ task_basis.T
        bench.add_corrected(w @ member_of_c2 @ b - b, label="member of C2: range constraint")
        bench.add_printed(member_of_c2 @ p @ a)
        bench.add_printed(w @ member_of_c2 @ p @ b - b)
        dimension = rank(kron((task_basis.T @ p).T, eye(m)))
        bench.add_corrected(dimension - m * free_basis.shape[1], label="equal dimensions")


@check(
    "2.3",
    Verdict.FALSE,
    paper=True,
    mutants={
        "S~ for its inverse root": {"whitener": lambda root: root @ root},
        "root for inverse root": {"whitener": lambda root: root},
    },
)
def whitener_misprint(bench: Bench, *, whitener: Callable[[Matrix], Matrix] = inverse) -> None:
    """Compare the distortion with whitening by S~^{-1/2} and by S~, exactly.

    The reference is the quadratic programme of 1.2.
    """

    def projected(w: Matrix, c: Covariances) -> Matrix:
        return inverse(w) @ _oblique(w @ c.sz, w @ c.sy) @ w

    for i in bench.repeats(30, 8):
        m = 3 + i % 2
        root, c = problem_with_root(bench.rng, m, m)
        minimum = null_space_minimum(c, eye(m))
        right, wrong = projected(whitener(root), c), projected(c.s, c)
        bench.add_corrected(_reference.distortion(c, right, eye(m)) - minimum, label="inverse root")
        bench.add_corrected(hstack(wrong @ c.sz, wrong @ c.sy - c.sy), label="constraints survive")
        bench.add_printed(_reference.distortion(c, wrong, eye(m)) - minimum)
    c = Covariances(diagonal([4, 1]), rational([[2], [1]]), rational([[2], [-2]]), zeros(2, 1))
    c = _padded(c, 3)
    c.s[2, 2] = rational([[9]])[0, 0]
    c.sz[2, 0] = rational([[3]])[0, 0]
    minimum = _reference.distortion(c, _reference.splince(c), eye(3))
    wrong = _reference.distortion(c, projected(c.s, c), eye(3))
    bench.require_quoted(minimum, wrong)


def _gradient(w_inverse: Matrix, p: Matrix) -> Matrix:
    """Return the gradient of |B P_obl - W~^{-1}|_F^2 in B, at B = W~^{-1}."""
    return 2 * (w_inverse @ p - w_inverse) @ p.T


@check(
    "2.4",
    Verdict.FALSE,
    paper=True,
    mutants={
        "printed gradient": {"gradient": lambda v, p: 2 * (v - v) @ p},
        "gradient without the factor P_obl^T": {"gradient": lambda v, p: 2 * (v @ p - v)},
    },
)
def unconstrained_step(
    bench: Bench, *, gradient: Callable[[Matrix, Matrix], Matrix] = _gradient
) -> None:
    """Compare the formula for the gradient with the derivative of the loss, exactly.

    The loss is quadratic, so its derivative along N is exactly
    loss(B + N) - loss(B) - |N P_obl|_F^2.
    """
    for i in bench.repeats(30, 8):
        m = 3 + i % 2
        root, c = problem_with_root(bench.rng, m, m)
        w = inverse(root)
        a, b = w @ c.sz, w @ c.sy
        p = _oblique(a, b)

        def loss(matrix: Matrix, p: Matrix = p, root: Matrix = root) -> object:
            gap = matrix @ p - root
            return trace(gap @ gap.T)

        slope = gradient(root, p)
        step = integers(bench.rng, m, m)
        derivative = loss(root + step) - loss(root) - trace(step @ p @ (step @ p).T)  # type: ignore[operator]
        bench.add_corrected(derivative - trace(slope.T @ step), label="gradient")
        task_basis = null_basis(b.T)
        direction = integers(bench.rng, m, task_basis.shape[1]) @ task_basis.T
        bench.add_corrected(trace(slope.T @ direction), label="orthogonal to C2")
        orthogonal = root @ (eye(m) - projector(a))
        bench.add_corrected(
            int(loss(orthogonal) >= loss(root)),  # type: ignore[operator]
            label="LEACE is the unconstrained minimum",
        )
        bench.add_printed(_gradient(root, p))
    c = Covariances(eye(2), rational([[1], [0]]), rational([[1], [1]]), zeros(2, 1))
    p, other = _oblique(c.sz, c.sy), eye(2) - projector(c.sz)
    first, second = (trace((b @ p - eye(2)) @ (b @ p - eye(2)).T) for b in (eye(2), other))
    bench.require_quoted(integer_rows(p), integer_rows(_gradient(eye(2), p)), first, second)


@check(
    "2.5",
    Verdict.CONDITIONAL,
    paper=True,
    mutants={
        "M-orthogonal complement for the Euclidean one": {
            "outside": lambda w, s: null_basis((w @ s).T)
        },
        "I for M": {"coupling": lambda inside, w, outside: inside.T @ outside},
    },
)
def adapted_basis(
    bench: Bench,
    *,
    outside: Callable[[Matrix, Matrix], Matrix] = lambda w, s: complement(s),
    coupling: Callable[[Matrix, Matrix, Matrix], Matrix] = lambda inside, w, outside: (
        inside.T @ w @ outside
    ),
) -> None:
    """Check that M is block-diagonal in a basis adapted to supp(x) iff M maps supp(x) into itself.

    The entries of the off-diagonal block are u^T M v, with u in the support of x and v orthogonal
    to it. So the block is zero in one adapted basis iff it is zero in all. The check is exact.
    """
    for i in bench.repeats(24, 8):
        c = problem(bench.rng, 4, 3)
        block = c.support @ weight_matrix(bench.rng, 4, 4) @ c.support
        rest = eye(4) - c.support
        w = block + rest
        if i % 2:
            w = weight_matrix(bench.rng, 4, 4)
        couples = not is_zero(rest @ w @ c.support)
        residual = coupling(c.s, w, outside(w, c.s))
        bench.add_printed(residual, violates="M maps the support into itself" if couples else None)
        value = _reference.distortion(c, _reference.splince(c), w)
        bench.add_corrected(value - null_space_minimum(c, w), label="optimal all the same")


@check(
    "2.6",
    Verdict.HOLDS,
    mutants={
        "other kernel": {"second": lambda c: eye(c.d) - projector(c.sz + c.sy)},
        "transpose": {"second": lambda c: _reference.splince(c).T},
        "library: transpose of LEACE for SAL": {"fitted": lambda s: _library.leace(s).T},
    },
)
def common_kernel(
    bench: Bench, *, second: Eraser = _reference.splince, fitted: Fitted = _library.sal
) -> None:
    """Check that P_B P_A = P_B for projectors P_A and P_B with the same kernel.

    The reference projectors are compared exactly. Library: |P_B P_A - P_B| = |P_B (I - P_A)| is at
    most |P_B| tol_A + tol_B |I - P_A|, where tol_A and tol_B are Euclidean tolerances, which have
    the factor sqrt(cond S).
    """
    for i in bench.repeats(40, 10):
        d = 4 + i % 2
        c = problem(bench.rng, d, d - i % 2, 1 + i % 2, 1)
        for first in (random_projector(bench, c), _reference.leace(c), _reference.sal(c)):
            other = second(c)
            bench.add_printed(other @ first - other)
            bench.add_printed(first @ other - first)
            bench.add_corrected(rank(other @ first) - rank(first), label="bijective")
    for sample in bench.samples(6, 2, ("full rank", "one-hot", "multi-output")):
        c, (tol_s, _, tol_sal, cond) = sample.covariances, tolerances(sample)
        a, b = _library.splince(sample), fitted(sample)
        sizes = [float(np.linalg.norm(to_float(v))) for v in (b, eye(c.d) - a)]
        tolerance = np.sqrt(cond) * (tol_s * sizes[0] + tol_sal * sizes[1])
        bench.add_corrected(to_float(b @ a - b), tolerance, label=f"library, {sample.family}")
