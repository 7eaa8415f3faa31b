"""What watching a job costs it, for `flatout fleet`.

    python bench/watch_cost.py [--seconds 600] [--pairs 3] [--out FILE]
    python bench/watch_cost.py --look [--pairs 12] [--out FILE]

The job is an unchanged script: a small transformer on random tokens. The first form runs pairs of whole processes, one with the
start-up hook and one without it, in alternating order, each for a fixed number of steps that takes about so many seconds; it
prints the median of the ratios watched / plain of their wall time and of their processor time, with the interval, and what the
records say of themselves. Whole runs of one machine differ by a per cent or more, so the second form measures the fixed part by
itself: the same steps in one process with and without a look inside them, in turn, and the differences of neighbours. It also
times the hook of every step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn

from flatout.app.fleet.installing import STARTUP
from flatout.blocks.recording.job_store.opening import open_store
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.stats import median_estimate

WIDTH, LENGTH, BATCH, VOCABULARY = 128, 64, 8, 1000


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Training:
    """The training; `steps` makes so many more of them."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Transformer().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def steps(self, number: int) -> float:
        began = perf_counter()
        total = torch.zeros((), device=self.device)
        for _ in range(number):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=self.device)
            logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        total.item()
        return perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--look", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        training = Training(options.device)
        training.steps(options.train)
        print(hash_of(training.model))
        return 0
    result: dict[str, object] = {
        "processor": cpu_model(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": version("torch"),
    }
    if options.look:
        result |= looks(options.device, options.pairs or 12)
    else:
        result |= whole_jobs(options.device, options.seconds, options.pairs or 3)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n")
    return 0


def hash_of(model: nn.Module) -> float:
    return float(sum(p.detach().double().sum() for p in model.parameters()))


# -- whole jobs ---------------------------------------------------------------------------------------------------------------


def whole_jobs(device: str, seconds: float, pairs: int) -> dict[str, object]:
    training = Training(device)
    training.steps(20)
    steps = max(50, round(seconds / (training.steps(100) / 100)))
    rows: list[dict[str, dict[str, float]]] = []
    for i in range(pairs):
        order = ("plain", "watched") if i % 2 == 0 else ("watched", "plain")
        row = {side: one_job(device, steps, is_watched=side == "watched") for side in order}
        assert row["plain"]["weights"] == row["watched"]["weights"], "watching has changed the result"
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    ratios = {
        name: median_estimate([row["watched"][name] / row["plain"][name] for row in rows])
        for name in ("wall_s", "processor_s")
    }
    return {
        "steps": steps,
        "pairs": pairs,
        **{f"{name}_ratio": [e.value, e.low, e.high] for name, e in ratios.items()},
        "recorded_fraction": median(row["watched"]["recorded_fraction"] for row in rows),
        "was_looked_into": all(row["watched"]["looked"] for row in rows),
        "rows": rows,
    }


def one_job(device: str, steps: int, *, is_watched: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if k != "FLATOUT_WATCH"}
        if is_watched:
            path = os.pathsep.join(filter(None, (str(STARTUP), environment.get("PYTHONPATH"))))
            environment |= {"FLATOUT_WATCH": "1", "FLATOUT_STORE": folder, "PYTHONPATH": path}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = perf_counter()
        command = [sys.executable, __file__, "--device", device, "--train", str(steps)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        wall_s = perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        row = {
            "wall_s": wall_s,
            "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "weights": float(done.stdout),
        }
        if is_watched:
            (job,) = open_store(Path(folder)).read().jobs
            row |= {"recorded_fraction": job.observing_s / job.seconds, "looked": float(not job.not_looked)}
        return row


# -- the fixed part -----------------------------------------------------------------------------------------------------------


def looks(device: str, pairs: int) -> dict[str, object]:
    """What one look adds to a training beside what it says of itself, and what the hook of a step takes."""
    from flatout.app.fleet.identity import JobPlace, job_here
    from flatout.app.fleet.look import JobLook, import_all
    from flatout.blocks.recording.job_store.policy import FleetPolicy

    began = perf_counter()
    import_all()
    imports_s = perf_counter() - began
    record = job_here(os.environ, JobPlace(), FleetPolicy(), began_s=0.0, version="")
    training = Training(device)
    training.steps(20)
    step_s = training.steps(100) / 100
    number = max(100, round(12.0 / step_s))  # longer than a look
    differences, own, before_after = [], [], []
    for i in range(pairs):
        times = {}
        for side in ("plain", "looked") if i % 2 == 0 else ("looked", "plain"):
            if side == "looked":
                found: list[JobLook] = []
                look = JobLook(JobPlace(), record, found.append)
                began = perf_counter()
                refused = look.start(training.optimizer)
                assert not refused, refused
                started_s = perf_counter() - began
                times[side] = started_s + training.steps(number)
                assert found, "the look has not ended"
                own.append(started_s + found[0].spent_s)
            else:
                times[side] = training.steps(number)
        differences.append(times["looked"] - times["plain"])
        before_after.append(training.steps(100) / 100)
    added = median_estimate(differences)
    return {
        "step_s": step_s,
        "steps_a_side": number,
        "pairs": pairs,
        "imports_s": imports_s,
        "look_adds_s": [added.value, added.low, added.high],
        "look_says_s": median(own),
        "step_after_looks_s": median(before_after),
        "hook_s": hook_s(),
    }


def hook_s(times: int = 200_000) -> float:
    """Seconds that the watcher's hook takes of a step: of an optimizer that does nothing, with and without it."""
    from flatout.app.fleet.identity import JobPlace
    from flatout.app.fleet.watcher import JobWatcher
    from flatout.blocks.recording.job_store.policy import FleetPolicy, Watching

    class Nothing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            pass

    optimizer = Nothing([torch.zeros(1, requires_grad=True)], lr=0.1)

    def seconds() -> float:
        began = perf_counter()
        for _ in range(times):
            optimizer.step()
        return (perf_counter() - began) / times

    plain = median(seconds() for _ in range(5))
    with tempfile.TemporaryDirectory() as folder:
        policy = FleetPolicy(watch=Watching(looks=False, heartbeat_s=3600.0))
        watcher = JobWatcher(open_store(Path(folder)), policy, JobPlace(), optimizer)
        watcher.start(0.0)
        watched = median(seconds() for _ in range(5))
        watcher.end("finished", "")
    return watched - plain


if __name__ == "__main__":
    sys.exit(main())
