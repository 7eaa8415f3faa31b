"""The observed process of `flatout check`: `python -m flatout.app.cli.children.observe REQUEST`. Not a command of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """Run the requested script under observation; its exit code."""
    from flatout.app.cli.check import REFUSED
    from flatout.app.cli.children import load_target
    from flatout.app.cli.ranks import as_rank, launched_rank
    from flatout.app.observation import measured_machine
    from flatout.app.session import Observation, observe_script
    from flatout.core.errors import FlatoutError
    from flatout.core.records.record import from_json
    from flatout.core.runtime.script import print_to_stderr

    observation = from_json(Path(sys.argv[1]).read_bytes(), Observation)
    if observation.world_size > 1:
        rank = launched_rank(os.environ)
        observation = as_rank(observation, rank.rank, rank.world_size) if rank is not None else observation
    try:
        script = load_target(observation.kind, observation.target, observation.arguments)
        machine = measured_machine(Path(observation.machine_path)) if observation.rank == 0 else None
    except FlatoutError as e:
        print_to_stderr(f"flatout: {e}")
        return REFUSED
    return observe_script(observation, script, machine)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
