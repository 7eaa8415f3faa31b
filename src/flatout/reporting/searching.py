"""A search of architectures, or the training of a student, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.records.searching import Candidate, Cost, DistilReport, Interval, SearchReport
from flatout.reporting import units

_LEFT = 2
"""Columns that are set to the left."""


def search_text(report: SearchReport) -> str:
    """Every trial in a table, marked '*' where no other beats it, and what was proved of the winner."""
    return "\n".join(_search_lines(report))


def distil_text(report: DistilReport) -> str:
    """The history in a table, and the score beside the teacher's."""
    return "\n".join(_distil_lines(report))


def _search_lines(report: SearchReport) -> Iterator[str]:
    limits = ", ".join(f"{name} {value:g}" for name, value in report.limit.items())
    yield f"limit {limits}; {len(report.trials)} trials, ended by: {report.ended}; {units.duration(report.spent_s)} in all"
    yield ""
    head = (
        "",
        "trial",
        "choice",
        "state",
        "score",
        "rounds",
        "time of given's",
        "latency",
        "work",
        "memory",
        "parameters",
    )
    yield from _table(head, [_given_row(report), *(_row(row, report) for row in report.trials)])
    yield ""
    if report.winner is None:
        yield "no candidate holds the limit"
        return
    yield from _winner_lines(report)


def _winner_lines(report: SearchReport) -> Iterator[str]:
    on = "samples that the search has not seen" if report.is_fresh else "the samples that it was chosen by"
    yield f"trial {report.winner}, trained anew, on {on}:"
    yield f"score {units.number(report.winner_score)}, given {_span(report.given_score)}"
    seeds = ", ".join(units.number(score) for score in report.seed_scores)
    yield f"difference {_span(report.difference)}; over seeds {_span(report.seed_difference)} ({seeds})"
    word = "no worse" if report.is_no_worse else "not proved to be no worse"
    yield f"{word} than by {report.allowed_loss:g}, which is allowed"
    if report.winner_cost is not None and report.winner_cost.latency_fraction is not None:
        value, low, high = report.winner_cost.latency_fraction
        yield f"timed longer: {value:.3f} of the given model's time ({low:.3f} to {high:.3f})"


def _given_row(report: SearchReport) -> tuple[str, ...]:
    return ("", "given", "", "", units.number(report.given_judged), "", *_costs(report.given))


def _row(row: Candidate, report: SearchReport) -> tuple[str, ...]:
    mark = "*" if row.number in report.front else ""
    choice = ", ".join(f"{name} {value}" for name, value in row.choice.items())
    score = units.number(row.score)
    return (mark, f"{row.number}", choice, row.state, score, f"{row.num_rounds}", *_costs(row.cost))


def _costs(cost: Cost | None) -> tuple[str, ...]:
    if cost is None:
        return (units.UNKNOWN,) * 5
    fraction = f"{cost.latency_fraction[0]:.3f}" if cost.latency_fraction is not None else units.UNKNOWN
    latency = units.duration(cost.latency_s[0] if cost.latency_s is not None else None)
    return (fraction, latency, units.work(cost.work_flop), units.size(cost.peak_bytes), f"{cost.num_parameters}")


def _distil_lines(report: DistilReport) -> Iterator[str]:
    teacher = f", teacher {report.teacher_parameters}" if report.teacher_parameters is not None else ""
    yield f"{report.num_parameters} parameters{teacher}; {report.num_steps} steps in {units.duration(report.seconds)}"
    yield ""
    rows = [
        (
            f"{p.step}",
            *(units.number(v) for v in (p.loss, p.soft, p.hard, p.feature, p.rate)),
            units.duration(p.elapsed_s),
        )
        for p in report.history
    ]
    yield from _table(("step", "loss", "teacher", "targets", "features", "rate", "time"), rows, left=0)
    for name, interval in (
        ("before", report.before),
        ("score", report.score),
        ("teacher", report.teacher_score),
        ("difference", report.difference),
    ):
        if interval is not None:
            yield f"{name:12}{_span(interval)}"


def _span(interval: Interval | None) -> str:
    if interval is None:
        return units.UNKNOWN
    return (
        f"{interval.value:.4f} ({interval.low:.4f} to {interval.high:.4f}, {units.percent(interval.confidence)}, "
        f"n = {interval.num_samples}, {interval.method})"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = _LEFT + 2) -> Iterator[str]:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        cells = (c.ljust(w) if at < left else c.rjust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()
