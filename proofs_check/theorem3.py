"""Theorem 3: squared error of a frozen head, read literally and as deployed.

Throughout y = beta^T x + noise with E[x noise] = 0, so beta = S^+ Sy on the support of x, for any
distribution, centred. A head theta behind the eraser x -> P x scores theta^T P x = (P^T theta)^T x.
Its risk exceeds that of beta by |S^{1/2} (P^T theta - beta)|^2 (the noise is uncorrelated with x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import integers, problem
from proofs_check._linalg import (
    Matrix,
    Number,
    diagonal,
    eye,
    inverse,
    is_zero,
    null_basis,
    rational,
    to_float,
    trace,
    zeros,
)
from proofs_check._reference import Covariances
from proofs_check.theorem1 import Eraser, Fitted, tolerances

EXAMPLE = Covariances(eye(2), rational([[1], [0]]), rational([["3/5"], ["4/5"]]), zeros(2, 1))
"""S = I, Sz = (1, 0), beta = Sy = (3/5, 4/5): rho = 9/25."""


def head(c: Covariances) -> Matrix:
    """beta = S^+ Sy, the best linear head (of all columns of y)."""
    return c.s_pinv @ c.sy


def excess(c: Covariances, read: Matrix, beta: Matrix) -> Matrix:
    """Excess risk matrix of the effective head ``read`` (x is scored by read^T x)."""
    gap = read - beta
    return gap.T @ c.s @ gap


def deployed(p: Matrix, theta: Matrix) -> Matrix:
    """Effective head of theta behind x -> P x."""
    return p.T @ theta


def literal(p: Matrix, theta: Matrix) -> Matrix:
    """Effective head in the printed proof, X Q^T beta with Q^T = P."""
    return p @ theta


def whitened_problem(bench: Bench, d: int, k_z: int = 1, k_y: int = 1) -> Covariances:
    """Problem with S = I."""
    while True:
        c = Covariances(
            eye(d), integers(bench.rng, d, k_z), integers(bench.rng, d, k_y), zeros(d, 1)
        )
        if c.ranks == (d, k_z, k_y) and c.feasible and not is_zero(c.sz.T @ c.sy):
            return c


@check(
    "4.1",
    "Literal reading: excess risk >= 0 for LEACE and 0 for SPLINCE",
    source="Theorem 3",
    convention="as printed: predictions X P beta, S = I",
    expected=Verdict.HOLDS,
    truth=(
        "True, but for a reason that has nothing to do with erasure: with rows x^T the printed "
        "X Q^T beta, Q^T = P, applies P to the head, and P beta = beta says that the predictions "
        "are untouched. Every P with P Sy = Sy qualifies, the identity included; the kernel "
        "constraint is never used, and the predictions still carry the concept: their "
        "covariance with z is Sz^T beta. Without whitening even this fails; there S^{-1} P S "
        "would have to take the place of P. (E[eps^T eps] is n sigma^2, and E[X^T X] is n S.)"
    ),
    meaning="It says nothing about features erased by x -> Px; see 4.2.",
    mutants={
        "x -> Px instead": {"reading": deployed},
        "LEACE for SPLINCE": {"closed": _reference.leace},
        "concept gone from the predictions": {"leak": lambda c, p: c.sz.T @ p.T @ head(c)},
    },
)
def literal_regression(
    bench: Bench,
    *,
    reading: Callable[[Matrix, Matrix], Matrix] = literal,
    closed: Eraser = _reference.splince,
    leak: Callable[[Covariances, Matrix], Matrix] = lambda c, p: c.sz.T @ p @ head(c),
) -> None:
    """Exact."""
    for i in bench.repeats(40, 10):
        c = whitened_problem(bench, 3 + i % 3)
        beta = head(c)
        p = closed(c)
        bench.printed(excess(c, reading(p, beta), beta))
        bench.printed(int(excess(c, reading(_reference.leace(c), beta), beta)[0, 0] < 0))
        nothing_erased = excess(c, reading(eye(c.d), beta), beta)
        bench.corrected(nothing_erased, label="the identity qualifies")
        bench.corrected(leak(c, p) - c.sz.T @ beta, label="concept in the predictions")
        general = problem(bench.rng, 4, 4)
        beta, p = head(general), closed(general)
        moved = general.s_pinv @ p @ general.s
        bench.corrected(excess(general, reading(moved, beta), beta), label="S^{-1} P S in general")
    c = Covariances(diagonal([1, 4]), EXAMPLE.sz, rational([[1], [4]]), EXAMPLE.mean)
    coloured = excess(c, literal(closed(c), head(c)), head(c))[0, 0]
    bench.corrected(int(coloured == 0), label="the printed reading without whitening")
    bench.example(
        f"S = diag(1, 4), Sz = (1, 0), beta = (1, 1): literal excess risk of SPLINCE {coloured}."
    )
    c = EXAMPLE
    p, beta = _reference.splince(c), head(c)
    bench.example(
        f"S = I, Sz = (1, 0), beta = (3/5, 4/5): literal predictions keep covariance "
        f"{(c.sz.T @ p @ beta)[0, 0]} with z; behind x -> Px it is {(c.sz.T @ p.T @ beta)[0, 0]}."
    )


def _risk_leace(c: Covariances) -> Matrix:
    """C_yz C_zz^+ C_zy."""
    return c.gram(c.sy, c.z) @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.sy)


def _risk_splince(c: Covariances) -> Matrix:
    """C_yz G^+ C_zy."""
    gain = c.gram(c.z, c.y) @ inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)
    return c.gram(c.sy, c.z) @ inverse(c.gram(c.z, c.z) - gain) @ c.gram(c.z, c.sy)


def _penalty(rho: Number) -> Number:
    """Excess risk of SPLINCE over that of LEACE, scalar task."""
    return 1 / (1 - rho)


def semidefinite(a: Matrix) -> bool:
    """True iff a symmetric 2 x 2 matrix has no negative eigenvalue."""
    return bool(a[0, 0] >= 0 and a[1, 1] >= 0 and a[0, 0] * a[1, 1] >= a[0, 1] * a[1, 0])


def _ratio_is_sharp(c: Covariances, low: Matrix, risk: Matrix) -> bool:
    """True iff 1 / (1 - rho) is the largest ratio of the two risks over combinations of outputs.

    rho is irrational, so it is bracketed by rationals 2^-30 apart: with t above rho,
    dR(LEACE) - (1 - t) dR(SPLINCE) has no negative eigenvalue, with t below it has one.
    """
    explained = inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.y)
    shared = explained @ inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)
    rho = Fraction(float(np.linalg.eigvals(to_float(shared)).real.max()))
    step = Fraction(1, 2**31)
    return semidefinite(low - (1 - rho - step) * risk) and not semidefinite(
        low - (1 - rho + step) * risk
    )


def random_guarded(bench: Bench, c: Covariances) -> Matrix:
    """A random matrix that sends colsp(Sz) to 0."""
    free = null_basis(c.z.T)
    return integers(bench.rng, c.d, free.shape[1]) @ free.T


@check(
    "4.2",
    "Deployed reading: excess risk >= 0 for LEACE and 0 for SPLINCE",
    source="Theorem 3",
    convention="deployed: features x -> Px, frozen head beta",
    expected=Verdict.FALSE,
    truth=(
        "The order is reversed, for any distribution and any S. dR(P) = |S^{1/2}(P^T beta - "
        "beta)|^2. dR(LEACE) = C_yz C_zz^+ C_zy is the least of all guarded maps (its frozen head "
        "is already the refitted one); dR(SPLINCE) = C_yz G^+ C_zy. Scalar y: dR(LEACE) = rho "
        "C_yy and dR(SPLINCE) = dR(LEACE) / (1 - rho); they are equal iff rho = 0, and then both "
        "are 0. No guarded map has excess risk 0 unless Sz^T beta = 0. For rho > 1/2 the frozen "
        "head behind SPLINCE is worse than predicting the mean. The scores are proportional: "
        "P_S^T beta = P_L^T beta / (1 - rho), hence the same ranking, AUC and decisions at the "
        "centred zero threshold. With several outputs dR(SPLINCE) - dR(LEACE) is positive "
        "semi-definite and the ratio is at most 1 / (1 - rho), rho the largest squared cosine."
    ),
    meaning=(
        "An unregularised least-squares head that stays frozen: use LEACE, or rescale the scores "
        "of SPLINCE by 1 - rho; the two then agree."
    ),
    mutants={
        "P for its transpose": {"reading": literal},
        "1 + rho for 1 / (1 - rho)": {"penalty": lambda rho: 1 + rho},
        "C_zz for G": {"risk_splince": _risk_leace},
        "C_yy for C_zz": {
            "risk_leace": lambda c: c.gram(c.sy, c.z) @ c.gram(c.z, c.sy) / trace(c.gram(c.y, c.y))
        },
        "library: LEACE for SPLINCE": {"fitted": _library.leace},
        "library: transpose": {"fitted": lambda s: _library.splince(s).T},
    },
)
def deployed_regression(
    bench: Bench,
    *,
    reading: Callable[[Matrix, Matrix], Matrix] = deployed,
    penalty: Callable[[Number], Number] = _penalty,
    risk_leace: Callable[[Covariances], Matrix] = _risk_leace,
    risk_splince: Callable[[Covariances], Matrix] = _risk_splince,
    fitted: Fitted = _library.splince,
) -> None:
    """Exact. Library: the error of P^T beta in the norm of S is at most the whitened error times
    |beta|_S = sqrt(C_yy), so the square root of the risk moves by no more than that."""
    for i in bench.repeats(60, 12):
        scalar = i % 3 < 2
        if i % 2:
            c = whitened_problem(bench, 4, *((1, 1) if scalar else (2, 2)))
        else:
            c = problem(bench.rng, 4, 4 - i % 4 // 2, 1 + (i // 3) % 2, 1 if scalar else 2)
        beta = head(c)
        p, least = _reference.splince(c), _reference.leace(c)
        risk, low = (excess(c, reading(q, beta), beta) for q in (p, least))
        bench.printed(trace(risk))
        bench.corrected(low - risk_leace(c), label="risk of LEACE")
        bench.corrected(risk - risk_splince(c), label="risk of SPLINCE")
        guarded = excess(c, reading(random_guarded(bench, c), beta), beta)
        bench.corrected(int(trace(guarded) < trace(low)), label="LEACE is least")
        if c.y.shape[1] == 1:
            rho = _reference.squared_cosine(c)
            bench.corrected(risk - low * penalty(rho), label="ratio")
            bench.corrected(
                c.s @ (reading(p, beta) - reading(least, beta) * penalty(rho)), label="same scores"
            )
            power = c.gram(c.y, c.y)[0, 0]
            bench.corrected(
                int((risk[0, 0] > power) != (rho > Fraction(1, 2))), label="worse than the mean"
            )
        else:
            rise = risk - low
            lost = _reference.lost(c)
            x = head(replace(c, sy=c.y)).T @ lost
            bench.corrected(
                rise - x @ inverse(_reference.unexplained(c)) @ x.T, label="rise, several outputs"
            )
            bench.corrected(int(not semidefinite(rise)), label="rise is not negative")
            bench.corrected(int(not _ratio_is_sharp(c, low, risk)), label="ratio, several outputs")
    for sample in bench.samples(6, 2):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        beta = head(c)
        got = np.sqrt(float(trace(excess(c, deployed(fitted(sample), beta), beta))))
        exact = np.sqrt(float(trace(_risk_splince(c))))
        size = np.sqrt(float(trace(c.gram(c.sy, c.sy))))
        bench.corrected(got - exact, tolerance * size, label=f"library, {sample.family}")
    c, beta = EXAMPLE, head(EXAMPLE)
    p, least = _reference.splince(c), _reference.leace(c)
    bench.example(
        f"S = I, Sz = (1, 0), beta = (3/5, 4/5): P = "
        f"{[[str(v) for v in row] for row in p]}, literal excess 0; deployed SPLINCE "
        f"{excess(c, deployed(p, beta), beta)[0, 0]}, LEACE "
        f"{excess(c, deployed(least, beta), beta)[0, 0]}; effective heads "
        f"({', '.join(map(str, deployed(p, beta).flat))}) and "
        f"({', '.join(map(str, deployed(least, beta).flat))})."
    )
