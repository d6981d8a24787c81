"""What is collected: modules and pages that need an optional package only where it is installed."""

from importlib.util import find_spec

NEEDS = {
    "torch": ["splince_fast/nn/*.py", "docs/live_models.md"],
    "distributed": ["docs/howto/dask.md"],
}
collect_ignore_glob = [
    path for package, paths in NEEDS.items() if not find_spec(package) for path in paths
]
