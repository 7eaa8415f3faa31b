"""The process of `flatout run`.

`python -m flatout.app.cli.children.planned_run [--print] [--check-losses] PLAN KIND TARGET ARGS...`. Not a command of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> int:
    """Run the script with the plan, or only prepare that; its exit code, or 2 when the plan does not fit."""
    from flatout.app.cli.children import load_target
    from flatout.app.plans import environment_of, read_plan, run_planned
    from flatout.core.errors import FlatoutError
    from flatout.core.runtime.deferred_imports import defer_imports
    from flatout.core.runtime.script import print_to_stderr

    num_options = next(i for i, word in enumerate(sys.argv[1:]) if not word.startswith("--"))
    options, (path, kind, target, *arguments) = sys.argv[1 : 1 + num_options], sys.argv[1 + num_options :]
    defer_imports("libcst", "matchers")
    try:
        plan = read_plan(Path(path))
        wanted = environment_of(plan)
        if any(os.environ.get(name) != value for name, value in wanted.items()):
            # allocators and threads read them when a process begins: begin once more
            again = [sys.executable, "-m", "flatout.app.cli.children.planned_run", *sys.argv[1:]]
            os.execve(sys.executable, again, {**os.environ, **wanted})
        script = load_target(kind, target, arguments)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return run_planned(
            plan,
            script,
            on_progress=lambda text: print_to_stderr(f"flatout: {text}"),
            world_size=ranks,
            only_print="--print" in options,
            check_losses="--check-losses" in options,
        )
    except FlatoutError as e:
        print_to_stderr(f"flatout: {e}")
        return 2


def run() -> NoReturn:
    """Run, and end the process with the script's exit code."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


if __name__ == "__main__":
    run()
