"""A Verdict for a terminal: equal or not, faster or not, smaller or not, and on what."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.records.verdict import Equality, Footprint, Outcome, Speed, Verdict
from flatout.reporting import units
from flatout.reporting.inert import Words

Row = tuple[str, str]

_WIDTH: Final = 100
_INSET: Final = (0, 0, 0, 2)
_TONES: Final[dict[Outcome, str]] = {
    "proved": "bold green",
    "different": "bold red",
    "slower": "bold red",
    "unknown": "bold yellow",
}
_PROMISES: Final = {
    "exact": "bit for bit",
    "bounded": "within the rounding of the steps before",
    "quality": "by its metric",
}
_SAME_SIZE: Final = 0.02
"""Peaks of two processes that run the same differ by about this."""

_SHORT_START_S: Final = 0.5
"""Two starts of one script differ by some tenths of a second."""


def verdict_report(verdict: Verdict) -> RenderableType:
    """The verdict, at most 100 columns wide."""
    parts: list[RenderableType] = [Words(headline(verdict), style=_TONES[verdict.outcome])]
    lines = [*_equality(verdict.equality), *_speed(verdict.speed), *map(_footprint, verdict.footprints)]
    table = Table.grid(padding=(0, 2, 0, 0))
    for label, text in lines:
        table.add_row(Text(label, style="dim"), Words(text))
    parts.append(Padding(table, _INSET))
    where = f"{verdict.device}; torch {verdict.torch}, Python {verdict.python}"
    parts.append(Text(f"{where}; proof of {units.duration(verdict.seconds)}", style="dim"))
    return Constrain(Group(*parts), width=_WIDTH)


def headline(verdict: Verdict) -> str:
    """The answer in a sentence."""
    speed = verdict.speed
    if verdict.outcome == "proved" and speed is not None:
        return f"PROVED: equal {_PROMISES[verdict.equality.guarantee]}, {_ratio(speed)} faster"
    if verdict.outcome == "proved":
        return f"PROVED: equal {_PROMISES[verdict.equality.guarantee]}; not timed"
    if verdict.outcome == "slower" and speed is not None:
        return f"SLOWER: equal {_PROMISES[verdict.equality.guarantee]}, but {_ratio(speed)} as fast"
    if verdict.outcome == "different":
        return f"DIFFERENT: {_where(verdict)}"
    return f"COULD NOT TELL: {verdict.because}"


def _where(verdict: Verdict) -> str:
    first = verdict.equality.first
    if first is None:
        return verdict.because
    return f"step {first.step}, {first.what} {first.tensor}".rstrip()


def _ratio(speed: Speed) -> str:
    return f"{speed.ratio:.2f}x ({speed.low:.2f} - {speed.high:.2f})"


def _equality(equality: Equality) -> Iterator[Row]:
    if not equality.num_steps:
        return
    compared = f"{equality.num_steps} steps, {equality.num_tensors} tensors: losses, outputs, gradients, parameters"
    if equality.guarantee == "exact":
        yield "equality", f"{compared}; {'every bit is the same' if equality.is_kept else 'not the same bits'}"
    else:
        yield "equality", f"{compared}; against {equality.reference}, up to {equality.factor:g}x the error before"
    first = equality.first
    if first is not None and equality.is_kept is not True:
        error = f"off by {first.error:.2g} of its norm" if first.error is not None else first.because
        allowed = f", {first.allowed:.2g} allowed" if first.allowed is not None else ""
        yield "first", f"step {first.step}, {first.what} {first.tensor}: {error}{allowed}"
    if equality.before_error is not None and equality.after_error is not None:
        worst = f"{equality.worst:.2g}" if math.isfinite(equality.worst) else "beyond all"
        yield (
            "errors",
            f"{equality.before_error:.2g} before, {equality.after_error:.2g} after (last step, all together); the "
            f"worst is {worst} of what is allowed",
        )
    if equality.is_kept and equality.because:
        yield "rounding", equality.because


def _speed(speed: Speed | None) -> Iterator[Row]:
    if speed is not None:
        yield (
            "speed",
            f"{units.duration(speed.before_s)} -> {units.duration(speed.after_s)} a step; {speed.num_pairs} pairs of "
            "stretches in turn, 95 % interval of the median ratio",
        )
        start = start_words(speed)
        if start:
            yield "start", start


def start_words(speed: Speed) -> str:
    """How much longer the script takes until its steps are fast, and when that is made up for; '' where that is little."""
    later_s, steps = speed.first_after_s - speed.first_before_s, speed.break_even_steps
    if not speed.num_first or later_s < max(_SHORT_START_S, 0.1 * speed.first_before_s):
        return ""
    took = f"{units.duration(speed.first_before_s)} -> {units.duration(speed.first_after_s)}"
    pays = f"; made up for after {steps} steps" if steps is not None else ""
    return f"the first {speed.num_first} steps are done after {took}{pays}"


def _footprint(footprint: Footprint) -> Row:
    ratio = footprint.after_bytes / footprint.before_bytes if footprint.before_bytes else 1.0
    same = " (the same)" if abs(ratio - 1) <= _SAME_SIZE else f" ({ratio:.2f}x)"
    return (
        "memory",
        f"{units.size(footprint.before_bytes)} -> {units.size(footprint.after_bytes)}{same} at the peak, "
        f"{footprint.device}",
    )
