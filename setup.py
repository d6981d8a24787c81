"""The compiled extensions and their build switches; everything else is in pyproject.toml.

``SPLINCE_DEBUG=1``     bounds checks, C assertions, -O0 -g
``SPLINCE_SANITIZE=address,undefined``  compile and link with those sanitizers
``SPLINCE_FAST_NO_VECTORS=1``  build the row kernels as with a compiler without vector extensions

All extensions keep to the limited API of Python 3.11, so that one wheel serves every later Python.
Free-threaded builds of Python have no limited API: there the full one is used.
"""

import glob
import os
import sysconfig
from collections.abc import Sequence

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("SPLINCE_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("SPLINCE_SANITIZE", "")
POSIX = os.name == "posix"
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

# The line "distutils: define_macros" of a .pyx file would replace this list.
macros: list[tuple[str, str | None]] = []
if LIMITED_API:
    macros.append(("Py_LIMITED_API", "0x030B0000"))

if os.environ.get("SPLINCE_FAST_NO_VECTORS", "") not in ("", "0"):
    macros.append(("SPLINCE_FAST_NO_VECTORS", "1"))

compile_args: list[str] = []
link_args: list[str] = []
if POSIX:
    compile_args += ["-O0", "-g"] if DEBUG else ["-O3"]
if SANITIZE:
    compile_args += [f"-fsanitize={SANITIZE}", "-g", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={SANITIZE}"]

KERNELS = "splince_fast/_kernels"
# One translation unit per instruction set, each of which includes the same kernels.
C_SOURCES = [
    f"{KERNELS}/csrc/{name}.c" for name in ("plain", "level_baseline", "level_avx2", "level_avx512")
]


def extension(name: str, sources: Sequence[str] = (), arguments: Sequence[str] = ()) -> Extension:
    """A compiled module of the kernels."""
    return Extension(
        f"splince_fast._kernels.{name}",
        [f"{KERNELS}/{name}.pyx", *sources],
        depends=glob.glob(f"{KERNELS}/csrc/*") if sources else [],
        define_macros=macros,
        include_dirs=[KERNELS],
        py_limited_api=LIMITED_API,
        extra_compile_args=[*compile_args, *arguments],
        extra_link_args=link_args,
    )


setup(
    ext_modules=cythonize(
        [
            *(extension(name) for name in ("blas", "factor", "oblique", "spans")),
            # Contraction is stated, as -std=c11 would turn it off. Registers are passed to inlined
            # functions alone, so that their calling convention does not matter.
            extension(
                "row_kernels", C_SOURCES, ["-ffp-contract=fast", "-Wno-psabi"] if POSIX else []
            ),
        ],
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
        },
    ),
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
