"""What is collected: examples that need an optional package are left out where it is absent."""

from importlib.util import find_spec

NEEDS = {
    "torch": [
        "splince_fast/nn/*.py",
        "splince_fast/sources/_torch.py",
        "docs/live_models.md",
        "tests/nn/tail.py",
    ],  # fmt: skip
    "datasets": ["splince_fast/sources/_huggingface.py"],
    "distributed": ["splince_fast/sources/_dask.py", "docs/howto/dask.md"],
    "pyarrow": ["splince_fast/sources/_parquet.py"],
}
collect_ignore_glob = [path for name in NEEDS if not find_spec(name) for path in NEEDS[name]]
