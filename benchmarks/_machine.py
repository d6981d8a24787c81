"""What the numbers were measured on: processor, BLAS and versions; no paths and no names."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGES = (
    "numpy", "scipy", "numba", "scikit-learn", "safetensors", "torch", "concept-erasure",
    "fairlearn", "scikit-learn-intelex", "scipy-openblas32", "threadpoolctl",
)  # fmt: skip
# What changes the kernels or the threads of a BLAS, or those of splince_fast.
_PREFIXES = (
    "OPENBLAS_", "OMP_", "MKL_", "SPLINCE_FAST_BLAS", "SPLINCE_FAST_BENCH",
    "SPLINCE_FAST_NUM_THREADS",
)  # fmt: skip
_KERNEL_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "MKL_ENABLE_INSTRUCTIONS")


def describe() -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a measurement, as plain data."""
    import splince_fast as sf
    from splince_fast._kernels import provider

    choice = provider.ensure()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "cores": cores(),
        "memory_gib": round(total_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "splince_fast": sf.__version__,
        "versions": {name: text for name in _PACKAGES if (text := _version(name))},
        "blas": {"name": choice.name, "core": choice.core, "reason": choice.reason},
        "pools": thread_pools(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
    }


def command(module: str, arguments: Sequence[str] | None) -> str:
    """The command that ran a module, with names of files in place of paths."""
    given = sys.argv[1:] if arguments is None else arguments
    named = (re.sub(r"[^=]*/", "", text) for text in given)
    return shlex.join(["python", "-m", module, *named])


def lines(facts: dict[str, Any]) -> list[str]:
    """The description as lines of text."""
    versions = ", ".join(f"{name} {text}" for name, text in facts["versions"].items())
    text = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']:g} GiB, "
        f"{facts['system']}",
        f"Python {facts['python']}, splince_fast {facts['splince_fast']}, {versions}",
        f"BLAS of splince_fast: {facts['blas']['name']}, {facts['blas']['core']} kernels "
        f"({facts['blas']['reason']})",
    ]
    if facts["pools"]:
        text.append(f"thread pools: {pool_names(facts)}")
    if facts["environment"]:
        text.append(" ".join(f"{k}={v}" for k, v in facts["environment"].items()))
    if names := overridden(facts):
        text.append(
            f"NOT the default kernels of the BLAS: unset {', '.join(names)} to measure those"
        )
    return text


def pool_names(facts: dict[str, Any]) -> str:
    """The loaded libraries with thread pools: version and kernels where known, threads."""
    found = ((p["library"], p["version"], p["core"], f"x{p['threads']}") for p in facts["pools"])
    return ", ".join(" ".join(text for text in pool if text != "None") for pool in found)


def overridden(facts: dict[str, Any]) -> list[str]:
    """Variables of the environment that keep a BLAS from choosing its kernels."""
    return [name for name in _KERNEL_VARIABLES if name in facts["environment"]]


def processor() -> str:
    """Marketing name of the processor, as far as the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        fields: dict[str, str] = {}
        for line in information.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
        name = fields.get("model name", "unknown")
        family, model = fields.get("cpu family"), fields.get("model")
        return f"{name} (family {family}, model {model})" if family else name
    return platform.processor() or "unknown"


def cores() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Bytes that can be taken without swapping; half of all where the system does not say."""
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return total_memory() // 2


def equal_threads() -> int:
    """Give every loaded thread pool as many threads as splince_fast uses; returns how many.

    To be called again when another library was loaded.
    """
    from splince_fast._runtime import threads

    count = threads.thread_count()
    if find_spec("threadpoolctl"):
        import threadpoolctl

        threadpoolctl.threadpool_limits(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    if "daal4py" in sys.modules:
        sys.modules["daal4py"].daalinit(count)
    return count


def thread_pools() -> list[dict[str, Any]]:
    """Thread pools of the loaded libraries, one entry per kind; empty without threadpoolctl."""
    if not find_spec("threadpoolctl"):
        return []
    import threadpoolctl

    pools = {
        (p["internal_api"], p["version"], p.get("architecture"), p["num_threads"])
        for p in threadpoolctl.threadpool_info()
    }
    keys = ("library", "version", "core", "threads")
    return [dict(zip(keys, (*map(str, p[:3]), p[3]), strict=True)) for p in sorted(pools, key=str)]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
