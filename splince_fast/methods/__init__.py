"""Methods that compute an eraser from moments: closed forms and their extensions.

==============================  ==============  ==============================
..                              no task kept    task kept
==============================  ==============  ==============================
whitened (a factor of Cov(x))   ``leace``       ``splince``
not whitened                    ``sal``         ``sal`` with ``keep=``
==============================  ==============  ==============================
"""

from splince_fast.methods.closed_forms import leace, mean_projection, sal, splince

__all__ = ["leace", "mean_projection", "sal", "splince"]
