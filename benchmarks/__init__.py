"""Benchmarks of splince_fast against hardware limits, other packages and its own history.

Every job is defined once, in a module ``jobs_*``: data, splince_fast, a lower bound (the floor),
other packages, and targets. All other modules use this list: `benchmarks.compare` measures the
jobs, `benchmarks.page` writes docs/performance.md, `benchmarks.asv_suite` keeps the history, and
`benchmarks.smoke` runs all jobs once at tiny sizes. CONTRIBUTING.md lists the commands. Contenders
and jobs whose packages are not installed are left out.
"""
