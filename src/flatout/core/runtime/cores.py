"""How many cores there are for this process."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on; all of the machine's where the system does not say (macOS, Windows).

    A container's quota of time is not in it.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
