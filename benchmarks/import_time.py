"""What a fresh interpreter pays."""

from __future__ import annotations

from benchmarks import _asv


class Import(_asv.Suite):
    """Import alone, and import with what an estimator needs."""

    number = 1
    repeat = (3, 5, 5.0)

    def timeraw_import(self) -> str:
        return "import splince_fast"

    def timeraw_import_numpy_and_scipy_linalg(self) -> str:
        """The floor: what every use needs anyway."""
        return "import numpy, scipy.linalg"

    def timeraw_import_estimators(self) -> str:
        return "from splince_fast import SPLINCE"
