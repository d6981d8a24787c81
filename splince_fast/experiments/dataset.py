"""Data set of an experiment: rows, labels and provenance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from splince_fast.exceptions import SplinceError
from splince_fast.labels import ClassName

# Name of the environment variable that holds the path of the folder of data sets.
VARIABLE = "SPLINCE_FAST_DATA"


def folder(name: str) -> Path | None:
    """Return the folder of a data set in ``SPLINCE_FAST_DATA``, or None if it does not exist."""
    root = os.environ.get(VARIABLE)
    path = Path(root) / name if root else None
    return path if path is not None and path.is_dir() else None


class MissingDataError(SplinceError, FileNotFoundError):
    """A data set is not available; the message says how to obtain it."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """The data set of an experiment: rows, labels and provenance.

    Attributes
    ----------
    name : str
        Name of the data set.
    X : ndarray of shape (n, d)
    labels : dict of str to ndarray of shape (n,)
        Labels by name: "task", "concept" and others.
    groups : ndarray of shape (n,) or None
        Cluster of each row, such as a person or a noun.
    provenance, licence : str
    aligned_class : object
        Class of the concept that is aligned with the second class of the task if the experiment
        varies the association of both; None if it does not.
    sizes : tuple of three int or None
        Numbers of training, validation and test rows for such an experiment; None for the default
        of :func:`~splince_fast.evaluation.spurious_split`.
    arrays : dict of str to ndarray
        Arrays without one entry per row, such as rows of a language-model head.
    words : dict of str to pair of str
        Words for class 0 and class 1, by label: "task" and "concept".

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.experiments.dataset import Dataset
    >>> words = {"task": ("nurse", "surgeon"), "concept": ("woman", "man")}
    >>> labels = {"task": np.array([0, 1]), "concept": np.array([0, 0])}
    >>> rows = Dataset("two people", np.eye(2), labels, None, "made up", "CC0-1.0", words=words)
    >>> rows.cell(1, 0)
    'surgeon, woman'
    """

    name: str
    X: NDArray[Any]
    labels: Mapping[str, NDArray[Any]]
    groups: NDArray[Any] | None
    provenance: str
    licence: str
    aligned_class: ClassName | None = None
    sizes: tuple[int, int, int] | None = None
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    words: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def cell(self, y: int, z: int) -> str:
        """Return a text that describes the cell of task class y and concept class z."""
        task, concept = (self.words.get(k, ()) for k in ("task", "concept"))
        return f"{task[y]}, {concept[z]}" if task and concept else f"y = {y}, z = {z}"
