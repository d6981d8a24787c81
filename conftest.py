"""What is collected: examples that need an optional package are left out where it is absent."""

from importlib.util import find_spec

import pytest

NEEDS = {
    "torch": [
        "splince_fast/nn/*.py",
        "splince_fast/sources/_torch.py",
        "splince_fast/_runtime/torch_rows.py",
        "docs/live_models.md",
        "tests/nn/tail.py",
    ],
    "datasets": ["splince_fast/sources/_huggingface.py"],
    "distributed": ["splince_fast/sources/_dask.py"],
    "pyarrow": ["splince_fast/sources/_parquet.py"],
}
collect_ignore_glob = [path for name in NEEDS if not find_spec(name) for path in NEEDS[name]]

# Pages are named by `testpaths`, and what is named is never left out: these are skipped.
PAGES = {"dask.md": "distributed", "live_models.md": "transformers"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the page of a package that is not installed."""
    for item in items:
        package = PAGES.get(item.path.name)
        if package and not find_spec(package):
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))
