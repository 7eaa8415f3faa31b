"""Divides the undisturbed step into parts that do not overlap: each named, each measured, together the step and no more.

The phases of the light steps are the frame: nothing in a phase is longer than the phase. Inside one, operators take what the deep
steps measured of them (brought to the time of a light step); the rest of the phase is the host's, and the samples by line say on
which line or in which package. On a device the frame is its own clock: busy by operators, idle by the lines that it waited for.
What no measurement names stays unexplained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from flatout.core.records.evidence import Evidence, LineTime, Operator
from flatout.core.records.finding import PartKind, PartLine, PartOfStep
from flatout.core.records.workload import Source, short_place
from flatout.machine.cost.families import BARE_KERNEL, OTHER_FAMILY, family_of

WHOLE_PHASES: Final = {
    "data": "waiting for data",
    "transfer": "copies to the device",
    "evaluation": "evaluation",
    "compile": "compiling",
}
"""Phases that are a part as they are: what runs in them is not the step's own work, or nothing recorded it."""
_MOST_LINES: Final = 3
_FEWEST_SAMPLES: Final = 4
"""A line with fewer samples is not named by itself: half of them could be chance."""
_SMALLEST_FRACTION: Final = 0.02
"""Lines and packages below this share of the step are told together."""
_MOST_DISPATCHES: Final = 6.0
"""So many times what the probe measured for an operator, calling one may take in a step; with its gradient, autograd's engine
between two operators of a backward: in a large model its caches are cold (4.7 to 28 us on an EPYC in seven scripts, 4.8 in the
probe). Beyond, something else ran."""
_MOST_S_PER_FAULT: Final = 4e-6
"""Fault, zeroing, and unmapping at the end: 1.5 to 2 us in a virtual machine on an EPYC, less on bare metal (measured)."""
_MOST_STRETCH: Final = 1.5
"""Samples that cover less of the step than this allows leave a hole that is not theirs to fill."""
_FEWEST_ACCOUNTED: Final = 0.75
"""A quartile of the steps of one script on a busy machine is 4 to 27 % shorter than their median (16 of 20 scripts, measured)."""
_DISPATCH: Final = "dispatch"
_ENGINE: Final = "autograd engine"
_REST: Final = "forward and other"
"""The frame of all that is neither a backward nor an optimizer's step."""
_ROUNDING: Final = 1e-9

_Line = tuple[str, int]
_Place = tuple[str, int, str]
"""File, line, and the package that runs below the line ('' for none)."""


class Breakdown(NamedTuple):
    """The parts, the longest first, and what they leave of the step."""

    parts: tuple[PartOfStep, ...]
    unexplained_s: float


class _Row(NamedTuple):
    """An operator's seconds in the undisturbed step, divided: its kernel, the kernel's page faults, the call."""

    operator: Operator
    kernel_s: float
    faults_s: float
    dispatch_s: float
    floor_s: float | None

    @property
    def seconds(self) -> float:
        return self.kernel_s + self.faults_s + self.dispatch_s

    def scaled(self, factor: float) -> _Row:
        return self._replace(
            kernel_s=self.kernel_s * factor, faults_s=self.faults_s * factor, dispatch_s=self.dispatch_s * factor
        )


def timed_operators(evidence: Evidence) -> tuple[Operator, ...]:
    """The operators whose times the parts of a step are made of: of compiled code those of the profiled step."""
    return evidence.kernel_operators or evidence.operators


def break_down(evidence: Evidence, floors_s: Sequence[float | None], *, explained_s: float = 0.0) -> Breakdown:
    """Divide the observed step into parts that do not overlap.

    Args:
        evidence: what was observed.
        floors_s: the roofline's seconds of each of its `timed_operators`, all calls of a step together; None where there is none.
        explained_s: what findings account for. Where that is more than all parts, the difference is a part of its own.
    """
    whole_s = evidence.steps.whole_s
    if whole_s <= 0:
        return Breakdown((), 0.0)
    is_device = evidence.steps.device_s is not None
    parts = _merged(_on_device(evidence, floors_s) if is_device else _on_host(evidence, floors_s), whole_s)
    named_s = sum(p.seconds for p in parts)
    if named_s > whole_s:  # two clocks, each right to some per mille
        parts = [_scaled(p, whole_s / named_s) for p in parts]
        named_s = whole_s
    if (more_s := explained_s - named_s) > _ROUNDING * whole_s:
        basis = "the findings' own measurements"
        parts.append(PartOfStep(kind="cause", name="what the causes account for besides", seconds=more_s, basis=basis))
        named_s = explained_s
    ordered = tuple(sorted(parts, key=lambda p: -p.seconds))
    unexplained_s = max(0.0, whole_s - sum(p.seconds for p in ordered))
    return Breakdown(ordered, unexplained_s if unexplained_s > _ROUNDING * whole_s else 0.0)


# ------------------------------------------------------------------------------------------------------------- on a CPU


def _on_host(evidence: Evidence, floors_s: Sequence[float | None]) -> Iterator[PartOfStep]:
    """Frame by frame: communication, kernels, dispatch, and the lines and packages of what is left."""
    budgets = _budgets(evidence)
    rows = _rows(evidence, floors_s)
    samples = _Samples(evidence, budgets)
    for frame, budget_s in budgets.items():
        communication = _scaled_to([*_communication(evidence, frame)], budget_s)
        yield from communication
        left_s = budget_s - sum(p.seconds for p in communication)
        if frame in WHOLE_PHASES:
            yield _whole_phase(frame, left_s, samples.lines_of(frame))
            continue
        left_s *= _accounted_fraction(evidence)
        mine = [r for r in rows if _frame(r.operator.phase) == frame]
        recorded_s = sum(r.seconds for r in mine)
        if recorded_s > left_s:
            mine = [r.scaled(left_s / recorded_s) for r in mine]
        yield from _operators(evidence, mine)
        host_s = max(0.0, left_s - sum(r.seconds for r in mine))
        if frame == "backward":
            engine = _engine(evidence, mine)
            places = samples.host_of(evidence, frame, mine, without=_backward_lines(evidence))
            lines = _scaled_to([*_host_parts(evidence, places)], host_s)
            yield from lines
            if engine is not None:
                left_s = host_s - sum(p.seconds for p in lines)
                yield from _scaled_to([engine], left_s)
        else:
            yield from _scaled_to([*_host_parts(evidence, samples.host_of(evidence, frame, mine))], host_s)


def _budgets(evidence: Evidence) -> dict[str, float]:
    """Seconds of each frame, together no more than the step and all that comes between steps."""
    budgets: dict[str, float] = defaultdict(float)
    for phase, seconds in evidence.steps.phases_of_whole.items():
        if seconds > 0:
            budgets[_frame(phase)] += seconds
    return budgets


def _frame(phase: str) -> str:
    """The frame of a phase: where forward ends is known only when the step is over, so operators and samples know no better."""
    return phase if phase in WHOLE_PHASES or phase in ("backward", "optimizer") else _REST


def _whole_phase(phase: str, seconds: float, lines: Iterable[PartLine]) -> PartOfStep:
    kind: PartKind = "data" if phase == "data" else "phase"
    basis = "time stamps at the borders of phases; lines by samples"
    lines = tuple(lines)
    longest_s = sum(line.seconds for line in lines)
    scale = min(1.0, seconds / longest_s) if longest_s > 0 else 1.0
    lines = tuple(PartLine(source=line.source, seconds=line.seconds * scale) for line in lines)
    return PartOfStep(kind=kind, name=WHOLE_PHASES[phase], seconds=seconds, lines=lines, basis=basis)


def _rows(evidence: Evidence, floors_s: Sequence[float | None]) -> list[_Row]:
    """The operators with the seconds of an undisturbed step, each divided into kernel, page faults and dispatch."""
    scale = _to_timed_steps(evidence)
    call_s = evidence.machine.dispatch_s if evidence.machine is not None else 0.0
    rows = []
    for operator, floor_s in zip(evidence.operators, floors_s, strict=True):
        seconds = scale * operator.op_s
        if operator.bytes:
            dispatch_s = min(seconds, operator.num_calls * call_s)
            rows.append(_Row(operator, seconds - dispatch_s, 0.0, dispatch_s, floor_s))
        else:  # no kernel runs in it: what it took beyond a call is another's
            dispatch_s = min(seconds, _MOST_DISPATCHES * operator.num_calls * call_s)
            rows.append(_Row(operator, 0.0, 0.0, dispatch_s, floor_s))
    return _with_faults(evidence, rows)


def _accounted_fraction(evidence: Evidence) -> float:
    """The share of an undisturbed step that the recorded steps can speak for.

    Recording makes a step longer. Where the recorded ones were shorter by more than steps differ, something else was in the
    undisturbed ones (another process, say), and their operators were stretched to fill it.
    """
    agreement = evidence.observing.deep_agreement
    return 1.0 if agreement is None else min(1.0, agreement / _FEWEST_ACCOUNTED)


def _to_timed_steps(evidence: Evidence) -> float:
    """The factor that brings the operators of the light steps near the recorded ones to the timed step."""
    nearby_s = evidence.observing.nearby_step_s
    growth = evidence.steps.step_s / nearby_s if nearby_s else 1.0
    return growth * _accounted_fraction(evidence)


def _with_faults(evidence: Evidence, rows: list[_Row]) -> list[_Row]:
    """Rows with the kernel's time for page faults, shared out by the new memory that each writes."""
    pages = evidence.fresh_pages
    if pages is None:
        return rows
    faults_s = min(pages.kernel_s, pages.faults * _MOST_S_PER_FAULT)
    new_bytes = [_new_bytes(r.operator) for r in rows]
    per_byte_s = faults_s / total if (total := sum(new_bytes)) else 0.0
    found = []
    for row, num_bytes in zip(rows, new_bytes, strict=True):
        mine_s = min(row.kernel_s, per_byte_s * num_bytes)
        found.append(row._replace(kernel_s=row.kernel_s - mine_s, faults_s=mine_s))
    return found


def _new_bytes(operator: Operator) -> float:
    """Elements that an operator writes to memory it has just taken; operators in place and views take none."""
    if not operator.bytes or operator.op.endswith("_"):
        return 0.0
    return operator.num_calls * sum(t.num_elements for t in operator.outputs)


def _operators(evidence: Evidence, rows: list[_Row]) -> Iterator[PartOfStep]:
    """Kernels by family, the page faults of them all, and what calling them takes."""
    families: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        families[_family(row.operator)].append(row)
    for name, members in families.items():
        if (seconds := sum(r.kernel_s for r in members)) > 0:
            yield PartOfStep(
                kind="kernels",
                name=name,
                seconds=seconds,
                floor_s=_floor(members),
                num_calls=sum(r.operator.num_calls for r in members if r.kernel_s > 0),
                lines=_lines(evidence, ((r.operator.source, r.kernel_s) for r in members)),
                basis="operators of the recorded steps, brought to the time of an undisturbed one",
            )
    if (seconds := sum(r.faults_s for r in rows)) > 0:
        lines = _lines(evidence, ((r.operator.source, r.faults_s) for r in rows))
        basis = "the kernel's accounting of page faults in undisturbed steps"
        yield PartOfStep(kind="memory", name="page faults of new memory", seconds=seconds, lines=lines, basis=basis)
    if (seconds := sum(r.dispatch_s for r in rows)) > 0:
        num_calls = sum(r.operator.num_calls for r in rows)
        lines = _lines(evidence, ((r.operator.source, r.dispatch_s) for r in rows))
        basis = "the probe's time of an operator on four numbers"
        yield PartOfStep(
            kind="dispatch", name=_DISPATCH, seconds=seconds, num_calls=num_calls, lines=lines, basis=basis
        )


def _family(operator: Operator) -> str:
    if operator.phase == "optimizer":
        return "optimizer's kernels"
    if operator.op.startswith(BARE_KERNEL):
        return f"kernel {operator.op.removeprefix(BARE_KERNEL)}"
    family = family_of(operator.op)
    return f"operator {operator.op.removeprefix('aten.')}" if family == OTHER_FAMILY else family


def _floor(rows: Iterable[_Row]) -> float | None:
    """The floor of a family's kernels, none of them above its time; None where it is not known of any of them.

    Where a compiled kernel's FLOP and bytes are not known, it counts with its own time.
    """
    known = [r for r in rows if r.floor_s is not None and r.kernel_s > 0]
    if not any(is_priced(r.operator) for r in known):
        return None
    return sum(min(r.floor_s or 0.0, r.kernel_s) if is_priced(r.operator) else r.kernel_s for r in known)


def is_priced(operator: Operator) -> bool:
    """Whether an operator's FLOP or bytes are known: without them it has no floor."""
    return bool(operator.flop or operator.bytes)


def _engine(evidence: Evidence, rows: list[_Row]) -> PartOfStep | None:
    """What autograd's engine may take between the operators of a backward; None where there are none."""
    num_calls = sum(r.operator.num_calls for r in rows)
    if evidence.machine is None or not num_calls:
        return None
    most_s = _MOST_DISPATCHES * evidence.machine.dispatch_grad_s * num_calls
    lines = _lines(evidence, ((s, most_s) for s in evidence.backward_sources))
    basis = "the backward less its operators, as far as the probe's time of an operator allows"
    return PartOfStep(kind="dispatch", name=_ENGINE, seconds=most_s, num_calls=num_calls, lines=lines, basis=basis)


def _communication(evidence: Evidence, frame: str) -> Iterator[PartOfStep]:
    """Collectives of a frame that nothing hides, by name."""
    seconds: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for collective in evidence.collectives:
        if _frame(collective.phase) == frame and collective.exposed_s > 0:
            seconds[collective.op].append((collective.source, collective.exposed_s))
    for op, rows in seconds.items():
        yield PartOfStep(
            kind="communication",
            name=f"communication, {op}",
            seconds=sum(s for _, s in rows),
            lines=_lines(evidence, rows),
            basis="exposed time of the collectives in undisturbed steps",
        )


# ------------------------------------------------------------------------------------------------------------- samples


class _Sampled(NamedTuple):
    seconds: float
    num_samples: int


class _Samples:
    """What the sampler found by frame, line and package, as seconds of the whole step."""

    def __init__(self, evidence: Evidence, budgets: dict[str, float]) -> None:
        self._by_frame: dict[str, dict[_Place, _Sampled]] = defaultdict(dict)
        self._evidence = evidence
        rows = [r for r in evidence.lines if r.process == "main"]
        total_s = sum(r.seconds for r in rows)
        # They are of the mean step, the phases of the median one. Too many in one frame say nothing of the others.
        scale = min(_MOST_STRETCH, max(1.0, evidence.steps.whole_s / total_s)) if total_s > 0 else 1.0
        frame_of = _frames(evidence, budgets)
        for row in rows:
            if row.source < 0:
                continue
            place = _place(evidence, row.source)
            frame = frame_of(place, row)
            before = self._by_frame[frame].get(place, _Sampled(0.0, 0))
            seconds = before.seconds + scale * row.seconds
            self._by_frame[frame][place] = _Sampled(seconds, before.num_samples + row.num_samples)

    def lines_of(self, frame: str) -> tuple[PartLine, ...]:
        """The lines that take most of a frame, packages below them together."""
        seconds: dict[_Line, float] = defaultdict(float)
        for (file, line, _), sampled in self._by_frame[frame].items():
            seconds[file, line] += sampled.seconds
        return _part_lines(self._evidence, seconds)

    def host_of(
        self, evidence: Evidence, frame: str, rows: Iterable[_Row], *, without: frozenset[_Line] = frozenset()
    ) -> dict[_Place, _Sampled]:
        """By line and package, the samples of a frame less the operators that ran there."""
        operators_s: dict[_Place, float] = defaultdict(float)
        for row in rows:
            if row.operator.source >= 0:
                operators_s[_place(evidence, row.operator.source)] += row.seconds
        host = {}
        for place, sampled in self._by_frame[frame].items():
            seconds = sampled.seconds - operators_s[place]
            if seconds > 0 and (place[0], place[1]) not in without:
                host[place] = sampled._replace(seconds=seconds)
        return host


def _frames(evidence: Evidence, budgets: dict[str, float]) -> Callable[[_Place, LineTime], str]:
    """The frame that a sample belongs to.

    A sample of an unwatched step carries the phase of a guess: a step that was long for another reason counts as one with an
    evaluation. Lines that step an optimizer or call a backward are known, whatever the guess.
    """
    known = {(s.file, s.line): "optimizer" for s in evidence.sources_of(o.source for o in evidence.optimizers)}
    known |= dict.fromkeys(_backward_lines(evidence), "backward")

    def frame_of(place: _Place, row: LineTime) -> str:
        frame = _frame(row.phase)
        if frame == _REST or row.phase == "evaluation":
            frame = known.get((place[0], place[1]), frame)
        return frame if frame in budgets else _REST

    return frame_of


def _host_parts(evidence: Evidence, places: dict[_Place, _Sampled]) -> Iterator[PartOfStep]:
    """Packages by name, and the script's own lines."""
    basis = "samples of the running line, less the operators recorded there"
    packages: dict[str, dict[_Line, float]] = defaultdict(lambda: defaultdict(float))
    for (file, line, package), sampled in places.items():
        if package:
            packages[package][file, line] += sampled.seconds
        else:
            lines = _part_lines(evidence, {(file, line): sampled.seconds})
            is_sure = sampled.num_samples >= _FEWEST_SAMPLES
            name = _line_name(file, line) if is_sure else ""
            yield PartOfStep(kind="python", name=name, seconds=sampled.seconds, lines=lines, basis=basis)
    for package, by_line in packages.items():
        yield PartOfStep(
            kind="package",
            name=package,
            seconds=sum(by_line.values()),
            lines=_part_lines(evidence, by_line),
            basis=basis,
        )


def _backward_lines(evidence: Evidence) -> frozenset[_Line]:
    return frozenset((s.file, s.line) for s in evidence.sources_of(evidence.backward_sources))


# ---------------------------------------------------------------------------------------------------------- on a device


_IDLE: Final = {"host-wait": "device idle after the host waited for it", "copy": "device idle during copies"}
_LAUNCHES: Final = "device idle, launches"
_PYTHON: Final = "device idle, Python between launches"


def _on_device(evidence: Evidence, floors_s: Sequence[float | None]) -> Iterator[PartOfStep]:
    """Busy by operators, idle by what the device waited for, and what comes between steps by its phase."""
    steps = evidence.steps
    busy_s = min(steps.device_s or 0.0, steps.step_s)
    rows = [_Row(o, o.op_s, 0.0, 0.0, f) for o, f in zip(timed_operators(evidence), floors_s, strict=True)]
    kernels = _scaled_to([*_operators(evidence, [r for r in rows if r.kernel_s > 0])], busy_s)
    yield from kernels
    if not evidence.kernel_operators:
        yield from _scaled_to([*_unowned_kernels(evidence)], busy_s - sum(p.seconds for p in kernels))
    yield from _scaled_to([*_idle(evidence)], steps.step_s - busy_s)
    between = {
        "evaluation": steps.evaluation_s,
        "data": steps.restart_s,
        "compile": min(steps.occasional_s, steps.phases.get("compile", 0.0)),
    }
    yield from (_whole_phase(phase, seconds, ()) for phase, seconds in between.items() if seconds > 0)


def _unowned_kernels(evidence: Evidence) -> Iterator[PartOfStep]:
    """Kernels that no recorded operator launched, by their own names."""
    step = evidence.device_step
    basis = "the profiler's kernels of a step"
    for kernel in step.kernels if step is not None else ():
        if not kernel.op:
            lines = _lines(evidence, [(kernel.source, kernel.seconds)])
            yield PartOfStep(
                kind="kernels", name=f"kernel {kernel.name}", seconds=kernel.seconds, lines=lines, basis=basis
            )


def _idle(evidence: Evidence) -> Iterator[PartOfStep]:
    """Gaps of the device by cause; without a profiled step, the phase in which the host waits for data."""
    step = evidence.device_step
    if step is None:
        if (seconds := evidence.steps.phases.get("data", 0.0) - evidence.steps.restart_s) > 0:
            yield _whole_phase("data", seconds, ())
        return
    gaps: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for gap in step.gaps:
        gaps[gap.cause].append((gap.source, gap.seconds))
    for cause, rows in gaps.items():
        seconds, lines = sum(s for _, s in rows), _lines(evidence, rows)
        basis = "gaps between kernels on the device's clock"
        if cause == "data":
            yield PartOfStep(kind="data", name=WHOLE_PHASES["data"], seconds=seconds, lines=lines, basis=basis)
        elif cause == "late-launch":
            yield from _late_launches(evidence, rows, basis)
        elif cause in _IDLE:
            kind: PartKind = "wait" if cause == "host-wait" else "idle"
            yield PartOfStep(kind=kind, name=_IDLE[cause], seconds=seconds, lines=lines, basis=basis)


def _late_launches(evidence: Evidence, gaps: Iterable[tuple[int, float]], basis: str) -> Iterator[PartOfStep]:
    """Idle time by line: as much as launching the line's operators takes the host, the rest is its Python."""
    call_s = evidence.machine.dispatch_s if evidence.machine is not None else 0.0
    launches_s: dict[int, float] = defaultdict(float)
    for operator in evidence.operators:
        launches_s[operator.source] += operator.num_calls * call_s
    launching, python = [], []
    for source, seconds in gaps:
        mine_s = min(seconds, launches_s[source])
        launching.append((source, mine_s))
        python.append((source, seconds - mine_s))
    for name, rows in ((_LAUNCHES, launching), (_PYTHON, python)):
        seconds, lines = sum(s for _, s in rows), _lines(evidence, rows)
        yield PartOfStep(kind="idle", name=name, seconds=seconds, lines=lines, basis=basis)


# -------------------------------------------------------------------------------------------------------------- merging


def _merged(parts: Iterable[PartOfStep], whole_s: float) -> list[PartOfStep]:
    """Parts of one kind and name as one; lines of Python and packages that take little of the step told together."""
    groups: dict[tuple[PartKind, str], list[PartOfStep]] = defaultdict(list)
    for part in parts:
        if part.seconds > 0:
            groups[part.kind, part.name].append(part)
    found: list[PartOfStep] = []
    small: list[PartOfStep] = []
    for (kind, name), members in groups.items():
        part = _together(members, name)
        is_small = kind == "python" and (not name or part.seconds < _SMALLEST_FRACTION * whole_s)
        (small if is_small else found).append(part)
    if small:
        num_lines = len({(line.source.file, line.source.line) for p in small for line in p.lines})
        found.append(_together(small, "Python on one other line" if num_lines == 1 else "Python on other lines"))
    return found


def _together(parts: list[PartOfStep], name: str) -> PartOfStep:
    seconds: dict[_Line, float] = defaultdict(float)
    sources: dict[_Line, Source] = {}
    for line in (line for p in parts for line in p.lines):
        at = (line.source.file, line.source.line)
        seconds[at] += line.seconds
        sources.setdefault(at, line.source)
    longest = sorted(seconds, key=lambda at: -seconds[at])[:_MOST_LINES]
    floors = [p.floor_s for p in parts if p.floor_s is not None]
    return PartOfStep(
        kind=parts[0].kind,
        name=name,
        seconds=sum(p.seconds for p in parts),
        floor_s=sum(floors) if floors else None,
        num_calls=sum(p.num_calls for p in parts),
        lines=tuple(PartLine(source=sources[at], seconds=seconds[at]) for at in longest),
        basis=parts[0].basis,
    )


def _scaled_to(parts: list[PartOfStep], most_s: float) -> list[PartOfStep]:
    """The parts as they are, or shortened so that they add up to `most_s`."""
    total_s = sum(p.seconds for p in parts)
    if total_s <= most_s or total_s <= 0:
        return parts
    return [_scaled(p, max(0.0, most_s) / total_s) for p in parts]


def _scaled(part: PartOfStep, factor: float) -> PartOfStep:
    lines = tuple(PartLine(source=line.source, seconds=line.seconds * factor) for line in part.lines)
    floor_s = None if part.floor_s is None else min(part.floor_s, part.seconds * factor)
    return PartOfStep(
        kind=part.kind,
        name=part.name,
        seconds=part.seconds * factor,
        floor_s=floor_s,
        num_calls=part.num_calls,
        lines=lines,
        basis=part.basis,
    )


# ---------------------------------------------------------------------------------------------------------------- lines


def _place(evidence: Evidence, index: int) -> _Place:
    source = evidence.source_of(index)
    if source is None:
        return "", 0, ""
    package = source.library.replace("\\", "/").partition("/")[0].partition(":")[0].removesuffix(".py")
    return source.file, source.line, package


def _lines(evidence: Evidence, rows: Iterable[tuple[int, float]]) -> tuple[PartLine, ...]:
    """The lines that take most, of (index of a source, seconds)."""
    seconds: dict[_Line, float] = defaultdict(float)
    for index, spent_s in rows:
        if (source := evidence.source_of(index)) is not None:
            seconds[source.file, source.line] += spent_s
    return _part_lines(evidence, seconds)


def _part_lines(evidence: Evidence, seconds: dict[_Line, float]) -> tuple[PartLine, ...]:
    sources: dict[_Line, Source] = {}
    for source in evidence.sources:
        sources.setdefault((source.file, source.line), source)
    longest = sorted((at for at in seconds if at in sources), key=lambda at: -seconds[at])[:_MOST_LINES]
    return tuple(PartLine(source=sources[at], seconds=seconds[at]) for at in longest)


def _line_name(file: str, line: int) -> str:
    return f"Python at {short_place(file, line)}"
