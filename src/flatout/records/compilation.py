"""What torch.compile did while the script ran."""

from __future__ import annotations

from typing import Literal

from flatout.records.record import Record


class CompileEvent(Record, frozen=True, kw_only=True):
    """One kind of event at one line: a compiled frame, a graph break, a recompile, a limit hit, CUDA graphs skipped.

    `source` is the user's line (for a break the line that breaks the graph, for a frame its first line). `reason` is torch's, in
    one sentence. `seconds` is compile time summed over `count` events; `in_steps` how many of them fell into timed steps.
    """

    kind: Literal["frame", "graph-break", "recompile", "limit", "cudagraph-skip"]
    source: int
    reason: str
    count: int
    seconds: float = 0.0
    in_steps: int = 0


class Compilation(Record, frozen=True, kw_only=True):
    """All compile events of the run, and what compiled steps take beside eager ones.

    `eager_step_s` is the step (or its model call) with compiled code switched off, None where that was not tried; with it
    `compile_s / (eager_step_s - step_s)` is the number of steps until compiling has paid for itself.
    """

    compile_s: float
    num_frames: int
    num_graphs: int
    events: tuple[CompileEvent, ...] = ()
    eager_step_s: float | None = None
