"""What tuning found, as a ladder: the untouched script, each lever on top of those before, all together; what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.records.plan import Plan
from flatout.records.verdict import Verdict
from flatout.reporting.inert import Words
from flatout.reporting.units import duration

_WIDTH: Final = 100
_INSET: Final = (0, 0, 0, 2)


def ladder(
    plan: Plan, proof: Verdict | None, left_out: Sequence[tuple[str, str]], *, is_complete: bool
) -> RenderableType:
    """The plan's rungs with what was predicted and measured, the final proof, and (lever, reason) of the others."""
    parts: list[RenderableType] = [Words(headline(plan, proof), style="bold green" if plan.lever else "bold yellow")]
    if plan.lever:
        parts += ["", Padding(_rungs(plan, proof), _INSET)]
    if left_out:
        parts += ["", Text("Tried or considered, and left out", style="bold"), Padding(_others(left_out), _INSET)]
    if not is_complete:
        parts += ["", Words("The time was up before everything had been tried; the same command goes on from here.")]
    return Constrain(Group(*parts), width=_WIDTH)


def headline(plan: Plan, proof: Verdict | None) -> str:
    """The answer in a sentence."""
    if not plan.lever or proof is None or proof.speed is None:
        return "No plan: nothing that was tried is equal and faster."
    speed = proof.speed
    return (
        f"{speed.ratio:.2f}x faster ({speed.low:.2f} - {speed.high:.2f}), {duration(speed.before_s)} -> "
        f"{duration(speed.after_s)} a step, proved {plan.guarantee} on fresh seeds"
    )


def _rungs(plan: Plan, proof: Verdict | None) -> Table:
    table = Table("", "lever", "predicted", "measured", "guarantee", box=None, header_style="bold", pad_edge=False)
    table.add_row("", "untouched", "", "1.00x", "")
    for number, planned in enumerate(plan.lever, start=1):
        low, high = planned.predicted or (1.0, 1.0)
        measured = (
            f"{planned.measured[0]:.2f}x ({planned.measured[1]:.2f} - {planned.measured[2]:.2f})"
            if planned.measured
            else ""
        )
        settings = ", ".join(f"{k}={v}" for k, v in planned.parameters.items() if not isinstance(v, tuple))
        name = f"{planned.id} ({settings})" if settings else planned.id
        table.add_row(str(number), name, f"{low:.2f} - {high:.2f}x", measured, planned.guarantee)
    if proof is not None and proof.speed is not None:
        speed = proof.speed
        table.add_row(
            "", "all together", "", f"{speed.ratio:.2f}x ({speed.low:.2f} - {speed.high:.2f})", proof.equality.guarantee
        )
    return table


def _others(left_out: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for lever, because in left_out:
        table.add_row(Words(lever), Words(because))
    return table
