"""Linear algebra of the erasers on arrays: spans, factors of Cov(x), projections and tolerances."""
