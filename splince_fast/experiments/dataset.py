"""The rows of an experiment with their labels and their origin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from splince_fast.exceptions import SplinceError
from splince_fast.labels import ClassName

# Environment variable that names the folder of the data sets.
VARIABLE = "SPLINCE_FAST_DATA"


def folder(name: str) -> Path | None:
    """The folder of a data set, if ``SPLINCE_FAST_DATA`` has it."""
    root = os.environ.get(VARIABLE)
    path = Path(root) / name if root else None
    return path if path is not None and path.is_dir() else None


class MissingDataError(SplinceError, FileNotFoundError):
    """A data set is not available; the text names the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Rows with their labels.

    Attributes
    ----------
    name : str
        Name of the data set.
    X : ndarray of shape (n, d)
    labels : dict of str to ndarray of shape (n,)
        "task", "concept" and other labels of the experiment.
    groups : ndarray of shape (n,) or None
        Rows that belong together (a person, a noun).
    provenance, licence : str
    aligned_class : object
        Class of the concept that goes with the second class of the task; None without a protocol.
    sizes : tuple of three int or None
        Rows for training, validation and test of the association protocol.
    arrays : dict of str to ndarray
        Arrays that have no entry per row, such as those of a language-model head.
    words : dict of str to pair of str
        Names of the classes 0 and 1 of the task and of the concept.

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
        """A cell of task and concept in words."""
        task, concept = (self.words.get(k, ()) for k in ("task", "concept"))
        return f"{task[y]}, {concept[z]}" if task and concept else f"y = {y}, z = {z}"
