"""Processes that the script starts: what runs in them is not observed, and a note says so."""

from __future__ import annotations

import multiprocessing.process
import subprocess
from collections.abc import Iterator
from typing import Any, Final

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.core.runtime.patches import Patches


class ChildProcesses(Collector):
    """Counts processes started beside DataLoader workers."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_spawned = 0
        """Of those, started by torch.multiprocessing's `spawn` or `start_processes`: ranks, as a rule."""

    def install(self, patches: Patches) -> None:
        """Watch `Process.start` and `subprocess.Popen` for new processes."""
        watch = self
        start = multiprocessing.process.BaseProcess.start
        popen = subprocess.Popen.__init__

        def watched_start(process: Any) -> None:
            target = getattr(process, "_target", None)
            if "_worker_loop" not in getattr(target, "__name__", "") and "ObservedWorker" not in getattr(
                target, "__qualname__", ""
            ):
                watch.num_started += 1
                watch.num_spawned += getattr(target, "__module__", "") == "torch.multiprocessing.spawn"
            start(process)

        def watched_popen(process: Any, *args: Any, **kwargs: Any) -> None:
            watch.num_started += 1
            popen(process, *args, **kwargs)

        patches.set(multiprocessing.process.BaseProcess, "start", watched_start)
        patches.set(subprocess.Popen, "__init__", watched_popen)

    def notes(self) -> Iterator[str]:
        """A note that the steps in child processes were not observed."""
        if self.num_spawned:
            yield (
                f"the script spawned {self.num_spawned} ranks of its own (torch.multiprocessing); what ran in them was not "
                "observed: let a launcher start the ranks instead, `flatout check --nproc N SCRIPT` with a script that calls its "
                "worker with int(os.environ['LOCAL_RANK']), as torchrun scripts do"
            )
        elif self.num_started:
            yield (
                f"the script started {self.num_started} process(es) of its own; steps that ran there were not observed: "
                "check the script that runs in them, or run it with one process"
            )


COLLECTOR: Final = CollectorEntry(lambda observation: ChildProcesses())
