"""What is collected: modules and pages that need torch are left out where it is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["splince_fast/nn/*.py", "docs/live_models.md"]
