"""Ways to compile the plan of a row of bench/best_device.py that was chosen by hand, side by side.

    python bench/compile_ways.py OUT.json --row unet [--ways WAY ...] [--small]

Sides start one after the other, each in a process of its own with a cache of its own for compiled kernels, so that the seconds
until it stands are those of a first run; then all take stretches of steps in turn. Ratios are of the first way's seconds a step
over another's, medians of paired stretches with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from best_device import BEST, ROWS, own_request, small
from tune_device import Race, estimate, toml_of

from flatout.machine.measure.stats import median_estimate
from flatout.tune.apply import circumstances
from flatout.tune.verify.side_process import Request

WAYS = {
    "graphs": ("triton.cudagraphs",),
    "more tiles, graphs": ("max_autotune_pointwise", "triton.cudagraphs"),
    "coordinate descent, graphs": ("coordinate_descent_tuning", "triton.cudagraphs"),
}
"""Switches of Inductor by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--row", choices=tuple(ROWS), required=True)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=tuple(WAYS))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    row = small(ROWS[options.row]) if options.small else ROWS[options.row]
    levers = json.loads((BEST / "levers.json").read_text())[options.row]
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Request] = {}
        for number, way in enumerate(options.ways):
            plan = Path(folder) / f"{number}.toml"
            plan.write_text(toml_of(compiled_by(levers, WAYS[way])))
            request = own_request(row, plan)
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{number}", "TRITON_CACHE_DIR": f"{folder}/{number}/triton"}
            sides[way] = msgspec.structs.replace(request, environment={**request.environment, **caches})
        with Race(sides, cycle=row.cycle, start_s=row.start_s, one_by_one=True) as race:
            seconds = race.seconds()
    first = seconds.get(options.ways[0], [])
    found = {
        "row": options.row,
        "plan": [lever for lever, _ in levers],
        "stood_after_s": race.stood_after_s,
        "step_s": {way: median_estimate(taken).value for way, taken in seconds.items()},
        "times_as_fast": {way: estimate(first, taken) for way, taken in seconds.items() if first},
        "peak_gib": {way: round(size / 2**30, 2) for way, size in race.peak_bytes.items()},
        "failed": race.failed,
        "device": circumstances().device,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def compiled_by(
    levers: list[tuple[str, dict[str, Any]]], switches: tuple[str, ...]
) -> list[tuple[str, dict[str, Any]]]:
    """The levers with `graph.compile` of these switches."""
    return [(id, {**given, "inductor": list(switches)} if id == "graph.compile" else given) for id, given in levers]


if __name__ == "__main__":
    main()
