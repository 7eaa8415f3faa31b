"""The process of `flatout run`: `python -m flatout.cli.planned PLAN KIND TARGET ARGS...`. Not a command of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """Run the script with the plan; its exit code, or 2 when the plan does not fit."""
    from flatout.errors import FlatoutError
    from flatout.profiling.running.script import load_module, load_script, print_to_stderr
    from flatout.session import read_plan, run_planned

    path, kind, target, *arguments = sys.argv[1:]
    sys.path[0] = ""  # python -m put our start folder there; the script's own goes first later
    try:
        plan = read_plan(Path(path))
        script = (load_script if kind == "script" else load_module)(target, tuple(arguments))
        sys.path.pop(0)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return run_planned(plan, script, tell=lambda text: print_to_stderr(f"flatout: {text}"), world_size=ranks)
    except FlatoutError as e:
        print_to_stderr(f"flatout: {e}")
        return 2


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
