"""Find tests that are skipped in every job of the gate: list them, or fail if there are any.

    python tools/check_skips.py --list core.xml integrations.xml  # tests for a further job
    python tools/check_skips.py core.xml integrations.xml ...     # exit with 1 if a test never ran

Each argument is a JUnit file of pytest, written with ``-o junit_family=xunit1``. Tests may be
skipped in every job if they need a GPU, a processor with AVX-512, data that are not shipped, or
minutes.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MAY_BE_MISSING = re.compile(
    r"GPU|CUDA|AVX-512|SPLINCE_FAST_DATA|SCIPY_ARRAY_API|Chromium", re.IGNORECASE
)


def node(case: ElementTree.Element) -> str:
    """Return the node id of a test: file, class if any, and name."""
    name, module = case.get("name") or "", case.get("classname") or ""
    file = case.get("file") or ""
    if not module or not file:  # a skipped module
        return (name or module).replace(".", "/") + ".py"
    if not file.endswith(".py"):  # a documentation page
        return file
    inside = module.removeprefix(Path(file).with_suffix("").as_posix().replace("/", "."))
    return "::".join([file, *inside.strip(".").split("."), name]).replace("::::", "::")


def outcomes(path: str) -> tuple[set[str], dict[str, str]]:
    """Return the tests that ran, and the skipped tests with their reasons."""
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
    """Print tests that no job ran and none may skip; return 1 if there are any, 0 with --list."""
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
