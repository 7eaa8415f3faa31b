"""The step waits for its data.

Costs        The whole wait: while a sample is prepared in the main process, nothing else runs.
Evidence     Time in `next()` of the DataLoader in every step, and the line of the data set or collate function it is spent on.
             Trial: a batch fetched item by item against the same batch indexed in ready tensors; are items repeatable?
Levers       communication.prepare-in-memory, communication.loader-workers
False alarm  A first batch that starts workers; a wait shorter than the noise.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import result_of
from flatout.records.evidence import Evidence, Loader
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeDataset
from flatout.records.workload import Source

_SUSPICIOUS_FRACTION = 0.05


def propose(evidence: Evidence) -> Iterator[TimeDataset]:
    """Fetch a batch by hand when the step waits for its data."""
    loader = _main_loader(evidence)
    if loader is not None and evidence.loaders[loader].is_map_style:
        yield TimeDataset(loader=loader)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that is waited for longest."""
    index = _main_loader(evidence)
    if index is None:
        return
    loader = evidence.loaders[index]
    wait_s = evidence.steps.phases.get("data", 0.0)
    result = result_of(evidence, TimeDataset(loader=index))
    saved_s, measured, edit = (0.5 * wait_s, 0.9 * wait_s), False, _edit_workers(loader, evidence)
    if result is not None and result.cured_s is not None and loader.num_workers == 0:
        from_memory_s = result.cured_s * loader.fetches
        if result.facts.get("repeatable"):
            gained = max(0.0, wait_s - from_memory_s)
            saved_s, measured = (0.85 * gained, gained), True
            edit = (
                "the items come out the same each time: prepare them once as tensors and index a whole batch at a time; or "
                + _edit_workers(loader, evidence)
            )
    where, share = _hot_line(evidence, loader)
    place = "in the main process" if loader.num_workers == 0 else f"for {loader.num_workers} worker processes"
    yield Finding(
        rule=RULE.id,
        regime="input",
        where=where,
        cost_s=wait_s,
        saved_s=saved_s,
        because=f"each step waits {wait_s * 1e3:.2f} ms {place} for a batch of {loader.dataset}"
        + (f"; {share:.0%} of the time in the data pipeline is on this line" if share else ""),
        edit=edit,
        levers=RULE.levers,
        phases=("data",),
        measured=measured,
    )


def _main_loader(evidence: Evidence) -> int | None:
    """Index of the loader that feeds the steps, if they wait for it."""
    wait_s = evidence.steps.phases.get("data", 0.0)
    if not evidence.loaders or wait_s < _SUSPICIOUS_FRACTION * evidence.steps.step_s:
        return None
    return max(range(len(evidence.loaders)), key=lambda i: evidence.loaders[i].wait_s * evidence.loaders[i].fetches)


def _hot_line(evidence: Evidence, loader: Loader) -> tuple[Source | None, float]:
    """The user's line in the data pipeline that took most of the sampled time, and its share of it.

    In the main process the loader's own line stands for torch's share (collation, fetching); in a worker for waiting for work.
    """
    process = "worker" if loader.num_workers else "main"
    rows = [r for r in evidence.lines if r.phase == "data" and r.process == process]
    inside = [r for r in rows if r.source >= 0 and r.source != loader.source]
    total_s = sum(r.seconds for r in (inside if process == "worker" else rows))
    if not rows and process == "main":
        return _line_by_operators(evidence, loader), 0.0
    if not inside or sum(r.seconds for r in inside) < 0.3 * total_s:
        return evidence.source_of(loader.source), 0.0
    best = max(inside, key=lambda r: r.seconds)
    return evidence.source_of(best.source), best.seconds / total_s


def _line_by_operators(evidence: Evidence, loader: Loader) -> Source | None:
    """The line whose operators, and the Python before them, took most of the data phase: for when no sample fell there."""
    seconds: dict[int, float] = {}
    for operator in evidence.operators:
        if operator.phase == "data":
            seconds[operator.source] = seconds.get(operator.source, 0.0) + operator.total_s
    best = max(seconds, key=lambda source: seconds[source], default=-1)
    return evidence.source_of(best) or evidence.source_of(loader.source)


def _edit_workers(loader: Loader, evidence: Evidence) -> str:
    if loader.num_workers == 0:
        return f"overlap it: DataLoader(..., num_workers={max(1, evidence.workload.num_cores - 1)}, persistent_workers=True)"
    return "make the items cheaper (vectorise, cache), then try more workers"


RULE = Rule(
    id="input.slow-loader",
    title="The step waits for its data",
    module=__name__,
    check=check,
    propose=propose,
    levers=("communication.prepare-in-memory", "communication.loader-workers"),
)
