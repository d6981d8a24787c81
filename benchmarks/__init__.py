"""How fast splince_fast is: against the machine, against other packages, and over its history.

Every job is defined once, in the modules ``jobs_*``: its data, splince_fast, a lower bound (the
floor), other packages, and the targets. Everything else is made from that list:
`benchmarks.compare` measures, `benchmarks.page` writes docs/performance.md, `benchmarks.asv_suite`
keeps the history, and `benchmarks.smoke` runs everything once at tiny sizes. CONTRIBUTING.md says
how; what needs a package that is not installed is left out.
"""
