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
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve import tolerances
from splince_fast._solve.held_out import Noise, certificate, expected_r2
from splince_fast._solve.options import is_number
from splince_fast.exceptions import FileFormatError, InputError

if TYPE_CHECKING:
    from splince_fast._solve.oblique import Solution
    from splince_fast._solve.selection import Interpretation, Span

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class VariableReport:
    """One erased or kept variable."""

    name: str
    role: str  #: "erased" or "kept"
    rank: int  #: Rank of Cov(x, v) for this variable v, at the rounding level of the data.
    #: Canonical correlations of x with the variable, the singular values of
    #: L^+ Cov(x, v) Cov(v)^{-1/2} with Cov(x) = L L^T; missing labels count as rows at the mean.
    #: Without whitening: of Cov(x, v), v in units of its standard deviation. For kept directions:
    #: of the whitened directions.
    singular_values: tuple[float, ...]
    #: |P Cov(x, z)| / |Cov(x, z)| for an erased variable, |P Cov(x, y) - Cov(x, y)| / |Cov(x, y)|
    #: for a kept variable (Frobenius norms); an upper bound with ``rank_tol=`` and for
    #: :meth:`Projection.scaled`. For `oracle`, `quadratic` and `repair`: largest such ratio over
    #: the features, in units of their standard deviations. For an erased variable of `quadratic`:
    #: largest difference between entries of class covariances. For `repair` with the strength b:
    #: |Cov(r, y) - Cov(t, y) - b X| / |Cov(x, y)|, for the rows t before and r after the repair and
    #: X = Cov(x, y) - Cov(t, y).
    residual: float
    #: Rounding level of `residual`: 8 d eps q |P|^2, and the part of the covariance that is not
    #: erased because it is below the rounding level of Cov(x). q is the condition number of the
    #: whitened cross-covariances, |P| the spectral norm with features scaled to unit standard
    #: deviation. With a `residual` far above it, part of a kept variable was dropped, or part of an
    #: erased variable remains (``rank_tol=``).
    bound: float
    kind: str = ""  #: "classes (4)", "continuous (1 column)" or "directions (2)", for example.
    #: Erased variable: expected R^2 of the best linear predictor in held-out rows of the same
    #: distribution, about (d - r) / n for n rows and the joint rank r of all erased variables.
    #: Assumes equal class covariances, unless the moments were made ``by`` the variable; for a
    #: continuous variable, the same deviation of x at all values. None without whitening, with
    #: shrinkage or ``covariance_type="diag"``, for fewer rows than dimensions, and if ``rank_tol=``
    #: leaves part of the association.
    expected: float | None = None
    #: Classes: upper bound of `expected` for any class covariances, which allows (1 - p) / p times
    #: the noise, with p the fraction of the rarest class; None for moments made ``by`` it.
    expected_most: float | None = None
    #: Erased variable: sampling noise of Cov(x, v), for :meth:`Report.certificate`; None if part of
    #: the association is left.
    noise: Noise | None = None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Effect of erasers on held-out rows: means over folds (:func:`splince_fast.cross_report`)."""

    distortion: float  #: Mean squared change of the rows, as a fraction of their total variance.
    concept: float | None  #: R^2 of the concept after erasure; None for a partial eraser.
    chance: float | None  #: Mean of `concept` for random labels; None for a partial eraser.
    #: Fraction of the covariance with the kept variables that is preserved; None without kept
    #: variables and for a partial eraser.
    kept: float | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sample of rows from which Cov(x) was estimated, for moments made with ``subsample=``."""

    n_rows: int  #: Number of sampled rows.
    #: Expected relative increase of `distortion`, compared with the eraser that is fitted to all
    #: rows. None for SAL, and with shrinkage.
    expected_excess: float | None


@dataclass(frozen=True, slots=True)
class DiagonalCovariance:
    """Passes over the rows for moments made with ``covariance_type="diag"``.

    The `singular_values` of the variables are estimates, because the variances replace Cov(x).
    """

    #: Number of passes of ``refine=`` over the rows, after which `distortion` is exact; None
    #: without ``refine=``.
    passes: int | None
    gain: float | None  #: Relative decrease of the distortion in the last pass.


@dataclass(frozen=True, slots=True)
class OracleFit:
    """Values in the report of :func:`splince_fast.oracle` only."""

    #: D_oL: distortion of o-LEACE, the smallest possible for an eraser that uses the labels z.
    distortion_leace: float
    #: Largest rho_o over all linear combinations u of the kept columns: the variance of u that z
    #: predicts, divided by the variance of u that x and z predict together. For single columns z
    #: and y, rho_o = corr(z, y)^2 / R^2(y given x, z), and `distortion` is D_oL / (1 - rho_o). None
    #: without kept variables, and with shrinkage: the map is then not that of the least change.
    rho: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Effect of an eraser on the rows that it was fitted to.

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

    method: str  #: Name of the method.
    n_rows: int  #: Number of fitted rows.
    weight: float  #: Weight sum of the fitted rows.
    n_features: int  #: Number of features.
    #: Rank of Cov(x) at its rounding level; None if Cov(x) was not factored (SAL).
    rank_covariance: int | None
    #: Number of removed dimensions; with ``null_space="drop"`` it includes the dimensions outside
    #: the range of Cov(x).
    rank: int
    variables: tuple[VariableReport, ...]  #: Erased and kept variables.
    #: Number of kept directions that were dropped because they lie too close to erased directions.
    dropped: int
    #: Cosines of the principal angles between the whitened spans of the erased and of the kept
    #: variables, before any direction was dropped.
    cosines: tuple[float, ...]
    #: a = 1 / sin of the smallest principal angle that remains after directions were dropped, the
    #: norm of the whitened projection. Erasing changes a centred row, whitened by the factored
    #: covariance, by at most ``alpha * sqrt(1 + strength**2 * (a**2 - 1))`` times its length. For
    #: `repair`, `oracle` and `quadratic`: spectral norm of the linear map, the largest over
    #: classes, with each feature in units of its standard deviation; its log10 is the number of
    #: digits lost.
    amplification: float
    #: Squared cosine of the smallest whitened angle between the erased and the remaining kept
    #: directions: the squared correlation of the best linear predictions of concept and task. None
    #: without kept variables, without whitening, and with ``covariance_type="diag"``.
    rho: float | None
    #: E|r(x) - x|^2 / tr Cov(x); with ``subsample=``, an estimate for all rows. None below its
    #: rounding error, and with ``covariance_type="diag"`` but without ``refine=``.
    distortion: float | None
    #: The same for LEACE with the same moments and erased variables; None with
    #: ``covariance_type="diag"``, with shrinkage, and for SAL and repair.
    distortion_leace: float | None
    #: Factorisation of the covariance: "cholesky", "eigh", "diagonal", "refined" or "none".
    solver: str
    #: Rounding level in units of correlation; a smaller correlation counts as 0.
    tolerance: float
    shrinkage: float  #: Weight of the isotropic target in the factored covariance.
    warnings: tuple[str, ...]  #: Texts of the warnings of the fit.
    #: Change of the removed part (P - I) x when x is rounded to float32, relative to the standard
    #: deviation s of x: 2^-23 rms(x) |P - I|_F / s, with s^2 = tr Cov(x). None for erasers that use
    #: labels.
    sensitivity: float | None = None
    #: Fraction of the change that is applied: 1, or the `alpha` of :meth:`Projection.scaled`, which
    #: removes no dimension entirely; a linear probe then still recovers the variables.
    alpha: float = 1.0
    #: Fraction of the removed covariance with the kept variables that is restored.
    strength: float = 1.0
    held_out: HeldOut | None = None  #: Effect on held-out rows, for moments with folds.
    sampling: Sampling | None = None  #: None if the covariance is that of all rows.
    diagonal: DiagonalCovariance | None = None  #: For moments with ``covariance_type="diag"``.
    oracle: OracleFit | None = None  #: Values of :func:`splince_fast.oracle` only.

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
            A field is missing, unknown or of another type.
        """
        try:
            new: Report = _from_plain(cls, values, "report")
        except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise FileFormatError(f"a report has missing or wrong fields: {error}") from error
        if not all(v.noise is None or _is_possible(v.noise) for v in new.variables):
            raise FileFormatError("the noise of a variable has values out of range")
        return new

    def certificate(self, delta: float = 0.05) -> dict[str, float]:
        """Return an upper bound of the held-out R^2 of linear predictors of each erased variable.

        The bound holds for every map P with P Cov(x, z) = 0 in the fitted rows, whatever the
        method, asymptotically, and for rows of the same distribution; ``docs/theory.md`` derives
        it. It assumes equal class covariances, unless the moments were made ``by`` the variable,
        and for a continuous variable residuals of constant variance of its regression on x.

        Parameters
        ----------
        delta : float in (0, 1)
            Fraction of fits in which the bound of a variable may fail.

        Returns
        -------
        dict of str to float
            Bound for each variable, for all its classes or columns at once.

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
        erased = self._with_role("erased")
        cause = ""
        if not erased:
            cause = f"{self.method} erases nothing itself; ask the report of the eraser"
        elif self.alpha < 1:
            cause = (
                f"part of the association is left (alpha = {self.alpha:.3g}); ask the report of "
                "the eraser with alpha = 1"
            )
        elif self.oracle is not None or self._is_quadratic:
            cause = "the map depends on labels; use an eraser that maps all rows alike"
        elif any(v.noise is None for v in erased):
            cause = "rank_tol= may leave part of the association; fit again without rank_tol="
        if cause:
            raise InputError(f"there is no certificate of this eraser: {cause}")
        return {v.name: certificate(v.noise, delta) for v in erased if v.noise is not None}

    def _scaled(self, alpha: float) -> Report:
        """Return the report of the partial eraser, whose change is multiplied by `alpha`."""
        if alpha == 1:
            return self
        # P_alpha c = (1 - alpha) c + alpha P c for c = Cov(x, z): the sum of the norms is an upper
        # bound, and exact to rounding unless rank_tol= leaves a part.
        variables = (
            dataclasses.replace(
                v,
                residual=alpha * v.residual + (1 - alpha if v.role == "erased" else 0.0),
                expected=None, expected_most=None, noise=None,
            )
            for v in self.variables
        )  # fmt: skip
        held_out = self.held_out
        return dataclasses.replace(
            self,
            variables=tuple(variables),
            distortion=None if self.distortion is None else alpha**2 * self.distortion,
            held_out=held_out and HeldOut(alpha**2 * held_out.distortion, None, None, None),
            rho=None,
            sensitivity=None if self.sensitivity is None else alpha * self.sensitivity,
            alpha=alpha * self.alpha,
        )

    def _with_role(self, role: str) -> list[VariableReport]:
        return [v for v in self.variables if v.role == role]

    @property
    def _erases(self) -> bool:
        """Whether variables are erased; False for a repair."""
        return {v.role for v in self.variables} != {"kept"}

    @property
    def _is_quadratic(self) -> bool:
        return self.method.endswith("QLEACE")

    @property
    def _least_change(self) -> tuple[str, float | None]:
        """Name and distortion of the eraser of the least change."""
        if self.oracle is not None:
            return "o-LEACE", self.oracle.distortion_leace
        return "LEACE", self.distortion_leace

    def explain(self) -> str:
        """Return a verdict on each erased variable, at most six sentences, and the warnings."""
        verdicts = [f"{_verdict(self, v)}." for v in self._with_role("erased") or self.variables]
        sentences = [
            sentence.format(r=self, text=text)
            for _, make, sentence in FACTS
            if sentence and (text := make(self))
        ]
        kept = "; ".join(_kept(self, v) for v in self._with_role("kept") if self._erases)
        warnings = [f"Warning: {text}." for text in self.warnings]
        return "\n".join([*verdicts, *sentences, *[f"{kept}."] * bool(kept), *warnings])

    def _rows(self) -> list[tuple[str, str]]:
        """Rows of the table: label and text."""
        title = "singular values" if self.rank_covariance is None else "correlations"
        rows = [(label, text) for label, make, _ in FACTS if (text := make(self))]
        rows += [("warning", text) for text in self.warnings]
        for v in self.variables:
            values = shortened((f"{s:.3g}" for s in v.singular_values), 4)
            residual = f"residual {v.residual:.1e} (rounding {v.bound:.1e})"
            rows.append((v.role, f"{v.name}: rank {v.rank}, {title} [{values}], {residual}"))
        return rows

    def __str__(self) -> str:
        return as_text(self.method, self._rows())

    def _repr_html_(self) -> str:
        return as_html(self.method, self._rows())


# -- the report in words and as a table ------------------------------------------------------------


def _data(r: Report) -> str:
    weight = "" if r.weight == r.n_rows else f" of weight {r.weight:,.10g}"
    return f"{r.n_rows:,} rows{weight} with {r.n_features} feature{'s' * (r.n_features != 1)}"


def _covariance(r: Report) -> str:
    support = "not factored" if r.rank_covariance is None else f"rank {r.rank_covariance}"
    text = f"{support}, solver {r.solver}, shrinkage {r.shrinkage:.3g}"
    if r.sampling is not None:
        text += f", of {r.sampling.n_rows:,} sampled rows"
        if r.sampling.expected_excess is not None:
            text += f" (expected excess {100 * r.sampling.expected_excess:.2g} %)"
    return text + ", variances in its place" * (r.diagonal is not None)


def _effect(r: Report) -> str:
    if r.oracle is not None or r._is_quadratic:
        of_classes = "" if r.oracle is not None else "of means and covariances "
        parts = "classes" if of_classes else "labels"
        return f"differences {of_classes}between {parts}, and needs the label of every row"
    text = f"{r.rank} of {r.n_features} dimensions"
    if r.alpha == 1:
        return text
    return f"{r.alpha:.3g} of the deviation in {text}; a linear probe still reads the concept"


def _distortion(r: Report) -> str:
    if r.distortion is not None:
        text = f"{100 * r.distortion:.3g} % of the variance"
    elif r.diagonal is not None or r.solver == "diagonal":
        text = "not measured; pass refine=, the source of the rows"
    else:
        text = "below its rounding error"
    if r.diagonal is not None and r.diagonal.passes and r.diagonal.gain is not None:
        text += (
            f", after {r.diagonal.passes} pass{'es' * (r.diagonal.passes > 1)} (the last pass "
            f"reduced it by {r.diagonal.gain:.1%})"
        )
    name, least = r._least_change
    if least is not None:
        text += f" ({name}: {100 * least:.3g} %)"
        if r.distortion is not None and r.distortion > max(1.0, 2.0 * least):
            text += "; more than the mean in place of every row: limit it by max_amplification="
    return text


def _held_out(r: Report) -> str:
    if r.held_out is None:
        return ""
    distortion, concept, chance, kept = dataclasses.astuple(r.held_out)
    text = f"changed {100 * distortion:.3g} %"
    if concept is not None and chance is not None:
        text += f", remaining R^2 {concept:.2g} (chance {chance:.2g})"
    return text if kept is None else f"{text}, task kept {kept:.3g}"


def _new_rows(r: Report) -> str:
    texts = []
    for v in r.variables:
        if v.expected is not None:
            most = v.expected_most
            given = "" if most is None else f" (equal class covariances; at most {most:.2g})"
            texts.append(f"{v.name} {v.expected:.2g}{given}")
    return f"expected remaining R^2 of {', '.join(texts)}" if texts else ""


def _certificate(r: Report) -> str:
    texts = []
    for v in r.variables:
        if v.noise is None or v.residual > v.bound:
            continue
        given = " (for equal deviations of x at all values)"
        if v.kind.startswith("classes"):
            given = f" (for equal covariances of the classes; for any with Moments(by={v.name!r}))"
        limit = f"{certificate(v.noise, 0.05):.2g} of the variance of {v.name!r}"
        texts.append(f"{limit} in new rows{given * (not v.noise.by_class)}")
    return ", ".join(texts)


def _amplification(r: Report) -> str:
    if not r.cosines:
        if r._erases:
            return ""
        return f"{r.amplification:.4g} ({math.log10(r.amplification):.1f} digits lost)"
    row = "a row, whitened by the shrunk covariance," if r.shrinkage else "a whitened row"
    change = r.alpha * largest_change(r.amplification, r.strength)
    return (
        f"{r.amplification:.4g}; {row if r.rank_covariance is not None else 'a row'} moves by at "
        f"most {change:.3g} times its length (without kept variables: {r.alpha:.3g})"
    )


# A larger bound of the rounding error does not show that a covariance is erased or kept.
_VERIFIED = 0.1


def _verdict(r: Report, v: VariableReport) -> str:
    """State whether a variable is erased, and the R^2 that new rows will show of it."""
    if v.role == "kept":
        return f"{v.name!r} regains the fraction {r.strength:.3g} of the covariance that it lost"
    if r.alpha < 1:
        at_most = "at most " if v.residual > 1.0 - r.alpha + v.bound else ""
        return (
            f"{v.name!r} is not erased: it keeps {at_most}the fraction {v.residual:.3g} of its "
            "covariance with x, and a linear probe predicts it as well as before"
        )
    if v.residual > v.bound:
        return (
            f"{v.name!r} is not erased entirely: the fraction {v.residual:.1e} of its covariance "
            "with x is left, and a linear predictor can use it"
        )
    if v.bound > _VERIFIED:
        return (
            f"whether {v.name!r} is erased is not verified: rounding errors may leave the fraction "
            f"{min(v.bound, 1.0):.1e} of its covariance with x"
        )
    if not v.rank:
        return f"{v.name!r} had no linear association with these rows above rounding"
    text = f"{v.name!r} is erased {_exactly(v)} from these rows"
    if r._is_quadratic:
        given = " if the class covariances equal the shrunk ones" if r.shrinkage else ""
        return f"{text}: no quadratic predictor does better than a constant{given}"
    text += ": no linear predictor does better than a constant"
    if v.expected is None:
        return text
    if v.expected == 0 and r.rank != r.rank_covariance:
        return f"{text}; no association of {v.name!r} beyond noise was measured"
    text += f"; new rows will show R^2 of about {v.expected:.2g} of it"
    if v.expected_most is None:
        return text
    return f"{text}, and at most {v.expected_most:.2g} if its classes have other covariances"


def _exactly(v: VariableReport) -> str:
    # R^2 of a predictor is at most of the order of the squared residual.
    return "exactly" if v.bound < 1e-6 else f"up to rounding ({v.bound:.1e})"


def _kept(r: Report, v: VariableReport) -> str:
    """State how exactly a kept variable keeps its covariance, or its loss with the causes."""
    if r.strength == 1 and v.residual <= v.bound:
        return f"{v.name!r} keeps its covariance with x {_exactly(v)}"
    causes = [f"{r.dropped} kept direction(s) were dropped"] * bool(r.dropped)
    if r.strength < 1:
        removed = f"{r.strength:.3g} of the covariance that {r._least_change[0]} removes"
        causes.append(f"{removed} is restored (strength)")
    cause = f": {', and '.join(causes)}" if causes else ""
    return f"{v.name!r} loses the fraction {v.residual:.2g} of its covariance with x{cause}"


def _shown(text: str, value: float | None) -> str:
    return "" if value is None else text.format(value)


# Label, text, and sentence of each figure; a figure without text is left out of the report.
FACTS: tuple[tuple[str, Callable[[Report], str], str], ...] = (
    ("data", _data, "{r.method} was fitted to {text}."),
    ("covariance", _covariance, ""),
    ("removed", lambda r: _effect(r) * r._erases, "It removes {text}."),
    ("changed", lambda r: _effect(r) * (not r._erases), "It changes {text}."),
    ("distortion", _distortion, "Change of the rows (distortion): {text}."),
    ("held-out rows", _held_out, "On held-out rows: {text}."),
    ("new rows", _new_rows, ""),
    ("certificate", _certificate, "In 95 % of fits a linear predictor explains at most {text}."),
    ("principal cosines", lambda r: shortened((f"{c:.4f}" for c in r.cosines), 5), ""),
    ("amplification", _amplification, ""),
    ("strength", lambda r: f"{r.strength:.3g} of the lost covariance" * (r.strength < 1), ""),
    ("concept and task", lambda r: _shown("rho = {:.4g}", r.rho), ""),
    ("shared with the labels", lambda r: _shown("rho_o = {:.4g}", r.oracle.rho) if r.oracle else "",
     ""),
    ("sensitivity", lambda r: _shown("float32 rounding moves rows by {:.2g} deviations",
                                     r.sensitivity), ""),
    ("dropped", lambda r: f"{r.dropped} of the kept direction(s)" * bool(r.dropped), ""),
    ("read as", lambda r: "; ".join(f"{v.name}: {v.kind}" for v in r.variables if v.kind), ""),
)  # fmt: skip


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


def largest_change(amplification: float, strength: float) -> float:
    """Return the largest change of a whitened row of unit length, for a strength b."""
    # In the plane of a principal angle t, the singular value of P_b - I is sqrt(1 + b^2 /
    # tan(t)^2), and `amplification` is 1 / sin(t).
    return math.hypot(1.0, strength * math.sqrt(max(0.0, amplification**2 - 1.0)))


# -- from plain values -----------------------------------------------------------------------------


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
    return float(value) if kind is float else value


def _is_possible(noise: Noise) -> bool:
    """Return whether all values of a :class:`Noise` from a file are in their valid ranges."""
    count, denominators = len(noise.taus), noise.denominators
    numbers = (noise.ratio, *noise.taus, *noise.degrees, *denominators)
    lengths_fit = 0 < count == len(noise.degrees) and len(denominators) in (0, count)
    return lengths_fit and 0 < noise.n < np.inf and all(0 <= v < np.inf for v in numbers)


# -- from a solution -------------------------------------------------------------------------------


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
    strength: float
    noises: tuple[Noise, ...] = ()  # one per erased variable; empty if erasure is not complete


def build_report(
    fit: FitValues, solution: Solution, span_z: Span, span_y: Span, left: Float, right: Float
) -> Report:
    """Build the report of a solution; `left` and `right` are the (r, d) factors of I - P."""
    amplification = solution.amplification
    kept = bool(span_y.names) and fit.whitened and fit.diagonal is None
    scale = 1.0 / fit.variance if fit.variance else 0.0
    least = fit.distortion_leace if fit.whitened and not fit.shrinkage else None
    fractions = [None if c is None else c * scale for c in (fit.distortion, least)]
    return Report(
        method=fit.method,
        n_rows=fit.n_rows,
        weight=fit.weight,
        n_features=left.shape[1],
        rank_covariance=solution.rank_covariance if fit.whitened else None,
        rank=len(left),
        variables=(
            *_variables("erased", fit, solution, span_z, left, right),
            *_variables("kept", fit, solution, span_y, left, right),
        ),
        dropped=solution.dropped,
        cosines=tuple(map(float, solution.cosines)),
        amplification=amplification,
        rho=max(0.0, 1.0 - 1.0 / amplification**2) if kept else None,
        distortion=fractions[0],
        distortion_leace=fractions[1],
        solver=solution.solver,
        tolerance=solution.noise,
        shrinkage=fit.shrinkage,
        warnings=fit.warnings,
        sampling=fit.sampling,
        diagonal=fit.diagonal,
        sensitivity=fit.sensitivity,
        strength=fit.strength,
    )


def _variables(
    role: str, fit: FitValues, solution: Solution, span: Span, left: Float, right: Float
) -> Iterator[VariableReport]:
    """Yield the report of each variable of a span."""
    is_erased, k = role == "erased", len(span.rows)
    first = 0 if is_erased else len(solution.whitened) - k
    whitened = solution.whitened[first : first + k]
    cut, rank = solution.cut_y, solution.rank_y
    if is_erased:
        cut, rank = solution.cut_z, solution.rank_z
    # The rounding level of the singular values is `cut`, unless rank_tol= raised `cut`. Then
    # `noises` is empty, and the level is the value that `cut` has for rank_tol="auto".
    rounding = cut
    if not fit.noises:
        strongest = float(_singular_values(whitened).max(initial=0.0))
        rounding = max(solution.noise, tolerances.relative(left.shape[1], "auto") * strongest)
    for i, (name, part, interpretation) in enumerate(parts_of(span)):
        rows, values = span.rows[part], _singular_values(whitened[part])
        n_used = rank if len(span.names) == 1 else int(np.count_nonzero(values > cut))
        unused = values[n_used:]
        not_erased = min(1.0, _ratio(unused[unused <= rounding], values))
        reported = _correlations(interpretation, whitened[part]) if fit.whitened else values
        removed = (rows @ right.T) @ left
        noise, expected, expected_most = None, None, None
        if is_erased:
            noise = fit.noises[i] if fit.noises else None
            if solution.off_support is not None:
                not_erased += _ratio(solution.off_support[part], rows)
            is_estimated = fit.whitened and not fit.shrinkage and fit.diagonal is None
            if is_estimated and (unused <= rounding).all():
                expected, expected_most = _held_out_r2(
                    fit.weight, solution, interpretation, reported, noise
                )
        yield VariableReport(
            name,
            role,
            n_used,
            tuple(map(float, reported)),
            _ratio(rows - removed if is_erased else removed, rows),
            solution.bound + max(1.0, solution.size) * not_erased,  # |P| of the identity is 1
            interpretation.kind,
            expected,
            expected_most,
            noise,
        )


def _held_out_r2(
    weight: float, solution: Solution, interpretation: Interpretation, correlations: Float,
    noise: Noise | None,
) -> tuple[float | None, float | None]:  # fmt: skip
    """Return `expected` and `expected_most` of an erased variable."""
    # The sample size is that of the labelled rows, which determine Cov(x, z).
    labelled, rank_z = interpretation.labelled_fraction, min(interpretation.whitener.shape)
    sizes = round(labelled * weight), solution.rank_covariance, rank_z
    correlations = np.minimum(correlations / labelled**0.5, 1.0)
    ratio = 1.0 if noise is None else noise.ratio
    # Only the noise orthogonal to all erased variables remains; that orthogonal to this variable
    # has p - r_v dimensions.
    remaining = solution.rank_covariance - solution.rank_z
    fraction = remaining / max(1, solution.rank_covariance - rank_z)
    expected = expected_r2(correlations, *sizes, fraction * ratio, ratio)
    if interpretation.largest_square is None or (noise is not None and noise.by_class):
        return expected, None
    return expected, expected_r2(correlations, *sizes, fraction * interpretation.largest_square)


def _correlations(interpretation: Interpretation, whitened: Float) -> Float:
    """Return the canonical correlations of x with a variable, from its whitened span (k, d)."""
    values = _singular_values(interpretation.whitener @ whitened)[: min(whitened.shape)]
    return values if interpretation.kind.startswith("directions") else np.minimum(values, 1.0)


def correlations_of(
    span: Span, whitened: Float
) -> Iterator[tuple[str, slice, str, tuple[float, ...]]]:
    """Yield the name, row slice, kind and canonical correlations of each variable in `span`."""
    # `whitened`, (k, d), holds the whitened rows of `span`, which the row slices index.
    for name, part, interpretation in parts_of(span):
        values = _correlations(interpretation, whitened[part])
        yield name, part, interpretation.kind, tuple(map(float, values))


def parts_of(span: Span) -> Iterator[tuple[str, slice, Interpretation]]:
    """Yield the name, row slice and interpretation of each variable in `span`."""
    start = 0
    for name, count, make in zip(span.names, span.counts, span.interpretations, strict=True):
        yield name, slice(start, start + count), make()
        start += count


def _singular_values(rows: Float) -> Float:
    return np.asarray(np.linalg.svd(rows, compute_uv=False))


def _ratio(part: Float, whole: Float) -> float:
    """|part| / |whole|; 0 if `whole` is 0."""
    size = float(np.linalg.norm(whole))
    return float(np.linalg.norm(part)) / size if size else 0.0
