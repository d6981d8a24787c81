"""Section 8: beyond the paper (repair, equal class covariances, held-out rows)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from scipy.stats import chi2

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import (
    Sample,
    continuous_sample,
    integers,
    problem,
    weight_matrix,
)
from proofs_check._fits import least_squares, ridge_unpenalised_intercept
from proofs_check._heads import Fit, predictions, random_guarded_matrix
from proofs_check._library import Fitted
from proofs_check._linalg import (
    Matrix,
    Number,
    eye,
    hstack,
    is_zero,
    null_basis,
    pinv,
    rank,
    solve,
    to_float,
    trace,
)
from proofs_check._rounding import tolerances, whitened_error

Floats = NDArray[np.float64]
# function from (T, Ty, Sy) to the repair B
Repair = Callable[[Matrix, Matrix, Matrix], Matrix]


def _erased_moments(bench: Bench, i: int) -> tuple[Matrix, Matrix, Matrix]:
    """Draw T = F F^T of any rank, Ty = F b, and Sy such that ker Sy contains ker Ty.

    Some draws have redundant label columns.
    """
    d, k = 3 + i % 3, 1 + (i // 3) % 2
    f = integers(bench.rng, d, d - i % 2)
    ty, sy = f @ integers(bench.rng, f.shape[1], k), integers(bench.rng, d, k)
    if i % 4 == 3:  # append a redundant label column
        mix = integers(bench.rng, k, 1)
        ty, sy = hstack(ty, ty @ mix), hstack(sy, sy @ mix)
    if rank(ty) < k:
        return _erased_moments(bench, i)
    return f @ f.T, ty, sy


def _with_h_of_sy(t: Matrix, ty: Matrix, sy: Matrix) -> Matrix:
    """Return the repair with H computed from Sy in place of Ty."""
    return eye(len(t)) + (sy - ty) @ pinv(sy.T @ pinv(t) @ sy) @ (pinv(t) @ ty).T


def _cost(t: Matrix, ty: Matrix, sy: Matrix, m: Matrix) -> Number:
    """Return the cost of the repair, tr(M X H^+ X^T) with X = Sy - Ty."""
    x = sy - ty
    return trace(m @ x @ pinv(ty.T @ pinv(t) @ ty) @ x.T)


def _solvable(ty: Matrix, sy: Matrix) -> bool:
    """Return whether B Ty = Sy has a solution B."""
    try:
        solve(ty.T, sy.T)
    except ValueError:
        return False
    return True


@check(
    "8.1",
    Verdict.HOLDS,
    mutants={
        "I for T": {"closed": lambda t, ty, sy: _reference.restored(eye(len(t)), ty, sy)},
        "H of Sy": {"closed": _with_h_of_sy},
        "K of Sy": {
            "closed": lambda t, ty, sy: (
                eye(len(t)) + (sy - ty) @ pinv(ty.T @ pinv(t) @ sy) @ (pinv(t) @ sy).T
            )
        },
        "cost with H for its inverse": {
            "cost": lambda t, ty, sy, m: trace(m @ (sy - ty) @ ty.T @ pinv(t) @ ty @ (sy - ty).T)
        },
        "criterion: rank Sy <= rank Ty": {"criterion": lambda ty, sy: rank(sy) <= rank(ty)},
        "library: not repaired": {"fitted": _library.leace},
        "library: half": {"fitted": lambda s: _library.repaired(s, strength=0.5)},
        "library: SAL repaired": {"fitted": lambda s: _library.repaired(s, "sal")},
    },
)
def least_change(
    bench: Bench,
    *,
    closed: Repair = _reference.restored,
    cost: Callable[[Matrix, Matrix, Matrix, Matrix], Number] = _cost,
    criterion: Callable[[Matrix, Matrix], bool] = lambda ty, sy: is_zero(sy @ null_basis(ty)),
    fitted: Fitted = _library.repaired,
) -> None:
    """Check that the repair B restores Cov(x, y) at the least cost.

    Exact: check the constraint and the certificate. Compare the cost with a quadratic programme
    that does not use T^+, and with random feasible repairs. Check a repair of strength 1/2.

    Library: compare its repair of LEACE with the exact SPLINCE. The repair is fitted to erased
    rows, which are rounded. The tolerance is the sum of the tolerances of both erasers, times 4 for
    the second accumulation and the composition of both maps.
    """
    for i in bench.repeats(60, 12):
        t, ty, sy = _erased_moments(bench, i)
        d, b = len(t), closed(t, ty, sy)
        m = weight_matrix(bench.rng, d, 1 + i % d)
        change = b - eye(d)
        value = trace(m @ change @ t @ change.T)
        bench.add_printed(b @ ty - sy)
        bench.add_printed(change @ t @ null_basis(ty.T))
        bench.add_printed(value - _reference.constrained_minimum(t, m, ty, sy - ty))
        bench.add_corrected(value - cost(t, ty, sy, m), label="cost")
        free = null_basis(ty.T)
        n = integers(bench.rng, d, free.shape[1]) @ free.T
        other = change + n
        gap = trace(m @ other @ t @ other.T) - value - trace(m @ n @ t @ n.T)
        bench.add_corrected(gap, label="cost of a competitor")
        half = eye(d) + change / 2
        bench.add_corrected(half @ ty - (ty + sy) / 2, label="strength 1/2")
        # In the last two cases, the columns of Ty are multiples of one column. The columns of Sy
        # are multiples of another column, by the same factors (feasible) or by other factors.
        row = integers(bench.rng, 1, 2)
        once = integers(bench.rng, d, 1)
        for ty_case, sy_case in (
            (ty, sy),
            (ty[:, :1] @ row, once @ row),
            (ty[:, :1] @ row, once @ integers(bench.rng, 1, 2)),
        ):
            agrees = criterion(ty_case, sy_case) == _solvable(ty_case, sy_case)
            bench.add_corrected(int(not agrees), label="feasible iff")
    for i in bench.repeats(40, 10):
        c = problem(bench.rng, 4, 4 - i % 2, 1 + i % 2, 1)
        p_leace = _reference.leace(c)
        b = closed(p_leace @ c.s @ p_leace.T, p_leace @ c.y, c.y)
        bench.add_corrected((b @ p_leace - _reference.splince(c)) @ c.s, label="repair of LEACE")
        guarded = random_guarded_matrix(bench, c)
        if rank(guarded @ c.y) == rank(c.y):
            b = closed(guarded @ c.s @ guarded.T, guarded @ c.y, c.y)
            bench.add_corrected(b @ guarded @ c.sz, label="guarded before, guarded after")
            bench.add_corrected(b @ guarded @ c.y - c.y, label="any guarded eraser keeps the task")
    for sample in bench.samples(6, 2, ("full rank", "rank-deficient", "one-hot", "multi-output")):
        c, (tolerance, tol_leace, _, _) = sample.covariances, tolerances(sample)
        error = whitened_error(c, fitted(sample), _reference.splince(c))
        bench.add_corrected(error, 4 * (tolerance + tol_leace), label=f"library, {sample.family}")


def _crossed_gram(t: Matrix, ty: Matrix, sy: Matrix) -> Matrix:
    """Return Ty^T T^+ Sy."""
    return ty.T @ pinv(t) @ sy


@check(
    "8.6",
    Verdict.CONDITIONAL,
    mutants={
        "ridge 0.01": {"fit": ridge_unpenalised_intercept},
        "criterion: Ty^T T^+ Ty": {"crossed": lambda t, ty, sy: _crossed_gram(t, ty, ty)},
        "criterion: Ty^T Sy": {"crossed": lambda t, ty, sy: ty.T @ sy},
        "library: LEACE of another concept": {
            "fitted": lambda s: _library.repaired(
                Sample(s.family, s.x, s.y, s.z, s.y_labels, s.z_labels)
            )
        },
    },
)
def refitted_heads(
    bench: Bench,
    *,
    fit: Fit = least_squares,
    crossed: Repair = _crossed_gram,
    fitted: Fitted = _library.repaired,
) -> None:
    """Compare heads refitted before and after a repair, exactly, on rows erased by LEACE or SAL.

    Library: |B P Sz| / |Sz| must be at most 8 d eps q |B P|^2 for each of the maps B and P, where q
    is the condition number of the whitened covariances; q <= 4 here.
    """
    for s in bench.samples(8, 2, ("full rank", "multi-output")):
        c = s.covariances
        test, y = integers(bench.rng, 3, c.d, 9), s.y + integers(bench.rng, *s.y.shape)
        for p in (_reference.leace(c), _reference.sal(c)):
            t, ty = p @ c.s @ p.T, p @ c.y
            plain = predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
            # The second Sy is orthogonal to Ty in the metric T^+: its repair is not invertible.
            off_ty = t @ null_basis(ty.T)
            for sy in (c.y, off_ty[:, :1] @ integers(bench.rng, 1, ty.shape[1])):
                b = _reference.restored(t, ty, sy)
                regular = rank(crossed(t, ty, sy)) == rank(ty)
                bench.add_corrected(
                    int((rank(b @ p) == rank(p)) != regular), label="invertible iff"
                )
                y_pred = predictions(b @ p, s, test, y, intercept=True, offset=True, fit=fit)
                if rank(b @ p) == rank(p):
                    bench.add_printed(y_pred - plain)
                elif not is_zero(y_pred - plain):
                    bench.add_printed(1, violates="Ty^T T^+ Sy of full rank")
    for s in bench.samples(6, 2, ("full rank", "one-hot")):
        c = s.covariances
        p = to_float(fitted(s))
        size, eps = np.linalg.norm(p, 2) ** 2, np.finfo(np.float64).eps
        residual = np.linalg.norm(p @ to_float(c.sz)) / np.linalg.norm(to_float(c.sz))
        bench.add_corrected(residual, 64 * c.d * eps * size, label=f"library, {s.family}")


@dataclass(frozen=True)
class Classes:
    """Covariances of two equally large classes with one task column.

    ``s`` holds S_c = Cov(x | c), ``s_y`` holds S_cy = Cov(x, y | c), and ``sy`` is Cov(x, y).
    """

    s: Floats
    s_y: Floats
    sy: Floats

    def cost(self, maps: list[Floats]) -> float:
        """Return the cost sum p_c tr((A_c - I) S_c (A_c - I)^T) of maps A_c."""
        change = [a - np.eye(len(a)) for a in maps]
        return float(np.mean([np.trace(e @ s @ e.T) for e, s in zip(change, self.s, strict=True)]))

    def task_covariance(self, maps: list[Floats]) -> Floats:
        """Return the task covariance after the maps, sum p_c A_c S_cy."""
        return np.asarray(np.mean([a @ c for a, c in zip(maps, self.s_y, strict=True)], axis=0))

    def feasible(self, orthogonal: Floats) -> list[Floats]:
        """Return the maps of the least cost with the orthogonal matrices O = (I, ``orthogonal``).

        The maps R O_c S_c^-1/2 give both classes the covariance R R^T.
        """
        roots, rotations = [_root(s) for s in self.s], [np.eye(len(orthogonal)), orthogonal]
        r = np.mean([r @ o.T for r, o in zip(roots, rotations, strict=True)], axis=0)
        return [r @ o @ np.linalg.inv(root) for o, root in zip(rotations, roots, strict=True)]


def _root(matrix: Floats) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)


def _barycentre_trace(a: Floats, b: Floats) -> float:
    """Return the trace of the Bures barycentre of a and b.

    The barycentre is (I + T) a (I + T) / 4 with T a T = b.
    """
    root = _root(a)
    return float(np.trace(a) + np.trace(b) + 2 * np.trace(_root(root @ b @ root))) / 4


def _grid_minimum(c: Classes) -> float:
    """Return the least cost over all relative rotations of two classes in the plane."""

    def cost(angle: float, sign: float) -> float:
        orthogonal = np.array(
            [[np.cos(angle), -sign * np.sin(angle)], [np.sin(angle), sign * np.cos(angle)]]
        )
        return c.cost(c.feasible(orthogonal))

    angles = np.linspace(0, 2 * np.pi, 361)
    minima = []
    for sign in (1.0, -1.0):
        costs = [cost(a, sign) for a in angles]
        start = angles[int(np.argmin(costs))]
        step = angles[1]
        best = optimize.minimize_scalar(
            cost, args=(sign,), bounds=(start - step, start + step), method="bounded",
            options={"xatol": 1e-9},
        )  # fmt: skip
        minima.append(min(*costs, float(best.fun)))
    return min(minima)


@check(
    "8.8",
    Verdict.HOLDS,
    mutants={
        "the arithmetic mean for the barycentre": {
            "barycentre_trace": lambda a, b: float(np.trace(a) + np.trace(b)) / 2
        },
        "the smaller class for the barycentre": {
            "barycentre_trace": lambda a, b: float(min(np.trace(a), np.trace(b)))
        },
        "library: half": {"fitted": lambda s, keep: _library.quadratic(s, keep, shrinkage=0.5)},
        "library: another task": {
            "fitted": lambda s, keep: _library.quadratic(
                Sample(s.family, s.x, s.z, s.y, s.z_labels, np.roll(s.y_labels, 1)), keep
            )
        },
    },
)
def equal_covariances(
    bench: Bench,
    *,
    barycentre_trace: Callable[[Floats, Floats], float] = _barycentre_trace,
    fitted: Callable[[Sample, str | None], Floats] = _library.quadratic,
) -> None:
    """Check the least cost of equal class covariances, in float64.

    It is compared with the minimum over all rotations of the plane, and with random feasible maps.
    The error of the minimum is about the square of the tolerance of the angle.

    Library, for two classes in the plane and continuous y: its maps must be feasible with and
    without a task, and their cost without a task must equal the least.
    """
    for i in bench.repeats(30, 8):
        roots = np.eye(2) + 0.6 * bench.rng.normal(size=(2, 2, 2))
        c = Classes(np.array([r @ r.T for r in roots]), np.zeros((2, 2)), np.zeros(2))
        least = float(np.mean([np.trace(s) for s in c.s])) - barycentre_trace(*c.s)
        bench.add_printed((_grid_minimum(c) - least) / (1.0 + least), 1e-9)
        for _ in range(100 if i == 0 else 10):
            cost = c.cost(c.feasible(np.linalg.qr(bench.rng.normal(size=(2, 2))).Q))
            bench.add_printed(min(0.0, cost - least), 1e-9 * (1.0 + cost))
    for _ in bench.repeats(6, 2):
        sample, c = _plane(bench)
        least = float(np.mean([np.trace(s) for s in c.s])) - barycentre_trace(*c.s)
        for keep in (None, "y"):
            maps = list(fitted(sample, keep))
            erased = [a @ s @ a.T for a, s in zip(maps, c.s, strict=True)]
            bench.add_corrected(
                erased[0] - erased[1], 1e-9 * float(np.linalg.norm(erased[0])), label="library"
            )
            if keep is None:
                bench.add_corrected(c.cost(maps) / least - 1.0, 1e-9, label="library costs")
            else:
                bench.add_corrected(c.task_covariance(maps) - c.sy, 1e-9, label="library keeps")


def _plane(bench: Bench) -> tuple[Sample, Classes]:
    """Draw two classes of 40 integer rows in the plane, and an integer task."""
    z = np.repeat([0, 1], 40)
    x = np.rint(bench.rng.normal(size=(80, 2)) * np.where(z, 9, 4)[:, None]).astype(int)
    x[:, 1] += x[:, 0] // 2 + 3 * z
    y = x[:, 0] + x[:, 1] * z + bench.rng.integers(-9, 10, 80)
    parts = []
    for k in (0, 1):
        rows, task = x[z == k] - x[z == k].mean(axis=0), y[z == k] - y[z == k].mean()
        parts.append((rows.T @ rows / 40, rows.T @ task / 40))
    sy = (x - x.mean(axis=0)).T @ (y - y.mean()) / 80
    plane = Classes(np.array([p[0] for p in parts]), np.array([p[1] for p in parts]), sy)
    return continuous_sample(x, z[:, None], y[:, None], "plane"), plane


# Simulated population: number of features, number of rows, fraction and standard deviation of the
# rare class, distance of the class means.
N_FEATURES, N_ROWS, RARE_FRACTION, RARE_STD, MEAN_DISTANCE = 8, 4000, 0.05, 3.0, 12.0


def _by_angle(s: Matrix, true: Matrix, fitted: Matrix, variance: Number) -> Number:
    """Return R0^2 sin^2(angle), the R^2 of the concept on erased rows of the population.

    The angle is that between Sz of the population and the fitted columns, in the metric S^+. R0^2
    is the R^2 of the concept on the rows before erasure.
    """
    inner = true.T @ pinv(s) @ fitted
    orthogonal = true.T @ pinv(s) @ true - inner @ pinv(fitted.T @ pinv(s) @ fitted) @ inner.T
    return orthogonal[0, 0] / variance


def _by_cosine(s: Matrix, true: Matrix, fitted: Matrix, variance: Number) -> Number:
    """Return R0^2 cos^2(angle), with R0 and the angle of ``_by_angle``."""
    r2 = (true.T @ pinv(s) @ true)[0, 0] / variance
    return r2 - _by_angle(s, true, fitted, variance)


def _erasers(bench: Bench, s: Matrix, fitted: Matrix) -> list[Matrix]:
    """Return projectors with kernel colsp(fitted): LEACE, SAL and a random projector."""
    projectors = []
    for right in (pinv(s) @ fitted, fitted, integers(bench.rng, *fitted.shape)):
        inner = right.T @ fitted
        if rank(inner) == rank(fitted):
            projectors.append(eye(len(s)) - fitted @ pinv(inner) @ right.T)
    return projectors


def _population() -> tuple[Floats, Floats, float]:
    """Return Cov(x), Cov(x, z) and Var(z) of the simulated population."""
    variance = RARE_FRACTION * (1 - RARE_FRACTION)
    true = variance * MEAN_DISTANCE * np.eye(N_FEATURES)[0]
    within = (RARE_FRACTION * RARE_STD**2 + 1 - RARE_FRACTION) * np.eye(N_FEATURES)
    return within + np.outer(true, true) / variance, true, variance


def _tau() -> float:
    """Return tau = tr(S^+ sum_c w_c S_c) on the complement of Sz.

    The weights are w_c = 1 - p_c, with p_c the fraction of class c.
    """
    return (
        (N_FEATURES - 1)
        * ((1 - RARE_FRACTION) * RARE_STD**2 + RARE_FRACTION)
        / (RARE_FRACTION * RARE_STD**2 + 1 - RARE_FRACTION)
    )


def _limit(r2_of_x: float) -> float:
    """Return the .95 quantile of R^2 on erased rows of the population.

    Within both classes the covariance is isotropic, so that n t = tau / (p - 1) times chi-squared
    of p - 1 degrees of freedom.
    """
    t = _tau() / (N_FEATURES - 1) * float(chi2.ppf(0.95, N_FEATURES - 1)) / N_ROWS
    return r2_of_x * t / (r2_of_x + t)


def _scaled_limit(p: Floats, limit: float, factor: float) -> tuple[Floats, float]:
    return p, factor * limit


@check(
    "8.10",
    Verdict.HOLDS,
    mutants={
        "cosine": {"closed": _by_cosine},
        "Euclidean angle": {"closed": lambda s, a, b, v: _by_angle(eye(len(s)), a, b, v)},
        "tau of equal covariances": {"tau": lambda: float(N_FEATURES - 1)},
        "tau without S^+": {
            "tau": lambda: (N_FEATURES - 1) * (RARE_FRACTION * RARE_STD**2 + 1 - RARE_FRACTION)
        },
        "library: no class covariances": {
            "certified": lambda x, z: _library.certified(x, z, by=None)
        },
        "library: covariances of other classes": {
            "certified": lambda x, z: _library.certified(x, z, by="y", y=z[::-1])
        },
        "library: level .90 for .95": {
            "certified": lambda x, z: _library.certified(x, z, delta=0.1)
        },
        "library: limits times .9": {
            "certified": lambda x, z: _scaled_limit(*_library.certified(x, z), 0.9)
        },
    },
)
def new_rows(
    bench: Bench,
    *,
    closed: Callable[[Matrix, Matrix, Matrix, Number], Number] = _by_angle,
    tau: Callable[[], float] = _tau,
    certified: Callable[[Floats, NDArray[np.int64]], tuple[Floats, float]] = _library.certified,
) -> None:
    """Check R^2 of the concept on held-out rows, and the library's certificate.

    Exact: compute R^2 after projectors with the same kernel, for S of any rank. Simulation: let t
    be the squared whitened length of the noise of sz orthogonal to Sz. The mean of n t over fits
    must be within 4 standard errors of tau. The coverage of the library's 95 % certificate may be
    at most 3 standard errors below 0.95. Its mean limit must be the quantile of R^2, within 4
    standard errors and terms of order p / n_c: an error of the level changes the coverage less.
    """
    for i in bench.repeats(60, 15):
        d, k = 3 + i % 3, 1 + i % 2
        f = integers(bench.rng, d, d - (i // 2) % 2)
        s = f @ f.T
        true, fitted = (f @ integers(bench.rng, f.shape[1], c) for c in (1, k))
        variance_z = Fraction(1 + i)
        if is_zero(true) or rank(fitted) < k:
            continue
        for p in _erasers(bench, s, fitted):
            remaining = p @ true
            r2 = (remaining.T @ pinv(p @ s @ p.T) @ remaining)[0, 0] / variance_z
            bench.add_printed(r2 - closed(s, true, fitted, variance_z))
    s, true, variance = _population()
    r2_of_x = float(true @ np.linalg.solve(s, true)) / variance
    noises, limits, n_covered = [], [], 0
    fits = bench.repeats(400, 100)
    for _ in fits:
        z = (bench.rng.random(N_ROWS) < RARE_FRACTION).astype(np.int64)
        x = bench.rng.normal(size=(N_ROWS, N_FEATURES)) * np.where(z, RARE_STD, 1.0)[:, None]
        x[:, 0] += MEAN_DISTANCE * z
        p, limit = certified(x, z)
        remaining = p @ true
        r2 = float(remaining @ np.linalg.pinv(p @ s @ p.T, rcond=1e-10) @ remaining) / variance
        n_covered += r2 <= limit
        limits.append(limit)
        noises.append(N_ROWS * r2_of_x * r2 / (r2_of_x - r2))
    error = float(np.std(noises)) / len(fits) ** 0.5
    # The tolerance includes terms of order 1 / n_c; the rarest class has n_c = 50 rows.
    bench.add_corrected(
        np.mean(noises) / tau() - 1, 4 * error / tau() + 1 / (RARE_FRACTION * N_ROWS), label="tau"
    )
    coverage = n_covered / len(fits)
    bench.add_corrected(
        max(0.0, 0.95 - coverage), 3 * (0.95 * 0.05 / len(fits)) ** 0.5, label="coverage"
    )
    ratios = np.array(limits) / _limit(r2_of_x)
    tolerance = 4 * float(np.std(ratios)) / len(fits) ** 0.5 + N_FEATURES / (RARE_FRACTION * N_ROWS)
    bench.add_corrected(np.mean(ratios) - 1, tolerance, label="limit")
    bench.require_quoted(f"{tau() / (N_FEATURES - 1):.1f} times")
