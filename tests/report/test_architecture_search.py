"""Searches and trained students as text: every trial is in it, and what was proved."""

from __future__ import annotations

import msgspec

from flatout.core.records.architecture_search import (
    ArchitectureTrial,
    Cost,
    Interval,
    SearchReport,
)
from flatout.report.parts.architecture_search import search_blocks
from flatout.report.text import plain_lines

SPAN = Interval(value=0.01, low=-0.005, high=0.02, confidence=0.95, num_samples=600, method="Newcombe, paired")
COST = Cost(
    num_parameters=100, work_flop=2000, peak_bytes=4096, latency_s=(1e-3, 9e-4, 2e-3), latency_fraction=(0.25, 0.2, 0.3)
)
REPORT = SearchReport(
    limit={"latency_fraction": 0.3333},
    original=COST,
    original_score=msgspec.structs.replace(SPAN, value=0.97, method="Wilson"),
    original_search_score=0.96,
    trials=(
        ArchitectureTrial(number=0, architecture={"width": 8}, state="finished", cost=COST, score=0.95, num_rounds=4),
        ArchitectureTrial(number=3, architecture={"width": 16}, state="failed", why="its process ended 2 times"),
    ),
    pareto=(0,),
    winner=0,
    winner_cost=COST,
    winner_score=0.98,
    seed_scores=(0.98, 0.97),
    difference=SPAN,
    seed_difference=SPAN,
    allowed_loss=0.01,
    is_fresh=True,
    spent_s=12.0,
    ended="budget of 10 s",
)


def search_text(report: SearchReport) -> str:
    return "\n".join(plain_lines(search_blocks(report)))


def test_every_trial_and_the_proof_are_told() -> None:
    text = search_text(REPORT)
    lines = text.splitlines()
    assert any(line.startswith("*  0 ") and "width 8" in line and "0.250" in line for line in lines)
    assert any("width 16" in line and "failed" in line for line in lines)
    assert "samples that the search has not seen" in text and "no worse than by 0.01" in text
    assert "not proved" not in text and all(line == line.rstrip() for line in lines)


def test_a_difference_that_may_be_too_large_is_not_called_equal() -> None:
    wide = msgspec.structs.replace(SPAN, low=-0.02)
    assert "not proved to be no worse" in search_text(msgspec.structs.replace(REPORT, difference=wide))
    nothing = msgspec.structs.replace(REPORT, winner=None, difference=None)
    assert search_text(nothing).endswith("no candidate holds the limit") and not nothing.is_no_worse
