"""Entry point of ``python -m splince_fast``: the command line of the package."""

from __future__ import annotations

from splince_fast.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
