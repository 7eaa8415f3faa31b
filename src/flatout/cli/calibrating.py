"""A rank of `flatout calibrate`: `python -m flatout.cli.calibrating MODEL OUT SECONDS DEVICE`. Not a command of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec


def main() -> None:
    """Measure, and write the file anew after each step."""
    import torch

    from flatout.parallel.measured import measured_steps
    from flatout.parallel.world import World
    from flatout.records.record import write_file
    from flatout.records.scale import MeasuredStep
    from flatout.simulate.executor import EXECUTOR
    from flatout.simulate.reading import read_model
    from flatout.simulate.telling import telling_layouts, thin

    model, out, seconds, kind = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    with World(kind) as world:
        shape = thin(read_model(model), world.num_ranks)
        room = torch.cuda.get_device_properties(world.device).total_memory if kind == "cuda" else None
        mixed = torch.bfloat16 if kind == "cuda" else None
        layouts = telling_layouts(shape, world.num_ranks, EXECUTOR, room)
        found: list[MeasuredStep] = []
        for step in measured_steps(shape, layouts, world, limit_s=seconds, mixed=mixed):
            found.append(step)
            if world.is_first:
                write_file(out, msgspec.json.format(msgspec.json.encode(found)))
                took = f"{step.seconds * 1e3:.1f} ms" if step.seconds is not None else step.why
                print(f"tensor {step.layout.tensor} pipeline {step.layout.pipeline} data {step.layout.data}: {took}")


if __name__ == "__main__":
    main()
