"""Both sides of a trial timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flatout.check.trials.context import Scene
from flatout.core.records.trial import Trial, TrialResult
from flatout.machine.measure.timer import compare_times

Forward = Callable[[], Tensor | list[Tensor]]


def timed_trial(
    trial: Trial,
    now: Callable[[], object],
    cured: Callable[[], object],
    scene: Scene,
    *,
    parts: dict[str, float] | None = None,
    error: float | None = None,
    min_s: float = 0.4,
    max_s: float = 3.0,
) -> TrialResult:
    """Times of both calls, each repeated for `min_s` to `max_s` seconds; `parts` and `error` as in the result."""
    timings = compare_times(
        {"now": now, "cured": cured},
        device=scene.device,
        min_time_s=min(min_s, scene.limit_s / 4),
        max_time_s=min(max_s, scene.limit_s),
        is_settled=scene.device == "cpu",
    )
    return TrialResult(
        trial=trial,
        now_s=timings["now"].call_s.value,
        cured_s=timings["cured"].call_s.value,
        spread_fraction=timings["now"].spread or 0.0,
        error=error,
        parts=parts or {},
    )


def timed_passes(
    trial: Trial,
    now: Forward,
    cured: Forward,
    scene: Scene,
    *,
    inputs: Sequence[Tensor],
    cured_inputs: Sequence[Tensor] | None = None,
    backward: bool,
    error: float | None = None,
) -> TrialResult:
    """Times of both forward passes, with the gradients of their inputs when `backward`."""
    return timed_trial(
        trial,
        _one_pass(now, inputs, backward=backward),
        _one_pass(cured, inputs if cured_inputs is None else cured_inputs, backward=backward),
        scene,
        error=error,
    )


def largest_relative_error(now: Callable[[], Tensor], cured: Callable[[], Tensor]) -> float:
    """The largest absolute difference between both results, relative to the largest value."""
    with torch.no_grad():
        a, b = now(), cured()
        return float((a - b).abs().max() / a.abs().max())


def _one_pass(forward: Forward, inputs: Sequence[Tensor], *, backward: bool) -> Callable[[], object]:
    if not backward:

        def run_forward() -> object:
            with torch.no_grad():
                return forward()

        return run_forward

    def run_both() -> object:
        out = forward()
        outputs = out if isinstance(out, list) else [out]
        return torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)

    return run_both
