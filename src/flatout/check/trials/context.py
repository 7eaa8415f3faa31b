"""What trials may work with, and the care they take of the user's state."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from flatout.check.observe.calls import RootModule
from flatout.check.observe.collectors.loaders import LoaderUse
from flatout.check.observe.operators.recorder import Example, TensorMeta
from flatout.check.observe.steps.optimizers import OptimizerWatched
from flatout.core import units
from flatout.core.records.evidence import Operator
from flatout.core.records.trial import TimeAttention, TimeAttentionCall, TrialRequest, TrialResult
from flatout.core.records.workload import Source

Request = TypeVar("Request", bound=TrialRequest)


class Scene(NamedTuple):
    """Live objects behind the Evidence's indices, and the seconds that trials may take."""

    examples: list[Example | None]
    num_calls: list[float]
    outputs: list[TensorMeta | None]
    """Description of each operator's first result."""
    roots: list[RootModule]
    optimizers: list[OptimizerWatched]
    loaders: list[LoaderUse]
    unused_modules: tuple[str, ...]
    device: str
    limit_s: float
    """What one trial should take."""
    left_s: float = math.inf
    """What is left for all trials; none takes longer."""
    operators: Sequence[Operator] = ()
    sources: Sequence[Source] = ()
    """The lines that the operators name by index."""
    compiled: Mapping[nn.Module, dict[str, Any]] = {}
    """Modules under torch.compile, with the options they were compiled with."""


class TrialEntry(NamedTuple, Generic[Request]):
    """The constant TRIAL of a module: the type of request that its function runs."""

    request: type[Request]
    run: Callable[[Request, Scene], TrialResult]
    """Raises Refused where the request cannot be run; whatever else it raises costs this trial alone."""
    is_last: bool = False
    """Whether it comes after the others, with the time that they leave."""


class Refused(Exception):
    """A trial cannot be run; the message says why in half a sentence."""


def require_time(scene: Scene, *, num_calls: float, call_s: float) -> None:
    """Raises Refused where so many calls of such a length do not fit into the time that is left for trials."""
    if num_calls * call_s > scene.left_s:
        calls = f"{num_calls:.0f} calls of some {units.duration(call_s)}, as many as it needs at least"
        raise Refused(f"{calls}, do not fit into the {units.duration(scene.left_s)} that were left for trials")


@contextmanager
def untouched() -> Iterator[None]:
    """Leave random streams, grad mode and inference mode as they were; warnings of trials are not the script's."""
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    quiet = warnings.catch_warnings(action="ignore")
    with quiet, torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, *, device: str, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Random data of this kind (never zeros: they run faster); integers are 0 and 1, bools even odds."""
    size = shape
    if stride is not None:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n > 0)
        size = (max(extent, 1),)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(size, dtype=torch.float32, device=device).to(dtype)
    elif dtype == torch.bool:
        values = torch.rand(size, device=device) < 0.5
    else:
        values = torch.randint(0, 2, size, device=device).to(dtype)
    return values if stride is None else torch.as_strided(values, shape, stride)


def query_key_value(
    trial: TimeAttention | TimeAttentionCall, scene: Scene
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random inputs of an attention, with gradients where its backward is timed."""
    dtype = getattr(torch, trial.dtype)
    q, k, v = (
        random_tensor((trial.batch, trial.heads, length, trial.head_dim), dtype, device=scene.device)
        for length in (trial.q_len, trial.kv_len, trial.kv_len)
    )
    return q.requires_grad_(trial.backward), k.requires_grad_(trial.backward), v.requires_grad_(trial.backward)
