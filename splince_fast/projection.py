"""Projection: the affine map that erases, as two thin factors, and how it is applied."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from splince_fast._runtime import erase_rows, files
from splince_fast._runtime.arrays import (
    as_mask,
    as_reals,
    as_rows,
    check_feature_names,
    feature_names,
    is_tensor,
)
from splince_fast._runtime.erase_rows import Factors
from splince_fast._solve.options import is_number
from splince_fast.exceptions import FileFormatError, InputError

if TYPE_CHECKING:
    from splince_fast.report import Report

Float = NDArray[np.float64]

_FORMAT = 1
_KIND = "projection"
_EPS = float(np.finfo(np.float64).eps)
_IDEMPOTENT = 1e-6  # relative size of the second change, below which it is rounding


class Projection:
    """The affine map r(x) = mean + P (x - mean), with P = I - left right^T of low co-rank.

    Made by :func:`splince_fast.splince` and its siblings; immutable. On rows it computes
    ``X - ((X - mean) @ right) @ left.T``, equivalently ``X @ P.T + offset``; the mean goes off
    first, so that a feature of large mean costs the others no digit.

    Parameters
    ----------
    left, right : array-like of shape (d, r)
        Factors of I - P.
    mean : array-like of shape (d,)
        Mean of the data that it was fitted on, which it leaves in place.
    method : str
        Name of the method that made it.
    report : Report or callable that makes one, optional
        Report of the fit.

    Raises
    ------
    InputError
        Shapes that do not fit together, or numbers that are not finite.

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
        self._set(
            np.ascontiguousarray(factors[0].T),
            np.ascontiguousarray(factors[1].T),
            centre, np.zeros(factors[0].shape[1]), method, report, None,
        )  # fmt: skip
        if not all(np.isfinite(a).all() for a in (self._left, self._right, self._mean)):
            raise InputError("left, right and mean must be finite")

    def _set(
        self,
        left: Float,
        right: Float,
        mean: Float,
        shift: Float,
        method: str,
        report: Report | Callable[[], Report] | None,
        names: tuple[str, ...] | None,
    ) -> None:
        """Set transposed factors, (r, d), without a copy: x - left^T (right (x - m) - s)."""
        self._left, self._right, self._mean, self._shift = left, right, mean, shift
        self._method, self._report, self._names = method, report, names
        for array in (left, right, mean, shift):
            array.setflags(write=False)

    @cached_property
    def _factors(self) -> Factors:
        return Factors(self._left, self._right, self._mean, self._shift)

    @classmethod
    def _make(
        cls,
        left: Float,
        right: Float,
        mean: Float,
        bias: Float | None = None,
        method: str = "custom",
        report: Report | Callable[[], Report] | None = None,
        *,
        shift: Float | None = None,
        feature_names: tuple[str, ...] | None = None,
    ) -> Projection:
        """A projection from valid transposed factors.

        The coefficients of x are right (x - mean) - shift, or right x - bias; with neither, the
        mean stays in place.
        """
        if shift is None:
            shift = np.zeros(len(left)) if bias is None else _shift_of(bias, right, mean)
        new = cls.__new__(cls)
        new._set(left, right, mean, shift, method, report, feature_names)
        return new

    # -- what it is ------------------------------------------------------------------------

    @property
    def left(self) -> Float:
        """(d, r) float64: P = I - left right^T; its columns span what is removed."""
        return self._left.T

    @property
    def right(self) -> Float:
        """(d, r) float64: the coefficients of what is removed are (x - mean) @ right."""
        return self._right.T

    @property
    def mean(self) -> Float:
        """(d,) float64: mean of the data that it was fitted on."""
        return self._mean

    @cached_property
    def offset(self) -> Float:
        """(d,) float64: the additive constant, r(x) = P x + offset; mean - P mean."""
        offset = np.asarray(self.bias @ self._left)
        offset.flags.writeable = False
        return offset

    @property
    def bias(self) -> Float:
        """(r,) float64: the coefficients of what is removed are also x @ right - bias."""
        return np.asarray(self._right @ self._mean + self._shift)

    @cached_property
    def rank(self) -> int:
        """The rank of I - P, at the rounding level of the factors: dimensions removed.

        Features are rescaled first so that both factors have rows of one size: a similarity
        D^{-1} (I - P) D, which changes no rank, so that the units of the features do not matter.
        """
        if not len(self._left):
            return 0
        left, right = _balanced(self.left, self.right)
        inner = [np.linalg.qr(factor).R for factor in (left, right)]
        size = float(np.linalg.norm(inner[0], 2) * np.linalg.norm(inner[1], 2))
        values = np.linalg.svd(inner[0] @ inner[1].T, compute_uv=False)
        return int(np.count_nonzero(values > self.n_features * _EPS * size))

    @cached_property
    def _idempotent(self) -> bool:
        """Whether r(r(x)) = r(x), in the units of `rank`.

        With c = right^T (x - mean) - shift, the first change is left c and the second one is
        left (I - right^T left) c.
        """
        if not len(self._left):
            return True
        left, right = _balanced(self.left, self.right)
        first = np.linalg.qr(left).R
        second = first @ (np.eye(len(self._left)) - self._right @ self.left)
        for columns in (np.linalg.qr(right).R.T, self._shift):
            size = np.linalg.norm(second @ columns)
            if size > _IDEMPOTENT * np.linalg.norm(first @ columns):
                return False
        return True

    needs_labels = False

    @property
    def n_features(self) -> int:
        """Width d of the rows."""
        return len(self._mean)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Columns of the data frame that it was fitted on; None if that was an array."""
        return self._names

    @property
    def method(self) -> str:
        """Name of the method that made it."""
        return self._method

    @property
    def report(self) -> Report | None:
        """Erased and kept variables, and the cost; None for hand-made projections."""
        if callable(self._report):
            self._report = self._report()
        return self._report

    def matrix(self) -> Float:
        """(d, d) float64: P, with r(x) = P x + offset; on rows, X @ P.T + offset."""
        return np.asarray(np.eye(self.n_features) - self.left @ self._right)

    def __repr__(self) -> str:
        what = "changed" if self._method.startswith("repair") else "removed"
        return f"Projection({self._method}, {self.n_features} features, rank {self.rank} {what})"

    # -- what it does ----------------------------------------------------------------------

    def __call__(
        self,
        X: Any,
        labels: Any = None,
        *,
        mask: Any = None,
        out: Any = None,
        progress: bool | None = None,
    ) -> Any:
        """Apply to rows.

        Parameters
        ----------
        X : ndarray, torch tensor or dask array of shape (..., d), or what NumPy reads as (n, d)
            Any layout. float16, bfloat16 and float32 are computed with float64 coefficients and
            returned in their own dtype; integers give float64. Axes before the last one, such as
            (batch, token, d), stay. A frame must have the columns of `feature_names`.
        labels : object, optional
            Ignored; erasers that need the labels of the concept take them here.
        mask : array or tensor of bool, of shape X.shape[:-1], optional
            Rows where it is False, such as padding, come back as they are.
        out : array of the shape and dtype of the result, optional
            Where to write; may be X itself, a memmap included. Extra memory is O(block).
        progress : bool, optional
            Show a progress bar on stderr; by default only in a terminal or notebook, after two
            seconds.

        Returns
        -------
        ndarray, torch tensor or dask array
            Of the kind, shape, dtype, chunks and device of X; `out` if given.

        Raises
        ------
        InputError
            Wrong width or columns, a mask or an `out` that does not fit, or a result beyond
            float16.

        Examples
        --------
        >>> import numpy as np
        >>> import splince_fast as sf
        >>> axis = np.eye(3)[:, :1]
        >>> eraser = sf.Projection(axis, axis, np.zeros(3))
        >>> tokens = np.ones((2, 4, 3))
        >>> eraser(tokens, mask=np.arange(4) < [[4], [2]])[1, :, 0]
        array([0., 0., 1., 1.])
        """
        if is_tensor(X):
            from splince_fast._runtime.torch_rows import erase_tensor

            return erase_tensor(self._factors, X, out=out, mask=mask, progress=progress)
        if hasattr(X, "map_blocks") and mask is None and out is None:
            return erase_rows.erase_lazily(self, X, self.n_features)
        rows, chosen, result = rows_mask_and_out(X, len(self._mean), self._names, mask, out)
        erase_rows.erase(self._factors, rows, result, chosen, progress, out is None)
        return result

    def fold_into(self, weight: Any, bias: Any = None) -> tuple[Any, Any]:
        """Merge this map into the linear layer that follows it.

        The layer ``W x + b`` applied to ``r(x)`` equals ``(W P) x + (b + W offset)``.

        Parameters
        ----------
        weight : array or torch tensor of shape (k, d)
            W.
        bias : array or torch tensor of shape (k,), optional
            The vector b; zero if it is left out.

        Returns
        -------
        (weight, bias)
            New arrays of the kind and dtype of `weight`, computed in float64; integers give
            float32 where it holds them, else float64. The arguments are left alone.

        Raises
        ------
        InputError
            Shapes that do not fit, or a result that leaves the range of the dtype.
        """
        given_weight = as_rows(weight, name="weight")
        if given_weight.shape[1] != self.n_features:
            raise InputError(
                f"weight has shape {given_weight.shape}; the layer that reads the rows of this "
                f"eraser has weights of shape (k, {self.n_features}), one column per feature: "
                "pass the weight as torch.nn.Linear holds it, or its transpose"
            )
        w = given_weight.astype(np.float64)
        folded = w - (w @ self.left) @ self._right
        shift = w @ self.offset
        if bias is not None:
            column = bias if hasattr(bias, "shape") else as_reals(bias, "bias")
            if tuple(column.shape) != (len(w),):
                raise InputError(
                    f"bias has shape {tuple(column.shape)}; it must have one entry per row of "
                    f"weight, ({len(w)},)"
                )
            given = as_rows(column[None, :], width=len(w), name="bias")[0].astype(np.float64)
            shift = given + shift
        results: tuple[Any, Any] = folded, shift
        if not (is_tensor(weight) and weight.dtype.is_floating_point):
            dtype = given_weight.dtype
            dtype = dtype if dtype.kind not in "iub" else np.result_type(dtype, np.float32)
            with np.errstate(over="ignore"):  # raised below, without NumPy's warning
                results = folded.astype(dtype), shift.astype(dtype)
        if is_tensor(weight):
            from splince_fast._runtime.torch_rows import tensor_like

            results = tensor_like(weight, results[0]), tensor_like(weight, results[1])
        for name, exact, found in zip(("weight", "bias"), (folded, shift), results, strict=True):
            if np.isfinite(exact).all() and not bool((abs(found) < np.inf).all()):
                raise InputError(
                    f"the folded {name} holds {np.abs(exact).max():.3g}, which leaves the range of "
                    f"{found.dtype}; pass the layer as float32"
                )
        return results

    # NumPy must not try array @ projection.
    __array_ufunc__ = None

    def __matmul__(self, first: Projection) -> Projection:
        """``second @ first``: apply `first`, then `second`, as one map.

        What `second` erases stays erased; what `first` kept may be lost: erase several concepts
        jointly (``erase=[...]``) where that matters.
        """
        if not isinstance(first, Projection):
            return NotImplemented
        if first.n_features != self.n_features:
            raise InputError(
                f"a projection of {self.n_features} features cannot follow one of "
                f"{first.n_features}: both act on the same rows; fit them on rows of one embedding"
            )
        check_feature_names(self._names, first._names, "the second projection")
        carried = first._left - (first._left @ self.right) @ self._left
        return Projection._make(
            np.concatenate([self._left, carried]),
            np.concatenate([self._right, first._right]),
            first._mean.copy(),
            method=f"{self._method} @ {first._method}",
            shift=np.concatenate(
                [self._shift + self._right @ (self._mean - first._mean), first._shift]
            ),
            feature_names=self._names or first._names,
        )

    def scaled(self, alpha: float) -> Projection:
        """The partial eraser: x - alpha (I - P) (x - mean).

        It lies between the identity (0) and this map (1). The class means, and every covariance
        with what is erased, shrink by the factor 1 - alpha. For alpha < 1 a linear probe still
        reads the concept, as well as before: the map is invertible, and a probe that is fitted
        afterwards undoes it. Only at alpha = 1 is the concept erased.

        Parameters
        ----------
        alpha : float in [0, 1]
            Fraction of the change that is made; that of fairlearn's ``CorrelationRemover``.

        Returns
        -------
        Projection
            It composes, folds, and goes to files as any other. Its report states `alpha`, the
            association that is left, and alpha^2 times the distortion; figures that hold for
            complete erasure alone are None.

        Raises
        ------
        InputError
            `alpha` is no number between 0 and 1.

        Examples
        --------
        >>> import numpy as np
        >>> import splince_fast as sf
        >>> rng = np.random.default_rng(0)
        >>> z = rng.integers(0, 2, size=500)
        >>> X = rng.normal(size=(500, 4)) + z[:, None]
        >>> clean, eraser = sf.erase(X, concept=z)
        >>> bool(np.allclose(eraser.scaled(0.5)(X), (X + clean) / 2))
        True
        >>> eraser.scaled(0.5).report.alpha
        0.5
        """
        if not is_number(alpha) or not 0 <= alpha <= 1:
            raise InputError(
                f"alpha is {alpha!r}; it must be a number between 0, which changes nothing, and 1, "
                "which erases"
            )
        fraction = float(alpha)
        source = self._report

        def report() -> Report:
            whole = self.report
            assert whole is not None
            return whole._scaled(fraction)

        return Projection._make(
            fraction * self._left, self._right.copy(), self._mean.copy(),
            method=self._method if fraction == 1 else f"{self._method} (alpha={fraction:g})",
            report=None if source is None else report, shift=self._shift.copy(),
            feature_names=self._names,
        )  # fmt: skip

    def astype(self, dtype: DTypeLike) -> Projection:
        """The map with factors rounded to `dtype` (float32 or float64), as a device holds them.

        Parameters
        ----------
        dtype : float32 or float64
            Of the factors; coefficients are still summed in float64.

        Raises
        ------
        InputError
            Another dtype.
        """
        try:
            known = np.dtype(dtype) in (np.float32, np.float64) and dtype is not None
        except (TypeError, ValueError):
            known = False
        if not known:
            raise InputError(f"factors are held as float32 or float64, not {dtype!r}")
        left, right = (f.astype(dtype).astype(np.float64) for f in (self._left, self._right))
        # The shift applies to coefficients of x - mean, so the mean is unchanged.
        return Projection._make(
            left, right, self._mean.copy(), method=self._method, report=self._report,
            shift=self._shift.copy(), feature_names=self._names,
        )  # fmt: skip

    # -- persistence -----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: left, right, mean, offset, bias, shift; the report as metadata.

        Parameters
        ----------
        path : path
            The file; whatever happens, it holds either what it held before or the whole map.
        """
        files.write(path, _KIND, _FORMAT, *to_record(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Projection:
        """Read a projection back, bit for bit.

        Parameters
        ----------
        path : path
            A file written by :meth:`save`.

        Raises
        ------
        FileFormatError
            Truncated, foreign, inconsistent, or written by a newer version.
        FileNotFoundError
            There is no such file.
        """
        tensors, metadata = files.read(path, _KIND, _FORMAT)
        with files.consistent(path, "fit again"):
            return from_record(tensors, metadata)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_report"] = self.report  # computed now: a pending function cannot be pickled
        for made_on_use in ("offset", "_factors"):
            state.pop(made_on_use, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_names": None} | state)  # absent in pickles of earlier versions
        for array in (self._left, self._right, self._mean, self._shift):
            array.flags.writeable = False


def rows_mask_and_out(
    X: Any, width: int, names: tuple[str, ...] | None, mask: Any, out: Any
) -> tuple[NDArray[Any], NDArray[np.bool_] | None, NDArray[Any]]:
    """Rows of shape (..., d), their mask, and memory for the result, which is new without `out`.

    Raises
    ------
    InputError
        Wrong width or columns; a mask or an `out` that does not fit.
    """
    rows = erase_rows.as_stack(X, width)
    if names is not None and hasattr(X, "columns"):
        check_feature_names(feature_names(X, width), names)
    dtype = erase_rows.result_dtype(rows.dtype)
    chosen = None if mask is None else as_mask(mask, rows.shape[:-1])
    if out is None:
        return rows, chosen, np.empty(rows.shape, dtype)
    erase_rows.check_out(out, rows, dtype)
    return rows, chosen, out


def to_record(projection: Projection) -> tuple[dict[str, Float], dict[str, Any]]:
    """Named tensors and JSON metadata of a projection, for files that hold one or several."""
    report = projection.report
    tensors = {
        "left": projection.left,
        "right": projection.right,
        "mean": projection.mean,
        "offset": projection.offset,
        "bias": projection.bias,
        "shift": projection._shift,
    }
    return tensors, {
        "method": projection.method,
        "feature_names": projection.feature_names,
        "report": None if report is None else report.to_dict(),
    }


def from_record(tensors: files.Tensors, metadata: Mapping[str, Any]) -> Projection:
    """The inverse of `to_record`, bit for bit.

    Raises
    ------
    FileFormatError
        A tensor has another dtype or shape, or they contradict each other. What is missing raises
        KeyError, metadata of the wrong form also TypeError or ValueError.
    """
    from splince_fast.report import Report

    d, r = tensors["left"].shape
    real = np.float64
    files.check_tensors(
        tensors, {"left": (real, (d, r)), "right": (real, (d, r)), "mean": (real, (d,)),
                  "offset": (real, (d,)), "bias": (real, (r,))}
        | ({"shift": (real, (r,))} if "shift" in tensors else {})
    )  # fmt: skip
    report = metadata["report"]
    new = Projection._make(
        np.ascontiguousarray(tensors["left"].T), np.ascontiguousarray(tensors["right"].T),
        tensors["mean"], tensors["bias"], str(metadata["method"]),
        None if report is None else Report.from_dict(report),
        shift=tensors.get("shift"),  # absent in files of earlier versions
        feature_names=files.read_feature_names(metadata, d),
    )  # fmt: skip
    terms = np.abs(new._right) @ np.abs(new._mean) + np.abs(new._shift)
    size = np.abs(new.left) @ (terms + np.abs(new._shift))
    if (np.abs(new.offset - tensors["offset"]) > 8 * (d + r) * _EPS * size).any():
        raise FileFormatError("its offset is not left @ bias")
    return new


def _shift_of(bias: Float, right: Float, mean: Float) -> Float:
    """bias - right @ mean; 0 where that is the rounding of these products."""
    gap = bias - right @ mean
    noise = 4 * len(mean) * _EPS * (np.abs(right) @ np.abs(mean))
    return np.where(np.abs(gap) > noise, gap, 0.0)


def _balanced(left: Float, right: Float) -> tuple[Float, Float]:
    """D^{-1} left and D right, with row j of both of the size sqrt(max |left_j| max |right_j|).

    A row that is zero in one factor alone gets the largest of these sizes in the other.
    """
    sizes = [np.abs(factor).max(axis=1) for factor in (left, right)]
    both = (sizes[0] > 0) & (sizes[1] > 0)
    target = np.where(both, np.sqrt(sizes[0]) * np.sqrt(sizes[1]), 0.0)
    target = np.where(both, target, target.max() or 1.0)
    scales = (target / np.where(size > 0, size, target) for size in sizes)
    balanced = [f * s[:, None] for f, s in zip((left, right), scales, strict=True)]
    return balanced[0], balanced[1]
