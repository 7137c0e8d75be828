"""How long a command takes, whatever else the machine is doing."""

from __future__ import annotations

import resource
from collections.abc import Callable


def cpu_seconds(run: Callable[[], object]) -> float:
    """Of the processes that were started and awaited within ``run``: on an idle machine what a command takes that waits
    for nothing; on a busy one its wall clock says more of the others."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
