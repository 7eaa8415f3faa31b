"""What tuning found, as a ladder: the untouched script, each lever on top of those before, all together; what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.records.lever import PlannedLever
from flatout.records.tuned import LeftOut, Rung, Tuned
from flatout.records.verdict import Verdict
from flatout.reporting.inert import Words
from flatout.reporting.units import duration, percent, size

_WIDTH: Final = 110
_WIDE: Final = 104
"""Columns that the whole table takes with usual names."""
_INSET: Final = (0, 0, 0, 2)
_SAME_SIZE: Final = 0.02
"""Peaks of two processes that run the same differ by about this."""
UNTOUCHED: Final = "untouched"
TOGETHER: Final = "all together"


class Row(NamedTuple):
    """One rung in words, with the seconds of a step once it is reached and their interval (None where it was not timed)."""

    name: str
    step_s: tuple[float, float, float] | None
    predicted: str = ""
    measured: str = ""
    memory: str = ""
    guarantee: str = ""
    because: str = ""
    where: str = ""
    """The place in the source and the settings."""

    @property
    def step(self) -> str:
        """A step's time."""
        return duration(self.step_s[0]) if self.step_s is not None else ""


def ladder(tuned: Tuned) -> RenderableType:
    """The plan's rungs with what was predicted and measured, the final proof, and the other levers with the reasons."""
    style = "bold green" if tuned.plan.lever else "bold yellow"
    parts: list[RenderableType] = [Words(headline(tuned), style=style)]
    if tuned.plan.lever:
        found = rows(tuned)
        parts += ["", Padding(_Rungs(found), _INSET)]
        if any(row.where for row in found):
            parts += ["", Padding(_places(found), _INSET)]
    if where := circumstances(tuned):
        parts += ["", Text(where, style="dim")]
    tried = [one for one in tuned.left_out if one.is_for_script]
    if tried:
        parts += ["", Text(LEFT_OUT, style="bold"), Padding(_others(tried), _INSET)]
    others = ", ".join(dict.fromkeys(one.lever for one in tuned.left_out if not one.is_for_script))
    if others:
        parts += ["", Text(NOT_FOR_SCRIPT, style="bold"), Padding(Words(others, style="dim"), _INSET)]
    if not tuned.is_complete:
        parts += ["", Words(UNFINISHED)]
    return Constrain(Group(*parts), width=_WIDTH)


LEFT_OUT: Final = "Tried or considered, and left out"
NOT_FOR_SCRIPT: Final = "Not for this script (--html, --md and --json say why)"
UNFINISHED: Final = "The time was up before everything had been tried; the same command goes on from here."


def headline(tuned: Tuned) -> str:
    """The answer in a sentence."""
    plan, proof = tuned.plan, tuned.proof
    if not plan.lever or proof is None or proof.speed is None:
        return f"No plan: {plan.because or 'nothing that was tried is equal and faster'}."
    speed = proof.speed
    steps = f"{duration(speed.before_s)} -> {duration(speed.after_s)} a step, proved {_promise(proof)} on fresh seeds"
    if not speed.is_faster and proof.footprints:
        print_ = proof.footprints[-1]
        return f"{size(print_.before_bytes)} -> {size(print_.after_bytes)} at the peak, {steps}"
    return f"{speed.ratio:.2f}x faster ({speed.low:.2f} - {speed.high:.2f}), {steps}"


def circumstances(tuned: Tuned) -> str:
    """What it was proved on, '' where nothing was."""
    proof = tuned.proof
    if proof is None:
        return ""
    steps, tensors = proof.equality.num_steps, proof.equality.num_tensors
    return f"{steps} steps and {tensors} tensors compared; {proof.device}; torch {proof.torch}, Python {proof.python}"


def rows(tuned: Tuned) -> tuple[Row, ...]:
    """From the untouched script to all together. The time after each rung is the first one, less what each lever saved."""
    speed = tuned.proof.speed if tuned.proof is not None else None
    left_s = speed.before_s if speed is not None else None
    found = [Row(UNTOUCHED, (left_s, left_s, left_s) if left_s is not None else None, measured="1.00x")]
    for rung in tuned.rungs or tuple(Rung(planned=planned) for planned in tuned.plan.lever):
        row = _row(rung, left_s)
        left_s = row.step_s[0] if row.step_s is not None else left_s
        found.append(row)
    if tuned.proof is not None and speed is not None:
        together = (speed.after_s, speed.before_s / speed.high, speed.before_s / speed.low)
        measured = _range(speed.ratio, speed.low, speed.high)
        found.append(
            Row(TOGETHER, together, measured=measured, memory=_memory(tuned.proof), guarantee=_promise(tuned.proof))
        )
    return tuple(found)


def _row(rung: Rung, before_s: float | None) -> Row:
    planned = rung.planned
    measured = planned.measured
    step_s = None
    if before_s is not None and measured is not None:
        step_s = (before_s / measured[0], before_s / measured[2], before_s / measured[1])
    return Row(
        name=planned.id,
        where=_where(planned),
        step_s=step_s,
        predicted=f"{planned.predicted[0]:.2f} - {planned.predicted[1]:.2f}x" if planned.predicted is not None else "",
        measured=_range(*measured) if measured is not None else "",
        memory=_memory(rung.verdict) if rung.verdict is not None else "",
        guarantee=_promise(rung.verdict) if rung.verdict is not None else planned.guarantee,
        because=planned.because,
    )


def _where(planned: PlannedLever) -> str:
    """Where the lever is pulled, and its settings."""
    parameters = dict(planned.parameters)
    code, file, function = (str(parameters.pop(name, "")) for name in ("code", "file", "function"))
    settings = ", ".join(f"{k}={v}" for k, v in parameters.items())
    place = ", ".join(filter(None, (file, function if function != "<module>" else "")))
    return "; ".join(filter(None, (f"{place}: {code}" if code else "", settings)))


def _range(ratio: float, low: float, high: float) -> str:
    return f"{ratio:.2f}x ({low:.2f} - {high:.2f})"


def _promise(verdict: Verdict) -> str:
    """The guarantee that was kept, and the precision whose rounding was allowed."""
    guarantee, at = verdict.equality.guarantee, verdict.equality.at
    return f"{guarantee} at {at}" if at and guarantee != "exact" else guarantee


def _memory(verdict: Verdict) -> str:
    """The peak afterwards, of the device where there is one, and how it changed."""
    if not verdict.footprints:
        return ""
    print_ = verdict.footprints[-1]
    change = print_.after_bytes / print_.before_bytes - 1 if print_.before_bytes else 0.0
    if abs(change) <= _SAME_SIZE:
        return f"{size(print_.after_bytes)} (same)"
    return f"{size(print_.after_bytes)} ({'-' if change < 0 else '+'}{percent(abs(change))})"


class _Rungs:
    """The table of rungs; on a narrow terminal without what was predicted and without memory."""

    def __init__(self, found: Sequence[Row]) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_wide = options.max_width >= _WIDE
        middle = ("predicted", "step", "memory") if is_wide else ("step",)
        table = Table("", "lever", "measured", *middle, "guarantee", box=None, header_style="bold", pad_edge=False)
        for column in table.columns[1:3]:
            column.no_wrap = True
        for number, row in enumerate(self._found):
            label = str(number) if _is_lever(row) else ""
            cells = (row.predicted, row.step, row.memory) if is_wide else (row.step,)
            table.add_row(label, Words(row.name), row.measured, *cells, row.guarantee)
        yield table


def _places(found: Sequence[Row]) -> Table:
    table = Table.grid(padding=(0, 1))
    for number, row in enumerate(found):
        if _is_lever(row) and row.where:
            table.add_row(Text(str(number), style="dim"), Words(row.where, style="dim"))
    return table


def _is_lever(row: Row) -> bool:
    return row.name not in (UNTOUCHED, TOGETHER)


def _others(left_out: Sequence[LeftOut]) -> Table:
    table = Table.grid(padding=(0, 2))
    for one in left_out:
        table.add_row(Words(one.lever), Words(one.because))
    return table
