"""What measurements of kernels share: variants compiled side by side, errors against float64, calls timed in captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor

from flatout.machine.measure.timer import compare_times

CACHES: Final = 2.5
"""Operands fill the last-level cache so many times over, so that each call reads memory as a program's does."""
_COMPILERS: Final = 8
"""Threads that compile: most of it happens outside Python's lock."""

Variant = TypeVar("Variant")
Result = TypeVar("Result")


def first_runs(run: Callable[[Variant], Result], variants: Sequence[Variant], device: torch.device) -> list[Result]:
    """The results of `run`, which compiles, of several variants at a time; on a CPU of one."""
    # A thread that has launched nothing yet has no context of the device, without which no descriptor can be made.
    begin = partial(torch.zeros, 1, device=device)
    with ThreadPoolExecutor(_COMPILERS if device.type == "cuda" else 1, initializer=begin) as pool:
        return list(pool.map(run, variants))


def relative_error(out: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over that of what is wanted; infinite for NaN."""
    size = float(wanted.norm())
    error = float((out.double() - wanted).norm()) / (size or 1.0)
    return error if error == error else float("inf")


def num_copies(num_bytes: int, device: torch.device) -> int:
    """How many weights of so many bytes exceed the device's cache together."""
    return int(CACHES * torch.cuda.get_device_properties(device).L2_cache_size / num_bytes) + 2


def captured_calls(calls: Callable[[], object]) -> Callable[[], object]:
    """These calls in a graph, after one of each outside it: what is compiled or packed at a first call must not be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def graph_times(graphs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of each graph, the fastest first."""
    found = compare_times(graphs, device="cuda", min_time_s=seconds / 2, max_time_s=seconds) if graphs else {}
    return dict(sorted(((name, timing.call_s.value) for name, timing in found.items()), key=lambda pair: pair[1]))
