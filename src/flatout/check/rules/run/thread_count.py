"""The number of CPU threads does not fit the cores this process may use.

Costs        With fewer threads than cores the rest idles; with more, threads take the cores from one another in the middle of
             every operator.
Evidence     torch's threads beside the cores of the affinity mask, the control group's quota and the processes that share the
             machine. Trial: the module's forward and backward with as many threads as there are cores.
Levers       parallelism.thread-count
False alarm  Operators too small for several threads, other work on the machine: the trial says so. Runs that share the machine
             on purpose, one thread each: fewer threads than cores by OMP_NUM_THREADS are told as a note, with their price.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import (
    around,
    model_seconds,
    model_trial,
    remaining_fraction,
    result_of,
    setting_line,
    setting_of,
)

_SPREAD = 0.2
_WORTH_TELLING = 0.9


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the process."""
    result, cores = result_of(evidence, _trial(evidence)), _cores(evidence)
    if result is None or _is_set_outside(evidence):
        return
    remaining = remaining_fraction(result)
    cost_s = max(0.0, model_seconds(evidence) * (1 - remaining))
    threads = evidence.workload.num_threads
    yield Finding(
        regime="compute",
        where=setting_line(evidence, "num_threads"),
        cost_s=cost_s,
        saved_s=around(cost_s, _SPREAD),
        because=f"torch runs with {threads} thread(s) and may use {cores} core(s); with {cores} threads forward and backward "
        f"take {remaining:.0%} (tried)",
        edit=f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores} in the environment",
        basis="trial",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for idle cores that the environment asked for, and for a loader with far more workers than cores."""
    cores = _cores(evidence)
    result = result_of(evidence, _trial(evidence))
    if result is not None and _is_set_outside(evidence) and remaining_fraction(result) < _WORTH_TELLING:
        yield Note(
            where=None,
            text=f"the environment gives torch {evidence.workload.num_threads} thread(s) of {cores} core(s); with {cores} "
            f"threads forward and backward take {remaining_fraction(result):.0%} (tried)",
        )
    for loader in evidence.loaders:
        if loader.num_workers > 2 * cores:
            yield Note(
                where=evidence.source_of(loader.source),
                text=f"{loader.num_workers} loader workers and {evidence.workload.num_threads} compute thread(s) share "
                f"{cores} core(s)",
            )


def _cores(evidence: Evidence) -> int:
    """Cores that this process may keep busy."""
    cores: float = evidence.workload.num_cores
    quota = setting_of(evidence, "cpu_quota")
    if quota.replace(".", "", 1).isdecimal():
        cores = min(cores, float(quota))
    sharing = setting_of(evidence, "LOCAL_WORLD_SIZE")
    return max(1, int(cores / max(1, int(sharing) if sharing.isdecimal() else 1)))


def _is_set_outside(evidence: Evidence) -> bool:
    """Whether the environment, and not the script, asks for fewer threads than cores: somebody's decision about the machine."""
    by_script = any(s.name == "num_threads" and s.source is not None for s in evidence.workload.settings)
    by_environment = any(setting_of(evidence, name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    return by_environment and not by_script and evidence.workload.num_threads < _cores(evidence)


def _trial(evidence: Evidence) -> TimeModel | None:
    """The module with as many threads as it may use cores."""
    cores = _cores(evidence)
    if evidence.workload.num_threads == cores or evidence.workload.device != "cpu":
        return None
    return model_trial(evidence, "threads", factor=cores)


RULE = rule(__name__, check, trial=_trial, note=note, title="Threads that do not fit the cores")
