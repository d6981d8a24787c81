"""Methods that compute an eraser from moments: closed forms and their extensions.

LEACE and SPLINCE, which keeps a task, whiten x; SAL, with or without a task, does not.
"""

from splince_fast.methods.closed_forms import leace, mean_projection, sal, splince

__all__ = ["leace", "mean_projection", "sal", "splince"]
