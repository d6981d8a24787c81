"""The compiled extensions and their build switches; everything else is in pyproject.toml.

``SPLINCE_DEBUG=1``     bounds checks, C assertions, -O0 -g
``SPLINCE_SANITIZE=address,undefined``  compile and link with those sanitizers

All extensions keep to the limited API of Python 3.11, so that one wheel serves every later Python.
Free-threaded builds of Python have no limited API: there the full one is used.
"""

import os
import sysconfig

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("SPLINCE_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("SPLINCE_SANITIZE", "")
POSIX = os.name == "posix"
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

# The line "distutils: define_macros" of a .pyx file would replace this list.
macros: list[tuple[str, str | None]] = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if LIMITED_API:
    macros.append(("Py_LIMITED_API", "0x030B0000"))

compile_args: list[str] = []
link_args: list[str] = []
if POSIX:
    compile_args += ["-O0", "-g"] if DEBUG else ["-O3"]
if SANITIZE:
    compile_args += [f"-fsanitize={SANITIZE}", "-g", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={SANITIZE}"]

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"splince_fast._kernels.{name}",
                [f"splince_fast/_kernels/{name}.pyx"],
                define_macros=macros,
                include_dirs=[np.get_include()],
                py_limited_api=LIMITED_API,
                extra_compile_args=compile_args,
                extra_link_args=link_args,
            )
            for name in ("blas", "factor", "joining", "oblique", "rows", "spans")
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
