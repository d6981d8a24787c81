"""A new method is one function and one row of METHODS, also where it leaves part of a variable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import splince_fast as sf
from splince_fast._solve.options import Options
from splince_fast.methods.closed_forms import eraser_of
from splince_fast.methods.table import METHODS, Method


def leading(moments: Any, *, erase: Any) -> sf.Projection:
    """Erase the leading whitened direction of the variables only."""

    def part(factor: Any, span: Any) -> Any:
        u, _, _ = np.linalg.svd(factor.whiten(span), full_matrices=False)
        return np.ascontiguousarray(u[:, :1].T @ span)

    return eraser_of(moments, "Leading", erase, None, Options(), part=part)


@pytest.mark.parametrize("classes", [2, 4])
def test_a_method_that_leaves_part_of_a_variable_says_so(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    z = rng.integers(0, classes, 400)
    X = rng.normal(size=(400, 6)) + 3 * rng.normal(size=(classes, 6))[z]
    monkeypatch.setitem(METHODS, "leading", Method("Leading", leading, whitened=True))
    clean, eraser = sf.erase(X, z, method="leading")
    moments = sf.Moments().update(X, {"concept": z})
    before, after = (
        m.cross_covariance("concept") for m in (moments, sf.Moments().update(clean, {"concept": z}))
    )
    assert eraser.method == "Leading"
    report: Any = eraser.report
    (variable,) = report.variables
    assert report.rank == variable.rank == 1
    # The correlations are those of the whole variable, and the residual is the part that is left.
    leace: Any = sf.leace(moments, erase="concept").report
    np.testing.assert_allclose(variable.singular_values, leace.variables[0].singular_values)
    complete = classes == 2
    assert (np.linalg.norm(after) < 1e-10 * np.linalg.norm(before)) == complete
    assert (variable.residual <= variable.bound) == complete
    assert (variable.expected is not None) == complete
    with pytest.raises(sf.exceptions.InputError, match="no certificate"):
        report.certificate()
