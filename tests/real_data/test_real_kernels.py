"""What a kernel machine finds in erased rows: figures of docs/theory.md on BUG, 64 components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.kernel_approximation import RBFSampler
from sklearn.svm import SVC

import splince_fast as sf
from tests.real_data.test_real_oracle import split

Float = NDArray[np.float64]


@pytest.mark.slow
def test_random_features(real_data: Callable[[str], Path]) -> None:
    """LEACE on random Fourier features leaves more to a kernel machine than plain LEACE does."""
    X, z, _, n = split(real_data("bug_profession_gender"))
    centred = X - X[:n].mean(0)
    rows = centred @ np.linalg.svd(centred[:n], full_matrices=False)[2][:64].T
    rows /= np.sqrt(rows[:n].var(0).mean())
    sampler = RBFSampler(gamma=1 / 128, n_components=512, random_state=0)
    features = sampler.fit_transform(rows)

    def accuracy(erased: Float) -> float:
        return float(SVC().fit(erased[:n], z[:n]).score(erased[n:], z[n:]))

    def after(method: Any, erased: Float) -> Float:
        moments = sf.Moments(by="z").update(erased[:n], {"z": z[:n]})
        return np.asarray(method(moments, erase="z")(erased))

    found = {
        "rows": accuracy(rows),
        "LEACE": accuracy(after(sf.leace, rows)),
        "LEACE of random features": accuracy(after(sf.leace, features)),
    }
    expected = {"rows": 0.95, "LEACE": 0.78, "LEACE of random features": 0.91}
    assert found == pytest.approx(expected, abs=0.01)
