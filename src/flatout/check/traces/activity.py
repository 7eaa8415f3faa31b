"""One step of one device: busy time, idle gaps and who was late, copies, waits, exposed communication. Pure.

Used alike for a trace that was recorded elsewhere and for the step that was profiled here. Busy time and gaps add up to the span.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

from flatout.check.traces.events import CallPlace, DeviceFacts, DeviceWork, HostCall, span_of
from flatout.check.traces.intervals import Cover, gaps, intervals_without, length, union_of_intervals
from flatout.check.traces.kernel_names import copy_of, short_kernel_name, uses_matrix_units
from flatout.core.records.device import Copy, DeviceKernel, DeviceStep, Gap, HostWait
from flatout.core.records.distributed import Collective
from flatout.core.records.span import Span
from flatout.machine.cost.waves import resident_blocks

Cause = Literal["late-launch", "host-wait", "copy", "data", "unknown"]
PlaceOf = Callable[[HostCall], CallPlace]

_NS: Final = 1e-9
_WAITS: Final = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "hipDeviceSynchronize",
    "hipStreamSynchronize", "hipEventSynchronize", "hipMemcpy", "hipMemcpyWithStream", "cuStreamSynchronize",
    "cuCtxSynchronize", "cuEventSynchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "hipMalloc", "hipFree",
)  # fmt: skip
_SYNC_AFTER_COPY_NS: Final = 50_000
"""A stream synchronised so soon after a copy was issued on the same thread belongs to the copy: `tensor.cpu()` does both."""
_MOST_KERNELS: Final = 3000
_PIPELINE_NS: Final = 2_000
"""A gap this short lies between kernels that were queued in time: the device's own latency from one to the next."""


class Linked(NamedTuple):
    """Device work with the host's call that launched it (None when the trace has none) and where that call belongs."""

    work: DeviceWork
    call: HostCall | None
    place: CallPlace


class Activity:
    """The work of one device between two moments, each piece brought home to the host's call that launched it.

    `start_ns` is when the device was free for the step, `end_ns` when its last work ended; work that reaches outside is cut.
    `waits` are the runtime calls in which the host waited, `calls` those of the step.
    """

    def __init__(
        self, work: Iterable[DeviceWork], calls: Iterable[HostCall], *, place_of: PlaceOf, start_ns: int, end_ns: int
    ) -> None:
        self.start_ns, self.end_ns = start_ns, max(start_ns, end_ns)
        self.calls = sorted(calls)
        by_correlation = {c.correlation: c for c in self.calls if c.correlation}
        self.linked: list[Linked] = []
        for piece in sorted(work):
            cut = piece._replace(start_ns=max(piece.start_ns, self.start_ns), end_ns=min(piece.end_ns, self.end_ns))
            if cut.end_ns > cut.start_ns:
                call = by_correlation.get(piece.correlation)
                self.linked.append(Linked(cut, call, place_of(call) if call is not None else CallPlace()))
        self.place_of = place_of
        self.waits = [c for c in self.calls if plain_name(c.name) in _WAITS]
        self._kernel_threads = {p.call.thread for p in self.linked if p.call is not None and p.work.kind == "kernel"}
        self._waits_by_end = sorted(self.waits, key=lambda c: c.end_ns)
        self._wait_ends = [c.end_ns for c in self._waits_by_end]
        self.busy = union_of_intervals((p.work.start_ns, p.work.end_ns) for p in self.linked)
        self.gaps = gaps(self.busy, self.start_ns, self.end_ns)

    @property
    def busy_ns(self) -> int:
        return length(self.busy)

    def device_step(self, facts: DeviceFacts) -> DeviceStep:
        """All of it as a record."""
        return DeviceStep(
            name=facts.name,
            span_s=(self.end_ns - self.start_ns) * _NS,
            busy_s=self.busy_ns * _NS,
            kernels=self._kernels(facts),
            gaps=self._gaps(),
            copies=self._copies(),
            waits=self._waits(),
            num_sms=facts.num_sms,
        )

    def collectives(self) -> tuple[Collective, ...]:
        """Collectives by line, each with the time in which the device ran nothing but communication."""
        computing = union_of_intervals(
            (p.work.start_ns, p.work.end_ns) for p in self.linked if p.work.kind in ("kernel", "set")
        )
        rows: dict[tuple[str, int, str, int], list[DeviceWork]] = defaultdict(list)
        for piece in self.linked:
            if piece.work.kind == "collective":
                key = (piece.work.collective, piece.place.source, piece.place.phase, piece.work.group_size)
                rows[key].append(piece.work)
        claimed: list[tuple[int, int]] = []
        found = []
        for (op, source, phase, size), pieces in rows.items():
            exposed = intervals_without(
                intervals_without(union_of_intervals((w.start_ns, w.end_ns) for w in pieces), computing),
                union_of_intervals(claimed),
            )
            claimed += exposed  # two at once are exposed once
            found.append(
                Collective(
                    op=op,
                    source=source,
                    phase=phase,
                    backend="nccl",
                    group_size=size,
                    num=len(pieces),
                    bytes=sum(w.bytes for w in pieces),
                    seconds=sum(w.end_ns - w.start_ns for w in pieces) * _NS,
                    exposed_s=length(exposed) * _NS,
                )
            )
        return tuple(sorted(found, key=lambda c: -c.seconds))

    def _kernels(self, facts: DeviceFacts) -> tuple[DeviceKernel, ...]:
        rows: dict[tuple[str, CallPlace, int, int], list[int]] = defaultdict(list)
        for piece in self.linked:
            if piece.work.kind != "copy":
                key = (piece.work.name, piece.place, piece.work.num_blocks, _resident(piece.work, facts))
                rows[key].append(piece.work.end_ns - piece.work.start_ns)
        kernels = [
            DeviceKernel(
                name=short_kernel_name(name),
                source=place.source,
                phase=place.phase,
                num_launches=len(lengths_ns),
                seconds=sum(lengths_ns) * _NS,
                num_blocks=num_blocks,
                blocks_per_sm=resident,
                uses_matrix_units=uses_matrix_units(name),
                op=place.op,
            )
            for (name, place, num_blocks, resident), lengths_ns in rows.items()
        ]
        return tuple(sorted(kernels, key=lambda k: -k.seconds)[:_MOST_KERNELS])

    def _gaps(self) -> tuple[Gap, ...]:
        starts = [p.work.start_ns for p in self.linked]
        rows: dict[tuple[int, Cause], list[int]] = defaultdict(list)
        for start, end in self.gaps:
            index = bisect_left(starts, end)
            after = self.linked[index] if index < len(self.linked) else None
            rows[self._late(start, end, after)].append(end - start)
        found = [Gap(source=s, num=len(ns), seconds=sum(ns) * _NS, cause=cause) for (s, cause), ns in rows.items()]
        return tuple(sorted(found, key=lambda g: -g.seconds))

    def _late(self, start: int, end: int, after: Linked | None) -> tuple[int, Cause]:
        """The line during which the device idled from `start` to `end`, and why: what the host did for most of that time."""
        if after is None or after.call is None:
            return -1, "unknown"
        launch = after.call
        if launch.start_ns <= start or end - start <= _PIPELINE_NS:
            # Queued in time: the device's own latency, or a dependence between streams.
            return after.place.source, "unknown"
        for call in self._waits_between(start, launch):
            waited_ns = min(call.end_ns, launch.start_ns) - max(call.start_ns, start)
            # A wait that ended in this gap had let the queue run empty: what follows it is late for that reason.
            if call.start_ns <= start or waited_ns > (launch.start_ns - start) // 2:
                return self.place_of(call).source, "host-wait"
        if _is_copy_call(launch) and launch.end_ns - launch.start_ns > (end - start) // 2:
            return after.place.source, "copy"
        return after.place.source, "data" if after.place.phase == "data" else "late-launch"

    def _waits_between(self, start: int, launch: HostCall) -> list[HostCall]:
        """Waiting calls that reach past `start` and end before the launch, on threads that launch kernels.

        The backward is launched by a thread of autograd's, which begins when the user's thread has waited.
        """
        first = bisect_left(self._wait_ends, start + 1)
        mine = self._waits_by_end[first : bisect_left(self._wait_ends, launch.start_ns + 1)]
        return [c for c in mine if c.thread in self._kernel_threads]

    def _copies(self) -> tuple[Copy, ...]:
        computing = Cover((p.work.start_ns, p.work.end_ns) for p in self.linked if p.work.kind != "copy")
        after = self._syncs_of_copies()
        rows: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
        for piece in self.linked:
            work, call = piece.work, piece.call
            if work.kind != "copy":
                continue
            sync = after.get(work.correlation)
            is_async = call is None or ("Async" in call.name and sync is None)
            row = rows[piece.place.source, *copy_of(work.name), is_async]
            row[0] += 1
            row[1] += work.bytes
            row[2] += work.end_ns - work.start_ns
            row[3] += computing.within(work.start_ns, work.end_ns)
            row[4] += sum(c.end_ns - c.start_ns for c in (call, sync) if c is not None)
        copies = [
            Copy(
                source=key[0],  # type: ignore[arg-type]
                direction=key[1],  # type: ignore[arg-type]
                memory=key[2],  # type: ignore[arg-type]
                is_async=bool(key[3]),
                num=num,
                bytes=num_bytes,
                seconds=total * _NS,
                overlapped_s=overlapped * _NS,
                host_s=host * _NS,
            )
            for key, (num, num_bytes, total, overlapped, host) in rows.items()
        ]
        return tuple(sorted(copies, key=lambda c: -c.seconds))

    def _syncs_of_copies(self) -> dict[int, HostCall]:
        """The wait that follows a copy at once on its thread, by the copy's correlation."""
        found: dict[int, HostCall] = {}
        last: dict[int | str, HostCall] = {}
        for call in self.calls:
            before = last.get(call.thread)
            name = plain_name(call.name)
            if before is not None and name.endswith("StreamSynchronize"):
                if call.start_ns - before.end_ns < _SYNC_AFTER_COPY_NS:
                    found[before.correlation] = call
                del last[call.thread]
            elif _is_copy_call(call):
                last[call.thread] = call
            elif is_launch(name):
                last.pop(call.thread, None)
        return found

    def _waits(self) -> tuple[HostWait, ...]:
        rows: dict[tuple[int, str, str], list[int]] = defaultdict(list)
        for call in self.waits:
            place = self.place_of(call)
            rows[place.source, plain_name(call.name), place.op].append(call.end_ns - call.start_ns)
        found = [
            HostWait(source=s, call=name, num=len(ns), seconds=sum(ns) * _NS, op=op)
            for (s, name, op), ns in rows.items()
        ]
        return tuple(sorted(found, key=lambda w: -w.seconds))


def device_window(before: Iterable[DeviceWork], own: Sequence[DeviceWork], host_start_ns: int) -> tuple[int, int]:
    """The interval from when the device had finished what was launched `before` a step to the end of the step's `own` work.

    A device that had nothing to finish is free from the step's start on the host.
    """
    if not own:
        return host_start_ns, host_start_ns
    end_ns = max(w.end_ns for w in own)
    start_ns = max((w.end_ns for w in before), default=host_start_ns)
    start_ns = max(start_ns, host_start_ns)
    return min(start_ns, end_ns), end_ns


def device_spans(activity: Activity, *, origin_ns: int, most: int = 1500) -> tuple[tuple[Span, ...], int]:
    """The longest pieces of work as spans of the timeline (tracks 'device' and 'copy'), and how many were left out.

    `origin_ns` is the step's start on the host; kernels of a step may run after it ended there.
    """
    ranked = sorted(activity.linked, key=lambda p: p.work.start_ns - p.work.end_ns)
    longest = sorted(ranked[:most])
    spans = tuple(
        span_of(
            p.work._replace(name=short_kernel_name(p.work.name)),
            "copy" if p.work.kind == "copy" else "device",
            origin_ns=origin_ns,
            source=p.place.source,
        )
        for p in longest
    )
    return spans, len(ranked) - len(longest)


def plain_name(name: str) -> str:
    """A runtime call's name without the version that some profilers add.

    >>> plain_name("cudaStreamSynchronize_v3020")
    'cudaStreamSynchronize'
    """
    head, found, tail = name.rpartition("_v")
    return head if found and tail.isdigit() else name


def is_launch(name: str) -> bool:
    """Whether a runtime call gives the device work."""
    return "Launch" in name or "Memcpy" in name or "Memset" in name


def _is_copy_call(call: HostCall) -> bool:
    return "Memcpy" in call.name


def _resident(work: DeviceWork, facts: DeviceFacts) -> int:
    """Blocks of this kernel on one multiprocessor at once; 0 where the trace has no such figure."""
    if not (work.block_threads and facts.threads_per_sm and facts.registers_per_sm and facts.shared_bytes_per_sm):
        return 0
    return resident_blocks(
        block_threads=work.block_threads,
        registers=work.registers,
        shared_bytes=work.shared_bytes,
        threads_per_sm=facts.threads_per_sm,
        registers_per_sm=facts.registers_per_sm,
        shared_bytes_per_sm=facts.shared_bytes_per_sm,
    )
