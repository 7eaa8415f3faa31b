"""The step waits for its data.

Costs        The whole wait: while a sample is prepared in the main process, nothing else runs.
Evidence     Time in `next()` of the DataLoader in every step, and the function of the data set or collation it is spent in.
             Trial: a batch fetched item by item against the same batch indexed in ready tensors; are items repeatable?
Levers       communication.prepare-in-memory, communication.loader-workers, graph.hoist-constant, graph.compile-loop
False alarm  A first batch that starts workers; a wait shorter than the noise. Rows of tensors in memory, random augmentation and
             files decoded again are told by input.collate-in-ram, input.python-augmentation and input.decoded-every-epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.feeding import fetched, fits_memory, gained_s, hot_line, kind_of, main_loader, waiting_s
from flatout.records.evidence import Evidence, Loader
from flatout.records.finding import Basis, Finding, Rule
from flatout.records.trial import TimeDataset


def propose(evidence: Evidence) -> Iterator[TimeDataset]:
    """Fetch a batch by hand when the step waits for its data."""
    loader = main_loader(evidence)
    if loader is not None and evidence.loaders[loader].is_map_style:
        yield TimeDataset(loader=loader)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that is waited for longest."""
    index = main_loader(evidence)
    if index is None or kind_of(evidence, index) != "other":
        return
    loader = evidence.loaders[index]
    wait_s = waiting_s(evidence)
    result = fetched(evidence, index)
    saved_s, edit = (0.5 * wait_s, 0.9 * wait_s), _edit_workers(loader, evidence)
    basis: Basis = "estimate"
    if result is not None and result.facts.get("repeatable") and fits_memory(evidence, result):
        gained = gained_s(evidence, index, result)
        saved_s, basis = (0.95 * gained, gained), "trial"
        edit = (
            "the items come out the same each time: prepare them once as tensors and index a whole batch at a time; or "
            + edit
        )
    where, share, also = hot_line(evidence, loader)
    place = "in the main process" if loader.num_workers == 0 else f"for {loader.num_workers} worker processes"
    yield Finding(
        rule=RULE.id,
        regime="input",
        where=where,
        cost_s=wait_s,
        saved_s=saved_s,
        because=f"each step waits {wait_s * 1e3:.2f} ms {place} for a batch of {loader.dataset}"
        + (f"; {share:.0%} of the time in the data pipeline is in this function" if share else ""),
        edit=edit,
        also=also,
        levers=RULE.levers,
        phases=("data",),
        basis=basis,
    )


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
    levers=(
        "communication.prepare-in-memory",
        "communication.loader-workers",
        "graph.hoist-constant",
        "graph.compile-loop",
    ),
)
