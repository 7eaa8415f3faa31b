"""The limits that can be promised about a region, checked against what was seen of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flatout.errors import UsageError
from flatout.verification.promises.graphs import Cause
from flatout.verification.promises.seen import Seen
from flatout.verification.promises.telling import Breach, mebibytes, place, rows_of


class Limits(NamedTuple):
    """At most so many; None promises nothing."""

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
                raise UsageError(f"{name}={limit!r}: a limit is a whole number, 0 or more; None promises nothing")


def breaches(limits: Limits, seen: Seen) -> Iterator[Breach]:
    """The limits that were passed, each with the operators and lines that did it."""
    yield from _too_many_kernels(limits.forward_kernels, seen, is_backward=False)
    yield from _too_many_kernels(limits.backward_kernels, seen, is_backward=True)
    if limits.peak_bytes is not None and seen.peak_bytes > limits.peak_bytes:
        held = seen.peak.held[:8]
        yield Breach(
            f"peak_bytes={limits.peak_bytes}",
            f"{seen.peak_bytes} ({mebibytes(seen.peak_bytes)}) of its own were held at one moment on {seen.peak.device}, by",
            tuple(f"{mebibytes(h.bytes):>10}  {h.op}  {place(seen.sites, h.site)}" for h in held),
        )
    if limits.host_waits is not None and seen.host_waits > limits.host_waits:
        yield Breach(
            f"host_waits={limits.host_waits}",
            f"{seen.host_waits}",
            rows_of(seen.sites, ((w.call, w.site) for w in seen.waits)),
            "keep the numbers on the device, and read them after the region",
        )
    yield from _graph_breaches(limits, seen)


def _too_many_kernels(limit: int | None, seen: Seen, *, is_backward: bool) -> Iterator[Breach]:
    ran = [launch for launch in seen.launches if launch.is_backward == is_backward]
    if limit is None or len(ran) <= limit:
        return
    name = "backward_kernels" if is_backward else "forward_kernels"
    compiled = seen.graphs.num_compiled
    advice = (
        f"what the compiler ran for the {compiled} frames that were compiled here is not among them" if compiled else ""
    )
    yield Breach(f"{name}={limit}", f"{len(ran)} ran", rows_of(seen.sites, ((r.name, r.site) for r in ran)), advice)


def _graph_breaches(limits: Limits, seen: Seen) -> Iterator[Breach]:
    graphs = seen.graphs
    promised = [
        f"{n}={limits._asdict()[n]}" for n in ("graph_breaks", "recompilations") if limits._asdict()[n] is not None
    ]
    if not promised:
        return
    if not graphs.is_compiled:
        yield Breach(
            ", ".join(promised),
            "nothing compiled ran in the region, so that the promise would say nothing",
            (),
            "call what torch.compile returned inside it; is compiling switched off (TORCH_COMPILE_DISABLE, a stance)?",
        )
        return
    if limits.graph_breaks is not None:
        if len(graphs.breaks) > limits.graph_breaks:
            yield _caused(
                f"graph_breaks={limits.graph_breaks}", graphs.breaks, seen, "torch.compile(fullgraph=True) forbids them"
            )
        elif graphs.unknown:
            yield Breach(
                f"graph_breaks={limits.graph_breaks}",
                f"of {len(graphs.unknown)} frames that were compiled before the region dynamo's books say nothing any more",
                (),
                "call torch._dynamo.reset() before it and let it compile inside",
            )
    if limits.recompilations is not None and len(graphs.recompilations) > limits.recompilations:
        yield _caused(
            f"recompilations={limits.recompilations}",
            graphs.recompilations,
            seen,
            "mark what changes as dynamic (torch._dynamo.mark_dynamic), or keep it the same",
        )


def _caused(promise: str, causes: tuple[Cause, ...], seen: Seen, advice: str) -> Breach:
    rows = rows_of(seen.sites, ((c.reason + " at", c.site) for c in causes))
    return Breach(promise, f"{len(causes)}", rows, advice)
