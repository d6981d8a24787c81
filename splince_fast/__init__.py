"""Fast, exact linear concept erasure: SPLINCE, LEACE, SAL and mean projection.

One pass over the data computes a small mergeable state, :class:`Moments`. Any number of erasers
are computed from this state in closed form (:func:`splince`, :func:`leace`, :func:`sal`,
:func:`mean_projection`). An eraser is a low-rank affine map, :class:`Projection`, and is applied in
one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast import exceptions as exceptions
from splince_fast._runtime.arguments import lazy_names, library_version
from splince_fast.exceptions import SplinceError as SplinceError
from splince_fast.exceptions import SplinceWarning as SplinceWarning

if TYPE_CHECKING:  # names with "as" are public for type checkers
    from splince_fast import baselines as baselines
    from splince_fast import evaluation as evaluation
    from splince_fast import nn as nn
    from splince_fast import sources as sources
    from splince_fast.conditional import ConditionalEraser as ConditionalEraser
    from splince_fast.conditional import load_eraser as load_eraser
    from splince_fast.config import show_config as show_config
    from splince_fast.estimators import LEACE as LEACE
    from splince_fast.estimators import SAL as SAL
    from splince_fast.estimators import SPLINCE as SPLINCE
    from splince_fast.estimators import Identity as Identity
    from splince_fast.estimators import MeanProjection as MeanProjection
    from splince_fast.methods import leace as leace
    from splince_fast.methods import mean_projection as mean_projection
    from splince_fast.methods import sal as sal
    from splince_fast.methods import splince as splince
    from splince_fast.methods.fair_pca import fair_pca as fair_pca
    from splince_fast.methods.oracle import oracle as oracle
    from splince_fast.methods.quadratic import quadratic as quadratic
    from splince_fast.methods.quick import cross_report as cross_report
    from splince_fast.methods.quick import erase as erase
    from splince_fast.methods.repair import repair as repair
    from splince_fast.moments import Folds as Folds
    from splince_fast.moments import Moments as Moments
    from splince_fast.projection import Eraser as Eraser
    from splince_fast.projection import Projection as Projection
    from splince_fast.report import Report as Report
    from splince_fast.strength import concept_strength as concept_strength

    __version__: str
else:
    # Imports of NumPy, SciPy and scikit-learn would slow down `import splince_fast`, and so would
    # the reading of the version.
    _NAMES = {
        "conditional": ("ConditionalEraser", "load_eraser"),
        "config": ("show_config",),
        "estimators": ("LEACE", "SAL", "SPLINCE", "Identity", "MeanProjection"),
        "methods": ("leace", "mean_projection", "sal", "splince"),
        "methods.fair_pca": ("fair_pca",),
        "methods.oracle": ("oracle",),
        "methods.quadratic": ("quadratic",),
        "methods.quick": ("cross_report", "erase"),
        "methods.repair": ("repair",),
        "moments": ("Folds", "Moments"),
        "projection": ("Eraser", "Projection"),
        "report": ("Report",),
        "strength": ("concept_strength",),
        **{name: (name,) for name in ("baselines", "evaluation", "nn", "sources")},
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names}
    __all__ = sorted([*_MODULES, "SplinceError", "SplinceWarning", "exceptions"])
    _get, __dir__ = lazy_names(__name__, _MODULES)

    def __getattr__(name):
        return library_version() if name == "__version__" else _get(name)
