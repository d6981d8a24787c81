"""Messages of the library in the terms of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

# Parameters whose flag has another name.
_FLAGS = {
    "alpha": "alphas", "erasers": "eraser", "folder": "run", "heads": "head", "leakage": "probe",
    "n_jobs": "jobs", "n_seeds": "seeds"
}  # fmt: skip
# Advice that applies to Python alone, and its replacement.
_PYTHON = (
    (r", e\.g\. (\w+) = \1\[np\.isfinite\(\1\)\.all\(axis=1\)\]", ""),
    (r",? or a function of moments\b", ""),
    (r"; Moments, estimators and sf\.erase take kinds=", ""),
    (r"(must be )None(?:,| or) ", r"\1"),
    (r",? or None for ", "; by default "),
    (r"\blabels\[('[^']*')\]", r"column \1 of the labels"),
)
_KIND = re.compile(
    r"(?:Moments\()?kinds=\{(?:'(?P<name>[^']*)'|\.\.\.): '(?P<kind>\w+)'\}\)?"
    r"|labels\.encode_one\([^=]*name='(?P<column>[^']*)', kind='(?P<read_as>\w+)'\)"
)


def with_flags(
    text: str, parameters: Iterable[str], variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Replace Python arguments in a message by flags of a command.

    For example, ``rank_tol=1e-8`` becomes ``--rank-tol 1e-8``. `variables` maps names of the
    library, such as "task", to those of the command line.
    """
    # A parameter after a slash, a quote or a hyphen may be part of a path, and is not replaced. A
    # parameter without "=" is replaced at the beginning of the message, or if its name has an
    # underscore.
    flags = {name: f"--{name.replace('_', '-')}" for name in parameters}
    flags |= {name: flags[other] for name, other in _FLAGS.items() if other in flags}
    for pattern, replacement in _PYTHON:
        text = re.sub(pattern, replacement, text)
    if "kind" in flags:
        text = re.sub(r" \(on the command line: [^)]*\)", "", text)

        def flag(match: re.Match[str]) -> str:
            name = match["name"] or match["column"] or "NAME"
            return f"--kind {variables.get(name, name)}={match['kind'] or match['read_as']}"

        text = _KIND.sub(flag, text)
    text = re.sub(
        r"\bvariable '(\w+)'", lambda match: f"variable {variables.get(match[1], match[1])!r}", text
    )
    any_name = "|".join(map(re.escape, flags))
    words = "|".join(re.escape(name) for name in flags if "_" in name) or "(?!)"
    start = r"(?<![\w/'\"-])"
    text = re.sub(
        rf"\b(?:pass ({any_name})=None\b|leave ({any_name}) out\b)",
        lambda match: f"leave {flags[match[1] or match[2]]} out",
        text,
    )
    text = re.sub(
        rf"{start}({any_name})=('?)((?:[\w+-]+(?:\.\w+)*)?)\2",
        lambda match: f"{flags[match[1]]} {match[3]}".rstrip(),
        text,
    )
    return re.sub(
        rf"^({any_name})(?= (?:is|assigns)\b)|{start}(?<!= )({words})\b(?![/'\"=.-]\w)",
        lambda match: flags[match[1] or match[2]],
        text,
    )
