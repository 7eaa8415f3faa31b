"""Compiled code against eager code: a whole module, and what one break of a graph costs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.measure.timer import compare
from flatout.profiling.trials.model import call_of
from flatout.profiling.trials.scene import Refused, Scene
from flatout.records.trial import TimeGraphBreak, TimeModel, TrialResult

_ELEMENTS: Final = 256
_CHAIN: Final = 4


def eager(trial: TimeModel, scene: Scene) -> TrialResult:
    """A copy of the module by the code that the script has compiled already (`now`), and without it (`cured`)."""
    root = scene.roots[trial.model]
    # `or` would ask the module for its length, which a compiled one refuses.
    module, captured = root.held if root.held is not None else root.module(), root.captured
    if module is None or captured is None:
        raise Refused("the module or its inputs could not be kept")
    if module not in scene.compiled:
        raise Refused("the module is not under torch.compile")
    plain: nn.Module = getattr(module, "_orig_mod", module)
    try:
        twin = copy.deepcopy(plain)
    except (RuntimeError, TypeError, NotImplementedError) as e:
        raise Refused(f"the module cannot be copied ({e})") from e
    compiled: nn.Module = torch.compile(twin, **scene.compiled[module])  # type: ignore[assignment]
    # One compilation too many would take seconds, and counts towards the limit of the user's own code.
    with torch.compiler.set_stance("fail_on_recompile"):
        now = call_of(compiled, captured, captured.args, captured.kwargs, backward=trial.backward)
        without = call_of(twin, captured, captured.args, captured.kwargs, backward=trial.backward)
        timings = compare(
            {"now": now, "cured": without},
            device=scene.device,
            min_time_s=min(0.8, scene.limit_s / 3),
            max_time_s=min(5.0, scene.limit_s),
        )
    return TrialResult(
        trial=trial,
        now_s=timings["now"].call_s.value,
        cured_s=timings["cured"].call_s.value,
        spread_fraction=timings["now"].spread or 0.0,
    )


def graph_break(trial: TimeGraphBreak, scene: Scene) -> TrialResult:
    """Two graphs (`now`) against one (`cured`), on operators so small that only what surrounds them counts."""
    x = torch.randn(_ELEMENTS, device=scene.device, requires_grad=trial.backward)

    def run(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        whole: Callable[[Tensor], Any] = torch.compile(function, backend="aot_eager", dynamic=False)

        def call() -> object:
            out = whole(x)
            return torch.autograd.grad(out.sum(), x) if trial.backward else out

        call()
        return call

    timings = compare(
        {"now": run(_broken), "cured": run(_in_one_piece)},
        device=scene.device,
        min_time_s=min(0.3, scene.limit_s / 4),
        max_time_s=min(2.0, scene.limit_s),
    )
    return TrialResult(
        trial=trial,
        now_s=timings["now"].call_s.value,
        cured_s=timings["cured"].call_s.value,
        spread_fraction=timings["now"].spread or 0.0,
    )


def _in_one_piece(x: Tensor) -> Tensor:
    for _ in range(_CHAIN):
        x = x.sin()
    return x


def _broken(x: Tensor) -> Tensor:
    for _ in range(_CHAIN // 2):
        x = x.sin()
    torch._dynamo.graph_break()
    for _ in range(_CHAIN // 2):
        x = x.sin()
    return x
