"""Runs the rules over Evidence, merges claims on the same time, ranks by time at stake, and says what stays unexplained.

What takes memory and no time is told after what takes time; what would fill the memory within a day comes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from flatout.check.laws import lawful_costs, lawful_floor, lawful_floors
from flatout.core.errors import HardwareError
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import BrokenLaw, Diagnosis, Finding, HotLine, Note, RankedFinding, Rule
from flatout.core.records.hardware import Machine
from flatout.core.records.memory import Memory
from flatout.core.records.trial import Trial
from flatout.machine.cost.accounting import group_by, setting_of, speed_up
from flatout.machine.cost.roofline import Regime, operation_floor

SMALLEST_FRACTION: Final = 0.04
"""A saving below this share of the step is not reported, however sure: the noise of a shared machine is of that size."""
_MOST_OF_A_PASS: Final = 0.95
"""Of an evaluation pass, however large the share of the forward is that a cure does away with."""

_OF_THE_HOST: Final = ("overhead", "input")
"""Regimes whose time is the host's: a busy device hides it."""

SMALLEST_PEAK_FRACTION: Final = 0.10
"""A saving below this share of the peak is not reported: a batch one tenth larger is no other experiment."""
_HORIZON_S: Final = 86_400.0
"""Growth is reported when it would fill the memory within a day of steps like these."""

_OVERLAP: Final = 0.5
_CAUSE_FIRST: Final = 0.25
"""A cause with this share of a symptom's saving comes before the symptom: it is what a person can mend at a line."""
_NUM_HOT_LINES: Final = 40
_PRODUCTS: Final = re.compile("conv|mm$|linear$|matmul$")
"""Operators whose FLOP are all computed: attention may leave out what a mask hides."""
_LONG_ENOUGH: Final = 0.01
"""Of the step: what is shorter is timed too roughly to tell a rate."""
_CUDNNS: Final = re.compile("conv|cudnn|miopen|lstm|gru|rnn")
"""Operators that cuDNN runs; it may use TF32 unless told otherwise (torch's notes on CUDA, TensorFloat-32)."""


def proposed_trials(evidence: Evidence, rules: Iterable[Rule]) -> tuple[Trial, ...]:
    """The trials that would price what the rules suspect, each once."""
    wanted: dict[Trial, None] = {}
    if evidence.steps.num_timed:
        for rule in rules:
            if rule.propose is not None:
                wanted.update(dict.fromkeys(rule.propose(evidence)))
    return tuple(wanted)


def diagnose(evidence: Evidence, rules: Iterable[Rule]) -> Diagnosis:
    """What costs a step its time, by these rules."""
    rules = tuple(rules)
    whole_s = evidence.steps.whole_s
    titles = {r.id: r.title for r in rules}
    general = {r.id for r in rules if r.is_general}
    found = [_with_evaluation(f, evidence) for r in rules for f in r.check(evidence)] if whole_s > 0 else []
    found = [f if f.rule in general else _beside_the_device(f, evidence) for f in found]
    least_s = max(SMALLEST_FRACTION * whole_s, evidence.steps.noise_s)
    worthy = [f for f in found if _middle(f) >= least_s]
    heavy = [f for f in found if _middle(f) < least_s and _is_heavy(f, evidence)]
    merged = _merge(worthy, general, evidence)
    lawful, too_dear = lawful_costs((f for f, _ in merged), step_s=whole_s, noise_s=least_s)
    absorbed = {(f.rule, f.where): others for f, others in merged}
    timed = [_ranked(f, absorbed[f.rule, f.where], evidence, titles) for f in lawful if _middle(f) >= least_s]
    without_time = (msgspec.structs.replace(f, cost_s=0.0, saved_s=(0.0, 0.0)) for f in heavy)
    findings = _with_memory(timed, [_ranked(f, [], evidence, titles) for f in without_time])
    explained_s = sum(_middle(f) for f in lawful)
    floor_s, lines, too_high = _floor(evidence)
    broken = too_high + too_dear
    named = {f.rule for f in findings} | {m for f in findings for m in f.merged} | {law.rule for law in broken}
    return Diagnosis(
        step_s=whole_s,
        floor_s=floor_s,
        explained_s=explained_s,
        unexplained_s=max(0.0, whole_s - (floor_s or 0.0) - explained_s),
        findings=findings,
        notes=tuple(_notes(evidence, rules, findings)),
        hot_lines=lines,
        checked=tuple(r.id for r in rules if r.id not in named),
        refused=tuple(dict.fromkeys(f"{_words(t.trial)}: {t.refused}" for t in evidence.trials if t.refused)),
        broken=broken,
    )


def _with_evaluation(finding: Finding, evidence: Evidence) -> Finding:
    """The finding with what it costs, and its cure saves, in evaluation passes too: they run the same module's forward."""
    evaluation_s = evidence.steps.phases.get("evaluation", 0.0)
    forward_s = evidence.steps.phases.get("forward", 0.0)
    if not evaluation_s or not forward_s or finding.cost_s <= 0 or "evaluation" in finding.phases:
        return finding
    rows = [evidence.operators[i] for i in finding.operators]
    if any(o.phase == "evaluation" for o in rows):
        return finding
    mine_s = sum(o.total_s for o in rows if o.phase == "forward" and o.module)
    share = min(_MOST_OF_A_PASS, mine_s / forward_s) / finding.cost_s
    longer = 1 + evaluation_s * share
    low, high = (longer * s for s in finding.saved_s)
    return msgspec.structs.replace(finding, cost_s=longer * finding.cost_s, saved_s=(low, high))


def _beside_the_device(finding: Finding, evidence: Evidence) -> Finding:
    """The finding with no more saved than a busy device allows.

    Host time gains what the device idles, and the device's time for the operators that go. (Measured findings without operators,
    and those of general rules, know the device's share themselves.)
    """
    device_s = evidence.steps.device_s
    is_hosts = finding.regime in _OF_THE_HOST and (bool(finding.operators) or finding.basis == "estimate")
    if device_s is None or not is_hosts:
        return finding
    idle_s = max(0.0, evidence.steps.whole_s - device_s)
    most_s = idle_s + sum(evidence.operators[i].op_s for i in finding.operators)
    low, high = finding.saved_s
    return msgspec.structs.replace(finding, saved_s=(min(low, most_s), min(high, most_s)))


def _middle(finding: Finding) -> float:
    return sum(finding.saved_s) / 2


def _merge(findings: list[Finding], general: set[str], evidence: Evidence) -> list[tuple[Finding, list[str]]]:
    """Findings by time at stake, each with the ids of weaker ones that claim mostly the same time."""
    merged: list[tuple[Finding, list[str]]] = []
    specific = sorted((f for f in findings if f.rule not in general), key=_middle, reverse=True)
    for finding in specific + sorted((f for f in findings if f.rule in general), key=_middle, reverse=True):
        over = next((k for k in merged if _overlap(finding, k[0], evidence) >= _OVERLAP), None)
        if over is None and finding.rule in general:
            explained_s = sum(_middle(f) for f, _ in merged if f.rule not in general)
            if explained_s >= _OVERLAP * _middle(finding):
                over = merged[0]
        if over is None:
            merged.append((finding, []))
        elif finding.rule != over[0].rule and finding.rule not in over[1]:
            over[1].append(finding.rule)
    best_general_s = max((_middle(f) for f, _ in merged if f.rule in general), default=0.0)

    def order(item: tuple[Finding, list[str]]) -> tuple[bool, float]:
        finding = item[0]
        is_cause = finding.rule not in general and _middle(finding) >= _CAUSE_FIRST * best_general_s
        return is_cause, _middle(finding)

    return sorted(merged, key=order, reverse=True)


def _overlap(weaker: Finding, stronger: Finding, evidence: Evidence) -> float:
    """Share of the weaker finding's time that the stronger one claims too."""
    theirs = set(stronger.operators)
    total_s = sum(evidence.steps.phases.get(p, 0.0) for p in weaker.phases)
    both_s = sum(evidence.steps.phases.get(p, 0.0) for p in weaker.phases if p in stronger.phases)
    both_s += sum(evidence.operators[i].total_s for i in theirs if evidence.operators[i].phase in weaker.phases)
    for index in weaker.operators:
        operator = evidence.operators[index]
        total_s += operator.total_s
        if index in theirs or operator.phase in stronger.phases:
            both_s += operator.total_s
    if total_s:
        return min(1.0, both_s / total_s)
    # A general finding comes after the causes and may still be the larger: then no cause on its line explains it.
    is_same_line = weaker.where is not None and weaker.where == stronger.where and _middle(weaker) <= _middle(stronger)
    return 1.0 if is_same_line and weaker.rule != stronger.rule and not stronger.phases else 0.0


def _memory_of(finding: Finding, evidence: Evidence) -> Memory | None:
    return next((m for m in evidence.memory if m.device == finding.device), None)


def _steps_until_full(finding: Finding, memory: Memory | None) -> float | None:
    """Steps until growth meets the end of the memory; None when it does not grow or the end is not known."""
    if memory is None or memory.total_bytes is None or finding.growth_bytes_per_step <= 0:
        return None
    used_bytes = memory.measured_peak_bytes or memory.peak_bytes
    return max(0, memory.total_bytes - used_bytes) / finding.growth_bytes_per_step


def _is_heavy(finding: Finding, evidence: Evidence) -> bool:
    """Whether a finding is worth telling for its memory alone."""
    memory = _memory_of(finding, evidence)
    if memory is None:
        return False
    steps = _steps_until_full(finding, memory)
    is_filling = steps is not None and steps * evidence.steps.whole_s <= _HORIZON_S
    return is_filling or (finding.saved_bytes > 0 and finding.saved_bytes >= SMALLEST_PEAK_FRACTION * memory.peak_bytes)


def _with_memory(timed: list[RankedFinding], heavy: list[RankedFinding]) -> tuple[RankedFinding, ...]:
    """Growth that fills the memory first, the soonest leading; then time; then bytes of the peak."""
    filling = sorted((f for f in heavy if f.steps_until_full is not None), key=lambda f: f.steps_until_full or 0.0)
    large = sorted((f for f in heavy if f.steps_until_full is None), key=lambda f: -f.saved_bytes)
    return (*filling, *timed, *large)


def _ranked(finding: Finding, merged: list[str], evidence: Evidence, titles: dict[str, str]) -> RankedFinding:
    whole_s = evidence.steps.whole_s
    memory = _memory_of(finding, evidence)
    low, high = finding.saved_s
    where = finding.where
    return RankedFinding(
        rule=finding.rule,
        title=titles[finding.rule],
        file=where.file if where is not None else "",
        line=where.line if where is not None else 0,
        regime=finding.regime or "overhead",
        cost_s=finding.cost_s,
        share=finding.cost_s / whole_s,
        gain=(speed_up(whole_s, low), speed_up(whole_s, high)),
        because=finding.because,
        edit=finding.edit,
        text=where.text if where is not None else "",
        also=finding.also,
        module=finding.module,
        levers=finding.levers,
        basis=finding.basis,
        merged=tuple(merged),
        saved_bytes=finding.saved_bytes,
        peak_bytes=memory.peak_bytes if memory is not None else 0,
        growth_bytes_per_step=finding.growth_bytes_per_step,
        steps_until_full=_steps_until_full(finding, memory),
        device=finding.device,
    )


def _notes(evidence: Evidence, rules: Iterable[Rule], findings: tuple[RankedFinding, ...]) -> Iterator[Note]:
    reported = {(rule, f.file, f.line) for f in findings for rule in (f.rule, *f.merged)}
    for rule in rules:
        for note in rule.note(evidence) if rule.note is not None else ():
            if note.where is None or (note.rule, note.where.file, note.where.line) not in reported:
                yield note


def _floor(evidence: Evidence) -> tuple[float | None, tuple[HotLine, ...], tuple[BrokenLaw, ...]]:
    """The roofline's time for the step's operators, the lines that take longest beside their own floor, and what cannot be so."""
    machine = evidence.machine
    if machine is None or not evidence.operators:
        return None, (), ()
    machine = _with_rates_reached(machine, evidence)
    rows = []
    elsewhere_s = 0.0
    # One row a line of the user's, whatever lines of a library ran below it.
    by_line = group_by(evidence.operators, lambda o: _line(evidence, o))
    for operators in by_line.values():
        floors = [_floor_of(machine, o, evidence) for o in operators]
        floor_s = sum(f for f, _ in floors)
        seconds = sum(o.total_s for o in operators)
        line = evidence.source_of(operators[0].source)
        if line is None:
            elsewhere_s += min(floor_s, seconds)
            continue
        rows.append(
            HotLine(
                source=line,
                seconds=seconds,
                python_s=sum(o.python_s for o in operators),
                flop=round(sum(o.flop * o.num_calls for o in operators)),
                bytes=round(sum(o.bytes * o.num_calls for o in operators)),
                floor_s=floor_s,
                regime=_regime(seconds, floor_s, floors),
            )
        )
    lines, broken = lawful_floors(rows)
    step_floor_s, too_high = lawful_floor(elsewhere_s + sum(r.floor_s or 0.0 for r in lines), evidence.steps.whole_s)
    return step_floor_s, tuple(sorted(lines, key=lambda r: -r.seconds)[:_NUM_HOT_LINES]), broken + too_high


def _line(evidence: Evidence, operator: Operator) -> tuple[str, int] | None:
    source = evidence.source_of(operator.source)
    return None if source is None else (source.file, source.line)


def _with_rates_reached(machine: Machine, evidence: Evidence) -> Machine:
    """The machine with rates no lower than the step's own products and convolutions reached: a rate that is passed is no ceiling.

    oneDNN's convolutions reach twice the rate of a square product on an AMD EPYC with AVX-512.
    """
    rates = dict(machine.matmul_flop_per_s)
    for operator in evidence.operators:
        if _PRODUCTS.search(operator.op) and operator.op_s > _LONG_ENOUGH * evidence.steps.step_s:
            dtype = _dtype_of(machine, operator, evidence)
            rates[dtype] = max(rates.get(dtype, 0.0), operator.flop * operator.num_calls / operator.op_s)
    return msgspec.structs.replace(machine, matmul_flop_per_s=rates)


def _floor_of(machine: Machine, operator: Operator, evidence: Evidence) -> tuple[float, Regime]:
    dtype = _dtype_of(machine, operator, evidence)
    try:
        floor = operation_floor(machine, flop=operator.flop, traffic_bytes=operator.bytes, dtype=dtype)
    except HardwareError:  # no rate for this dtype was measured here: the traffic alone is a floor too
        floor = operation_floor(machine, flop=0, traffic_bytes=operator.bytes, dtype=dtype)
    kind: Regime = "compute" if floor.compute_s > floor.bandwidth_s else "bandwidth"
    return floor.floor_s * operator.num_calls, kind


def _dtype_of(machine: Machine, operator: Operator, evidence: Evidence) -> str:
    """The dtype whose rate counts for this operator, as the machine's figures name it."""
    known = machine.matmul_flop_per_s
    dtype = next((t.dtype for t in operator.inputs + operator.outputs if t.dtype in known), "float32")
    return "tf32" if dtype == "float32" and "tf32" in known and _may_use_tf32(operator, evidence) else dtype


def _may_use_tf32(operator: Operator, evidence: Evidence) -> bool:
    """Whether float32 products of this operator may run in TF32: cuDNN's unless it is forbidden, others where it is allowed."""
    if _CUDNNS.search(operator.op):
        return setting_of(evidence, "cudnn_allow_tf32") != "False"
    return setting_of(evidence, "float32_matmul_precision") in ("high", "medium")


def _regime(seconds: float, floor_s: float, floors: list[tuple[float, Regime]]) -> Regime:
    """Overhead when the line takes over five times its floor; else what bounds the larger part of its floor."""
    if seconds > 5 * floor_s:
        return "overhead"
    compute_s = sum(f for f, kind in floors if kind == "compute")
    return "compute" if compute_s >= floor_s / 2 else "bandwidth"


def _words(trial: Trial) -> str:
    """The trial in half a line."""
    name = type(trial).__name__.removeprefix("Time")
    variant = getattr(trial, "variant", "")
    return f"{name.lower()} {variant}".strip()
