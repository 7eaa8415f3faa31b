"""Learning rates as pure functions of the step: nothing to save or resume, and the whole curve can be drawn beforehand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.errors import UsageError

Schedule = Callable[[int], float]
"""Steps count from 0; behind its last step a schedule stays where it ended."""
_SCALE: Final = "rate_scale"


def warm_up_cosine(peak: float, *, warm_up: int, steps: int, floor: float = 0.0) -> Schedule:
    """Linear up to `peak` in `warm_up` steps, then half a cosine down to `floor` at `steps` (Loshchilov and Hutter 2017).

    >>> rate = warm_up_cosine(1.0, warm_up=4, steps=8)
    >>> [round(rate(step), 2) for step in (0, 3, 4, 6, 8, 100)]
    [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    _check(peak, warm_up, steps)

    def rate(step: int) -> float:
        if step < warm_up:
            return peak * (step + 1) / warm_up
        return floor + (peak - floor) * (1 + math.cos(math.pi * _part(step, warm_up, steps))) / 2

    return rate


def warm_up_stable_decay(peak: float, *, warm_up: int, decay: int, steps: int, floor: float = 0.0) -> Schedule:
    """Linear up, constant, and in the last `decay` steps down to `floor` by 1 - sqrt (Hagele et al. 2024).

    The constant part is the same however long the run: it can be prolonged, or decayed from any step.

    >>> rate = warm_up_stable_decay(1.0, warm_up=2, decay=4, steps=10)
    >>> [round(rate(step), 2) for step in (0, 1, 5, 7, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    _check(peak, warm_up + decay, steps)

    def rate(step: int) -> float:
        if step < warm_up:
            return peak * (step + 1) / warm_up
        return floor + (peak - floor) * (1 - math.sqrt(_part(step, steps - decay, steps)))

    return rate


def one_cycle(peak: float, *, steps: int, up: float = 0.3, start: float = 0.04, end: float = 4e-6) -> Schedule:
    """By cosines from `start` * peak up to `peak` in a share `up` of the steps, and down to `end` * peak (Smith and Topin 2018).

    The shares are those of torch's OneCycleLR.

    >>> rate = one_cycle(1.0, steps=10)
    >>> [round(rate(step), 2) for step in (0, 3, 10)]
    [0.04, 1.0, 0.0]
    """
    top = round(up * steps)
    _check(peak, top, steps)

    def rate(step: int) -> float:
        low, part = (start, _part(step, 0, top)) if step < top else (end, 1 - _part(step, top, steps))
        return peak * (low + (1 - low) * (1 - math.cos(math.pi * part)) / 2)

    return rate


def _check(peak: float, first: int, steps: int) -> None:
    if not peak > 0 or first < 0 or steps < 1 or first > steps:
        raise UsageError(
            f"peak {peak:g} with {first} of {steps} steps to warm up and decay in: give a rate above 0, and more steps"
        )


def _part(step: int, begin: int, end: int) -> float:
    """How far `step` is from `begin` to `end`, 0 to 1."""
    return min(1.0, max(0.0, (step - begin) / (end - begin))) if end > begin else float(step >= end)


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
    numbers = [_number(name, blocks) for name, _ in named]
    inside = [n for n in numbers if n is not None]
    if not inside:
        raise UsageError(f"no parameter lies in '{blocks}.0' and so on; give the path of the list of blocks")
    last, first_at = max(inside), next(at for at, n in enumerate(numbers) if n is not None)
    groups: dict[int, list[Tensor]] = {}
    for at, ((_, parameter), number) in enumerate(zip(named, numbers, strict=True)):
        below = last - number if number is not None else last + 1 if at < first_at else 0
        groups.setdefault(below, []).append(parameter)
    return [{"params": parameters, _SCALE: decay**below, **options} for below, parameters in sorted(groups.items())]


def _number(name: str, blocks: str) -> int | None:
    found = re.match(re.escape(blocks) + r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None
