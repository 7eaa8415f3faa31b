"""What the parts of `beyond_device.py` share: the device, the lines that they say, and times."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from flatout.machine.measure import loads
from flatout.machine.measure.timer import clock_for, time_call

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
GIB = 2**30
BEGAN = perf_counter()
RESULTS: list[dict[str, Any]] = []


def say(record: dict[str, Any]) -> None:
    record["at_s"] = round(perf_counter() - BEGAN, 1)
    RESULTS.append(record)
    print(json.dumps(record), flush=True)


def settled() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()  # noqa: TID251 between parts
        torch.cuda.empty_cache()


def seconds(call: Callable[[], object], repeats: int, *, inner: int = 1) -> float:
    """The median, of one call after `inner` in a row."""
    clock = clock_for(DEVICE)
    return median(clock.elapsed_s(call, inner) / inner for _ in range(repeats))


def copy_bandwidth(small: bool) -> float:
    load = loads.copy_load(device=DEVICE, num_bytes=(8 if small else 2048) * loads.MIB)
    return load.work / time_call(load.call, device=DEVICE, max_time_s=1.0).call_s.value


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """On the device, of the size that weights have."""
    return torch.randn(shape, device=DEVICE, dtype=dtype).mul_(shape[-1] ** -0.5)


def as_dict(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
