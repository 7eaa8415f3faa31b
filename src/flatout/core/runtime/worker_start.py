"""How worker processes that flatout adds to a script begin."""

from __future__ import annotations

import multiprocessing
import sys


def added_workers_start() -> str | None:
    """The start method of workers that the script has not asked for: 'fork' where the script has set none; None as it is.

    From Python 3.14 on, 'forkserver' is usual on Linux: it imports the script again in each worker, and pickles the data set. A
    script that has had no workers need not bear either; forked workers, which were usual until then, need neither.
    """
    is_new = sys.platform == "linux" and sys.version_info >= (3, 14)
    return "fork" if is_new and multiprocessing.get_start_method(allow_none=True) is None else None
