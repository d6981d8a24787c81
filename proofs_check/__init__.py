"""The theory behind SPLINCE, checked statement by statement.

``python -m proofs_check`` prints one verdict per statement; ``pytest proofs_check`` runs the same
checks as tests. The evidence is exact rational arithmetic wherever a statement is algebraic,
60-digit arithmetic or quadrature with a proven error bound elsewhere, and the public interface
of :mod:`splince_fast` compared with both. The paper is Holstege, Ravfogel and Wouters,
"Preserving Task-Relevant Information Under Linear Concept Removal" (NeurIPS 2025,
arXiv 2506.10703).
"""
