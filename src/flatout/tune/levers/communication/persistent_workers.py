"""Worker processes of a loader live from epoch to epoch.

What        `persistent_workers=True` where a DataLoader with workers is made.
Guarantee   EXACT: the same samples in the same order. (Workers that draw random numbers of their own go on where they were.)
Refuses     Loaders without workers, or whose workers live on already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.tune.rewrite.calls import LOADER, LOADER_ORDER, argument, calls_to, true_name, with_argument, with_calls
from flatout.tune.rewrite.source import code_of, expression, parsed

_NUM_WORKERS_AT: Final = LOADER_ORDER.index("num_workers")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where each epoch starts the workers again."""
    restarted = [u for u in evidence.loaders if u.num_workers and not u.persistent_workers and u.num_epochs]
    if not restarted:
        raise LeverRefused("no loader starts its worker processes over")
    savings = [f.saved_s for f in findings if f.rule == "input.workers-restarted"]
    yield Candidate(
        saved_s=max(savings, default=(0.0, evidence.steps.restart_s)),
        where=evidence.source_of(restarted[0].constructed),
        because=f"each epoch starts {restarted[0].num_workers} worker process(es) over",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Construct loaders with persistent workers; each epoch draws the seed that new workers would have drawn."""
    import torch
    from torch.utils.data import DataLoader

    begin = DataLoader.__iter__
    ours: list[object] = []

    def persist(kind: type, arguments: dict[str, Any]) -> None:
        if arguments.get("num_workers", 0) and not arguments.get("persistent_workers"):
            arguments["persistent_workers"] = True
            ours.append(arguments["dataset"])
            hooks.note(LEVER.id)

    def __iter__(self: DataLoader[Any]) -> Iterator[Any]:
        if self._iterator is not None and self.persistent_workers and any(self.dataset is one for one in ours):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return begin(self)

    hooks.at_construction(DataLoader, persist)
    hooks.replace(DataLoader, "__iter__", __iter__)


def edit(text: str, parameters: Parameters) -> str:
    """Write `persistent_workers=True` into the calls that construct a loader with workers."""
    module = parsed(text)
    loader_calls = calls_to(module, LOADER)
    workers = {call: argument(call, "num_workers", _NUM_WORKERS_AT) for call in loader_calls}
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
        return with_argument(
            call, "persistent_workers", true_name() if known else expression("{number} > 0", number=number)
        )

    return with_calls(module, list(able), persist).code


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Loader workers that live on")
