"""Which BLAS the kernels call: SciPy's, or a private OpenBLAS with the host's widest kernels.

OpenBLAS picks its kernels by the processor, but a library that does not know the processor, or an
environment that sets ``OPENBLAS_CORETYPE``, makes it run narrower ones than the host has. The PyPI
package ``scipy-openblas32`` (extra ``blas``) holds the same library that SciPy ships; a copy of it
is loaded with that variable set around the load alone, so that SciPy's and NumPy's copies keep
theirs. It does override a core type that the environment asks for, in our kernels only.

The copy is used only where the processor has the wider instructions, SciPy's BLAS does not use
them, and a measurement of a few milliseconds shows a gain. ``SPLINCE_FAST_BLAS=scipy`` keeps
SciPy's.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from splince_fast._kernels import blas
from splince_fast.exceptions import InputError

_VARIABLE = "SPLINCE_FAST_BLAS"
_WIDE_CORE = "SkylakeX"
# A copy of the library must be faster by this factor to be worth a second pool of threads.
_GAIN = 1.1
# Below this width products take microseconds whatever the kernels.
_WORTHWHILE = 256
_ROUTINES = ("dsyrk", "ssyrk", "dgemm", "dtrsm", "dpotrf")
_lock = threading.Lock()
_choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The provider in use, and why."""

    name: str  # "scipy" or "scipy-openblas32"
    core: str  # the kernels that it runs, or "unknown"
    reason: str


def ensure_for(width: int) -> None:
    """Choose the provider if matrices of this width make the choice worth its milliseconds."""
    if width >= _WORTHWHILE:
        ensure()


def ensure() -> Choice:
    """Choose the provider on first use; the same choice ever after."""
    global _choice
    if _choice is None:
        with _lock:
            if _choice is None:
                _choice = _choose()
    return _choice


def _choose() -> Choice:
    policy = os.environ.get(_VARIABLE, "auto")
    if policy not in ("auto", "scipy"):
        raise InputError(f"{_VARIABLE} is {policy!r}; it must be 'auto' or 'scipy'")
    core = scipy_core()
    if policy == "scipy":
        return Choice("scipy", core, f"{_VARIABLE}=scipy asks for it")
    if not has_avx512():
        return Choice("scipy", core, "the processor has no instructions wider than AVX2")
    if core in (_WIDE_CORE, "Cooperlake", "Sapphirerapids", "Zen4", "unknown"):
        return Choice("scipy", core, "it runs the widest kernels already, or is not OpenBLAS")
    path = _library_path()
    if path is None:
        return Choice(
            "scipy", core,
            f"it runs {core} kernels although the processor has AVX-512; "
            'pip install "splince-fast[blas]" brings wider ones',
        )  # fmt: skip
    library = _load(path)
    if library is None:
        return Choice("scipy", core, "the private OpenBLAS could not be loaded")
    addresses = _addresses(library)
    if addresses is None:
        return Choice("scipy", core, "the private OpenBLAS lacks the expected symbols")
    gain = _measured_gain(addresses)
    if gain < _GAIN:
        blas.use_scipy_routines()
        return Choice("scipy", core, f"a private OpenBLAS was no faster ({gain:.2f} x)")
    blas.use_routines(addresses)
    wide = _core_name(library)
    return Choice("scipy-openblas32", wide, f"measured {gain:.2f} x SciPy's {core} kernels")


def simd() -> tuple[str, ...]:
    """Instruction sets of this processor, as NumPy names them."""
    found: Any = np.show_config(mode="dicts")
    extensions = found["SIMD Extensions"]
    return (*extensions.get("baseline", ()), *extensions.get("found", ()))


def has_avx512() -> bool:
    """Whether the processor, and the system, support the AVX-512 that OpenBLAS builds for."""
    return not {"AVX512_SKX", "X86_V4"}.isdisjoint(simd())


def scipy_core() -> str:
    """Name of the kernels that SciPy's OpenBLAS runs, or "unknown"."""
    from scipy.linalg import cython_blas

    folder = Path(cython_blas.__file__).parents[2] / "scipy.libs"
    for path in sorted(folder.glob("*openblas*")) if folder.is_dir() else ():
        try:
            return _core_name(ctypes.CDLL(str(path)))
        except OSError:
            continue
    return "unknown"


def _core_name(library: ctypes.CDLL) -> str:
    for symbol in ("scipy_openblas_get_corename", "openblas_get_corename"):
        function = getattr(library, symbol, None)
        if function is not None:
            function.restype = ctypes.c_char_p
            return str(function().decode())
    return "unknown"


def _library_path() -> Path | None:
    """The shared library of scipy-openblas32, found without importing (and so loading) it."""
    spec = find_spec("scipy_openblas32")
    if spec is None or spec.origin is None or "scipy_openblas32" in sys.modules:
        return None
    found = sorted((Path(spec.origin).parent / "lib").glob("libscipy_openblas.*"))
    return next((path for path in found if path.suffix in (".so", ".dylib", ".dll")), None)


def _load(path: Path) -> ctypes.CDLL | None:
    with _environment("OPENBLAS_CORETYPE", _WIDE_CORE):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            return None


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the duration of the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _addresses(library: ctypes.CDLL) -> dict[str, int] | None:
    """Addresses of all routines, or None: two libraries are never mixed."""
    found = {}
    for name in _ROUTINES:
        function = getattr(library, f"scipy_{name}_", None)
        if function is None:
            return None
        found[name] = int(ctypes.cast(function, ctypes.c_void_p).value or 0)
    return found


def _measured_gain(addresses: dict[str, int]) -> float:
    """SciPy's time over the other's for a float32 symmetric product of 512 rows of 512.

    The best of fifteen each, one library after the other: in turn, the threads of the one would
    still be spinning while the other is measured.
    """
    rows = np.ones((512, 512), np.float32)
    product = np.empty((512, 512), np.float32, order="F")
    best = []
    for use in (blas.use_scipy_routines, lambda: blas.use_routines(addresses)):
        use()
        times = []
        for _ in range(15):
            start = perf_counter()
            blas.syrk_f32_out(rows, product)
            times.append(perf_counter() - start)
        best.append(min(times))
    return best[0] / best[1]
