"""Commands over the GPUs of a host: the next one runs on whichever GPU is free, alone there.

    python bench/over_gpus.py JOBS OUT_FOLDER [--gpus N]

Each line of the file JOBS is `NAME: COMMAND`, in the order in which they begin; {out} in a command is the folder. Lines that
begin with # are left out. What a command prints goes to NAME.log there; status.txt has for each when it began and how it ended.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_LOOK_S = 0.5


class Job(NamedTuple):
    name: str
    command: Sequence[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [line.strip() for line in options.jobs.read_text().splitlines()]
    jobs = [
        Job(name.strip(), [part.replace("{out}", str(options.out)) for part in shlex.split(command)])
        for name, _, command in (line.partition(":") for line in lines if line and not line.startswith("#"))
    ]
    return run_over_gpus(jobs, options.out, options.gpus)


def run_over_gpus(jobs: Iterable[Job], out: Path, num_gpus: int) -> int:
    """Run all, and return how many failed."""
    waiting, num_failed, began = list(jobs), 0, time.monotonic()
    running: dict[int, tuple[Job, subprocess.Popen[bytes], float]] = {}
    with (out / "status.txt").open("a") as status:
        while waiting or running:
            for gpu in range(num_gpus):
                if gpu not in running and waiting:
                    job = waiting.pop(0)
                    with (out / f"{job.name}.log").open("wb") as log:
                        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
                        process = subprocess.Popen(job.command, stdout=log, stderr=log, env=environment)
                    running[gpu] = job, process, time.monotonic()
                    print(f"{time.monotonic() - began:.0f} s: {job.name} begins on GPU {gpu}", file=status, flush=True)
            for gpu, (job, process, since) in list(running.items()):
                if process.poll() is not None:
                    num_failed += bool(process.returncode)
                    taken = f"after {time.monotonic() - since:.0f} s: exit code {process.returncode}"
                    for stream in (status, sys.stdout):
                        print(f"{job.name} ended {taken}, see {job.name}.log", file=stream, flush=True)
                    del running[gpu]
            time.sleep(_LOOK_S)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
