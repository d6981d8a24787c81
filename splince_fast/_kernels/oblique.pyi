from typing import Any

from splince_fast._kernels.factor import Factor

def oblique(factor: Factor, erased: Any, kept: Any, **tolerances: float) -> tuple[Any, ...]: ...
