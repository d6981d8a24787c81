"""scikit-learn transformers that accumulate moments of rows and labels, and compute an eraser.

The mathematics is in :class:`~splince_fast.moments.Moments` and :mod:`splince_fast.methods`. The
variables to erase are passed as the keyword argument ``concept``, because ``y`` in a pipeline is
the task and must not silently become the concept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.model_selection import ParameterGrid
from sklearn.utils.validation import check_is_fitted

from splince_fast._runtime.arrays import as_weights, check_values
from splince_fast._runtime.keywords import check_names, described_type
from splince_fast._solve.options import Options, check_moment_options
from splince_fast._solve.selection import Selection
from splince_fast.conditional import ConditionalEraser
from splince_fast.estimators.base import ErasingTransformer, columns_by_name
from splince_fast.exceptions import (
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NotEnoughDataError,
    SplinceError,
)
from splince_fast.labels.names import listed
from splince_fast.labels.positions import check_index
from splince_fast.methods import leace, splince
from splince_fast.methods.oracle import oracle
from splince_fast.methods.table import METHODS
from splince_fast.moments import Folds, Moments
from splince_fast.moments.fold_rule import use_folds
from splince_fast.moments.moments import name_features
from splince_fast.moments.sampled import subsample_for
from splince_fast.moments.snapshot import Factored
from splince_fast.projection import Projection
from splince_fast.report import Report
from splince_fast.sources import from_arrays
from splince_fast.sources._arrays import check_length

__all__ = ["LEACE", "SAL", "SPLINCE", "MeanProjection", "OracleSPLINCE"]

Data: TypeAlias = Moments | Factored | Folds
Keep: TypeAlias = Selection | ArrayLike | None


class _Eraser(ErasingTransformer):
    """Base of the erasers; a subclass adds the parameters and the name of the method."""

    kinds: Mapping[str, str] | None
    subsample: float | str
    sketch_size: int | None
    passes: int = 0
    moments_: Moments
    erased_: Any
    kept_: Any
    _extendable: bool

    _method: ClassVar[str]
    _reports_held_out: ClassVar[bool] = True  # whether `fit` reports the effect on held-out rows
    _concept_kind: ClassVar[str | None] = None
    _sparse_advice = " Or pass sketch_size=0 or more: X may then be sparse."

    # With metadata routing, scikit-learn passes `concept` without `set_fit_request`.
    __metadata_request__fit: ClassVar = {"concept": True}
    __metadata_request__partial_fit: ClassVar = {"concept": True}

    # -- hooks of a subclass -----------------------------------------------------------

    def _compute_eraser(self, moments: Data, erase: Selection, keep: Keep, **refine: object) -> Any:
        """Compute the eraser; ``**refine`` are the arguments `refine` and `passes`, or none."""
        return METHODS[self._method].function(moments, erase=erase, **self._options(), **refine)

    def _options(self) -> dict[str, Any]:
        """Return the parameters of the estimator that are options of the method."""
        names = METHODS[self._method].options
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    @property
    def _accepts_sparse(self) -> bool:
        moments = getattr(self, "moments_", None)
        if self.sketch_size is not None:
            return True
        return moments is not None and moments.parameters.sketch_size is not None

    # -- fitting ---------------------------------------------------------------------------

    def fit(
        self,
        X: object,
        y: object = None,
        *,
        concept: object = None,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Fit to all rows at once, and discard any earlier fit.

        The eraser is fitted to all rows. If there are at least 200 rows and memory allows
        (:func:`splince_fast.moments.fold_rule.use_folds`), the rows are also split into two folds,
        from which the report states the effect on held-out rows. With `subsample` or `sketch_size`
        the report omits this effect, which would cost more than the fit; :class:`OracleSPLINCE`
        omits it always.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features); sparse with `sketch_size`
            At least two rows. `fit` reads X once, and `passes` more times, without copying or
            changing it.
        y : array-like of shape (n_samples,) or (n_samples, k), mapping or frame, optional
            Task. SPLINCE and OracleSPLINCE keep the covariance of X with y. The other estimators
            accept y, because a pipeline passes y to every step, but ignore it and keep no variable
            (`kept_` is None). With ``concept_from="y"``, y is the concept and no variable is kept.
        concept : array-like of shape (n_samples,) or (n_samples, k), mapping or frame
            Variables to erase; the variables of a mapping or frame are erased jointly. Rows with a
            missing label (None or NaN) still count in the statistics of X.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies.
        groups : array-like of shape (n_samples,), optional
            Groups, as strings or integers; all rows of a group are in the same fold. By default
            the fold of a row depends on a hash of its position. With `subsample`, `groups` is
            valid only for ``shrinkage="cv"``; with `sketch_size`, `groups` is invalid.

        Returns
        -------
        object
            The estimator itself; unchanged after an error.

        Raises
        ------
        InputError, NonFiniteError, LabelError
            The data, labels or parameters are invalid; the concept or the task is missing.
        NotEnoughDataError, ConstantVariableError, InfeasibleError
            As in :func:`splince_fast.splince`.
        """
        with self._restored_on_error():
            self.__dict__.pop("moments_", None)
            self._check_parameters(groups)
            check_index(X, groups, "groups")
            rows, erased, kept = self._read(X, y, concept, sample_weight, min_rows=2)
            parameters = self._begin_fit(erased, kept)
            n, d = rows.shape
            if groups is not None:  # without folds, nothing else checks the length of the groups
                check_length(groups, n, "groups", "X")
            exact = self.subsample == 1 and self.sketch_size is None
            split = self._needs_folds or (self._reports_held_out and exact and use_folds(n, d))
            parameters["subsample"] = subsample_for(self.subsample, n, d, "X", 2 if split else 1)
            moments: Moments | Folds
            if split:
                moments = _accumulate_folds(rows, erased | kept, sample_weight, groups, parameters)
            else:
                moments = Moments(**parameters)
                moments.update(rows, erased | kept, sample_weight=sample_weight)
            name_features(moments, self._column_names)
            if not moments.n_rows:
                raise NotEnoughDataError(
                    "every sample_weight is zero, so no row is left to fit to; give some rows a "
                    "positive weight"
                )
            refine = {}
            if self.passes:
                weight = None if sample_weight is None else as_weights(sample_weight, n)
                source = from_arrays(rows, sample_weight=weight)
                refine = {"refine": source, "passes": self.passes}
            self._projection = self._compute_eraser(moments, self.erased_, self.kept_, **refine)
            if isinstance(moments, Folds):
                moments = moments._total()
            self.moments_ = moments
        return self

    def partial_fit(
        self, X: Any, y: Any = None, *, concept: Any = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Add a block of rows of any size; any split into blocks gives the eraser of one ``fit``.

        The projection is computed on its first use after this call. Errors that depend on all rows,
        such as that for a concept with a single class, are raised at that time. All other errors
        are those of :meth:`fit`.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features); sparse with `sketch_size`
            Rows, possibly none.
        y : array-like, mapping or frame, optional
            Task, as in :meth:`fit`; every block must have the same variables.
        concept : array-like, mapping or frame
            Variables to erase, as in :meth:`fit`.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies.

        Returns
        -------
        object
            The estimator itself; unchanged after an error.

        Raises
        ------
        LabelError
            The variables, or their kinds, differ from those of earlier blocks.
        """
        with self._restored_on_error():
            self._check_extendable()
            self._check_parameters()
            self._check_incremental()
            rows, erased, kept = self._read(X, y, concept, sample_weight, min_rows=0)
            if self.__sklearn_is_fitted__():
                self._check_variables(list(erased), list(kept), LabelError)
            else:
                self.moments_ = Moments(**self._begin_fit(erased, kept))
            self.moments_.update(rows, erased | kept, sample_weight=sample_weight)
            name_features(self.moments_, getattr(self, "_column_names", None))
            self._projection = None
        return self

    def merge(self, other: Self) -> Self:
        """Add the rows of another estimator: ``a.merge(b)`` equals ``a`` fitted to both data sets.

        Parameters
        ----------
        other : estimator of the same class
            Estimator to add; not modified. Classes of labels are matched by name, so each
            estimator may lack classes of the other. The result has the parameters of this
            estimator, not of `other`.

        Returns
        -------
        object
            The estimator itself.

        Raises
        ------
        IncompatibleMomentsError
            The other estimator is of another class, or has other variables or features.
        NotFittedError
            One of the estimators is not fitted.
        """
        self._check_mergeable(other)
        for part in (self, other):
            part._check_extendable()
        self._check_incremental()
        self._check_variables(other.erased_, other.kept_, IncompatibleMomentsError)
        self.moments_ = self.moments_ + other.moments_
        self._projection = None
        return self

    def _read(
        self, X: object, y: object, concept: object, sample_weight: object, *, min_rows: int
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return the validated rows, the variables to erase and the variables to keep, by name."""
        first = not self.__sklearn_is_fitted__()
        check_index(X, y, "y")
        check_index(X, concept, "concept")
        check_index(X, sample_weight, "sample_weight")
        erased, kept = self._erased_and_kept(y, concept)
        return self._rows(X, reset=first, min_rows=min_rows), erased, kept

    def _begin_fit(self, erased: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        """Store the names of the variables of a new fit; return the arguments of its Moments."""
        kinds = self.kinds
        if self._concept_kind is not None:
            kinds = dict.fromkeys(erased, self._concept_kind) | dict(kinds or {})
        self.erased_, self.kept_ = list(erased), list(kept) or None
        self._extendable = True
        ledoit_wolf = getattr(self, "shrinkage", None) == "ledoit-wolf"
        return {
            "kinds": kinds, "ledoit_wolf": ledoit_wolf, "subsample": self.subsample, "sketch_size":
            self.sketch_size,
        }  # fmt: skip

    @property
    def _needs_folds(self) -> bool:
        """Whether a parameter is chosen by cross-validation, on folds."""
        return bool(getattr(self, "shrinkage", None) == "cv")

    def _check_incremental(self) -> None:
        """Raise InputError for parameters that need all rows at once, which only `fit` has."""
        if self._needs_folds:
            raise InputError(
                "shrinkage='cv' is chosen on folds, in fit only; pass the intensity that "
                "fit chose (report_.shrinkage), or 'oas'"
            )
        if self.passes:
            raise InputError(
                f"passes={self.passes} needs extra passes over the rows, which are possible in fit "
                "only; leave out passes, or fit Moments and pass refine= to the method"
            )
        if isinstance(self.subsample, str):
            raise InputError(
                "subsample='auto' depends on the number of all rows and is possible in fit only; "
                "pass a number, such as 22 * d / n for d features and about n rows"
            )

    def _erased_and_kept(self, y: object, concept: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the variables to erase and the variables to keep, each by name."""
        erased = self._concept_columns(y, concept)
        if self.concept_from == "y" or not self._keeps_task:
            return erased, {}
        if y is None and not self._needs_task:
            return erased, {}
        if y is None:
            self._refuse_missing_y("y is the task to keep; LEACE erases without a task")
        kept = columns_by_name(y, "task")
        if shared := erased.keys() & kept.keys():
            raise LabelError(
                f"the concept and y both hold a variable {min(shared, key=str)!r}; rename one, or "
                "leave it out of y if it is to be erased"
            )
        return erased, kept

    def _check_parameters(self, groups: ArrayLike | None = None) -> None:
        """Raise InputError for invalid parameters, before any row is read."""
        options = self._options()
        Options(**options)
        check_moment_options(
            self.subsample, self.sketch_size, self.passes, options.get("shrinkage"),
            options.get("solver", "auto"), groups,
        )  # fmt: skip
        self._check_concept_from()

    def _check_variables(self, erased: Any, kept: Any, error: type[SplinceError]) -> None:
        """Raise `error` unless the variables have the same names as in earlier blocks."""
        earlier, current = (
            [sorted(names or (), key=str) for names in pair]
            for pair in ((self.erased_, self.kept_), (erased, kept))
        )
        if earlier != current:
            before, now = (
                [listed(names) or "nothing" for names in pair] for pair in (earlier, current)
            )
            raise error(
                f"{type(self).__name__} was fitted to erase {before[0]} and keep {before[1]}; now "
                f"it gets {now[0]} and {now[1]}; pass the same variables under the same names"
            )

    def _check_extendable(self) -> None:
        """Raise InputError for an estimator that was made from moments, not from rows."""
        if not getattr(self, "_extendable", True):
            raise InputError(
                f"this {type(self).__name__} was made from moments; update or merge the moments, "
                "and call from_moments again"
            )

    # -- one pass, many erasers ------------------------------------------------------------

    @classmethod
    def from_moments(
        cls, moments: Moments, *, erase: Selection, keep: Keep = None, **params: object
    ) -> Self:
        """Fit from accumulated moments, without reading data.

        Parameters
        ----------
        moments : Moments
            Moments to fit to. They are copied, so later updates do not change the estimator.
        erase : str, tuple or list of them
            Variables to erase, as in :func:`splince_fast.splince`.
        keep : str, tuple, list of them or array of shape (d, k), optional
            Variables or directions to keep, for SPLINCE and OracleSPLINCE only.
        **params
            Parameters of the estimator.

        Returns
        -------
        object
            Fitted estimator. To add rows, update the moments and call `from_moments` again.

        Raises
        ------
        InputError
            `keep` is missing for SPLINCE, or passed to an estimator that keeps no variable.
        SplinceError
            As in :meth:`fit`.

        Examples
        --------
        >>> import numpy as np
        >>> import splince_fast as sf
        >>> rng = np.random.default_rng(0)
        >>> a, b = rng.integers(0, 2, size=(2, 200))
        >>> X = rng.normal(size=(200, 5)) + np.outer(a, [1, 1, 0, 0, 0])
        >>> moments = sf.Moments().update(X, {"a": a, "b": b})
        >>> sf.LEACE.from_moments(moments, erase=["a", "b"]).transform(X).shape
        (200, 5)
        """
        copy = _check_moments(moments).copy()
        return cls._unfitted(keep, params)._fit_from(copy, copy, erase, keep)

    @classmethod
    def search(
        cls, moments: Moments, grid: Mapping[str, object] | Sequence[Mapping[str, object]]
    ) -> list[Self]:
        """Fit every combination of a grid from the same moments, without reading data.

        Parameters
        ----------
        moments : Moments
            Moments to fit to. They are copied once, and the estimators share the copy.
        grid : mapping of str to list, or list of them
            Values to try for "erase", "keep" and the parameters of the estimator, in the format of
            :class:`sklearn.model_selection.ParameterGrid`.

        Returns
        -------
        list
            Fitted estimators in the order of the ParameterGrid. ``erased_``, ``kept_`` and
            ``get_params()`` identify an estimator, and ``report_`` states its cost.

        Raises
        ------
        InputError
            The grid is invalid, or a combination lacks "erase".
        SplinceError
            As in :meth:`from_moments`; a note of the error states the combination.

        Examples
        --------
        >>> import numpy as np
        >>> import splince_fast as sf
        >>> rng = np.random.default_rng(0)
        >>> z, y = rng.integers(0, 2, size=(2, 200))
        >>> X = rng.normal(size=(200, 5)) + np.outer(z, [1, 1, 0, 0, 0]) + np.outer(y, np.ones(5))
        >>> moments = sf.Moments().update(X, {"z": z, "y": y})
        >>> grid = {"erase": ["z"], "keep": ["y"], "shrinkage": [None, 0.1, "oas"]}
        >>> erasers = sf.SPLINCE.search(moments, grid)
        >>> min(erasers, key=lambda eraser: eraser.report_.distortion).shrinkage is None
        True
        """
        try:
            points = list(ParameterGrid(grid))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"the grid cannot be read: {error}. Pass a mapping of names to lists, or a list of "
                "such mappings"
            ) from error
        shared = _check_moments(moments).copy()
        estimators = []
        factored: dict[tuple[object, ...], Factored] = {}
        for point in points:
            params = dict(point)
            if "erase" not in params:
                raise InputError(f"the grid point {point} has no 'erase'; add it to the grid")
            try:
                erase, keep = params.pop("erase"), params.pop("keep", None)
                estimator = cls._unfitted(keep, params)
                method_input = estimator._method_input(shared, factored)
                estimators.append(estimator._fit_from(shared, method_input, erase, keep))
            except SplinceError as error:
                error.add_note(f"at the grid point {point}")
                raise
        return estimators

    @classmethod
    def from_folds(
        cls, folds: Sequence[Moments], *, erase: Selection, keep: Keep = None, **params: object
    ) -> list[Self]:
        """Fit, for each fold, an eraser to all other folds, from moments and without reading data.

        Parameters
        ----------
        folds : sequence of Moments
            Moments of two or more folds.
        erase, keep, **params
            As in :meth:`from_moments`.

        Returns
        -------
        list
            Fitted estimators; the i-th equals, up to rounding error, an estimator fitted to the
            rows of all folds except the i-th.

        Raises
        ------
        InputError
            There are fewer than two folds.
        SplinceError
            As in :meth:`from_moments`.

        Examples
        --------
        >>> import numpy as np
        >>> import splince_fast as sf
        >>> rng = np.random.default_rng(0)
        >>> z, X = rng.integers(0, 2, size=90), rng.normal(size=(90, 4))
        >>> rows = np.array_split(np.arange(90), 3)
        >>> folds = [sf.Moments().update(X[part], {"z": z[part]}) for part in rows]
        >>> [eraser.n_samples_seen_ for eraser in sf.LEACE.from_folds(folds, erase="z")]
        [60, 60, 60]
        """
        parts = [_check_moments(fold) for fold in folds] if isinstance(folds, Iterable) else []
        if len(parts) < 2:
            raise InputError(
                f"{len(parts)} fold(s) leave nothing to fit to; pass a sequence of two or more "
                "Moments"
            )
        total = sum(parts[1:], parts[0])
        others = [total - part for part in parts]
        return [cls._unfitted(keep, params)._fit_from(rest, rest, erase, keep) for rest in others]

    @classmethod
    def _unfitted(cls, keep: Keep, params: Mapping[str, object]) -> Self:
        """Return an unfitted estimator with parameters that are valid for a fit from moments."""
        variables = ("erase", "keep") if cls._keeps_task else ("erase",)
        check_names(params, (*variables, *cls._get_param_names()), cls.__name__)
        estimator = cls(**params)
        estimator._check_parameters()
        estimator._check_incremental()
        accumulation = {"kinds": None, "subsample": 1, "sketch_size": None}
        for name, default in accumulation.items():
            if getattr(estimator, name) != default:
                raise InputError(
                    f"{name} determines how moments are accumulated, and these are accumulated "
                    f"already; pass {name} to Moments"
                )
        if keep is None and cls._needs_task:
            raise InputError(
                "keep is missing: SPLINCE keeps a task; pass keep=, or use LEACE, which keeps none"
            )
        if keep is not None and not cls._keeps_task:
            raise InputError(f"{cls.__name__} keeps nothing; leave out keep=, or use SPLINCE")
        return estimator

    def _method_input(
        self, moments: Moments, factored: dict[tuple[object, ...], Factored]
    ) -> Moments | Factored:
        """Return the argument from which the method computes the eraser.

        If the method factors Cov(x), the argument is a snapshot of `moments` with factored Cov(x),
        which `factored` caches for estimators with the same covariance options. Otherwise the
        argument is `moments`.
        """
        if "solver" not in METHODS[self._method].options:
            return moments
        options = self._options()
        key = options["shrinkage"], options["solver"], options["min_scale"]
        if key not in factored:
            factored[key] = moments.factored(key[0], solver=key[1], min_scale=key[2])
        return factored[key]

    def _fit_from(
        self, moments: Moments, method_input: Moments | Factored, erase: Selection, keep: Keep
    ) -> Self:
        """Compute the eraser, and store `moments` and the fitted attributes.

        `method_input` is `moments`, or the snapshot of `moments` that `_method_input` returns.
        """
        self._projection = self._compute_eraser(method_input, erase, keep)
        self.moments_, self.erased_, self.kept_ = moments, erase, keep
        self.n_features_in_ = self._projection.n_features
        if moments.feature_names is not None:
            self.feature_names_in_ = np.array(moments.feature_names, object)
        self._extendable = False
        return self

    # -- fitted attributes -------------------------------------------------------------------

    def _solve(self) -> Projection:
        return cast(Projection, self._compute_eraser(self.moments_, self.erased_, self.kept_))

    @property
    def report_(self) -> Report:
        """Report with the erased and kept variables, and the cost; raises as `projection_`."""
        # Every method sets the report of its map, so that the report is not None.
        return cast(Report, self.projection_.report)

    @property
    def n_samples_seen_(self) -> int:
        """Number of fitted rows with positive weight."""
        check_is_fitted(self)
        return self.moments_.n_rows

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "moments_")


# The dataclass fields are the parameters of the estimator; the constructor only stores them.
@dataclass(kw_only=True, eq=False, repr=False)
class SPLINCE(_Eraser):
    """Erase a concept and keep the covariance of X with a task, changing X as little as possible.

    ``fit(X, y, concept=z)``: y is the task, z the concept. :func:`splince_fast.splince` describes
    the mathematics and the parameters in detail.

    Parameters
    ----------
    max_amplification : float, optional
        Largest allowed value of 1 / sin(angle), for the angle between a kept direction and the
        erased span. Kept directions with a larger value are dropped.
    on_infeasible : {"raise", "drop"}
        Action if kept directions lie in the erased span, up to rounding error: raise
        InfeasibleError, or drop these directions.
    null_space : {"keep", "drop"}
        Action on the component of rows outside the range of Cov(X): leave it unchanged, or set it
        to 0.
    shrinkage : float in [0, 1], "oas", "ledoit-wolf" or "cv", optional
        Intensity a: (1 - a) Cov(X) + a (tr Cov(X) / d) I is factored instead of Cov(X). "oas" and
        "ledoit-wolf" estimate the intensity; "cv" selects it by cross-validation, in `fit` only.
    rank_tol : "auto" or float in [0, 1)
        Directions of the concept are not erased if their singular value is below this fraction of
        the largest; "auto" is a fraction at the rounding level.
    solver : {"auto", "cholesky", "eigh"}
        Factorisation of the covariance.
    min_scale : "auto" or float in [0, 1)
        Features with a standard deviation below this fraction of the root mean square standard
        deviation are not whitened. The concept is erased from these features, too; see
        :func:`splince_fast.splince`.
    strength : float in [0, 1]
        LEACE removes a part of the covariance with the task. `strength` is the fraction of this
        part that is restored: 0 is LEACE, 1 keeps the full covariance with the task.
    subsample : float in (0, 1] or "auto"
        Fraction of the rows from which the covariance is estimated. With a small fraction, a fit
        costs little more than reading the rows. "auto" takes the smallest sample for which the
        expected distortion exceeds the minimum by at most about 5 percent. See :class:`Moments`.
    sketch_size : int, optional
        Number of columns of a sketch. For very many features, the sketch and the variances replace
        the d x d covariance; 0 keeps the variances only. With a sketch, X may be sparse. See
        :class:`Moments`.
    passes : int
        Number of extra passes of `fit` over X, which reduce the distortion; needs `sketch_size`.
    kinds : mapping of str to {"classes", "continuous"}, optional
        Kinds of the variables whose kind differs from the default. By default strings, bools and
        integers are classes, and floats are continuous. A single column is the variable "concept"
        or "task", even if the column has a name; columns of mappings and frames keep their names.
    concept_from : {None, "y"}
        With "y", the argument y of ``fit`` is the concept. Then no variable is kept, the map is
        that of LEACE, and ``report_.method`` is "LEACE".

    Attributes
    ----------
    projection_ : Projection
        Fitted map.
    moments_ : Moments
        Moments of the fitted rows and labels.
    report_ : Report
        Report with the erased and kept variables, and the cost.
    erased_, kept_ : list of str
        Names of the erased and kept variables; after :meth:`from_moments`, its arguments `erase`
        and `keep`.
    n_samples_seen_, n_features_in_ : int
        Number of fitted rows with positive weight, and number of features.
    feature_names_in_ : ndarray of str, shape (n_features_in_,)
        Names of the features, if X was a frame.

    See Also
    --------
    LEACE : Erase without keeping a task.

    Notes
    -----
    scikit-learn's cross-validation slices arrays and frames, but not mappings: pass several
    concepts as a frame.

    References
    ----------
    F. Holstege, S. Ravfogel, B. Wouters, "Preserving task-relevant information under linear
    concept removal", NeurIPS 2025, arXiv:2506.10703.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> from splince_fast import SPLINCE
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=400)
    >>> y = np.where(rng.random(400) < 0.8, z, 1 - z)
    >>> X = rng.normal(size=(400, 6)) + np.outer(z, np.eye(6)[0]) + np.outer(y, np.eye(6)[1])
    >>> clean = SPLINCE().fit(X, y, concept=z).transform(X)
    >>> bool(np.abs(clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)).max() < 1e-12)
    True
    >>> pipe = make_pipeline(SPLINCE(), LogisticRegression()).fit(X, y, splince__concept=z)
    >>> pipe.predict(X).shape
    (400,)
    """

    _keeps_task = _needs_task = True
    _method = "splince"

    max_amplification: float | None = None
    on_infeasible: str = "raise"
    null_space: str = "keep"
    shrinkage: float | str | None = None
    rank_tol: float | str = "auto"
    solver: str = "auto"
    min_scale: float | str = "auto"
    strength: float = 1
    subsample: float | str = 1.0
    sketch_size: int | None = None
    passes: int = 0
    kinds: Mapping[str, str] | None = None
    concept_from: str | None = None

    def _compute_eraser(
        self, moments: Data, erase: Selection, keep: Keep, **refine: Any
    ) -> Projection:
        options = self._options()
        if keep is not None:
            return splince(moments, erase=erase, keep=keep, **options, **refine)
        # Without a task, SPLINCE is LEACE, which has fewer options.
        options = {name: options[name] for name in METHODS["leace"].options}
        return leace(moments, erase=erase, **options, **refine)


@dataclass(kw_only=True, eq=False, repr=False)
class LEACE(_Eraser):
    """Erase a concept, changing X as little as possible (least-squares concept erasure).

    ``fit(X, concept=z)``; y is ignored. See :func:`splince_fast.leace`.

    Parameters
    ----------
    null_space, shrinkage, rank_tol, solver, min_scale
        As for :class:`SPLINCE`.
    subsample, sketch_size, passes, kinds, concept_from
        As for :class:`SPLINCE`.

    Attributes
    ----------
    projection_, moments_, report_, erased_, n_samples_seen_, n_features_in_, feature_names_in_
        As for :class:`SPLINCE`.

    See Also
    --------
    SPLINCE : Erase and keep a task.

    References
    ----------
    N. Belrose, D. Schneider-Joseph, S. Ravfogel, R. Cotterell, E. Raff, S. Biderman, "LEACE:
    Perfect linear concept erasure in closed form", NeurIPS 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import LEACE
    >>> rng = np.random.default_rng(0)
    >>> z = rng.choice(["a", "b", "c"], size=300)
    >>> X = rng.normal(size=(300, 5)) + (z == "a")[:, None]
    >>> eraser = LEACE()
    >>> for part in np.array_split(np.arange(300), 10):
    ...     eraser = eraser.partial_fit(X[part], concept=z[part])
    >>> eraser.projection_.rank
    2
    """

    _method = "leace"

    null_space: str = "keep"
    shrinkage: float | str | None = None
    rank_tol: float | str = "auto"
    solver: str = "auto"
    min_scale: float | str = "auto"
    subsample: float | str = 1.0
    sketch_size: int | None = None
    passes: int = 0
    kinds: Mapping[str, str] | None = None
    concept_from: str | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class SAL(_Eraser):
    """Erase a concept by the orthogonal projection that removes its cross-covariance with X.

    ``fit(X, concept=z)``; y is ignored. Unlike LEACE, SAL depends on the units of the features.
    See :func:`splince_fast.sal`.

    Parameters
    ----------
    rank_tol, subsample, sketch_size, kinds, concept_from
        As for :class:`SPLINCE`.

    Attributes
    ----------
    projection_, moments_, report_, erased_, n_samples_seen_, n_features_in_, feature_names_in_
        As for :class:`SPLINCE`.

    References
    ----------
    S. Shao, Y. Ziser, S. Cohen, "Gold doesn't always glitter: Spectral removal of linear and
    nonlinear guarded attribute information", EACL 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import SAL
    >>> rng = np.random.default_rng(0)
    >>> age = rng.normal(40, 10, size=200)
    >>> X = rng.normal(size=(200, 4)) + age[:, None] / 10
    >>> clean = SAL().fit_transform(X, concept=age)
    >>> bool(np.abs((clean - clean.mean(axis=0)).T @ (age - age.mean())).max() < 1e-9)
    True
    """

    _method = "sal"

    rank_tol: float | str = "auto"
    subsample: float | str = 1.0
    sketch_size: int | None = None
    kinds: Mapping[str, str] | None = None
    concept_from: str | None = None


class MeanProjection(SAL):
    """Erase classes by the orthogonal projection that removes the differences of the class means.

    ``fit(X, concept=z)``; y is ignored. The labels of the concept are read as classes, even if they
    are whole-number floats. See :func:`splince_fast.mean_projection`.

    Parameters
    ----------
    rank_tol, subsample, sketch_size, kinds, concept_from
        As for :class:`SPLINCE`.

    Attributes
    ----------
    projection_, moments_, report_, erased_, n_samples_seen_, n_features_in_, feature_names_in_
        As for :class:`SPLINCE`.

    References
    ----------
    P. Haghighatkhah, A. Fokkens, P. Sommerauer, B. Speckmann, K. Verbeek, "Better hit the nail
    on the head than beat around the bush: Removing protected attributes with a single
    projection", EMNLP 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import MeanProjection
    >>> rng = np.random.default_rng(0)
    >>> z = rng.choice(["f", "m"], size=200)
    >>> X = rng.normal(size=(200, 4)) + (z == "m")[:, None]
    >>> eraser = MeanProjection().fit(X, concept=z)
    >>> gap = X[z == "m"].mean(axis=0) - X[z == "f"].mean(axis=0)
    >>> bool(np.allclose(eraser.projection_.matrix() @ gap, 0))
    True
    """

    _method = "mean_projection"
    _concept_kind = "classes"


@dataclass(kw_only=True, eq=False, repr=False)
class OracleSPLINCE(_Eraser):
    """Erase a concept with a map that uses the label of each row, and keep Cov(X, task).

    ``fit(X, y, concept=z)``, ``transform(X, concept=z)``: `transform` needs the labels of the
    concept. The distortion is at most that of :class:`SPLINCE`. The use of labels may be unlawful
    if the concept is a protected attribute. See :func:`splince_fast.oracle`.

    Parameters
    ----------
    strength : float in [0, 1]
        Erasure removes a part of the covariance with the task. `strength` is the fraction of this
        part that is restored: 0 gives the same map as without y, 1 keeps the full covariance.
    missing : {"splince", "raise"}
        Action for rows without a label (None or NaN): erase with SPLINCE, or raise LabelError.
    classwise : bool
        Whether each class of a single concept has its own map. The distortion is then smaller, but
        the error on held-out rows is larger.
    kinds : mapping of str to {"classes", "continuous"}, optional
        As for :class:`SPLINCE`.

    Attributes
    ----------
    eraser_ : ConditionalEraser
        Fitted map, the same object as `projection_`.
    moments_, report_, erased_, kept_, n_samples_seen_, n_features_in_, feature_names_in_
        As for :class:`SPLINCE`.

    See Also
    --------
    SPLINCE : Erase and keep a task, without labels in `transform`.

    Notes
    -----
    A pipeline passes `concept` to `transform` if scikit-learn's metadata routing is enabled
    (``sklearn.set_config(enable_metadata_routing=True)``); ``set_transform_request`` is not needed.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import OracleSPLINCE
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=400)
    >>> y = np.where(rng.random(400) < 0.8, z, 1 - z)
    >>> X = rng.normal(size=(400, 6)) + np.outer(z, np.eye(6)[0]) + np.outer(y, np.eye(6)[1])
    >>> clean = OracleSPLINCE().fit(X, y, concept=z).transform(X, concept=z)
    >>> bool(np.abs(clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)).max() < 1e-12)
    True
    """

    __metadata_request__transform: ClassVar = {"concept": True}

    subsample = 1.0
    sketch_size = None
    concept_from = None
    _keeps_task = True
    _reports_held_out = False
    _sparse_advice = ""  # there is no parameter `sketch_size`
    _method = "oracle"

    strength: float = 1
    missing: str = "splince"
    classwise: bool = False
    kinds: Mapping[str, str] | None = None

    @property
    def eraser_(self) -> ConditionalEraser:
        """Fitted map, the same object as `projection_`; raises as `projection_`."""
        return cast(ConditionalEraser, self.projection_)

    def _begin_fit(self, erased: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        parameters = super()._begin_fit(erased, kept)
        # `oracle` raises InputError for `classwise` with a task and several variables to erase.
        if self.classwise and len(erased) == 1:
            parameters["by"] = next(iter(erased))
        return parameters

    def _compute_eraser(self, moments: Data, erase: Selection, keep: Keep, **refine: object) -> Any:
        return oracle(
            moments, erase=erase, keep=cast("Selection | None", keep),
            strength=self.strength,
            missing=self.missing, classwise=self.classwise,
        )  # fmt: skip

    def fit_transform(
        self, X: Any, y: Any = None, *, concept: Any = None, **fit_params: Any
    ) -> Any:
        """Fit to rows, and erase the concept from the same rows.

        Parameters
        ----------
        X, y, concept
            As in :meth:`fit`.
        **fit_params
            `sample_weight` and `groups` of :meth:`fit`.

        Returns
        -------
        ndarray of shape (n_samples, n_features)
            Erased rows, as from :meth:`transform`.
        """
        return self.fit(X, y, concept=concept, **fit_params).transform(X, concept=concept)

    def transform(self, X: Any, *, concept: Any = None) -> Any:
        """Erase the concept from rows, with a map that uses the labels of the rows.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Rows, possibly none.
        concept : array-like of shape (n_samples,) or (n_samples, k), mapping or frame
            Labels of the rows, as in :meth:`fit`. The parameter `missing` selects the action for
            rows without a label.

        Returns
        -------
        ndarray of shape (n_samples, n_features)
            Erased rows, as from `transform` of :class:`SPLINCE`.

        Raises
        ------
        NotFittedError
            The estimator is not fitted.
        InputError, NonFiniteError, LabelError
            `concept` is missing, or has a class that is not among the fitted classes; a row has no
            label and ``missing="raise"``; X has other features than the fitted rows, or contains
            NaN or infinity.
        """
        check_is_fitted(self)
        if concept is None:
            raise InputError(
                "OracleSPLINCE needs the concept of each row to erase, and was given none. Pass "
                "transform(X, concept=z); a pipeline passes the concept to transform after "
                "sklearn.set_config(enable_metadata_routing=True). SPLINCE needs no labels to erase"
            )
        check_index(X, concept, "concept")
        rows = self._rows(X, reset=False, min_rows=0)
        clean = self.eraser_(rows, columns_by_name(concept, "concept"))
        if not np.isfinite(clean).all():
            with self._restored_on_error():
                check_values(rows)
        return clean


def _accumulate_folds(
    rows: NDArray[np.generic],
    labels: dict[str, Any],
    sample_weight: ArrayLike | None,
    groups: ArrayLike | None,
    parameters: dict[str, Any],
) -> Folds:
    """Split rows into two folds, by `groups` or a hash of the row position; return the moments."""
    name = None
    if groups is not None:
        name = "groups"
        while name in labels:  # the groups need a name that no variable has
            name += "_"
        labels = labels | {name: groups}
    folds = Folds(2, groups=name, **parameters)
    return folds._update(rows, labels, sample_weight, merge_all=True)


def _check_moments(moments: Moments) -> Moments:
    """Return `moments`; raise InputError if it is not a Moments object."""
    if not isinstance(moments, Moments):
        raise InputError(
            f"moments is {described_type(moments)}; pass sf.Moments().update(X, labels)"
        )
    return moments
