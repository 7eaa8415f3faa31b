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

from flatout.cost.accounting import around, kept_fraction, main_model, model_seconds, result_of, setting_of
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule
from flatout.records.trial import TimeModel
from flatout.records.workload import Source

_SPREAD = 0.2
_WORTH_TELLING = 0.9


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the module with as many threads as it may use cores."""
    trial = _trial_of(evidence)
    if trial is not None:
        yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the process."""
    trial = _trial_of(evidence)
    result = result_of(evidence, trial) if trial is not None else None
    if trial is None or result is None or _is_chosen_outside(evidence):
        return
    kept = kept_fraction(result)
    cost_s = max(0.0, model_seconds(evidence) * (1 - kept))
    threads = evidence.workload.num_threads
    yield Finding(
        rule=RULE.id,
        regime="compute",
        where=_where(evidence),
        cost_s=cost_s,
        saved_s=around(cost_s, _SPREAD),
        because=f"torch runs with {threads} thread(s) and may use {trial.factor} core(s); with {trial.factor} threads "
        "forward and "
        f"backward take {kept:.0%} (tried)",
        edit=f"torch.set_num_threads({trial.factor}), or OMP_NUM_THREADS={trial.factor} in the environment",
        levers=RULE.levers,
        basis="trial",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for idle cores that the environment asked for, and for a loader with far more workers than cores."""
    cores = _cores(evidence)
    trial = _trial_of(evidence)
    result = result_of(evidence, trial) if trial is not None else None
    if result is not None and _is_chosen_outside(evidence) and kept_fraction(result) < _WORTH_TELLING:
        yield Note(
            rule=RULE.id,
            where=None,
            text=f"the environment gives torch {evidence.workload.num_threads} thread(s) of {cores} core(s); with "
            f"{cores} threads "
            f"forward and backward take {kept_fraction(result):.0%} (tried)",
        )
    for loader in evidence.loaders:
        if loader.num_workers > 2 * cores:
            yield Note(
                rule=RULE.id,
                where=evidence.source_of(loader.source),
                text=f"{loader.num_workers} loader workers and {evidence.workload.num_threads} compute thread(s) share "
                f"{cores} core(s)",
            )


def _cores(evidence: Evidence) -> int:
    """Cores that this process may keep busy."""
    cores: float = evidence.workload.num_cores
    quota = setting_of(evidence, "cpu_quota")
    if quota:
        cores = min(cores, float(quota))
    sharing = setting_of(evidence, "LOCAL_WORLD_SIZE")
    return max(1, int(cores / max(1, int(sharing) if sharing.isdigit() else 1)))


def _is_chosen_outside(evidence: Evidence) -> bool:
    """Whether the environment, and not the script, asks for fewer threads than cores: somebody's decision about the machine."""
    by_script = any(s.name == "num_threads" and s.source is not None for s in evidence.workload.settings)
    by_environment = any(setting_of(evidence, name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    return by_environment and not by_script and evidence.workload.num_threads < _cores(evidence)


def _trial_of(evidence: Evidence) -> TimeModel | None:
    cores, threads, model = _cores(evidence), evidence.workload.num_threads, main_model(evidence)
    if model is None or threads == cores or evidence.workload.device != "cpu":
        return None
    backward = evidence.models[model].num_graphs_used > 0
    return TimeModel(model=model, variant="threads", backward=backward, factor=cores)


def _where(evidence: Evidence) -> Source | None:
    """The line that set the number, else the call of the module."""
    for setting in evidence.workload.settings:
        if setting.name == "num_threads" and setting.source is not None:
            return setting.source
    model = main_model(evidence)
    return evidence.source_of(evidence.models[model].source) if model is not None else None


RULE = Rule(
    id="run.thread-count",
    title="Threads that do not fit the cores",
    module=__name__,
    check=check,
    propose=propose,
    note=note,
    levers=("parallelism.thread-count",),
)
