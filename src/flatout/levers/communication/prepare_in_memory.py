"""Items that come out the same each time are made once, and batches are cut from tensors.

What        A DataLoader's dataset is wrapped: an item that was made is kept; when all are there, a batch is one index operation.
Guarantee   EXACT: the same batches bit for bit.
Refuses     Items that differ from time to time (augmentation), data that do not fit the memory, custom collate functions,
            iterable datasets, batches that are not made of tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flatout.cost.feeding import fetched, fits_memory
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """For loaders that are waited for and whose items a trial found repeatable."""
    able = []
    for index, loader in enumerate(evidence.loaders):
        result = fetched(evidence, index)
        if result is None or not result.facts.get("repeatable") or not fits_memory(evidence, result):
            continue
        if loader.is_map_style and not loader.has_own_collate:
            able.append(loader)
    if not able:
        yield Refusal(lever=LEVER.id, because="no loader whose items come out the same each time and fit the memory")
        return
    told = [f.saved_s for f in findings]
    yield Candidate(
        lever=LEVER.id,
        saved_s=max(told, default=(0.0, evidence.steps.phases.get("data", 0.0))),
        where=evidence.source_of(able[0].constructed),
        because=f"each step waits for a batch of {able[0].dataset}, whose items come out the same each time",
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Wrap what loaders are made of."""
    from torch.utils.data import DataLoader, IterableDataset

    from flatout.levers.in_memory import KeptItems, as_made

    def keep(kind: type, given: dict[str, Any]) -> None:
        is_plain = given.get("collate_fn") is None and given.get("batch_size", 1) is not None
        if is_plain and not isinstance(given["dataset"], IterableDataset):
            given["dataset"] = KeptItems(given["dataset"])
            given["collate_fn"] = as_made
            for name in ("num_workers", "persistent_workers", "prefetch_factor"):
                given.pop(name, None)  # a worker's copy of what was kept would be lost with it
            seams.note(LEVER.id)

    seams.at_making(DataLoader, keep)


LEVER = Lever(
    id="communication.prepare-in-memory",
    title="Items made once, batches cut from tensors",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
)
