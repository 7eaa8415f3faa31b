"""Time a script's steps from outside flatout: `python bench/step_time.py [--cure FILE] SCRIPT` prints JSON on its last line.

`--cure` names a file whose `cure()` is called before the script starts, as those in bench/world/cures.

A step lies between two calls of the optimizer that steps least often; without one, between two calls of the outermost module.
`mean_s` is the mean over all steps after the third, evaluation passes between them included; `median_s` the median step.
"""

from __future__ import annotations

import json
import runpy
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

optimizer_steps: dict[int, list[float]] = {}
root_calls: dict[int, list[float]] = {}
depth = 0


def after_step(optimizer: object, args: object, kwargs: object) -> None:
    optimizer_steps.setdefault(id(optimizer), []).append(perf_counter())


def before_forward(module: object, inputs: object) -> None:
    global depth
    if depth == 0 and any(True for _ in module.parameters()):  # type: ignore[attr-defined]
        root_calls.setdefault(id(module), []).append(perf_counter())
    depth += 1


def after_forward(module: object, inputs: object, output: object) -> None:
    global depth
    depth -= 1


def main() -> None:
    if sys.argv[1] == "--cure":
        runpy.run_path(sys.argv[2])["cure"]()
        del sys.argv[1:3]
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    handle = register_optimizer_step_post_hook(after_step)
    hooks = [
        register_module_forward_pre_hook(before_forward),
        register_module_forward_hook(after_forward, always_call=True),
    ]
    runpy.run_path(script, run_name="__main__")
    handle.remove()
    for hook in hooks:
        hook.remove()
    marks = min(optimizer_steps.values(), key=len) if optimizer_steps else max(root_calls.values(), key=len)
    gaps = [b - a for a, b in pairwise(marks[3:])]
    print(json.dumps({"mean_s": statistics.fmean(gaps), "median_s": statistics.median(gaps), "num": len(gaps)}))


if __name__ == "__main__":
    main()
