"""_runtime.arguments: a misspelt option is an error that suggests the nearest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import splince_fast as sf
from splince_fast.moments import Folds

Z = np.arange(40) % 2
X = np.random.default_rng(0).normal(size=(40, 3)) + Z[:, None]


def folds() -> list[sf.Moments]:
    return [sf.Moments().update(X[i::2], {"z": Z[i::2]}) for i in range(2)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: sf.erase(X, Z, colour="red"), r"takes no colour= .it takes .*shrinkage"),
        (lambda: sf.erase(X, Z, shrinkge=1), r"leace takes no shrinkge=; did you mean shrinkage="),
        (
            lambda: sf.cross_report(folds(), erase="z", rank_tool=1.0),
            r"LEACE takes no rank_tool=; did you mean rank_tol=",
        ),
        (
            lambda: sf.Moments.from_blocks([(X, Z)], block_row=2),
            r"Moments takes no block_row=; did you mean block_rows=",
        ),
        (
            lambda: sf.cross_report(folds(), erase="z", max_amplification=1e3),
            r"LEACE takes no max_amplification=",
        ),
        (lambda: Folds(2, block_row=2), r"Moments takes no block_row=; did you mean block_rows="),
    ],
)
def test_the_nearest_option_is_suggested(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(sf.InputError, match=text):
        call()


def test_a_misspelt_option_of_a_figure() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from splince_fast.evaluation.figures import draw

    with pytest.raises(sf.InputError, match=r"'association' takes no metrc=; did you mean metric="):
        draw(None, "association", metrc="accuracy")  # type: ignore[arg-type]
