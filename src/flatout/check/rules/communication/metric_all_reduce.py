"""A handful of numbers goes through a collective in every step, as for a log.

Costs        The round trips of the call, whatever it carries; what it waits for slower ranks the next collective would wait for.
Evidence     Collectives of at most 1 KiB outside the backward, called by the script itself or by a metrics library, every step.
Levers       communication.defer-metrics
False alarm  A number that the step itself needs: a global count of tokens, a norm to clip by.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.distributed import Collective
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.machine.cost.accounting import group_by

_LARGEST_BYTES = 1024
_MOST_CALLS = 8
"""More calls from one line are tensors one by one, which is another cause."""
_OPS = (
    "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object",
    "broadcast", "broadcast_object_list",
)  # fmt: skip
_OWN = ("torch.nn", "torch.distributed", "torch.optim", "torch.amp", "torch.cuda")
"""Calls from there belong to the training itself (SyncBatchNorm, sharding, clipping)."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding per line."""
    for source, rows in _lines(evidence).items():
        own_s = sum(r.transfer_s for r in rows)
        yield Finding(
            where=evidence.source_of(source),
            cost_s=sum(r.exposed_s for r in rows),
            saved_s=(0.6 * own_s, 0.98 * own_s),
            because=f"{_what(rows)} a step: {own_s * 1e3:.2f} ms beyond the wait for slower ranks",
            edit="if it serves a log: add the numbers up on each rank and reduce the sums every 50 steps or so, "
            "several in one tensor",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line that costs too little to be reported."""
    for source, rows in _lines(evidence).items():
        exposed_s = sum(r.exposed_s for r in rows)
        text = f"{_what(rows)} a step; {exposed_s * 1e3:.2f} ms in it, waiting for slower ranks included"
        yield Note(where=evidence.source_of(source), text=text)


def _lines(evidence: Evidence) -> dict[int, list[Collective]]:
    return group_by(filter(_is_metric, evidence.collectives), lambda r: r.source)


def _is_metric(row: Collective) -> bool:
    return (
        row.op in _OPS
        and row.phase != "backward"
        and 0.5 <= row.num < _MOST_CALLS
        and row.bytes / row.num <= _LARGEST_BYTES
        and not row.caller.startswith(_OWN)
    )


def _what(rows: list[Collective]) -> str:
    num = sum(r.num for r in rows)
    names = " and ".join(sorted({r.op for r in rows}))
    return f"{num:.0f} {names} of {sum(r.bytes for r in rows) / num:.0f} bytes"


RULE = rule(__name__, check, note=note, title="A few numbers go through a collective in every step")
