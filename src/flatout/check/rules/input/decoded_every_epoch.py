"""The same files or texts are read and decoded again in each epoch.

Costs        Reading, decompressing and parsing every item as often as the data are passed over.
Evidence     Sampled time inside the data set lies on lines that read or decode (json, gzip, numpy.load, Image.open, csv), or in
             a package's functions that do (PIL/ImageFile.py, pandas.read_csv, soundfile.read); items come out the same each
             time, all of them fit the memory, and the loader was iterated over again.
             Trial: a batch fetched item by item against the same batch indexed in ready tensors.
Levers       communication.prepare-in-memory
False alarm  A single pass over the data, images that are made of arrays in memory (Image.fromarray), items that are
             augmented at random, data that do not fit the memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.feeding import dataset_trials, decoded_fraction, hot_line, slow_loader


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that feeds the steps."""
    slow = slow_loader(evidence, "decoded")
    result = slow.result if slow is not None else None
    if slow is None or result is None:
        return
    loader, _, wait_s, gained = slow
    hot = hot_line(evidence, loader)
    total_bytes = result.parts.get("item_bytes", 0.0) * result.parts.get("num_items", 0.0)
    yield Finding(
        where=hot.where,
        cost_s=wait_s,
        saved_s=(0.95 * gained, gained),
        because=f"each step waits {wait_s * 1e3:.2f} ms for a batch of {loader.dataset}; "
        f"{decoded_fraction(evidence, loader):.0%} of the time in it reads or decodes what was decoded in the epoch before; "
        f"all of it, decoded, takes {total_bytes / 2**20:.1f} MiB",
        edit="decode each item once: prepare all as tensors before the loop (or keep them in a file of tensors that is mapped "
        "into memory), and index a whole batch at a time",
        also=hot.also,
        phases=("data",),
        basis="trial",
    )


RULE = rule(__name__, check, propose=dataset_trials, title="The same data are decoded again in each epoch")
