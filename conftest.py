"""Selection of tests and examples, and the folder of real data sets.

Those that need an optional package are left out where it is absent. ``SPLINCE_FAST_DATA`` names
the folder of the real data sets, which are not part of the project.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Examples take longer on a loaded machine. tests/conftest.py loads the profile of its tests.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

DATA = Path(
    os.environ.get("SPLINCE_FAST_DATA") or Path(__file__).resolve().parents[1] / "shared" / "data"
)

NEEDS = {
    "torch": [
        "splince_fast/nn/*.py",
        "splince_fast/_runtime/torch_rows.py",
        "docs/live_models.md",
        "tests/nn",
    ],
    "datasets": ["splince_fast/sources/_huggingface.py"],
    "distributed": ["splince_fast/sources/_dask.py"],
    "polars": ["splince_fast/sources/_words.py"],
    "pyarrow": ["splince_fast/sources/_parquet.py"],
    "h5py": ["splince_fast/sources/_hdf5.py"],
}
collect_ignore_glob = [path for name in NEEDS if not find_spec(name) for path in NEEDS[name]]

# Pages are named by `testpaths`, and what is named is never left out: these are skipped.
PAGES = {"dask.md": "distributed", "hdf5.md": "h5py", "live_models.md": "transformers"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the page of a package that is not installed."""
    for item in items:
        package = PAGES.get(item.path.name)
        if package and not find_spec(package):
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """Path of a real data set by the name of its folder or file; skips where it is absent."""

    def find(name: str) -> Path:
        path = DATA / name
        if not path.exists():
            pytest.skip(f"the real data set {name!r} is not in {DATA}; see SPLINCE_FAST_DATA")
        return path

    return find
