"""Description of the machine and of the measured commit, without paths or user names."""

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
# Prefixes of environment variables that change the kernels or threads of BLAS or splince_fast.
_PREFIXES = (
    "OPENBLAS_", "OMP_", "MKL_", "SPLINCE_FAST_BENCH", "SPLINCE_FAST_LEVEL",
    "SPLINCE_FAST_NUM_THREADS",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Return hardware, package versions, BLAS, threads and measured rates as plain data."""
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
    """Return the time of X^T X by GEMM, in SciPy and in torch, divided by the time by SYRK.

    A package that uses GEMM where SYRK suffices is slower by this ratio. The ratio is about 2 for
    the same kernels, and larger if the BLAS of the package runs narrower kernels.
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
    """Return the commit, and whether tracked files of the package differ from the commit.

    Both are None without git.
    """
    git = partial(subprocess.check_output, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
    try:
        changed = git(["git", "status", "--porcelain", "-uno", "--", "splince_fast"])
        return {"commit": git(["git", "rev-parse", "HEAD"]).strip(), "changed": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed": None}


def now() -> tuple[str, list[float]]:
    """Return the time (UTC) and the load averages over 1, 5 and 15 minutes."""
    load = [round(value, 2) for value in os.getloadavg()]
    return datetime.now(UTC).isoformat(timespec="minutes"), load


def command() -> str:
    """Return the command of this process, with file names in place of paths."""
    texts = (re.sub(r"[^=]*/(?=[^/]+\.json$)", "", text) for text in sys.argv[1:])
    return shlex.join(["python", "-m", "benchmarks.compare", *texts])


def processor() -> dict[str, Any]:
    """Return name, family, model and AVX-512 support of the processor.

    An unknown family or model is -1.
    """
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
    """Return the name and family of the processor.

    The AMD microarchitecture is added if it is known, else the model number.
    """
    zen = {25: "Zen 4" if facts["avx512"] else "Zen 3", 26: "Zen 5"}
    name, family = facts["processor"], facts["family"]
    detail = f" ({zen[family]})" if "AMD" in name and family in zen else f", model {facts['model']}"
    return f"{name}, family {family}{detail}"


def short_name() -> str:
    """Return the stem of a results file: vendor, family and model of the processor."""
    facts = processor()
    maker = re.split(r"\W", facts["processor"])[0].lower()
    return f"{maker}-family-{facts['family']}-model-{facts['model']}"
