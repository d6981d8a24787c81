"""Environment of the library: versions, BLAS, instruction sets, measured speed, and advice."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from timeit import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import blas, row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.arguments import library_version
from splince_fast.report import as_html, as_text

_PACKAGES = ("numpy", "scipy", "numba", "scikit-learn", "safetensors", "narwhals")


@dataclass(frozen=True, slots=True)
class Config:
    """Environment of the library, as returned by :func:`show_config`."""

    versions: dict[str, str]  #: Versions of Python, this package and its dependencies.
    simd: tuple[str, ...]  #: Instruction sets of this processor, by their NumPy names.
    threads: int  #: Number of threads of the library's own kernels.
    row_kernels: str  #: Kernels that run per row: "avx512", "avx2" or "baseline".
    products: str  #: Routine that multiplies blocks of rows: "row kernels" or "BLAS".
    blas: str  #: Name of SciPy's BLAS; "unknown" if not reported.
    blas_core: str  #: Processor type of its kernels.
    #: Measured rate of the symmetric product X^T X, in GFLOP/s. For X of shape (n, d) this counts
    #: n d^2 operations: one triangle, and two operations per multiply-add.
    syrk_float32: float
    syrk_float64: float  #: The same in float64.
    copy: float  #: Measured rate of a memory copy, in GB read per second.
    advice: tuple[str, ...]  #: Advice on conditions that reduce the speed.

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain numbers, strings, lists and dictionaries."""
        return asdict(self)

    def _facts(self) -> list[tuple[str, str]]:
        rates = f"{self.syrk_float32:.0f} GFLOP/s in float32, {self.syrk_float64:.0f} in float64"
        return [
            ("versions", ", ".join(f"{name} {text}" for name, text in self.versions.items())),
            ("SIMD", ", ".join(self.simd)),
            ("threads", str(self.threads)),
            ("row kernels", f"{self.row_kernels}; blocks are multiplied by {self.products}"),
            ("BLAS", f"{self.blas}, {self.blas_core} kernels"),
            ("symmetric product", rates),
            ("memory copy", f"{self.copy:.1f} GB/s"),
            *(("advice", text) for text in self.advice),
        ]

    def __str__(self) -> str:
        return as_text("splince_fast", self._facts())

    def _repr_html_(self) -> str:
        return as_html("splince_fast", self._facts())


def show_config() -> Config:
    """Return versions, processor, number of threads and measured speed; takes about a second.

    Returns
    -------
    Config
        Environment of the library; printed as a short table.

    Examples
    --------
    >>> import splince_fast as sf
    >>> sf.show_config().threads >= 1
    True
    """
    import threadpoolctl

    library = next(
        (
            library
            for library in threadpoolctl.threadpool_info()
            if library["user_api"] == "blas" and "scipy" in library["filepath"]
        ),
        {"internal_api": "unknown"},
    )
    core = library.get("architecture", "unknown")
    numpy_config: Any = np.show_config(mode="dicts")
    extensions = numpy_config["SIMD Extensions"]
    simd = (*extensions.get("baseline", ()), *extensions.get("found", ()))
    source = np.ones(1 << 23)
    target = np.empty_like(source)
    copy = source.nbytes / _median_seconds(lambda: np.copyto(target, source)) / 1e9
    single, double = (_syrk_rate(dtype) for dtype in (np.float32, np.float64))
    advice = []
    forced = os.environ.get("OPENBLAS_CORETYPE")
    if core in ("Haswell", "Zen") and not {"AVX512_SKX", "X86_V4"}.isdisjoint(simd):
        cause = f"because OPENBLAS_CORETYPE={forced} is set: unset it" if forced else "by itself"
        advice.append(
            f"SciPy's OpenBLAS runs {core} kernels (AVX2) on a processor with AVX-512, {cause}"
        )
    if single < 1.3 * double:
        advice.append(
            "float32 products are hardly faster than float64 ones, which is unusual: another "
            "process may be using the processor"
        )
    return Config(
        versions={"python": platform.python_version(), "splince_fast": library_version()}
        | {name: version(name) for name in _PACKAGES},
        simd=simd,
        threads=threads.thread_count(),
        row_kernels=row_kernels.level_name(),
        products="row kernels" if row_kernels.wide() else "BLAS",
        blas=f"{library['internal_api']} {library.get('version') or ''}".strip(),
        blas_core=core,
        syrk_float32=single,
        syrk_float64=double,
        copy=copy,
        advice=tuple(advice),
    )


def _median_seconds(work: Callable[[], object]) -> float:
    """Median time in seconds of five calls of `work`, after a warm-up call."""
    return float(np.median(repeat(work, number=1, repeat=6)[1:]))


def _syrk_rate(dtype: type[np.floating[Any]]) -> float:
    """Rate of the symmetric product X^T X for X of shape (2048, 1024), in GFLOP/s."""
    rows: NDArray[Any] = np.ones((2048, 1024), dtype)
    product: NDArray[Any] = np.zeros((1024, 1024), dtype, order="F")
    routine = blas.syrk_f32_out if dtype is np.float32 else blas.syrk_f64_into
    return 2048 * 1024**2 / _median_seconds(lambda: routine(rows, product)) / 1e9
