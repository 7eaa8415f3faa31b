"""Jobs that a real Slurm preempts, or queues again: whether each goes on, with which losses, and after how many seconds.

    python bench/slurm_kills.py [--kills 10] [--out FILE]

Needs Debian's slurm-wlm and munge: a controller and two nodes of two ranks each are started on this machine. Seconds are from the
notice until the last step of a rank, and from there to a step of all ranks in the next run, Slurm's own waiting included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.app.test_slurm import RANKS, Training
from tests.slurm_cluster import SlurmCluster

from flatout.core.files import write_whole_file


def interrupted(cluster: SlurmCluster, training: Training, what: str) -> tuple[float, float]:
    """Seconds to save, and to go on."""
    asked_s, started = monotonic(), [len(training.begins(rank)) for rank in range(RANKS)]
    if what == "preemption":
        words = ("--partition=high", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--wrap", "srun sleep 1")
        cluster.submitted(*words)
    else:
        cluster.call("scontrol", "requeue", training.job)
    while any(len(training.begins(rank)) == number for rank, number in enumerate(started)):
        assert monotonic() < asked_s + 120, training.output()
        sleep(0.1)
    begun = [training.begins(rank)[number] for rank, number in enumerate(started)]
    while any(max(training.times(rank)) < begun[rank] for rank in range(RANKS)):
        assert monotonic() < asked_s + 180, training.output()
        sleep(0.1)
    last_s = max(at_s for rank in range(RANKS) for at_s in training.times(rank) if at_s < begun[rank])
    firsts = [min(at_s for at_s in training.times(rank) if at_s > begun[rank]) for rank in range(RANKS)]
    return last_s - asked_s, max(firsts) - last_s


def main() -> None:
    """Interrupt a job again and again, and compare its losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, SlurmCluster(Path(temporary) / "slurm") as cluster:
        steps = 40 * (2 * asked.kills + 2)
        whole = Training(cluster, Path(temporary) / "whole", pace_s=0.0, steps=steps)
        whole.finish()
        training = Training(cluster, Path(temporary) / "job", pace_s=0.05, steps=steps)
        training.wait_for_step(10)
        for what in ("preemption", "requeue"):
            seconds = []
            for number in range(asked.kills):
                seconds.append(interrupted(cluster, training, what))
                print(what, number, [round(s, 2) for s in seconds[-1]], flush=True)
            found[what] = {
                "interruptions": len(seconds),
                "seconds_to_the_last_step_median": median(s for s, _ in seconds),
                "seconds_without_a_step_median": median(s for _, s in seconds),
            }
        training.finish()
        twice = max(len(of_rank) - len(set(of_rank)) for of_rank in training.steps())
        result = {
            "device": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": str(torch.__version__),
            "slurm": cluster.call("sinfo", "--version").stdout.strip(),
            "restarts": int(cluster.field(training.job, "Restarts")),
            "losses_are_the_same": training.losses() == whole.losses(),
            "steps_done_twice": twice,
            **found,
        }
    print(result)
    if asked.out:
        write_whole_file(asked.out, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
