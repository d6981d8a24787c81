"""Erasers that need labels: shifts of the rows, then a projection; files of any eraser."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import files
from splince_fast._runtime.erase_rows import rows_mask_and_out
from splince_fast._runtime.names import listed, names_from_json, names_to_json
from splince_fast._runtime.progress import Progress
from splince_fast._runtime.rows import is_tensor, torch_to_numpy
from splince_fast.exceptions import FileFormatError, FoldError, InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, class_key, encode
from splince_fast.labels.containers import check_index, map_labels, take_positions, variables_of
from splince_fast.projection import Eraser, Projection, from_record, read_report, to_record

if TYPE_CHECKING:
    from splince_fast.report import Report

Float = NDArray[np.float64]
Mask = NDArray[np.bool_]

KIND = "conditional"
# The first warning in the report of every conditional eraser.
NEEDS_LABELS = (
    "the map depends on the labels of each row, which must be passed for every row to erase; using "
    "them may be unlawful if the concept is a protected attribute"
)
# Rows are mapped in float64, in pieces of this size, so that a call takes little memory.
_PIECE_BYTES = 1 << 24


class Shift(NamedTuple):
    """Shift of rows that depends on one variable, which has k classes or k continuous columns."""

    name: str
    classes: tuple[ClassName, ...] | None  # None for a continuous variable
    mean: Float  # (k,), of the columns of a continuous variable; zeros for classes
    # (k, d): shift of the rows of each class; of a row with the values z, (z - mean) @ matrix.
    matrix: Float

    def check(self, d: int) -> None:
        """Raise InputError unless the arrays are finite and fit to rows of d features."""
        k = len(self.mean if self.classes is None else self.classes)
        if self.matrix.shape != (k, d) or self.mean.shape != (k,):
            raise InputError(
                f"the shift of {self.name!r} has shape {self.matrix.shape}; it must have a row of "
                f"{d} numbers per class or column"
            )
        if not (np.isfinite(self.matrix).all() and np.isfinite(self.mean).all()):
            raise InputError(f"the shift of {self.name!r} must be finite")

    def read(self, column: Encoded, mask: Mask) -> tuple[NDArray[Any], Mask]:
        """Return class numbers (n,), or deviations (n, k); and which rows have no label."""
        if self.classes is None:
            values = np.full((len(mask), len(self.mean)), np.nan)
            if isinstance(column, Columns):
                if column.values.shape[1] != len(self.mean):
                    raise LabelError(
                        f"the labels of {self.name!r} have {column.values.shape[1]} columns; the "
                        f"eraser was fitted to {len(self.mean)}"
                    )
                present = slice(None) if column.present is None else column.present
                values[present] = column.values[present] - self.mean
            return values, np.isnan(values).any(axis=1)
        assert isinstance(column, ClassCodes)
        positions = {class_key(c): i for i, c in enumerate(self.classes)}
        lookup = np.array([*(positions.get(class_key(c), -2) for c in column.classes), -1], np.intp)
        codes = np.where(mask, lookup[column.codes], -1)
        unknown = np.flatnonzero(codes == -2)
        if len(unknown):
            name = column.classes[int(column.codes[unknown[0]])]
            raise LabelError(
                f"row {unknown[0]} has the class {name!r} of {self.name!r}, which is not among the "
                f"fitted classes {listed(self.classes)}"
            )
        return codes, codes < 0

    def of(self, labels: NDArray[Any]) -> Float:
        """Return the shift of each row, (n, d); any shift for a row without a label."""
        if self.classes is not None:
            return np.asarray(self.matrix[labels])
        return np.asarray(labels @ self.matrix)


@dataclass(frozen=True, eq=False, repr=False)
class ConditionalEraser(Eraser):
    """Map r(x, z) = B(x - shift(z)) of rows x with labels z, where B is a :class:`Projection`.

    With `maps`, a matrix A_c is also applied to the rows of class c, and r(x, z) is
    B(mean + A_c (x - shift(z) - mean)), with the mean of B. Every row needs the labels of the
    concept. The object is immutable, and returned by :func:`splince_fast.oracle` and
    :func:`splince_fast.quadratic`.

    Parameters
    ----------
    shifts : sequence of Shift
        Shifts of the erased variables; shift(z) is their sum.
    after : Projection
        B, applied to shifted rows.
    fallback : Projection or None
        Map of rows without a label; if None, such rows raise LabelError.
    maps : (k, d, d) float64, optional
        Matrices A_c, one per class of the variable; there must be exactly one shift.
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

    shifts: Sequence[Shift]
    after: Projection
    fallback: Projection | None
    _: KW_ONLY
    maps: Float | None = None
    method: str = "custom"
    report: Report | None = None

    _KIND = KIND
    needs_labels = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "shifts", tuple(self.shifts))
        d, names = self.n_features, list(self.label_kinds)
        if not names or len(names) < len(self.shifts):
            raise InputError(
                f"shifts are of the variables {[s.name for s in self.shifts]}; there must be at "
                "least one, each named once"
            )
        for shift in self.shifts:
            shift.check(d)
        if self.fallback is not None and self.fallback.n_features != d:
            raise InputError(f"the fallback has {self.fallback.n_features} features, and B has {d}")
        if self.maps is not None:
            is_single = len(names) == 1 and self.shifts[0].classes is not None
            if not is_single or self.maps.shape != (len(self.shifts[0].matrix), d, d):
                raise InputError(
                    f"maps have shape {self.maps.shape}; with one shift, of k classes, they must "
                    f"be (k, {d}, {d})"
                )
            if not np.isfinite(self.maps).all():
                raise InputError("maps must be finite")
        for array in (self.maps, *(a for s in self.shifts for a in (s.mean, s.matrix))):
            if array is not None:
                array.setflags(write=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # arrays of copies are read-only, too

    @property
    def label_kinds(self) -> dict[str, str]:
        """Kind of each variable whose labels are needed: "classes" or "continuous"."""
        return {s.name: "continuous" if s.classes is None else "classes" for s in self.shifts}

    @property
    def n_features(self) -> int:
        """Width d of the rows."""
        return self.after.n_features

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Columns of the fitted data frame; None if the fitted rows were an array."""
        return self.after.feature_names

    def __repr__(self) -> str:
        names = listed([shift.name for shift in self.shifts])
        return f"ConditionalEraser({self.method}, {self.n_features} features, labels of {names})"

    def __rmatmul__(self, second: Projection) -> ConditionalEraser:
        """Return ``second @ self``, the map that applies `second` to the erased rows."""
        if not isinstance(second, Projection):
            return NotImplemented
        fallback = None if self.fallback is None else second @ self.fallback
        return ConditionalEraser(
            self.shifts, second @ self.after, fallback, maps=self.maps,
            method=f"{second.method} @ {self.method}",
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
        """Apply the map to rows, in float64 on the CPU; tensors get no gradients.

        Parameters
        ----------
        X, mask, out, progress
            As for :class:`Projection`; rows outside `mask` need no label.
        labels : mapping or frame of columns, or one column
            Labels of the concept, one per row. For X of shape (batch, token, d) also one per
            sequence, (batch,), or one per token, (batch, token).

        Raises
        ------
        InputError, LabelError
            As for :class:`Projection`; `labels` is missing; or a row has a class that was not
            fitted, or no label and no `fallback`.
        """
        if hasattr(X, "map_blocks"):
            raise InputError("X is a dask array; erase its blocks one by one, each with its labels")
        if is_tensor(X):
            if X.requires_grad or out is not None:
                raise InputError(
                    "this eraser computes no gradients and writes to arrays only; pass X.detach(), "
                    "and assign the result in place of out="
                )
            from splince_fast._runtime.torch_rows import tensor_like

            return tensor_like(X, self(torch_to_numpy(X), labels, mask=mask, progress=progress))
        check_index(X, labels)
        rows, mask, out = rows_mask_and_out(X, self.n_features, self.feature_names, mask, out)
        selected = np.ones(rows.shape[:-1], bool) if mask is None else mask
        columns, missing = self._read(labels, selected)
        selected = selected.reshape(-1)
        flat, result = (array.reshape(-1, self.n_features) for array in (rows, out))
        step = max(1, _PIECE_BYTES // (8 * max(self.n_features, 1)))
        show = False if progress is None and len(flat) <= 64 * step else progress
        with Progress(len(flat), show=show) as bar:
            for start in range(0, len(flat), step):
                piece = slice(start, start + step)
                rows, target = flat[piece].astype(np.float64), result[piece]
                erased = self._erased(rows, [column[piece] for column in columns])
                if self.fallback is not None and missing[piece].any():
                    erased[missing[piece]] = self.fallback(rows[missing[piece]])
                erased[~selected[piece]] = rows[~selected[piece]]
                with np.errstate(over="ignore"):
                    target[...] = erased
                if target.dtype == np.float16:
                    overflows = (np.isinf(target) & np.isfinite(erased)).any(axis=1)
                    if overflows.any():
                        raise InputError(
                            f"row {start + int(np.argmax(overflows))} of the result leaves the "
                            "range of float16 (65504); pass X as float32"
                        )
                bar.advance(len(rows), flat[piece].nbytes)
        if not np.may_share_memory(result, out):  # no view has this shape
            out[...] = result.reshape(out.shape)
        return out

    def _read(self, labels: Any, mask: Mask) -> tuple[list[NDArray[Any]], Mask]:
        """Return the labels of each variable (`Shift.read`), and the rows of `mask` without one."""
        names, leading = [shift.name for shift in self.shifts], mask.shape
        if labels is None:
            raise InputError(
                f"this eraser needs the labels of {listed(names)} for every row; call "
                f"eraser(X, {{{names[0]!r}: column}})"
            )
        if isinstance(labels, Mapping) or hasattr(type(labels), "columns"):
            labels = variables_of(labels, names[0])
        elif len(names) == 1:
            labels = {names[0]: labels}
        else:
            raise InputError(f"labels must be a mapping with the columns {listed(names)}")
        absent = [name for name in names if name not in labels]
        if absent:
            raise InputError(
                f"labels hold no {absent[0]!r}, which this eraser needs for every row; they hold "
                f"{listed(labels)}"
            )
        columns = {name: labels[name] for name in names}
        if len(leading) > 1:
            positions = np.arange(mask.size)
            columns = map_labels(
                columns, lambda column, name: take_positions(column, leading, positions, name)
            )
        encoded, mask = encode(columns, mask.size, kinds=self.label_kinds), mask.reshape(-1)
        arrays, missing = [], np.zeros(mask.size, bool)
        for shift in self.shifts:
            array, without = shift.read(encoded[shift.name], mask)
            without &= mask
            if self.fallback is None and without.any():
                raise LabelError(
                    f"{int(without.sum()):,} row(s) have no label of {shift.name!r}, the first is "
                    f"row {int(np.argmax(without))}; leave them out with mask=, or fit with "
                    "sf.oracle(missing='splince')"
                )
            arrays.append(array)
            missing |= without
        return arrays, missing

    def _erased(self, rows: Float, labels: list[NDArray[Any]]) -> Float:
        """Return the erased rows; any result for a row without a label."""
        shifted = rows - self.shifts[0].of(labels[0])
        for shift, values in zip(self.shifts[1:], labels[1:], strict=True):
            shifted -= shift.of(values)
        if self.maps is not None:
            mean = self.after.mean
            for c in np.unique(labels[0][labels[0] >= 0]):
                members = labels[0] == c
                shifted[members] = mean + (shifted[members] - mean) @ self.maps[c].T
        return np.asarray(self.after(shifted, out=shifted))

    def fold_into(self, weight: object, bias: object = None) -> NoReturn:
        """Raise FoldError, because the weights of a layer cannot depend on labels.

        Parameters
        ----------
        weight, bias
            Ignored.
        """
        raise FoldError(
            f"{self.method} maps each row by its labels, so that it cannot be merged into the "
            "weights of a layer; erase the rows, or use leace or splince"
        )

    def _to_record(self) -> files.Record:
        tensors: files.Tensors = {} if self.maps is None else {"maps": self.maps}
        for i, shift in enumerate(self.shifts):
            tensors |= {f"shift.{i}.mean": shift.mean, f"shift.{i}.matrix": shift.matrix}
        maps = {}
        for key, part in (("after", self.after), ("fallback", self.fallback)):
            if part is not None:
                arrays, maps[key] = to_record(part)
                tensors |= {f"{key}.{name}": tensor for name, tensor in arrays.items()}
        shifts = [
            {"name": s.name, "classes": None if s.classes is None else names_to_json(s.classes)}
            for s in self.shifts
        ]
        report = None if self.report is None else self.report.to_dict()
        return tensors, {"shifts": shifts, "method": self.method, "maps": maps, "report": report}

    @classmethod
    def _from_record(cls, tensors: files.Tensors, metadata: Mapping[str, Any]) -> ConditionalEraser:
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
            key: from_record({k.removeprefix(f"{key}."): t for k, t in tensors.items()}, entry)
            for key, entry in metadata["maps"].items()
        }
        return cls(
            shifts, maps["after"], maps.get("fallback"), maps=tensors.get("maps"),
            method=str(metadata["method"]), report=read_report(metadata),
        )  # fmt: skip


def load_eraser(path: str | os.PathLike[str]) -> Eraser:
    """Load an eraser of any class from a file.

    Parameters
    ----------
    path : path
        Path of a file written by the `save` method of an eraser.

    Returns
    -------
    Eraser
        Eraser of the class that was saved; errors are those of :meth:`Projection.load`.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> path = Path(tempfile.mkdtemp()) / "axis.safetensors"
    >>> axis = np.eye(3)[:, :1]
    >>> sf.Projection(axis, axis, np.zeros(3)).save(path)
    >>> sf.load_eraser(path).needs_labels
    False
    """
    is_conditional = files.kind_of(path) == KIND
    return ConditionalEraser.load(path) if is_conditional else Projection.load(path)
