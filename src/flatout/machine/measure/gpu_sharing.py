"""Who else uses the GPU: what the driver samples of each process, through NVML where its binding is installed."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Collection
from statistics import fmean
from typing import Any

import torch


def gpu_other_fraction(device: int, *, since_s: float, own: Collection[int]) -> float | None:
    """Share of the GPU's time that went to processes other than `own`, of what the driver has sampled since a Unix time.

    None where it is not known. In a container the driver may name processes by the numbers of its host; when it names none of
    our own, the busiest is taken for ours.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, int(since_s * 1e6))
        finally:
            nvml.nvmlShutdown()
    except (AttributeError, AssertionError, RuntimeError, nvml.NVMLError):
        return None
    return others_of([(int(s.pid), s.smUtil / 100) for s in samples], own)


def others_of(samples: Collection[tuple[int, float]], own: Collection[int]) -> float | None:
    """The share of processes other than ours in samples of (process, share of the GPU); None without samples.

    >>> others_of([(7, 0.5), (7, 0.7), (8, 0.25)], own={7})
    0.25
    """
    shares: dict[int, list[float]] = defaultdict(list)
    for pid, share in samples:
        shares[pid].append(share)
    means = {pid: fmean(values) for pid, values in shares.items()}
    if not means:
        return None
    ours = [pid for pid in means if pid in own] or [max(means, key=lambda pid: means[pid])]
    return min(1.0, sum(share for pid, share in means.items() if pid not in ours))
