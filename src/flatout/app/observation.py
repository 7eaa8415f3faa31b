"""The request to observe a script in a process of its own, and the command that follows it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.app.targets import ScriptTarget
from flatout.core.runtime.cache_folder import default_cache_folder
from flatout.core.secrets import redacted_arguments

if TYPE_CHECKING:
    from flatout.app.session import Observation
    from flatout.core.records.hardware import Machine


def observation_of(
    target: ScriptTarget,
    *,
    observe_s: float,
    stop: bool,
    effort: float = 1.0,
    has_trials: bool = True,
    is_for_search: bool = False,
) -> Observation:
    """The request to observe a script in a process of its own; `write_request` adds where its Evidence goes."""
    from flatout.app.session import Observation

    return Observation(
        target=target.name,
        kind=target.kind,
        arguments=target.arguments,
        command=redacted_arguments(("python", *(("-m",) if target.is_module else ()), target.name, *target.arguments)),
        evidence_path="",
        machine_path=str(default_cache_folder()),
        observe_s=observe_s,
        effort=effort,
        has_trials=has_trials,
        is_for_search=is_for_search,
        stop=stop,
    )


def write_request(observation: Observation, request: Path, *, evidence_path: Path, world_size: int = 1) -> list[str]:
    """Write the request; the command that follows it."""
    import msgspec

    from flatout.core.files import write_whole_file
    from flatout.core.records.record import to_json

    full = msgspec.structs.replace(observation, evidence_path=str(evidence_path), world_size=world_size)
    write_whole_file(request, to_json(full))
    return [sys.executable, "-m", "flatout.app.cli.children.observe", str(request)]


def measured_machine(folder: Path) -> Machine:
    """The machine as it was measured before and saved in `folder`, or is measured in two seconds now.

    One that was measured while others used the cores is measured again; where they still do, the faster figures count.
    """
    from flatout.machine.measure import cache, probe

    machine = cache.read_or_measure(folder, probe.identify(), probe.quick_probe).machine
    if cache.is_disturbed(machine):
        again = probe.quick_probe()
        machine = cache.faster_of(machine, again) if cache.is_disturbed(again) else again
        cache.write_machine(folder, machine)
    return machine
