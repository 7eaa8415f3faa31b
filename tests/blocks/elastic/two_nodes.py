"""Two nodes of two ranks on this machine, each with an agent of its own, whose parts are killed while they train.

A node whose processes have all ended is started again, as a cluster's scheduler would do. Nothing but /proc tells who is who.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, NamedTuple

TRAIN = Path(__file__).with_name("train.py")
TORCHRUN, FORKED = "torch.distributed.run", "flatout.blocks.elastic.torchrun"
What = Literal["rank", "agent", "node", "coordinator", "node with its memory"]
RANKS = 4


class Recovery(NamedTuple):
    """Seconds from a kill to a step of all ranks, and the most steps that a rank did again."""

    seconds: float
    steps_lost: int


class NotRecovered(Exception):
    """The job did not come back, or ended."""


class TwoNodes:
    """A training of two nodes under a launcher, in a folder of its own. To be used in a `with`."""

    def __init__(
        self, folder: Path, *, steps: int, module: str = FORKED, options: Sequence[str] = (), pace_s: float = 0.01
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self._module = folder, module
        self._port = _free_port()
        for node in range(2):
            (folder / f"memory-{node}").mkdir()
        given: dict[str, Any] = {"disk_every": 10_000, "pace_s": pace_s, "memory": f"{folder}/memory-{{node}}"}
        self._words = [
            *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"localhost:{self._port}", "--rdzv-id", folder.name, "--local-addr", "localhost"),
            *("--max-restarts", "1000", "--monitor-interval", "0.1", *options),
            *(str(TRAIN), str(folder), f"{steps}", "[]", json.dumps(given)),
        ]
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> TwoNodes:
        for node in range(2):
            self._start(node)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.nodes.values():
            if process.poll() is None:
                for pid in (process.pid, *tree(process.pid)):  # what starts others again goes first
                    _kill(pid)
                process.wait()

    def _start(self, node: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "FLATOUT_NODE": f"{self.folder} {node}", "NODE": f"{node}"}
        with (self.folder / f"output-{node}").open("ab") as output:
            self.nodes[node] = subprocess.Popen(
                [sys.executable, "-m", self._module, *self._words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    # -- what is going on ----------------------------------------------------------------------------------------------------

    def log(self, rank: int) -> list[tuple[int, float, str]]:
        """Each step of a rank, the time when it was done, and its loss."""
        path = self.folder / f"log-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), float(at_s), loss) for _, step, at_s, loss in map(str.split, lines)]

    def begins(self, rank: int) -> list[float]:
        """When processes of a rank began."""
        path = self.folder / f"begun-{rank}"
        return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def keep_going(self) -> bool:
        """Start nodes again that have ended with an error. Whether any is left to wait for."""
        codes = {node: process.poll() for node, process in self.nodes.items()}
        for node, code in codes.items():
            if code:
                self._start(node)
        return any(code != 0 for code in codes.values())

    def finish(self, patience_s: float = 300.0) -> None:
        """Wait until both nodes have ended in order."""
        deadline_s = monotonic() + patience_s
        while self.keep_going():
            if monotonic() > deadline_s:
                raise NotRecovered(self.output())
            sleep(0.05)

    def output(self) -> str:
        """The last of what the nodes printed."""
        return "\n".join((self.folder / f"output-{node}").read_text()[-3000:] for node in range(2))

    def losses(self) -> list[set[tuple[int, str]]]:
        """Each rank's steps and losses."""
        return [{(step, loss) for step, _, loss in self.log(rank)} for rank in range(RANKS)]

    # -- what is done to it --------------------------------------------------------------------------------------------------

    def kill(self, what: What, chance: random.Random) -> None:
        """Kill that part of it, a random one where there are several."""
        agents = {node: self._agent(node) for node in self.nodes}
        leader = next(node for node, pid in agents.items() if _listens(pid, self._port))
        match what:
            case "rank":
                pids = [pid for node, agent in agents.items() for pid in self._ranks(node, agent)]
                _kill(chance.choice(pids))
            case "agent":
                _kill(agents[1 - leader])
            case "coordinator":
                _kill(agents[leader])
            case "node" | "node with its memory":
                root = self.nodes[1 - leader].pid
                for pid in (root, *tree(root)):
                    _kill(pid)
                if what != "node":
                    for path in (self.folder / f"memory-{1 - leader}").rglob("*-of-*"):
                        path.unlink()

    def _agent(self, node: int) -> int:
        """The process that has started the ranks, or had them forked: the launcher, or its child that has no children."""
        root = self.nodes[node].pid
        below = children_of(root)
        forks = [pid for pid in below if not children_of(pid)]
        return forks[0] if self._module == FORKED and len(below) > 1 and forks else root

    def _ranks(self, node: int, agent: int) -> list[int]:
        return [pid for pid in tree(self.nodes[node].pid) if pid != agent and not children_of(pid)]

    def killed(self, what: What, chance: random.Random, patience_s: float = 240.0) -> Recovery:
        """Kill that part once all ranks train, and wait until they do again. Raises NotRecovered."""
        self._await_steps(since_s=monotonic(), more=3, patience_s=patience_s)
        sleep(chance.uniform(0.0, 0.3))
        at_s = monotonic()
        self.kill(what, chance)
        firsts = self._await_starts(at_s, patience_s)
        lost = 0
        for rank, (step, _) in enumerate(firsts):
            began_s = max(self.begins(rank))
            lost = max(lost, *(done - step + 1 for done, done_s, _ in self.log(rank) if done_s < began_s))
        return Recovery(max(done_s for _, done_s in firsts) - at_s, lost)

    def _await_steps(self, *, since_s: float, more: int, patience_s: float) -> None:
        """Wait until each rank has done so many steps after that time."""
        deadline_s = monotonic() + patience_s
        while any(sum(at_s > since_s for _, at_s, _ in self.log(rank)) < more for rank in range(RANKS)):
            self._wait(deadline_s)

    def _await_starts(self, after_s: float, patience_s: float) -> list[tuple[int, float]]:
        """The first step of each rank's newest process that began after that time, and when it was done."""
        deadline_s = monotonic() + patience_s
        while True:
            found = []
            for rank in range(RANKS):
                began_s = max((b for b in self.begins(rank) if b > after_s), default=None)
                if began_s is not None:
                    found += [(step, at_s) for step, at_s, _ in self.log(rank) if at_s > began_s][:1]
            if len(found) == RANKS and len({step for step, _ in found}) == 1:
                return found
            self._wait(deadline_s)

    def _wait(self, deadline_s: float) -> None:
        if not self.keep_going() or monotonic() > deadline_s:
            raise NotRecovered(self.output())
        sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Processes that this one has started and that are there."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def tree(pid: int) -> list[int]:
    """Processes below this one."""
    below = children_of(pid)
    return below + [further for child in below for further in tree(child)]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _listens(pid: int, port: int) -> bool:
    """Whether a process has the socket that listens on that port."""
    return any(address.endswith(f":{port}") for address in addresses_listened_at([pid]))


def addresses_listened_at(pids: Sequence[int]) -> list[str]:
    """Addresses with ports at which sockets of these processes listen; of IPv6 those that IPv4 reaches, too, and :: (proc(5))."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, _, port = fields[1].rpartition(":")
                last = bytes.fromhex(address)[-4:][::-1]
                is_any = len(address) > 8 and set(address) == {"0"}
                shown = "::" if is_any else ".".join(map(str, last))
                found[f"socket:[{fields[9]}]"] = f"{shown}:{int(port, 16)}"
    listened = []
    for pid in pids:
        with suppress(OSError):
            for one in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    listened += [found[name] for name in [os.readlink(one)] if name in found]
    return listened


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
