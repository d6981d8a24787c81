"""Errors and warnings of the package; ``except SplinceError`` catches all its errors.

Every error is also a built-in exception, such as ``ValueError`` or ``KeyError``. The text of an
error describes the problem, the likely cause and a remedy.
"""

from __future__ import annotations


class SplinceError(Exception):
    """Base class of the errors of this package."""


class InputError(SplinceError, ValueError):
    """An array has a wrong shape, length, dtype or width, or a parameter is out of range."""


class NonFiniteError(InputError):
    """The data hold NaN or infinity; the text names the first affected rows."""

    #: Numbers of the affected columns; empty if they are unknown, or if the text has their names.
    columns: tuple[int, ...] = ()


class LabelError(SplinceError, ValueError):
    """Labels cannot be interpreted, or contradict earlier labels of the same variable."""


class UnknownVariableError(SplinceError, KeyError):
    """A named variable is not among the accumulated variables."""

    def __str__(self) -> str:  # KeyError would print the repr of its message
        return str(self.args[0]) if self.args else ""


class NotEnoughDataError(SplinceError, ValueError):
    """There are too few rows, or too little weight, for the requested statistic."""


class IncompatibleMomentsError(SplinceError, ValueError):
    """Moments of other features or kinds are merged, or rows are subtracted that were not added."""


class ConstantVariableError(SplinceError, ValueError):
    """A variable to erase or keep has a single value."""


class InfeasibleError(SplinceError, ValueError):
    """Kept directions lie in the span of the erased directions."""

    def __init__(self, message: str, cosine: float) -> None:
        super().__init__(message)
        self.cosine = cosine  #: Largest principal cosine between the two subspaces.

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str, float]]:
        return type(self), (str(self), self.cosine)


class FileFormatError(SplinceError, ValueError):
    """A file is truncated, modified, of another format, or written by a newer version."""


class MissingExtraError(SplinceError, ImportError):
    """An optional dependency is not installed; the text names the extra to install."""


class SiteError(InputError):
    """A site (a module of a model) is not found, is never called, or has no suitable tensor."""


class NeverCalledError(SplinceError, RuntimeError):
    """A site was not called while the model ran."""


class NotEnoughMemoryError(SplinceError, MemoryError):
    """The moments of all sites do not fit in the memory of the device."""


class FoldError(InputError):
    """An eraser cannot be merged into the weights of a model; the weights are unchanged."""


class SplinceWarning(UserWarning):
    """Base class of the warnings of this package."""


class NothingErasedWarning(SplinceWarning):
    """The data hold no linear association with the concept: the eraser is the identity."""


class DroppedDirectionsWarning(SplinceWarning):
    """Some kept directions were dropped because of `max_amplification` or `on_infeasible`."""


class PrecisionWarning(SplinceWarning):
    """An eraser has low precision: a large amplification, or a constraint near rounding error."""


class SampledScatterWarning(SplinceWarning):
    """The sampled rows misestimate variances of features; the distortion may not be minimal."""


class UnseenRowsWarning(SplinceWarning):
    """The distortion is, or may be, much larger in held-out rows than in fitted rows."""


class LabelFeatureWarning(SplinceWarning):
    """A feature of x equals the label of every row, up to offset, scale and coding of classes."""


class ManyClassesWarning(SplinceWarning):
    """An integer variable was read as many classes, or an eraser removes all dimensions of x."""


class MissingLabelWarning(SplinceWarning):
    """A class has the text of a missing value, such as "nan", as its name."""


class WholeNumbersWarning(SplinceWarning):
    """A continuous variable has few values, all integers, and may code classes."""


class OnePassWarning(SplinceWarning):
    """Erasers of several sites, or of runs of one site, were fitted without each other's effect."""


class OtherTokensWarning(SplinceWarning):
    """Erasers change other tokens than in the fit, so that those of later sites may be inexact."""
