"""Labels whose pandas index is that of X in another order are refused; other indices are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import splince_fast as sf
from splince_fast import baselines
from splince_fast import evaluation as ev
from splince_fast.evaluation import fit_head, leakage

rng = np.random.default_rng(0)
INDEX = [f"p{i}" for i in range(100)]
Z = pd.Series(rng.permutation(100) % 2, INDEX, name="z")
X = pd.DataFrame(rng.normal(size=(100, 3)) + Z.to_numpy()[:, None], INDEX, ["a", "b", "c"])
VECTORS = pd.Series(list(X.to_numpy()), INDEX)
SHUFFLED = Z.sample(frac=1, random_state=0)
ORACLE = sf.oracle(sf.Moments().update(X, {"z": Z}), erase="z")
NUMBERED = Z.reset_index(drop=True)
NUMBERS = X.reset_index(drop=True).sample(frac=1, random_state=1)  # a permutation of 0 ... 99

TASK = np.arange(100) // 50
ROW = np.arange(100) % 5 == 0
BRIEF: dict[str, Any] = {"n_seeds": 1, "erasers": ("none",), "heads": ("frozen",), "leakage": ()}


def mask_of(z: Any) -> Any:
    """A mask of validation rows, with the index of a column if that has one."""
    return pd.Series(ROW, z.index) if hasattr(z, "index") else ROW


CALLS: dict[str, Callable[[Any], Any]] = {
    "update": lambda z: sf.Moments().update(X, {"z": z}),
    "column of vectors": lambda z: sf.Moments().update(VECTORS, {"z": z}),
    "frame": lambda z: sf.Moments().update(X, pd.DataFrame({"z": z})),
    "source": lambda z: sf.sources.from_arrays(X, {"z": z}, block_rows=10),
    "weights of a source": lambda z: sf.sources.from_arrays(X, sample_weight=z, block_rows=10),
    "weights": lambda z: sf.Moments().update(X, sample_weight=z),
    "weights of LEACE": lambda z: sf.LEACE().fit(X, concept=TASK, sample_weight=z),
    "groups of LEACE": lambda z: sf.LEACE(shrinkage="cv").fit(X, concept=TASK, groups=z),
    "weights of RLACE": lambda z: baselines.RLACE(max_steps=1).fit(
        X, concept=TASK, sample_weight=z + 1
    ),
    "erase": lambda z: sf.erase(X, z),
    "concept": lambda z: sf.LEACE().fit(X, concept=z),
    "task": lambda z: sf.SPLINCE().fit(X, z, concept=rng.permutation(Z.to_numpy())),
    "head": lambda z: fit_head(X, z),
    "leakage": lambda z: leakage(X, z, probes=("linear",)),
    "groups of leakage": lambda z: leakage(X, TASK, probes=("linear",), groups=z),
    "compare": lambda z: ev.compare(X, task=rng.permutation(100) % 2, concept=z, **BRIEF),
    "RLACE": lambda z: baselines.RLACE(max_steps=1).fit(X, concept=z),
    "mask of RLACE": lambda z: baselines.RLACE(max_steps=1).fit(
        X, concept=TASK, validation=mask_of(z)
    ),
    "oracle": lambda z: ORACLE(X, {"z": z}),
}


@pytest.mark.parametrize("call", CALLS)
def test_labels_in_another_order_of_the_index_are_refused(call: str) -> None:
    with pytest.raises(sf.exceptions.LabelError, match=r"another order.*\.loc\[X\.index\]"):
        CALLS[call](SHUFFLED)
    # The remedy; labels of another index or of none belong to rows by position.
    for labels in (SHUFFLED.loc[X.index], NUMBERED, SHUFFLED.to_numpy()):
        CALLS[call](labels)


@pytest.mark.parametrize(
    ("call", "of"),
    [
        (lambda z: ev.group_accuracy(Z, z, groups=Z), "y_true"),
        (lambda z: ev.group_accuracy(Z, Z, groups=(Z, z)), "y_true"),
        (lambda z: ev.worst_group_accuracy(Z, Z, groups={"z": z}), "y_true"),
        (lambda z: ev.tpr_gap(Z, Z, concept=z), "y_true"),
        (lambda z: ev.spurious_split(Z, z, p=0.5, sizes=(4, 0, 4)), "task"),
    ],
)
def test_columns_in_another_order_of_the_index_are_refused(call: Any, of: str) -> None:
    with pytest.raises(sf.exceptions.LabelError, match=rf"another order.*\.loc\[{of}\.index\]"):
        call(SHUFFLED)
    call(SHUFFLED.to_numpy())


def test_numbers_of_rows_are_no_index() -> None:
    assert sf.Moments().update(NUMBERS, {"z": NUMBERED}).n_rows == 100
    with pytest.raises(sf.exceptions.LabelError, match="another order"):  # the index of X, permuted
        sf.Moments().update(NUMBERS.sort_index(), {"z": NUMBERED.loc[NUMBERS.index]})
