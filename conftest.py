"""What is collected: examples that need an optional package are left out where it is absent."""

from importlib.util import find_spec

NEEDS = {
    "torch": ["splince_fast/nn/*.py", "splince_fast/sources/_torch.py", "docs/live_models.md"],
    "datasets": ["splince_fast/sources/_huggingface.py"],
    "dask": ["splince_fast/sources/_dask.py"],
    "distributed": ["docs/howto/dask.md"],
}
collect_ignore_glob = [
    path for package, paths in NEEDS.items() if not find_spec(package) for path in paths
]
