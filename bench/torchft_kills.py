"""Seconds from a kill until all replicas train again under torchft, and until any does, beside bench/torchrun_kills.py.

    python bench/torchft_kills.py [--kills 10] [--out FILE]

Needs torchft 0.2. Four replicas of one rank on this machine, two on a node, each under a torchrun of its own, with gloo; and
their lighthouse, which coordinates them. What has ended is started again at once."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.blocks.elastic.two_nodes import tree

from flatout.core.files import write_whole_file

TRAIN: Final = Path(__file__).with_name("torchft_train.py")
REPLICAS: Final = 4
PATIENCE_S: Final = 120.0


class Job:
    """A lighthouse and its replicas."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as one:
            self._port = int(one.getsockname()[1])
        self.parts: dict[str, subprocess.Popen[bytes]] = {}

    def keep_going(self) -> None:
        """Start what is not there."""
        for name in ("lighthouse", *(f"{n}" for n in range(REPLICAS))):
            if name in self.parts and self.parts[name].poll() is None:
                continue
            if name == "lighthouse":
                words = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas", "1"]
                words += ["--bind", f"[::]:{self._port}", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
            else:
                words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
                words += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
                words += [str(TRAIN), str(self.folder), name, "0.02"]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": f"http://localhost:{self._port}"}
            with (self.folder / f"output-{name}").open("ab") as output:
                self.parts[name] = subprocess.Popen(words, env=environment, stdout=output, stderr=output)

    def steps(self, replica: int) -> list[tuple[int, float, int]]:
        """Steps of a replica, when they were done, and by how many."""
        path = self.folder / f"log-{replica}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), float(at_s), int(number)) for step, at_s, number, _ in map(str.split, lines)]

    def wait(self, after_s: float, *, number: int) -> float:
        """When the first step after that time was done by so many; by all replicas where these are all."""
        deadline_s = monotonic() + PATIENCE_S
        while monotonic() < deadline_s:
            self.keep_going()
            found = [
                next((at_s for _, at_s, n in self.steps(replica) if at_s > after_s and n >= number), None)
                for replica in range(REPLICAS)
            ]
            times = [at_s for at_s in found if at_s is not None]
            if len(times) >= number:
                return sorted(times)[number - 1]
            sleep(0.02)
        raise TimeoutError(f"no step of {number} within {PATIENCE_S:.0f} s")

    def kill(self, what: str, chance: random.Random) -> None:
        """Kill that part; with a torchrun what it has started, which would live on beside what the next one starts."""
        if what == "coordinator":
            self.parts["lighthouse"].kill()
            return
        node = chance.randrange(2)
        for replica in (2 * node, 2 * node + 1)[: 2 if what == "node" else 1]:
            root = self.parts[f"{replica}"]
            ranks = tree(root.pid)
            if what != "rank":
                root.kill()
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all of it."""
        for part in self.parts.values():
            below = tree(part.pid)
            part.kill()
            part.wait()
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Kill parts of a job, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--what", nargs="*", default=("rank", "agent", "node", "coordinator"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    result: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "torchft": version("torchft"),
        "replicas": REPLICAS,
    }
    with tempfile.TemporaryDirectory() as temporary:
        job = Job(Path(temporary))
        try:
            for what in asked.what:
                every, any_of_them, failed = [], [], 0
                for _ in range(asked.kills):
                    job.wait(monotonic(), number=REPLICAS)
                    sleep(chance.uniform(0.0, 0.3))
                    at_s = monotonic()
                    job.kill(what, chance)
                    try:
                        # a step that was under way may still be done
                        any_of_them.append(job.wait(at_s + 0.1, number=1) - at_s)
                        every.append(job.wait(at_s + 0.5, number=REPLICAS) - at_s)
                    except TimeoutError:
                        failed += 1
                        break
                result[what] = {
                    "kills": len(every) + failed,
                    "recovered": len(every),
                    "seconds_median": median(every) if every else None,
                    "seconds_range": [min(every), max(every)] if every else None,
                    "survivors_seconds_median": median(any_of_them) if any_of_them else None,
                }
                print(what, result[what], flush=True)
                if failed:
                    break
        finally:
            job.close()
    if asked.out:
        write_whole_file(asked.out, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
