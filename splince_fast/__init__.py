"""Fast, exact linear concept erasure: SPLINCE, LEACE, SAL and mean projection.

One pass over the data computes a small mergeable state, :class:`Moments`. Any number of erasers
are computed from this state in closed form (:func:`splince`, :func:`leace`, :func:`sal`,
:func:`mean_projection`). An eraser is a low-rank affine map, :class:`Projection`, and is applied in
one pass.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.version import library_version
from splince_fast.exceptions import (
    ConstantVariableError,
    DroppedDirectionsWarning,
    FileFormatError,
    IncompatibleMomentsError,
    InfeasibleError,
    InputError,
    LabelError,
    LabelFeatureWarning,
    ManyClassesWarning,
    MissingExtraError,
    MissingLabelWarning,
    NonFiniteError,
    NotEnoughDataError,
    NothingErasedWarning,
    PrecisionWarning,
    SplinceError,
    SplinceWarning,
    UnknownVariableError,
    UnseenRowsWarning,
    WholeNumbersWarning,
)

if TYPE_CHECKING:
    from splince_fast import baselines, evaluation, nn, sources
    from splince_fast.conditional import ConditionalEraser
    from splince_fast.config import Config, show_config
    from splince_fast.eraser import Eraser, load_eraser
    from splince_fast.estimators import LEACE, SAL, SPLINCE, Identity, MeanProjection, OracleSPLINCE
    from splince_fast.methods import leace, mean_projection, sal, splince
    from splince_fast.methods.cross import CrossReport, cross_report
    from splince_fast.methods.folds import FoldReport
    from splince_fast.methods.isotropic import isotropic
    from splince_fast.methods.oracle import oracle
    from splince_fast.methods.quadratic import quadratic
    from splince_fast.methods.quick import erase
    from splince_fast.methods.repair import repair
    from splince_fast.moments import Folds, Moments
    from splince_fast.moments.snapshot import Factored
    from splince_fast.projection import Projection
    from splince_fast.report import Report, VariableReport
    from splince_fast.strength import ConceptStrength, concept_strength

# Public names and their modules, imported on first access: these modules import NumPy, SciPy, Numba
# or scikit-learn, which would slow down `import splince_fast`. An empty string marks a subpackage.
_LAZY = {
    "Moments": "splince_fast.moments",
    "Projection": "splince_fast.projection",
    "Report": "splince_fast.report",
    "VariableReport": "splince_fast.report",
    "Eraser": "splince_fast.eraser",
    "ConditionalEraser": "splince_fast.conditional",
    "oracle": "splince_fast.methods.oracle",
    "load_eraser": "splince_fast.eraser",
    "erase": "splince_fast.methods.quick",
    "splince": "splince_fast.methods",
    "quadratic": "splince_fast.methods.quadratic",
    "isotropic": "splince_fast.methods.isotropic",
    "leace": "splince_fast.methods",
    "sal": "splince_fast.methods",
    "mean_projection": "splince_fast.methods",
    "repair": "splince_fast.methods.repair",
    "SPLINCE": "splince_fast.estimators",
    "LEACE": "splince_fast.estimators",
    "SAL": "splince_fast.estimators",
    "MeanProjection": "splince_fast.estimators",
    "Identity": "splince_fast.estimators",
    "OracleSPLINCE": "splince_fast.estimators",
    "Factored": "splince_fast.moments.snapshot",
    "Folds": "splince_fast.moments",
    "concept_strength": "splince_fast.strength",
    "cross_report": "splince_fast.methods.cross",
    "CrossReport": "splince_fast.methods.cross",
    "FoldReport": "splince_fast.methods.folds",
    "ConceptStrength": "splince_fast.strength",
    "show_config": "splince_fast.config",
    "Config": "splince_fast.config",
    "sources": "",
    "nn": "",
    "evaluation": "",
    "baselines": "",
}

__version__ = library_version()

__all__ = [
    "LEACE",
    "SAL",
    "SPLINCE",
    "ConceptStrength",
    "ConditionalEraser",
    "Config",
    "ConstantVariableError",
    "CrossReport",
    "DroppedDirectionsWarning",
    "Eraser",
    "Factored",
    "FileFormatError",
    "FoldReport",
    "Folds",
    "Identity",
    "IncompatibleMomentsError",
    "InfeasibleError",
    "InputError",
    "LabelError",
    "LabelFeatureWarning",
    "ManyClassesWarning",
    "MeanProjection",
    "MissingExtraError",
    "MissingLabelWarning",
    "Moments",
    "NonFiniteError",
    "NotEnoughDataError",
    "NothingErasedWarning",
    "OracleSPLINCE",
    "PrecisionWarning",
    "Projection",
    "Report",
    "SplinceError",
    "SplinceWarning",
    "UnknownVariableError",
    "UnseenRowsWarning",
    "VariableReport",
    "WholeNumbersWarning",
    "baselines",
    "concept_strength",
    "cross_report",
    "erase",
    "evaluation",
    "isotropic",
    "leace",
    "load_eraser",
    "mean_projection",
    "nn",
    "oracle",
    "quadratic",
    "repair",
    "sal",
    "show_config",
    "sources",
    "splince",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'splince_fast' has no attribute {name!r}")
    path = _LAZY[name]
    value = getattr(import_module(path), name) if path else import_module(f"splince_fast.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
