"""`flatout simulate`: what failures leave of a run's time on many devices, and what each measure against them brings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import require_writable
from flatout.app.cli.terminal import print_lines, print_unwrapped, print_written

if TYPE_CHECKING:
    from flatout.core.records.failure import Recovery


def simulate(
    gpus: Annotated[int, typer.Option(help="Devices.")],
    rate: Annotated[float, typer.Option(help="Interruptions that 1000 nodes cause in a day.")] = 6.5,
    mtbf: Annotated[
        float | None, typer.Option(help="Instead of the rate: hours between interruptions of the job.")
    ] = None,
    node: Annotated[
        int, typer.Option("--gpus-per-node", metavar="N", help="Devices that are joined by their own links.")
    ] = 8,
    days: Annotated[float, typer.Option(help="Length of the run.")] = 54.0,
    stall: Annotated[float, typer.Option(help="Seconds that a checkpoint stops the steps.")] = 60.0,
    restart: Annotated[float, typer.Option(help="Seconds from noticing a failure until steps go on.")] = 600.0,
    detect: Annotated[float, typer.Option(help="Seconds until a failure is noticed.")] = 0.0,
    interval: Annotated[
        float | None, typer.Option(help="Seconds of work between checkpoints; the best unless given.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the curves over the number of devices as one HTML page to this file."),
    ] = None,
) -> None:
    """Simulate the failures of a long run: its interruptions, its goodput, and what faster saves and restarts gain."""
    from msgspec import structs

    from flatout.core import units
    from flatout.core.errors import UsageError
    from flatout.core.files import STANDARD_OUTPUT, write_whole_file
    from flatout.core.records.failure import Failures
    from flatout.report.parts.goodput import curve_table, recovery_table
    from flatout.scale.failures import expected_goodput, interruptions, simulated_goodput

    require_writable(html=html)
    takes_stdout = html == STANDARD_OUTPUT
    show = partial(print_lines, stderr=takes_stdout)
    if gpus < 1 or node < 1 or (mtbf is not None and not mtbf > 0):
        raise UsageError(f"{gpus} devices, {node} a node, {mtbf} hours between interruptions; give positive numbers")
    nodes = -(-gpus // node)
    per_thousand = rate if mtbf is None else 24 * 1000 / (mtbf * nodes)
    failures = Failures(num_nodes=nodes, per_thousand_node_days=per_thousand)
    recoveries = _recoveries(stall, restart, detect, interval)
    found = {name: expected_goodput(failures, recovery) for name, recovery in recoveries.items()}
    by_chance = simulated_goodput(failures, next(iter(recoveries.values())))
    mean, spread = interruptions(failures, days)
    show(
        f"{gpus:,} devices, {nodes:,} nodes, {per_thousand:.3g} interruptions per 1000 node-days: one every "
        f"{units.long_duration(failures.mtbf_s)}, {mean:.0f} +- {spread:.0f} in {days:g} days"
    )
    print_unwrapped([recovery_table(found)], stderr=takes_stdout)
    first = next(iter(found.values()))
    show(
        f"the first, played with {40_000:,} interruptions: {by_chance.goodput:.1%} goodput ({first.goodput:.1%} in closed form)"
    )
    sizes = [1 << power for power in range(8, 18)]
    of_size = {size: structs.replace(failures, num_nodes=-(-size // node)) for size in sizes}
    curves = {
        name: [(size, expected_goodput(many, recovery).goodput) for size, many in of_size.items()]
        for name, recovery in recoveries.items()
    }
    for name in (next(iter(curves)), next(reversed(curves))):
        print_unwrapped([f"{name}:", curve_table(curves[name][::3])], stderr=takes_stdout)
    if html is not None:
        from flatout.report.html.goodput import goodput_page

        title = (
            f"{first.goodput:.1%} goodput, {gpus:,} devices in {nodes:,} nodes, one interruption every "
            f"{units.long_duration(failures.mtbf_s)}"
        )
        write_whole_file(html, goodput_page(curves, title=title, found=found))
        print_written(html, stderr=takes_stdout)


def _recoveries(stall: float, restart: float, detect: float, interval: float | None) -> dict[str, Recovery]:
    """Recoveries as they are, and with each measure: what they cost is what was measured of flatout's own (docs)."""
    from flatout.core.records.failure import Recovery

    background = min(stall, max(0.5, stall / 20))
    quick = min(restart, 15.0)
    unchanged = Recovery(stall_s=stall, restart_s=restart, detect_s=detect, interval_s=interval)
    return {
        "as it is": unchanged,
        "saved in the background": Recovery(stall_s=background, write_s=stall, restart_s=restart, detect_s=detect),
        "restarted in seconds": Recovery(stall_s=stall, restart_s=quick, detect_s=min(detect, 5.0)),
        "both": Recovery(stall_s=background, write_s=stall, restart_s=quick, detect_s=min(detect, 5.0)),
    }


COMMAND = Command(
    simulate,
    order=70,
    group="devices",
    examples=("flatout simulate --gpus 16384", "flatout simulate --gpus 1024 --mtbf 8 --html goodput.html"),
)
