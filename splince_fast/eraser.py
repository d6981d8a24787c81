"""The protocol of erasers, and their files."""

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
    """A map of rows that erases concepts: :class:`Projection`, or one that needs their labels.

    Attributes
    ----------
    needs_labels : bool
        Whether rows are erased with the labels of the concept at hand.

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
        """Label of the method that made it."""

    @property
    def report(self) -> Report | None:
        """Erased and kept variables, and the cost."""

    def __call__(
        self,
        X: object,
        labels: object = None,
        *,
        mask: object = None,
        out: object = None,
        progress: bool | None = None,
    ) -> Any:
        """Erased rows, of the kind, shape and dtype of X.

        Parameters
        ----------
        X : array or tensor of shape (..., d)
            Rows.
        labels : mapping or frame of columns
            Labels of the concepts, one per row, where `needs_labels`.
        mask : array of bool, optional
            Rows where it is False stay as they are.
        out : array, optional
            Memory of the result; may be X.
        progress : bool, optional
            Show a progress bar on stderr.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file.

        Parameters
        ----------
        path : path
            The file.
        """


# Readers of files, by the kind that the file states.
LOADERS: dict[str, Callable[[str | os.PathLike[str]], Eraser]] = {
    "projection": Projection.load,
    "conditional": ConditionalEraser.load,
}


def load_eraser(path: str | os.PathLike[str]) -> Eraser:
    """Load an eraser, of whichever class the file holds.

    Parameters
    ----------
    path : path
        A file that an eraser's `save` has written.

    Returns
    -------
    Eraser
        An object of the class that was saved.

    Raises
    ------
    FileFormatError
        The file holds no eraser, or is damaged.
    FileNotFoundError
        There is no such file.

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
