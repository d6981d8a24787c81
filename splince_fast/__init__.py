"""Fast, exact linear concept erasure: SPLINCE, LEACE, SAL and mean projection.

One pass over the data computes a small mergeable state, :class:`Moments`. Any number of erasers
are computed from this state in closed form (:func:`splince`, :func:`leace`, :func:`sal`,
:func:`mean_projection`). An eraser is a low-rank affine map, :class:`Projection`, and is applied in
one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast._runtime.arguments import lazy_names, library_version
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
    from splince_fast.estimators import LEACE, SAL, SPLINCE, Identity, MeanProjection
    from splince_fast.methods import leace, mean_projection, sal, splince
    from splince_fast.methods.folds import CrossReport, FoldReport
    from splince_fast.methods.oracle import oracle
    from splince_fast.methods.quadratic import quadratic
    from splince_fast.methods.quick import cross_report, erase
    from splince_fast.methods.repair import repair
    from splince_fast.moments import Folds, Moments
    from splince_fast.moments.snapshot import Factored
    from splince_fast.projection import Projection
    from splince_fast.report import Report, VariableReport
    from splince_fast.strength import ConceptStrength, concept_strength

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

if not TYPE_CHECKING:
    # Imports of NumPy, SciPy and scikit-learn would slow down `import splince_fast`.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Moments": "moments",
            "Projection": "projection",
            "Report": "report",
            "VariableReport": "report",
            "Eraser": "eraser",
            "ConditionalEraser": "conditional",
            "oracle": "methods.oracle",
            "load_eraser": "eraser",
            "erase": "methods.quick",
            "splince": "methods",
            "quadratic": "methods.quadratic",
            "leace": "methods",
            "sal": "methods",
            "mean_projection": "methods",
            "repair": "methods.repair",
            "SPLINCE": "estimators",
            "LEACE": "estimators",
            "SAL": "estimators",
            "MeanProjection": "estimators",
            "Identity": "estimators",
            "Factored": "moments.snapshot",
            "Folds": "moments",
            "concept_strength": "strength",
            "cross_report": "methods.quick",
            "CrossReport": "methods.folds",
            "FoldReport": "methods.folds",
            "ConceptStrength": "strength",
            "show_config": "config",
            "Config": "config",
            "sources": "sources",
            "nn": "nn",
            "evaluation": "evaluation",
            "baselines": "baselines",
        },
    )
