"""Compiled kernels. They use only NumPy, SciPy and Numba; the caller validates the values."""

try:
    import splince_fast._kernels.blas
    import splince_fast._kernels.oblique
    import splince_fast._kernels.spans  # noqa: F401
except ImportError as error:
    raise ImportError(
        "The compiled part of splince_fast is missing or was built for another Python: install it "
        "with `pip install splince_fast`, or, in a source tree, `pip install -e .`"
    ) from error
