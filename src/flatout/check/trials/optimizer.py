"""An optimizer's step on clones of its parameters: as it is, foreach, and fused."""

from __future__ import annotations

import copy
from statistics import median
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer

from flatout.check.observe.steps.optimizers import is_torchs_own
from flatout.check.trials.context import Refused, Scene, TrialEntry, require_time
from flatout.core.records.trial import TimeOptimizer, TrialResult
from flatout.machine.measure.timer import compare_times

_MOST_VARIANTS: Final = 3
_LARGEST_ELEMENTS: Final = 500_000_000


def run(trial: TimeOptimizer, scene: Scene) -> TrialResult:
    """Seconds of a step now and in the fastest variant, whose name is `variant`."""
    watched = scene.optimizers[trial.optimizer]
    optimizer = watched.optimizer()
    if optimizer is None:
        raise Refused("the optimizer is gone")
    if not is_torchs_own(optimizer):
        raise Refused(f"{watched.name} is not one of torch.optim's")
    if watched.num_elements > _LARGEST_ELEMENTS:
        raise Refused(f"copying {watched.num_elements} parameters would take too much memory")
    # One step of each variant creates its state, one is timed.
    require_time(scene, num_calls=2 * _MOST_VARIANTS, call_s=median(watched.step_s) if watched.step_s else 0.0)
    variants: dict[str, Optimizer] = {"now": _clone(optimizer, {})}
    if watched.variant != "foreach" and "foreach" in optimizer.param_groups[0]:
        variants["foreach"] = _clone(optimizer, {"foreach": True, "fused": None})
    if watched.fused_supported and watched.variant != "fused":
        variants["fused"] = _clone(optimizer, {"foreach": None, "fused": True})
    if len(variants) == 1:
        raise Refused(f"{watched.name} has no other variant here")
    timings = compare_times(
        {name: clone.step for name, clone in variants.items()},
        device=scene.device,
        min_time_s=min(0.4, scene.limit_s / 4),
        max_time_s=min(3.0, scene.limit_s),
    )
    best = min((n for n in variants if n != "now"), key=lambda n: timings[n].call_s.value)
    return TrialResult(
        trial=trial,
        now_s=timings["now"].call_s.value,
        cured_s=timings[best].call_s.value,
        spread_fraction=timings["now"].spread or 0.0,
        variant=best,
        parts={name: timing.call_s.value for name, timing in timings.items()},
    )


def _clone(optimizer: Optimizer, options: dict[str, Any]) -> Optimizer:
    """The same optimizer over copies of its parameters and gradients, with a state of its own."""
    groups = []
    stepped = _stepped(optimizer)
    for group in optimizer.param_groups:
        copies = []
        for parameter in group["params"]:
            replica = parameter.detach().clone().requires_grad_()
            if parameter.grad is not None:
                replica.grad = parameter.grad.detach().clone()
            elif id(parameter) in stepped:
                replica.grad = torch.randn_like(parameter)
            copies.append(replica)
        rest = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "initial_lr")}
        known = {k: v for k, v in options.items() if k in group}
        groups.append({"params": copies, **rest, **known})
    defaults = {k: v for k, v in optimizer.defaults.items() if k in ("lr",)}
    return type(optimizer)(groups, **defaults)


def _stepped(optimizer: Optimizer) -> set[int]:
    """The parameters that a step moves, where gradients were cleared: those with a state, else all.

    An optimizer may hold more (a frozen part, the averaged copy of a model): what has no gradient is passed over.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.grad is not None for p in parameters):
        return set()
    return {id(p) for p in parameters if optimizer.state.get(p)} or {id(p) for p in parameters}


TRIAL: Final = TrialEntry(TimeOptimizer, run)
