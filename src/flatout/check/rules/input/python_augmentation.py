"""Random augmentation runs in Python, item by item.

Costs        The interpreter, and many small calls, for every item of every batch; with workers it is hidden only as far as the
             cores go.
Evidence     Asked twice for the same item, the data set gives one that holds other tensors, arrays or values, and sampled time
             lies on the user's lines inside it.
             Trial: a batch fetched item by item against the same batch indexed in ready tensors, which a batched augmentation
             cannot beat.
Levers       graph.vectorise, communication.loader-workers, graph.compile-loop
False alarm  Items of classes that say neither what equal means nor what they hold: nobody knows whether these repeat, and nothing
             is said. Augmentation that a package does in compiled code is slow only as far as the images are large; then workers
             are the cure, and the range says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.feeding import dataset_trials, hot_line, python_fraction_low, slow_loader


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that feeds the steps."""
    slow = slow_loader(evidence, "random")
    result = slow.result if slow is not None else None
    if slow is None or result is None or result.now_s is None:
        return
    loader, _, wait_s, gained = slow
    low = python_fraction_low(evidence, loader)
    hot = hot_line(evidence, loader)
    yield Finding(
        where=hot.where,
        cost_s=wait_s,
        saved_s=(low * gained, 0.98 * gained),
        because=f"each step waits {wait_s * 1e3:.2f} ms for a batch of {loader.dataset}, whose items come out different each "
        f"time; one takes {result.parts.get('item', 0.0) * 1e3:.2f} ms (tried), {hot.share:.0%} of it in {hot.function}",
        edit="augment the whole batch at once: draw the random numbers as tensors of the batch's length, and transform the "
        "stacked batch with tensor operators; or at least do an item with whole-array operations",
        also=hot.also,
        phases=("data",),
        basis="estimate",
    )


RULE = rule(__name__, check, propose=dataset_trials, title="Random augmentation in Python, item by item")
