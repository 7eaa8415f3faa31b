"""Processes that the script starts: what runs in them is not seen, and the Evidence must say so."""

from __future__ import annotations

import multiprocessing.process
import subprocess
from typing import Any

from flatout.profiling.patching import Patches


class Processes:
    """Counts processes started beside DataLoader workers."""

    def __init__(self) -> None:
        self.num_started = 0

    def install(self, patches: Patches) -> None:
        """Watch `Process.start` and `subprocess.Popen`."""
        watch = self
        start = multiprocessing.process.BaseProcess.start
        popen = subprocess.Popen.__init__

        def watched_start(process: Any) -> None:
            target = getattr(process, "_target", None)
            if "_worker_loop" not in getattr(target, "__name__", "") and "ObservedWorker" not in getattr(
                target, "__qualname__", ""
            ):
                watch.num_started += 1
            start(process)

        def watched_popen(process: Any, *args: Any, **kwargs: Any) -> None:
            watch.num_started += 1
            popen(process, *args, **kwargs)

        patches.set(multiprocessing.process.BaseProcess, "start", watched_start)
        patches.set(subprocess.Popen, "__init__", watched_popen)

    def note(self) -> str | None:
        """What to tell about them; None when there were none."""
        if not self.num_started:
            return None
        return (
            f"the script started {self.num_started} process(es) of its own; steps that ran there were not seen: "
            "check the script that runs in them, or run it with one process"
        )
