"""A Verdict: equal or not, faster or not, smaller or not, and on what."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from flatout.core import units
from flatout.core.records.verdict import Equality, Footprint, Outcome, Reference, Speed, Verdict
from flatout.report.document import Block, Heading, Listing
from flatout.report.junit import JunitCase
from flatout.report.sanitise import Words
from flatout.report.text import plain_text

Remark = tuple[str, str]

_TONES: Final[dict[Outcome, str]] = {
    "proved": "bold green",
    "different": "bold red",
    "slower": "bold red",
    "unknown": "bold yellow",
}
_PROMISES: Final = {
    "exact": "bit for bit",
    "bounded": "within the rounding of the steps before",
    "distribution": "in distribution (other random numbers; within rounding when both draw alike)",
    "quality": "in quality",
}
_REFERENCES: Final[dict[Reference, str]] = {
    "float64": "measured against the same steps in float64",
    "finer": "measured against the same steps in a finer precision",
    "noise": "measured by what rounding noise does to the steps before",
}
SAME_SIZE: Final = 0.02
"""Peaks of two processes that run the same differ by about this."""

_SHORT_START_S: Final = 0.5
"""Two starts of one script differ by some tenths of a second."""


def verdict_blocks(verdict: Verdict) -> list[Block]:
    """The answer, what was compared and measured, and on what."""
    remarks = [*_equality(verdict.equality), *_speed(verdict.speed), *map(_footprint, verdict.footprints)]
    remarks += (
        [("levers", f"met nothing to change in these steps: {', '.join(verdict.missed)}")] if verdict.missed else []
    )
    where = f"{verdict.device}; torch {verdict.torch}, Python {verdict.python}"
    return [
        Heading(verdict_headline(verdict), style=_TONES[verdict.outcome], is_title=True),
        Listing(remarks, inset=2),
        Words(f"{where}; proof of {units.duration(verdict.seconds)}", style="dim"),
    ]


def verdict_headline(verdict: Verdict) -> str:
    """The answer in a sentence."""
    speed, first, equal = verdict.speed, verdict.equality.first, f"equal {_PROMISES[verdict.equality.guarantee]}"
    ratio = f"{speed.ratio:.2f}x ({speed.low:.2f} - {speed.high:.2f})" if speed is not None else ""
    if verdict.outcome == "proved":
        return f"PROVED: {equal}, {ratio} faster" if ratio else f"PROVED: {equal}; not timed"
    if verdict.outcome == "slower" and ratio:
        return f"SLOWER: {equal}, but {ratio} as fast"
    if verdict.outcome == "different":
        return f"DIFFERENT: {verdict.because if first is None else f'step {first.step}, {first.place}'}"
    about = f", {ratio}" if ratio and verdict.equality.holds else ""
    return f"COULD NOT TELL: {verdict.because}{about}"


def verdict_cases(verdict: Verdict) -> list[JunitCase]:
    """Equality and speed as two cases: one fails where `flatout verify` exits with 1, one is an error where it exits with 3."""
    report, answer = plain_text(verdict_blocks(verdict)), verdict_headline(verdict)
    is_equal = verdict.equality.holds is True and verdict.outcome != "different"
    compared = JunitCase("equality", "passed", report)
    raced = JunitCase("speed", "passed", report, seconds=verdict.speed.after_s if verdict.speed is not None else 0.0)
    if verdict.outcome == "different":
        compared = compared._replace(result="failed", message=answer)
    elif not is_equal:
        compared = compared._replace(result="error", message=answer)
    if verdict.outcome == "slower":
        raced = raced._replace(result="failed", message=answer)
    elif is_equal and verdict.outcome == "unknown":
        raced = raced._replace(result="error", message=answer)
    elif verdict.speed is None or not is_equal:
        raced = raced._replace(result="skipped", message="not timed, or not judged as the steps are not proved equal")
    return [compared, raced]


def _equality(equality: Equality) -> Iterator[Remark]:
    if equality.guarantee == "quality":
        yield "quality", equality.because
        return
    if not equality.num_steps:
        return
    compared = f"{equality.num_steps} steps, {equality.num_tensors} tensors: losses, outputs, gradients, parameters"
    if equality.guarantee == "exact":
        yield "equality", f"{compared}; {'every bit is the same' if equality.holds else 'not the same bits'}"
    else:
        against = _REFERENCES.get(equality.reference, "nothing to measure errors by")
        yield "equality", f"{compared}; {against}, up to {equality.factor:g}x the error before"
    first = equality.first
    if first is not None and equality.holds is not True:
        yield "first", f"step {first.step}, {first.place}: {deviation_words(equality)}"
    if equality.before_error is not None and equality.after_error is not None:
        worst = f"{equality.worst:.2g}" if math.isfinite(equality.worst) else "beyond all"
        yield (
            "errors",
            f"{equality.before_error:.2g} before, {equality.after_error:.2g} after (last step, all together); the "
            f"worst is {worst} of what is allowed",
        )
    if equality.holds and equality.because:
        yield "rounding", equality.because


def deviation_words(equality: Equality) -> str:
    """How far off the first thing is that differs, and how far it may be; why it could not be told where nothing is known."""
    first = equality.first
    if first is None:
        return equality.because
    error = f"off by {first.error:.2g} of its norm" if first.error is not None else first.because
    allowed = f", {first.allowed:.2g} allowed" if first.allowed is not None else ""
    return f"{error}{allowed}"


def _speed(speed: Speed | None) -> Iterator[Remark]:
    if speed is not None:
        yield (
            "speed",
            f"{units.duration(speed.before_s)} -> {units.duration(speed.after_s)} a step; {speed.num_pairs} pairs of "
            "stretches in turn, 95 % interval of the median ratio",
        )
        start = _start_words(speed)
        if start:
            yield "start", start


def _start_words(speed: Speed) -> str:
    """How much longer the script takes until its steps are fast, and when that is made up for; '' where that is little."""
    later_s, steps = speed.later_s, speed.break_even_steps
    if not speed.num_first or later_s < max(_SHORT_START_S, 0.1 * speed.first_before_s):
        return ""
    took = f"{units.duration(speed.first_before_s)} -> {units.duration(speed.first_after_s)}"
    pays = f"; made up for after {steps} steps" if steps is not None else ""
    return f"the first {speed.num_first} steps are done after {took}{pays}"


def _footprint(footprint: Footprint) -> Remark:
    ratio = footprint.after_bytes / footprint.before_bytes if footprint.before_bytes else 1.0
    same = " (the same)" if abs(ratio - 1) <= SAME_SIZE else f" ({ratio:.2f}x)"
    return (
        "memory",
        f"{units.size(footprint.before_bytes)} -> {units.size(footprint.after_bytes)}{same} at the peak, "
        f"{footprint.device}",
    )
