"""Fast, exact linear concept erasure: SPLINCE, LEACE, SAL and mean projection.

One pass over the data computes a small mergeable state, :class:`Moments`. Any number of erasers
are computed from this state in closed form (:func:`splince`, :func:`leace`, :func:`sal`,
:func:`mean_projection`). An eraser is a low-rank affine map, :class:`Projection`, and is applied in
one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast import exceptions
from splince_fast._runtime.arguments import lazy_names, library_version
from splince_fast.exceptions import SplinceError, SplinceWarning

if TYPE_CHECKING:
    from splince_fast import baselines, evaluation, nn, sources
    from splince_fast.conditional import ConditionalEraser, load_eraser
    from splince_fast.config import show_config
    from splince_fast.estimators import LEACE, SAL, SPLINCE, Identity, MeanProjection
    from splince_fast.methods import leace, mean_projection, sal, splince
    from splince_fast.methods.oracle import oracle
    from splince_fast.methods.quadratic import quadratic
    from splince_fast.methods.quick import cross_report, erase
    from splince_fast.methods.repair import repair
    from splince_fast.moments import Folds, Moments
    from splince_fast.projection import Eraser, Projection
    from splince_fast.report import Report
    from splince_fast.strength import concept_strength

    __version__: str

__all__ = [
    "LEACE",
    "SAL",
    "SPLINCE",
    "ConditionalEraser",
    "Eraser",
    "Folds",
    "Identity",
    "MeanProjection",
    "Moments",
    "Projection",
    "Report",
    "SplinceError",
    "SplinceWarning",
    "baselines",
    "concept_strength",
    "cross_report",
    "erase",
    "evaluation",
    "exceptions",
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
    # Imports of NumPy, SciPy and scikit-learn would slow down `import splince_fast`, and so would
    # the reading of the version.
    _NAMES = {
        "conditional": ("ConditionalEraser", "load_eraser"),
        "config": ("show_config",),
        "estimators": ("LEACE", "SAL", "SPLINCE", "Identity", "MeanProjection"),
        "methods": ("leace", "mean_projection", "sal", "splince"),
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
    _get, __dir__ = lazy_names(
        __name__, {name: module for module, names in _NAMES.items() for name in names}
    )

    def __getattr__(name):
        return library_version() if name == "__version__" else _get(name)
