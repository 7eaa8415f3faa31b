"""Learning rates as pure functions of the step: nothing to save or resume, and the whole curve can be drawn beforehand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError

Schedule = Callable[[int], float]
"""Steps count from 0; behind its last step a schedule stays where it ended."""
_SCALE: Final = "rate_scale"


def warm_up_cosine(peak: float, *, warm_up: int, steps: int, floor: float = 0.0) -> Schedule:
    """Linear up to `peak` in `warm_up` steps, then half a cosine down to `floor` at `steps` (Loshchilov and Hutter 2017).

    >>> rate = warm_up_cosine(1.0, warm_up=4, steps=8)
    >>> [round(rate(step), 2) for step in (0, 3, 4, 6, 8, 100)]
    [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if not peak > 0 or warm_up < 0 or steps < 1 or warm_up > steps:
        raise UsageError(
            f"peak {peak:g} with {warm_up} of {steps} steps to warm up in: give a rate above 0, and more steps"
        )

    def rate(step: int) -> float:
        if step < warm_up:
            return peak * (step + 1) / warm_up
        part = min(1.0, (step - warm_up) / (steps - warm_up)) if steps > warm_up else 1.0
        return floor + (peak - floor) * (1 + math.cos(math.pi * part)) / 2

    return rate


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of an optimizer this rate times its own scale (`layer_wise`), before its step.

    A rate that is a tensor (capturable optimizers) is written in place, without a wait.
    """
    for group in optimizer.param_groups:
        scaled = rate * group.get(_SCALE, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def layer_wise(model: nn.Module, *, decay: float, blocks: str, **options: Any) -> list[dict[str, Any]]:
    """Groups for an optimizer: the last block at the full rate, each before it at `decay` times the next one's (ELECTRA 2020).

    `blocks` is the path of the container ('encoder.layers'). What comes before the blocks is scaled once more than the first of
    them, what comes after not at all; a parameter is before if it was registered before. `options` go into every group. Raises
    UsageError when no parameter lies in that container.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = [re.match(re.escape(blocks) + r"\.(\d+)\.", name) for name, _ in named]
    inside = {at: int(one.group(1)) for at, one in enumerate(found) if one is not None}
    if not inside:
        raise UsageError(f"no parameter lies in '{blocks}.0' and so on; give the path of the list of blocks")
    last, first_at = max(inside.values()), min(inside)
    groups: dict[int, list[Tensor]] = {}
    for at, (_, parameter) in enumerate(named):
        below = last - inside[at] if at in inside else last + 1 if at < first_at else 0
        groups.setdefault(below, []).append(parameter)
    return [{"params": parameters, _SCALE: decay**below, **options} for below, parameters in sorted(groups.items())]
