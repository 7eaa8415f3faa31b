"""The report on a terminal: the step, its phases, the causes by rank, the floor, and what remains open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.records.evidence import Evidence, StepKind
from flatout.records.finding import Diagnosis, RankedFinding
from flatout.reporting import units
from flatout.reporting.bars import PhaseBar
from flatout.reporting.floor import HotLines
from flatout.reporting.inert import Code, Words, place, place_of
from flatout.reporting.memory import memory_cost, memory_gain, memory_line
from flatout.reporting.ranks import ranks

_WIDTH: Final = 100
"""Columns at most: longer lines are harder to read."""
_OPEN_FRACTION: Final = 0.5
"""A step with more than this share unexplained is not called fast."""
_INSET: Final = (0, 0, 0, 2)
STEP_NAMES: Final[dict[StepKind, str]] = {
    "training": "a training step",
    "inference": "an inference step",
    "call": "a call",
    "none": "a step",
}
_COUNTS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def report(evidence: Evidence, diagnosis: Diagnosis) -> RenderableType:
    """All that the diagnosis says, at most 100 columns wide.

    Text that came from the script is shown inert. Plain ASCII is used when the console's encoding is not UTF-8.
    """
    cwd = evidence.workload.cwd
    parts: list[RenderableType] = [Words(headline(evidence, diagnosis), style="bold")]
    parts += [Words(line, style="dim") for line in circumstances(evidence)]
    parts += _exit(evidence)
    if any(seconds > 0 for seconds in evidence.steps.phases.values()):
        parts += ["", Padding(PhaseBar(evidence.steps.phases), _INSET)]
    parts += _memory(evidence)
    for rank, finding in enumerate(diagnosis.findings, start=1):
        parts += ["", _finding(finding, rank=rank, cwd=cwd)]
    parts += ranks(evidence)
    if diagnosis.hot_lines:
        lines = HotLines(diagnosis.hot_lines, has_floor=diagnosis.floor_s is not None, cwd=cwd)
        parts += ["", Text("The floor, line by line", style="bold"), Padding(lines, _INSET)]
    parts += ["", _remarks(evidence, diagnosis)]
    return Constrain(Group(*parts), width=_WIDTH)


def headline(evidence: Evidence, diagnosis: Diagnosis) -> str:
    """The answer in one or two sentences."""
    steps = evidence.steps
    if steps.kind == "none":
        return "No step was seen: no optimizer stepped and no model was called again and again."
    if steps.num_timed == 0:
        return f"{_count(steps.num_seen, 'step').capitalize()} seen, too few to time one."
    step = f"{units.duration(diagnosis.step_s)} {STEP_NAMES[steps.kind]}"
    floor = f"the roofline of this machine for this work is {units.duration(diagnosis.floor_s)}"
    if diagnosis.findings:
        causes = _causes(diagnosis)
        return "; ".join([step, *([floor] if diagnosis.floor_s is not None else []), causes]) + "."
    if not diagnosis.checked:
        return f"{step}. Nothing was checked."
    noise = units.percent(steps.noise_s / diagnosis.step_s if diagnosis.step_s else None)
    is_open = diagnosis.unexplained_s > _OPEN_FRACTION * diagnosis.step_s
    verdict = "No known cause slows it" if is_open else "This is already fast"
    num = len(diagnosis.checked)
    looked = "1 thing was" if num == 1 else f"{num} things were"
    cost = "it does not cost" if num == 1 else "none costs"
    text = f"{step}. {verdict}: {looked} checked, {cost} more than the noise (+-{noise})"
    return f"{text}; {floor}." if diagnosis.floor_s is not None else f"{text}."


def _causes(diagnosis: Diagnosis) -> str:
    """What the findings explain: time, or memory."""
    num = sum(f.saves_time for f in diagnosis.findings)
    rest = len(diagnosis.findings) - num
    parts = []
    if num:
        causes = "the cause below explains" if num == 1 else f"the {_number(num)} causes below explain"
        parts.append(f"{causes} {units.duration(diagnosis.explained_s)}")
    if rest and num:
        parts.append(f"{_number(rest)} more {'takes' if rest == 1 else 'take'} memory")
    elif rest:
        parts.append("the cause below takes memory" if rest == 1 else f"the {_number(rest)} causes below take memory")
    return ", ".join(parts)


def _number(num: int) -> str:
    return _COUNTS[num] if num < len(_COUNTS) else str(num)


def _count(num: int, noun: str) -> str:
    return f"{_number(num)} {noun}" if num == 1 else f"{_number(num)} {noun}s"


def circumstances(evidence: Evidence) -> Iterator[str]:
    """How much was seen, and on what."""
    steps, workload, machine = evidence.steps, evidence.workload, evidence.machine
    if steps.num_timed:
        unit = units.time_unit(steps.high_s)
        seen = f"{steps.num_timed} of {steps.num_seen} steps timed"
        spread = f"95 % interval of the median {unit.show(steps.low_s)} - {unit.show(steps.high_s)} {unit.name}"
        extra = []
        if steps.evaluation_s > 0:
            extra.append(f"evaluation adds {units.duration(steps.evaluation_s)}")
        if steps.restart_s > 0.01 * steps.step_s:
            extra.append(f"starting loaders over adds {units.duration(steps.restart_s)}")
        if steps.device_s is not None:
            extra.append(f"device busy {units.duration(steps.device_s)} of each")
        yield "; ".join([seen, spread, *extra])
    else:
        things = [
            _count(len(evidence.models), "model"),
            _count(len(evidence.optimizers), "optimizer"),
            _count(len(evidence.loaders), "DataLoader"),
        ]
        yield f"seen: {', '.join(things)}"
    device = workload.device
    if machine is not None:
        device = machine.cpu_model if workload.device == "cpu" else machine.device_name
    cores = (
        f", {_plural(workload.num_cores, 'core')}, {_plural(workload.num_threads, 'thread')}"
        if workload.num_cores
        else ""
    )
    world = [f"{workload.world_size} ranks"] if workload.world_size > 1 else []
    versions = [f"torch {workload.torch}, Python {workload.python}"] if workload.torch else []
    yield "; ".join([f"{device or workload.device}{cores}", *world, *versions])


def _plural(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def exit_message(evidence: Evidence) -> str:
    """How the script failed; '' when it finished or was stopped on purpose."""
    if evidence.exit == "stopped" or (evidence.exit in ("", "finished") and not evidence.exit_code):
        return ""
    code = "" if evidence.exit_code is None else f" {evidence.exit_code}"
    return f"exit{code}: {evidence.exit or 'no message'}"


def _exit(evidence: Evidence) -> Iterator[RenderableType]:
    """One line when the script failed or was stopped; nothing when it finished."""
    if evidence.exit == "stopped":
        yield Words("the script was stopped before its end", style="dim")
    elif message := exit_message(evidence):
        yield Words(message, style="red")


def _memory(evidence: Evidence) -> Iterator[RenderableType]:
    """One line for the host, and one for each device."""
    lines = list(filter(None, (memory_line(m, name_it=len(evidence.memory) > 1) for m in evidence.memory)))
    if lines:
        yield ""
        yield from (Padding(Words(line), _INSET) for line in lines)


class _Arrow:
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("->" if options.ascii_only else "\u2192", style="green")


def _finding(finding: RankedFinding, *, rank: int, cwd: str) -> RenderableType:
    """The cause and its gain; where; the line; what it costs; why; what to change."""
    head = Table.grid(expand=True, padding=(0, 2, 0, 0))
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True, overflow="fold")
    gain = f"{units.speedup(finding.gain)} faster" if finding.saves_time else memory_gain(finding)
    head.add_row(Words(finding.title, style="bold"), Text(gain, style="bold green"))
    how = f"gain {units.BASIS[finding.basis]}"
    cost = f"{units.duration(finding.cost_s)} of each step, {units.percent(finding.share)}"
    body: list[RenderableType] = [head, _where(finding, cwd=cwd)]
    if finding.text:
        body.append(Padding(Code(finding.text), _INSET))
    stake = [f"{cost}; {finding.regime}-bound; {how}"] if finding.saves_time else []
    body += [Words(line) for line in (*stake, *memory_cost(finding))]
    if finding.because:
        body.append(Words(finding.because))
    if finding.edit.strip():
        body.append(_edit(finding.edit))
    tail = [finding.rule]
    if finding.also:
        tail.append("also at " + ", ".join(place_of(source, cwd=cwd) for source in finding.also))
    if finding.merged:
        tail.append("also seen as " + ", ".join(finding.merged))
    body.append(Words("; ".join(tail), style="dim"))
    numbered = Table.grid(padding=(0, 2, 0, 0), expand=True)
    numbered.add_column(justify="right", width=2)
    numbered.add_column(ratio=1)
    numbered.add_row(Text(str(rank), style="bold"), Group(*body))
    return numbered


def _where(finding: RankedFinding, *, cwd: str) -> RenderableType:
    where = place(finding.file, finding.line, cwd=cwd)
    if not where:
        return Words("the whole step, no single line", style="cyan")
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(overflow="fold")
    row.add_row(Words(where, style="cyan"), Words(f"in module {finding.module}" if finding.module else "", style="dim"))
    return row


def _edit(edit: str) -> RenderableType:
    """The change, after an arrow; lines of code keep their indentation."""
    lines = [line.expandtabs(4) for line in edit.splitlines() if line.strip()]
    shown = [Padding(Words(line), (0, 0, 0, min(40, len(line) - len(line.lstrip())))) for line in lines]
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=2)
    row.add_column(ratio=1)
    row.add_row(_Arrow(), Group(*shown))
    return row


def _remarks(evidence: Evidence, diagnosis: Diagnosis) -> RenderableType:
    """What is true but costs nothing here, what stays open, what was looked at, and what looking cost."""
    cwd = evidence.workload.cwd
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, overflow="fold")
    table.add_column(ratio=1)

    def section(label: str, lines: Iterable[str], *, style: str = "") -> None:
        for index, line in enumerate(lines):
            table.add_row("" if index else label, Words(line, style=style))

    notes = ((place_of(note.where, cwd=cwd), note.text) for note in diagnosis.notes)
    section("also true", (f"{where}: {text}" if where else text for where, text in notes))
    section("not tried", diagnosis.refused)
    section("not seen", evidence.notes)
    if evidence.steps.num_timed and diagnosis.unexplained_s > 0:
        share = units.percent(diagnosis.unexplained_s / diagnosis.step_s if diagnosis.step_s else None)
        section("unexplained", [f"{units.duration(diagnosis.unexplained_s)} of each step, {share}"])
    section("checked", [_checked(diagnosis.checked)] if diagnosis.checked else [], style="dim")
    section("observing", filter(None, [observing_cost(evidence)]), style="dim")
    return table


def _checked(rules: Sequence[str]) -> str:
    """How many causes were looked for and not found, by shelf.

    >>> _checked(["compute.padding", "input.slow-loader", "compute.denormals"])
    'and not found: 3 other causes (2 compute, 1 input); flatout rules lists them'
    """
    shelves = Counter(rule.partition(".")[0] for rule in rules)
    counts = ", ".join(f"{num} {shelf}" for shelf, num in sorted(shelves.items()))
    return f"and not found: {len(rules)} other causes ({counts}); flatout rules lists them"


def observing_cost(evidence: Evidence) -> str:
    """What watching cost, by kind of look."""
    cost = evidence.observing
    parts = [f"{units.percent(cost.light_fraction)} of the timed steps"] if evidence.steps.num_timed else []
    if cost.num_deep_steps:
        agreement = ""
        if cost.deep_agreement is not None:
            agreement = f" (their times add up to {units.percent(cost.deep_agreement)} of a step)"
        parts.append(f"{units.duration(cost.deep_s)} for {_count(cost.num_deep_steps, 'deep step')}{agreement}")
    parts += [
        f"{units.duration(s)} for {what}" for s, what in ((cost.trials_s, "trials"), (cost.other_s, "the rest")) if s
    ]
    return "; ".join(parts)


def as_text(evidence: Evidence, diagnosis: Diagnosis) -> str:
    """The report as plain text, 100 columns wide."""
    console = Console(width=100, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(report(evidence, diagnosis))
    return captured.get()
