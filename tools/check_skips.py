"""Fail if a test was skipped in every job of the gate for want of something that can be installed.

    python tools/check_skips.py core.xml integrations.xml ...

Each argument is a JUnit file of pytest. A test that ran in one of them may be skipped in the
others. Tests that need a GPU, a processor with AVX-512, or real data that are not shipped may be
skipped everywhere.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree

MAY_BE_MISSING = re.compile(
    r"GPU|CUDA|AVX-512|SPLINCE_FAST_DATA|SCIPY_ARRAY_API|Chromium", re.IGNORECASE
)


def outcomes(path: str) -> tuple[set[str], dict[str, str]]:
    """Tests that ran, and tests that were skipped with their reasons."""
    ran: set[str] = set()
    skipped: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if skip is None:
            ran.add(name)
        else:
            skipped[name] = f"{skip.get('message')} {skip.text}"
    return ran, skipped


def main(paths: list[str]) -> int:
    """Print what no job ran, and return the number of such tests, at most 1."""
    found = [outcomes(path) for path in paths]
    ran = set().union(*(names for names, _ in found))
    if not ran:
        print("no test ran at all")
        return 1
    never = {
        name: reason
        for _, skipped in found
        for name, reason in skipped.items()
        # A module that is skipped whole is reported under its own name.
        if name not in ran and not any(test.startswith(name.strip(":")) for test in ran)
    }
    bad = {n: r for n, r in never.items() if not MAY_BE_MISSING.search(r)}
    for name, reason in sorted(bad.items()):
        print(f"{name} is skipped in every job: {reason.strip().splitlines()[0]}")
    print(f"{len(ran)} tests ran, {len(never)} ran nowhere, {len(bad)} of them without excuse")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
