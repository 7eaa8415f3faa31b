"""A fleet of jobs as one HTML file: the answer, the worst jobs with their causes, regressions, sick nodes, and who uses what."""

from __future__ import annotations

from typing import Final, NamedTuple

from flatout.core import units
from flatout.core.records.fleet import FleetJob, FleetSummary
from flatout.report.document import Table
from flatout.report.html.template import rendered_page
from flatout.report.parts import fleet as words

_SHEETS: Final = ("style", "fleet")
_MOST_JOBS: Final = 50
_MOST_ROWS: Final = 25


class ShownWaste(NamedTuple):
    """One waste of a job in words, as the page shows it."""

    title: str
    place: str
    hours: str
    because: str
    edit: str


class ShownJob(NamedTuple):
    """One job in words, as the page shows it."""

    id: str
    name: str
    wasted: str
    cost: str
    why: str
    facts: list[tuple[str, str]]
    wastes: list[ShownWaste]


def fleet_page(summary: FleetSummary) -> bytes:
    """One HTML file (UTF-8) that needs no script, no network and no other file."""
    return rendered_page(
        "fleet",
        sheets=_SHEETS,
        summary=summary,
        headline=words.headline(summary),
        lede=words.lede(summary),
        tiles=_tiles(summary) if summary.num_jobs else (),
        jobs=[_shown(job, summary.currency) for job in summary.jobs[:_MOST_JOBS]],
        num_hidden=max(0, len(summary.jobs) - _MOST_JOBS),
        tables=_tables(summary),
        remarks=words.remarks(summary),
    )


def _tiles(summary: FleetSummary) -> list[tuple[str, str, str]]:
    wasted = words.hours_range(summary.low, summary.high)
    cost = words.money_range(summary.wasted_cost, summary.currency)
    worst = summary.jobs[0]
    tiles = [
        ("need not be spent", wasted, cost or "without prices"),
        ("worst job", worst.name, words.why_text(worst)),
        ("slower than before", f"{len(summary.regressions):,}", "workloads, by 5 % or more"),
        ("sick nodes", f"{len(summary.sick_nodes):,}", f"of {len(summary.groups['node']):,}"),
    ]
    if summary.mfu is not None:
        tiles.append(("model FLOP utilization (MFU)", units.percent(summary.mfu), "over the time of all jobs"))
    return tiles


def _tables(summary: FleetSummary) -> list[tuple[str, Table]]:
    tables: list[tuple[str, Table]] = []
    if summary.causes:
        tables.append(("causes", words.causes_table(summary.causes, summary.currency, top=_MOST_ROWS)))
    if summary.regressions:
        tables.append(("regressions", words.regressions_table(summary.regressions, top=_MOST_ROWS)))
    if summary.sick_nodes:
        tables.append(("nodes", words.nodes_table(summary.sick_nodes, top=_MOST_ROWS)))
    for by in words.GROUPINGS:
        if groups := summary.groups[by]:
            tables.append((f"by-{by}", words.groups_table(by, groups, summary.currency, top=_MOST_ROWS)))
    return tables


def _shown(job: FleetJob, currency: str) -> ShownJob:
    return ShownJob(
        id=job.job,
        name=job.name,
        wasted=words.wasted_of(job),
        cost=words.money_range(job.wasted_cost, currency),
        why=words.why_text(job),
        facts=[(name, text) for name, text in words.job_facts(job, currency) if text],
        wastes=[
            ShownWaste(
                title=waste.title,
                place=words.place_text(waste),
                hours=words.hours_range(waste.low, waste.high),
                because=waste.because,
                edit=waste.edit,
            )
            for waste in job.wastes
        ],
    )
