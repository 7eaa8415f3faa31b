"""The host waits in the middle of a step until the device has computed a value.

Costs        The host cannot queue ahead: the device idles while the next operators are launched one by one.
Evidence     Calls such as `.item()`, `bool(t)` or `.tolist()` on a device tensor, with the line and the wait.
Levers       graph.defer-host-read
False alarm  A read when the device has drained anyway, or once in many steps. On a CPU there is nothing to wait for: the
             line is told as a note, since it would stall a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, HostRead
from flatout.core.records.finding import Finding, Note
from flatout.core.records.workload import short_place
from flatout.machine.cost.accounting import group_by, idle_seconds

_MOST_NAMED = 5
"""Lines named in one note; the others are counted."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per source line that waits for the device in every step or oftener."""
    if evidence.steps.device_s is None:
        return
    waits = _by_line(r for r in evidence.host_reads if r.on_device)
    all_calls = sum(r.calls for reads in waits.values() for r in reads)
    idle_s = idle_seconds(evidence)
    for source, reads in waits.items():
        wait_s = sum(r.wait_s for r in reads)
        calls = sum(r.calls for r in reads)
        # Without the waits the step takes the longer of device and host: the device's idle time is all there is to gain. Each
        # read empties the queue once, however long it waited for that.
        saved_s = min(wait_s, idle_s * calls / all_calls)
        yield Finding(
            where=evidence.source_of(source),
            cost_s=wait_s,
            saved_s=(0.7 * saved_s, saved_s),
            because=f"{_names(reads)} {_times(calls)} a step makes the host wait {wait_s * 1e3:.2f} ms for the device, "
            f"which idles {idle_s * 1e3:.2f} ms of the step",
            edit="keep the value on the device (a running sum under no_grad) and read it every 50 steps or so",
            basis="timed",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line that stalls the device at no cost, and one for all lines that would stall a GPU."""
    by_line = _by_line(evidence.host_reads)
    elsewhere = [s for s, reads in by_line.items() if not any(r.on_device for r in reads)]
    if len(elsewhere) > 1:
        lines = ", ".join(short_place(s.file, s.line) for s in evidence.sources_of(elsewhere[:_MOST_NAMED]))
        more = f" and {len(elsewhere) - _MOST_NAMED} more" if len(elsewhere) > _MOST_NAMED else ""
        times = _times(sum(r.calls for s in elsewhere for r in by_line[s]))
        what = f"{len(elsewhere)} lines read values on the host, {times} a step ({lines}{more})"
        yield Note(where=None, text=f"{what}; harmless on a CPU, would stall a GPU")
    for source, reads in by_line.items():
        on_device = any(r.on_device for r in reads)
        wait_s = sum(r.wait_s for r in reads)
        what = f"{_names(reads)} {_times(sum(r.calls for r in reads))} a step"
        if on_device and wait_s > 0.02 * evidence.steps.step_s:
            text = f"{what} stalls the host {wait_s * 1e3:.2f} ms; the device is busy meanwhile, so little is gained without"
        elif on_device:
            text = f"{what} costs nothing here: the device had finished"
        elif len(elsewhere) == 1:
            text = f"{what}; harmless on a CPU, would stall a GPU"
        else:
            continue
        yield Note(where=evidence.source_of(source), text=text)


def _by_line(reads: Iterable[HostRead]) -> dict[int, list[HostRead]]:
    return group_by((r for r in reads if r.calls >= 0.5 and r.source >= 0), lambda r: r.source)


def _names(reads: list[HostRead]) -> str:
    return " and ".join(sorted({f"'{r.call}'" for r in reads}))


def _times(calls: float) -> str:
    return "once" if round(calls) <= 1 else f"{calls:.0f} times"


RULE = rule(
    __name__, check, note=note, title="The host waits for the device in the middle of a step", rewrites_line=True
)
