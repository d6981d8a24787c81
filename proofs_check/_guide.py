"""The prose of the findings document: its summary, the choice it leads to, and how it was made."""

from __future__ import annotations

INTRODUCTION = """\
# What is true in the theory of SPLINCE, and what it means for you

Holstege, Ravfogel and Wouters, "Preserving Task-Relevant Information Under Linear Concept
Removal" (NeurIPS 2025, arXiv 2506.10703), propose SPLINCE: an eraser of a concept z that keeps the
covariance with a task y. This page goes through the paper's statements one by one. It is written
by `python -m proofs_check --markdown` from the evidence of that run ({run}).

**In short.** The method is sound and Theorem 1 is right: the formula is the optimal eraser under
its constraints, in more generality than the paper claims, and its one assumption is exactly the
needed one. Theorem 2 is right under the hypothesis it names, a unique minimiser. Theorems 3 and 4,
which the authors themselves call an initial investigation, are about another map than the eraser:
they apply P to the head instead of to the features. For the eraser that one deploys, the order of
LEACE and SPLINCE behind a well-fitted, unregularised frozen head is the opposite. There is
nevertheless a range of heads for which SPLINCE wins; moments and the head tell which.

## Which eraser to choose

Compute rho first: the squared correlation of the best linear predictions of z and of y (the
library's report gives it). At rho = 0 SPLINCE and LEACE are the same map.
"""

GUIDE = (
    (
        "a head refitted without penalty; classes not separable, more rows than dimensions",
        "same predictions for SPLINCE, LEACE and SAL (3.1-3.3)",
        "any; LEACE changes the features least",
    ),
    (
        "a head refitted with a ridge penalty",
        "whitened features: SPLINCE at lambda is LEACE at lambda (1 - rho) (6.2); otherwise "
        "either can win (6.1, 6.2)",
        "SPLINCE where the penalty is strong and fixed; where it is tuned, compare",
    ),
    (
        "n <= d, or classes separable after erasure",
        "predictions depend on the range even without penalty (3.4)",
        "compare on held-out data",
    ),
    (
        "a frozen least-squares head",
        "same ranking; the excess risk of SPLINCE is 1 / (1 - rho) times that of LEACE (4.2)",
        "LEACE, or SPLINCE with scores times 1 - rho",
    ),
    (
        "a frozen, well-fitted logistic head, Gaussian features",
        "same ranking; the log-loss of SPLINCE is larger (5.3)",
        "LEACE",
    ),
    (
        "a frozen least-squares head times g, or fitted with a penalty",
        "SPLINCE has the smaller squared error iff g < 2 (1 - rho) / (2 - rho) (4.3)",
        "compare g with the threshold in the report",
    ),
    (
        "a frozen head trained for something else (language models)",
        "the sign of (q / H)(2 v - q - 2 H) decides (4.3)",
        "measure q and v, then decide",
    ),
    (
        "class means, nearest centroids, steering vectors, mean log-odds per group",
        "SPLINCE keeps them exactly, LEACE shifts them (4.4)",
        "SPLINCE",
    ),
)
"""What follows the eraser, what holds, what to choose."""

METHOD = """\
## How it was checked

Algebraic statements are checked in exact rational arithmetic on random problems, so their residual
is zero or the statement is wrong. Logistic and softmax heads are fitted to 40 digits with a
certificate that the minimiser exists; Gaussian integrals are computed by quadrature with a proven
error bound; nothing rests on simulation. The library is held against the exact results on the same
problems, with tolerances from a rounding analysis. Every check is repeated with wrong formulas put
in (mutants), and counts only if it rejects each of them.

"Holds with condition" means: confirmed where the added condition is met, and refuted in cases
where it is not. "False as stated" means: refuted within the statement's own hypotheses. A residual
of 0 is an exact equality, or an inequality that holds beyond the error bounds.

Notation: S = Cov(x), Sz = Cov(x, z), Sy = Cov(x, y), C_ab = Sa^T S^+ Sb, E = I - P,
G = C_zz - C_zy C_yy^+ C_yz, H = C_yy - C_yz C_zz^+ C_zy, X = E_LEACE Sy, rho = C_yz C_zz^+ C_zy /
C_yy for scalar y. "Literal" applies P to the head, as the printed proofs of Theorems 3 and 4 do;
"deployed" replaces x by Px.
"""
