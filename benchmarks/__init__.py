"""Benchmarks of splince_fast against hardware limits, other packages and its earlier commits.

The modules ``jobs_*`` define jobs. A job times several implementations of the same work, its
contenders: splince_fast, other packages, and a lower bound of the time (the floor). Some jobs
measure a number, such as peak memory, instead. A job may set targets for splince_fast. The other
modules use the list of all jobs: `benchmarks.compare` measures them, `benchmarks.page` writes
docs/performance.md, `benchmarks.asv_suite` tracks the results over commits, and `benchmarks.smoke`
runs every job once at tiny sizes. CONTRIBUTING.md lists the commands. Jobs and contenders that need
a package that is not installed are left out.
"""
