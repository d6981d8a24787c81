"""What Theorem 1 leaves open and what follows it: uniqueness, kernel and the constant."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import (
    Sample,
    integers,
    problem,
    weight,
)
from proofs_check._linalg import (
    Matrix,
    Number,
    beside,
    diagonal,
    eye,
    kron,
    null_basis,
    rank,
    rational,
    to_float,
    trace,
    zeros,
)
from proofs_check._reference import Covariances
from proofs_check.theorem1 import Eraser, Fitted, tolerances


def _dimension(d: int, m: int, r: int, weight_rank: int) -> int:
    """Dimension of the set of minimisers."""
    return d * (d - r) - weight_rank * (m - r)


@check(
    "1.4",
    "SPLINCE is the unique solution",
    source="abstract and conclusion",
    convention="x -> Px, as a d x d matrix",
    expected=Verdict.CONDITIONAL,
    truth=(
        "Unique iff S has full rank and M is positive definite (or the constraints leave no "
        "freedom). In general the minimisers form an affine space of dimension "
        "d (d - r) - rank(M) (rank(S) - r), r = rank Sz + rank Sy. With M definite and S singular "
        "they agree on the support of x and are free off it."
    ),
    meaning=(
        "With fewer rows than features (most language-model layers) the data do not decide what "
        "P does off their span. That choice is yours: null_space='keep' or 'drop'."
    ),
    mutants={
        "m instead of m - r": {"dimension": lambda d, m, r, q: d * (d - r) - q * m},
        "M taken as definite": {"dimension": lambda d, m, r, q: d * (d - r) - d * (m - r)},
        "S taken as regular": {"dimension": lambda d, m, r, q: d * (d - r) - q * (d - r)},
    },
)
def uniqueness(
    bench: Bench, *, dimension: Callable[[int, int, int, int], int] = _dimension
) -> None:
    """Integers: the nullity of the quadratic form (Z^T S Z) kron M on feasible directions."""
    for i in bench.repeats(48, 12):
        d = 3 + i % 2
        m = d - (i // 2) % 2
        c = problem(bench.rng, d, m)
        w = weight(bench.rng, d, d - (i // 4) % 2)
        basis = null_basis(beside(c.z, c.y).T)
        free = kron(basis.T @ c.s @ basis, w)
        nullity = free.shape[1] - rank(free)
        bench.corrected(nullity - dimension(d, m, 2, rank(w)), label="dimension")
        lacking = "S singular" if m < d else "M singular" if rank(w) < d and m > 2 else None
        bench.printed(nullity, lacking=lacking)
    c = Covariances(diagonal([1, 1, 0]), rational([[1], [0], [0]]), rational([[1], [1], [0]]), c.sz)
    keep, drop = _reference.splince(c), _reference.splince_drop(c)
    for p in (keep, drop):
        bench.corrected(beside(p @ c.sz, p @ c.sy - c.sy), label="both are feasible")
        bench.corrected(_reference.distortion(c, p, eye(3)) - 2, label="both reach the minimum")
    bench.example(
        "S = diag(1, 1, 0), Sz = (1, 0, 0), Sy = (1, 1, 0), M = I: "
        "[[0, 1, 0], [0, 1, 0], [0, 0, t]] is feasible with distortion 2, the minimum, for all t."
    )


def _kernel_is_concept(c: Covariances, p: Matrix) -> bool:
    """True iff ker P = colsp(Sz), given P Sz = 0."""
    return c.d - rank(p) == c.ranks[1]


@check(
    "1.5",
    "The kernel of P is colsp(Sz)",
    source="section 3.1 (LEACE and SPLINCE), section 3.2",
    convention="printed formula, zero off the support",
    expected=Verdict.CONDITIONAL,
    truth=(
        "The printed formulas of SPLINCE and LEACE have kernel colsp(Sz) + supp(x)^perp, so the "
        "claim needs S of full rank. Written I - E, identity off the support and just as optimal, "
        "both have kernel colsp(Sz) exactly, and so has SAL."
    ),
    meaning=(
        "Use I - E (the library's default): new activations often have variance where the fitting "
        "data had none, and the printed formula deletes it."
    ),
    mutants={
        "zero off the support for identity": {"keep": _reference.splince_drop},
        "identity off the support for zero": {"drop": _reference.splince},
        "library: keep for drop": {"fitted_drop": _library.splince},
    },
)
def kernel(
    bench: Bench,
    *,
    keep: Eraser = _reference.splince,
    drop: Eraser = _reference.splince_drop,
    fitted_drop: Fitted = lambda s: _library.splince(s, null_space="drop"),
) -> None:
    """Exact ranks. Library tolerance as in 1.1, times sqrt(cond S) for the Euclidean norm."""
    for i in bench.repeats(40, 10):
        d = 4 + i % 2
        c = problem(bench.rng, d, d - i % 3, 1, 1)
        lacking = "S singular" if i % 3 else None
        bench.printed(int(not _kernel_is_concept(c, drop(c))), lacking=lacking)
        bench.corrected(int(not _kernel_is_concept(c, keep(c))), label="kernel of I - E")
        value = _reference.distortion(c, keep(c), eye(d))
        bench.corrected(value - _reference.distortion(c, drop(c), eye(d)), label="equal distortion")
    for sample in bench.samples(6, 2, ("full rank", "rank-deficient", "n <= d")):
        c, (tolerance, _, _, cond) = sample.covariances, tolerances(sample)
        gap = np.linalg.norm(to_float(fitted_drop(sample) - _reference.splince_drop(c)))
        bench.corrected(gap, tolerance * np.sqrt(cond), label="library, null_space='drop'")


def _constant(p: Matrix, mean: Matrix) -> Matrix:
    """b = E x - P E x."""
    return mean - p @ mean


def _library_map(sample: Sample, x: Matrix) -> Matrix:
    """The library applied to rows."""
    return rational(_library.fit("splince", sample)(to_float(x)))


@check(
    "1.6",
    "For data that are not centred, add b = E x - P E x",
    source="section 3.1, last paragraph",
    convention="r(x) = Px + b",
    expected=Verdict.HOLDS,
    truth=(
        "Jointly over (P, b) the minimum of E|Px + b - x|_M^2 is at the centred solution with "
        "b = E x - P E x, unique in b if M is definite. It moves nothing on average: "
        "E r(x) = E x. All covariances must be centred ones."
    ),
    meaning="Raw activations need no centring beforehand.",
    mutants={
        "no constant": {"constant": lambda p, mean: zeros(len(p), 1)},
        "opposite sign": {"constant": lambda p, mean: p @ mean - mean},
        "transpose of P": {"constant": lambda p, mean: mean - p.T @ mean},
        "library without the mean": {
            "applied": lambda s, x: rational(to_float(x @ _library.splince(s).T))
        },
    },
)
def constant_term(
    bench: Bench,
    *,
    constant: Callable[[Matrix, Matrix], Matrix] = _constant,
    applied: Callable[[Sample, Matrix], Matrix] = _library_map,
) -> None:
    """Exact: E|Px + b - x|_M^2 = D(P) + |(P - I) mu + b|_M^2 has gradient 2 M ((P - I) mu + b).
    Library: r(x) - r_exact(x) = D (x - mu) with the whitened error D bounded as in 1.1; rounding
    of x - mu adds gamma |x|. Measured on the rows that were fitted, in the metric of S^+, whose
    root mean square is |D S^{1/2}| whitened."""
    for i in bench.repeats(40, 10):
        c = problem(bench.rng, 4, 4 - i % 2)
        p, w = _reference.splince(c), weight(bench.rng, 4, 4 - i % 3)
        b = constant(p, c.mean)
        bench.printed(w @ ((p - eye(4)) @ c.mean + b))
        step = integers(bench.rng, 4, 1)
        second_moment = c.s + c.mean @ c.mean.T

        def cost(
            b: Matrix, e: Matrix, w: Matrix = w, c: Covariances = c, raw: Matrix = second_moment
        ) -> Number:
            """E|(P - I) x + b|_M^2 from raw second moments."""
            return trace(w @ (e @ raw @ e.T - 2 * e @ c.mean @ b.T + b @ b.T))

        e = eye(4) - p
        bench.corrected(
            cost(b + step, e) - cost(b, e) - (step.T @ w @ step)[0, 0], label="cost of another b"
        )
    for sample in bench.samples(6, 2):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        p = _reference.splince(c)
        exact = sample.x @ p.T + _constant(p, c.mean).T
        gap = applied(sample, sample.x) - exact
        spread = float(trace(c.s_pinv @ gap.T @ gap)) / len(gap)
        bench.corrected(np.sqrt(spread), tolerance, label=f"library, {sample.family}")
