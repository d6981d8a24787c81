"""Report of an eraser: erased and kept variables, cost and residuals.

The span of a variable v is its cross-covariance with x: one row Cov(x, v_j) per column v_j of v.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve import tolerances
from splince_fast._solve.held_out import Noise, certificate, expected_r2
from splince_fast._solve.options import is_number
from splince_fast.exceptions import FileFormatError, InputError

if TYPE_CHECKING:
    from splince_fast._solve.oblique import Solution
    from splince_fast._solve.selection import Interpretation

Float = NDArray[np.float64]


class SpanLike(Protocol):
    """Spans of several variables: names, stacked rows (k, d), and number of rows per variable."""

    names: list[str]
    rows: Float
    counts: list[int]
    interpretations: list[Callable[[], Interpretation]]


@dataclass(frozen=True, slots=True)
class VariableReport:
    """One erased or kept variable.

    Attributes
    ----------
    name : str
    role : {"erased", "kept"}
    rank : int
        Rank of Cov(x, v) for this variable v, at the rounding level of the data.
    singular_values : tuple of float
        Canonical correlations between x and the variable, the singular values of
        L^+ Cov(x, v) Cov(v)^{-1/2} with Cov(x) = L L^T. They range from 0, no linear association,
        to 1, a perfect one. Missing labels count as rows at the mean. Without whitening: singular
        values of Cov(x, v), with v scaled to unit standard deviation. For kept directions: singular
        values of the whitened directions.
    residual : float
        |P Cov(x, z)| / |Cov(x, z)| for an erased variable,
        |P Cov(x, y) - Cov(x, y)| / |Cov(x, y)| for a kept variable (Frobenius norms). For
        :func:`splince_fast.oracle`, :func:`splince_fast.quadratic` and
        :func:`splince_fast.repair`, norms are those of the row of a feature divided by its standard
        deviation, the largest over the features. For `repair` with the strength b: rounding error
        of the restored fraction, |Cov(r, y) - Cov(t, y) - b X| / |Cov(x, y)|, for the rows t before
        and r after the repair and X = Cov(x, y) - Cov(t, y). For an erased variable of `quadratic`:
        largest difference between entries of the class covariances. For an erased variable with
        ``rank_tol=`` and :meth:`Projection.scaled`: upper bound.
    bound : float
        Rounding level of `residual`. It is the sum of 8 d eps q |P|^2 and of the part of the
        covariance that is not erased, because it is below the rounding level of Cov(x). Here q is
        the condition number of the whitened cross-covariances, and |P| is the spectral norm with
        features scaled to unit standard deviation. If `residual` is far above `bound`, part of a
        kept variable was dropped, or part of an erased variable remains (``rank_tol=``).
    kind : str
        Kind of the variable: "classes (4)", "continuous (1 column)", "directions (2)".
    expected : float or None
        Erased variable: expected R^2 of the best linear predictor in held-out rows of the same
        distribution, about (d - r) / n for n rows, with r the joint rank of all erased variables
        (derivation: ``splince_fast/_solve/held_out.py``). For classes, equal
        class covariances are assumed, unless the moments were made ``by`` the variable. For a
        continuous variable, the standard deviation of x is assumed not to depend on the variable.
        None without whitening, with shrinkage or ``covariance_type="diag"``, for fewer rows than
        dimensions, and if ``rank_tol=`` leaves part of the association.
    expected_most : float or None
        Classes: upper bound of `expected` for any class covariances. None if the moments were made
        ``by`` the variable: `expected` then uses the class covariances.
    noise : Noise or None
        Erased variable: sampling noise of the fitted Cov(x, v), for :meth:`Report.certificate`.
        None if part of the association is left.

    Notes
    -----
    Bound `expected_most`: summed over directions, the noise of the fitted cross-covariances is
    tau / n, with tau = tr(S^+ sum_c w_c S_c), S = Cov(x), class covariances S_c, class fractions
    p_c and w_c = 1 - p_c. As p_c S_c <= S, the noise of each direction is at most (1 - p) / p
    times the noise for equal class covariances, with p the fraction of the rarest class.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=400)
    >>> y = np.where(rng.random(400) < 0.8, z, 1 - z)
    >>> X = rng.normal(size=(400, 4)) + np.outer(z, np.eye(4)[0]) + np.outer(y, np.eye(4)[1])
    >>> eraser = sf.splince(sf.Moments().update(X, {"z": z, "y": y}), erase="z", keep="y")
    >>> [(v.name, v.role, v.rank) for v in eraser.report.variables]
    [('z', 'erased', 1), ('y', 'kept', 1)]
    >>> all(v.residual <= v.bound for v in eraser.report.variables)
    True
    """

    name: str
    role: str
    rank: int
    singular_values: tuple[float, ...]
    residual: float
    bound: float
    kind: str = ""
    expected: float | None = None
    expected_most: float | None = None
    noise: Noise | None = None

    @property
    def label(self) -> str:
        """Name and kind of the variable: "z: classes (4)"."""
        return f"{self.name}: {self.kind}" if self.kind else self.name

    @property
    def _exactness(self) -> str:
        return f"residual {self.residual:.1e} (rounding {self.bound:.1e})"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Effect of erasers on held-out rows: means over folds.

    :func:`splince_fast.cross_report` returns the values of each fold.

    Attributes
    ----------
    distortion : float
        Mean squared change of the rows, as a fraction of the total variance of the rows.
    concept : float or None
        R^2 of the concept after erasure; None for a partial eraser.
    chance : float or None
        Chance level of `concept`: mean R^2 for random labels; None for a partial eraser.
    kept : float or None
        Fraction of the covariance with the kept variables that is preserved; None without kept
        variables and for a partial eraser.
    """

    distortion: float
    concept: float | None
    chance: float | None
    kept: float | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sample of rows from which Cov(x) was estimated, for moments made with ``subsample=``.

    Attributes
    ----------
    n_rows : int
        Number of sampled rows.
    expected_excess : float or None
        Expected relative increase of `distortion`, compared with the eraser that is fitted to all
        rows. None for SAL, and with shrinkage.
    """

    n_rows: int
    expected_excess: float | None


@dataclass(frozen=True, slots=True)
class DiagonalCovariance:
    """Passes over the rows for moments made with ``covariance_type="diag"``.

    The `singular_values` of the variables are estimates, because the variances replace Cov(x).

    Attributes
    ----------
    passes : int or None
        Number of passes of ``refine=`` over the rows, after which `distortion` is exact; None
        without ``refine=``.
    gain : float or None
        Relative decrease of the distortion in the last pass.
    """

    passes: int | None
    gain: float | None


@dataclass(frozen=True, slots=True)
class OracleFit:
    """Values in the report of :func:`splince_fast.oracle` only.

    Attributes
    ----------
    distortion_leace : float
        D_oL: distortion of o-LEACE, the smallest possible for an eraser that uses the labels z.
    rho : float or None
        Largest rho_o over all linear combinations u of the kept columns. rho_o is the variance of u
        that z predicts, divided by the variance of u that x and z predict together. For single
        columns z and y, rho_o = corr(z, y)^2 / R^2(y given x, z), and `distortion` is
        D_oL / (1 - rho_o). None without kept variables, and with shrinkage: the map is then not
        that of the least change.
    """

    distortion_leace: float
    rho: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Effect of an eraser on the rows that it was fitted to.

    Attributes
    ----------
    method : str
        Name of the method.
    n_rows, weight, n_features : int, float, int
        Number of rows, weight sum and number of features of the fitted data.
    rank_covariance : int or None
        Rank of Cov(x) at its rounding level; None if Cov(x) was not factored (SAL).
    rank : int
        Number of removed dimensions; with ``null_space="drop"`` it includes the dimensions
        outside the range of Cov(x).
    variables : tuple of VariableReport
        Erased and kept variables.
    dropped : int
        Number of kept directions that were dropped because they lie too close to the erased
        directions.
    cosines : tuple of float
        Cosines of the principal angles between the whitened spans of the erased and of the kept
        variables, before any direction was dropped.
    amplification : float
        1 / sin of the smallest principal angle that remains after directions were dropped. It is
        the spectral norm a of the whitened projection of Theorem 1. Erasing changes a whitened,
        centred row by at most ``alpha * sqrt(1 + strength**2 * (a**2 - 1))`` times its length,
        which is a if `alpha` and `strength` are 1; the factor of LEACE is 1. Rows are whitened by
        the factored covariance, also with shrinkage. For :func:`splince_fast.repair`,
        :func:`splince_fast.oracle` and :func:`splince_fast.quadratic`: spectral norm of the linear
        map, the largest over classes, with each feature in units of its standard deviation (for
        `repair`, before or after erasure, whichever is larger); log10 of this norm is the number of
        digits lost.
    rho : float or None
        Squared cosine of the smallest angle between the erased and the remaining kept directions
        after whitening: the squared correlation of the best linear predictions of concept and
        task. With shrinkage, the whitening is that of the shrunk covariance. None without kept
        variables, without whitening, and with ``covariance_type="diag"``.
    distortion, distortion_leace : float or None
        E|r(x) - x|^2 / tr Cov(x), for this eraser and for LEACE with the same moments and erased
        variables (equal without kept variables). Both are None with ``covariance_type="diag"`` but
        without ``refine=``. `distortion` is also None below its rounding error. `distortion_leace`
        is also None with ``refine=``, which does not reach the minimum; with shrinkage; and for SAL
        and repair. With ``subsample=``: estimates for all rows, of erasers that are fitted to the
        sample.
    solver : {"cholesky", "eigh", "diagonal", "refined", "none"}
        Factorisation of the covariance.
    tolerance : float
        Rounding level in units of correlation; a smaller correlation counts as 0.
    shrinkage : float
        Weight of the isotropic target in the factored covariance.
    warnings : tuple of str
    sensitivity : float or None
        Change of the removed part (P - I) x when x is rounded to float32, relative to the
        standard deviation of x: sqrt(E|(P - I) e|^2) / s = eps32 rms(x) |P - I|_F / s. The rounding
        error e has independent entries with standard deviation eps32 rms(x); eps32 = 2^-23,
        rms(x)^2 = E|x|^2 / d and s^2 = tr Cov(x). None for erasers that use labels.
    alpha : float
        Fraction of the change that is applied: 1, or the `alpha` of :meth:`Projection.scaled`.
        Below 1 no dimension is removed entirely, `rank` counts the changed dimensions, and a linear
        probe still recovers the variables with the role "erased".
    strength : float
        Fraction of the removed covariance with the kept variables that is restored. Without a
        kept variable LEACE removes this covariance; for :func:`splince_fast.repair`, the eraser of
        the repaired rows removes it.
    held_out : HeldOut or None
        Effect on held-out rows, for moments with folds.
    sampling : Sampling or None
        Sample of rows from which the covariance was estimated; None if all rows were used.
    diagonal : DiagonalCovariance or None
        Passes over the rows, for moments made with ``covariance_type="diag"``.
    oracle : OracleFit or None
        Values of :func:`splince_fast.oracle` only.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=400)
    >>> y = np.where(rng.random(400) < 0.8, z, 1 - z)
    >>> X = rng.normal(size=(400, 4)) + np.outer(z, np.eye(4)[0]) + np.outer(y, np.eye(4)[1])
    >>> report = sf.splince(sf.Moments().update(X, {"z": z, "y": y}), erase="z", keep="y").report
    >>> report.method, report.n_rows, report.rank, report.rank_covariance
    ('SPLINCE', 400, 1, 4)
    >>> bool(report.distortion > report.distortion_leace)
    True
    """

    method: str
    n_rows: int
    weight: float
    n_features: int
    rank_covariance: int | None
    rank: int
    variables: tuple[VariableReport, ...]
    dropped: int
    cosines: tuple[float, ...]
    amplification: float
    rho: float | None
    distortion: float | None
    distortion_leace: float | None
    solver: str
    tolerance: float
    shrinkage: float
    warnings: tuple[str, ...]
    sensitivity: float | None = None
    alpha: float = 1.0
    strength: float = 1.0
    held_out: HeldOut | None = None
    sampling: Sampling | None = None
    diagonal: DiagonalCovariance | None = None
    oracle: OracleFit | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain numbers, strings, lists and dictionaries, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Report:
        """Return the report from the result of :meth:`to_dict`.

        Parameters
        ----------
        values : mapping
            Result of :meth:`to_dict`, also after conversion to JSON and back.

        Raises
        ------
        FileFormatError
            A field is missing or unknown.
        """
        try:
            new: Report = _from_plain(cls, values, "report")
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise FileFormatError(f"a report has missing or unknown fields: {error}") from error
        if not all(v.noise is None or _is_possible(v.noise) for v in new.variables):
            raise FileFormatError("the noise of a variable has values out of range")
        return new

    def certificate(self, delta: float = 0.05) -> dict[str, float]:
        """Return an upper bound of the held-out R^2 of linear predictors of each erased variable.

        The bound holds for every map P with P Cov(x, z) = 0 in the fitted rows, for any method,
        task or covariance used in the fit. For a column of z, the population R^2 is at most
        t / (1 + t), where t is the squared length, in whitened coordinates, of the part of the
        sampling noise of the fitted Cov(x, z) that is orthogonal to the true Cov(x, z). Let p be
        the rank of Cov(x). Then n t is chi-squared with p - 1 degrees of freedom if all classes
        have the same covariance or, for a continuous variable, if its regression on x has residuals
        of constant variance. For classes in moments made with ``by=``, the scale and the degrees of
        freedom are computed from the class covariances, without this assumption.

        Parameters
        ----------
        delta : float in (0, 1)
            Fraction of fits in which the bound of a variable may fail. It is divided among the
            columns of the variable, or among its classes if there are more than two.

        Returns
        -------
        dict of str to float
            Bound for each variable, which holds for all its classes or columns at once. It is
            asymptotic in the number of rows, and holds for linear predictors on rows of the same
            distribution and for weights that are counts of rows. It does not hold for other
            populations or nonlinear predictors.

        Raises
        ------
        InputError
            `delta` is out of range; or the eraser leaves part of the association (``rank_tol=``,
            or :meth:`Projection.scaled`), uses labels, or is a repair, which erases nothing itself.

        Examples
        --------
        >>> import numpy as np
        >>> import splince_fast as sf
        >>> rng = np.random.default_rng(0)
        >>> z = rng.integers(0, 2, size=4000)
        >>> X = rng.normal(size=(4000, 9)) + z[:, None]
        >>> eraser = sf.leace(sf.Moments(by="z").update(X, {"z": z}), erase="z")
        >>> round(eraser.report.certificate(delta=0.05)["z"], 4)
        0.0039
        """
        if not is_number(delta) or not 0 < delta < 1:
            raise InputError(f"delta is {delta!r}; it must be a number between 0 and 1")
        erased = [v for v in self.variables if v.role == "erased"]
        if not erased:
            raise InputError(
                f"{self.method} erases nothing itself; ask the report of the eraser for its "
                "certificate"
            )
        if self.alpha < 1 or any(v.noise is None for v in erased):
            cause = (
                "it was fitted with rank_tol=, which may leave part of the association with the "
                "concept. Fit it again without rank_tol="
            )
            if self.alpha < 1:
                cause = (
                    f"part of the association with the concept remains (alpha = {self.alpha:.3g}). "
                    "Ask the report of the eraser with alpha = 1"
                )
            elif self.oracle is not None or self._is_quadratic:
                cause = "the map depends on labels. Use an eraser that maps all rows alike"
            raise InputError(f"there is no certificate of this eraser: {cause}")
        return {v.name: certificate(v.noise, delta) for v in erased if v.noise is not None}

    def _scaled(self, alpha: float) -> Report:
        """Return the report of the partial eraser, whose change is multiplied by `alpha`."""
        if alpha == 1:
            return self

        def variable(v: VariableReport) -> VariableReport:
            # For an erased variable with c = Cov(x, z), P_alpha c = (1 - alpha) c + alpha P c. P c
            # is 0 up to rounding error, unless rank_tol= leaves a part; the sum of the two norms is
            # then an upper bound.
            residual = alpha * v.residual + (1 - alpha if v.role == "erased" else 0.0)
            return dataclasses.replace(
                v, residual=residual, expected=None, expected_most=None, noise=None
            )

        held_out = self.held_out
        return dataclasses.replace(
            self,
            variables=tuple(variable(v) for v in self.variables),
            distortion=None if self.distortion is None else alpha**2 * self.distortion,
            held_out=held_out and HeldOut(alpha**2 * held_out.distortion, None, None, None),
            rho=None,
            sensitivity=None if self.sensitivity is None else alpha * self.sensitivity,
            alpha=alpha * self.alpha,
        )

    @property
    def _erases(self) -> bool:
        """Whether variables are erased; False for a repair."""
        return {v.role for v in self.variables} != {"kept"}

    @property
    def _is_diagonal(self) -> bool:
        """Whether the moments have variances in place of a covariance."""
        return self.diagonal is not None or self.solver == "diagonal"

    @property
    def _is_quadratic(self) -> bool:
        """Whether the eraser is that of :func:`splince_fast.quadratic`."""
        return self.method.endswith("QLEACE")

    @property
    def _effect(self) -> tuple[str, str]:
        """Two texts on the effect of the eraser: a table entry, and the end of a sentence."""
        if self.oracle is not None:
            return (
                "differences between labels; needs the label of each row",
                "moves each of them by its labels, which it needs for every row",
            )
        if self._is_quadratic:
            return (
                "differences of means and covariances between classes; needs the label of each row",
                "gives all classes one mean and one covariance; it maps each class by its own "
                "matrix, and needs the label of every row",
            )
        dimensions = f"{self.rank} of {self.n_features} dimensions"
        if not self._erases:
            return dimensions, f"changes the rows in {self.rank} direction(s)"
        if self.alpha == 1:
            return dimensions, f"removes {dimensions}"
        return (
            f"{self.alpha:.3g} of the deviation in {dimensions}; a linear probe still reads the "
            "concept",
            f"shrinks the deviation in {dimensions} by the fraction "
            f"{self.alpha:.3g}: a partial erasure",
        )

    def _facts(self) -> list[tuple[str, str]]:
        support = "not factored" if self.rank_covariance is None else f"rank {self.rank_covariance}"
        sample = ""
        if self.sampling is not None:
            sample = f", of {self.sampling.n_rows:,} sampled rows"
            if self.sampling.expected_excess is not None:
                sample += f" (expected excess {100 * self.sampling.expected_excess:.2g} %)"
        if self.diagonal is not None:
            sample += ", variances in its place"
        facts = [
            ("data", f"{self.n_rows:,} rows (weight {self.weight:,.10g}), d = {self.n_features}"),
            (
                "covariance",
                f"{support}, solver {self.solver}, shrinkage {self.shrinkage:.3g}{sample}",
            ),
            ("removed" if self._erases else "changed", self._effect[0]),
        ]
        distortion = "not measured; pass refine="
        if not self._is_diagonal:
            distortion = "below its rounding error"
        if self.distortion is not None:
            distortion = f"{100 * self.distortion:.3g} % of the variance"
        diagonal, oracle = self.diagonal, self.oracle
        if diagonal is not None and diagonal.passes is not None and diagonal.gain is not None:
            passes = f"{diagonal.passes} pass{'es' if diagonal.passes > 1 else ''}"
            distortion += f", after {passes} (the last pass reduced it by {diagonal.gain:.1%})"
        if self.distortion_leace is not None:
            distortion += f" (LEACE: {100 * self.distortion_leace:.3g} %)"
        if oracle is not None:
            distortion += f" (o-LEACE: {100 * oracle.distortion_leace:.3g} %)"
        facts.append(("distortion", distortion))
        if (held_out := self.held_out) is not None:
            text = f"changed {100 * held_out.distortion:.3g} %"
            if held_out.concept is not None and held_out.chance is not None:
                text += f", remaining R^2 {held_out.concept:.2g} (chance {held_out.chance:.2g})"
            if held_out.kept is not None:
                text += f", task kept {held_out.kept:.3g}"
            facts.append(("held-out rows", text))
        if expected := ", ".join(
            f"{v.name} {v.expected:.2g}{_at_most(v, ' (equal class covariances; at most {})')}"
            for v in self.variables
            if v.expected is not None
        ):
            facts.append(("new rows", f"expected remaining R^2 of {expected}"))
        if self.cosines:
            facts.append(("principal cosines", shortened((f"{c:.4f}" for c in self.cosines), 5)))
            facts.append(("amplification", f"{self.amplification:.4g}"))
        elif not self._erases:
            digits = f"{math.log10(self.amplification):.1f} digits lost"
            facts.append(("amplification", f"{self.amplification:.4g} ({digits})"))
        if self.strength < 1:
            facts.append(("strength", f"{self.strength:.3g} of the lost covariance restored"))
        if self.rho is not None:
            facts.append(("concept and task", f"rho = {self.rho:.4g}"))
        if oracle is not None and oracle.rho is not None:
            facts.append(("shared with the labels", f"rho_o = {oracle.rho:.4g}"))
        if self.sensitivity is not None:
            facts.append(
                ("sensitivity", f"float32 rounding moves rows by {self.sensitivity:.2g} deviations")
            )
        if self.dropped:
            facts.append(("dropped", f"{self.dropped} kept direction(s)"))
        if labels := "; ".join(v.label for v in self.variables if v.kind):
            facts.append(("read as", labels))
        facts += [("warning", text) for text in self.warnings]
        return facts

    def explain(self) -> str:
        """Return the report in sentences, with the meaning of each value for this eraser."""
        lines = [
            f"{self.method} was fitted to {self.n_rows:,} rows with {self.n_features} features and "
            f"{self._effect[1]}."
        ]
        if self.distortion is None and not self._is_diagonal:
            lines.append("The change of the rows (distortion) is below its rounding error.")
        elif self.distortion is None:
            lines.append(
                "The change of the rows (distortion) was not measured, because the moments keep no "
                "covariance. Pass refine=, the source of the rows."
            )
        else:
            minimum = self.distortion_leace
            if self.oracle is not None:
                minimum = self.oracle.distortion_leace
            comparison = ""
            if minimum is not None and self.method != "LEACE":
                baseline = "LEACE" if self.oracle is None else "o-LEACE"
                comparison = f"; {baseline} changes them by {100 * minimum:.3g} %"
            lines.append(
                f"It changes the rows by {100 * self.distortion:.3g} % of their variance "
                f"(distortion){comparison}."
            )
            if minimum is not None and self.distortion > max(1.0, 2.0 * minimum):
                lines.append(
                    "To replace every row by the mean would change the rows by 100 %: the erased "
                    "variables nearly determine the kept ones. Limit the change with "
                    "max_amplification=, keep fewer variables, or use LEACE."
                )
        if self.held_out is not None:
            lines.append(
                f"It changes held-out rows by {100 * self.held_out.distortion:.3g} %. If this is "
                "far above the change of the fitted rows, the covariance is poorly estimated."
            )
        for v in self.variables:
            kind = f", read as {v.kind}," if v.kind else ""
            strength = f"{v.singular_values[0]:.3g}" if v.singular_values else "0"
            if v.role == "erased" and self.alpha < 1:
                at_most = "at most " if v.residual > 1.0 - self.alpha + v.bound else ""
                lines.append(
                    f"{v.name!r}{kind} keeps {at_most}the fraction {v.residual:.3g} of its "
                    "covariance with x. A linear probe that is fitted afterwards predicts it as "
                    "well as before; only alpha = 1 erases."
                )
            elif v.role == "erased" and self._is_quadratic:
                lines.append(
                    f"{v.name!r}{kind}: covariances of classes differ by {v.residual:.1e} after "
                    f"erasing (rounding explains {v.bound:.1e}): no quadratic predictor does "
                    "better than a constant on the fitted rows"
                    + (
                        " if the class covariances equal the shrunk ones."
                        if self.shrinkage
                        else "."
                    )
                )
            elif v.role == "erased" and v.residual > v.bound:
                lines.append(
                    f"{v.name!r}{kind} had a linear association of strength {strength}, and was "
                    f"erased in {v.rank} direction(s); {v.residual:.1e} of its covariance with x "
                    f"is left, more than rounding explains ({v.bound:.1e}): a linear predictor "
                    f"still predicts {v.name!r} (rank_tol)."
                )
            elif v.role == "erased":
                lines.append(
                    f"{v.name!r}{kind} had a linear association of strength {strength} in {v.rank} "
                    f"direction(s); {v.residual:.1e} of its covariance with x is left (rounding "
                    f"explains {v.bound:.1e}): no linear predictor does better than a constant on "
                    "the fitted rows."
                )
                if v.noise is not None:
                    lines.append(self._bound_in_words(v))
                if v.expected == 0 and self.rank != self.rank_covariance:
                    lines.append(f"No association of {v.name!r} beyond noise was measured.")
                elif v.expected is not None:
                    lines.append(
                        "In new rows of the same kind, a linear predictor is expected to explain "
                        f"{v.expected:.2g} of the variance of {v.name!r} (R^2), because the fit "
                        f"used only {self.n_rows:,} rows."
                        + _at_most(
                            v,
                            " This R^2 assumes equal covariances of the classes; for any "
                            "covariances, it is at most {}.",
                        )
                    )
            elif self._erases and (self.strength < 1 or v.residual > v.bound):
                lines.append(
                    f"{v.name!r}{kind} loses the fraction {v.residual:.2g} of its covariance with "
                    f"x{self._cause_of_loss(v)}."
                )
            elif self._erases:
                lines.append(
                    f"{v.name!r}{kind} keeps its covariance with x to {v.residual:.1e} (rounding "
                    f"explains {v.bound:.1e})."
                )
            else:
                lines.append(
                    f"{v.name!r}{kind}: the fraction {self.strength:.3g} of its lost covariance "
                    f"with x is restored, to {v.residual:.1e} (rounding explains {v.bound:.1e})."
                )
        if self.cosines:
            row = "a row" if self.rank_covariance is None else "a whitened row"
            if self.shrinkage:
                row = "a row, whitened by the shrunk covariance,"
            before = f" before {self.dropped} kept direction(s) were dropped" * bool(self.dropped)
            factor = self.alpha * largest_change(self.amplification, self.strength)
            lines.append(
                "The spans of the erased and the kept variables have a cosine of "
                f"{self.cosines[0]:.3g}{before}. {self.method} changes {row} by at most "
                f"{factor:.3g} times its length (amplification); without kept variables, the "
                f"factor is {self.alpha:.3g}."
            )
        elif not self._erases:
            lines.append(
                f"Deviations grow up to {self.amplification:.3g} times, and "
                f"{math.log10(self.amplification):.1f} digits of the rows are lost (amplification)."
            )
        if self.sensitivity is not None:
            lines.append(
                f"Rounding the rows to float32 changes the removed part by {self.sensitivity:.2g} "
                "of the deviation of the rows (sensitivity)."
            )
        if self.rank_covariance is not None and self.rank_covariance < self.n_features:
            lines.append(
                f"The features vary in {self.rank_covariance} of {self.n_features} dimensions; the "
                "others are constant, copies of others, or below the rounding level."
            )
        return "\n".join([*lines, *(f"Warning: {text}." for text in self.warnings)])

    def _cause_of_loss(self, v: VariableReport) -> str:
        """Return the end of a sentence: why part of the covariance of a kept variable is lost."""
        causes = []
        if self.strength < 1:
            eraser = "LEACE" if self.oracle is None else "o-LEACE"
            causes.append(
                f"{self.strength:.3g} of the covariance that {eraser} removes is restored "
                "(strength)"
            )
        if self.dropped:
            causes.append(f"{self.dropped} kept direction(s) were dropped")
        return ": " + ", and ".join(causes) if causes else f" (rounding explains {v.bound:.1e})"

    def _bound_in_words(self, v: VariableReport) -> str:
        """Return sentences that state `certificate` for one variable, with its assumptions."""
        limit = f"{self.certificate()[v.name]:.2g}"
        text = (
            "In 95 % of fits a linear predictor explains at most "
            f"{limit} of the variance of {v.name!r} in new rows of the same kind (certificate)."
        )
        if v.noise is None or v.noise.by_class:
            return text
        if v.kind.startswith("classes"):
            return (
                f"{text} The bound assumes that all classes have the same covariance; pass "
                f"Moments(by={v.name!r}) to drop this assumption."
            )
        return f"{text} The bound assumes the same deviation of x for all values of {v.name!r}."

    def __str__(self) -> str:
        facts = self._facts()
        title = "singular values" if self.rank_covariance is None else "correlations"
        for v in self.variables:
            values = shortened((f"{s:.3g}" for s in v.singular_values), 4)
            facts.append((v.role, f"{v.name}: rank {v.rank}, {title} [{values}], {v._exactness}"))
        return as_text(self.method, facts)

    def _repr_html_(self) -> str:
        rows = [(v.role, f"{v.name}: rank {v.rank}, {v._exactness}") for v in self.variables]
        return as_html(self.method, self._facts() + rows)


def largest_change(amplification: float, strength: float) -> float:
    """Return the largest change of a whitened row of unit length, for a strength b."""
    # In the plane of a principal angle t, the singular value of P_b - I is sqrt(1 + b^2 /
    # tan(t)^2), and `amplification` is 1 / sin(t).
    return math.hypot(1.0, strength * math.sqrt(max(0.0, amplification**2 - 1.0)))


def as_text(title: str, facts: Sequence[tuple[str, str]]) -> str:
    width = max(len(label) for label, _ in facts)
    return "\n".join([title, *(f"  {label:<{width}}  {text}" for label, text in facts)])


def as_html(title: str, facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for label, text in facts
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def shortened(texts: Iterable[str], count: int) -> str:
    """Join the first `count` texts by commas; an ellipsis stands for the rest."""
    texts = list(texts)
    return ", ".join(texts[:count]) + ", ..." * (len(texts) > count)


def _at_most(variable: VariableReport, text: str) -> str:
    """Insert `expected_most` of a variable into `text`; return "" if `expected_most` is None."""
    bound = variable.expected_most
    return "" if bound is None else text.format(f"{bound:.2g}")


def _from_plain(kind: Any, value: Any, name: str) -> Any:
    """Convert plain values to the annotated type `kind`: the inverse of dataclasses.asdict."""
    if get_origin(kind) is UnionType:  # kind is X | None
        return None if value is None else _from_plain(get_args(kind)[0], value, name)
    if get_origin(kind) is tuple:
        return tuple(_from_plain(get_args(kind)[0], item, name) for item in value)
    if hasattr(kind, "__dataclass_fields__"):
        kinds = get_type_hints(kind)
        return kind(**{key: _from_plain(kinds[key], item, key) for key, item in value.items()})
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
        raise FileFormatError(f"the field {name!r} of a report is {value!r}, not {kind.__name__}")
    if kind is float and isinstance(value, int) and abs(value) > 1 << 1023:
        raise FileFormatError(f"the field {name!r} of a report leaves the range of float")
    return value


def _is_possible(noise: Noise) -> bool:
    """Return whether all values of a :class:`Noise` from a file are in their valid ranges."""
    count = len(noise.taus)
    numbers = (noise.n, noise.ratio, *noise.taus, *noise.degrees, *noise.denominators)
    return (
        all(0 <= v < np.inf for v in numbers)
        and 0 < count == len(noise.degrees)
        and len(noise.denominators) in (0, count)
        and noise.n > 0
    )


class FitValues(NamedTuple):
    """Values of a report that are not in the :class:`Solution` of the solver."""

    method: str
    n_rows: int
    weight: float
    shrinkage: float
    whitened: bool
    distortion: float | None  # E|r(x) - x|^2; None if unknown
    distortion_leace: float | None  # E|r(x) - x|^2 of LEACE
    warnings: tuple[str, ...]
    variance: float  # tr Cov(x)
    sampling: Sampling | None
    diagonal: DiagonalCovariance | None
    sensitivity: float
    noises: tuple[Noise, ...]  # one per erased variable; empty if erasure is not complete
    strength: float
    feature_names: tuple[str, ...] | None


def build_report(
    fit: FitValues,
    solution: Solution,
    span_z: SpanLike,
    span_y: SpanLike,
    left: Float,
    right: Float,
) -> Report:
    """Build the report of a solution; `left` and `right` are the (r, d) factors of I - P."""
    d = left.shape[1]
    amplification = solution.amplification
    has_angles = fit.whitened and fit.diagonal is None
    kept = bool(span_y.names) and has_angles
    rho = max(0.0, 1.0 - 1.0 / amplification**2) if kept else None
    bound = solution.bound
    size = max(1.0, solution.size)  # |P|, which is 1 for the identity
    exact = fit.whitened and not fit.shrinkage
    n_erased = len(span_z.rows)
    variables = []
    for role, span, whitened, cut, rank in (
        ("erased", span_z, solution.whitened[:n_erased], solution.cut_z, solution.rank_z),
        ("kept", span_y, solution.whitened[n_erased:], solution.cut_y, solution.rank_y),
    ):
        start = 0
        # The rounding level of the singular values is `cut`, unless rank_tol= raised `cut`. Then
        # `noises` is empty, and the level is the value that `cut` has for rank_tol="auto".
        rounding = cut
        if not fit.noises:
            strongest = float(_singular_values(whitened).max(initial=0.0))
            rounding = max(solution.noise, tolerances.relative(d, "auto") * strongest)
        for i, (name, count) in enumerate(zip(span.names, span.counts, strict=True)):
            part = slice(start, start + count)
            values = _singular_values(whitened[part])
            n_used = rank if len(span.names) == 1 else int(np.count_nonzero(values > cut))
            residual = _residual(span.rows[part], left, right, role)
            unused = values[n_used:]
            complete = bool((unused <= rounding).all())
            not_erased = _relative_norm(unused[unused <= rounding], values)
            if solution.off_support is not None and role == "erased":
                off_support = float(np.linalg.norm(solution.off_support[part]))
                not_erased += off_support / float(np.linalg.norm(span.rows[part]))
            kind, whitener, largest_square, labelled = span.interpretations[i]()
            reported, expected, expected_most = values, None, None
            if fit.whitened:
                reported = _singular_values(whitener @ whitened[part])[: len(values)]
                if not kind.startswith("directions"):
                    reported = np.minimum(reported, 1.0)
                if role == "erased" and exact and has_angles and complete:
                    # The sample size is that of the labelled rows, which determine Cov(x, z).
                    n_labelled, rank_z = round(labelled * fit.weight), min(whitener.shape)
                    sizes = n_labelled, solution.rank_covariance, rank_z
                    correlations = np.minimum(reported / labelled**0.5, 1.0)
                    ratio = fit.noises[i].ratio if fit.noises else 1.0
                    # Only the noise orthogonal to all erased variables remains; that orthogonal to
                    # this variable has p - r_v dimensions.
                    remaining = solution.rank_covariance - solution.rank_z
                    share = remaining / max(1, solution.rank_covariance - rank_z)
                    expected = expected_r2(correlations, *sizes, share * ratio, ratio)
                    if largest_square is not None and not (fit.noises and fit.noises[i].by_class):
                        expected_most = expected_r2(correlations, *sizes, share * largest_square)
            variables.append(
                VariableReport(
                    name,
                    role,
                    n_used,
                    tuple(map(float, reported)),
                    residual,
                    bound + size * not_erased,
                    kind,
                    expected,
                    expected_most,
                    fit.noises[i] if role == "erased" and fit.noises else None,
                )
            )
            start += count
    scale = 1.0 / fit.variance if fit.variance else 0.0

    def fraction_of_variance(change: float | None) -> float | None:
        return None if change is None else change * scale

    return Report(
        method=fit.method,
        n_rows=fit.n_rows,
        weight=fit.weight,
        n_features=d,
        rank_covariance=solution.rank_covariance if fit.whitened else None,
        rank=len(left),
        variables=tuple(variables),
        dropped=solution.dropped,
        cosines=tuple(map(float, solution.cosines)),
        amplification=amplification,
        rho=rho,
        distortion=fraction_of_variance(fit.distortion),
        distortion_leace=fraction_of_variance(fit.distortion_leace) if exact else None,
        solver=solution.solver,
        tolerance=solution.noise,
        shrinkage=fit.shrinkage,
        warnings=fit.warnings,
        sampling=fit.sampling,
        diagonal=fit.diagonal,
        sensitivity=fit.sensitivity,
        strength=fit.strength,
    )


def correlations_of(
    span: SpanLike, whitened: Float
) -> Iterator[tuple[str, slice, str, tuple[float, ...]]]:
    """Yield the name, row slice, kind and canonical correlations of each variable in `span`."""
    # `whitened`, (k, d), holds the whitened rows of `span`, which the row slices index.
    start = 0
    for name, count, interpretation in zip(
        span.names, span.counts, span.interpretations, strict=True
    ):
        part = slice(start, start + count)
        kind, whitener = interpretation()[:2]
        values = np.linalg.svd(whitener @ whitened[part], compute_uv=False)[:count]
        yield name, part, kind, tuple(map(float, np.minimum(values, 1.0)))
        start += count


def _singular_values(rows: Float) -> Float:
    """Singular values of a (k, d) matrix in descending order; empty for an empty matrix."""
    if not rows.size:
        return np.zeros(0)
    return np.asarray(np.linalg.svd(rows, compute_uv=False), dtype=np.float64)


def _residual(span: Float, left: Float, right: Float, role: str) -> float:
    """Relative residual of one variable, whose rows Cov(x, v_j) are `span`."""
    size = float(np.linalg.norm(span))
    removed = (span @ right.T) @ left
    remaining = removed if role == "kept" else span - removed
    return float(np.linalg.norm(remaining)) / size if size else 0.0


def _relative_norm(part: Float, total: Float) -> float:
    """|part| / |total|, at most 1; 0 if `part` is empty or `total` is 0."""
    size = float(np.linalg.norm(total))
    if not len(part) or not size:
        return 0.0
    return min(1.0, float(np.linalg.norm(part)) / size)
