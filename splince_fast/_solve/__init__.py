"""Solves: selections, factors of Cov(x), projections and their rounding rules, on plain arrays."""
