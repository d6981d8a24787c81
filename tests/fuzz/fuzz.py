"""Coverage-guided fuzzing of what reads foreign bytes; needs ``pip install atheris``.

``python tests/fuzz/fuzz.py {moments,projection,conditional,labels} [options of libFuzzer] corpus``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Run libFuzzer on the target that the first argument names."""
    import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

    with atheris.instrument_imports(include=["splince_fast"]):
        import targets

    kind = sys.argv.pop(1)
    target = targets.TARGETS[kind]
    with tempfile.TemporaryDirectory() as folder:

        def once(data: bytes) -> None:
            target(data if kind == "labels" else targets.repaired(data), Path(folder))

        atheris.Setup(sys.argv, once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
