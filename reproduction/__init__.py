"""The paper's experiments, one command each: ``python -m reproduction NAME`` from a checkout.

Each command prints results with intervals over seeds, then the values printed in the paper. Last,
it lists the claims of the paper that the results confirm, contradict or leave undecided.
``docs/experiments.md`` lists the results. Everything is computed by the public interface of
splince_fast.
"""
