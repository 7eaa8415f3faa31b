"""A search of architectures: its trials, and what was proved of the winner."""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core import units
from flatout.core.records.architecture_search import ArchitectureTrial, Cost, Interval, SearchReport
from flatout.report.document import Block, Column, Table, numbers

_TEXTS = tuple(Column(head) for head in ("", "trial", "choice", "state"))
_FIGURES = numbers("score", "rounds", "time of given's", "latency", "work", "memory", "parameters")


def search_blocks(report: SearchReport) -> Iterator[Block]:
    """Every trial in a table, marked '*' where no other beats it, and what was proved of the winner."""
    limits = ", ".join(f"{name} {value:g}" for name, value in report.limit.items())
    yield f"limit {limits}; {len(report.trials)} trials, ended by: {report.ended}; {units.duration(report.spent_s)} in all"
    yield ""
    original = ["", "given", "", "", units.number(report.original_search_score), "", *_costs(report.original)]
    yield Table([*_TEXTS, *_FIGURES], [original, *(_row(row, report) for row in report.trials)], inset=0)
    yield ""
    if report.winner is None:
        yield "no candidate holds the limit"
        return
    on = "samples that the search has not seen" if report.is_fresh else "the samples that it was chosen by"
    yield f"trial {report.winner}, trained anew, on {on}:"
    yield f"score {units.number(report.winner_score)}, given {_span(report.original_score)}"
    seeds = ", ".join(units.number(score) for score in report.seed_scores)
    yield f"difference {_span(report.difference)}; over seeds {_span(report.seed_difference)} ({seeds})"
    word = "no worse" if report.is_no_worse else "not proved to be no worse"
    yield f"{word} than by {report.allowed_loss:g}, which is allowed"
    if report.winner_cost is not None and report.winner_cost.latency_fraction is not None:
        value, low, high = report.winner_cost.latency_fraction
        yield f"timed longer: {value:.3f} of the given model's time ({low:.3f} to {high:.3f})"


def _row(row: ArchitectureTrial, report: SearchReport) -> list[str]:
    marker = "*" if row.number in report.pareto else ""
    architecture = ", ".join(f"{name} {value}" for name, value in row.architecture.items())
    score = units.number(row.score)
    return [marker, f"{row.number}", architecture, row.state, score, f"{row.num_rounds}", *_costs(row.cost)]


def _costs(cost: Cost | None) -> tuple[str, ...]:
    if cost is None:
        return (units.UNKNOWN,) * 5
    fraction = f"{cost.latency_fraction[0]:.3f}" if cost.latency_fraction is not None else units.UNKNOWN
    latency = units.duration(cost.latency_s[0] if cost.latency_s is not None else None)
    return (fraction, latency, units.work(cost.work_flop), units.size(cost.peak_bytes), f"{cost.num_parameters}")


def _span(interval: Interval | None) -> str:
    if interval is None:
        return units.UNKNOWN
    return (
        f"{interval.value:.4f} ({interval.low:.4f} to {interval.high:.4f}, {units.percent(interval.confidence)}, "
        f"n = {interval.num_samples}, {interval.method})"
    )
