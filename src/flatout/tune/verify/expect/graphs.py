"""Graph breaks and recompilations: what dynamo logged during the region, and which pieces of functions it ran.

Whether anything compiled ran at all is observed too: a limit on graphs that were never built means nothing, and counts as failed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from flatout.check.observe.collectors.compiling import CompileEvents
from flatout.core.records.workload import Source
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites

_RESUMED: Final = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")


class CompileCause(NamedTuple):
    """A graph break or a recompilation: torch's reason, and the index of its line."""

    reason: str
    site: int


class Graphs(NamedTuple):
    """What was seen of torch.compile in a region. Breaks are told once a place, recompilations each.

    `num_compiled` frames were compiled in the region, `ran` are those that ran compiled in it, as '1/0'; `unknown` those of them
    that dynamo's books (of a limited length) say nothing of any more.
    """

    breaks: tuple[CompileCause, ...] = ()
    recompilations: tuple[CompileCause, ...] = ()
    num_compiled: int = 0
    compile_s: float = 0.0
    ran: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether anything compiled ran, or was tried."""
        return bool(self.ran or self.num_compiled or self.breaks)


class _CompileClock:
    """Told by the collector when a compilation begins and ends."""

    phase = "other"

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        self._on_change = on_change

    def switch(self, phase: str) -> None:
        self._on_change(phase == "compile")
        self.phase = phase


class GraphWatch:
    """Follows dynamo from `start` to `close`; `on_change` hears when it begins (True) and ends (False) to compile."""

    def __init__(self, sites: Sites, on_change: Callable[[bool], None]) -> None:
        self._sites = sites
        clock = _CompileClock(on_change)
        self._books = CompileEvents(sites, clock=lambda: clock, step=lambda: (0, True), on_use=lambda: None)

    def start(self, patches: Patches) -> None:
        """Follow dynamo from here on, until `close`."""
        self._books.install(patches)

    def close(self) -> None:
        """The region is over: follow dynamo no more. Closing twice does nothing."""
        self._books.remove()

    def read(self, ran: Iterable[str]) -> Graphs:
        """What there was, after `close`; `ran` are the compiled regions that the tape shows."""
        record = self._books.record([])
        events = record.events if record is not None else ()
        breaks = {e.source: CompileCause(e.reason, e.source) for e in events if e.kind == "graph-break"}
        numbers = tuple(dict.fromkeys(ran))
        frames = _frames()
        for cause in self._earlier_breaks(numbers, frames):
            breaks.setdefault(cause.site, cause)
        again = [e for e in events if e.kind in ("recompile", "limit") for _ in range(e.count)]
        return Graphs(
            breaks=tuple(breaks.values()),
            recompilations=tuple(CompileCause(e.reason, e.source) for e in again),
            num_compiled=record.num_frames if record is not None else 0,
            compile_s=record.compile_s if record is not None else 0.0,
            ran=numbers,
            unknown=tuple(n for n in numbers if n.partition("/")[0] not in frames),
        )

    def _earlier_breaks(self, ran: tuple[str, ...], frames: dict[str, Source]) -> Iterable[CompileCause]:
        """Breaks of functions that ran here and were compiled before: by the pieces that ran, and by dynamo's reasons."""
        reasons = _reasons()
        for number in ran:
            frame = frames.get(number.partition("/")[0])
            if frame is None:
                continue
            resumed = _RESUMED.fullmatch(frame.function)
            name = resumed[1] if resumed else frame.function
            if resumed:
                at = (frame.file, int(resumed[2]))
                reason = next((why for why, stack in reasons if at in [(f, n) for f, n, _ in stack]), "")
                yield CompileCause(reason or "the function goes on in a graph of its own here", self._site(*at, name))
            for why, stack in reasons:
                if any((file, function) == (frame.file, name) for file, _, function in stack):
                    yield CompileCause(why, self._site(*stack[-1]))

    def _site(self, file: str, line: int, function: str) -> int:
        return self._sites.add(Source(file=file, line=line, function=function))


def frame_sites(sites: Sites) -> dict[str, int]:
    """The first lines of the frames that dynamo compiled, by their number."""
    return {number: sites.add(source) for number, source in _frames().items()}


def _frames() -> dict[str, Source]:
    """File, line and name of the frames in dynamo's books, by their number."""
    metrics: Iterable[Any] = getattr(sys.modules.get("torch._dynamo.utils"), "_compilation_metrics", ())
    found: dict[str, Source] = {}
    for m in list(metrics):
        if m.co_filename and m.co_firstlineno and m.compile_id:
            source = Source(file=m.co_filename, line=m.co_firstlineno, function=m.co_name or "")
            found[str(m.compile_id).partition("/")[0]] = source  # the last: dynamo counts anew when it is reset
    return found


def _reasons() -> list[tuple[str, list[tuple[str, int, str]]]]:
    """Every reason of a graph break so far: its first line, and the stack as (file, line, function)."""
    books: Iterable[Any] = getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_reasons", ())
    return [
        (
            _in_a_line(str(r.reason)),
            [(f.filename, f.lineno or 0, _RESUMED.sub(r"\1", f.name)) for f in r.user_stack],
        )
        for r in list(books)
        if r.user_stack and r.graph_break
    ]


def _in_a_line(reason: str) -> str:
    if reason.startswith("generic_jump"):
        return "a branch that depends on a tensor's value"
    return reason.strip().partition("\n")[0].encode("ascii", "replace").decode()
