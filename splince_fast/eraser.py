"""Protocol of erasers, and a function that loads an eraser of any class from a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from splince_fast._runtime import files
from splince_fast.conditional import ConditionalEraser
from splince_fast.projection import Projection

if TYPE_CHECKING:
    from splince_fast.report import Report


@runtime_checkable
class Eraser(Protocol):
    """Protocol of concept erasers: :class:`Projection`, or a map that also takes labels.

    Attributes
    ----------
    needs_labels : bool
        Whether the map needs the labels of the concept for every row.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> axis = np.eye(3)[:, :1]
    >>> isinstance(sf.Projection(axis, axis, np.zeros(3)), sf.Eraser)
    True
    """

    needs_labels: bool

    @property
    def n_features(self) -> int:
        """Width d of the rows."""

    @property
    def method(self) -> str:
        """Name of the method that computed the eraser."""

    @property
    def report(self) -> Report | None:
        """Report of the fit: erased and kept variables, and cost; None without a report."""

    def __call__(
        self,
        X: object,
        labels: object = None,
        *,
        mask: object = None,
        out: object = None,
        progress: bool | None = None,
    ) -> Any:
        """Return erased rows with the type, shape and dtype of X.

        Parameters
        ----------
        X : array or tensor of shape (..., d)
            Rows.
        labels : mapping or frame of columns
            Labels of the concepts, one per row; required if `needs_labels`.
        mask : array of bool, optional
            Rows with False are returned unchanged.
        out : array, optional
            Array for the result; may be X.
        progress : bool, optional
            Show a progress bar on stderr.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the eraser to a safetensors file.

        Parameters
        ----------
        path : path
            Path of the file.
        """


# For each kind of eraser that a file can state, the function that loads it.
LOADERS: dict[str, Callable[[str | os.PathLike[str]], Eraser]] = {
    "projection": Projection.load,
    "conditional": ConditionalEraser.load,
}


def load_eraser(path: str | os.PathLike[str]) -> Eraser:
    """Load an eraser of any class from a file.

    Parameters
    ----------
    path : path
        Path of a file written by the `save` method of an eraser.

    Returns
    -------
    Eraser
        Eraser of the class that was saved.

    Raises
    ------
    FileFormatError
        The file holds no eraser, or is damaged.
    FileNotFoundError
        The file does not exist.

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
    return LOADERS.get(files.kind_of(path) or "", Projection.load)(path)
