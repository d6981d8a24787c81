"""First use: processor seconds of a new process, including the start of Python and the imports.

The caches of compiled code are empty, as in a new container or cluster worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks.jobs import OURS, Numbers, below, job
from benchmarks.peers import CE, needs
from benchmarks.timing import Absent, pick

_ROUNDS = 5
_DATA = """
import numpy as np
rng = np.random.default_rng(0)
z = rng.integers(0, 2, 2000)
X = rng.normal(size=(2000, 64)) + z[:, None]
"""
_TEN_CLASSES = """
z = rng.integers(0, 10, 2000)
X = (rng.normal(size=(2000, 64)) + z[:, None]).astype("float32")
"""
_ERASER = """
import splince_fast as sf
sf.leace(sf.Moments().update(X, {"z": z}), erase="z")(X)
"""
_ESTIMATOR = """
import splince_fast as sf
sf.LEACE().fit(X, concept=z).transform(X)
"""
_CONCEPT_ERASURE = """
import torch
from concept_erasure import LeaceFitter
x, y = torch.from_numpy(X), torch.from_numpy(z[:, None].astype(X.dtype))
LeaceFitter.fit(x, y).eraser(x)
"""
_FAIRLEARN = """
from fairlearn.preprocessing import CorrelationRemover
CorrelationRemover(sensitive_feature_ids=[0]).fit_transform(np.hstack([z[:, None], X]))
"""
FAIRLEARN = "fairlearn"

# case: (code, limit of its processor seconds)
_CASES = {
    "import": ("import splince_fast", 0.5),
    "first eraser": (_DATA + _ERASER, 0.75),
    "float32, ten classes": (_DATA + _TEN_CLASSES + _ERASER, 0.75),
    "estimator": (_DATA + _ESTIMATOR, 2.0),
}
_PEERS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "import": {
        CE: (("torch", "concept_erasure"), "import concept_erasure"),
        FAIRLEARN: (("fairlearn",), "import fairlearn.preprocessing"),
    },
    "first eraser": {
        CE: (("torch", "concept_erasure"), _DATA + _CONCEPT_ERASURE),
    },
    "estimator": {FAIRLEARN: (("fairlearn",), _DATA + _FAIRLEARN)},
}


def processor_seconds(code: str) -> float:
    """Return user plus system seconds of a new process that runs `code`: the median of runs."""
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        for k in range(pick(_ROUNDS, 1)):
            environment = os.environ | {"NUMBA_CACHE_DIR": os.path.join(cache, str(k))}
            before = os.times()
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code], env=environment, check=True
            )
            after = os.times()
            seconds.append(
                after.children_user - before.children_user
                + after.children_system - before.children_system
            )  # fmt: skip
    return float(np.median(seconds))


@job("first use/{case}", "processor seconds", lambda case: below(_CASES[case][1]), case=_CASES)
def _first_use(case: str) -> Numbers:
    numbers: dict[str, float | Absent] = {OURS: processor_seconds(_CASES[case][0])}
    for name, (modules, code) in _PEERS.get(case, {}).items():
        numbers[name] = needs(*modules)(processor_seconds)(code)
    return numbers
