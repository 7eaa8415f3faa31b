"""`flatout simulate`: what failures leave of a run's time on many devices, and what each measure against them brings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from flatout.records.failure import Recovery


def simulate(
    gpus: Annotated[int, typer.Option(help="Devices.")],
    rate: Annotated[float, typer.Option(help="Interruptions that 1000 nodes cause in a day.")] = 6.5,
    mtbf: Annotated[
        float | None, typer.Option(help="Instead of the rate: hours between interruptions of the job.")
    ] = None,
    node: Annotated[int, typer.Option(help="Devices of a node.")] = 8,
    days: Annotated[float, typer.Option(help="Length of the run.")] = 54.0,
    stall: Annotated[float, typer.Option(help="Seconds that a checkpoint stops the steps.")] = 60.0,
    restart: Annotated[float, typer.Option(help="Seconds from noticing a failure until steps go on.")] = 600.0,
    detect: Annotated[float, typer.Option(help="Seconds until a failure is noticed.")] = 0.0,
    interval: Annotated[
        float | None, typer.Option(help="Seconds of work between checkpoints; the best unless given.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the curves over the number of devices there.")] = None,
) -> None:
    """Say how often the run is interrupted, what is kept of its time, and what is kept with faster saves and restarts."""
    from flatout.errors import UsageError
    from flatout.records.failure import Failures
    from flatout.records.record import write_file
    from flatout.reporting import units
    from flatout.reporting.goodput import curve_lines, recovery_lines
    from flatout.simulate.failures import expected, interruptions, played

    if gpus < 1 or node < 1 or (mtbf is not None and not mtbf > 0):
        raise UsageError(f"{gpus} devices, {node} a node, {mtbf} hours between interruptions; give positive numbers")
    nodes = -(-gpus // node)
    per_thousand = rate if mtbf is None else 24 * 1000 / (mtbf * nodes)
    failures = Failures(num_nodes=nodes, per_thousand_node_days=per_thousand)
    ways = _ways(stall, restart, detect, interval)
    found = {name: expected(failures, recovery) for name, recovery in ways.items()}
    by_chance = played(failures, next(iter(ways.values())))
    console = Console(soft_wrap=True, highlight=False)
    mean, spread = interruptions(failures, days)
    console.print(
        f"{gpus:,} devices, {nodes:,} nodes, {per_thousand:g} interruptions per 1000 node-days: one every "
        f"{units.duration(failures.mtbf_s)}, {mean:.0f} +- {spread:.0f} in {days:g} days",
        markup=False,
    )
    for line in recovery_lines(found):
        console.print(line, markup=False)
    first = next(iter(found.values()))
    console.print(
        f"the first, played with {40_000:,} interruptions: {by_chance.goodput:.1%} kept ({first.goodput:.1%} in closed form)"
    )
    sizes = [1 << power for power in range(8, 18)]
    curves = {
        name: [
            (
                size,
                expected(Failures(num_nodes=-(-size // node), per_thousand_node_days=per_thousand), recovery).goodput,
            )
            for size in sizes
        ]
        for name, recovery in ways.items()
    }
    last = list(curves)[-1]
    for name in (next(iter(curves)), last):
        console.print(f"{name}:", markup=False)
        for line in curve_lines(curves[name][::3]):
            console.print(line, markup=False)
    if html is not None:
        from flatout.reporting.html.goodput import goodput_page

        title = f"What is kept of a run's time, {per_thousand:g} interruptions per 1000 node-days"
        write_file(html, goodput_page(curves, title=title).encode())
        console.print(f"written to {html}", markup=False)


def _ways(stall: float, restart: float, detect: float, interval: float | None) -> dict[str, Recovery]:
    """As given, and with each measure: what they cost is what was measured of flatout's own (docs)."""
    from flatout.records.failure import Recovery

    background = min(stall, max(0.5, stall / 20))
    quick = min(restart, 15.0)
    given = Recovery(stall_s=stall, restart_s=restart, detect_s=detect, interval_s=interval)
    return {
        "as it is": given,
        "saved in the background": Recovery(stall_s=background, write_s=stall, restart_s=restart, detect_s=detect),
        "restarted in seconds": Recovery(stall_s=stall, restart_s=quick, detect_s=min(detect, 5.0)),
        "both": Recovery(stall_s=background, write_s=stall, restart_s=quick, detect_s=min(detect, 5.0)),
    }
