"""The host's side of one step of a trace: which operator ran inside which, in which phase, called from which function."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Final

from flatout.check.traces.events import ELEMENT_BYTES, CallPlace, HostCall, HostOp
from flatout.check.traces.intervals import Interval, intervals_without, length, union_of_intervals
from flatout.check.traces.kineto import TraceFile
from flatout.core.records.distributed import Collective
from flatout.core.records.workload import Source

_NODE: Final = "autograd::engine::evaluate_function"
_DATA: Final = "enumerate(DataLoader)"
_OPTIMIZER: Final = "Optimizer."
_COLLECTIVE_PREFIXES: Final = ("gloo:", "mpi:", "ucc:")
"""Names of collectives that the host runs itself."""
_MOVES: Final = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::pin_memory", "aten::_pin_memory")
_NO_OPERATORS: Final = (
    "autograd::",
    "nccl:",
    "gloo:",
    "record_param_comms",
    "c10d::",
    "torch::autograd::",
    "Optimizer.",
)
_COMPILED: Final = re.compile(r"triton_[a-z]+_\w+$")
"""Kernels that Inductor wrote, as it names them where it launches them: triton_poi_fused_add_0."""
_FRAME: Final = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_LIBRARY_NAMES: Final = """
torch numpy triton torchvision torchaudio torchtext transformers accelerate datasets tokenizers peft trl diffusers lightning
pytorch_lightning lightning_fabric torchmetrics deepspeed apex megatron timm einops PIL cv2 sklearn scipy pandas tqdm wandb
tensorboard ignite fairscale xformers flash_attn torchao bitsandbytes safetensors huggingface_hub hydra omegaconf yaml rich click
typer matplotlib jax flax ray mlflow
"""
_LIBRARIES: Final = frozenset(_LIBRARY_NAMES.split())
"""Packages whose files the profiler names relative to where packages are installed; their lines are not the user's."""


class Nesting:
    """Events of one thread that lie inside one another: who is innermost when, who contains whom."""

    def __init__(self, events: Sequence[HostOp]) -> None:
        self.events = sorted(events, key=lambda e: (e.start_ns, -e.end_ns))
        self.parents: list[int] = []
        self.self_ns: list[int] = []
        self._times: list[int] = []
        self._innermost: list[int] = []
        stack: list[int] = []
        for index, event in enumerate(self.events):
            self._close(stack, event.start_ns)
            parent = stack[-1] if stack else -1
            self.parents.append(parent)
            own = event.end_ns - event.start_ns
            self.self_ns.append(own)
            if parent >= 0:
                self.self_ns[parent] -= own
            stack.append(index)
            self._switch(event.start_ns, index)
        self._close(stack, sys.maxsize)

    def at(self, moment_ns: int) -> int:
        """Index of the innermost event then; -1 when there was none."""
        found = bisect_right(self._times, moment_ns) - 1
        return self._innermost[found] if found >= 0 else -1

    def ancestors(self, index: int) -> Iterable[int]:
        """The events around one, innermost first, itself included."""
        while index >= 0:
            yield index
            index = self.parents[index]

    def _close(self, stack: list[int], moment_ns: int) -> None:
        while stack and self.events[stack[-1]].end_ns <= moment_ns:
            ended = stack.pop()
            self._switch(self.events[ended].end_ns, stack[-1] if stack else -1)

    def _switch(self, moment_ns: int, index: int) -> None:
        self._times.append(moment_ns)
        self._innermost.append(index)


class Lines:
    """The user's functions met in a trace, as source lines. Their line is the one where the function is defined."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._by_name: dict[str, int] = {}
        self._index: dict[tuple[str, int], int] = {}

    def index(self, name: str) -> int:
        """Index of the line of a Python function's event; -1 when it is not the user's."""
        if name not in self._by_name:
            self._by_name[name] = self._new(name)
        return self._by_name[name]

    def _new(self, name: str) -> int:
        frame = _FRAME.match(name)
        if frame is None or not is_user_file(frame["file"]):
            return -1
        key = (frame["file"], int(frame["line"]))
        if key not in self._index:
            self._index[key] = len(self.sources)
            self.sources.append(Source(file=key[0], line=key[1], function=frame["function"]))
        return self._index[key]


def is_user_file(file: str) -> bool:
    """Whether a file named in a trace is the user's: no built-in, no standard library, no installed package.

    >>> is_user_file("train.py"), is_user_file("torch/nn/modules/module.py"), is_user_file("/opt/lib/python3.11/json/decoder.py")
    (True, False, False)
    """
    if file.startswith("<") or "site-packages/" in file or "dist-packages/" in file:
        return False
    if re.search(r"/lib/python3\.\d+/", file):
        return False
    head = re.split(r"[/\\]", file)[0].removesuffix(".py")
    return head not in _LIBRARIES and head not in sys.stdlib_module_names


class HostStep:
    """One step on the host. `place_of` finds where a runtime call of it belongs."""

    def __init__(
        self,
        interval: Interval,
        *,
        thread: int | str,
        operators: Iterable[HostOp],
        annotations: Iterable[HostOp],
        functions: Iterable[HostOp],
        lines: Lines,
        phases: Sequence[tuple[int, int, str]] | None = None,
    ) -> None:
        """`phases` are disjoint intervals in order, where they are known from elsewhere; else the events tell."""
        self.start_ns, self.end_ns = interval
        self.thread = thread
        self.lines = lines
        self.nestings = _by_thread(o for o in operators if self._is_inside(o))
        self.annotations = [a for a in annotations if self._is_inside(a)]
        mine = [f for f in functions if f.start_ns < self.end_ns and f.end_ns > self.start_ns]
        self._functions = _by_thread(f for f in mine if lines.index(f.name) >= 0)
        self._modules = _by_thread(f for f in mine if f.name.startswith("nn.Module: "))
        self._forward = self._forward_places()
        self.phases = self._phases() if phases is None else list(phases)
        self._phase_starts = [start for start, _, _ in self.phases]

    def phase_at(self, moment_ns: int) -> str:
        """The phase then, by the thread that makes the steps."""
        found = bisect_right(self._phase_starts, moment_ns) - 1
        if found >= 0 and moment_ns < self.phases[found][1]:
            return self.phases[found][2]
        return "other"

    def place_of(self, call: HostCall) -> CallPlace:
        """Line, phase and operator of a runtime call."""
        nesting = self.nestings.get(call.thread)
        index = nesting.at(call.start_ns) if nesting is not None else -1
        phase = self.phase_at(call.start_ns)
        if nesting is None or index < 0:
            return CallPlace(self.source_at(call.thread, call.start_ns), phase, "")
        return CallPlace(self.source_of(nesting, index), phase, operator_name(nesting.events[index].name))

    def source_of(self, nesting: Nesting, index: int) -> int:
        """The user's function around an operator; for one of the backward that around the forward operator it belongs to."""
        return self.origin_of(nesting, index)[0]

    def origin_of(self, nesting: Nesting, index: int) -> tuple[int, str]:
        """The user's function around an operator, and its module as the profiler names it ('Linear_0'; '' without stacks).

        For an operator of the backward those of the forward operator it belongs to.
        """
        event = nesting.events[index]
        for outer in nesting.ancestors(index):
            node = nesting.events[outer]
            if node.name.startswith(_NODE) and node.sequence >= 0:
                return self._forward.get(node.sequence, (-1, ""))
        return self._origin_at(event)

    def source_at(self, thread: int | str, moment_ns: int) -> int:
        """The user's innermost function then; -1 without stacks."""
        return self.lines.index(_innermost(self._functions, thread, moment_ns))

    def _origin_at(self, event: HostOp) -> tuple[int, str]:
        module = _innermost(self._modules, event.thread, event.start_ns).removeprefix("nn.Module: ")
        return self.source_at(event.thread, event.start_ns), module

    def _is_inside(self, event: HostOp) -> bool:
        return self.start_ns <= event.start_ns < self.end_ns

    def _forward_places(self) -> dict[int, tuple[int, str]]:
        """The function and the module of the forward operator, by sequence number: the first operator with that number."""
        found: dict[int, tuple[int, str]] = {}
        nesting = self.nestings.get(self.thread)
        for event in nesting.events if nesting is not None else ():
            if event.sequence >= 0 and event.sequence not in found and not event.name.startswith(_NODE):
                found[event.sequence] = self._origin_at(event)
        return found

    def _phases(self) -> list[tuple[int, int, str]]:
        """Disjoint intervals with their phase, in order; what lies between is 'other'."""
        on_thread = [a for a in self.annotations if a.thread == self.thread]
        data = union_of_intervals(self._clipped(a) for a in on_thread if a.name.startswith(_DATA))
        optimizer = intervals_without(
            union_of_intervals(self._clipped(a) for a in on_thread if a.name.startswith(_OPTIMIZER)), data
        )
        nesting = self.nestings.get(self.thread)
        tops = [e for i, e in enumerate(nesting.events) if nesting.parents[i] < 0] if nesting is not None else []
        taken = union_of_intervals(data + optimizer)
        work = [e for e in tops if not e.name.startswith("autograd::") and not _is_within(e, taken)]
        backward = intervals_without(self._backward(work, taken), taken)
        work = [e for e in work if not _is_within(e, backward)]
        forward, transfer = self._forwards(work, backward, union_of_intervals(taken + backward))
        named = {"data": data, "optimizer": optimizer, "backward": backward, "forward": forward, "transfer": transfer}
        return sorted((start, end, name) for name, cover in named.items() for start, end in cover)

    def _backward(self, work: list[HostOp], taken: list[Interval]) -> list[Interval]:
        """Intervals from the first to the last node of each backward pass; a new pass begins after forward work or an optimizer.

        Collectives of the host that begin in a pass belong to it: the backward ends when they are done.
        """
        events = [e for n in self.nestings.values() for e in n.events if e.name.startswith(_NODE)]
        if events:
            events += [a for a in self.annotations if a.name.startswith("gloo:")]
        nodes = sorted(map(self._clipped, events))
        breaks = sorted([e.start_ns for e in work] + [start for start, _ in taken])
        passes: list[Interval] = []
        for start, end in nodes:
            if passes:
                last_start, last_end = passes[-1]
                is_new = bisect_right(breaks, start) > bisect_right(breaks, last_end)
                if not is_new or start <= last_end:
                    passes[-1] = (last_start, max(end, last_end))
                    continue
            passes.append((start, end))
        return passes

    def _forwards(
        self, work: list[HostOp], backward: list[Interval], taken: list[Interval]
    ) -> tuple[list[Interval], list[Interval]]:
        """Work up to each backward (or, without one, all of it); copies that lead it are the transfer."""
        edges = [self.start_ns, *(start for start, _ in backward)]
        forward: list[Interval] = []
        transfer: list[Interval] = []
        pairs = list(pairwise(edges)) or [(self.start_ns, self.end_ns)]
        for low, high in pairs:
            own = [e for e in work if low <= e.start_ns < high]
            lead = 0
            while lead < len(own) and own[lead].name in _MOVES:
                lead += 1
            if lead:
                transfer.append((own[0].start_ns, own[lead - 1].end_ns))
            if lead < len(own):
                end = high if backward else own[-1].end_ns
                forward.append((own[lead].start_ns, end))
        transfer = intervals_without(union_of_intervals(transfer), taken)
        return intervals_without(intervals_without(union_of_intervals(forward), taken), transfer), transfer

    def _clipped(self, event: HostOp) -> Interval:
        return max(event.start_ns, self.start_ns), min(event.end_ns, self.end_ns)


class DeviceClock:
    """What the device's clock would have shown at moments of the host: each moment, or when all launched before it was done."""

    def __init__(self, ends: Iterable[tuple[int, int]]) -> None:
        """`ends` are (launched, done) of each piece of work."""
        self._launched: list[int] = []
        self._done: list[int] = []
        latest = -sys.maxsize
        for launched, done in sorted(ends):
            latest = max(latest, done)
            self._launched.append(launched)
            self._done.append(latest)

    def on_device(self, moment_ns: int) -> int:
        found = bisect_right(self._launched, moment_ns) - 1
        return max(moment_ns, self._done[found]) if found >= 0 else moment_ns


def phase_seconds(step: HostStep, clock: Callable[[int], int]) -> dict[str, float]:
    """Seconds of each phase; `clock` takes the host's moments to the clock to count in."""
    seconds: dict[str, float] = defaultdict(float)
    at = step.start_ns
    for start, end, phase in [*step.phases, (step.end_ns, step.end_ns, "other")]:
        seconds["other"] += max(0, clock(start) - clock(at)) * 1e-9
        seconds[phase] += max(0, clock(end) - clock(start)) * 1e-9
        at = max(at, end)
    return {phase: s for phase, s in seconds.items() if s > 0}


def is_operator(name: str) -> bool:
    """Whether an event is an operator or a compiled kernel, no frame of autograd, collective or optimizer around some."""
    return ("::" in name and not name.startswith(_NO_OPERATORS)) or is_compiled(name)


def is_compiled(name: str) -> bool:
    """Whether an event is the launch of a kernel that Inductor wrote; its arguments are all that the kernel reads and writes.

    >>> is_compiled("triton_poi_fused_gelu_3"), is_compiled("aten::gelu"), is_compiled("triton")
    (True, False, False)
    """
    return _COMPILED.match(name) is not None


def operator_name(name: str) -> str:
    """'aten.mm' for 'aten::mm'; '' for what is no operator.

    >>> operator_name("aten::mm"), operator_name("autograd::engine::evaluate_function: MulBackward0")
    ('aten.mm', '')
    >>> operator_name("triton_poi_fused_gelu_3")
    'inductor.triton_poi_fused_gelu_3'
    """
    if is_compiled(name):
        return f"inductor.{name}"
    return name.replace("::", ".") if is_operator(name) else ""


def _by_thread(events: Iterable[HostOp]) -> dict[int | str, Nesting]:
    groups: dict[int | str, list[HostOp]] = defaultdict(list)
    for event in events:
        groups[event.thread].append(event)
    return {thread: Nesting(own) for thread, own in groups.items()}


def _innermost(threads: dict[int | str, Nesting], thread: int | str, moment_ns: int) -> str:
    """Name of a thread's innermost event then; '' when there was none."""
    nesting = threads.get(thread)
    index = nesting.at(moment_ns) if nesting is not None else -1
    return nesting.events[index].name if nesting is not None and index >= 0 else ""


def _is_within(event: HostOp, cover: list[Interval]) -> bool:
    found = bisect_right([start for start, _ in cover], event.start_ns) - 1
    return found >= 0 and event.start_ns < cover[found][1]


def host_collective_events(trace: TraceFile, step: HostStep) -> list[HostOp]:
    """Collectives of a step on the host's threads, in order."""
    events = (e for e in (*trace.annotations, *trace.operators) if e.name.startswith(_COLLECTIVE_PREFIXES))
    return sorted(e for e in events if step.start_ns <= e.start_ns < step.end_ns)


def host_collectives(trace: TraceFile, step: HostStep) -> tuple[Collective, ...]:
    """Collectives of a step by name and phase; exposed while no operator ran on any thread of the host."""
    mine = host_collective_events(trace, step)
    if not mine:
        return ()
    computing = union_of_intervals(
        (event.start_ns, event.end_ns)
        for nesting in step.nestings.values()
        for event in nesting.events
        if is_operator(event.name)
    )
    groups: dict[tuple[str, str], list[HostOp]] = defaultdict(list)
    for event in mine:
        groups[event.name, step.phase_at(event.start_ns)].append(event)
    rows = []
    for (name, phase), own in groups.items():
        backend, _, op = name.partition(":")
        exposed = intervals_without(union_of_intervals((e.start_ns, e.end_ns) for e in own), computing)
        rows.append(
            Collective(
                op=op,
                source=-1,
                phase=phase,
                backend=backend,
                group_size=max((e.group_size for e in own), default=0),
                num=len(own),
                bytes=sum(_bytes(e) for e in own),
                seconds=sum(e.end_ns - e.start_ns for e in own) * 1e-9,
                exposed_s=length(exposed) * 1e-9,
            )
        )
    return tuple(sorted(rows, key=lambda c: -c.seconds))


def _bytes(event: HostOp) -> int:
    """What one rank put in, by the shapes; 0 without them."""
    sizes = (
        prod(shape) * ELEMENT_BYTES.get(dtype, 0) for shape, dtype in zip(event.shapes, event.dtypes, strict=False)
    )
    return event.bytes or sum(sizes)
