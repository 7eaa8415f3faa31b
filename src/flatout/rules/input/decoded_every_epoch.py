"""The same files or texts are read and decoded again in each epoch.

Costs        Reading, decompressing and parsing every item as often as the data are passed over.
Evidence     Sampled time inside the data set lies on lines that read or decode (json, gzip, numpy.load, PIL, csv, open); items
             come out the same each time, all of them fit the memory, and the loader was iterated over again.
             Trial: a batch fetched item by item against the same batch indexed in ready tensors.
Levers       communication.prepare-in-memory
False alarm  A single pass over the data, items that are augmented at random, data that do not fit the memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.feeding import decoded_fraction, fetched, gained_s, hot_line, kind_of, main_loader, waiting_s
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeDataset


def propose(evidence: Evidence) -> Iterator[TimeDataset]:
    """Fetch a batch by hand, some items twice."""
    index = main_loader(evidence)
    if index is not None and evidence.loaders[index].is_map_style:
        yield TimeDataset(loader=index)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that feeds the steps."""
    index = main_loader(evidence)
    if index is None or kind_of(evidence, index) != "decoded":
        return
    loader, result, wait_s = evidence.loaders[index], fetched(evidence, index), waiting_s(evidence)
    if result is None:
        return
    gained = gained_s(evidence, index, result)
    where, _, also = hot_line(evidence, loader)
    total_bytes = result.parts.get("item_bytes", 0.0) * result.parts.get("num_items", 0.0)
    yield Finding(
        rule=RULE.id,
        regime="input",
        where=where,
        cost_s=wait_s,
        saved_s=(0.95 * gained, gained),
        because=f"each step waits {wait_s * 1e3:.2f} ms for a batch of {loader.dataset}; "
        f"{decoded_fraction(evidence, loader):.0%} of the time in it reads or decodes what was decoded in the epoch before; "
        "all of it, decoded, takes "
        f"{total_bytes / 2**20:.1f} MiB",
        edit="decode each item once: prepare all as tensors before the loop (or keep them in a file of tensors that is mapped "
        "into memory), and index a whole batch at a time",
        also=also,
        levers=RULE.levers,
        phases=("data",),
        basis="trial",
    )


RULE = Rule(
    id="input.decoded-every-epoch",
    title="The same data are decoded again in each epoch",
    module=__name__,
    check=check,
    propose=propose,
    levers=("communication.prepare-in-memory",),
)
