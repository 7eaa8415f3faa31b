"""`flatout simulate`: what failures leave of a run's time on many devices, and what each measure against them brings."""

from __future__ import annotations

from collections.abc import Iterator
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
    rate: Annotated[
        float | None,
        typer.Option(help="Interruptions that 1000 nodes cause in a day; the middle of published rates unless given."),
    ] = None,
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
    spares: Annotated[int, typer.Option(help="Spare nodes beside the job's, for those that are lost.")] = 16,
    shape: Annotated[
        float, typer.Option(help="Of the times between interruptions (Weibull): 1 chance alone, below 1 in clusters.")
    ] = 1.0,
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
    from flatout.scale.interruptions import PUBLISHED_RATES, usual_rate

    require_writable(html=html)
    takes_stdout = html == STANDARD_OUTPUT
    show = partial(print_lines, stderr=takes_stdout)
    if gpus < 1 or node < 1 or (mtbf is not None and not mtbf > 0):
        raise UsageError(f"{gpus} devices, {node} a node, {mtbf} hours between interruptions; give positive numbers")
    nodes = -(-gpus // node)
    is_published = rate is None and mtbf is None
    per_thousand = usual_rate() if rate is None else rate
    per_thousand = per_thousand if mtbf is None else 24 * 1000 / (mtbf * nodes)
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
    if is_published:
        first_recovery = next(iter(recoveries.values()))
        show("published rates differ by several times; by each of them, as it is:")
        for published in PUBLISHED_RATES:
            one = structs.replace(failures, per_thousand_node_days=published.per_thousand_node_days)
            goodput = expected_goodput(one, first_recovery).goodput
            show(f"   {published.per_thousand_node_days:5.2f}  {goodput:6.1%}  {published.source}")
    show(
        *_played_lines(
            nodes, per_thousand, days=days, spares=spares, shape=shape, stall=stall, restart=restart, detect=detect
        )
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


def _played_lines(
    nodes: int,
    per_thousand: float,
    *,
    days: float,
    spares: int,
    shape: float,
    stall: float,
    restart: float,
    detect: float,
) -> Iterator[str]:
    """What several kinds of interruption leave, with a file system alone and with checkpoints in memory, too."""
    from msgspec import structs

    from flatout.core.records.failure import Failures, Fleet, Recovery
    from flatout.scale.failures import best_interval_s
    from flatout.scale.interruptions import played_run, published_kinds, surviving_tiers, usual_tiers

    kinds = [structs.replace(kind, shape=shape) for kind in published_kinds(per_thousand)]
    interval_s = best_interval_s(
        Failures(num_nodes=nodes, per_thousand_node_days=per_thousand), Recovery(stall_s=stall, restart_s=restart)
    )
    fleet = Fleet(num_nodes=nodes, num_spares=spares, detect_s=detect)
    alternatives = {
        "file system": usual_tiers(stall_s=stall, restart_s=restart, interval_s=interval_s),
        "memory of nodes, too": surviving_tiers(step_s=5.0, stall_s=stall, restart_s=restart),
    }
    for number, (name, tiers) in enumerate(alternatives.items()):
        found = played_run(kinds, fleet, tiers, days=days)
        if not number:
            counts = ", ".join(f"{count:.0f} {kind}" for kind, count in found.interruptions.items())
            yield f"by kind, in Llama 3's mix, over {days:g} days with {spares} spare nodes: {counts}"
        yield (
            f"   checkpoints in {name}: {found.goodput:.1%} goodput, {found.saving:.1%} saving, {found.lost:.1%} done twice, "
            f"{found.down:.1%} down, {found.waiting:.1%} waiting for nodes"
        )


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
