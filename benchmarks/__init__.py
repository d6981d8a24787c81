"""How fast splince_fast is: against the machine, against other packages, and over its history.

Every job is defined once, in the modules ``jobs_*``: its data, splince_fast's way to do it, a lower
bound (the floor), other packages' ways, and the targets. Everything else is made from that list.
From the root of a checkout, with the extra ``bench`` (and ``peers``, ``hf``, ``dask`` for the jobs
on torch, on live models and on a cluster; what is not installed is left out)::

    python -m benchmarks.smoke             every job once, tiny; fails if any of them does
    python -m benchmarks.compare --json    all jobs; writes benchmarks/results/PROCESSOR.json
    python -m benchmarks.compare splince/  only the jobs whose name contains the text
    python -m benchmarks.page              docs/performance.md from benchmarks/results/

The history is kept by asv, whose benchmarks (`benchmarks.asv_suite`) are made from the same jobs;
CONTRIBUTING.md says how. ``SPLINCE_FAST_BENCH=smoke`` shrinks every size.
"""
