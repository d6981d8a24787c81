"""Section 8, continued: erasers that use the concept labels of the rows that they erase."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Sample, integers, weight_matrix
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
    zeros,
)
from proofs_check._reference import Covariances
from proofs_check._rounding import rounding


class Joint(NamedTuple):
    """Covariances of features x, concept z and task y; w denotes (x, z)."""

    s: Matrix
    sz: Matrix
    sy: Matrix
    zz: Matrix
    zy: Matrix

    @classmethod
    def of(cls, x: Matrix, z: Matrix, y: Matrix) -> Joint:
        """Return the covariances, divided by n, of rows x (n, d), z (n, k_z) and y (n, k_y)."""
        x, z, y = (a - a.sum(axis=0, keepdims=True) / len(a) for a in (x, z, y))
        n = len(x)
        return cls(x.T @ x / n, x.T @ z / n, x.T @ y / n, z.T @ z / n, z.T @ y / n)

    @property
    def covariances(self) -> Covariances:
        """The covariances for erasers that do not use labels."""
        return Covariances(self.s, self.sz, self.sy, zeros(len(self.s), 1))

    @property
    def w(self) -> Matrix:
        """Cov(w)."""
        return np.vstack([hstack(self.s, self.sz), hstack(self.sz.T, self.zz)])

    @property
    def wz(self) -> Matrix:
        """Cov(w, z)."""
        return np.vstack([self.sz, self.zz])

    @property
    def wy(self) -> Matrix:
        """Cov(w, y)."""
        return np.vstack([self.sy, self.zy])

    @property
    def t(self) -> Matrix:
        """Cov(x | z): covariance of the residuals of the linear regression of x on z."""
        return self.s - self.sz @ pinv(self.zz) @ self.sz.T

    @property
    def ty(self) -> Matrix:
        """Cov(x, y | z): covariance of y with the residuals of the linear regression of x on z."""
        return self.sy - self.sz @ pinv(self.zz) @ self.zy


# function from Joint to the matrix E, (d, d + k_z), of the eraser r(x, z) = x - E (w - mean w)
Eraser = Callable[[Joint], Matrix]


def _composed(j: Joint, b: Matrix) -> Matrix:
    """Return E of two maps in sequence: x -> x - Sz Szz^+ (z - mean z), then B."""
    return hstack(eye(len(b)) - b, b @ j.sz @ pinv(j.zz))


def o_leace(j: Joint) -> Matrix:
    """Return E of o-LEACE, the oracle eraser that keeps no task."""
    return _composed(j, eye(len(j.s)))


def o_splince(j: Joint) -> Matrix:
    """Return E of o-SPLINCE, computed as the repair of o-LEACE."""
    return _composed(j, _reference.restored(j.t, j.ty, j.sy))


def _with_s_for_t(j: Joint) -> Matrix:
    """Return E of o-SPLINCE with S in place of Cov(x | z); both constraints still hold."""
    return _composed(j, _reference.restored(j.s, j.ty, j.sy))


def _without_labels(j: Joint) -> Matrix:
    """Return E of SPLINCE, or of o-SPLINCE if SPLINCE is infeasible.

    SPLINCE has C_zz in place of Szz.
    """
    c = j.covariances
    if not c.feasible:
        return o_splince(j)
    return hstack(_reference.erased_by_splince(c), zeros(*j.sz.shape))


def _residual_form(j: Joint) -> Matrix:
    """Return E of o-SPLINCE by Theorem 1 for w = (x, z).

    E (w - mean w) is Sz G_o^+ times the residual of z after regression on the prediction of y.
    """
    predictor = j.wy.T @ pinv(j.w)
    gain = j.zy @ pinv(predictor @ j.wy)
    selected = hstack(zeros(len(j.zz), len(j.s)), eye(len(j.zz)))
    return j.sz @ pinv(j.zz - gain @ j.zy.T) @ (selected - gain @ predictor)


def _solvable(j: Joint) -> bool:
    """Return whether E Cov(w, z) = Sz and E Cov(w, y) = 0 have a common solution E."""
    try:
        solve(hstack(j.wz, j.wy).T, hstack(j.sz, 0 * j.sy).T)
    except ValueError:
        return False
    return True


def _is_feasible(j: Joint) -> bool:
    """Return whether ker Sy contains ker Cov(x, y | z)."""
    return is_zero(j.sy @ null_basis(j.ty))


def _factored(bench: Bench, d: int, m: int, k_z: int, k_y: int) -> Joint:
    """Draw x = F u, z = A u, y = B u for white u of length m + 2; rank S is min(d, m)."""
    f = hstack(integers(bench.rng, d, m), zeros(d, 2))
    a, b = integers(bench.rng, k_z, m + 2), integers(bench.rng, k_y, m + 2)
    return Joint(f @ f.T, f @ a.T, f @ b.T, a @ a.T, a @ b.T)


def _problem(bench: Bench, i: int) -> Joint:
    """Draw a feasible problem in which neither Sy nor Sz Szz^+ Szy is 0, for S of any rank.

    Some draws have redundant columns of z, or Sz and Sy with equal column spaces.
    """
    while True:
        j = _factored(bench, 3 + i % 3, 3 + i % 2, 1 + (i // 2) % 2, 1 + (i // 4) % 2)
        if i % 5 == 3:  # append a redundant column of z
            mix = hstack(eye(len(j.zz)), integers(bench.rng, len(j.zz), 1))
            j = j._replace(sz=j.sz @ mix, zz=mix.T @ j.zz @ mix, zy=mix.T @ j.zy)
        if i % 5 == 4:  # put Sy into the column space of Sz
            y = integers(bench.rng, len(j.zz), 1)
            j = j._replace(sy=j.sz @ y, zy=integers(bench.rng, len(j.zz), 1))
        if (
            rank(hstack(j.w, j.wy)) == rank(j.w)
            and _solvable(j)
            and not (is_zero(j.sz @ pinv(j.zz) @ j.zy) or is_zero(j.sy))
        ):
            return j


def _cost(j: Joint, e: Matrix, m: Matrix) -> Number:
    """Return the cost E|r(x, z) - x|_M^2 of an eraser."""
    return trace(m @ e @ j.w @ e.T)


def _minimum_cost(j: Joint, m: Matrix) -> Number:
    """Return the smallest cost of a feasible eraser, by a quadratic programme.

    The programme needs a square matrix, so rows of zeros are added to the eraser's matrix E.
    """
    d, k = j.sz.shape
    metric = np.vstack([hstack(m, zeros(d, k)), zeros(k, d + k)])
    values = np.vstack([hstack(j.sz, 0 * j.sy), zeros(k, k + j.sy.shape[1])])
    return _reference.constrained_minimum(j.w, metric, hstack(j.wz, j.wy), values)


def _sample(bench: Bench, d: int) -> tuple[Sample, Joint]:
    """Draw data with one-hot labels for which SPLINCE of x, and of w, is feasible."""
    while True:
        drawn = next(bench.samples(1, 1, ("one-hot",)))
        j = Joint.of(drawn.x, drawn.z, drawn.y)
        c = Covariances(j.w, j.wz, j.wy, zeros(len(j.w), 1))
        if c.feasible and not is_zero(j.sz @ pinv(j.zz) @ j.zy):
            return drawn, j


@check(
    "8.2",
    Verdict.HOLDS,
    mutants={
        "S for Cov(x given z)": {"closed": _with_s_for_t},
        "C_zz for Szz: SPLINCE": {"closed": _without_labels},
        "no repair: o-LEACE": {"closed": o_leace},
        "first form without V^+": {
            "residual_form": lambda j: (
                j.sz @ pinv(j.zz) @ hstack(zeros(len(j.zz), len(j.s)), eye(len(j.zz)))
            )
        },
        "library: o-LEACE": {"fitted": lambda s: _library.with_labels(s, keep=None)},
        "library: half": {"fitted": lambda s: _library.with_labels(s, strength=0.5)},
    },
)
def erased_with_labels(
    bench: Bench,
    *,
    closed: Eraser = o_splince,
    residual_form: Eraser = _residual_form,
    fitted: Fitted = _library.with_labels,
) -> None:
    """Check that o-SPLINCE meets its constraints at the least cost.

    Exact: check the constraints; compare both formulas of o-SPLINCE, and its cost with a quadratic
    programme on (x, z). Library: compare with the exact map, within the tolerance of SPLINCE of w.
    """
    for i in bench.repeats(60, 20):
        j = _problem(bench, i)
        d, e = len(j.s), closed(j)
        m = weight_matrix(bench.rng, d, 1 + i % d)
        bench.add_printed(e @ j.wz - j.sz)
        bench.add_printed(e @ j.wy)
        minimum = _minimum_cost(j, m)
        bench.add_printed(_cost(j, e, m) - minimum)
        bench.add_printed((residual_form(j) - o_splince(j)) @ j.w)
    for i in bench.repeats(6, 2):
        drawn, j = _sample(bench, 4 + i % 3)
        gap = fitted(drawn) - o_splince(j)
        error = float(trace(pinv(j.s) @ gap @ j.w @ gap.T)) ** 0.5
        rows = to_float(np.hstack([drawn.x, drawn.z]))
        bound = rounding(rows, to_float(drawn.z), to_float(drawn.y)).splince
        bench.add_corrected(error, bound, label="library")


def _of_kind(bench: Bench, kind: int) -> Joint:
    """Draw a problem of kind 0 to 3.

    Kind 0 is unrestricted. In kind 1, y is a linear function of z; in kind 2, Cov(x, y | z) = 0; in
    kind 3, Sy is in the column space of Sz.
    """
    while True:
        j = _factored(bench, 4, 4, 1 + kind % 2, 1)
        if kind == 1:
            a = integers(bench.rng, len(j.zz), 1)
            j = j._replace(sy=j.sz @ a, zy=j.zz @ a)
        elif kind == 2:
            j = j._replace(sy=j.sz @ pinv(j.zz) @ j.zy)
        elif kind == 3:
            a = integers(bench.rng, len(j.zz), 1)
            j = j._replace(sy=j.sz @ a)
        exists = rank(hstack(j.w, j.wy)) == rank(j.w)
        if exists and not is_zero(j.sy) and not is_zero(j.zy):
            return j


@check(
    "8.3",
    Verdict.HOLDS,
    paper=True,
    mutants={
        "rank [Sz, Sy]: SPLINCE's rule": {"criterion": lambda j: j.covariances.feasible},
        "ker Sy in ker Cov(x, y given z)": {
            "criterion": lambda j: is_zero(j.ty @ null_basis(j.sy))
        },
        "rank Sy <= rank Sz + rank Cov(x, y given z)": {
            "criterion": lambda j: rank(j.sy) <= rank(j.sz) + rank(j.ty)
        },
    },
)
def feasible_with_labels(
    bench: Bench, *, criterion: Callable[[Joint], bool] = _is_feasible
) -> None:
    """Compare the feasibility criterion with the solvability of the linear system for E, exactly.

    The problems are of four kinds. For all problems of the last kind, SPLINCE of x is infeasible.
    """
    for i in bench.repeats(80, 24):
        j = _of_kind(bench, i % 4)
        bench.add_printed(int(criterion(j) != _solvable(j)))
        if i % 4 in (1, 2):
            bench.add_corrected(int(_solvable(j)), label="y related to x through z alone")
        elif i % 4 == 3:
            bench.add_corrected(int(j.covariances.feasible), label="Sy in the column space of Sz")


def _rho(j: Joint) -> Number:
    """Return corr(z, y)^2 / R^2(y on x, z) for single columns z and y.

    The variance of y cancels in the ratio.
    """
    explained = (j.wy.T @ pinv(j.w) @ j.wy)[0, 0]
    return j.zy[0, 0] ** 2 / (j.zz[0, 0] * explained)


def _rho_without_fit(j: Joint) -> Number:
    """Return corr(z, y)^2 with additional noise in y.

    The noise has variance 1 and is uncorrelated with x and z.
    """
    explained = (j.wy.T @ pinv(j.w) @ j.wy)[0, 0]
    return j.zy[0, 0] ** 2 / (j.zz[0, 0] * (explained + 1))


# pairs (smaller cost, larger cost) of o-LEACE oL, LEACE L, o-SPLINCE oS and SPLINCE S
_ORDER = (("oL", "L"), ("L", "S"), ("oL", "oS"), ("oS", "S"))


@check(
    "8.4",
    Verdict.HOLDS,
    paper=True,
    mutants={
        "corr(z, y)^2 without R^2": {"rho": _rho_without_fit},
        "D_oS <= D_L": {"order": lambda: (*_ORDER, ("oS", "L"))},
        "D_L <= D_oS": {"order": lambda: (*_ORDER, ("L", "oS"))},
        "D_L <= D_oL": {"order": lambda: (("L", "oL"),)},
    },
)
def cost_with_labels(
    bench: Bench,
    *,
    rho: Callable[[Joint], Number] = _rho,
    order: Callable[[], tuple[tuple[str, str], ...]] = lambda: _ORDER,
) -> None:
    """Compare the costs of erasers with and without labels, exactly.

    The ratio of costs is checked for a single task column. The order of costs is checked in I and
    in random metrics of rank 1; an order in all metrics of rank 1 is the Loewner order.
    """
    n_problems = 0
    while n_problems < len(bench.repeats(60, 20)):
        j = _factored(bench, 4, 4 - n_problems % 2, 1, 1)
        c = j.covariances
        usable = c.feasible and c.z.size and c.y.size and _is_feasible(j) and not is_zero(j.zy)
        if not usable:
            continue
        n_problems += 1
        padded = zeros(*j.sz.shape)
        maps = {
            "oL": o_leace(j),
            "L": hstack(_reference.erased_by_leace(c), padded),
            "oS": o_splince(j),
            "S": hstack(_reference.erased_by_splince(c), padded),
        }
        for m in (eye(4), *(weight_matrix(bench.rng, 4, 1) for _ in range(3))):
            cost = {name: _cost(j, e, m) for name, e in maps.items()}
            bench.add_printed(cost["oS"] * (1 - rho(j)) - cost["oL"])
            for less, more in order():
                bench.add_printed(int(cost[less] > cost[more]))


def _classes(bench: Bench) -> tuple[Matrix, Matrix, Matrix]:
    """Draw integer rows x, one-hot z of three classes, and two columns y that depend on both."""
    n, d = 18, 3
    z = np.arange(n) % 3
    x = integers(bench.rng, n, d) + integers(bench.rng, 3, d)[z]
    y = integers(bench.rng, n, 2) + x[:, :2] + integers(bench.rng, 3, 2)[z]
    one_hot = zeros(n, 3)
    one_hot[np.arange(n), z] = Fraction(1)
    return x, one_hot, y


def _erased_rows(j: Joint, e: Matrix, x: Matrix, z: Matrix) -> Matrix:
    """Return the erased rows x - E (w - mean w)."""
    w = np.hstack([x, z])
    return x - (w - w.sum(axis=0, keepdims=True) / len(w)) @ e.T


def _within(x: Matrix, y: Matrix, z: Matrix, c: int) -> Matrix:
    """Return Cov(x, y) within class c."""
    members = [i for i in range(len(z)) if z[i, c] == 1]
    return Joint.of(x[members], z[members], y[members]).sy


@check(
    "8.5",
    Verdict.HOLDS,
    paper=True,
    mutants={
        "o-SPLINCE": {"closed": o_splince},
        "LEACE": {
            "closed": lambda j: hstack(
                _reference.erased_by_leace(j.covariances), zeros(*j.sz.shape)
            )
        },
        "both iff Cov(x, y given z) = 0": {"both": lambda j: is_zero(j.ty)},
    },
)
def relation_within_classes(
    bench: Bench,
    *,
    closed: Eraser = o_leace,
    both: Callable[[Joint], bool] = lambda j: is_zero(j.sz @ pinv(j.zz) @ j.zy),
) -> None:
    """Check exactly that o-LEACE keeps Cov(x, y) within each of three classes.

    A linear system decides whether some E keeps both the total covariance with y and the pooled
    covariance within classes. In half of the problems, the class means of y are equal.
    """
    for i in bench.repeats(30, 8):
        x, z, y = _classes(bench)
        if i % 2:  # make the class means of y equal
            for c in range(3):
                members = [k for k in range(len(z)) if z[k, c] == 1]
                y[members] -= y[members].sum(axis=0, keepdims=True) / len(members)
        j = Joint.of(x, z, y)
        erased = _erased_rows(j, closed(j), x, z)
        if not i % 2:
            for c in range(3):
                bench.add_printed(_within(erased, y, z, c) - _within(x, y, z, c))
        after = Joint.of(erased, z, y)
        bench.add_corrected(after.sz, label="guarded")
        bench.add_corrected(after.sy - after.ty, label="total is pooled")
        within = j.wy - j.wz @ pinv(j.zz) @ j.zy
        constraints = hstack(hstack(j.wz, j.wy), within)
        values = hstack(hstack(j.sz, 0 * j.sy), 0 * j.sy)
        try:
            solve(constraints.T, values.T)
            feasible = True
        except ValueError:
            feasible = False
        bench.add_corrected(int(feasible != both(j)), label="both iff")


def _splince(j: Joint) -> Matrix:
    """Return P for rows without labels: SPLINCE, or LEACE if SPLINCE is infeasible."""
    c = j.covariances
    return eye(len(j.s)) - (
        _reference.erased_by_splince(c) if c.feasible else _reference.erased_by_leace(c)
    )


def _remaining_covariance(j: Joint) -> Matrix:
    """Return Cov(x, z) after erasure with predicted labels, for a single column z.

    It is (1 - R^2(z on x)) Sz.
    """
    explained = (j.sz.T @ pinv(j.s) @ j.sz)[0, 0]
    return (1 - explained / j.zz[0, 0]) * j.sz


@check(
    "8.7",
    Verdict.CONDITIONAL,
    mutants={
        "rows without a label as they are": {"fallback": lambda j: eye(len(j.s))},
        "half of SPLINCE": {"fallback": lambda j: (eye(len(j.s)) + _splince(j)) / 2},
        "R^2 Sz remains after a predicted label": {
            "remaining": lambda j: j.sz - _remaining_covariance(j)
        },
    },
    paper=True,
)
def rows_without_labels(
    bench: Bench,
    *,
    fallback: Callable[[Joint], Matrix] = _splince,
    remaining: Callable[[Joint], Matrix] = _remaining_covariance,
) -> None:
    """Check exactly that rows and z are uncorrelated if SPLINCE erases the rows without labels.

    The rows with labels are erased by o-SPLINCE. The sums run over a finite population, in which
    labels are missing with a probability per class, or per row. In the second case the covariance
    need not be 0. A label predicted from x does not replace a missing label.
    """
    for _ in bench.repeats(30, 10):
        while True:
            x, z, y = _classes(bench)
            j = Joint.of(x, z, y[:, :1])
            if rank(j.s) == 3 and rank(j.sz) == 2 and j.covariances.feasible:
                break
        labelled, mean = _erased_rows(j, o_splince(j), x, z), x.sum(axis=0, keepdims=True) / len(x)
        unlabelled = mean + (x - mean) @ fallback(j).T
        per_class = z @ (integers(bench.rng, 3, 1) + 4) / 8
        bench.add_printed(Joint.of(labelled + per_class * (unlabelled - labelled), z, y).sz)
        # In the first class, the half of the rows with the largest first feature lacks labels.
        members = sorted((i for i in range(len(x)) if z[i, 0] == 1), key=lambda i: x[i, 0])
        missing = zeros(len(x), 1)
        missing[members[len(members) // 2 :]] = Fraction(1)
        rows = Joint.of(labelled + missing * (unlabelled - labelled), z, y)
        step = missing.T @ (x - z @ (z.T @ x) * Fraction(3, len(x)))
        if not is_zero(step @ (eye(3) - fallback(j)).T):
            bench.add_printed(
                rows.sz, violates="a probability of missing labels that depends on z alone"
            )
        z_column = z[:, :1]
        j = Joint.of(x, z_column, y)
        centred = x - mean
        predicted = centred @ pinv(j.s) @ j.sz
        imputed = x - predicted @ pinv(j.zz) @ j.sz.T
        bench.add_corrected(
            Joint.of(imputed, z_column, y).sz - remaining(j), label="predicted label"
        )
