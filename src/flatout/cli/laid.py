"""A rank of `flatout run --layout`: `python -m flatout.cli.laid LAYOUT KIND TARGET ARGS...`. Not a command of its own."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the script as python would, with the layout for its `given_layout`."""
    from flatout.parallel.given import give_layout
    from flatout.simulate.reading import read_layout

    path, kind, target, *arguments = sys.argv[1:]
    give_layout(read_layout(Path(path)))
    sys.argv = [target, *arguments]
    if kind == "script":
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")
    else:
        sys.path[0] = ""
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
