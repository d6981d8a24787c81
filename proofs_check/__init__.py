"""Checks of the theory of SPLINCE, statement by statement.

``python -m proofs_check`` prints one verdict per statement; ``pytest proofs_check`` runs the same
checks as tests. Algebraic statements are checked in exact rational arithmetic, the others in
60-digit arithmetic or by quadrature with a proven error bound. The public interface of
:mod:`splince_fast` is checked against these results. The paper is Holstege, Ravfogel and Wouters,
"Preserving Task-Relevant Information Under Linear Concept Removal" (NeurIPS 2025,
arXiv 2506.10703).
"""
