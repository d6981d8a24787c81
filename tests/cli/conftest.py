"""A command of one process, and what it prints."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from splince_fast.cli import main


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run; return stdout after success and stderr after a mistake, the other being empty."""

    def run(*argv: str, code: int = 0) -> str:
        assert main(list(argv)) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert not (out if code else err)
        return err if code else out

    return run
