"""The report of a check: the step, its phases, the causes by rank, the floor, and what remains open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from flatout.core import units
from flatout.core.records.evidence import Evidence, StepKind
from flatout.core.records.finding import Diagnosis, RankedFinding
from flatout.report.document import Block, Cause, Fold, Heading, Inline, Listing, Phases
from flatout.report.parts.breakdown import parts_in_words, step_parts
from flatout.report.parts.floor import hot_lines, kernels_above_floor
from flatout.report.parts.load import load_message
from flatout.report.parts.memory import memory_cost, memory_gain, memory_line
from flatout.report.parts.ranks import ranks
from flatout.report.places import chain_of, chain_of_finding, innermost_text, other_places
from flatout.report.sanitise import Words

_MOST_FINDINGS: Final = 10
_MOST_NOTES: Final = 20
STEP_NAMES: Final[dict[StepKind, str]] = {
    "training": "a training step",
    "inference": "an inference step",
    "call": "a call",
    "none": "a step",
}
_COUNTS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def diagnosis_blocks(evidence: Evidence, diagnosis: Diagnosis) -> list[Block]:
    """All that the diagnosis says."""
    blocks: list[Block] = [Heading(diagnosis_headline(evidence, diagnosis), is_title=True), *_load(evidence)]
    blocks += [Words(line, style="dim") for line in run_circumstances(evidence)]
    blocks += _exit(evidence)
    if any(seconds > 0 for seconds in evidence.steps.phases.values()):
        blocks += ["", Phases(evidence.steps.phases_of_whole)]
    for table in step_parts(diagnosis, cwd=evidence.workload.cwd):
        blocks += ["", table]
    if lines := _memory_lines(evidence):
        blocks += ["", Listing([("", line) for line in lines])]
    for cause in causes(evidence, diagnosis):
        blocks += ["", cause]
    blocks += ranks(evidence)
    if diagnosis.hot_lines:
        blocks += ["", Heading("The floor, line by line"), hot_lines(evidence, diagnosis)]
    if (kernels := kernels_above_floor(diagnosis)) is not None:
        blocks += ["", Heading("The floor, kernel by kernel"), kernels]
    checked = [("checked", Words(_checked(diagnosis.checked), "dim"))] if diagnosis.checked else []
    return [*blocks, "", Listing([*_remarks(evidence, diagnosis), *checked, *_observing(evidence)])]


def short_diagnosis_blocks(evidence: Evidence, diagnosis: Diagnosis) -> list[Block]:
    """What is short enough for a pull request: headline, phases and causes; the rest folded away."""
    blocks: list[Block] = [Heading(diagnosis_headline(evidence, diagnosis), is_title=True), *_load(evidence)]
    if message := exit_message(evidence):
        blocks.append(Words(message, style="bold"))
    blocks += [Phases(evidence.steps.phases_of_whole), *step_parts(diagnosis, cwd=evidence.workload.cwd)]
    blocks += causes(evidence, diagnosis)[:_MOST_FINDINGS]
    if len(diagnosis.findings) > _MOST_FINDINGS:
        blocks.append(f"and {len(diagnosis.findings) - _MOST_FINDINGS} more")

    rows: list[tuple[str, Inline]] = [("", line) for line in (*run_circumstances(evidence), *_memory_lines(evidence))]
    rows += _remarks(evidence, diagnosis, most=_MOST_NOTES)
    if diagnosis.checked:
        rows.append(("checked and found in order", ", ".join(diagnosis.checked)))
    rows += _observing(evidence)
    return [*blocks, Fold("How it was measured, and what else is true", [Listing(rows)])]


def _load(evidence: Evidence) -> Iterator[Words]:
    """One line when the machine was busy with something else."""
    if message := load_message(evidence):
        yield Words(message, style="bold")


def causes(evidence: Evidence, diagnosis: Diagnosis) -> list[Cause]:
    """The findings by rank, with what all renderers say of them."""
    return [
        _cause(number, finding, evidence.workload.cwd) for number, finding in enumerate(diagnosis.findings, start=1)
    ]


def _cause(number: int, finding: RankedFinding, cwd: str) -> Cause:
    cost = f"{units.duration(finding.cost_s)} of each step, {units.percent(finding.share)}; {finding.regime}-bound"
    return Cause(
        number=number,
        finding=finding,
        where=chain_of_finding(finding, cwd=cwd),
        code=innermost_text(finding),
        gain=_gain(finding),
        cost=cost if finding.saves_time else "",
        memory=(*_advice(finding), *memory_cost(finding)),
        also=other_places(finding, cwd=cwd),
    )


def _advice(finding: RankedFinding) -> list[str]:
    """What following the advice would gain, beside what it changes."""
    known = units.predicted_speedup(finding.throughput)
    return [f"{known} the samples a second {finding.advice}" if known else finding.advice] if finding.advice else []


def _gain(finding: RankedFinding) -> tuple[str, str]:
    if finding.advice:
        return "advice", ""
    if not finding.saves_time:
        return memory_gain(finding), ""
    known = units.predicted_speedup(finding.gain)
    return (known, "faster") if known else ("gain not known", "")


def step_title(evidence: Evidence) -> str:
    """The median step, which lies within the interval that is printed with it."""
    return f"{units.duration(evidence.steps.step_s)} {STEP_NAMES[evidence.steps.kind]}"


def _beside(evidence: Evidence) -> str:
    steps = evidence.steps
    more_s = steps.whole_s - steps.step_s
    return f", and {units.duration(more_s)} for what comes between steps" if more_s > 0.01 * steps.step_s else ""


def diagnosis_headline(evidence: Evidence, diagnosis: Diagnosis) -> str:
    """The answer in one or two sentences."""
    steps = evidence.steps
    if steps.kind == "none":
        return "No step was seen: no optimizer stepped and no model was called again and again."
    if steps.num_timed == 0:
        return f"{_in_words(steps.num_observed, 'step').capitalize()} seen, too few to time one."
    step = step_title(evidence) + _beside(evidence)
    roofline = f"the roofline of this machine for this work is {units.duration(diagnosis.floor_s)}"
    floor = [roofline] if diagnosis.floor_s is not None else []
    if any(not f.advice for f in diagnosis.findings):
        return "; ".join([step, *floor, _causes_in_words(diagnosis)]) + "."
    if not diagnosis.checked:
        return f"{step}. Nothing was checked."
    noise = units.percent(steps.noise_s / diagnosis.step_s if diagnosis.step_s else None)
    verdict = "This is already fast" if diagnosis.is_near_floor else "No known cause slows it"
    num = len(diagnosis.checked)
    looked = "1 thing was" if num == 1 else f"{num} things were"
    cost = "it does not cost" if num == 1 else "none costs"
    text = f"{step}. {verdict}: {looked} checked, {cost} more than the noise (+-{noise})"
    consists_of = "" if diagnosis.is_near_floor else parts_in_words(diagnosis)
    return "; ".join([text, *floor, *filter(None, [consists_of])]) + "."


def _causes_in_words(diagnosis: Diagnosis) -> str:
    """What the findings explain: time, or memory."""
    num = sum(f.saves_time and not f.advice for f in diagnosis.findings)
    rest = sum(not f.advice for f in diagnosis.findings) - num
    parts = []
    if num:
        explain = "the cause below explains" if num == 1 else f"the {_number(num)} causes below explain"
        parts.append(f"{explain} {units.duration(diagnosis.explained_s)}")
    if rest and num:
        parts.append(f"{_number(rest)} more {'takes' if rest == 1 else 'take'} memory")
    elif rest:
        parts.append("the cause below takes memory" if rest == 1 else f"the {_number(rest)} causes below take memory")
    return ", ".join(parts)


def _number(num: int) -> str:
    return _COUNTS[num] if num < len(_COUNTS) else str(num)


def _in_words(num: int, noun: str) -> str:
    return units.counted(num, noun).replace(str(num), _number(num), 1)


def run_circumstances(evidence: Evidence) -> Iterator[str]:
    """How much was seen, and on what."""
    steps, workload, machine = evidence.steps, evidence.workload, evidence.machine
    if steps.num_timed:
        unit = units.time_unit(steps.high_s)
        parts = [f"{steps.num_timed} of {steps.num_observed} steps timed"]
        parts.append(f"95 % interval of the median {unit.show(steps.low_s)} - {unit.show(steps.high_s)} {unit.name}")
        if steps.evaluation_s > 0:
            parts.append(f"evaluation adds {units.duration(steps.evaluation_s)}")
        if steps.restart_s > 0.01 * steps.step_s:
            parts.append(f"starting loaders over adds {units.duration(steps.restart_s)}")
        if steps.device_s is not None:
            parts.append(f"device busy {units.duration(steps.device_s)} of each")
        yield "; ".join(parts)
    else:
        found = (("model", evidence.models), ("optimizer", evidence.optimizers), ("DataLoader", evidence.loaders))
        yield f"seen: {', '.join(_in_words(len(things), noun) for noun, things in found)}"
    device = workload.device
    if machine is not None:
        device = machine.cpu_model if workload.device == "cpu" else machine.device_name
    parts = [device or workload.device]
    if workload.num_cores:
        threads = units.counted(workload.num_threads, "thread")
        parts[0] += f", {units.counted(workload.num_cores, 'core')}, {threads}"
    if workload.world_size > 1:
        parts.append(f"{workload.world_size} ranks")
    if workload.torch:
        parts.append(f"torch {workload.torch}, Python {workload.python}")
    yield "; ".join(parts)


def _memory_lines(evidence: Evidence) -> list[str]:
    """One line for the host, and one for each of the first devices."""
    lines = (memory_line(m, name_it=len(evidence.memory) > 1) for m in evidence.memory)
    return [line for line in lines if line]


def exit_message(evidence: Evidence) -> str:
    """How the script failed; '' when it finished or was stopped on purpose."""
    if evidence.exit == "stopped" or (evidence.exit in ("", "finished") and not evidence.exit_code):
        return ""
    code = "" if evidence.exit_code is None else f" {evidence.exit_code}"
    return f"exit{code}: {evidence.exit or 'no message'}"


def _exit(evidence: Evidence) -> Iterator[Words]:
    """One line when the script failed or was stopped; nothing when it finished."""
    if evidence.exit == "stopped":
        yield Words("the script was ended when this report was ready", style="dim")
    elif message := exit_message(evidence):
        yield Words(message, style="red")


def _remarks(evidence: Evidence, diagnosis: Diagnosis, *, most: int | None = None) -> Iterator[tuple[str, str]]:
    """What is true but costs nothing here, what was not tried or seen, and what stays open."""
    for note in diagnosis.notes[:most]:
        where = chain_of(note.where, cwd=evidence.workload.cwd)
        yield "also true", f"{where}: {note.text}" if where else note.text
    yield from (("not tried", line) for line in diagnosis.refused[:most])
    yield from (("not seen", line) for line in evidence.notes[:most])
    yield from (("left out", law.text) for law in diagnosis.broken[:most])
    if evidence.steps.num_timed and diagnosis.unexplained_s > 0 and not diagnosis.parts:
        share = units.percent(diagnosis.unexplained_s / diagnosis.step_s if diagnosis.step_s else None)
        yield "unexplained", f"{units.duration(diagnosis.unexplained_s)} of each step, {share}"


def _checked(rules: Sequence[str]) -> str:
    """How many causes were looked for and not found, by category.

    >>> _checked(["compute.padding", "input.slow-loader", "compute.denormals"])
    'and not found: 3 other causes (2 compute, 1 input); flatout rules lists them'
    """
    categories = Counter(rule.partition(".")[0] for rule in rules)
    counts = ", ".join(f"{num} {category}" for category, num in sorted(categories.items()))
    return f"and not found: {len(rules)} other causes ({counts}); flatout rules lists them"


def _observing(evidence: Evidence) -> list[tuple[str, Words]]:
    cost = observing_cost(evidence)
    return [("observing", Words(cost, style="dim"))] if cost else []


def observing_cost(evidence: Evidence) -> str:
    """What watching cost, by kind of look."""
    cost = evidence.observing
    parts = [f"{units.percent(cost.light_fraction)} of the timed steps"] if evidence.steps.num_timed else []
    if cost.num_deep_steps:
        agreement = ""
        if cost.deep_agreement is not None:
            agreement = f" (their times add up to {units.percent(cost.deep_agreement)} of a step)"
        parts.append(f"{units.duration(cost.deep_s)} for {_in_words(cost.num_deep_steps, 'deep step')}{agreement}")
    budget = f" of {units.duration(cost.trials_budget_s)}" if cost.trials_budget_s else ""
    others = ((cost.trials_s, f"{budget} for trials"), (cost.other_s, " for the rest"))
    return "; ".join([*parts, *(f"{units.duration(s)}{what}" for s, what in others if s)])
