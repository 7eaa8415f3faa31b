"""One compute thread on each physical core, all in the memory of one socket where the work fits there.

What        Before the script begins the process is bound to the processors named by `cpus` (one of each core's hyper-threads),
            and torch takes as many threads.
Guarantee   BOUNDED: reductions are split among another number of threads.
Refuses     Devices other than the CPU; machines without hyper-threads and with one node of memory; evidence of another machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from flatout.core.errors import LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string

_SYSTEM: Final = Path("/sys/devices/system")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose all physical cores, and those of one node."""
    if evidence.workload.device != "cpu" or not hasattr(os, "sched_getaffinity"):
        raise LeverRefused(f"the work is done by {evidence.workload.device}, or threads cannot be bound here")
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) != evidence.workload.num_cores:
        raise LeverRefused(f"the run had {evidence.workload.num_cores} processors, this process has {len(usable)}")
    wanted = core_sets(usable, _SYSTEM)
    if not wanted:
        raise LeverRefused(f"the {len(usable)} processors are cores of their own on one node of memory")
    for cpus, because in wanted:
        yield Candidate(
            parameters={"cpus": ",".join(map(str, cpus))},
            saved_s=(0.0, 0.3 * evidence.steps.step_s),
            because=because,
        )


def core_sets(usable: Sequence[int], system: Path) -> list[tuple[tuple[int, ...], str]]:
    """Sets of processors worth trying other than all that are usable, and why, from the kernel's description of the machine."""
    cores: dict[str, int] = {}
    for cpu in usable:
        cores.setdefault(_read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu), cpu)
    physical = tuple(sorted(cores.values()))
    nodes: dict[str, list[int]] = {}
    for folder in sorted(system.glob("node/node[0-9]*")):
        for cpu in physical:
            if (folder / f"cpu{cpu}").exists():
                nodes.setdefault(folder.name, []).append(cpu)
    found = []
    if len(physical) < len(usable):
        found.append((physical, f"{len(usable)} processors are {len(physical)} cores with hyper-threads"))
    if len(nodes) > 1:
        name = max(nodes, key=lambda node: len(nodes[node]))
        largest = tuple(nodes[name])
        found.append((largest, f"the cores belong to {len(nodes)} nodes of memory, {len(largest)} to the largest"))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Bind the process to the cores, and set the number of threads, until the end."""
    import torch

    text = string(parameters, "cpus")
    try:
        cpus = {int(part) for part in text.split(",")}
    except ValueError as e:
        raise PlanError(f"parameter 'cpus' is '{text}' and must be numbers of processors, as in '0,2,4'") from e

    def start() -> Callable[[], None]:
        before, num_before, set_threads = os.sched_getaffinity(0), torch.get_num_threads(), torch.set_num_threads
        if not cpus <= before:
            raise PlanError(
                f"parameter 'cpus' is '{text}', and this process may use {sorted(before)}; make the plan anew here"
            )
        os.sched_setaffinity(0, cpus)
        set_threads(len(cpus))
        hooks.replace(torch, "set_num_threads", lambda _: None)
        hooks.note(LEVER.id)

        def undo() -> None:
            os.sched_setaffinity(0, before)
            set_threads(num_before)

        return undo

    hooks.at_start(start)


LEVER = lever(
    __name__, propose, apply=apply, conflicts=("parallelism.thread-count",), title="One thread on each physical core"
)
