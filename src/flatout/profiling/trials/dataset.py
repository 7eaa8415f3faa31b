"""One batch fetched in the main process: its items, their collation, and what it would cost from memory."""

from __future__ import annotations

import copy
import random
from time import perf_counter
from typing import Any, Final

import torch

from flatout.measure.timer import time_call
from flatout.profiling.calls import iter_tensors
from flatout.profiling.trials.scene import Refused, Scene
from flatout.records.trial import TimeDataset, TrialResult

_FEW: Final = 16


def run(trial: TimeDataset, scene: Scene) -> TrialResult:
    """`now_s`: fetching one batch item by item. `cured_s`: indexing the same batch in ready tensors.

    Fact 'repeatable': the same items come out when asked again with other random numbers, so they can be prepared once.
    Part 'collate': seconds of the collation alone.
    """
    use = scene.loaders[trial.loader]
    if not use.is_map_style:
        raise Refused("the dataset is an iterable and cannot be asked for an item")
    batch = max(1, use.batch_size)
    dataset = use.dataset
    num = len(dataset)
    try:
        items, seconds = _fetch(dataset, list(range(min(batch, num))), scene.limit_s / 3)
        random.seed(1)
        torch.manual_seed(1)
        again, _ = _fetch(dataset, list(range(min(_FEW, len(items)))), scene.limit_s / 6)
        collate_s = time_call(
            lambda: use.collate(items), min_time_s=0.1, max_time_s=max(0.2, scene.limit_s / 6)
        ).call_s.value
        collated = use.collate(items)
    except Exception as e:  # the user's own dataset may raise anything when asked outside its loop
        raise Refused(f"the dataset could not be read here ({type(e).__name__}: {str(e)[:80]})") from e
    repeatable = all(_same(a, b) for a, b in zip(items, again, strict=False))
    item_s = seconds / len(items)
    return TrialResult(
        trial=trial,
        now_s=item_s * batch + collate_s * batch / len(items),
        cured_s=_from_memory_s(collated) * batch / len(items),
        parts={"item": item_s, "collate": collate_s},
        facts={"repeatable": repeatable},
    )


def _fetch(dataset: Any, indices: list[int], limit_s: float) -> tuple[list[Any], float]:
    start = perf_counter()
    items: list[Any] = []
    for index in indices:
        items.append(copy.copy(dataset[index]))
        if perf_counter() - start > limit_s:
            break
    return items, perf_counter() - start


def _from_memory_s(collated: Any) -> float:
    """Seconds to pick one batch out of tensors four times as long."""
    tensors = [t for t in iter_tensors(collated) if t.dim() > 0 and t.numel() > 0]
    if not tensors:
        return 0.0
    pool = [torch.cat([t] * 4) for t in tensors]
    index = torch.randperm(len(pool[0]))[: len(tensors[0])]
    same = [t for t in pool if len(t) == len(pool[0])]
    return time_call(lambda: [t[index] for t in same], min_time_s=0.05, max_time_s=0.3).call_s.value


def _same(a: Any, b: Any) -> bool:
    left, right = list(iter_tensors(a)), list(iter_tensors(b))
    if left or right:
        return len(left) == len(right) and all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # arrays that do not compare to one bool
        return repr(a) == repr(b)
