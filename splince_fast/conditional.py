"""ConditionalEraser: an affine map of each row that depends on its labels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import erase_rows, files
from splince_fast._runtime.arrays import (
    as_mask,
    check_feature_names,
    feature_names,
    is_tensor,
    torch_to_numpy,
)
from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import FileFormatError, FoldError, InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, class_key, encode
from splince_fast.labels.names import listed, names_from_json, names_to_json
from splince_fast.labels.positions import along, check_index
from splince_fast.projection import Projection, from_record, to_record

if TYPE_CHECKING:
    from splince_fast.report import Report

Float = NDArray[np.float64]

_FORMAT, KIND = 1, "conditional"
# The first warning of every report.
NEEDS_LABELS = (
    "the map depends on the label of each row: it needs them for every row that is erased, and "
    "using them may be unlawful where the concept is a protected attribute"
)
# Bytes of rows per step, in float64.
_BLOCK_BYTES = 1 << 24


class Shift(NamedTuple):
    """The shift that one variable contributes: a row of `matrix` per class, or per column.

    Attributes
    ----------
    name : str
    classes : tuple of str, bool or int, or None
        None for a continuous variable.
    mean : (k,) float64
        Means of the columns of a continuous variable; zeros for classes.
    matrix : (k, d) float64
        Shift of a row of the class, or per unit of the column.
    """

    name: str
    classes: tuple[ClassName, ...] | None
    mean: Float
    matrix: Float


class ConditionalEraser:
    """The map r(x, z) = B(x - shift(z)), with an affine map B of low co-rank.

    Or, with a matrix A_c per class of one variable, B(mean + A_c (x - shift(z) - mean)). Made by
    :func:`splince_fast.oracle` and :func:`splince_fast.quadratic`; immutable. It needs the
    labels of the concept for every row: using them may be unlawful where the concept is protected.

    Parameters
    ----------
    shifts : sequence of Shift
        Of each erased variable; they add up.
    after : Projection
        B, applied to shifted rows.
    fallback : Projection or None
        The map of rows without a label; None refuses such rows.
    maps : (k, d, d) float64, optional
        A_c, for the classes of the only shift; about the mean of `after`.
    method : str
        Label of the method that made it.
    report : Report, optional
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
    >>> eraser = sf.oracle(sf.Moments().update(X, {"z": z}), erase="z")
    >>> clean = eraser(X, {"z": z})
    >>> bool(np.abs(clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)).max() < 1e-12)
    True
    """

    needs_labels = True
    __array_ufunc__ = None  # NumPy must not try array @ eraser

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
            one = len(shifts) == 1 and shifts[0].classes is not None
            if not one or maps.shape != (len(shifts[0].matrix), d, d):
                raise InputError(
                    f"maps have shape {maps.shape}; with one shift, of k classes, they must be "
                    f"(k, {d}, {d})"
                )
            if not np.isfinite(maps).all():
                raise InputError("maps must be finite")
            maps.setflags(write=False)
        self._maps = maps
        self._shifts, self._after, self._fallback = tuple(shifts), after, fallback
        self._method, self._report = method, report

    # -- what it is ------------------------------------------------------------------------

    @property
    def shifts(self) -> tuple[Shift, ...]:
        """The shift of each erased variable."""
        return self._shifts

    @property
    def after(self) -> Projection:
        """B, the map that follows the shift."""
        return self._after

    @property
    def maps(self) -> Float | None:
        """(k, d, d) float64: the matrix of each class, applied before B; None where it has none."""
        return self._maps

    @property
    def fallback(self) -> Projection | None:
        """The map of rows without a label; None where these raise an error."""
        return self._fallback

    @property
    def label_kinds(self) -> dict[str, str]:
        """Variables whose labels it needs, each with its kind: "classes" or "continuous"."""
        kinds = {True: "continuous", False: "classes"}
        return {shift.name: kinds[shift.classes is None] for shift in self._shifts}

    @property
    def n_features(self) -> int:
        """Width d of the rows."""
        return self._after.n_features

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Columns of the data frame that it was fitted on; None if that was an array."""
        return self._after.feature_names

    @property
    def method(self) -> str:
        """Label of the method that made it."""
        return self._method

    @property
    def report(self) -> Report | None:
        """Erased and kept variables, and the cost."""
        return self._report

    def __repr__(self) -> str:
        names = listed([shift.name for shift in self._shifts])
        return f"ConditionalEraser({self._method}, {self.n_features} features, labels of {names})"

    def __rmatmul__(self, second: Projection) -> ConditionalEraser:
        """The map that applies `second` to erased rows."""
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
        """Apply to rows: O(n d) for the shift, O(n d r) for a map B of co-rank r.

        A matrix per class costs O(n d^2).

        Parameters
        ----------
        X : ndarray or torch tensor of shape (..., d), or what NumPy reads as (n, d)
            Computed in float64. A tensor is computed on the CPU, and records no gradient.
        labels : mapping or frame of columns, or one column
            Labels of the concept, one per row; with leading dimensions one per sequence, (batch,),
            or per position, (batch, token).
        mask : array or tensor of bool, of shape X.shape[:-1], optional
            Rows where it is False stay as they are, and need no label.
        out : array of the shape and dtype of the result, optional
            Memory of the result; may be X.
        progress : bool, optional
            Show a progress bar on stderr; by default only in a terminal or notebook, after two
            seconds.

        Returns
        -------
        ndarray or torch tensor
            Of the kind, shape and dtype of X (float64 for integers); `out` if given.

        Raises
        ------
        InputError
            No labels; wrong width or columns; a mask or an `out` that does not fit; a result
            beyond float16.
        LabelError
            A class that the fit has not seen, or a row without a label where there is no fallback.
        """
        if hasattr(X, "map_blocks"):
            raise InputError("X is a dask array; erase its blocks one by one, each with its labels")
        if is_tensor(X):
            if X.requires_grad:
                raise InputError("X records gradients, which this eraser does not; use X.detach()")
            if out is not None:
                raise InputError("out= is for arrays; assign the result to a tensor")
            from splince_fast._runtime.torch_rows import tensor_like

            rows = torch_to_numpy(X)
            return tensor_like(X, self(rows, labels, mask=mask, progress=progress))
        rows = erase_rows.as_stack(X, self.n_features)
        if hasattr(X, "columns"):
            check_feature_names(feature_names(X, self.n_features), self.feature_names)
        check_index(X, labels)
        dtype = erase_rows.result_dtype(rows.dtype)
        chosen = None if mask is None else as_mask(mask, rows.shape[:-1])
        flat_mask = None if chosen is None else chosen.reshape(-1)
        read = self._read(labels, rows.shape[:-1], flat_mask)
        if out is None:
            out = np.empty(rows.shape, dtype)
        else:
            erase_rows.check_out(out, rows, dtype)
        flat = rows.reshape(-1, rows.shape[-1])
        result = out.reshape(flat.shape) if out.flags.c_contiguous else np.empty(flat.shape, dtype)
        self._write(flat, read, flat_mask, result, progress)
        if not out.flags.c_contiguous:
            out[...] = result.reshape(out.shape)
        return out

    def _read(
        self, labels: Any, lead: tuple[int, ...], chosen: NDArray[np.bool_] | None
    ) -> list[NDArray[Any]]:
        """Per variable codes (n,), -1 where missing, or values (n, c), NaN where missing."""
        names = [shift.name for shift in self._shifts]
        if labels is None:
            raise InputError(
                f"this eraser needs the labels of {listed(names)} for every row; call "
                f"eraser(X, {{{names[0]!r}: column}})"
            )
        columns = labels
        if isinstance(labels, Mapping) or hasattr(labels, "columns"):
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
        n = int(np.prod(lead))
        if len(lead) > 1:
            every = np.arange(n)
            columns = {
                name: along(column, lead, every, f"labels[{name!r}]")
                for name, column in columns.items()
            }
        encoded = encode(columns, n, kinds=self.label_kinds)
        found: list[NDArray[Any]] = []
        for shift in self._shifts:
            column = encoded.get(shift.name)
            if shift.classes is None:
                values = _values_of(column, shift, n)
                blank = np.isnan(values).any(axis=1)
                found.append(values)
            else:
                codes = _codes_of(column, shift, n, chosen)
                blank = codes < 0
                found.append(codes)
            if chosen is not None:
                blank &= chosen
            if self._fallback is None and blank.any():
                raise LabelError(
                    f"{int(blank.sum()):,} row(s) have no label of {shift.name!r}, row "
                    f"{int(np.argmax(blank))} the first; leave them out with mask=, or fit with "
                    "missing='splince', which sf.oracle takes"
                )
        return found

    def _write(
        self,
        rows: NDArray[np.generic],
        read: list[NDArray[Any]],
        chosen: NDArray[np.bool_] | None,
        out: NDArray[np.generic],
        progress: bool | None,
    ) -> None:
        """Write r(rows) into `out`, which may be `rows`; both are (n, d)."""
        n, d = rows.shape
        step = max(1, _BLOCK_BYTES // (8 * max(d, 1)))
        show = False if progress is None and n <= 64 * step else progress
        with Progress(n, show=show) as bar:
            for start in range(0, n, step):
                piece = slice(start, min(n, start + step))
                block = rows[piece].astype(np.float64)
                blank = np.zeros(len(block), bool)
                shifted = block.copy()
                for shift, column in zip(self._shifts, read, strict=True):
                    own = column[piece]
                    if shift.classes is None:
                        lost = np.isnan(own).any(axis=1)
                        shifted -= np.where(lost[:, None], 0.0, own - shift.mean) @ shift.matrix
                    else:
                        lost = own < 0
                        shifted -= shift.matrix.take(np.where(lost, 0, own), axis=0)
                    blank |= lost
                if self._maps is not None:
                    mean, own = self._after.mean, read[0][piece]
                    for c in np.unique(own[own >= 0]):
                        rows_of = np.flatnonzero(own == c)
                        shifted[rows_of] = mean + (shifted[rows_of] - mean) @ self._maps[c].T
                self._after(shifted, out=shifted)
                if blank.any() and self._fallback is not None:
                    shifted[blank] = self._fallback(block[blank])
                if chosen is not None:
                    shifted[~chosen[piece]] = block[~chosen[piece]]
                with np.errstate(over="ignore"):
                    out[piece] = shifted
                if out.dtype == np.float16:
                    lost_range = np.isfinite(shifted) & ~np.isfinite(out[piece])
                    if lost_range.any():
                        row = start + int(np.argmax(lost_range.any(axis=1)))
                        raise InputError(
                            f"row {row} of the result leaves the range of float16 (65504); pass X "
                            "as float32"
                        )
                bar.advance(len(block), block.nbytes)

    def fold_into(self, weight: object, bias: object = None) -> NoReturn:
        """Raise InputError: the map depends on the labels of each row, and a layer does not.

        Parameters
        ----------
        weight, bias
            Not used.

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
        """Write a safetensors file: shifts and maps; names and report as metadata.

        Parameters
        ----------
        path : path
            The file; whatever happens, it holds either what it held before or the whole map.
        """
        tensors: files.Tensors = {} if self._maps is None else {"maps": self._maps}
        for i, shift in enumerate(self._shifts):
            tensors |= {f"shift.{i}.mean": shift.mean, f"shift.{i}.matrix": shift.matrix}
        maps = {"after": self._after, "fallback": self._fallback}
        records = {key: to_record(one) for key, one in maps.items() if one is not None}
        for key, (own, _) in records.items():
            tensors |= {f"{key}.{name}": tensor for name, tensor in own.items()}
        described = [
            {"name": s.name, "classes": None if s.classes is None else names_to_json(s.classes)}
            for s in self._shifts
        ]
        files.write(
            path, KIND, _FORMAT, tensors,
            {
                "shifts": described, "method": self._method,
                "maps": {key: described for key, (_, described) in records.items()},
                "report": None if self._report is None else self._report.to_dict(),
            },
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ConditionalEraser:
        """Read an eraser back, bit for bit.

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
        from splince_fast.report import Report

        tensors, metadata = files.read(path, KIND, _FORMAT)
        with files.consistent(path, "fit again"):
            if any(tensor.dtype != np.float64 for tensor in tensors.values()):
                raise FileFormatError("a tensor is not float64")
            shifts = [
                Shift(
                    str(own["name"]),
                    None if own["classes"] is None else names_from_json(own["classes"]),
                    tensors[f"shift.{i}.mean"],
                    tensors[f"shift.{i}.matrix"],
                )
                for i, own in enumerate(metadata["shifts"])
            ]
            maps = {
                key: from_record(
                    {
                        name.removeprefix(f"{key}."): tensor
                        for name, tensor in tensors.items()
                        if name.startswith(f"{key}.")
                    },
                    own,
                )
                for key, own in metadata["maps"].items()
            }
            report = metadata["report"]
            return cls(
                shifts, maps["after"], maps.get("fallback"), maps=tensors.get("maps"),
                method=str(metadata["method"]),
                report=None if report is None else Report.from_dict(report),
            )  # fmt: skip


def _values_of(column: Encoded | None, shift: Shift, n: int) -> Float:
    """(n, c): the columns of a continuous variable; NaN where a label is missing."""
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
    column: Encoded | None, shift: Shift, n: int, chosen: NDArray[np.bool_] | None
) -> NDArray[np.intp]:
    """The row of the shift's matrix of each row of X; LabelError for a class never seen."""
    if not isinstance(column, ClassCodes):
        return np.full(n, -1, np.intp)
    assert shift.classes is not None
    places = {class_key(c): i for i, c in enumerate(shift.classes)}
    lookup = np.array([*(places.get(class_key(c), -2) for c in column.classes), -1], np.intp)
    codes = lookup[column.codes]
    if chosen is not None:
        codes[~chosen] = -1
    unknown = np.flatnonzero(codes == -2)
    if len(unknown):
        name = column.classes[int(column.codes[unknown[0]])]
        raise LabelError(
            f"row {unknown[0]} has the class {name!r} of {shift.name!r}, which the fit has not "
            f"seen; its classes are {listed(shift.classes)}"
        )
    return codes
