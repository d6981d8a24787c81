"""The compiled extensions and their build switches; everything else is in pyproject.toml.

``SPLINCE_DEBUG=1``     bounds checks, C assertions, -O0 -g
``SPLINCE_SANITIZE=address,undefined``  compile and link with those sanitizers
"""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("SPLINCE_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("SPLINCE_SANITIZE", "")
POSIX = os.name == "posix"

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
                extra_compile_args=compile_args,
                extra_link_args=link_args,
            )
            for name in ("blas", "factor", "oblique", "spans")
        ],
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
        },
    )
)
