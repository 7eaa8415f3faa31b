"""The host stops in every step until the device has finished.

Costs        The queue runs empty: until the host is ahead again, the device waits for every launch.
Evidence     Synchronising calls of the runtime (torch.cuda.synchronize, stream and event waits), with the line and the wait.
Levers       graph.defer-host-read
False alarm  A call when the device has drained anyway; calls that reading a value or copying it makes (overhead.host-read,
             input.blocking-copy), which belong to those rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.device import HostWait
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.machine.cost.accounting import group_by, idle_seconds

_DEVICE: Final = ("cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize")
_OTHERS: Final = tuple(f"{api}{what}Synchronize" for api in ("cuda", "hip", "cu") for what in ("Stream", "Event"))
_WORTH_A_NOTE: Final = 0.02


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that synchronises by itself."""
    step, idle_s = evidence.device_step, idle_seconds(evidence)
    if step is None or evidence.steps.device_s is None:
        return
    num_all = sum(w.num for w in step.waits) or 1
    for source, waits in _by_line(evidence).items():
        wait_s = min(sum(w.seconds for w in waits), evidence.steps.step_s)
        num = sum(w.num for w in waits)
        # Without the wait the step takes the longer of device and host: the device's idle time is all there is to gain.
        saved_s = min(wait_s, idle_s * num / num_all)
        yield Finding(
            where=evidence.source_of(source),
            cost_s=wait_s,
            saved_s=(0.5 * saved_s, saved_s),
            because=f"{_names(waits)} {_times(num)} a step makes the host wait {wait_s * 1e3:.2f} ms for the device, which then "
            f"idles while the queue fills again; it idles {idle_s * 1e3:.2f} ms of the step",
            edit="take it out of the loop; to time steps, record torch.cuda.Event pairs and read them some steps later",
            basis="timed",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line that synchronises while the device is busy anyway."""
    for source, waits in _by_line(evidence).items():
        wait_s = sum(w.seconds for w in waits)
        if wait_s > _WORTH_A_NOTE * evidence.steps.step_s:
            text = f"{_names(waits)} stalls the host {wait_s * 1e3:.2f} ms a step; the device is busy meanwhile, little is gained"
            yield Note(where=evidence.source_of(source), text=f"{text} without")


def _by_line(evidence: Evidence) -> dict[int, list[HostWait]]:
    """Explicit waits by line. Without lines a device-wide wait is explicit all the same: no operator makes one."""
    step = evidence.device_step
    if step is None:
        return {}
    taken = {r.source for r in evidence.host_reads} | {c.source for c in step.copies if not c.is_async}
    outside = [w for w in step.waits if w.op in ("", "synchronize")]
    explicit = [
        w for w in outside if w.call in _DEVICE or (w.call in _OTHERS and w.source >= 0 and w.source not in taken)
    ]
    return group_by(explicit, lambda w: w.source)


def _names(waits: list[HostWait]) -> str:
    return " and ".join(sorted({w.call for w in waits}))


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"


RULE = rule(__name__, check, note=note, title="The host stops to wait for the device", rewrites_line=True)
