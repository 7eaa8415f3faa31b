"""The step stands still while a collective moves data.

Costs        The transfer: what remains of the exposed time when all ranks arrive together.
Evidence     Time in which a collective ran and this rank did nothing else, by line, less what it waited for slower ranks.
Levers       communication.overlap, communication.compress-gradients
False alarm  A transfer that little work could hide; a gradient synchronisation that DistributedDataParallel already overlaps is a
             note, since what can still be hidden is not known without trying.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.distributed import Collective
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.machine.cost.accounting import group_by

_AVERAGING = ("all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce")
_LARGE_BYTES = 64 << 10
"""A call below this is latency, which other rules price."""
_WORTH_A_NOTE = 0.1


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for a line that averages gradients by hand, after the backward has ended."""
    backward_s = evidence.steps.phases.get("backward", 0.0)
    for source, rows in _by_line(evidence).items():
        by_hand = [r for r in rows if r.op in _AVERAGING and not r.caller and r.phase in ("other", "optimizer")]
        transfer_s = sum(r.transfer_s for r in by_hand)
        if not by_hand or evidence.steps.kind != "training" or sum(r.bytes / r.num for r in by_hand) < _LARGE_BYTES:
            continue
        # Beside the backward at most as much can be hidden as the backward lasts.
        hidden_s = min(transfer_s, backward_s)
        num = sum(r.num for r in by_hand)
        yield Finding(
            where=evidence.source_of(source),
            cost_s=transfer_s,
            saved_s=(0.3 * hidden_s, 0.9 * hidden_s),
            because=f"{num:.0f} {by_hand[0].op} of {sum(r.bytes for r in by_hand) / 1e6:.1f} MB a step run one after another "
            f"when the backward is over; the step stands still for {transfer_s * 1e3:.2f} ms",
            edit="wrap the model in DistributedDataParallel, which averages gradients in buckets while the backward still runs",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each other line with much exposed transfer."""
    for source, rows in _by_line(evidence).items():
        rest = [r for r in rows if r.op not in _AVERAGING or r.caller or r.phase not in ("other", "optimizer")]
        transfer_s = sum(r.transfer_s for r in rest)
        if not rest or transfer_s < _WORTH_A_NOTE * evidence.steps.step_s:
            continue
        names = " and ".join(sorted({r.op for r in rest}))
        size = sum(r.bytes for r in rest) / 1e6
        yield Note(
            where=evidence.source_of(source),
            text=f"{names}: {transfer_s * 1e3:.2f} ms of each step are transfer that no work hides ({size:.2f} MB a step); fewer "
            "bits (a bf16 compression hook), fewer synchronisations or more work between them would make it smaller",
        )


def _by_line(evidence: Evidence) -> dict[int, list[Collective]]:
    return group_by((r for r in evidence.collectives if r.num >= 0.5), lambda r: r.source)


RULE = rule(__name__, check, note=note)
