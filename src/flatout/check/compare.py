"""Two runs side by side: what changed, line by line. Pure: Evidence and Diagnosis in, a Comparison out."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeVar, get_args

from flatout.core.errors import UsageError
from flatout.core.records.comparison import (
    LEAST_FRACTION,
    SAME_WORK_FRACTION,
    Comparison,
    Decision,
    FindingChange,
    LineChange,
    MovedFunction,
    Ratio,
    RunDifference,
    SizeChange,
    TimeChange,
)
from flatout.core.records.evidence import Evidence, Phase, Steps
from flatout.core.records.finding import Diagnosis, RankedFinding
from flatout.core.records.hardware import Machine
from flatout.machine.cost.accounting import group_by
from flatout.machine.measure.stats import Estimate, batched_median_estimate, ratio_of_estimates

_FEWEST_STEPS: Final = 6
"""With fewer values order statistics do not reach 95 % (flatout.machine.measure.stats.median_estimate)."""
_FEWEST_SAMPLES: Final = 8
_SURE: Final = 1.96
_SAME_FUNCTION: Final = 0.5
"""Functions of one name in two files are the same when they share this many of the lines that were recorded, as git's renames."""
_SAME_SPEED: Final = 0.20
"""Quick probes of one idle machine differ by up to this."""

T = TypeVar("T")
Key = tuple[str, ...]
Place = tuple[str, str]
"""A file, relative to the folder of the run, and a function in it."""
Kind = Literal["environment", "work", "command"]


class ComparedRun(NamedTuple):
    """One of the two runs."""

    evidence: Evidence
    diagnosis: Diagnosis


def comparison_of(before: ComparedRun, after: ComparedRun, *, threshold: float | None = None) -> Comparison:
    """What changed from `before` to `after`; with a `threshold` also whether the step is slower by more than that fraction.

    Raises UsageError when one of the two has no timed step.
    """
    for name, run in (("before", before), ("after", after)):
        if not run.evidence.steps.num_timed or run.evidence.steps.step_s <= 0:
            raise UsageError(
                f"the run {name} has no timed step (of {run.evidence.steps.num_observed} seen), and two step times are what "
                "is compared; check the script again with more steps"
            )
    one, two = before.evidence, after.evidence
    ratio = _ratio(one.steps.step_s, two.steps.step_s, _step(one.steps), _step(two.steps))
    assert ratio is not None
    moved = _moved_functions(one, two)
    files = {(m.file_before, m.function): m.file_after for m in moved}
    step = TimeChange(name="step", before_s=one.steps.step_s, after_s=two.steps.step_s, ratio=ratio)
    return Comparison(
        kind_before=one.steps.kind,
        kind_after=two.steps.kind,
        step=step,
        num_before=one.steps.num_timed,
        num_after=two.steps.num_timed,
        phases=tuple(_phases(one.steps, two.steps)),
        findings=tuple(_findings(before, after, files)),
        lines=tuple(_lines(one, two, files)),
        sizes=tuple(_sizes(one, two)),
        differences=tuple(_differences(one, two)),
        moved_functions=moved,
        decision=None if threshold is None else decide(ratio, threshold),
    )


def decide(ratio: Ratio, threshold: float) -> Decision:
    """Slower when the whole interval of the slowdown lies above the threshold, not slower when it lies at or below."""
    if ratio.low is not None and ratio.low - 1 > threshold:
        return Decision(threshold=threshold, outcome="slower")
    if ratio.high is not None and ratio.high - 1 <= threshold:
        return Decision(threshold=threshold, outcome="not slower")
    return Decision(threshold=threshold, outcome="cannot tell")


# ------------------------------------------------------------------------------------------------------------------ times


def _step(steps: Steps) -> Estimate | None:
    """The median step with its interval, the wider where consecutive steps are alike; None for too few steps."""
    low_s, high_s = steps.low_s, steps.high_s
    stretches = batched_median_estimate(steps.durations_s)
    if stretches is not None and stretches.value > 0:
        low_s = min(low_s, steps.step_s * stretches.low / stretches.value)
        high_s = max(high_s, steps.step_s * stretches.high / stretches.value)
    return _estimate(steps.step_s, low_s, high_s, num=steps.num_timed)


def _phase(steps: Steps, name: str) -> Estimate | None:
    low_s, high_s = steps.phase_intervals.get(name, (0.0, 0.0))
    return _estimate(steps.phases.get(name, 0.0), low_s, high_s, num=steps.num_timed)


def _samples(seconds: float, num: int) -> Estimate | None:
    """Sampled seconds: their number is a Poisson count, its interval taken on the logarithm's scale."""
    if num < _FEWEST_SAMPLES:
        return None
    factor = math.exp(_SURE / math.sqrt(num))
    return Estimate(value=seconds, low=seconds / factor, high=seconds * factor, confidence=0.95, num_samples=num)


def _estimate(value: float, low: float, high: float, *, num: int) -> Estimate | None:
    """None for too few values, and where an end is no time above 0 or the value lies outside."""
    if num < _FEWEST_STEPS or not 0 < low <= value <= high:
        return None
    return Estimate(value=value, low=low, high=high, confidence=0.95, num_samples=num)


def _ratio(before_s: float, after_s: float, before: Estimate | None, after: Estimate | None) -> Ratio | None:
    """None where one of the times is 0."""
    if before_s <= 0 or after_s <= 0:
        return None
    if before is None or after is None:
        return Ratio(value=after_s / before_s)
    ratio, low, high = ratio_of_estimates(after, before)
    return Ratio(value=ratio, low=low, high=high)


def _phases(one: Steps, two: Steps) -> Iterator[TimeChange]:
    """Every phase that took time in one of the runs, in the order of a step."""
    for name in dict.fromkeys((*get_args(Phase), *one.phases, *two.phases)):
        before_s, after_s = one.phases.get(name, 0.0), two.phases.get(name, 0.0)
        if before_s > 0 or after_s > 0:
            ratio = _ratio(before_s, after_s, _phase(one, name), _phase(two, name))
            yield TimeChange(name=name, before_s=before_s, after_s=after_s, ratio=ratio)


# ------------------------------------------------------------------------------------------------------------ moved files


def _moved_functions(one: Evidence, two: Evidence) -> tuple[MovedFunction, ...]:
    """Functions that are in another file now: by their names and recorded lines, those that share the most first."""
    before, after = _texts_of_functions(one), _texts_of_functions(two)
    gone, new = (sorted(a.keys() - b.keys()) for a, b in ((before, after), (after, before)))
    found = [
        (len(before[old] & after[now]) / max(len(before[old]), len(after[now])), old, now)
        for old in gone
        for now in new
        if old[1] == now[1]
    ]
    found = [pair for pair in found if pair[0] >= _SAME_FUNCTION]
    moved: dict[Place, Place] = {}
    for _, old, now in sorted(found, key=lambda pair: (-pair[0], not _same_name(pair[1][0], pair[2][0]), pair[1:])):
        if old not in moved and now not in moved.values():
            moved[old] = now
    return tuple(
        MovedFunction(function=function, file_before=file, file_after=moved[file, function][0])
        for file, function in sorted(moved)
    )


def _texts_of_functions(evidence: Evidence) -> dict[Place, set[str]]:
    """The recorded lines of every function that has one."""
    texts: dict[Place, set[str]] = defaultdict(set)
    for source in evidence.sources:
        if source.text:
            texts[_inside(source.file, evidence.workload.cwd), source.function].add(source.text)
    return texts


def _same_name(file: str, other: str) -> bool:
    return os.path.basename(file) == os.path.basename(other)


# --------------------------------------------------------------------------------------------------------------- findings


class _Placed(NamedTuple):
    """A finding with what it is matched by: the file within the folder of the run, and the line's function.

    `file_now` is the file in which that function is in the run after.
    """

    finding: RankedFinding
    file: str
    function: str
    file_now: str


def _findings(before: ComparedRun, after: ComparedRun, files: Mapping[Place, str]) -> Iterator[FindingChange]:
    """Appeared first, then vanished, then those that are in both; each in the order of their reports."""
    pairs, gone, new = _pair(
        _placed(before, files),
        _placed(after, {}),
        lambda p: (p.finding.rule, p.file_now, p.function, *_texts(p.finding)),
        lambda p: (p.finding.rule, os.path.basename(p.file_now), p.function, *_texts(p.finding)),
        lambda p: (p.finding.rule, p.file_now, *_texts(p.finding)),  # its function has another name now
    )
    for place in new:
        yield FindingChange(kind="appeared", before=None, after=place.finding, file_after=place.file)
    for place in gone:
        yield FindingChange(kind="vanished", before=place.finding, after=None, file_before=place.file)
    for old, now in pairs:
        has_moved = (old.file, old.finding.line) != (now.file, now.finding.line)
        yield FindingChange(
            kind="moved" if has_moved else "stayed",
            before=old.finding,
            after=now.finding,
            file_before=old.file,
            file_after=now.file,
        )


def _texts(finding: RankedFinding) -> tuple[str, ...]:
    """The user's line, and the library's below it where the cause lies there."""
    return (finding.text, *(frame.text for frame in finding.via[-1:]))


def _placed(run: ComparedRun, files: Mapping[Place, str]) -> list[_Placed]:
    functions = {(s.file, s.line): s.function for s in run.evidence.sources}
    placed = []
    for finding in run.diagnosis.findings:
        file = _inside(finding.file, run.evidence.workload.cwd)
        function = functions.get((finding.file, finding.line), "")
        placed.append(_Placed(finding, file, function, files.get((file, function), file)))
    return placed


def _pair(before: list[T], after: list[T], *keys: Callable[[T], Key]) -> tuple[list[tuple[T, T]], list[T], list[T]]:
    """Pairs, those only before, those only after: matched by the first key as far as it goes, then by the next."""
    pairs: list[tuple[T, T]] = []
    for key in keys:
        waiting = group_by(after, key)
        left = []
        for item in before:
            if same := waiting.get(key(item)):
                pairs.append((item, same.pop(0)))
            else:
                left.append(item)
        taken = {id(item) for _, item in pairs}
        before, after = left, [item for item in after if id(item) not in taken]
    return pairs, before, after


def _inside(file: str, cwd: str) -> str:
    """The path within `cwd`, where it lies there: two checkouts of one repository have different folders."""
    inside = cwd.rstrip("/") + "/"
    return file[len(inside) :] if cwd and file.startswith(inside) else file


# ------------------------------------------------------------------------------------------------------------------ lines


class _Line(NamedTuple):
    """A line's seconds in one run, and its operators' calls and FLOP; `num` counts samples, 0 where operators tell the time."""

    file: str
    function: str
    text: str
    line: int
    seconds: float
    num: int
    calls: float
    flop: float


def _lines(one: Evidence, two: Evidence, files: Mapping[Place, str]) -> Iterator[LineChange]:
    """Lines whose time changed by a hundredth of the step or more, and by more than sampling explains."""
    by_operators = bool(one.operators and two.operators)
    pairs, gone, new = _pair(
        _timed_lines(one, files, by_operators=by_operators),
        _timed_lines(two, {}, by_operators=by_operators),
        lambda a: (a.file, a.function, a.text),
        lambda a: (os.path.basename(a.file), a.function, a.text),
    )
    both: list[tuple[_Line | None, _Line | None]] = [*pairs, *((a, None) for a in gone), *((None, b) for b in new)]
    least_s = LEAST_FRACTION * max(one.steps.step_s, two.steps.step_s)
    changes = [_line_change(a, b) for a, b in both if _is_change(a, b, least_s)]
    yield from sorted(changes, key=lambda c: -abs(c.after_s - c.before_s))


def _timed_lines(evidence: Evidence, files: Mapping[Place, str], *, by_operators: bool) -> list[_Line]:
    """Every line with time in the main process: from the operators with their backward, else from the samples.

    Each in its file, or in that of `files`, where its function has moved there. A sampled line that started a backward pass is
    left out beside operators, since theirs went to the forward lines.
    """
    seconds: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    work: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    sources = {(s.file, s.line): s for s in evidence.sources}
    if by_operators:
        for operator in evidence.operators:
            if (source := evidence.source_of(operator.source)) is not None:
                seconds[source.file, source.line][0] += operator.total_s
                work[source.file, source.line][0] += operator.num_calls
                work[source.file, source.line][1] += operator.num_calls * operator.flop
    timed = set(seconds)
    for sampled in evidence.lines:
        source = evidence.source_of(sampled.source)
        if source is None or sampled.process != "main" or (source.file, source.line) in timed:
            continue
        if not (by_operators and sampled.phase == "backward"):
            seconds[source.file, source.line][0] += sampled.seconds
            seconds[source.file, source.line][1] += sampled.num_samples
    lines = []
    for (path, number), (total_s, num) in sorted(seconds.items()):
        source = sources[path, number]
        file = _inside(path, evidence.workload.cwd)
        place = files.get((file, source.function), file)
        calls, flop = work[path, number]
        lines.append(_Line(place, source.function, source.text, number, total_s, int(num), calls, flop))
    return lines


def _is_change(before: _Line | None, after: _Line | None, least_s: float) -> bool:
    if before is not None and after is not None:
        change = _line_change(before, after)
        is_sampled = before.num > 0 and after.num > 0
        is_clear = not is_sampled or (change.ratio is not None and change.ratio.direction != "unclear")
        return is_clear and abs(after.seconds - before.seconds) >= least_s
    only = before or after
    assert only is not None
    return only.seconds >= least_s and (only.num == 0 or only.num >= _FEWEST_SAMPLES)


def _line_change(before: _Line | None, after: _Line | None) -> LineChange:
    line = after or before
    assert line is not None
    before_s, after_s = before.seconds if before else 0.0, after.seconds if after else 0.0
    ratio = None
    if before is not None and after is not None:
        ratio = _ratio(before_s, after_s, _samples(before_s, before.num), _samples(after_s, after.num))
    return LineChange(
        file=line.file,
        function=line.function,
        text=line.text,
        line_before=before.line if before else None,
        line_after=after.line if after else None,
        before_s=before_s,
        after_s=after_s,
        ratio=ratio,
        calls_before=before.calls if before else 0.0,
        calls_after=after.calls if after else 0.0,
        flop_before=before.flop if before else 0.0,
        flop_after=after.flop if after else 0.0,
    )


# ------------------------------------------------------------------------------------------------- memory and differences


def _sizes(one: Evidence, two: Evidence) -> Iterator[SizeChange]:
    """The peak on every device that both runs saw."""
    after = {m.device: m.peak_bytes for m in two.memory}
    for memory in one.memory:
        if memory.device in after:
            yield SizeChange(device=memory.device, before_bytes=memory.peak_bytes, after_bytes=after[memory.device])


def _differences(one: Evidence, two: Evidence) -> Iterator[RunDifference]:
    """What differs besides times, that which takes the meaning from a ratio first."""
    a, b = one.workload, two.workload
    environment = [
        ("device", a.device, b.device),
        ("processor", _processor(one), _processor(two)),
        ("cores", a.num_cores, b.num_cores),
        ("threads", a.num_threads, b.num_threads),
        ("ranks", a.world_size, b.world_size),
        ("torch", a.torch, b.torch),
        ("Python", a.python, b.python),
    ]
    yield from _unequal("environment", environment)
    if one.machine is not None and two.machine is not None:
        yield from _speeds(one.machine, two.machine)
    work = [
        ("kind of step", one.steps.kind, two.steps.kind),
        ("batch size of the DataLoader", _batch_sizes(one), _batch_sizes(two)),
        ("parameters", a.num_parameters, b.num_parameters),
        ("trained parameters", a.trained_parameters, b.trained_parameters),
    ]
    yield from _unequal("work", work)
    flop = [sum(o.flop * o.num_calls for o in e.operators) for e in (one, two)]
    if min(flop) > 0 and abs(math.log(flop[1] / flop[0])) > SAME_WORK_FRACTION:
        yield RunDifference(kind="work", name="FLOP of a step", before=f"{flop[0]:.3g}", after=f"{flop[1]:.3g}")
    yield from _unequal("command", [("command", " ".join(a.command), " ".join(b.command))])
    old, now = ({s.name: s.value for s in w.settings} for w in (a, b))
    names = sorted({*old, *now})
    yield from _unequal("command", [(n, old.get(n, "not set"), now.get(n, "not set")) for n in names])


def _unequal(kind: Kind, rows: Iterable[tuple[str, object, object]]) -> Iterator[RunDifference]:
    """Rows of (name, before, after) that differ; '' is unknown and differs from nothing."""
    for name, before, after in rows:
        if before != after and "" not in (before, after):
            yield RunDifference(kind=kind, name=name, before=str(before), after=str(after))


def _speeds(one: Machine, two: Machine) -> Iterator[RunDifference]:
    """Measured ceilings that differ by more than measuring them again would."""
    rates = [("copy", "GB/s", one.copy_bytes_per_s, two.copy_bytes_per_s)]
    for dtype in one.matmul_flop_per_s.keys() & two.matmul_flop_per_s.keys() & {"float32", "bfloat16"}:
        rates.append((f"{dtype} product", "GFLOP/s", one.matmul_flop_per_s[dtype], two.matmul_flop_per_s[dtype]))
    for name, unit, before, after in sorted(rates):
        if min(before, after) > 0 and abs(math.log(after / before)) > _SAME_SPEED:
            shown = [f"{rate / 1e9:.3g} {unit}" for rate in (before, after)]
            yield RunDifference(kind="environment", name=f"measured {name}", before=shown[0], after=shown[1])


def _processor(evidence: Evidence) -> str:
    return evidence.machine.cpu_model if evidence.machine is not None else ""


def _batch_sizes(evidence: Evidence) -> str:
    return ", ".join(str(size) for size in sorted({u.batch_size for u in evidence.loaders if u.batch_size}))
