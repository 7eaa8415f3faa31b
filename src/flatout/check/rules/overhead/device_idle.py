"""The device idles since the host launches its work too late.

Costs        Every gap between kernels is time in which the device could have worked: the step takes as long as the host needs.
Evidence     Gaps between kernels and copies on the device's own clock, before work that was launched after the device had run
             dry; with the line that launched it. Scaled to the idle time of the undisturbed steps.
Levers       graph.capture-update, graph.capture, graph.compile, parallelism.batch-size
False alarm  Gaps that follow a wait of the host for the device (overhead.host-read, overhead.sync-call) or for a batch
             (input.slow-loader): those rules price them. Gaps of a microsecond between queued kernels are the device's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import idle_seconds, is_steady, remaining_fraction

_BATCH_TELLS: Final = 0.75
"""Where a sample of twice the batch takes less than this (a trial), overhead.tiny-operators has priced the same time."""
_MOST_LINES: Final = 4


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the step, at the line before whose work the device idles longest."""
    step = evidence.device_step
    if step is None or evidence.steps.device_s is None or not is_steady(evidence) or _is_batch_too_small(evidence):
        return
    late: dict[int, float] = defaultdict(float)
    for gap in step.gaps:
        if gap.cause == "late-launch":
            late[gap.source] += gap.seconds
    all_gaps_s = sum(g.seconds for g in step.gaps)
    if not late or not all_gaps_s:
        return
    idle_s = idle_seconds(evidence)
    scale = min(1.0, idle_s / all_gaps_s)
    cost_s = min(scale * sum(late.values()), idle_s - _waited_s(evidence, idle_s))
    if cost_s <= 0:
        return
    ranked = sorted(late, key=lambda s: -late[s])
    lines = [(evidence.source_of(s), late[s]) for s in ranked if s >= 0]
    share = ""
    if lines and lines[0][0] is not None:
        share = f"; {lines[0][1] / sum(late.values()):.0%} of that before work launched from this line"
    num = sum(g.num for g in step.gaps if g.cause == "late-launch")
    # In a trace made elsewhere the profiler slowed the host down by an amount that nobody knows.
    low, high, under = (
        (0.3, 0.95, "") if step.slowdown is not None else (0.1, 0.7, "; the profiler's own cost is part of it")
    )
    yield Finding(
        where=lines[0][0] if lines else None,
        cost_s=cost_s,
        saved_s=(low * cost_s, high * cost_s),
        because=f"the device idles {idle_s * 1e3:.2f} ms of a step of {evidence.steps.step_s * 1e3:.2f} ms, {num} times since "
        f"the host launched the next kernel too late ({cost_s * 1e3:.2f} ms){share}{under}",
        edit="fewer launches for the same work: a larger batch, torch.compile(mode='reduce-overhead') or a CUDA graph; "
        "Python work between the launches moved to where the device is busy",
        also=tuple(s for s, _ in lines[1:_MOST_LINES] if s is not None),
    )


def _waited_s(evidence: Evidence, idle_s: float) -> float:
    """Idle time that waits of the host for the device explain: after one the queue is empty, and what follows is late."""
    reads_s = sum(r.wait_s for r in evidence.host_reads if r.on_device and r.calls >= 0.5)
    step = evidence.device_step
    waits_s = sum(w.seconds for w in step.waits) if step is not None else 0.0
    return min(idle_s, max(reads_s, waits_s))


def _is_batch_too_small(evidence: Evidence) -> bool:
    """Whether a trial repeated the batch and found overhead."""
    return any(
        isinstance(r.trial, TimeModel)
        and r.trial.variant == "batched"
        and r.now_s is not None
        and r.cured_s is not None
        and remaining_fraction(r) <= _BATCH_TELLS
        for r in evidence.trials
    )


RULE = rule(__name__, check, is_general=True, title="The device idles because the host is late")
