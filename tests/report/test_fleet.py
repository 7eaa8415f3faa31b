from __future__ import annotations

import msgspec
import pytest
from tests.fleet_jobs import NOW_S, WEEK_S, finding, fleet, job

from flatout.check.fleet.prices import PriceList
from flatout.check.fleet.summary import summary_of
from flatout.core.records.fleet import FleetSummary, Hours
from flatout.core.records.job import JobRecord, NodeHealth
from flatout.report.markdown import markdown_report
from flatout.report.parts.fleet import (
    digest_blocks,
    fleet_blocks,
    headline,
    hours_range,
    job_blocks,
    money_range,
    outcome_text,
    why_text,
)
from flatout.report.text import plain_lines


def summary(*records: JobRecord, prices: PriceList | None = None) -> FleetSummary:
    return summary_of(
        records, since_s=NOW_S - WEEK_S, until_s=NOW_S, prices=prices or PriceList(2.5), notes=("something is odd",)
    )


def text(found: FleetSummary, top: int = 3) -> str:
    return "\n".join(plain_lines(fleet_blocks(found, top=top)))


WORST = job(1, name="worst.py", findings=(finding((1.5, 2.0), line=77),), saved_fraction=0.5)
LONG = job(2, name="long.py", seconds=72_000.0, findings=(finding((1.5, 2.0)),), saved_fraction=0.5)


def test_the_report_has_every_section_and_says_how_much_it_leaves_out() -> None:
    hot = NodeHealth(num_samples=9, throttled_fraction=0.5, throttled_because="temperature (hardware)")
    slower = job(800, workload="w", step_s=0.2, torch="2.14.0", health=hot, node="hot")
    shown = text(summary(*fleet(100), LONG, job(700, workload="w", began_s=NOW_S - 1.5 * WEEK_S), slower))

    for part in ("need not have been spent", "long.py", "more jobs", "2.00x", "torch 2.13.0 -> 2.14.0", "hot"):
        assert part in shown
    for head in ("over all jobs", "slower by", "sick node", "team", "model", "user", "something is odd"):
        assert head in shown, head


def test_what_is_not_known_is_not_shown() -> None:
    shown = text(summary(job(1, utilisation=None, mfu=None), prices=PriceList()))

    assert "$" not in shown
    assert "MFU 0" not in shown
    assert "Nothing is known to be wasted of 8.00 GPU-h" in shown
    assert "sick node" not in shown


def test_an_empty_fleet_is_said_to_be_empty() -> None:
    assert headline(summary()) == "No job ran in this time"
    assert "No job ran" in text(summary())
    assert "No job ran" in markdown_report(digest_blocks(summary(), title="x", top=3))


def test_one_job_shows_each_cause_with_its_edit() -> None:
    shown = "\n".join(plain_lines(job_blocks(summary(WORST).jobs[0], "$")))

    for part in ("worst.py: 2.67 - 4.00 of 8.00 GPU-h", "data.py:77", "prepare it once", "1.5x - 2.0x", "$20.00"):
        assert part in shown, part


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "no known cause"),
        ({"saved_fraction": None, "not_looked": "it ran 20 s"}, "not looked into: it ran 20 s"),
        ({"outcome": "failed", "error": "ValueError: x"}, "It failed"),
    ],
)
def test_why_a_job_wastes_is_said_even_where_little_is_known(changes: dict[str, object], expected: str) -> None:
    assert why_text(summary(job(1, **changes)).jobs[0]) == expected


def test_how_a_job_ended_is_said_in_words() -> None:
    lost = summary(job(1, outcome="running", began_s=NOW_S - 9e4)).jobs[0]

    assert outcome_text(lost) == "killed without a word"
    assert outcome_text(summary(job(1, outcome="failed", error="E: x")).jobs[0]) == "failed: E: x"


def test_text_of_jobs_cannot_become_markup() -> None:
    hostile = job(1, name="<b>|x|`</b>", user="[a](b)", findings=(finding((1.5, 2.0), file="a|b"),), saved_fraction=0.5)

    shown = markdown_report(fleet_blocks(summary(hostile), top=3))

    assert "<b>" not in shown
    assert "[a](b)" not in shown
    rows = [line for line in shown.splitlines() if line.startswith("| 1 ")]
    assert len(rows) == 1
    assert rows[0].count(" | ") == 4


def test_ranges_show_each_unit_once() -> None:
    assert hours_range(Hours(gpu=1.0, core=2.0), Hours(gpu=1.0, core=3.0)) == "1.00 GPU-h and 2.00 - 3.00 core-h"
    assert money_range((1.0, 1.0), "EUR") == "EUR 1.00"
    assert money_range(None, "$") == ""


def test_hidden_and_shown_jobs_are_all_of_them() -> None:
    found = summary(*fleet(50))

    assert f"{found.num_jobs - 3:,} more jobs" in text(found)
    assert "more jobs" not in text(msgspec.structs.replace(found, jobs=found.jobs[:3]))
