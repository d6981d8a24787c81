"""scikit-learn transformers: SPLINCE, LEACE, SAL, mean projection, and the identity.

The variables to erase are the keyword argument ``concept``, because ``y`` in a pipeline is the task
and must not silently become the concept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from splince_fast._runtime.arguments import check_names, described_type
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import SparseRows, check_values, is_sparse
from splince_fast._solve.options import OPTIONS, Options, check_moment_options
from splince_fast._solve.selection import Selection
from splince_fast.exceptions import InputError, LabelError
from splince_fast.methods.table import METHODS
from splince_fast.moments import Folds, Moments
from splince_fast.moments.moments import name_features
from splince_fast.moments.scatters import subsample_for
from splince_fast.projection import Projection
from splince_fast.report import Report
from splince_fast.sources import from_arrays
from splince_fast.transformer import (
    CheckedEstimator,
    ErasingTransformer,
    columns_by_name,
    read_weights,
)

__all__ = ["LEACE", "SAL", "SPLINCE", "Identity", "MeanProjection"]

Keep: TypeAlias = Selection | ArrayLike | None
# Parameters of the accumulation, which `from_moments` cannot change.
_ACCUMULATION = ("kinds", "subsample", "covariance_type")


class _Eraser(ErasingTransformer):
    """Base of the erasers; a subclass adds the parameters and the name of the method."""

    kinds: Mapping[str, str] | None
    subsample: float | str
    covariance_type: str
    passes: int = 0
    shrinkage: float | str | None = None
    moments_: Moments
    erased_: Any
    kept_: Any
    _extendable: bool = True

    _method: ClassVar[str]
    _concept_kind: ClassVar[str | None] = None
    _sparse_advice = " Or pass covariance_type='diag': X may then be sparse."

    # With metadata routing, scikit-learn passes `concept` without `set_fit_request`.
    __metadata_request__fit: ClassVar = {"concept": True}
    __metadata_request__partial_fit: ClassVar = {"concept": True}

    @property
    def _accepts_sparse(self) -> bool:
        if self.covariance_type == "diag":
            return True
        moments = getattr(self, "moments_", None)
        return moments is not None and moments.parameters.is_diagonal

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

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features); sparse for "diag"
            At least two rows, which are read once, and `passes` more times, without a copy.
        y : array-like of shape (n_samples,) or (n_samples, k), mapping or frame, optional
            Task, whose covariance with X SPLINCE keeps; the other estimators ignore y.
        concept : array-like of shape (n_samples,) or (n_samples, k), mapping or frame
            Variables to erase jointly. Rows with a missing label (None or NaN) still count in the
            statistics of X. Cross-validation slices arrays and frames, but not mappings.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies.
        groups : array-like of shape (n_samples,), optional
            For ``shrinkage="cv"``, which reports the effect on held-out rows, too: rows of one
            group are in the same fold; by default, a hash of its position assigns each row.

        Returns
        -------
        object
            The estimator itself; unchanged after an error.

        Raises
        ------
        InputError, NonFiniteError, LabelError
            The data, labels or parameters are invalid; other errors are those of the method.
        """
        with self._restored_on_error():
            self.__dict__.pop("moments_", None)
            self._check_parameters(groups)
            rows, erased, kept = self._read(X, y, concept, 2, sample_weight, groups)
            weight = read_weights(sample_weight, rows.shape[0])
            parameters, labels = self._begin_fit(erased, kept), erased | kept
            choose = self.shrinkage == "cv"  # on folds
            if self.subsample != 1:
                n, d = rows.shape
                parameters["subsample"] = subsample_for(self.subsample, n, d, "X", 1 + choose)
            moments: Moments | Folds
            if choose:
                name = "groups"
                while name in labels:  # the groups need a name that no variable has
                    name += "_"
                labels = labels if groups is None else labels | {name: groups}
                moments = Folds(2, groups=None if groups is None else name, **parameters)
            else:
                moments = Moments(**parameters)
            moments.update(rows, labels, sample_weight=weight)
            name_features(moments, self._column_names)
            refine = {}
            if self.passes:
                source = from_arrays(rows, sample_weight=weight)
                refine = {"refine": source, "passes": self.passes}
            self._projection = self._solve(moments, **refine)
            self.moments_ = moments.total if isinstance(moments, Folds) else moments
        return self

    def partial_fit(
        self, X: Any, y: Any = None, *, concept: Any = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Add a block of rows of any size; any split into blocks gives the eraser of one ``fit``.

        Errors that depend on all rows come when the projection is first used after this call.

        Parameters
        ----------
        X, y, concept, sample_weight
            As in :meth:`fit`; X may have no rows, and every block has the same variables.

        Returns
        -------
        object
            The estimator itself; unchanged after an error.
        """
        with self._restored_on_error():
            if not self._extendable:
                raise InputError(
                    f"this {type(self).__name__} was made from moments; update or add moments, and "
                    "call from_moments again"
                )
            self._check_parameters(incremental=True)
            rows, erased, kept = self._read(X, y, concept, 0, sample_weight)
            if self.__sklearn_is_fitted__():
                self._check_variables(erased, kept)
            else:
                self.moments_ = Moments(**self._begin_fit(erased, kept))
            self.moments_.update(rows, erased | kept, sample_weight=sample_weight)
            name_features(self.moments_, self._column_names)
            self._projection = None
        return self

    def _read(
        self, X: object, y: object, concept: object, min_rows: int, weight: object,
        groups: object = None,
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:  # fmt: skip
        """Return the validated rows, the variables to erase and the variables to keep, by name."""
        erased, kept = self._concept_columns(y, concept), {}
        if self._keeps_task and self.concept_from != "y":
            if y is None:
                self._refuse_missing_y("y is the task to keep; LEACE erases without a task")
            kept = columns_by_name(y, "task")
            if shared := erased.keys() & kept.keys():
                raise LabelError(
                    f"the concept and y both hold a variable {min(shared, key=str)!r}; rename one, "
                    "or leave it out of y if it is to be erased"
                )
        rows = self._rows(
            X, reset=not self.__sklearn_is_fitted__(), min_rows=min_rows, y=y, concept=concept,
            sample_weight=weight, groups=groups,
        )  # fmt: skip
        return rows, erased, kept

    def _begin_fit(self, erased: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        """Store the names of the variables of a new fit; return the arguments of its Moments."""
        parameters = {name: getattr(self, name) for name in _ACCUMULATION}
        if self._concept_kind is not None:
            parameters["kinds"] = dict.fromkeys(erased, self._concept_kind) | dict(self.kinds or {})
        self.erased_, self.kept_ = list(erased), list(kept) or None
        self._extendable = True
        return parameters

    def _check_parameters(
        self, groups: ArrayLike | None = None, *, incremental: bool = False
    ) -> None:
        """Raise InputError for invalid parameters, before any row is read."""
        options = {name: getattr(self, name) for name in OPTIONS if hasattr(self, name)}
        Options(**options).checked()
        check_moment_options(
            self.subsample, self.covariance_type, self.passes, self.shrinkage,
            options.get("solver", "auto"), groups,
        )  # fmt: skip
        self._check_concept_from()
        whole = (  # parameters that need all rows at once, which only `fit` has
            ("shrinkage", self.shrinkage == "cv", "is chosen on folds, in fit only; pass the "
             "intensity that fit chose (report_.shrinkage), or 'oas'"),
            ("passes", self.passes, "needs extra passes over the rows, in fit only; leave it out, "
             "or pass refine= to the method"),
            ("subsample", isinstance(self.subsample, str), "depends on the number of all rows, in "
             "fit only; pass a number, such as 22 * d / n for d features and about n rows"),
        )  # fmt: skip
        for name, is_given, text in whole:
            if incremental and is_given:
                raise InputError(f"{name}={getattr(self, name)!r} {text}")

    def _check_variables(self, erased: dict[str, Any], kept: dict[str, Any]) -> None:
        """Raise LabelError unless the variables have the same names as in earlier blocks."""
        roles = ("erase", self.erased_, erased), ("keep", self.kept_ or [], kept)
        for role, before, now in roles:
            if set(before) != set(now):
                old, new = (listed(sorted(n, key=str)) or "nothing" for n in (before, now))
                raise LabelError(
                    f"{type(self).__name__} was fitted to {role} {old}, and now gets {new}; pass "
                    "the same variables under the same names"
                )

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
            Variables or directions to keep, for SPLINCE only.
        **params
            Parameters of the estimator.

        Returns
        -------
        object
            Fitted estimator, without :meth:`partial_fit`: update the moments instead.

        Raises
        ------
        InputError
            `keep` is missing for SPLINCE, or passed to another; other errors are those of `fit`.
        """
        if not isinstance(moments, Moments):
            raise InputError(
                f"moments is {described_type(moments)}; pass sf.Moments().update(X, labels)"
            )
        variables = ("erase", "keep") if cls._keeps_task else ("erase",)
        check_names(params, (*variables, *cls._get_param_names()), cls.__name__)
        estimator = cls(**params)
        estimator._check_parameters(incremental=True)
        for name in _ACCUMULATION:
            if getattr(estimator, name) != getattr(cls, name):  # the default
                raise InputError(
                    f"{name} determines how moments are accumulated; pass {name} to Moments"
                )
        if cls._keeps_task and keep is None:
            raise InputError("keep is missing: pass keep=, or use LEACE, which keeps none")
        if keep is not None and not cls._keeps_task:
            raise InputError(f"{cls.__name__} keeps nothing; leave out keep=, or use SPLINCE")
        estimator.moments_ = moments.copy()
        estimator.erased_, estimator.kept_ = erase, keep
        estimator._projection = estimator._solve()
        estimator.n_features_in_ = estimator._projection.n_features
        if moments.feature_names is not None:
            estimator.feature_names_in_ = np.array(moments.feature_names, object)
        estimator._extendable = False
        return estimator

    def _solve(self, moments: Moments | Folds | None = None, **arguments: Any) -> Projection:
        method = METHODS[self._method]
        if self.kept_ is not None:
            arguments["keep"] = self.kept_
        elif self._keeps_task:
            method = METHODS["leace"]  # without a task, SPLINCE is LEACE, with fewer options
        names = [name for name in OPTIONS if name in method.parameters and hasattr(self, name)]
        arguments |= {name: getattr(self, name) for name in names}
        moments = self.moments_ if moments is None else moments
        return cast(Projection, method.function(moments, erase=self.erased_, **arguments))

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
    max_amplification, on_infeasible, null_space, shrinkage, rank_tol, solver, strength
        Options of :func:`splince_fast.splince`; ``shrinkage="cv"`` is possible in `fit` only.
    subsample : float in (0, 1] or "auto"
        As in :class:`Moments`; "auto" takes the smallest sample whose distortion is expected to
        exceed the minimum by at most about 5 percent.
    covariance_type : {"full", "diag"}
        As in :class:`Moments`; for "diag", X may be sparse.
    passes : int
        Number of extra passes of `fit` over X, which reduce the distortion; needs "diag".
    kinds : mapping of str to {"classes", "continuous"}, optional
        As in :class:`Moments`; a single column is the variable "concept" or "task".
    concept_from : {None, "y"}
        With "y", the argument y of ``fit`` is the concept, no variable is kept, and the map is
        that of LEACE, as ``report_.method`` says.

    Attributes
    ----------
    projection_, moments_, report_ : Projection, Moments, Report
        Fitted map, moments of the fitted rows, and report of the map.
    erased_, kept_ : list of str
        Names of the erased and kept variables, or the arguments of :meth:`from_moments`.
    n_samples_seen_, n_features_in_ : int
        Number of fitted rows with positive weight, and number of features.
    feature_names_in_ : ndarray of str, shape (n_features_in_,)
        Names of the features, if X was a frame.

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
    >>> z, y = np.random.default_rng(0).integers(0, 2, size=(2, 400))
    >>> X = np.random.default_rng(1).normal(size=(400, 6)) + np.outer(z + y, np.arange(6))
    >>> clean = SPLINCE().fit(X, y, concept=z).transform(X)
    >>> bool(np.abs(clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)).max() < 1e-12)
    True
    >>> pipe = make_pipeline(SPLINCE(), LogisticRegression()).fit(X, y, splince__concept=z)
    """

    _keeps_task = True
    _method = "splince"

    max_amplification: float | None = None
    on_infeasible: str = "raise"
    null_space: str = "keep"
    shrinkage: float | str | None = None
    rank_tol: float | str = "auto"
    solver: str = "auto"
    strength: float = 1
    subsample: float | str = 1.0
    covariance_type: str = "full"
    passes: int = 0
    kinds: Mapping[str, str] | None = None
    concept_from: str | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class LEACE(_Eraser):
    """Erase a concept, changing X as little as possible (least-squares concept erasure).

    ``fit(X, concept=z)``; y is ignored. See :func:`splince_fast.leace`, also for the reference.

    Parameters
    ----------
    null_space, shrinkage, rank_tol, solver, subsample, covariance_type, passes, kinds, concept_from
        As for :class:`SPLINCE`, as are the attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import LEACE
    >>> z = np.array(["a", "b", "c"] * 100)
    >>> X = np.random.default_rng(0).normal(size=(300, 5)) + (z == "a")[:, None]
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
    subsample: float | str = 1.0
    covariance_type: str = "full"
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
    rank_tol, subsample, covariance_type, kinds, concept_from
        As for :class:`SPLINCE`, as are the attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import SAL
    >>> age = np.linspace(20, 60, 200)
    >>> X = np.random.default_rng(0).normal(size=(200, 4)) + age[:, None] / 10
    >>> clean = SAL().fit_transform(X, concept=age)
    >>> bool(np.abs((clean - clean.mean(axis=0)).T @ (age - age.mean())).max() < 1e-9)
    True
    """

    _method = "sal"

    rank_tol: float | str = "auto"
    subsample: float | str = 1.0
    covariance_type: str = "full"
    kinds: Mapping[str, str] | None = None
    concept_from: str | None = None


class MeanProjection(SAL):
    """Erase classes by the orthogonal projection that removes the differences of the class means.

    ``fit(X, concept=z)``; y is ignored. The labels of the concept are read as classes, even if they
    are whole-number floats. See :func:`splince_fast.mean_projection`.

    Parameters
    ----------
    rank_tol, subsample, covariance_type, kinds, concept_from
        As for :class:`SPLINCE`, as are the attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import MeanProjection
    >>> z = np.array(["f", "m"] * 100)
    >>> X = np.random.default_rng(0).normal(size=(200, 4)) + (z == "m")[:, None]
    >>> eraser = MeanProjection().fit(X, concept=z)
    >>> gap = X[z == "m"].mean(axis=0) - X[z == "f"].mean(axis=0)
    >>> bool(np.allclose(eraser.projection_.matrix() @ gap, 0))
    True
    """

    _method = "mean_projection"
    _concept_kind = "classes"


class Identity(CheckedEstimator):
    """Return rows unchanged: the baseline in a search over erasers.

    scikit-learn's ``"passthrough"`` cannot replace it, because it accepts no `concept`.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import Identity
    >>> X = np.eye(3)
    >>> bool((Identity().fit(X, concept=[0, 1, 1]).transform(X) == X).all())
    True
    """

    # As in the erasers: a search then passes `concept` to erasers and Identity alike.
    __metadata_request__fit: ClassVar = {"concept": True}

    @property
    def _accepts_sparse(self) -> bool:
        return True

    def fit(
        self,
        X: object,
        y: object = None,
        *,
        concept: object = None,
        sample_weight: ArrayLike | None = None,
        groups: object = None,
    ) -> Self:
        """Check the rows and weights, and store the features; the other arguments are ignored.

        Parameters
        ----------
        X : array-like, frame or sparse matrix of shape (n_samples, n_features)
            Rows.
        y, concept, sample_weight, groups
            As for the erasers.

        Returns
        -------
        object
            The estimator itself; unchanged after an error.
        """
        with self._restored_on_error():
            rows = self._checked(X, reset=True, min_rows=1)
            read_weights(sample_weight, rows.shape[0])
        return self

    def transform(self, X: object) -> Any:
        """Return a copy of the rows.

        Parameters
        ----------
        X : array-like, frame or sparse matrix of shape (n_samples, n_features)
            Rows with the features of the fit.

        Returns
        -------
        ndarray or sparse matrix of shape (n_samples, n_features)
            The same rows.
        """
        check_is_fitted(self, "n_features_in_")
        with self._restored_on_error():
            return self._checked(X, reset=False, min_rows=0).copy()

    def _checked(self, X: object, *, reset: bool, min_rows: int) -> Any:
        rows = self._rows(X, reset=reset, min_rows=min_rows)
        if is_sparse(rows):
            SparseRows.of(rows).check()
        else:
            check_values(rows)
        return rows
