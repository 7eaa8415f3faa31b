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

from flatout.cost.feeding import fetched, gained_s, kind_of, main_loader, waiting_s
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeDataset


def propose(evidence: Evidence) -> Iterator[TimeDataset]:
    """Fetch a batch by hand."""
    index = main_loader(evidence)
    if index is not None and evidence.loaders[index].is_map_style:
        yield TimeDataset(loader=index)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that feeds the steps."""
    index = main_loader(evidence)
    if index is None or kind_of(evidence, index) != "rows":
        return
    loader, result, wait_s = evidence.loaders[index], fetched(evidence, index), waiting_s(evidence)
    if result is None or result.cured_s is None:
        return
    gained = gained_s(evidence, index, result)
    where = evidence.source_of(loader.constructed if loader.constructed >= 0 else loader.source)
    sampler = f"BatchSampler({loader.sampler}(data), {loader.batch_size}, drop_last=...)"
    batched = f"DataLoader(data, sampler={sampler}, batch_size=None)"
    by_hand = f"for rows in torch.randperm(len(data)).split({loader.batch_size}): index the tensors with rows"
    lines = (evidence.source_of(s) for s in (loader.source, loader.getitem))
    yield Finding(
        rule=RULE.id,
        regime="input",
        where=where,
        cost_s=wait_s,
        saved_s=(0.9 * gained, gained),
        because=f"each step waits {wait_s * 1e3:.2f} ms for {loader.batch_size} rows of {loader.dataset} that lie in memory "
        f"already; picked with one indexing they take {result.cured_s * 1e3:.2f} ms (tried)",
        edit=f"index whole batches: {batched if result.facts.get('takes_batches') else by_hand}",
        also=tuple(s for s in lines if s is not None and s != where),
        levers=RULE.levers,
        phases=("data",),
        basis="trial",
    )


RULE = Rule(
    id="input.collate-in-ram",
    title="Rows in memory are collated one by one",
    module=__name__,
    check=check,
    propose=propose,
    levers=("communication.prepare-in-memory",),
)
