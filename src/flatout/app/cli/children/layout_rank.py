"""A rank of `flatout run --layout`.

`python -m flatout.app.cli.children.layout_rank LAYOUT KIND TARGET ARGS...`. Not a command of its own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from flatout.core.errors import UsageError


def ranks_of(path: Path, nodes: int) -> int:
    """Ranks of each machine. Raises UsageError when they do not divide, PlanError when the layout cannot be read."""
    from flatout.scale.inputs import read_layout

    devices = read_layout(path).num_devices
    if nodes < 1 or devices % nodes:
        raise UsageError(f"{devices} ranks of '{path}' cannot be divided over {nodes} machines; give a divisor")
    return devices // nodes


def main() -> None:
    """Run the script as python would, with the layout for its `layout_from_environment`."""
    from flatout.blocks.parallel.world import set_layout
    from flatout.scale.inputs import read_layout

    path, kind, target, *arguments = sys.argv[1:]
    set_layout(read_layout(Path(path)))
    sys.argv = [target, *arguments]
    if kind == "script":
        sys.path.insert(0, str(Path(target).resolve().parent))  # the folder that we start in stays behind it
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
