"""Tables as Markdown, and results as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that reads well as plain text, too."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Write the results, if a path is given."""
    if path is not None:
        text = json.dumps(content, indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


def seconds(value: float) -> str:
    """A duration in a unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * size:  # what three digits round up to
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def duration(value: float) -> str:
    """Hours and days where seconds would not be read."""
    if value < 600:
        return seconds(value)
    return f"{value / 3600:.1f} h" if value < 48 * 3600 else f"{value / 86400:.1f} days"


def nbytes(value: float) -> str:
    """An amount of memory in MiB or GiB."""
    return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"
