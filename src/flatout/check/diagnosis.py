"""Runs the rules over Evidence, merges claims on the same time, ranks by time at stake, and says what stays unexplained.

What takes memory and no time is told after what takes time; what would fill the memory within a day comes first.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from flatout.check.breakdown import break_down, is_priced, timed_operators
from flatout.check.gather import gathered, gathered_notes
from flatout.check.laws import lawful_costs, lawful_floor, lawful_floors
from flatout.check.libraries.table import with_settings
from flatout.check.stakes import proposals
from flatout.check.timed_step import in_timed_step
from flatout.core import units
from flatout.core.errors import HardwareError
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import BrokenLaw, Diagnosis, Finding, HotLine, KernelTime, Note, RankedFinding, Rule
from flatout.core.records.hardware import Machine
from flatout.core.records.memory import Memory
from flatout.core.records.trial import Trial
from flatout.machine.cost.accounting import group_by, speed_up
from flatout.machine.cost.lines import line_finder, source_of_line
from flatout.machine.cost.matrix_units import runs_in_tf32
from flatout.machine.cost.roofline import Regime, operation_floor

SMALLEST_FRACTION: Final = 0.04
"""A saving below this share of the step is not reported, however sure: the noise of a shared machine is of that size."""
_DISTURBED_FRACTION: Final = 0.1
"""The same on a machine that other processes keep busy, where the interval of the median may be half of it (two threads on two
cores, one of them taken: +-43 % of a step, measured), while shares of the step and trials in turns still hold."""
_MOST_OF_A_PASS: Final = 0.95
"""Of an evaluation pass, however large the share of the forward is that a cure does away with."""

_OF_THE_HOST: Final = ("overhead", "input")
"""Regimes whose time is the host's: a busy device hides it."""

SMALLEST_PEAK_FRACTION: Final = 0.10
"""A saving below this share of the peak is not reported: a batch one tenth larger is no other experiment."""
_HORIZON_S: Final = 86_400.0
"""Growth is reported when it would fill the memory within a day of steps like these."""

_WORTH_A_CHANGE: Final = 1.15
"""Gain from which another precision or compiling is told as a finding where nothing is wrong."""

AbsorbingFinding = tuple[Finding, list[str]]
"""A finding, and the rules whose findings it absorbed."""

_OVERLAP: Final = 0.5
_BETTER_FOUNDED: Final = 1.15
"""A measured saving absorbs an estimated one that is larger by no more than this."""
_CAUSE_FIRST: Final = 0.25
"""A cause with this share of a symptom's saving comes before the symptom: it is what a person can mend at a line."""
_NUM_HOT_LINES: Final = 40
_NUM_KERNELS: Final = 60
_PRODUCTS: Final = re.compile("conv|mm$|linear$|matmul$")
"""Operators whose FLOP are all computed: attention may leave out what a mask hides."""
_LONG_ENOUGH: Final = 0.01
"""Of the step: what is shorter is timed too roughly to tell a rate."""


def diagnose(evidence: Evidence, rules: Iterable[Rule]) -> Diagnosis:
    """What costs a step its time, by these rules."""
    rules, evidence = tuple(rules), in_timed_step(evidence)
    whole_s = evidence.steps.whole_s
    titles = {r.id: r.title for r in rules}
    general = {r.id for r in rules if r.is_general}
    rewriting = frozenset(r.id for r in rules if r.rewrites_line)
    cures = {r.id for r in rules if r.is_cure}
    checked = (_with_evaluation(f, evidence) for r in rules for f in r.check(evidence))
    found = gathered(with_settings(checked, evidence, rewriting=rewriting)) if whole_s > 0 else []
    found = [f if f.rule in general else _beside_the_device(f, evidence) for f in found]
    least_s = _least_s(evidence)
    worthy = [f for f in found if _middle(f) >= least_s]
    heavy = [f for f in found if _middle(f) < least_s and _is_heavy(f, evidence)]
    priced = _price(
        [f for f in worthy if f.rule not in cures], [f for f in worthy if f.rule in cures], general, evidence
    )
    # Code for a CPU in which nothing is wrong is as it should be; that it could compute somewhat faster is worth a remark.
    is_in_order = evidence.workload.device == "cpu" and not priced.causes
    # Memory that is taken anew in every step is a fault, not another way to compute.
    compute_cures = [f for f in priced.cures if f.regime != "capacity"]
    remarkable = [f for f in compute_cures if is_in_order and speed_up(whole_s, _middle(f)) < _WORTH_A_CHANGE]
    cures_on_top: list[AbsorbingFinding] = [(f, []) for f in priced.cures if f not in remarkable]
    timed = [
        _ranked(f, others, evidence, titles, is_cure=f.rule in cures)
        for f, others in _causes_first([*priced.causes, *cures_on_top], general | cures)
    ]
    without_time = (msgspec.structs.replace(f, cost_s=0.0, saved_s=(0.0, 0.0)) for f in heavy)
    advice = [_ranked(f, others, evidence, titles) for f, others in priced.advice]
    findings = (*_with_memory(timed, [_ranked(f, [], evidence, titles) for f in without_time]), *advice)
    explained_s = max(
        sum(_middle(f) for f, _ in priced.causes), max((_middle(f) for f, _ in cures_on_top), default=0.0)
    )
    floor_s, lines, too_high = _floor(evidence)
    broken = too_high + priced.broken
    breakdown = break_down(evidence, _operator_floors(evidence), explained_s=explained_s)
    named = {f.rule for f in findings} | {law.rule for law in broken}
    named |= {f.rule for f in (*priced.cures, *priced.besides)}
    named |= {rule for f in findings for rule in f.merged}
    remarks = [_remark(f, whole_s) for f in (*remarkable, *priced.besides)]
    return Diagnosis(
        step_s=whole_s,
        floor_s=floor_s,
        explained_s=explained_s,
        unexplained_s=breakdown.unexplained_s,
        findings=findings,
        notes=(*remarks, *gathered_notes(_notes(evidence, rules, findings))),
        hot_lines=lines,
        checked=tuple(r.id for r in rules if r.id not in named),
        refused=tuple(dict.fromkeys(_refusals(evidence, rules))),
        broken=broken,
        parts=breakdown.parts,
        kernels=_kernels_above_floor(evidence),
    )


class _Attribution(NamedTuple):
    """Findings within the laws: causes by rank, cures of a whole module, advice, and what was left out."""

    causes: list[AbsorbingFinding]
    cures: list[Finding]
    besides: list[Finding]
    """Cures of time that findings claim already: in their place, not on top of them."""
    advice: list[AbsorbingFinding]
    broken: tuple[BrokenLaw, ...]


def _price(causes: list[Finding], cures: list[Finding], general: set[str], evidence: Evidence) -> _Attribution:
    """Causes share the step; a cure of a whole module gains from their time and from other cures', and is judged by itself."""
    whole_s = evidence.steps.whole_s
    least_s = _least_s(evidence)
    merged = _merge(causes, general, evidence)
    in_order = [(f, others) for f, others in _causes_first(merged, general) if not f.advice]
    lawful, broken = lawful_costs(in_order, step_s=whole_s, noise_s=least_s)
    worth = [(f, others) for f, others in lawful if _middle(f) >= least_s]
    # A cause whose time others claim, by their better reasons, is no cause that was found to be in order.
    ranked = {f.rule for f, _ in worth}
    claimed = list(dict.fromkeys(f.rule for f, _ in lawful if f.rule not in ranked))
    # A cure gains from time that causes and other cures claim too. What does not fit into the step beside them is a remark.
    left_s = whole_s - sum(f.cost_s for f, _ in worth)
    of_all: list[Finding] = []
    besides: list[Finding] = []
    for cure in sorted(cures, key=_middle, reverse=True):
        alone, too_dear = lawful_costs([(cure, [])], step_s=whole_s, noise_s=least_s)
        broken += too_dear
        for finding, _ in alone:
            fits = finding.saved_s[1] <= left_s
            (of_all if fits else besides).append(msgspec.structs.replace(finding, cost_s=finding.saved_s[1]))
            left_s -= fits * finding.saved_s[1]
    causes_of_step = [(f, others + (claimed if number == 0 else [])) for number, (f, others) in enumerate(worth)]
    return _Attribution(
        causes=causes_of_step,
        cures=of_all,
        besides=besides,
        advice=[(f, others) for f, others in merged if f.advice],
        broken=broken,
    )


def _least_s(evidence: Evidence) -> float:
    """The least saving that is reported: the noise of the steps, but not all of what other processes did to them.

    They make all of a step longer alike; what a cause takes of it stays.
    """
    whole_s, noise_s = evidence.steps.whole_s, evidence.steps.noise_s
    if evidence.load is not None and evidence.load.is_disturbed:
        noise_s = min(noise_s, _DISTURBED_FRACTION * whole_s)
    return max(SMALLEST_FRACTION * whole_s, noise_s)


def _with_evaluation(finding: Finding, evidence: Evidence) -> Finding:
    """The finding with what it costs, and its cure saves, in evaluation passes too: they run the same module's forward."""
    forward_s = evidence.steps.phases.get("forward", 0.0)
    evaluation_s = min(evidence.steps.phases.get("evaluation", 0.0), _most_of_evaluation_s(evidence, forward_s))
    if not evaluation_s or not forward_s or finding.cost_s <= 0 or "evaluation" in finding.phases:
        return finding
    rows = [evidence.operators[i] for i in finding.operators]
    if any(o.phase == "evaluation" for o in rows):
        return finding
    mine_s = sum(o.total_s for o in rows if o.phase == "forward" and o.module)
    # The Python of a model whose forward is a loop of calls (a solver) is no phase of its own, and evaluation has it too.
    share = min(_MOST_OF_A_PASS, mine_s / (forward_s + evidence.steps.phases.get("other", 0.0))) / finding.cost_s
    longer = 1 + evaluation_s * share
    low, high = (longer * s for s in finding.saved_s)
    return msgspec.structs.replace(finding, cost_s=longer * finding.cost_s, saved_s=(low, high))


def _most_of_evaluation_s(evidence: Evidence, forward_s: float) -> float:
    """What forward passes in evaluation can take of a step: no more than one in training for each batch of another loader.

    The rest of evaluation is its loaders' workers, and what is done with the results.
    """
    loaders = [u for u in evidence.loaders if u.fetches > 0]
    if len(loaders) < 2:
        return math.inf
    training = min(loaders, key=lambda u: abs(math.log(u.fetches)))  # a batch a step, or nearest to it
    others = [u for u in loaders if u is not training]
    usual = max(1, training.batch_size)
    return forward_s * sum(u.fetches * max(1.0, u.batch_size / usual) for u in others)


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


def _weight(finding: Finding) -> float:
    """Seconds saved, a little more where they were measured: of two names for one time, the better founded one is told."""
    return _middle(finding) * (1.0 if finding.basis == "estimate" else _BETTER_FOUNDED)


def _merge(findings: list[Finding], general: set[str], evidence: Evidence) -> list[AbsorbingFinding]:
    """Findings, each with the ids of weaker ones that claim mostly the same time."""
    merged: list[AbsorbingFinding] = []
    specific = sorted((f for f in findings if f.rule not in general), key=_weight, reverse=True)
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
    return merged


def _causes_first(findings: Iterable[AbsorbingFinding], others: set[str]) -> list[AbsorbingFinding]:
    """By time at stake; causes that save a good part of it before the findings of other rules: symptoms, and cures of all."""
    findings = list(findings)
    best_other_s = max((_middle(f) for f, _ in findings if f.rule in others), default=0.0)

    def order(row: AbsorbingFinding) -> tuple[bool, float]:
        finding = row[0]
        is_cause = finding.rule not in others and _middle(finding) >= _CAUSE_FIRST * best_other_s
        return is_cause, _middle(finding)

    return sorted(findings, key=order, reverse=True)


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


def _ranked(
    finding: Finding,
    merged: list[str],
    evidence: Evidence,
    titles: dict[str, str],
    *,
    is_cure: bool = False,
) -> RankedFinding:
    whole_s = evidence.steps.whole_s
    memory = _memory_of(finding, evidence)
    low, high = finding.saved_s
    where = finding.where
    gain = (speed_up(whole_s, low), speed_up(whole_s, high))
    return RankedFinding(
        rule=finding.rule,
        title=titles[finding.rule],
        file=where.file if where is not None else "",
        line=where.line if where is not None else 0,
        regime=finding.regime or "overhead",
        cost_s=0.0 if finding.advice else finding.cost_s,
        share=0.0 if finding.advice else finding.cost_s / whole_s,
        gain=(1.0, 1.0) if finding.advice else gain,
        advice=finding.advice,
        throughput=gain if finding.advice else (1.0, 1.0),
        because=finding.because,
        edit=finding.edit,
        text=where.text if where is not None else "",
        also=tuple(source for source in finding.also if not source.is_installed),
        module=finding.module,
        levers=finding.levers,
        basis=finding.basis,
        merged=tuple(merged),
        saved_bytes=finding.saved_bytes,
        peak_bytes=memory.peak_bytes if memory is not None else 0,
        growth_bytes_per_step=finding.growth_bytes_per_step,
        steps_until_full=_steps_until_full(finding, memory),
        device=finding.device,
        via=where.via if where is not None else (),
        is_cure=is_cure,
    )


def _remark(cure: Finding, step_s: float) -> Note:
    """What a cure of the whole module gains, where that is no finding."""
    gain = units.speedup((speed_up(step_s, cure.saved_s[0]), speed_up(step_s, cure.saved_s[1])))
    founded = "by a trial" if cure.basis == "trial" else "by what was timed" if cure.basis == "timed" else "estimated"
    return Note(rule=cure.rule, where=cure.where, text=f"a step could be {gain} faster, {founded}: {cure.edit}")


def _notes(evidence: Evidence, rules: Iterable[Rule], findings: tuple[RankedFinding, ...]) -> Iterator[Note]:
    reported = {(rule, f.file, f.line) for f in findings for rule in (f.rule, *f.merged)}
    for rule in rules:
        for note in rule.note(evidence) if rule.note is not None else ():
            if note.where is None or (note.rule, note.where.file, note.where.line) not in reported:
                yield note


def _floor(evidence: Evidence) -> tuple[float | None, tuple[HotLine, ...], tuple[BrokenLaw, ...]]:
    """The roofline's time for the step's operators, the lines that take longest beside their own floor, and what cannot be so."""
    machine, known = evidence.machine, evidence.operators or evidence.kernel_operators
    if machine is None or not known:
        return None, (), ()
    machine = _with_rates_reached(machine, evidence)
    rows = []
    elsewhere_s = 0.0
    line_of = line_finder(evidence)
    for at, operators in group_by(known, lambda o: line_of(o.source)).items():
        floors = [_floor_of(machine, o, evidence) for o in operators]
        floor_s = sum(f for f, _ in floors)
        seconds = sum(o.total_s for o in operators)
        line = source_of_line(evidence, operators[0].source, at) if at is not None else None
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


def _operator_floors(evidence: Evidence) -> list[float | None]:
    """The roofline's seconds of each operator, all its calls of a step together."""
    if evidence.machine is None:
        return [None] * len(evidence.operators)
    machine = _with_rates_reached(evidence.machine, evidence)
    return [_floor_of(machine, operator, evidence)[0] for operator in timed_operators(evidence)]


def _kernels_above_floor(evidence: Evidence) -> tuple[KernelTime, ...]:
    """Operators on a device that take longer than their floor, or whose floor is not known; those with most above it first."""
    if evidence.steps.device_s is None or evidence.machine is None:
        return ()
    sums: dict[tuple[str, tuple[tuple[int, ...], ...]], list[tuple[Operator, float]]] = defaultdict(list)
    for operator, floor_s in zip(timed_operators(evidence), _operator_floors(evidence), strict=True):
        if operator.op_s > 0:
            sums[operator.op, tuple(t.shape for t in operator.inputs)].append((operator, floor_s or 0.0))
    found = [
        KernelTime(
            op=op,
            shapes=shapes,
            num_calls=sum(o.num_calls for o, _ in members),
            seconds=sum(o.op_s for o, _ in members),
            floor_s=sum(min(f, o.op_s) for o, f in members) if is_priced(members[0][0]) else None,
        )
        for (op, shapes), members in sums.items()
    ]
    found.sort(key=lambda k: (-k.above_floor_s, -k.seconds))
    return tuple(found[:_NUM_KERNELS])


def _with_rates_reached(machine: Machine, evidence: Evidence) -> Machine:
    """The machine with rates no lower than the step's own products and convolutions reached: a rate that is passed is no ceiling.

    oneDNN's convolutions reach twice the rate of a square product on an AMD EPYC with AVX-512.
    """
    rates = dict(machine.matmul_flop_per_s)
    for operator in timed_operators(evidence):
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
    return "tf32" if dtype == "float32" and "tf32" in known and runs_in_tf32(evidence, operator) else dtype


def _regime(seconds: float, floor_s: float, floors: list[tuple[float, Regime]]) -> Regime:
    """Overhead when the line takes over five times its floor; else what bounds the larger part of its floor."""
    if seconds > 5 * floor_s:
        return "overhead"
    compute_s = sum(f for f, kind in floors if kind == "compute")
    return "compute" if compute_s >= floor_s / 2 else "bandwidth"


def _refusals(evidence: Evidence, rules: Iterable[Rule]) -> Iterator[str]:
    """The trials that could not be run, those with most at stake first, and why."""
    refused = {t.trial: t.refused for t in evidence.trials if t.refused}
    if not refused:
        return
    stakes = {p.trial: p.stake_s for p in proposals(evidence, rules)}
    for trial in sorted(refused, key=lambda t: -stakes.get(t, 0.0)):
        stake_s = stakes.get(trial, 0.0)
        stake = f" (at stake: {units.duration(stake_s)} of each step at most)" if stake_s > 0 else ""
        yield f"{_words(trial)}: {refused[trial]}{stake}"


def _words(trial: Trial) -> str:
    """The trial in half a line."""
    name = type(trial).__name__.removeprefix("Time")
    variant = getattr(trial, "variant", "")
    return f"{name.lower()} {variant}".strip()
