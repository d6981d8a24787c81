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
    rotation,
    weight_matrix,
)
from proofs_check._fits import least_squares, ridge_unpenalised_intercept
from proofs_check._heads import Fit, predictions, random_guarded_matrix
from proofs_check._library import Fitted
from proofs_check._linalg import (
    Matrix,
    Number,
    diagonal,
    eye,
    hstack,
    inverse,
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
# the function f of (classes, Lam)
Value = Callable[["Classes", Floats], float]
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
    """Covariances of two equally large classes with one task column, and the target Sy.

    ``s`` holds S_c = Cov(x | c), ``s_y`` holds S_cy = Cov(x, y | c). The maps A_c of the classes
    must yield sum p_c A_c S_cy = Sy.
    """

    s: Floats
    s_y: Floats
    sy: Floats

    @property
    def b(self) -> Floats:
        """B_c = S_c^-1 S_cy for each class c."""
        return np.array([np.linalg.solve(s, c) for s, c in zip(self.s, self.s_y, strict=True)])

    def dual_factors(self, lam: Floats) -> list[Floats]:
        """Return I + Lam B_c^T for each class c; Lam is the dual variable."""
        return [np.eye(len(self.sy)) + np.outer(lam, b) for b in self.b]

    def cost(self, maps: list[Floats]) -> float:
        """Return the cost sum p_c tr((A_c - I) S_c (A_c - I)^T) of maps A_c."""
        change = [a - np.eye(len(a)) for a in maps]
        return float(np.mean([np.trace(e @ s @ e.T) for e, s in zip(change, self.s, strict=True)]))

    def task_covariance(self, maps: list[Floats]) -> Floats:
        """Return the task covariance after the maps, sum p_c A_c S_cy."""
        return np.asarray(np.mean([a @ c for a, c in zip(maps, self.s_y, strict=True)], axis=0))

    def feasible(self, orthogonal: Floats) -> list[Floats]:
        """Return feasible maps R O_c S_c^-1/2 with the orthogonal matrices O = (I, ``orthogonal``).

        R is chosen for the least cost.
        """
        roots, rotations = [_root(s) for s in self.s], [np.eye(len(orthogonal)), orthogonal]
        r0 = np.mean([r @ o.T for r, o in zip(roots, rotations, strict=True)], axis=0)
        vq = np.mean([o @ r @ b for o, r, b in zip(rotations, roots, self.b, strict=True)], axis=0)
        r = r0 + np.outer(self.sy - r0 @ vq, vq) / (vq @ vq)
        return [r @ o @ np.linalg.inv(root) for o, root in zip(rotations, roots, strict=True)]


def _root(matrix: Floats) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)


def _transport(a: Floats, b: Floats) -> Floats:
    """Return the positive definite matrix T with T a T = b."""
    root = _root(a)
    inverse = np.linalg.inv(root)
    return np.asarray(inverse @ _root(root @ b @ root) @ inverse)


def _barycentre_trace(a: Floats, b: Floats) -> float:
    """Return the trace of the Bures barycentre of a and b.

    The barycentre is (I + T) a (I + T) / 4 with T a T = b. `a` may be singular.
    """
    root = _root(a)
    return float(np.trace(a) + np.trace(b) + 2 * np.trace(_root(root @ b @ root))) / 4


def _dual_covariances(c: Classes, lam: Floats) -> list[Floats]:
    """Return S~_c = (I + Lam B_c^T) S_c (I + Lam B_c^T)^T for each class c."""
    return [t @ s @ t.T for t, s in zip(c.dual_factors(lam), c.s, strict=True)]


def _dual_function(c: Classes, lam: Floats) -> float:
    """Return the dual function f(Lam) = tr Sigma - 2 <Lam, Sy>, Sigma the barycentre of S~_c."""
    return _barycentre_trace(*_dual_covariances(c, lam)) - 2 * float(lam @ c.sy)


def _dual_gradient(c: Classes, lam: Floats) -> Floats:
    """Return the gradient of f, 2 (sum p_c A_c S_cy - Sy)."""
    a, b = _dual_covariances(c, lam)
    middle = (np.eye(len(a)) + _transport(a, b)) / 2
    maps = [
        _transport(m, middle @ a @ middle) @ t
        for m, t in zip((a, b), c.dual_factors(lam), strict=True)
    ]
    return 2 * (c.task_covariance(maps) - c.sy)


def _grid_minimum(c: Classes) -> float:
    """Return the least cost over all relative rotations of the two classes.

    The rotations are all orthogonal 2 x 2 matrices.
    """

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


def _random_classes(bench: Bench) -> Classes:
    """Draw two random classes in the plane."""
    joint = [r @ r.T for r in np.eye(3) + 0.6 * bench.rng.normal(size=(2, 3, 3))]
    s, s_y = (np.array([j[:2, part] for j in joint]) for part in (slice(2), 2))
    return Classes(s, s_y, s_y.mean(axis=0) + 0.5 * bench.rng.normal(size=2))


# Sy is nearly opposite to the task covariance of the first class. At the minimiser of f, a
# determinant 1 + Lam^T B_c is 0, and the duality gap is 0.32 of the cost.
_KINK = Classes(
    np.array([np.eye(2), [[2.0, 1.0], [1.0, 1.0]]]), np.array([[0.0, -1.0], [1.0, 1.0]]),
    np.array([0.1, 0.05]),
)  # fmt: skip


def _minimum(c: Classes, value: Value) -> tuple[Floats, float]:
    """Return the minimiser and the minimum of f in two dimensions.

    f is convex and may be non-smooth.
    """

    def f(lam: Floats) -> float:
        return value(c, lam)

    result = optimize.minimize(
        f, np.zeros(2), method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 2000, "maxfev": 4000},
    )  # fmt: skip
    return np.asarray(result.x), float(result.fun)


@check(
    "8.8",
    Verdict.CONDITIONAL,
    mutants={
        "the arithmetic mean for the barycentre": {
            "value": lambda c, lam: (
                sum(float(np.trace(m)) for m in _dual_covariances(c, lam)) / 2
                - 2 * float(lam @ c.sy)
            )
        },
        "Lam without the S_cy term": {
            "value": lambda c, lam: _dual_function(Classes(c.s, 0 * c.s_y, c.sy), lam)
        },
        "gradient without Sy": {"gradient_of": lambda c, lam: _dual_gradient(c, lam) + 2 * c.sy},
        "f with <Lam, Sy> once": {
            "value": lambda c, lam: _dual_function(c, lam) + float(lam @ c.sy)
        },
        "library: repair of QLEACE": {"fitted": lambda s: _library.quadratic(s, method="repair")},
        "library: another task": {
            "fitted": lambda s: _library.quadratic(
                Sample(s.family, s.x, s.z, s.y, s.z_labels, np.roll(s.y_labels, 1))
            )
        },
    },
)
def equal_covariances(
    bench: Bench,
    *,
    value: Value = _dual_function,
    gradient_of: Callable[[Classes, Floats], Floats] = _dual_gradient,
    fitted: Callable[[Sample], Floats] = _library.quadratic,
) -> None:
    """Check the dual function f of equal class covariances, in float64.

    Its gradient is compared with finite differences, its values with the costs of random feasible
    maps, and its minimum with the minimum over all rotations of the plane. The error of the
    differences is about step^2 + eps / step; the error of the minimiser is about the square root of
    fatol.

    Library, for two classes in the plane and continuous y: its maps must be feasible, and their
    cost must equal that of the best rotation.
    """
    for i in bench.repeats(30, 8):
        c = _random_classes(bench)
        variance = float(np.mean([np.trace(s) for s in c.s]))
        lam = 0.3 * bench.rng.normal(size=2)
        gradient = gradient_of(c, lam)
        step = 1e-5
        for e in np.eye(2):
            forward, backward = (value(c, lam + h * e) for h in (step, -step))
            size = 1.0 + np.linalg.norm(gradient)
            bench.add_corrected(((forward - backward) / (2 * step) - gradient @ e) / size, 1e-6)
        for _ in range(100 if i == 0 else 10):
            orthogonal = np.linalg.qr(bench.rng.normal(size=(2, 2))).Q
            maps = c.feasible(orthogonal)
            bench.add_corrected(c.task_covariance(maps) - c.sy, 1e-9, label="feasible")
            above = value(c, lam) - variance + c.cost(maps)
            bench.add_corrected(min(0.0, above), 1e-9 * (1.0 + c.cost(maps)), label="bound")
        minimiser, minimum = _minimum(c, value)
        determinants = [1.0 + minimiser @ b for b in c.b]
        if min(np.abs(determinants)) > 0.05:
            best = _grid_minimum(c)
            bench.add_printed((best - (variance - minimum)) / best, 1e-5)
    variance = float(np.mean([np.trace(s) for s in _KINK.s]))
    minimiser, minimum = _minimum(_KINK, value)
    best = _grid_minimum(_KINK)
    bench.add_printed(
        (best - (variance - minimum)) / best, 1e-5, violates="determinants different from 0"
    )
    for _ in bench.repeats(6, 2):
        s, c = _plane(bench)
        maps = list(fitted(s))
        bench.add_corrected(c.task_covariance(maps) - c.sy, 1e-9, label="library keeps")
        erased = [a @ s @ a.T for a, s in zip(maps, c.s, strict=True)]
        bench.add_corrected(
            erased[0] - erased[1], 1e-9 * float(np.linalg.norm(erased[0])), label="library"
        )
        bench.add_corrected(c.cost(maps) / _grid_minimum(c) - 1.0, 1e-5, label="library costs")


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


def _definite(matrix: Matrix) -> bool:
    """Return whether a symmetric matrix is positive or negative definite.

    The criterion is the sign of the leading minors.
    """
    return any(
        all(_determinant(sign * matrix[:k, :k]) > 0 for k in range(1, len(matrix) + 1))
        for sign in (1, -1)
    )


def _determinant(matrix: Matrix) -> Number:
    """Return the determinant, by Gaussian elimination."""
    a, determinant = matrix.copy(), Fraction(1)
    for k in range(len(a)):
        pivot = next((i for i in range(k, len(a)) if a[i, k] != 0), None)
        if pivot is None:
            return Fraction(0)
        if pivot != k:
            a[[k, pivot]] = a[[pivot, k]]
            determinant = -determinant
        determinant *= a[k, k]
        for i in range(k + 1, len(a)):
            a[i] = a[i] - a[k] * (a[i, k] / a[k, k])
    return determinant


def _paired(roots: list[int], signs: list[int], u: Matrix) -> Matrix:
    """Return a basis of an isotropic space of D = sum w_i u_i u_i^T, with w = sign root^2.

    The basis consists of u_k for each w_k = 0, and of sqrt(-w_j) u_i + sqrt(w_i) u_j for pairs
    w_i > 0 > w_j.
    """
    order = range(len(roots))
    plus = [i for i in order if signs[i] > 0]
    minus = [j for j in order if signs[j] < 0]
    columns = [u[:, k] for k in order if signs[k] == 0]
    for i, j in zip(plus, minus, strict=False):
        columns.append(roots[j] * u[:, i] + roots[i] * u[:, j])
    return np.array(columns, dtype=object).T.reshape(len(u), len(columns))


def _unweighted(roots: list[int], signs: list[int], u: Matrix) -> Matrix:
    """Return the columns of ``_paired``, but u_i + u_j for each pair."""
    return _paired([1] * len(roots), signs, u)


def _off_the_range(roots: list[int], signs: list[int], u: Matrix) -> Matrix:
    """Return only the columns u_k for w_k = 0."""
    return _paired(roots, [sign if sign == 0 else 1 for sign in signs], u)


def _oblique_projector(w: Matrix, s: Matrix) -> Matrix:
    """Return P = S W (W^T S W)^{-1} W^T."""
    return s @ w @ inverse(w.T @ s @ w) @ w.T


@check(
    "8.9",
    Verdict.HOLDS,
    mutants={
        "projection off the range of D": {"basis_of": _off_the_range},
        "pairs without weights": {"basis_of": _unweighted},
        "means alone": {"basis_of": lambda roots, signs, u: _paired(roots, [0] * len(roots), u)},
        "G of W alone": {"projected": lambda w, s: w @ inverse(w.T @ w) @ w.T},
        "library: LEACE": {"fitted": lambda x, z: _library.isotropic(x, z, method="leace")},
        "library: neutral directions": {
            "fitted": lambda x, z: _library.isotropic(x, z, neutral=1.0)
        },
    },
)
def isotropic_map(
    bench: Bench,
    *,
    basis_of: Callable[[list[int], list[int], Matrix], Matrix] = _paired,
    projected: Callable[[Matrix, Matrix], Matrix] = _oblique_projector,
    fitted: Callable[[NDArray[np.int64], NDArray[np.int64]], Floats] = _library.isotropic,
) -> None:
    """Check that the isotropic map equalises two classes and has the largest rank.

    Exact, for S_w = L L^T, S_1 - S_0 = L D L^T with D = a u_0^T + u_0 a^T + sum w_i u_i u_i^T, and
    m_1 - m_0 = L u_0. After the map, class means and covariances are equal. The map changes the
    rows least among maps with the same functionals. Its rank is n_0 + min(n_+, n_-), where n_0, n_+
    and n_- count the w_i that are 0, positive and negative. D is definite on all functionals that
    could be added, so by Witt's theorem no isotropic space is larger.

    Library, on integer rows: the rank must agree with the signature of D.
    """
    for i in bench.repeats(40, 12):
        d = 3 + i % 4
        orthogonal, scale = rotation(bench.rng, d), integers(bench.rng, d, d)
        if rank(scale) < d:
            continue
        u0, u = orthogonal[:, :1], orthogonal[:, 1:]
        signs = [int(v) for v in bench.rng.integers(-1, 2, d - 1)]
        roots = [int(v) for v in bench.rng.integers(1, 4, d - 1)]
        inner = u @ diagonal([Fraction(s * r * r) for s, r in zip(signs, roots, strict=True)]) @ u.T
        mixed = integers(bench.rng, d, 1) @ u0.T
        inner = inner + mixed + mixed.T
        c = basis_of(roots, signs, u)
        expected_rank = signs.count(0) + min(signs.count(1), signs.count(-1))
        bench.add_printed(Fraction(c.shape[1] - expected_rank))
        # functionals that are 0 on u_0 and orthogonal to the columns of c, also with respect to D
        free = null_basis(hstack(hstack(u0, inner @ c), c).T)
        bench.add_printed(Fraction(int(not _definite(free.T @ inner @ free))))
        if not c.shape[1]:
            continue
        s = scale @ scale.T
        p = projected(inverse(scale).T @ c, s)
        bench.add_printed(p @ scale @ u0)
        bench.add_printed(p @ scale @ inner @ scale.T @ p.T)
        bench.add_printed(p @ p - p)
        bench.add_printed((eye(d) - p) @ s @ p.T)  # normal equations of the least change
    for _ in bench.repeats(6, 2):
        z = np.arange(80) % 2
        scale_by_class = np.array([[4, 4, 4, 5, 5], [9, 9, 9, 1, 1]])[z]
        x = np.rint(bench.rng.normal(size=(80, 5)) * scale_by_class).astype(int)
        x[:, 0] += 3 * z
        p = fitted(x, z)
        first, second = (np.cov(x[z == k].T, ddof=0) for k in (0, 1))
        gap = x[z == 1].mean(axis=0) - x[z == 0].mean(axis=0)
        rest = np.linalg.svd(gap[:, None])[0][:, 1:]
        values = np.linalg.eigvalsh(rest.T @ (second - first) @ rest)
        expected_rank = min(int((values > 0).sum()), int((values < 0).sum()))
        bench.add_corrected(p @ gap / np.linalg.norm(gap), 1e-9, label="library: means")
        size = 1e-9 * max(1.0, float(np.linalg.norm(p)) ** 2)
        bench.add_corrected(p @ p - p, size, label="library: a projection")
        remaining = p @ (second - first) @ p.T / np.linalg.norm(second - first)
        bench.add_corrected(remaining, 1e-9, label="library: covariances")
        bench.add_corrected(
            float(np.linalg.matrix_rank(p, tol=1e-8) - expected_rank), 0.5, label="library: rank"
        )


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
