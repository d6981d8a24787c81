"""scikit-learn transformers that accumulate moments of rows and labels, and compute an eraser.

The mathematics is in :class:`~splince_fast.moments.Moments` and :mod:`splince_fast.methods`. The
variables to erase are passed as the keyword argument ``concept``, because ``y`` in a pipeline is
the task and must not silently become the concept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from splince_fast._runtime.arguments import check_names, described_type
from splince_fast._runtime.rows import SparseRows, as_weights, check_values, is_sparse
from splince_fast._solve.options import Options, check_moment_options
from splince_fast._solve.selection import Selection
from splince_fast.estimators.base import CheckedEstimator, ErasingTransformer, columns_by_name
from splince_fast.exceptions import (
    InputError,
    LabelError,
    NotEnoughDataError,
)
from splince_fast.labels.containers import check_index
from splince_fast.labels.names import listed
from splince_fast.methods.table import METHODS
from splince_fast.moments import Folds, Moments
from splince_fast.moments.moments import name_features
from splince_fast.moments.sampled import subsample_for
from splince_fast.projection import Projection
from splince_fast.report import Report
from splince_fast.sources import from_arrays
from splince_fast.sources._arrays import check_length

__all__ = ["LEACE", "SAL", "SPLINCE", "Identity", "MeanProjection"]

Data: TypeAlias = Moments | Folds
Keep: TypeAlias = Selection | ArrayLike | None


class _Eraser(ErasingTransformer):
    """Base of the erasers; a subclass adds the parameters and the name of the method."""

    kinds: Mapping[str, str] | None
    subsample: float | str
    covariance_type: str
    passes: int = 0
    moments_: Moments
    erased_: Any
    kept_: Any
    _extendable: bool

    _method: ClassVar[str]
    _concept_kind: ClassVar[str | None] = None
    _sparse_advice = " Or pass covariance_type='diag': X may then be sparse."

    # With metadata routing, scikit-learn passes `concept` without `set_fit_request`.
    __metadata_request__fit: ClassVar = {"concept": True}
    __metadata_request__partial_fit: ClassVar = {"concept": True}

    # -- hooks of a subclass -----------------------------------------------------------

    def _compute_eraser(self, moments: Data, erase: Selection, keep: Keep, **refine: object) -> Any:
        """Compute the eraser; ``**refine`` are the arguments `refine` and `passes`, or none."""
        # Without a task, SPLINCE is LEACE, which has fewer options.
        method = "leace" if self._keeps_task and keep is None else self._method
        arguments = self._options(method) | ({} if keep is None else {"keep": keep}) | refine
        return METHODS[method].function(moments, erase=erase, **arguments)

    def _options(self, method: str) -> dict[str, Any]:
        """Return the parameters of the estimator that are options of the method."""
        names = METHODS[method].options
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    @property
    def _accepts_sparse(self) -> bool:
        moments = getattr(self, "moments_", None)
        if self.covariance_type == "diag":
            return True
        return moments is not None and moments.parameters.is_diagonal

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

        The report describes the fitted rows; :func:`splince_fast.cross_report` describes the effect
        on held-out rows. ``shrinkage="cv"`` splits the rows into two folds, on which the intensity
        is chosen; the report then includes the effect on held-out rows.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features); sparse for "diag"
            At least two rows. `fit` reads X once, and `passes` more times, without copying or
            changing it.
        y : array-like of shape (n_samples,) or (n_samples, k), mapping or frame, optional
            Task. SPLINCE keeps the covariance of X with y. The other estimators ignore y, which a
            pipeline passes to every step. With ``concept_from="y"``, y is the concept and no
            variable is kept.
        concept : array-like of shape (n_samples,) or (n_samples, k), mapping or frame
            Variables to erase; the variables of a mapping or frame are erased jointly. Rows with a
            missing label (None or NaN) still count in the statistics of X.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies.
        groups : array-like of shape (n_samples,), optional
            For ``shrinkage="cv"``: groups, as strings or integers; all rows of a group are in the
            same fold. By default the fold of a row depends on a hash of its position.

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
            labels = erased | kept
            moments: Moments | Folds
            parameters["subsample"] = subsample_for(
                self.subsample, n, d, "X", 1 + self._needs_folds
            )
            if self._needs_folds:
                moments = _folds_of(rows, labels, sample_weight, groups, parameters)
            else:
                moments = Moments(**parameters).update(rows, labels, sample_weight=sample_weight)
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
                moments = moments.total
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
        X, y, concept, sample_weight
            As in :meth:`fit`; X may have no rows, and every block has the same variables.

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
                self._check_variables(list(erased), list(kept))
            else:
                self.moments_ = Moments(**self._begin_fit(erased, kept))
            self.moments_.update(rows, erased | kept, sample_weight=sample_weight)
            name_features(self.moments_, getattr(self, "_column_names", None))
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
        return {
            "kinds": kinds,
            "subsample": self.subsample,
            "covariance_type": self.covariance_type,
        }

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
        options = self._options(self._method)
        Options(**options)
        check_moment_options(
            self.subsample, self.covariance_type, self.passes, options.get("shrinkage"),
            options.get("solver", "auto"), groups,
        )  # fmt: skip
        self._check_concept_from()

    def _check_variables(self, erased: list[str], kept: list[str]) -> None:
        """Raise LabelError unless the variables have the same names as in earlier blocks."""
        earlier, current = (
            [sorted(names or (), key=str) for names in pair]
            for pair in ((self.erased_, self.kept_), (erased, kept))
        )
        if earlier != current:
            before, now = (
                [listed(names) or "nothing" for names in pair] for pair in (earlier, current)
            )
            raise LabelError(
                f"{type(self).__name__} was fitted to erase {before[0]} and keep {before[1]}; now "
                f"it gets {now[0]} and {now[1]}; pass the same variables under the same names"
            )

    def _check_extendable(self) -> None:
        """Raise InputError for an estimator that was made from moments, not from rows."""
        if not getattr(self, "_extendable", True):
            raise InputError(
                f"this {type(self).__name__} was made from moments; update or add moments, and "
                "call from_moments again"
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
            Variables or directions to keep, for SPLINCE only.
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
        if not isinstance(moments, Moments):
            raise InputError(
                f"moments is {described_type(moments)}; pass sf.Moments().update(X, labels)"
            )
        estimator = cls._unfitted(keep, params)
        estimator.moments_ = moments.copy()
        estimator.erased_, estimator.kept_ = erase, keep
        estimator._projection = estimator._solve()
        estimator.n_features_in_ = estimator._projection.n_features
        if moments.feature_names is not None:
            estimator.feature_names_in_ = np.array(moments.feature_names, object)
        estimator._extendable = False
        return estimator

    @classmethod
    def _unfitted(cls, keep: Keep, params: Mapping[str, object]) -> Self:
        """Return an unfitted estimator with parameters that are valid for a fit from moments."""
        variables = ("erase", "keep") if cls._keeps_task else ("erase",)
        check_names(params, (*variables, *cls._get_param_names()), cls.__name__)
        estimator = cls(**params)
        estimator._check_parameters()
        estimator._check_incremental()
        accumulation = {"kinds": None, "subsample": 1, "covariance_type": "full"}
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
    max_amplification, on_infeasible, null_space, shrinkage, rank_tol, solver, strength
        Options of :func:`splince_fast.splince`; ``shrinkage="cv"`` is possible in `fit` only.
    subsample : float in (0, 1] or "auto"
        As in :class:`Moments`. "auto" takes the smallest sample for which the expected distortion
        exceeds the minimum by at most about 5 percent.
    covariance_type : {"full", "diag"}
        As in :class:`Moments`; for "diag", X may be sparse.
    passes : int
        Number of extra passes of `fit` over X, which reduce the distortion; needs "diag".
    kinds : mapping of str to {"classes", "continuous"}, optional
        As in :class:`Moments`. A single column is the variable "concept" or "task", even if the
        column has a name; columns of mappings and frames keep their names.
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
    strength: float = 1
    subsample: float | str = 1.0
    covariance_type: str = "full"
    passes: int = 0
    kinds: Mapping[str, str] | None = None
    concept_from: str | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class LEACE(_Eraser):
    """Erase a concept, changing X as little as possible (least-squares concept erasure).

    ``fit(X, concept=z)``; y is ignored. See :func:`splince_fast.leace`.

    Parameters
    ----------
    null_space, shrinkage, rank_tol, solver
        As for :class:`SPLINCE`.
    subsample, covariance_type, passes, kinds, concept_from
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


class Identity(CheckedEstimator):
    """Return rows unchanged: the baseline in a search over erasers.

    scikit-learn's ``"passthrough"`` cannot replace it, because it accepts no `concept`.

    Attributes
    ----------
    n_features_in_ : int
        Number of features.
    feature_names_in_ : ndarray of str, shape (n_features_in_,)
        Names of the features, if X was a frame.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import Identity
    >>> rng = np.random.default_rng(0)
    >>> z, X = rng.integers(0, 2, size=60), rng.normal(size=(60, 3))
    >>> bool((Identity().fit(X, concept=z).transform(X) == X).all())
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
        """Check the rows and weights, and store the features.

        Parameters
        ----------
        X : array-like, frame or sparse matrix of shape (n_samples, n_features)
            Rows.
        y, concept : object, optional
            Ignored; accepted because the erasers take these arguments.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies.
        groups : object, optional
            Ignored.

        Returns
        -------
        object
            The estimator itself; unchanged after an error.
        """
        with self._restored_on_error():
            rows = self._checked(X, reset=True, min_rows=1)
            weight = as_weights(sample_weight, rows.shape[0])
            if weight is not None and not weight.any():
                raise NotEnoughDataError(
                    "every sample_weight is zero, so no row is left to fit to; give some rows a "
                    "positive weight"
                )
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


def _folds_of(
    rows: NDArray[np.generic],
    labels: dict[str, Any],
    sample_weight: ArrayLike | None,
    groups: ArrayLike | None,
    parameters: dict[str, Any],
) -> Folds:
    """Return the moments of two folds, split by `groups` or by a hash of the row position."""
    name = None
    if groups is not None:
        check_length(groups, len(rows), "groups", "X")
        name = "groups"
        while name in labels:  # the groups need a name that no variable has
            name += "_"
        labels = labels | {name: groups}
    return Folds(2, groups=name, **parameters).update(rows, labels, sample_weight=sample_weight)
