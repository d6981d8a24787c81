"""The package loads its members when they are touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from splince_fast import baselines


def test_importing_it_loads_no_scikit_learn() -> None:
    code = (
        "import sys, splince_fast.baselines as b; "
        "assert not {'sklearn', 'scipy'} & set(sys.modules); "
        "assert set(b.__all__) <= set(dir(b)); b.INLP; assert 'sklearn' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'JSE'"):
        baselines.JSE  # noqa: B018
