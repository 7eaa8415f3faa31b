"""Worker processes start anew at every epoch.

Costs        Starting the processes, importing and copying the data set into each, filling the pipeline, and ending them: at every
             pass over the data.
Evidence     A loader with workers and without `persistent_workers` is iterated over again, itself or made anew at the same line
             with as many workers; the wait for the first batch of an epoch, making and ending the iterator included, beside the
             wait for the others.
Levers       communication.persistent-workers, communication.loader-workers
False alarm  Another loader over the same data set, for an evaluation. One long epoch, or epochs so long that a start is nothing
             beside them.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Loader
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeDataset
from flatout.machine.cost.feeding import constructed_at, fetch_trial

_WORTH_A_TRIAL = 0.03


def propose(evidence: Evidence) -> Iterator[TimeDataset]:
    """Fetch a batch by hand: an epoch's first batch takes as long however its workers live."""
    for index, loader in enumerate(evidence.loaders):
        if loader.is_map_style and _restart_s(loader) > _WORTH_A_TRIAL * evidence.steps.whole_s:
            yield TimeDataset(loader=index)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per loader that starts its workers over and over."""
    for index, loader in enumerate(evidence.loaders):
        restart_s = _restart_s(loader)
        if restart_s <= 0:
            continue
        result = fetch_trial(evidence, index)
        first_s = max(loader.wait_s, result.now_s or 0.0) if result is not None else loader.wait_s
        gained = min(max(0.0, loader.first_wait_s - first_s) * loader.num_epochs, 0.95 * evidence.steps.whole_s)
        yield Finding(
            where=constructed_at(evidence, loader),
            cost_s=min(restart_s, evidence.steps.whole_s),
            saved_s=(0.85 * gained, gained),
            because=f"{loader.num_workers} worker process(es) start anew every {1 / loader.num_epochs:.0f} steps; the first "
            f"batch then takes {loader.first_wait_s * 1e3:.0f} ms, starting and ending them included, another one "
            f"{loader.wait_s * 1e3:.1f} ms",
            edit="DataLoader(..., persistent_workers=True), made once and not anew in each epoch",
            also=evidence.sources_of((loader.source,)),
            basis="trial",
        )


def _restart_s(loader: Loader) -> float:
    """What starting over adds to a step on average."""
    if not loader.num_workers or loader.persistent_workers:
        return 0.0
    return max(0.0, loader.first_wait_s - loader.wait_s) * loader.num_epochs


RULE = rule(__name__, check, propose=propose, title="Loader workers start anew in each epoch")
