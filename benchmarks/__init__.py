"""How fast splince_fast is: over its history, against other packages, and against the machine.

From the root of a checkout, with the extra ``bench`` (and ``peers`` for the packages on torch)::

    python -m benchmarks.smoke      every benchmark once, tiny; fails if any of them does
    python -m benchmarks.targets    measured ratios beside the ratios that the project promises
    python -m benchmarks.peers      the same jobs done by other packages: time, memory, accuracy
    python -m benchmarks.growth     exponents, the machine's roofline, and a model of large jobs
    python -m benchmarks.profiles   where the time goes
    python -m benchmarks.page       docs/performance.md from the results of these four

``targets``, ``peers``, ``growth`` and ``profiles`` take ``--smoke`` (tiny sizes, numbers without
meaning) and ``--json PATH``; ``peers`` takes ``--figure PATH``, too.

The history of the project is tracked with asv, whose benchmarks are the modules named after what
they measure (accumulate, merge, solve, apply, files, estimators, import_time)::

    asv machine --yes               once: names the machine
    asv run HEAD^!                  measures one commit in an environment of its own
    asv run --python=same --quick   measures what is installed, once
    asv continuous main HEAD        compares two commits; asv compare A B, if both are measured
    asv publish && asv preview      the pages

``SPLINCE_FAST_BENCH=smoke`` shrinks every size; ``full`` is the default.
"""
