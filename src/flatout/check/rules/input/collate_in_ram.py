"""Rows of tensors that lie in memory are picked one by one and put together again.

Costs        A Python call, a view and a tuple for every item, and a copy of the whole batch to stack them; more with workers,
             which send each batch from process to process.
Evidence     A TensorDataset, or items that a trial finds to be views of what the data set holds, under torch's own collation.
             Trial: the batch item by item against one indexing with all its indices.
Levers       communication.prepare-in-memory
False alarm  A wait below the noise of a step: for large models it does not matter how the rows are picked.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeDataset, TimeModel
from flatout.machine.cost.feeding import (
    constructed_at,
    dataset_trials,
    of_pause,
    pause_s,
    slow_loader,
    steady_trial,
    with_pause,
)


def propose(evidence: Evidence) -> Iterator[TimeDataset | TimeModel]:
    """Fetch a batch by hand; and time the model without the pauses in which rows are put together."""
    trials = list(dataset_trials(evidence))
    yield from trials
    steady = steady_trial(evidence) if trials and _is_in_ram(evidence, trials[0]) else None
    if steady is not None:
        yield steady


def _is_in_ram(evidence: Evidence, trial: TimeDataset) -> bool:
    loader = evidence.loaders[trial.loader]
    return loader.is_in_ram and loader.num_workers == 0


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that feeds the steps."""
    slow = slow_loader(evidence, "rows")
    result = slow.result if slow is not None else None
    if slow is None or result is None or result.cured_s is None:
        return
    loader, _, wait_s, gained = slow
    sampler = f"BatchSampler({loader.sampler}(data), {loader.batch_size}, drop_last=...)"
    batched = f"DataLoader(data, sampler={sampler}, batch_size=None)"
    by_hand = f"for rows in torch.randperm(len(data)).split({loader.batch_size}): index the tensors with rows"
    yield Finding(
        where=constructed_at(evidence, loader),
        cost_s=wait_s + pause_s(evidence),
        saved_s=with_pause(evidence, (0.9 * gained, gained)),
        because=f"each step waits {wait_s * 1e3:.2f} ms for {loader.batch_size} rows of {loader.dataset} that lie in memory "
        f"already; picked with one indexing they take {result.cured_s * 1e3:.2f} ms (tried)"
        f"{of_pause(evidence)}",
        edit=f"index whole batches: {batched if result.facts.get('takes_batches') else by_hand}",
        also=evidence.sources_of((loader.source, loader.getitem)),
        phases=("data",),
        basis="trial",
    )


RULE = rule(__name__, check, propose=propose, title="Rows in memory are collated one by one")
