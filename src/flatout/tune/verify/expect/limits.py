"""The limits that can be set on a region, checked against what was observed of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from flatout.core.errors import UsageError
from flatout.tune.verify.expect.messages import Breach, mebibytes, rows_of, source_place
from flatout.tune.verify.expect.observed import ObservedRegion

_OF_GRAPHS: Final = ("graph_breaks", "recompilations")
_ADVICE: Final = {
    "host_waits": "keep the numbers on the device, and read them after the region",
    "graph_breaks": "torch.compile(fullgraph=True) forbids them",
    "recompilations": "mark what changes as dynamic (torch._dynamo.mark_dynamic), or keep it the same",
}


class Limits(NamedTuple):
    """The largest count that is allowed of each kind; None sets no limit."""

    forward_kernels: int | None = None
    backward_kernels: int | None = None
    peak_bytes: int | None = None
    host_waits: int | None = None
    graph_breaks: int | None = None
    recompilations: int | None = None

    def check(self) -> None:
        """Raises UsageError for a limit that is no whole number of at least 0."""
        for name, limit in self._asdict().items():
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise UsageError(f"{name}={limit!r}: a limit is a whole number, 0 or more; None sets no limit")


def breaches(limits: Limits, observed: ObservedRegion) -> Iterator[Breach]:
    """The limits that were passed, each with the operators and lines that did it."""
    graphs = observed.graphs
    limited = {name: limit for name, limit in limits._asdict().items() if limit is not None}
    counted = {
        "forward_kernels": [(launch.name, launch.site) for launch in observed.launches if not launch.is_backward],
        "backward_kernels": [(launch.name, launch.site) for launch in observed.launches if launch.is_backward],
        "host_waits": [(wait.call, wait.site) for wait in observed.waits],
        "graph_breaks": [(f"{cause.reason} at", cause.site) for cause in graphs.breaks],
        "recompilations": [(f"{cause.reason} at", cause.site) for cause in graphs.recompilations],
    }
    for name, limit in limited.items():
        expectation = f"{name}={limit}"
        if name == "peak_bytes":
            yield from _peak_breach(expectation, limit, observed)
        elif name in _OF_GRAPHS and not graphs.is_compiled:
            continue
        elif len(counted[name]) > limit:
            advice = _ADVICE.get(name, "")
            if name.endswith("kernels") and graphs.num_compiled:
                advice = f"what the compiler ran for the {graphs.num_compiled} frames that were compiled here is not among them"
            instead = f"{len(counted[name])} ran" if name.endswith("kernels") else str(len(counted[name]))
            yield Breach(expectation, instead, rows_of(observed.sites, counted[name]), advice)
        elif name == "graph_breaks" and graphs.unknown:
            yield Breach(
                expectation,
                f"of {len(graphs.unknown)} frames that were compiled before the region dynamo's log has no entry any more",
                (),
                "call torch._dynamo.reset() before it and let it compile inside",
            )
    on_graphs = ", ".join(f"{name}={limited[name]}" for name in _OF_GRAPHS if name in limited)
    if on_graphs and not graphs.is_compiled:
        yield Breach(
            on_graphs,
            "nothing compiled ran in the region, so that the limit would mean nothing",
            (),
            "call what torch.compile returned inside it; is compiling switched off (TORCH_COMPILE_DISABLE, a stance)?",
        )


def _peak_breach(expectation: str, limit: int, observed: ObservedRegion) -> Iterator[Breach]:
    if observed.peak_bytes > limit:
        yield Breach(
            expectation,
            f"{observed.peak_bytes} ({mebibytes(observed.peak_bytes)}) of its own were live at one moment "
            f"on {observed.peak.device}, by",
            tuple(
                f"{mebibytes(h.bytes):>10}  {h.op}  {source_place(observed.sites, h.site)}"
                for h in observed.peak.live[:8]
            ),
        )
