"""A loader has too few worker processes, or too many.

Costs        Too few: the step waits while one process prepares what several could. Too many: on a CPU they take the cores that
             the model computes on; everywhere they cost memory and time to start.
Evidence     The wait for the loader; items that cannot be prepared once (they differ each time, or do not fit the memory).
             Trial: the loader run with one, two and more workers, up to the number of cores, with the model's work between the
             batches.
Levers       communication.loader-workers
False alarm  Another number that is hardly faster: what the trial does not show is not said. Where items can be prepared once,
             that gains more, and input.slow-loader says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeWorkers
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import result_of
from flatout.machine.cost.feeding import constructed_at, fetch_trial, fits_memory, loader_kind, main_loader, waiting_s

_MOST = 8
_NOISE = 0.1
"""Share by which two timings of one model differ without anything beside it."""
_WORTH_A_TRIAL = 0.1


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding when another number of workers makes the step shorter."""
    trial = _trial(evidence)
    result = result_of(evidence, trial)
    if trial is None or result is None or result.cured_s is None or result.now_s is None:
        return
    loader = evidence.loaders[trial.loader]
    now, best, wait_s = loader.num_workers, int(result.variant), waiting_s(evidence)
    # Both times hold the model's own work; what is above it is the wait that is left.
    left_s = max(0.0, result.cured_s - result.now_s)
    gained = result.parts[str(now)] - result.cured_s if now else wait_s - left_s
    # What another number can save is the wait for batches, and what workers take from the model: what it runs longer beside them.
    phases = evidence.steps.phases
    beside_s = sum(phases.get(name, 0.0) for name in ("forward", "backward"))
    if trial.model >= 0:
        taken_s = beside_s - result.now_s
        gained = min(gained, wait_s + (taken_s if taken_s > _NOISE * result.now_s else 0.0))
    gained = min(gained, evidence.steps.step_s * 0.95)
    is_slower = bool(now) and result.cured_s > evidence.steps.step_s
    is_enough = best > now > 0 and loader_kind(evidence, trial.loader) == "quick"
    if best == now or gained <= 0 or is_enough or is_slower:
        return
    too, where = "many" if best < now else "few", constructed_at(evidence, loader)
    yield Finding(
        where=where,
        cost_s=max(wait_s, gained),
        saved_s=(0.7 * gained, gained),
        because=f"{now} worker process(es) are too {too} here: each step waits {wait_s * 1e3:.2f} ms for its batch; tried on "
        f"this machine, batch and model take "
        + ", ".join(f"{result.parts[str(c)] * 1e3:.1f} ms with {c}" for c in trial.counts)
        + f", and the model alone {result.now_s * 1e3:.1f} ms",
        edit=f"DataLoader(..., num_workers={best}{', persistent_workers=True' if best else ''}){_among_keywords(where)}",
        also=evidence.sources_of((loader.source,)),
        phases=("data",),
        basis="trial",
    )


def _among_keywords(where: Source | None) -> str:
    """A hint for a line that unpacks its keyword arguments: a second number of workers there is an error."""
    return ", among the keyword arguments that this line unpacks" if where is not None and "**" in where.text else ""


def _trial(evidence: Evidence) -> TimeWorkers | None:
    """The sweep; None where the loader is not waited for and harms nobody, or another cure is known to be the better one."""
    index = _loader(evidence)
    if index is None:
        return None
    loader, cores = evidence.loaders[index], evidence.workload.num_cores
    result = fetch_trial(evidence, index)
    if loader.num_workers == 0:
        # Wait for what the items are: rows of tensors, and items that can be prepared once, are better cured otherwise.
        is_repeatable = result is not None and result.facts.get("repeatable") and fits_memory(evidence, result)
        if result is None or is_repeatable or loader_kind(evidence, index) == "rows":
            return None
    wanted = {1, 2, 4, 8, cores - 1, cores, loader.num_workers}
    counts = tuple(sorted(c for c in wanted if 1 <= c <= max(min(cores, _MOST), loader.num_workers)))
    if loader.num_workers == 0 and cores < 2:
        return None
    models = [i for i, m in enumerate(evidence.models) if m.num_graphs_used or evidence.steps.kind == "inference"]
    model = max(models, key=lambda i: evidence.models[i].call_s * evidence.models[i].calls, default=-1)
    is_slept = model < 0 or evidence.steps.device_s is not None  # the model's own work is not run beside the loader
    return TimeWorkers(
        loader=index,
        counts=counts,
        model=model,
        backward=evidence.steps.kind != "inference",
        work_s=round(max(0.0, evidence.steps.step_s - waiting_s(evidence)), 4) if is_slept else 0.0,
    )


def _loader(evidence: Evidence) -> int | None:
    """A loader that is waited for, or whose workers may starve the model's threads."""
    index = main_loader(evidence)
    if index is not None and evidence.loaders[index].is_map_style:
        is_long = waiting_s(evidence) >= _WORTH_A_TRIAL * evidence.steps.step_s
        return index if is_long or evidence.loaders[index].num_workers else None
    if evidence.steps.device_s is not None:
        return None
    greedy = [i for i, u in enumerate(evidence.loaders) if u.num_workers > 1 and u.is_map_style and u.fetches >= 0.5]
    spare = evidence.workload.num_cores - evidence.workload.num_threads
    over = [i for i in greedy if evidence.loaders[i].num_workers > spare]
    return max(over, key=lambda i: evidence.loaders[i].num_workers, default=None)


RULE = rule(__name__, check, trial=_trial, title="Too few or too many loader workers")
