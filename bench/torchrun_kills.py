"""Seconds from a kill to the next step, on two nodes of two ranks with gloo: of a rank, an agent, a node, and the coordinator.

    python bench/torchrun_kills.py [--kills 10] [--launcher flatout-torchrun|torchrun] [--out FILE]

Both nodes are on this machine, each with an agent of its own. A node whose processes have ended is started again, as a scheduler
would; `flatout-torchrun` starts agents again by itself. Copies of the state lie in memory under both. Losses are compared bit by
bit with those of a job that was not disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any, Final, get_args

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.blocks.elastic.two_nodes import FORKED, RANKS, TORCHRUN, NotRecovered, TwoNodes, What

from flatout.core.files import write_whole_file

LAUNCHERS: Final = {"flatout-torchrun": FORKED, "torchrun": TORCHRUN}
STEPS: Final = 1_000_000
OPTIONS: Final = {"flatout-torchrun": ("--agent-restarts", "1000"), "torchrun": ()}


def undisturbed(folder: Path, steps: int) -> list[dict[int, str]]:
    """Losses of each rank's first steps."""
    with TwoNodes(folder, steps=STEPS, pace_s=0.0) as job:
        while min((len(job.log(rank)) for rank in range(RANKS)), default=0) < steps:
            job.keep_going()
            sleep(0.5)
        return [{step: loss for step, _, loss in job.log(rank)} for rank in range(RANKS)]


def main() -> None:
    """Kill parts of a job, and compare its losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS), default="flatout-torchrun")
    parser.add_argument("--what", nargs="*", choices=get_args(What), default=get_args(What)[:4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        began_s = monotonic()
        name = asked.launcher
        with TwoNodes(
            Path(temporary) / "job", steps=STEPS, module=LAUNCHERS[name], options=OPTIONS[name], pace_s=0.02
        ) as job:
            for what in asked.what:
                recovered, lost, problems = [], 0, []
                for _ in range(asked.kills):
                    try:
                        one = job.killed(what, chance)
                    except NotRecovered as e:
                        problems.append(str(e)[-300:])
                        break
                    recovered.append(one.seconds)
                    lost = max(lost, one.steps_lost)
                found[what] = {
                    "kills": len(recovered) + len(problems),
                    "recovered": len(recovered),
                    "seconds_median": median(recovered) if recovered else None,
                    "seconds_range": [min(recovered), max(recovered)] if recovered else None,
                    "most_steps_lost": lost,
                    "problems": problems,
                }
                print(what, found[what], flush=True)
                if problems:
                    break
            losses = [{(step, loss) for step, _, loss in job.log(rank)} for rank in range(RANKS)]
        whole_s = monotonic() - began_s
        most = max(step for rank in losses for step, _ in rank)
        whole = undisturbed(Path(temporary) / "whole", most)
    different = sum(whole[rank].get(step) != loss for rank, of_rank in enumerate(losses) for step, loss in of_rank)
    result = {
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "launcher": name,
        "nodes": 2,
        "ranks": RANKS,
        "job_s": whole_s,
        "steps": most,
        "losses_compared": sum(map(len, losses)),
        "losses_that_differ": different,
        **found,
    }
    print(f"{most} steps, {result['losses_compared']} losses compared, {different} differ")
    if asked.out:
        write_whole_file(asked.out, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
