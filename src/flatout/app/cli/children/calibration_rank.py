"""A rank of `flatout calibrate`.

`python -m flatout.app.cli.children.calibration_rank MODEL OUT SECONDS DEVICE`. Not a command of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec

_ROUNDS: Final = 2
"""Rounds of all layouts, where there is time: a host's speed changes within minutes."""


def main() -> None:
    """Measure, and write the file anew after each step."""
    import torch

    from flatout.blocks.parallel.layout_measurement import measured_in_rounds
    from flatout.blocks.parallel.world import World
    from flatout.core.files import write_whole_file
    from flatout.scale.calibration_steps import calibration_steps
    from flatout.scale.executor import EXECUTOR
    from flatout.scale.inputs import read_model

    model, out, seconds, kind = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    with World(kind) as world:
        room = torch.cuda.get_device_properties(world.device).total_memory if kind == "cuda" else None
        mixed = torch.bfloat16 if kind == "cuda" else None
        steps = calibration_steps(read_model(model), world.num_ranks, EXECUTOR, room)
        for step, found in measured_in_rounds(steps, world, limit_s=seconds, rounds=_ROUNDS, mixed=mixed):
            if world.is_first:
                write_whole_file(out, msgspec.json.format(msgspec.json.encode(found)))
                took = f"{step.seconds * 1e3:.1f} ms" if step.seconds is not None else step.why
                print(f"tensor {step.layout.tensor} pipeline {step.layout.pipeline} data {step.layout.data}: {took}")


if __name__ == "__main__":
    main()
