"""Progress bars, prints and log writers take a good part of the step.

Costs        Formatting and writing text or event files in every step; where tensors are read for it, a wait for the device too.
Evidence     Calls of print, logging, tqdm, tensorboard or wandb between the steps, with their seconds, and the host reads on
             their lines.
Levers       graph.log-less-often
False alarm  A line logged now and then, or a bar that redraws itself some times a second: their seconds are below the noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.machine.cost.accounting import uses_by_line

_NAMES: Final = ("print", "Logger.handle")
_WRITERS: Final = ("tqdm.", "SummaryWriter.", "Run.")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all lines that log, at the one that takes longest."""
    lines = _lines(evidence)
    if not lines:
        return
    reads_s = {s: sum(r.wait_s for r in evidence.host_reads if r.source == s and not r.on_device) for s in lines}
    seconds = {s: lines[s] + reads_s[s] for s in lines}
    order = sorted(lines, key=lambda s: -seconds[s])
    cost_s = min(sum(seconds.values()), evidence.steps.whole_s)
    names = dict.fromkeys(u.name for s in order for u in evidence.uses if u.source == s and _is_logging(u.name))
    read = " (with the values read for it)" if any(reads_s.values()) else ""
    yield Finding(
        where=evidence.source_of(order[0]),
        cost_s=cost_s,
        saved_s=(0.8 * cost_s, 0.98 * cost_s),
        because=f"{', '.join(names)}{read} on {len(order)} line(s) take {cost_s * 1e3:.2f} ms of each step",
        edit="log every 50 steps or so, and give a progress bar mininterval=1 and its values with refresh=False",
        also=evidence.sources_of(order[1:]),
        basis="timed",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line that reads a tensor from a device in order to log it."""
    for source in _lines(evidence):
        reads = [r for r in evidence.host_reads if r.source == source and r.on_device]
        if reads:
            yield Note(
                where=evidence.source_of(source),
                text="logs values that it reads from the device, which makes the host wait: keep them there and log every "
                "50 steps",
            )


def _is_logging(name: str) -> bool:
    return name in _NAMES or name.startswith(_WRITERS)


def _lines(evidence: Evidence) -> dict[int, float]:
    """Seconds of logging a step, by line."""
    names = {u.name for u in evidence.uses if _is_logging(u.name)}
    return {s: sum(u.seconds for u in uses) for s, uses in uses_by_line(evidence, names).items()}


RULE = rule(__name__, check, note=note, title="Logging in every step")
