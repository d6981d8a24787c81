"""ConditionalEraser: an affine map of rows that depends on the labels of each row."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import files
from splince_fast._runtime.erase_rows import rows_mask_and_out
from splince_fast._runtime.progress import Progress
from splince_fast._runtime.rows import is_tensor, torch_to_numpy
from splince_fast.exceptions import FileFormatError, FoldError, InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, class_key, encode
from splince_fast.labels.containers import check_index, take_positions, variables_of
from splince_fast.labels.names import listed, names_from_json, names_to_json
from splince_fast.projection import Projection, from_record, to_record

if TYPE_CHECKING:
    from splince_fast.report import Report

Float = NDArray[np.float64]

_FORMAT, KIND = 1, "conditional"
# The first warning in the report of every conditional eraser.
NEEDS_LABELS = (
    "the map depends on the labels of each row, which must be passed for every row to erase; using "
    "them may be unlawful if the concept is a protected attribute"
)
# Size in bytes of the blocks, in float64, in which rows are mapped.
_BLOCK_BYTES = 1 << 24


class Shift(NamedTuple):
    """Shift of rows that depends on one variable, which has k classes or k continuous columns.

    Attributes
    ----------
    name : str
        Name of the variable.
    classes : tuple of str, bool or int, or None
        Classes of the variable; None for a continuous variable.
    mean : (k,) float64
        Means of the columns of a continuous variable; zeros for classes.
    matrix : (k, d) float64
        Shift of the rows of each class. For a continuous variable with the values z, the shift of
        a row is (z - mean) @ matrix.
    """

    name: str
    classes: tuple[ClassName, ...] | None
    mean: Float
    matrix: Float


class ConditionalEraser:
    """Map r(x, z) = B(x - shift(z)) of rows x with labels z, where B is a :class:`Projection`.

    With `maps`, a matrix A_c is also applied to the rows of class c, and r(x, z) is
    B(mean + A_c (x - shift(z) - mean)). Every row needs the labels of the concept; their use may be
    unlawful if the concept is a protected attribute. The object is immutable. It is returned by
    :func:`splince_fast.oracle` and :func:`splince_fast.quadratic`.

    Parameters
    ----------
    shifts : sequence of Shift
        Shifts of the erased variables; shift(z) is their sum.
    after : Projection
        B, applied to shifted rows.
    fallback : Projection or None
        Map of rows without a label; if None, such rows raise LabelError.
    maps : (k, d, d) float64, optional
        Matrices A_c, one per class of the variable; there must be exactly one shift. The `mean` in
        the formula is that of `after`.
    method : str
        Name of the method that computed the map.
    report : Report, optional
        Report of the fit.

    Raises
    ------
    InputError
        There is no shift, or two of one variable; the shapes of the arguments do not match; or a
        value is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=500)
    >>> X = rng.normal(size=(500, 4)) + z[:, None]
    >>> eraser = sf.oracle(sf.Moments().update(X, {"z": z}), erase="z")
    >>> clean = eraser(X, {"z": z})
    >>> bool(np.abs(clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)).max() < 1e-12)
    True
    """

    needs_labels = True
    __array_ufunc__ = None  # makes array @ eraser raise TypeError

    def __init__(
        self,
        shifts: Sequence[Shift],
        after: Projection,
        fallback: Projection | None,
        *,
        maps: Float | None = None,
        method: str = "custom",
        report: Report | None = None,
    ) -> None:
        d = after.n_features
        names = [shift.name for shift in shifts]
        if not names or len(set(names)) < len(names):
            raise InputError(
                f"shifts are of the variables {names}; there must be at least one, each named once"
            )
        for shift in shifts:
            k = len(shift.mean if shift.classes is None else shift.classes)
            if shift.matrix.shape != (k, d) or shift.mean.shape != (k,):
                raise InputError(
                    f"the shift of {shift.name!r} has shape {shift.matrix.shape}; it must have a "
                    f"row of {d} numbers per class or column"
                )
            if not (np.isfinite(shift.matrix).all() and np.isfinite(shift.mean).all()):
                raise InputError(f"the shift of {shift.name!r} must be finite")
        if fallback is not None and fallback.n_features != d:
            raise InputError(f"the fallback has {fallback.n_features} features, and B has {d}")
        if maps is not None:
            is_single = len(shifts) == 1 and shifts[0].classes is not None
            if not is_single or maps.shape != (len(shifts[0].matrix), d, d):
                raise InputError(
                    f"maps have shape {maps.shape}; with one shift, of k classes, they must be "
                    f"(k, {d}, {d})"
                )
            if not np.isfinite(maps).all():
                raise InputError("maps must be finite")
        self._maps = maps
        self._shifts, self._after, self._fallback = tuple(shifts), after, fallback
        self._method, self._report = method, report
        self._protect()

    def _protect(self) -> None:
        """Make the arrays read-only."""
        for array in (self._maps, *(a for s in self._shifts for a in (s.mean, s.matrix))):
            if array is not None:
                array.setflags(write=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._protect()

    # -- attributes ------------------------------------------------------------------------

    @property
    def shifts(self) -> tuple[Shift, ...]:
        """Shifts of the erased variables."""
        return self._shifts

    @property
    def after(self) -> Projection:
        """B, the map applied after the shift."""
        return self._after

    @property
    def maps(self) -> Float | None:
        """Matrices A_c of the classes, (k, d, d) float64, applied before B, or None."""
        return self._maps

    @property
    def fallback(self) -> Projection | None:
        """Map of rows without a label; None if such rows raise LabelError."""
        return self._fallback

    @property
    def label_kinds(self) -> dict[str, str]:
        """Kind of each variable whose labels are needed: "classes" or "continuous"."""
        return {s.name: "continuous" if s.classes is None else "classes" for s in self._shifts}

    @property
    def n_features(self) -> int:
        """Width d of the rows."""
        return self._after.n_features

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Columns of the fitted data frame; None if the fitted rows were an array."""
        return self._after.feature_names

    @property
    def method(self) -> str:
        """Name of the method that computed the map."""
        return self._method

    @property
    def report(self) -> Report | None:
        """Report of the fit: erased and kept variables, and cost; None without a report."""
        return self._report

    def __repr__(self) -> str:
        names = listed([shift.name for shift in self._shifts])
        return f"ConditionalEraser({self._method}, {self.n_features} features, labels of {names})"

    def __rmatmul__(self, second: Projection) -> ConditionalEraser:
        """Return ``second @ self``, the map that applies `second` to the erased rows."""
        if not isinstance(second, Projection):
            return NotImplemented
        fallback = None if self._fallback is None else second @ self._fallback
        return ConditionalEraser(
            self._shifts, second @ self._after, fallback, maps=self._maps,
            method=f"{second.method} @ {self._method}",
        )  # fmt: skip

    # -- applying --------------------------------------------------------------------------

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

        The time is O(n d r) if the map removes r dimensions, and O(n d^2) if each class has its own
        map.

        Parameters
        ----------
        X : ndarray or torch tensor of shape (..., d), or array-like of shape (n, d)
            Rows; the map is computed in float64. Tensors are mapped on the CPU, without gradients.
        labels : mapping or frame of columns, or one column
            Labels of the concept, one per row. For X of shape (batch, token, d) also one per
            sequence, (batch,), or one per token, (batch, token).
        mask : array or tensor of bool, of shape X.shape[:-1], optional
            Rows with False are returned unchanged and need no label.
        out : array of the shape and dtype of the result, optional
            Array for the result; may be X.
        progress : bool, optional
            Show a progress bar on stderr; by default only in a terminal or notebook, after two
            seconds.

        Returns
        -------
        ndarray or torch tensor
            Erased rows with the type, shape and dtype of X (float64 for integers); `out` if passed.

        Raises
        ------
        InputError
            `labels` is missing, X has the wrong width or columns, `mask` or `out` does not match
            X, or a result exceeds the range of float16.
        LabelError
            A class is not among the fitted classes, or a row has no label and there is no fallback.
        """
        if hasattr(X, "map_blocks"):
            raise InputError("X is a dask array; erase its blocks one by one, each with its labels")
        if is_tensor(X):
            if X.requires_grad:
                raise InputError(
                    "X requires gradients, which this eraser does not compute; use X.detach()"
                )
            if out is not None:
                raise InputError("out= is for arrays; assign the result to a tensor")
            from splince_fast._runtime.torch_rows import tensor_like

            rows = torch_to_numpy(X)
            return tensor_like(X, self(rows, labels, mask=mask, progress=progress))
        check_index(X, labels)
        rows, mask, out = rows_mask_and_out(X, self.n_features, self.feature_names, mask, out)
        flat_mask = None if mask is None else mask.reshape(-1)
        encoded = self._encode(labels, rows.shape[:-1], flat_mask)
        flat = rows.reshape(-1, rows.shape[-1])
        contiguous = out.flags.c_contiguous
        result = out.reshape(flat.shape) if contiguous else np.empty(flat.shape, out.dtype)
        self._write(flat, encoded, flat_mask, result, progress)
        if not contiguous:
            out[...] = result.reshape(out.shape)
        return out

    def _encode(
        self, labels: Any, leading_shape: tuple[int, ...], mask: NDArray[np.bool_] | None
    ) -> list[NDArray[Any]]:
        """Return the labels of each variable, for rows with the shape `leading_shape`.

        Codes (n,) for classes, with -1 for a missing label; values (n, k), with NaN for a missing
        label, for a continuous variable.
        """
        names = [shift.name for shift in self._shifts]
        if labels is None:
            raise InputError(
                f"this eraser needs the labels of {listed(names)} for every row; call "
                f"eraser(X, {{{names[0]!r}: column}})"
            )
        if isinstance(labels, Mapping) or hasattr(type(labels), "columns"):
            labels = variables_of(labels, names[0])
            missing = [name for name in names if name not in labels]
            if missing:
                raise InputError(
                    f"labels hold no {missing[0]!r}, which this eraser needs for every row; they "
                    f"hold {listed(labels)}"
                )
            columns = {name: labels[name] for name in names}
        elif len(names) > 1:
            raise InputError(f"labels must be a mapping with the columns {listed(names)}")
        else:
            columns = {names[0]: labels}
        n = int(np.prod(leading_shape))
        if len(leading_shape) > 1:
            all_rows = np.arange(n)
            columns |= {
                name: take_positions(column, leading_shape, all_rows, f"labels[{name!r}]")
                for name, column in columns.items()
                if hasattr(column, "__len__")  # `encode` raises an error for other types
            }
        encoded = encode(columns, n, kinds=self.label_kinds)
        arrays: list[NDArray[Any]] = []
        for shift in self._shifts:
            column = encoded.get(shift.name)
            if shift.classes is None:
                values = _values_of(column, shift, n)
                unlabelled = np.isnan(values).any(axis=1)
                arrays.append(values)
            else:
                codes = _codes_of(column, shift, n, mask)
                unlabelled = codes < 0
                arrays.append(codes)
            if mask is not None:
                unlabelled &= mask
            if self._fallback is None and unlabelled.any():
                raise LabelError(
                    f"{int(unlabelled.sum()):,} row(s) have no label of {shift.name!r}, "
                    f"the first is row {int(np.argmax(unlabelled))}; leave them out with mask=, or "
                    "fit with sf.oracle(missing='splince')"
                )
        return arrays

    def _write(
        self,
        rows: NDArray[np.generic],
        encoded: list[NDArray[Any]],
        mask: NDArray[np.bool_] | None,
        out: NDArray[np.generic],
        progress: bool | None,
    ) -> None:
        """Write the erased rows into `out`, (n, d), which may be `rows`; masked rows are copied."""
        n, d = rows.shape
        step = max(1, _BLOCK_BYTES // (8 * max(d, 1)))
        show = False if progress is None and n <= 64 * step else progress
        with Progress(n, show=show) as bar:
            for start in range(0, n, step):
                piece = slice(start, min(n, start + step))
                block = rows[piece].astype(np.float64)
                unlabelled = np.zeros(len(block), bool)
                shifted = block.copy()
                for shift, column in zip(self._shifts, encoded, strict=True):
                    values = column[piece]
                    if shift.classes is None:
                        missing = np.isnan(values).any(axis=1)
                        deviations = np.where(missing[:, None], 0.0, values - shift.mean)
                        shifted -= deviations @ shift.matrix
                    else:
                        missing = values < 0
                        shifted -= shift.matrix.take(np.where(missing, 0, values), axis=0)
                    unlabelled |= missing
                if self._maps is not None:
                    mean, codes = self._after.mean, encoded[0][piece]
                    for c in np.unique(codes[codes >= 0]):
                        class_rows = np.flatnonzero(codes == c)
                        shifted[class_rows] = mean + (shifted[class_rows] - mean) @ self._maps[c].T
                self._after(shifted, out=shifted)
                if unlabelled.any() and self._fallback is not None:
                    shifted[unlabelled] = self._fallback(block[unlabelled])
                if mask is not None:
                    shifted[~mask[piece]] = block[~mask[piece]]
                with np.errstate(over="ignore"):
                    out[piece] = shifted
                if out.dtype == np.float16:
                    overflow = np.isfinite(shifted) & ~np.isfinite(out[piece])
                    if overflow.any():
                        row = start + int(np.argmax(overflow.any(axis=1)))
                        raise InputError(
                            f"row {row} of the result leaves the range of float16 (65504); pass X "
                            "as float32"
                        )
                bar.advance(len(block), block.nbytes)

    def fold_into(self, weight: object, bias: object = None) -> NoReturn:
        """Raise FoldError, because the weights of a layer cannot depend on labels.

        Parameters
        ----------
        weight, bias
            Ignored.

        Raises
        ------
        FoldError
            Always.
        """
        raise FoldError(
            f"{self._method} maps each row by its labels, so that it cannot be merged into the "
            "weights of a layer; erase the rows, or use leace or splince"
        )

    # -- persistence -----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the eraser to a safetensors file, with names and report as metadata.

        Parameters
        ----------
        path : path
            Path of the file, which is replaced atomically: an error leaves an earlier file intact.
            Its suffix is ``.safetensors`` or empty; others raise InputError.
        """
        target = files.eraser_path(path)
        tensors: files.Tensors = {} if self._maps is None else {"maps": self._maps}
        for i, shift in enumerate(self._shifts):
            tensors |= {f"shift.{i}.mean": shift.mean, f"shift.{i}.matrix": shift.matrix}
        maps = {"after": self._after, "fallback": self._fallback}
        records = {key: to_record(part) for key, part in maps.items() if part is not None}
        for key, (arrays, _) in records.items():
            tensors |= {f"{key}.{name}": tensor for name, tensor in arrays.items()}
        shifts = [
            {"name": s.name, "classes": None if s.classes is None else names_to_json(s.classes)}
            for s in self._shifts
        ]
        files.write(
            target, KIND, _FORMAT, tensors,
            {
                "shifts": shifts, "method": self._method,
                "maps": {key: metadata for key, (_, metadata) in records.items()},
                "report": None if self._report is None else self._report.to_dict(),
            },
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ConditionalEraser:
        """Return the eraser that a file holds, bit for bit as it was saved.

        Parameters
        ----------
        path : path
            Path of a file written by :meth:`save`.

        Raises
        ------
        FileFormatError
            The file is truncated, inconsistent, not a conditional eraser, or from a newer version.
        FileNotFoundError
            The file does not exist.
        """
        from splince_fast.report import Report

        tensors, metadata = files.read(path, KIND, _FORMAT)
        with files.consistent(path, "fit again"):
            if any(tensor.dtype != np.float64 for tensor in tensors.values()):
                raise FileFormatError("a tensor is not float64")
            shifts = [
                Shift(
                    str(entry["name"]),
                    None if entry["classes"] is None else names_from_json(entry["classes"]),
                    tensors[f"shift.{i}.mean"],
                    tensors[f"shift.{i}.matrix"],
                )
                for i, entry in enumerate(metadata["shifts"])
            ]
            maps = {
                key: from_record(
                    {
                        name.removeprefix(f"{key}."): tensor
                        for name, tensor in tensors.items()
                        if name.startswith(f"{key}.")
                    },
                    entry,
                )
                for key, entry in metadata["maps"].items()
            }
            report = metadata["report"]
            return cls(
                shifts, maps["after"], maps.get("fallback"), maps=tensors.get("maps"),
                method=str(metadata["method"]),
                report=None if report is None else Report.from_dict(report),
            )  # fmt: skip


def _values_of(column: Encoded | None, shift: Shift, n: int) -> Float:
    """Return the columns of a continuous variable, (n, k), with NaN for missing labels."""
    values = np.full((n, len(shift.mean)), np.nan)
    if isinstance(column, Columns):
        if column.values.shape[1] != len(shift.mean):
            raise LabelError(
                f"the labels of {shift.name!r} have {column.values.shape[1]} columns; the eraser "
                f"was fitted to {len(shift.mean)}"
            )
        present = slice(None) if column.present is None else column.present
        values[present] = column.values[present]
    return values


def _codes_of(
    column: Encoded | None, shift: Shift, n: int, mask: NDArray[np.bool_] | None
) -> NDArray[np.intp]:
    """Return the class index of each row, -1 without a label; LabelError for other classes."""
    if not isinstance(column, ClassCodes):
        return np.full(n, -1, np.intp)
    assert shift.classes is not None
    positions = {class_key(c): i for i, c in enumerate(shift.classes)}
    lookup = np.array([*(positions.get(class_key(c), -2) for c in column.classes), -1], np.intp)
    codes = lookup[column.codes]
    if mask is not None:
        codes[~mask] = -1
    unknown = np.flatnonzero(codes == -2)
    if len(unknown):
        name = column.classes[int(column.codes[unknown[0]])]
        raise LabelError(
            f"row {unknown[0]} has the class {name!r} of {shift.name!r}, which is not among the "
            f"fitted classes {listed(shift.classes)}"
        )
    return codes
