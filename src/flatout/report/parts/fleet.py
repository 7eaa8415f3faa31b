"""A fleet of jobs in words and tables: the worst jobs, causes, regressions, sick nodes, and who uses what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from flatout.core import units
from flatout.core.records.fleet import (
    CauseUse,
    FleetJob,
    FleetSummary,
    Grouping,
    GroupUse,
    Hours,
    Regression,
    SickNode,
    Waste,
)
from flatout.report.document import Block, Cell, Column, Heading, Inline, Listing, Table, numbers
from flatout.report.sanitise import Path, Words

GROUPINGS: Final[tuple[Grouping, ...]] = ("team", "model", "node", "user")


_KINDS: Final = {"gpu": "GPU", "core": "core"}
_SHORT_H: Final = 0.1
"""Hours below that are shown as minutes."""


def moment(at_s: float) -> str:
    """A Unix time as text, in UTC.

    >>> moment(0.0)
    '1970-01-01 00:00'
    """
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")


def hours_text(hours: Hours) -> str:
    """Hours of GPUs and of cores as text; where there are few, in minutes.

    >>> hours_text(Hours(gpu=12.345)), hours_text(Hours(gpu=12345.6, core=0.01)), hours_text(Hours())
    ('12.3 GPU-h', '12,346 GPU-h and 0.600 core-min', '0')
    """
    return hours_range(hours, hours)


def hours_range(low: Hours, high: Hours, of: Hours | None = None) -> str:
    """A range of hours as text, or of those of a whole, whose unit then serves both.

    >>> hours_range(Hours(gpu=1.0), Hours(gpu=2.5)), hours_range(Hours(gpu=1.0), Hours(gpu=2.5), Hours(gpu=8.0))
    ('1.00 - 2.50 GPU-h', '1.00 - 2.50 of 8.00 GPU-h')
    """
    parts = []
    for kind, name in _KINDS.items():
        whole = getattr(of or high, kind)
        if whole > 0:
            factor, unit = (1.0, "h") if whole >= _SHORT_H else (60.0, "min")
            text = _range(factor * getattr(low, kind), factor * getattr(high, kind))
            text += f" of {_number(factor * whole)}" if of is not None else ""
            parts.append(f"{text} {name}-{unit}")
    return " and ".join(parts) or "0"


def money(amount: float | None, currency: str) -> str:
    """An amount as text, '' where it is not known.

    >>> money(1234.5, "$"), money(0.25, "EUR"), money(None, "$")
    ('$1,234', 'EUR 0.25', '')
    """
    if amount is None:
        return ""
    return f"{currency}{' ' if currency[-1:].isalnum() else ''}{amount:,.{0 if amount >= 100 else 2}f}"


def money_range(amounts: tuple[float, float] | None, currency: str) -> str:
    """A range of amounts as text, '' where it is not known."""
    if amounts is None:
        return ""
    low, high = (money(amount, currency) for amount in amounts)
    return low if low == high else f"{low} - {high}"


def headline(summary: FleetSummary) -> str:
    """What the fleet wastes, in one sentence."""
    if not summary.num_jobs:
        return "No job ran in this time"
    share = _share(summary)
    if share == "0 %":
        return f"Nothing is known to be wasted of {hours_text(summary.hours)}"
    return f"{share} of {hours_text(summary.hours)} need not have been spent"


def lede(summary: FleetSummary) -> str:
    """When, how many jobs, what they cost, and how well devices were used."""
    when = f"{moment(summary.since_s)} to {moment(summary.until_s)} UTC"
    jobs = f"{summary.num_jobs:,} job{'s' * (summary.num_jobs != 1)}, {summary.num_running:,} of them running"
    cost = f", {money(summary.cost, summary.currency)}" if summary.cost is not None else ""
    used = [
        f"{name} {units.percent(value)}"
        for name, value in (("utilisation", summary.utilisation), ("MFU", summary.mfu))
        if value is not None
    ]
    return f"{when}: {jobs}{cost}{'; ' if used else ''}{', '.join(used)}"


def fleet_blocks(summary: FleetSummary, *, top: int) -> Iterator[Block]:
    """The report of `flatout fleet`, with so many rows of each table."""
    yield Heading(headline(summary), is_title=True)
    yield lede(summary)
    if summary.num_jobs:
        yield ""
        yield jobs_table(summary, top=top)
        if summary.causes:
            yield ""
            yield causes_table(summary.causes, summary.currency, top=top)
        if summary.regressions:
            yield ""
            yield regressions_table(summary.regressions, top=top)
        if summary.sick_nodes:
            yield ""
            yield nodes_table(summary.sick_nodes, top=top)
        for by in GROUPINGS:
            groups = summary.groups[by]
            if len(groups) > 1 or (groups and by == "team" and groups[0].name != "-"):
                yield ""
                yield groups_table(by, groups, summary.currency, top=top)
    yield ""
    yield Listing([(label, Words(text)) for label, text in _remarks(summary)])


def digest_blocks(summary: FleetSummary, *, title: str, top: int) -> Iterator[Block]:
    """The weekly digest: what to mend first, what became slower, which nodes to look at; for Markdown."""
    yield Heading(title, is_title=True)
    yield f"{headline(summary)}."
    yield f"{lede(summary)}."
    if summary.num_jobs:
        tables = [jobs_table(summary, top=top)]
        tables += [causes_table(summary.causes, summary.currency, top=top)] if summary.causes else []
        tables += [regressions_table(summary.regressions, top=top)] if summary.regressions else []
        tables += [nodes_table(summary.sick_nodes, top=top)] if summary.sick_nodes else []
        tables += [groups_table("team", summary.groups["team"], summary.currency, top=top)]
        for table in tables:
            yield Heading(table.title)
            yield table
    yield Listing([(label, Words(text)) for label, text in _remarks(summary)])


def job_blocks(job: FleetJob, currency: str) -> Iterator[Block]:
    """One job with everything that is known of it."""
    yield Heading(f"{job.name}: {wasted_of(job)} need not have been spent", is_title=True)
    yield Listing([(name, Words(text)) for name, text in job_facts(job, currency) if text])
    for number, waste in enumerate(job.wastes, start=1):
        yield ""
        yield Heading(f"{number}  {waste.title}")
        yield Listing(list(_waste_facts(waste)), inset=3)


def job_facts(job: FleetJob, currency: str) -> Iterator[tuple[str, str]]:
    """What is known of a job, each with its name; '' where it is not."""
    yield "job", job.job
    yield "command", job.command
    yield "who", " ".join(filter(None, (job.user, f"of {job.team}" if job.team else "")))
    yield "when", f"{moment(job.began_s)} to {moment(job.written_s)} UTC, {outcome_text(job)}"
    yield "where", devices_text(job)
    yield "steps", f"{job.num_steps:,}, {units.duration(job.step_s)} each" if job.step_s is not None else ""
    yield "model", job.model
    yield "used", used_text(job)
    yield "cost", money(job.cost, currency)
    yield "watching", f"{units.percent(job.observing_fraction)} of its time"
    yield "not looked into", job.not_looked


def used_text(job: FleetJob) -> str:
    """Utilisation and MFU of a job, as far as they are known."""
    known = (("utilisation", job.utilisation), ("MFU", job.mfu))
    return ", ".join(f"{name} {units.percent(value)}" for name, value in known if value is not None)


def devices_text(job: FleetJob) -> str:
    """What a job ran on."""
    devices = f"{job.num_gpus} x {job.device}" if job.num_gpus else units.counted(job.num_cores, "core")
    nodes = ", ".join(job.nodes[:3]) + (f" and {len(job.nodes) - 3} more" if len(job.nodes) > 3 else "")
    starts = f", {job.num_starts} starts" if job.num_starts > 1 else ""
    return f"{devices} on {nodes}{starts}"


def outcome_text(job: FleetJob) -> str:
    """How a job ended, with what its error says."""
    names = {"lost": "killed without a word", "ended": "ended from outside"}
    return names.get(job.outcome, job.outcome) + (f": {job.error}" if job.error else "")


def why_text(job: FleetJob) -> str:
    """The worst of what a job wastes, or why nothing is known."""
    waste = worst_waste(job)
    if waste is not None:
        gain = f", {units.predicted_speedup(waste.gain)}" if waste.gain[1] > 1.0 else ""
        more = len(job.wastes) - 1
        return f"{waste.title}{gain}{f', and {more} more' if more else ''}"
    return f"not looked into: {job.not_looked}" if job.not_looked else "no known cause"


def worst_waste(job: FleetJob) -> Waste | None:
    """The waste of a job that costs most."""
    return max(job.wastes, key=lambda w: w.low.as_gpu_hours + w.high.as_gpu_hours, default=None)


def place_text(waste: Waste | None) -> str:
    """File and line of a cause, '' where it has none."""
    return f"{waste.file}:{waste.line}" if waste is not None and waste.file else ""


def who_text(job: FleetJob) -> str:
    """Team and user of a job."""
    return "/".join(filter(None, (job.team, job.user))) or "-"


def jobs_table(summary: FleetSummary, *, top: int) -> Table:
    """The jobs that waste most, with who runs them, why and where."""
    columns = [
        Column("", is_number=True),
        Column("wasted", is_number=True),
        Column("job", is_whole=True),
        Column("why"),
        Column("id", is_whole=True),
    ]
    rows: list[list[Cell]] = []
    for number, job in enumerate(summary.jobs[:top], start=1):
        place = place_text(worst_waste(job))
        rows.append(
            [
                str(number),
                [*filter(None, (wasted_of(job), money_range(job.wasted_cost, summary.currency)))],
                [Words(job.name), Words(who_text(job))],
                [Words(why_text(job)), *([Path(_short(place))] if place else [])],
                Words(job.job[:8]),
            ]
        )
    rest = len(summary.jobs) - top
    return Table(columns, rows, [f"{rest:,} more jobs"] if rest > 0 else [], inset=0, title="The worst jobs")


def causes_table(causes: Sequence[CauseUse], currency: str, *, top: int) -> Table:
    """Causes over all jobs, what mending them would save."""
    has_money = any(cause.wasted_cost is not None for cause in causes)
    columns = [
        Column("over all jobs", is_number=True),
        *([Column("cost", is_number=True)] if has_money else []),
        *numbers("jobs"),
        Column("cause"),
        Column("rule", is_whole=True, from_width=90),
    ]
    rows: list[list[Cell]] = [
        [
            hours_range(cause.low, cause.high),
            *([money_range(cause.wasted_cost, currency)] if has_money else []),
            f"{cause.num_jobs:,}",
            Words(cause.title),
            Words(cause.rule),
        ]
        for cause in causes[:top]
    ]
    return Table(columns, rows, inset=0, title="What to mend first")


def regressions_table(regressions: Sequence[Regression], *, top: int) -> Table:
    """Workloads that have become slower."""
    columns = [*numbers("slower by", "before", "now"), Column("job", is_whole=True), Column("what has changed")]
    rows: list[list[Cell]] = [
        [
            f"{one.now_s / one.before_s:.2f}x",
            units.duration(one.before_s),
            units.duration(one.now_s),
            Words(one.name),
            Words("; ".join(one.changed) or "nothing that is recorded"),
        ]
        for one in regressions[:top]
    ]
    rest = len(regressions) - top
    return Table(columns, rows, [f"{rest:,} more"] if rest > 0 else [], inset=0, title="Slower than before")


def nodes_table(nodes: Sequence[SickNode], *, top: int) -> Table:
    """Nodes to look at, and why."""
    columns = [Column("sick node", is_whole=True), *numbers("jobs"), Column("why")]
    rows: list[list[Cell]] = [
        [Words(node.node), f"{node.num_jobs:,}", Words("; ".join(node.because))] for node in nodes[:top]
    ]
    rest = len(nodes) - top
    return Table(columns, rows, [f"{rest:,} more"] if rest > 0 else [], inset=0, title="Sick nodes")


def groups_table(by: Grouping, groups: Sequence[GroupUse], currency: str, *, top: int) -> Table:
    """Use and waste by team, model, node or user."""
    has_money = any(group.cost is not None for group in groups)
    money_columns = numbers("cost") if has_money else ()
    columns = [
        Column(by, is_whole=True),
        *numbers("jobs", "used"),
        *money_columns,
        *numbers("wasted", "failed", "utilisation", "MFU"),
    ]
    rows: list[list[Cell]] = [
        [
            Words(group.name),
            f"{group.num_jobs:,}",
            hours_text(group.hours),
            *([money(group.cost, currency)] if has_money else []),
            hours_range(group.low, group.high),
            hours_text(group.failed),
            _fraction(group.utilisation),
            _fraction(group.mfu),
        ]
        for group in groups[:top]
    ]
    rest = len(groups) - top
    return Table(columns, rows, [f"{rest:,} more"] if rest > 0 else [], inset=0, title=f"By {by}")


def remarks(summary: FleetSummary) -> list[str]:
    """What is to be known besides the tables."""
    return [f"{label}: {text}" if label else str(text) for label, text in _remarks(summary)]


def _remarks(summary: FleetSummary) -> Iterator[tuple[str, str]]:
    if summary.num_jobs:
        looked = f"{summary.num_looked:,} of {summary.num_jobs:,} jobs were looked into"
        yield "observing", f"{looked}; watching took {units.percent(summary.observing_fraction)} of their time"
    for note in summary.notes:
        yield "note", note


def _waste_facts(waste: Waste) -> Iterator[tuple[str, Inline]]:
    if place := place_text(waste):
        yield "where", Path(place)
    yield "wasted", hours_range(waste.low, waste.high)
    if waste.gain[1] > 1.0:
        yield "gain", units.predicted_speedup(waste.gain)
    yield "why", Words(waste.because)
    if waste.edit:
        yield "edit", Words(waste.edit)
    if waste.rule:
        yield "rule", Words(waste.rule)


def wasted_of(job: FleetJob) -> str:
    """What a job wastes of its hours."""
    return hours_range(job.low, job.high, job.hours)


def _share(summary: FleetSummary) -> str:
    whole = summary.hours.as_gpu_hours
    low, high = (units.percent(part.as_gpu_hours / whole) if whole else "0 %" for part in (summary.low, summary.high))
    return high if low == high else f"{low} to {high}"


def _fraction(value: float | None) -> str:
    return units.percent(value) if value is not None else "-"


def _number(value: float) -> str:
    if value <= 0:
        return "0"
    if value < 0.01:
        return "<0.01"
    return f"{value:,.0f}" if value >= 1000 else units.number(value)


def _range(low: float, high: float) -> str:
    one, two = _number(low), _number(high)
    return one if one == two else f"{one} - {two}"


def _short(place: str, most: int = 40) -> str:
    """The end of a place, whole folders of it."""
    if len(place) <= most:
        return place
    parts = place.split("/")
    while len(parts) > 1 and len("/".join(parts)) > most:
        parts.pop(0)
    return "/".join(parts)
