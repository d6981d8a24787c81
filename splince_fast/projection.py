"""Projection: an affine eraser with two low-rank factors, its application; files of erasers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from splince_fast._runtime import erase_rows, files
from splince_fast._runtime.erase_rows import Factors
from splince_fast._runtime.rows import as_reals, as_rows, check_feature_names, is_tensor
from splince_fast._solve.options import is_number
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from splince_fast.report import Report

Float = NDArray[np.float64]

_FORMAT = 1  # of the files of all erasers
_EPS = float(np.finfo(np.float64).eps)
# A map counts as idempotent if a second application changes rows by at most this fraction of the
# change by the first application.
_IDEMPOTENT = 1e-6


class Eraser:
    """Base class of concept erasers: :class:`Projection`, or a map that also takes labels.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> axis = np.eye(3)[:, :1]
    >>> isinstance(sf.Projection(axis, axis, np.zeros(3)), sf.Eraser)
    True
    """

    needs_labels: ClassVar[bool]  #: Whether the map needs the labels of the concept of every row.
    #: Returns the erased rows of X; parameters and result are those of :class:`Projection`.
    __call__: Callable[..., Any]
    _KIND: ClassVar[str]
    __array_ufunc__ = None  # makes array @ eraser raise TypeError

    @property
    def n_features(self) -> int:
        """Width d of the rows."""
        raise NotImplementedError

    @property
    def method(self) -> str:
        """Name of the method that computed the eraser."""
        raise NotImplementedError

    @property
    def report(self) -> Report | None:
        """Report of the fit: erased and kept variables, and cost; None without a report."""
        raise NotImplementedError

    def _to_record(self) -> files.Record:
        raise NotImplementedError

    @classmethod
    def _from_record(cls, tensors: files.Tensors, metadata: Mapping[str, Any]) -> Self:
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the eraser to a safetensors file, with its report as metadata.

        Parameters
        ----------
        path : path
            Path of the file, which is replaced atomically: an error leaves an earlier file intact.
            Its suffix is ``.safetensors`` or empty; others raise InputError.
        """
        files.write(files.eraser_path(path), self._KIND, _FORMAT, *self._to_record())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the eraser that a file holds, bit for bit as it was saved.

        Parameters
        ----------
        path : path
            Path of a file written by :meth:`save`.

        Raises
        ------
        FileFormatError
            The file is truncated, inconsistent, of another class, or from a newer version.
        FileNotFoundError
            The file does not exist.
        """
        tensors, metadata = files.read(path, cls._KIND, _FORMAT)
        with files.consistent(path, "fit again"):
            return cls._from_record(tensors, metadata)


class Projection(Eraser):
    """Affine map r(x) = mean + P (x - mean), where I - P = left right^T has low rank.

    The object is immutable, and returned by :func:`splince_fast.splince` and the other methods. For
    rows X the map is ``X - ((X - mean) @ right) @ left.T``, which equals ``X @ P.T + offset``. The
    mean is subtracted first, so that a feature with a large mean does not reduce the precision of
    the other features.

    Parameters
    ----------
    left, right : array-like of shape (d, r)
        Factors of I - P.
    mean : array-like of shape (d,)
        Mean of the fitted data, a fixed point of the map.
    method : str
        Name of the method that computed the map.
    report : Report or callable, optional
        Report of the fit, or a function without arguments that returns the report.

    Raises
    ------
    InputError
        The shapes of `left`, `right` and `mean` do not match, or a value is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=500)
    >>> X = rng.normal(size=(500, 4)) + z[:, None]
    >>> eraser = sf.leace(sf.Moments().update(X, {"z": z}), erase="z")
    >>> clean = eraser(X)
    >>> gap = clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)
    >>> bool(np.abs(gap).max() < 1e-12)
    True
    """

    _KIND = "projection"
    needs_labels = False
    _factors: Factors
    _method: str
    _report: Report | Callable[[], Report] | None
    _names: tuple[str, ...] | None

    def __init__(
        self,
        left: ArrayLike,
        right: ArrayLike,
        mean: ArrayLike,
        *,
        method: str = "custom",
        report: Report | Callable[[], Report] | None = None,
    ) -> None:
        factors = [as_reals(left, "left"), as_reals(right, "right")]
        centre = as_reals(mean, "mean")
        if centre.ndim != 1 or any(f.ndim != 2 for f in factors):
            raise InputError(
                "left and right must be 2-D, of shape (d, r), and mean 1-D, of shape (d,)"
            )
        if factors[0].shape != factors[1].shape or len(factors[0]) != len(centre):
            raise InputError(
                f"left {factors[0].shape}, right {factors[1].shape} and mean {centre.shape} do not "
                "fit together; they must be (d, r), (d, r) and (d,)"
            )
        if not all(np.isfinite(array).all() for array in (*factors, centre)):
            raise InputError("left, right and mean must be finite")
        rows = [np.ascontiguousarray(factor.T) for factor in factors]
        self.__setstate__((*rows, centre, None, method, report))

    @classmethod
    def _make(
        cls,
        left: Float,
        right: Float,
        mean: Float,
        shift: Float | None = None,
        method: str = "custom",
        report: Report | Callable[[], Report] | None = None,
        feature_names: tuple[str, ...] | None = None,
    ) -> Self:
        """Make the map x - left^T (right (x - mean) - shift) from valid (r, d) factors."""
        new = cls.__new__(cls)
        arrays = left, right, mean, np.zeros(len(left)) if shift is None else shift
        for array in arrays:
            array.setflags(write=False)
        new._factors = Factors(*arrays)
        new._method, new._report, new._names = method, report, feature_names
        return new

    def __getstate__(self) -> tuple[Any, ...]:
        # The report is computed now, because a function cannot be pickled.
        return (*self._arrays(), self._method, self.report, self._names)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__dict__.update(self._make(*state).__dict__)

    def _arrays(self) -> tuple[Float, Float, Float, Float]:
        factors = self._factors
        return factors.left, factors.right, factors.mean, factors.shift

    # -- attributes ------------------------------------------------------------------------

    @property
    def left(self) -> Float:
        """Left factor of I - P = left right^T, (d, r) float64."""
        return self._factors.left.T

    @property
    def right(self) -> Float:
        """Right factor of I - P = left right^T, (d, r) float64."""
        return self._factors.right.T

    @property
    def mean(self) -> Float:
        """Mean of the fitted data, (d,) float64."""
        return self._factors.mean

    @cached_property
    def offset(self) -> Float:
        """Additive constant of r(x) = P x + offset, (d,) float64: left @ bias.

        The offset equals mean - P mean if `mean` is a fixed point of the map.
        """
        offset = np.asarray(self.bias @ self._factors.left)
        offset.flags.writeable = False
        return offset

    @property
    def bias(self) -> Float:
        """Constant in the removed part, (r,) float64: r(x) = x - (x @ right - bias) @ left.T."""
        return np.asarray(self._factors.right @ self._factors.mean + self._factors.shift)

    @cached_property
    def rank(self) -> int:
        """Rank of I - P, the number of removed dimensions, at the rounding level of the factors."""
        # D^{-1} (I - P) D has the same rank, and does not depend on the units of the features.
        if not len(self._factors.left):
            return 0
        left, right = self._triangular_factors()
        size = float(np.linalg.norm(left, 2) * np.linalg.norm(right, 2))
        values = np.linalg.svd(left @ right.T, compute_uv=False)
        return int(np.count_nonzero(values > self.n_features * _EPS * size))

    @cached_property
    def _idempotent(self) -> bool:
        """Whether r(r(x)) = r(x) up to rounding error, with features scaled as for `rank`."""
        # Let c = right^T (x - mean) - shift. The first application changes x by -left c, and the
        # second changes r(x) by -left (I - right^T left) c.
        if not len(self._factors.left):
            return True
        first, right = self._triangular_factors()
        second = first @ (np.eye(len(self._factors.left)) - self._factors.right @ self.left)
        return all(
            np.linalg.norm(second @ part) <= _IDEMPOTENT * np.linalg.norm(first @ part)
            for part in (right.T, self._factors.shift)
        )

    def _triangular_factors(self) -> list[Float]:
        """Return R of the QR factorisations of D^{-1} left and D right, with equal row sizes."""
        # The size of row j is its largest absolute value; a diagonal D makes it
        # sqrt(max |left_j| max |right_j|) in both. If a row is zero in one factor, its size in the
        # other becomes the largest of all these sizes.
        factors = self.left, self.right
        sizes = [np.abs(factor).max(axis=1) for factor in factors]
        target = np.sqrt(sizes[0]) * np.sqrt(sizes[1])
        target = np.where(target > 0, target, target.max() or 1.0)
        scales = (target / np.where(size > 0, size, target) for size in sizes)
        return [
            np.linalg.qr(factor * scale[:, None]).R
            for factor, scale in zip(factors, scales, strict=True)
        ]

    @property
    def n_features(self) -> int:
        """Width d of the rows."""
        return len(self._factors.mean)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Columns of the fitted data frame; None if the fitted rows were an array."""
        return self._names

    @property
    def method(self) -> str:
        """Name of the method that computed the map."""
        return self._method

    @property
    def report(self) -> Report | None:
        """Report of the fit: erased and kept variables, and cost; None without a report."""
        if callable(self._report):
            self._report = self._report()
        return self._report

    def matrix(self) -> Float:
        """Return P, (d, d) float64, of r(x) = P x + offset; for rows, X @ P.T + offset."""
        return np.asarray(np.eye(self.n_features) - self.left @ self._factors.right)

    def __repr__(self) -> str:
        effect = "changed" if self._method.startswith("repair") else "removed"
        return f"Projection({self._method}, {self.n_features} features, rank {self.rank} {effect})"

    # -- application and composition -------------------------------------------------------

    def __call__(
        self,
        X: Any,
        labels: Any = None,
        *,
        mask: Any = None,
        out: Any = None,
        progress: bool | None = None,
    ) -> Any:
        """Apply the map to rows.

        Parameters
        ----------
        X : ndarray, torch tensor or dask array of shape (..., d), or array-like of shape (n, d)
            Rows in any memory layout. float16, bfloat16 and float32 rows are returned in the same
            dtype, computed with float64 coefficients; integers give float64. Leading axes, such
            as (batch, token), are preserved. A frame must have the columns `feature_names`.
        labels : object, optional
            Ignored; accepted because some erasers need the labels of the concept.
        mask : array or tensor of bool, of shape X.shape[:-1], optional
            Rows with False, such as padding, are returned unchanged.
        out : array of the shape and dtype of the result, optional
            Array for the result; may be X itself, also a memmap. Extra memory is O(block).
        progress : bool, optional
            Show a progress bar on stderr; by default only in a terminal or notebook, after two
            seconds.

        Returns
        -------
        ndarray, torch tensor or dask array
            Erased rows with the type, shape, dtype (float64 for integers), chunks and device of X;
            `out` if passed.

        Raises
        ------
        InputError
            X has the wrong width or columns, `mask` or `out` does not match X, or a result exceeds
            the range of float16.
        """
        if type(X) is not np.ndarray:
            if is_tensor(X):
                from splince_fast._runtime.torch_rows import erase_tensor

                return erase_tensor(self._factors, X, out=out, mask=mask, progress=progress)
            if hasattr(X, "map_blocks") and mask is None and out is None:
                return erase_rows.erase_lazily(self, X, self.n_features)
        rows, selected, result = erase_rows.rows_mask_and_out(
            X, len(self._factors.mean), self._names, mask, out
        )
        erase_rows.erase(self._factors, rows, result, selected, progress, out is None)
        return result

    def fold_into(self, weight: Any, bias: Any = None) -> tuple[Any, Any]:
        """Merge this map into the linear layer that follows: (W P) x + (b + W offset).

        Parameters
        ----------
        weight : array or torch tensor of shape (k, d)
            Weight W of the layer.
        bias : array or torch tensor of shape (k,), optional
            Bias b of the layer; zero by default.

        Returns
        -------
        (weight, bias)
            New arrays of the type and dtype of `weight`, computed in float64; integers of 8 and 16
            bits give float32, others float64.

        Raises
        ------
        InputError
            Shapes do not match, or a result exceeds the range of the dtype.
        """
        weight_array = as_rows(weight, name="weight")
        if weight_array.shape[1] != self.n_features:
            raise InputError(
                f"weight has shape {weight_array.shape}; the layer that reads the rows of this "
                f"eraser has weights of shape (k, {self.n_features}), one column per feature: "
                "pass the weight as torch.nn.Linear holds it, or its transpose"
            )
        w = weight_array.astype(np.float64)
        folded, shift = w - (w @ self.left) @ self._factors.right, w @ self.offset
        if bias is not None:
            column = bias if hasattr(bias, "shape") else as_reals(bias, "bias")
            if tuple(column.shape) != (len(w),):
                raise InputError(
                    f"bias has shape {tuple(column.shape)}; it must have one entry per row of "
                    f"weight, ({len(w)},)"
                )
            shift += as_rows(column[None, :], width=len(w), name="bias")[0]
        results: list[Any] = []
        for name, exact in (("weight", folded), ("bias", shift)):
            rounded: Any = exact
            if not (is_tensor(weight) and weight.dtype.is_floating_point):
                dtype = weight_array.dtype
                dtype = dtype if dtype.kind not in "iub" else np.result_type(dtype, np.float32)
                with np.errstate(over="ignore"):  # an overflow raises InputError below
                    rounded = exact.astype(dtype)
            if is_tensor(weight):
                from splince_fast._runtime.torch_rows import tensor_like

                rounded = tensor_like(weight, rounded)
            if np.isfinite(exact).all() and not bool((abs(rounded) < np.inf).all()):
                raise InputError(
                    f"the folded {name} holds {np.abs(exact).max():.3g}, which leaves the range of "
                    f"{rounded.dtype}; pass the layer as float32"
                )
            results.append(rounded)
        return results[0], results[1]

    def __matmul__(self, first: Any) -> Projection:
        """Return ``second @ first``, the map that applies `first` and then `second`.

        Concepts erased by `second` stay erased; variables kept by `first` may be changed. To keep
        a variable exactly, erase all concepts jointly (``erase=[...]``).
        """
        if not isinstance(first, Projection):
            if hasattr(first, "__array__"):
                raise TypeError("a Projection erases rows by a call: P(X), not P @ X or X @ P")
            return NotImplemented
        if first.n_features != self.n_features:
            raise InputError(
                f"a projection of {self.n_features} features cannot follow one of "
                f"{first.n_features}: both act on the same rows; fit them on rows of one embedding"
            )
        check_feature_names(self._names, first._names, "the second projection")
        left, right, mean, shift = self._arrays()
        first_left, first_right, first_mean, first_shift = first._arrays()
        carried = first_left - (first_left @ right.T) @ left
        return Projection._make(
            np.concatenate([left, carried]),
            np.concatenate([right, first_right]),
            first_mean,
            np.concatenate([shift + right @ (mean - first_mean), first_shift]),
            f"{self._method} @ {first._method}",
            feature_names=self._names or first._names,
        )

    def __rmatmul__(self, rows: object) -> Projection:
        return self.__matmul__(rows)  # raises TypeError for an array

    def scaled(self, alpha: float) -> Projection:
        """Return the partial eraser x - alpha (I - P) (x - mean).

        Every covariance with an erased variable is multiplied by 1 - alpha. For alpha < 1 the map
        is invertible, so a linear probe fitted to the result recovers the concept as before.

        Parameters
        ----------
        alpha : float in [0, 1]
            Fraction of the change that is applied, as in fairlearn's ``CorrelationRemover``: 0 is
            the identity, 1 this map.

        Returns
        -------
        Projection
            Partial eraser. Values of its report that hold only for complete erasure are None.

        Raises
        ------
        InputError
            `alpha` is not a number between 0 and 1.
        """
        if not is_number(alpha) or not 0 <= alpha <= 1:
            raise InputError(
                f"alpha is {alpha!r}; it must be a number between 0, which changes nothing, and 1, "
                "which erases"
            )
        fraction = float(alpha)
        left, right, mean, shift = self._arrays()
        complete = None if self._report is None else lambda: cast("Report", self.report)
        return Projection._make(
            fraction * left, right, mean, shift,
            self._method if fraction == 1 else f"{self._method} (alpha={fraction:g})",
            complete and (lambda: complete()._scaled(fraction)), self._names,
        )  # fmt: skip

    def astype(self, dtype: DTypeLike) -> Projection:
        """Return the map with factors rounded to `dtype`, as a device stores them.

        Parameters
        ----------
        dtype : float32 or float64
            Dtype of the factors; coefficients are still summed in float64.

        Raises
        ------
        InputError
            `dtype` is not float32 or float64.
        """
        try:
            valid = dtype is not None and np.dtype(dtype) in (np.float32, np.float64)
        except TypeError:
            valid = False
        if not valid:
            raise InputError(
                f"dtype is {dtype!r}; the dtype of the factors must be float32 or float64"
            )
        left, right, mean, shift = self._arrays()
        # `shift` needs no change, because it is an offset of coefficients of x - mean.
        left, right = (f.astype(dtype).astype(np.float64) for f in (left, right))
        return Projection._make(left, right, mean, shift, self._method, self._report, self._names)

    def _to_record(self) -> files.Record:
        report = self.report
        tensors = {
            "left": self.left,
            "right": self.right,
            "mean": self.mean,
            "offset": self.offset,
            "bias": self.bias,
            "shift": self._factors.shift,
        }
        return tensors, {
            "method": self.method,
            "feature_names": self.feature_names,
            "report": None if report is None else report.to_dict(),
        }

    @classmethod
    def _from_record(cls, tensors: files.Tensors, metadata: Mapping[str, Any]) -> Self:
        d, r = tensors["left"].shape
        real = np.float64
        left, right, mean, _, _, shift = files.check_tensors(
            tensors, {"left": (real, (d, r)), "right": (real, (d, r)), "mean": (real, (d,)),
                      "offset": (real, (d,)), "bias": (real, (r,)), "shift": (real, (r,))}
        )  # fmt: skip
        return cls._make(
            np.ascontiguousarray(left.T), np.ascontiguousarray(right.T), mean, shift,
            str(metadata["method"]), read_report(metadata), files.read_feature_names(metadata, d),
        )  # fmt: skip


# Contents of a file of a projection, for files of several; `files.consistent` explains errors.
to_record, from_record = Projection._to_record, Projection._from_record


def read_report(metadata: Mapping[str, Any]) -> Report | None:
    """Return the report in the metadata of a file, if there is one."""
    from splince_fast.report import Report

    report = metadata["report"]
    return None if report is None else Report.from_dict(report)
