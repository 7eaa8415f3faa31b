"""The start method of workers that flatout adds to a script, in processes that have set none, and one."""

from __future__ import annotations

import subprocess
import sys

import pytest

ASK = "from flatout.core.runtime.worker_start import added_workers_start; print(added_workers_start())"
IS_NEW = sys.platform == "linux" and sys.version_info >= (3, 14)


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", "fork" if IS_NEW else None), ("import multiprocessing; multiprocessing.set_start_method('spawn'); ", None)],
)
def test_workers_are_forked_where_the_script_has_set_nothing(before: str, expected: str | None) -> None:
    done = subprocess.run([sys.executable, "-c", before + ASK], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(expected)
