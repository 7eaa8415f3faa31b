"""Worker processes of a loader live from epoch to epoch.

What        `persistent_workers=True` where a DataLoader with workers is made.
Guarantee   EXACT: the same samples in the same order. (Workers that draw random numbers of their own go on where they were.)
Refuses     Loaders without workers, or whose workers live on already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import libcst as cst

from flatout.errors import EditError
from flatout.levers.syntax.calls import LOADER, LOADER_ORDER, TRUE, argument, calls_of, with_argument, with_calls
from flatout.levers.syntax.source import code_of, expression, parsed
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

_NUM_WORKERS_AT: Final = LOADER_ORDER.index("num_workers")


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
    """Have loaders with workers made so; each epoch draws the seed that workers which start anew would have drawn."""
    import torch
    from torch.utils.data import DataLoader

    begin = DataLoader.__iter__
    ours: list[object] = []

    def persist(kind: type, given: dict[str, Any]) -> None:
        if given.get("num_workers", 0) and not given.get("persistent_workers"):
            given["persistent_workers"] = True
            ours.append(given["dataset"])
            seams.note(LEVER.id)

    def __iter__(self: DataLoader[Any]) -> Iterator[Any]:
        if self._iterator is not None and self.persistent_workers and any(self.dataset is one for one in ours):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return begin(self)

    seams.at_making(DataLoader, persist)
    seams.replace(DataLoader, "__iter__", __iter__)


def edit(text: str, parameters: Parameters) -> str:
    """`persistent_workers=True` in the calls that make a loader with workers."""
    module = parsed(text)
    made = calls_of(module, LOADER)
    workers = {call: argument(call, "num_workers", _NUM_WORKERS_AT) for call in made}
    able = {
        call: number
        for call, number in workers.items()
        if number is not None and code_of(number) != "0" and argument(call, "persistent_workers") is None
    }
    if not able:
        raise EditError("no call that makes a loader with workers is in the file")
    unclear = next((n for n in able.values() if not isinstance(n, (cst.Integer, cst.Name, cst.Attribute))), None)
    if unclear is not None:
        raise EditError(f"'{code_of(unclear)}' may be 0, and then no worker can live on")

    def persist(call: cst.Call) -> cst.Call:
        number = argument(call, "num_workers", _NUM_WORKERS_AT)
        assert number is not None
        known = isinstance(number, cst.Integer)
        return with_argument(call, "persistent_workers", TRUE if known else expression("{number} > 0", number=number))

    return with_calls(module, list(able), persist).code


LEVER = Lever(
    id="communication.persistent-workers",
    title="Loader workers that live on",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
