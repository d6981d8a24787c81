"""Former name of :mod:`splince_fast._runtime.rows`."""

from splince_fast._runtime.rows import *  # noqa: F403
