"""The package loads its members when they are touched."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
from baseline_data import draw

from splince_fast import baselines
from splince_fast.baselines import INLP


def test_importing_it_loads_no_scikit_learn() -> None:
    code = (
        "import sys, splince_fast.baselines as b; "
        "assert not {'sklearn', 'scipy'} & set(sys.modules); "
        "assert set(b.__all__) <= set(dir(b)); b.INLP; assert 'sklearn' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", baselines.__all__)
def test_the_weight_of_validation_rows_is_documented(name: str) -> None:
    text = inspect.getdoc(getattr(baselines, name).fit) or ""
    _, _, validation = text.partition("\nvalidation : ")
    assert "rows have weight 1." in validation.partition("\nReturns")[0]


def test_separate_validation_rows_have_weight_1() -> None:
    data = draw(n=200)
    rows = np.arange(200)
    train = rows < 150
    options = {"concept": data.z[train], "sample_weight": 1.0 + rows[train] % 3}
    validation = (data.X[~train], data.z[~train])
    report = INLP(random_state=0).fit(data.X[train], **options, validation=validation).report_
    assert report.majority == np.bincount(data.z[~train]).max() / 50
