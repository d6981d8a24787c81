"""The machine and the commit of a measurement; no paths and no names."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from scipy.linalg.blas import get_blas_funcs

from benchmarks.timing import Contender, config, interleave, pick, ratio

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = (
    "numpy", "scipy", "numba", "scikit-learn", "torch", "concept-erasure", "fairlearn",
    "scikit-learn-intelex", "transformers", "dask", "dask-ml",
)  # fmt: skip
# Variables that change the kernels or the threads of a BLAS, or those of splince_fast.
_PREFIXES = (
    "OPENBLAS_", "OMP_", "MKL_", "SPLINCE_FAST_BENCH", "SPLINCE_FAST_LEVEL",
    "SPLINCE_FAST_NUM_THREADS",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a measurement, as plain data."""
    measured = config()
    installed = {package.name: package.version for package in distributions()}
    return {
        **processor(),
        "cores": joblib.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
        "blas": {"name": measured.blas, "kernels": measured.blas_core},
        "row_kernels": measured.row_kernels,
        "threads": measured.threads,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        "gflops": {t: round(getattr(measured, t), 1) for t in ("syrk_float32", "syrk_float64")},
        "copy_gbs": round(measured.copy, 1),
        "gemm_over_syrk": {dtype: gemm_over_syrk(dtype) for dtype in ("float32", "float64")},
    }


def gemm_over_syrk(dtype: str) -> dict[str, float]:
    """Time of X^T X as a general product, by SciPy's and torch's BLAS, over a symmetric one.

    A package that multiplies in general cannot be slower than this bound because of its product
    alone: 2 where both run the same kernels, more where its BLAS runs narrower ones.
    """
    X = np.ones(pick((4096, 2048), (64, 16)), dtype)
    syrk, gemm = get_blas_funcs(("syrk", "gemm"), (X,))
    contenders = {
        "syrk": Contender(partial(syrk, 1.0, X.T, lower=1)),
        "scipy": Contender(partial(gemm, 1.0, X.T, X.T, trans_b=1)),
    }
    if find_spec("torch"):
        import torch

        x = torch.from_numpy(X)
        contenders["torch"] = Contender(partial(torch.mm, x.T, x))
    timings = interleave(contenders, budget=4.0)
    bare = timings.pop("syrk")
    return {name: round(ratio(seconds, bare)["median"], 2) for name, seconds in timings.items()}


def commit() -> dict[str, Any]:
    """The commit of the checkout, and whether tracked files of it differ; None without git."""
    git = partial(subprocess.check_output, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
    try:
        changed = git(["git", "status", "--porcelain", "-uno", "--", "splince_fast"])
        return {"commit": git(["git", "rev-parse", "HEAD"]).strip(), "changed": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed": None}


def now() -> tuple[str, list[float]]:
    """The time, and how many processes wanted to run in the last 1, 5 and 15 minutes, as means."""
    load = [round(value, 2) for value in os.getloadavg()]
    return datetime.now(UTC).isoformat(timespec="minutes"), load


def command() -> str:
    """The command that runs this process, with names of files in place of paths."""
    texts = (re.sub(r"[^=]*/(?=[^/]+\.json$)", "", text) for text in sys.argv[1:])
    return shlex.join(["python", "-m", "benchmarks.compare", *texts])


def processor() -> dict[str, Any]:
    """Name, family and model of the processor, as far as the system tells them."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        fields = dict(re.findall(r"(?m)^(.+?)[ \t]*:[ \t]*(.*)$", text))
    return {
        "processor": fields.get("model name") or platform.processor() or "unknown",
        "family": int(fields.get("cpu family", -1)),
        "model": int(fields.get("model", -1)),
        "avx512": "avx512f" in fields.get("flags", "").split(),
    }


def title(facts: dict[str, Any]) -> str:
    """Processor, its family, and the name of AMD's design where it is known, else the model."""
    zen = {25: "Zen 4" if facts["avx512"] else "Zen 3", 26: "Zen 5"}
    name, family = facts["processor"], facts["family"]
    detail = f" ({zen[family]})" if "AMD" in name and family in zen else f", model {facts['model']}"
    return f"{name}, family {family}{detail}"


def short_name() -> str:
    """Of the processor, for a file: its maker's word, family and model."""
    facts = processor()
    maker = re.split(r"\W", facts["processor"])[0].lower()
    return f"{maker}-family-{facts['family']}-model-{facts['model']}"
