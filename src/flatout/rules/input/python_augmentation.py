"""Random augmentation runs in Python, item by item.

Costs        The interpreter, and many small calls, for every item of every batch; with workers it is hidden only as far as the
             cores go.
Evidence     Asked twice for the same item, the data set gives another one, and sampled time lies on the user's lines inside it.
             Trial: a batch fetched item by item against the same batch indexed in ready tensors, which a batched augmentation
             cannot beat.
Levers       graph.vectorise, communication.loader-workers, graph.compile-loop
False alarm  Augmentation that a package does in compiled code is slow only as far as the images are large; then workers are the
             cure, and the range says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.feeding import fetched, gained_s, hot_line, in_library_fraction, kind_of, main_loader, waiting_s
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeDataset

_OWN_LOW = 0.85
"""Loops in plain Python lose nearly all of their time when a batch goes through tensor operators."""
_LIBRARY_LOW = 0.4


def propose(evidence: Evidence) -> Iterator[TimeDataset]:
    """Fetch a batch by hand, some items twice."""
    index = main_loader(evidence)
    if index is not None and evidence.loaders[index].is_map_style:
        yield TimeDataset(loader=index)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that feeds the steps."""
    index = main_loader(evidence)
    if index is None or kind_of(evidence, index) != "random":
        return
    loader, result, wait_s = evidence.loaders[index], fetched(evidence, index), waiting_s(evidence)
    if result is None or result.now_s is None:
        return
    gained = gained_s(evidence, index, result)
    library = in_library_fraction(evidence, loader)
    low = library * _LIBRARY_LOW + (1 - library) * _OWN_LOW
    where, share, also = hot_line(evidence, loader)
    yield Finding(
        rule=RULE.id,
        regime="input",
        where=where,
        cost_s=wait_s,
        saved_s=(low * gained, 0.98 * gained),
        because=f"each step waits {wait_s * 1e3:.2f} ms for a batch of {loader.dataset}, whose items come out different each "
        f"time; one takes {result.parts.get('item', 0.0) * 1e3:.2f} ms (tried), {share:.0%} of it in this function",
        edit="augment the whole batch at once: draw the random numbers as tensors of the batch's length, and transform the "
        "stacked batch with tensor operators; or at least do an item with whole-array operations",
        also=also,
        levers=RULE.levers,
        phases=("data",),
        basis="estimate",
    )


RULE = Rule(
    id="input.python-augmentation",
    title="Random augmentation in Python, item by item",
    module=__name__,
    check=check,
    propose=propose,
    levers=("graph.vectorise", "communication.loader-workers", "graph.compile-loop"),
)
