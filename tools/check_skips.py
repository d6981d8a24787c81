"""Tests that were skipped: list them, or fail if one was skipped in every job of the gate.

    python tools/check_skips.py --list core.xml integrations.xml  # what another job has to run
    python tools/check_skips.py core.xml integrations.xml ...     # was each run somewhere?

Each argument is a JUnit file of pytest, written with ``-o junit_family=xunit1``. Tests that need a
GPU, a processor with AVX-512, real data that are not shipped, or minutes may be skipped everywhere.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MAY_BE_MISSING = re.compile(
    r"GPU|CUDA|AVX-512|SPLINCE_FAST_DATA|SPLINCE_FAST_SLOW|SCIPY_ARRAY_API|Chromium", re.IGNORECASE
)


def node(case: ElementTree.Element) -> str:
    """The node id of a test: its file, its class if it has one, its name."""
    name, module = case.get("name") or "", case.get("classname") or ""
    file = case.get("file") or ""
    if not module or not file:  # a module that was skipped as a whole
        return (name or module).replace(".", "/") + ".py"
    if not file.endswith(".py"):  # a page
        return file
    inside = module.removeprefix(Path(file).with_suffix("").as_posix().replace("/", "."))
    return "::".join([file, *inside.strip(".").split("."), name]).replace("::::", "::")


def outcomes(path: str) -> tuple[set[str], dict[str, str]]:
    """Tests that ran, and tests that were skipped with their reasons."""
    ran: set[str] = set()
    skipped: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        skip = case.find("skipped")
        if skip is None:
            ran.add(node(case))
        elif skip.get("type") != "pytest.xfail":
            skipped[node(case)] = f"{skip.get('message')} {skip.text}"
    return ran, skipped


def main(arguments: list[str]) -> int:
    """List tests that no job ran, without excuse; or print them and return 1 if there are any."""
    listing = arguments[0] == "--list"
    results = [outcomes(path) for path in arguments[listing:]]
    ran = set().union(*(names for names, _ in results))
    files = {name.partition("::")[0] for name in ran}
    never = {
        name: reason
        for _, skipped in results
        for name, reason in skipped.items()
        if name not in ran and name not in files
    }
    unexcused = {
        name: reason for name, reason in never.items() if not MAY_BE_MISSING.search(reason)
    }
    if listing:
        print(*sorted(unexcused), sep="\n")
        return 0
    for name, reason in sorted(unexcused.items()):
        print(f"{name} is skipped in every job: {reason.strip().splitlines()[0]}")
    print(
        f"{len(ran)} tests ran, {len(never)} ran nowhere, {len(unexcused)} of them without excuse"
    )
    return int(bool(unexcused) or not ran)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
