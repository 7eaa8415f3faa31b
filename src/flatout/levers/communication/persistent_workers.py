"""Worker processes of a loader live from epoch to epoch.

What        `persistent_workers=True` where a DataLoader with workers is made.
Guarantee   EXACT: the same samples in the same order. (Workers that draw random numbers of their own go on where they were.)
Refuses     Loaders without workers, or whose workers live on already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where epochs start workers over."""
    restarted = [u for u in evidence.loaders if u.num_workers and not u.persistent_workers and u.num_epochs]
    if not restarted:
        yield Refusal(lever=LEVER.id, because="no loader starts its worker processes over")
        return
    told = [f.saved_s for f in findings if f.rule == "input.workers-restarted"]
    yield Candidate(
        lever=LEVER.id,
        saved_s=max(told, default=(0.0, evidence.steps.restart_s)),
        where=evidence.source_of(restarted[0].constructed),
        because=f"each epoch starts {restarted[0].num_workers} worker process(es) over",
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Have loaders with workers made so."""
    from torch.utils.data import DataLoader

    def persist(kind: type, given: dict[str, Any]) -> None:
        if given.get("num_workers", 0) and not given.get("persistent_workers"):
            given["persistent_workers"] = True
            seams.note(LEVER.id)

    seams.at_making(DataLoader, persist)


LEVER = Lever(
    id="communication.persistent-workers",
    title="Loader workers that live on",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
)
