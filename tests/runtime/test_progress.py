"""_runtime.progress: where bars appear, their figures, and the cost of a hidden bar."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import script

from splince_fast import Moments
from splince_fast._runtime import progress
from splince_fast._runtime.progress import Progress
from splince_fast.sources import from_arrays


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "show", "delay", "visible"),
    [
        (io.StringIO, True, 0.0, True),
        (io.StringIO, None, 0.0, False),
        (Terminal, None, 0.0, True),
        (Terminal, False, 0.0, False),
        (lambda: None, True, 0.0, False),
        (Terminal, None, progress._DELAY_SECONDS, False),  # short work shows no bar
    ],
)
def test_bar_appears_where_it_is_asked_for_or_seen(
    monkeypatch: pytest.MonkeyPatch, stream: Any, show: bool | None, delay: float, visible: bool
) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", delay)
    monkeypatch.setattr(sys, "stderr", given := stream())
    with Progress(10, "reading", show=show) as bar:
        bar.advance(10, 40)
    text = "" if given is None else given.getvalue()
    assert bool(text) == visible
    assert not visible or re.search(r"reading: 100%.*10.*/10", text)


def test_notebook_counts_as_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert not progress.is_interactive()
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert progress.is_interactive()


def test_resumed_rows_are_part_of_the_fraction_but_not_of_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        source = from_arrays(np.ones((8, 2)), block_rows=2)
        Moments.from_blocks(source, checkpoint=tmp_path / "state", progress=True)
        texts.append(stream.getvalue().strip().split("\r")[-1])
    assert all("8.00/8.00" in text for text in texts)
    assert "?" not in texts[0].split(",")[-2]  # the rate of the first run
    assert "? rows/s" in texts[1]  # the second run read none


def test_bar_is_closed_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with contextlib.suppress(ValueError), Progress(10, show=True) as bar:
        bar.advance(5)
        raise ValueError
    assert stream.getvalue().endswith("\n")


def test_hidden_bar_does_not_import_tqdm() -> None:
    code = (
        "import sys; from splince_fast._runtime.progress import Progress\n"
        "with Progress(10) as bar: bar.advance(1)\n"
        "assert 'tqdm' not in sys.modules"
    )
    script(code)
