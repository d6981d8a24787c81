"""The errors and warnings of the package: one family, so that ``except SplinceError`` catches all.

Every error is also the built-in exception that a caller would expect (``ValueError``,
``TypeError``, ``KeyError``), and its text says what happened, the likely cause and what to do.
"""

from __future__ import annotations


class SplinceError(Exception):
    """Base class of every error that this package raises on purpose."""


class InputError(SplinceError, ValueError):
    """An array has the wrong shape, length, dtype or width, or a parameter is out of range."""


class NonFiniteError(InputError):
    """The data hold NaN or infinity; the text names the first rows, and columns of dense rows.

    Attributes
    ----------
    columns : tuple of int
        Numbers of these columns; empty where the text names them, or none.
    """

    columns: tuple[int, ...] = ()


class LabelError(SplinceError, ValueError):
    """Labels cannot be read, or contradict what earlier blocks said of the same variable."""


class UnknownVariableError(SplinceError, KeyError):
    """A variable was named that these statistics never saw."""

    def __str__(self) -> str:  # KeyError prints the repr of its message
        return str(self.args[0]) if self.args else ""


class NotEnoughDataError(SplinceError, ValueError):
    """Too few rows, or too little weight, for the statistic that was asked for."""


class IncompatibleMomentsError(SplinceError, ValueError):
    """Two states cannot be merged or subtracted: other widths, other kinds, or not a part."""


class ConstantVariableError(SplinceError, ValueError):
    """A variable that should be erased or kept takes a single value."""


class InfeasibleError(SplinceError, ValueError):
    """Kept directions lie in the span of the erased ones.

    Attributes
    ----------
    cosine : float
        Largest principal cosine between the two subspaces.
    """

    def __init__(self, message: str, cosine: float) -> None:
        super().__init__(message)
        self.cosine = cosine

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str, float]]:
        return type(self), (str(self), self.cosine)


class FileFormatError(SplinceError, ValueError):
    """A file is truncated, foreign, tampered with, or written by a newer version."""


class MissingExtraError(SplinceError, ImportError):
    """An optional dependency is not installed; the text names the extra to install."""


class SiteError(InputError):
    """A site in a model cannot be used: not found, never called, or its tensor does not fit."""


class NeverCalledError(SplinceError, RuntimeError):
    """The model ran, and a site where erasers are installed did not."""


class NotEnoughMemoryError(SplinceError, MemoryError):
    """The states of all sites do not fit in the memory of the device."""


class FoldError(SplinceError, ValueError):
    """An eraser cannot be merged into the weights, which are unchanged."""


class SplinceWarning(UserWarning):
    """Base class of the warnings of this package."""


class NothingErasedWarning(SplinceWarning):
    """An eraser of rank 0: the data hold no linear association with the concept."""


class DroppedDirectionsWarning(SplinceWarning):
    """Some of what should be kept was given up, as the caller's policy allows."""


class PrecisionWarning(SplinceWarning):
    """An eraser stands on few digits: a large amplification, or a constraint near rounding."""


class SampledScatterWarning(SplinceWarning):
    """The sampled rows misstate how much some features vary: the eraser may change more."""


class UnseenRowsWarning(SplinceWarning):
    """Rows that an eraser was not fitted on are changed much more than those it was."""


class LabelFeatureWarning(SplinceWarning):
    """A feature of x equals the label of every row, up to offset, scale and coding of classes."""


class ManyClassesWarning(SplinceWarning):
    """An integer variable has many values, and may be a quantity."""


class WholeNumbersWarning(SplinceWarning):
    """Floats that are read as numbers take few values, all whole: they may be classes."""


class OnePassWarning(SplinceWarning):
    """Erasers of several sites were fitted in one pass: each holds only where it stands alone."""


class OtherTokensWarning(SplinceWarning):
    """Erasers of several sites change other tokens than in the fit: later sites may not hold."""
