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
        self.num_spawned = 0
        """Of those, started by torch.multiprocessing's `spawn` or `start_processes`: ranks, as a rule."""

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
                watch.num_spawned += getattr(target, "__module__", "") == "torch.multiprocessing.spawn"
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
        if self.num_spawned:
            return (
                f"the script spawned {self.num_spawned} ranks of its own (torch.multiprocessing); what ran in them was not seen: "
                "let a launcher start the ranks instead, `flatout check --nproc N SCRIPT` with a script that calls its "
                "worker with int(os.environ['LOCAL_RANK']), as torchrun scripts do"
            )
        return (
            f"the script started {self.num_started} process(es) of its own; steps that ran there were not seen: "
            "check the script that runs in them, or run it with one process"
        )
