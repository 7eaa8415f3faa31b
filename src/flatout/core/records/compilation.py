"""What torch.compile did while the script ran."""

from __future__ import annotations

from typing import Literal

from flatout.core.records.record import Record


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
    last_step: int = -1


class Compilation(Record, frozen=True, kw_only=True):
    """All compile events of the run.

    `compile_s` is all time spent compiling while the script was observed, `num_frames` the functions (and the pieces of them
    between breaks) that were compiled, `num_graphs` the graphs handed to the backend. `compiled_at` are the lines that called
    torch.compile. What compiled code takes beside eager code is for a trial (TimeModel, variant 'eager') to measure.
    """

    compile_s: float
    num_frames: int
    num_graphs: int
    events: tuple[CompileEvent, ...] = ()
    compiled_at: tuple[int, ...] = ()
    before_limit_s: float | None = None
    """Median step, compile time left out, between the first compilation and the first limit hit; None without one."""
