"""Built job records: a fleet of any size with known causes."""

from __future__ import annotations

import random
from typing import Any

from flatout.core.records.job import JobFinding, JobRecord

WEEK_S = 7 * 86400.0
NOW_S = 1_795_000_000.0

_CAUSES = (
    ("input.slow-item", "An item takes long to prepare", "input", "data.py"),
    ("overhead.host-sync", "The host waits for the device", "overhead", "train.py"),
    ("compute.full-precision", "Products in float32", "compute", "model.py"),
    ("bandwidth.unfused", "Pointwise operators one by one", "bandwidth", "model.py"),
)


def finding(gain: tuple[float, float], **changes: Any) -> JobFinding:
    values: dict[str, Any] = {
        "rule": "input.slow-item",
        "title": "An item takes long to prepare",
        "file": "data.py",
        "line": 12,
        "regime": "input",
        "share": 1 - 1 / gain[1],
        "gain": gain,
        "because": "an item takes 4 ms",
        "edit": "prepare it once",
    }
    return JobFinding(**values | changes)


def job(number: int = 0, **changes: Any) -> JobRecord:
    """A finished job of an hour on eight GPUs in the week before NOW_S, with no cause."""
    seconds, step_s = changes.pop("seconds", 3600.0), changes.get("step_s", 0.1)
    began_s = changes.pop("began_s", NOW_S - 86400.0)
    values: dict[str, Any] = {
        "id": f"id{number:08}",
        "job": f"job{number:08}",
        "began_s": began_s,
        "written_s": began_s + seconds,
        "outcome": "finished",
        "name": "train.py",
        "workload": f"w{number:06}",
        "command": "train.py --lr 0.1",
        "project": "vision",
        "user": "ada",
        "team": "vision",
        "node": f"node{number % 7:03}",
        "device": "NVIDIA H200",
        "num_gpus": 8,
        "world_size": 8,
        "local_world_size": 8,
        "num_cores": 64,
        "num_steps": int(seconds / step_s) if step_s else 0,
        "num_timed": 500,
        "step_s": step_s,
        "low_s": step_s * 0.99 if step_s else None,
        "high_s": step_s * 1.01 if step_s else None,
        "last_step_s": began_s + seconds - 1.0,
        "utilisation": 0.9,
        "mfu": 0.4,
        "model": "ResNet",
        "saved_fraction": 0.0,
        "observing_s": 0.004 * seconds,
        "torch": "2.13.0",
    }
    return JobRecord(**values | changes)


def fleet(number: int, *, seed: int = 0) -> list[JobRecord]:
    """So many jobs of two weeks, of several teams, sizes and causes."""
    draw = random.Random(seed)
    jobs = []
    for i in range(number):
        kind = draw.randrange(number // 8 + 1)
        own = random.Random(f"{seed} {kind}")  # what is the same in all jobs of a workload
        team = own.choice(("vision", "speech", "language", "robots"))
        rule, title, regime, file = own.choice(_CAUSES)
        high = own.uniform(1.02, 1.5)
        gain = (1.0 + (high - 1.0) * own.uniform(0.3, 0.9), high)
        causes = (finding(gain, rule=rule, title=title, regime=regime, file=file, line=own.randrange(1, 400)),)
        has_cause = own.random() < 0.7
        jobs.append(
            job(
                i,
                began_s=NOW_S - draw.uniform(0.0, 2 * WEEK_S),
                seconds=draw.uniform(600.0, 20 * 3600.0),
                step_s=own.uniform(0.05, 1.0) * draw.uniform(0.98, 1.02),
                num_gpus=own.choice((1, 2, 4, 8)),
                name=f"train_{kind % 40}.py",
                team=team,
                user=f"{team}-{own.randrange(12)}",
                model=own.choice(("ResNet", "GPT", "ViT", "Conformer", "UNet")),
                node=f"node{draw.randrange(60):03}",
                outcome=draw.choices(("finished", "failed", "ended"), (0.9, 0.07, 0.03))[0],
                utilisation=draw.uniform(0.3, 0.99),
                mfu=draw.uniform(0.1, 0.55),
                workload=f"w{kind:06}",
                findings=causes if has_cause else (),
                saved_fraction=1.0 - 1.0 / gain[1] if has_cause else 0.0,
            )
        )
    return jobs
