"""One call of a captured root module on a deep copy of it, against the same under torch.compile.

On a CPU the copy lives in a fork of the process, which is ended when the time is over. A process that uses CUDA cannot be forked:
there a timer interrupts the compiler, and dynamo's books are cleared afterwards.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from flatout.check.observe.calls import Captured, without_replication, wrapped
from flatout.check.trials.context import Refused, Scene, TrialEntry
from flatout.check.trials.model import autocast_to
from flatout.check.trials.module_call import call_of, copied_module, module_and_inputs
from flatout.check.trials.subprocess_copy import latest_in_copy
from flatout.core.records.trial import TimeCompiled, TrialResult
from flatout.core.runtime.patches import all_suspended
from flatout.machine.measure.timer import compare_times

BACKEND: Final = "inductor"
_LOADING_S: Final = 4.0
"""Loading the compiler, and compiling the least there is, on two cores."""
_OPERATOR_S: Final = 0.02
"""Of compiling, for one operator at the least: 720 of four transformer layers took three times as much of a CPU's core (torch
2.13)."""
_MIN_S: Final = 0.8
_MAX_S: Final = 4.0
_TO_END_S: Final = 1.0
_TO_GIVE_UP_S: Final = 6.0
"""A compiler that is interrupted is let finish the call it is in: up to 12 s on an H200's host (ResNet-50, torch 2.11)."""
_GAINS: Final = 0.95
"""Autocast is compiled too where it takes at most this share of the time; the noise of a shared machine is of that size."""


def run(trial: TimeCompiled, scene: Scene) -> TrialResult:
    """Seconds of the call as it is and compiled; a copy of the module runs, never the user's own."""
    root = scene.roots[trial.model]
    module, captured = module_and_inputs(root)
    module = without_replication(module)
    if scene.compiled:
        raise Refused("the script compiles by itself, and what is compiled here would count towards its limits")
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in module.modules()):
        raise Refused("a part of the module synchronises its gradients with other processes")
    regional = _regional(module, trial)
    num_operators = trial.num_operators / (len(regional.blocks) if regional is not None else 1)
    least_s = _LOADING_S + _OPERATOR_S * num_operators
    if scene.left_s < least_s:
        raise Refused(f"compiling takes {least_s:.0f} s or more, and {scene.left_s:.0f} s were left for trials")
    measure = partial(_measure, trial, _Sides(copied_module(module), regional), captured, scene)
    if scene.device == "cuda":
        parts = _in_time(measure, max(_TO_END_S, scene.left_s - _TO_GIVE_UP_S))
    else:
        parts = latest_in_copy(measure, limit_s=scene.left_s, num_threads=torch.get_num_threads())
    now_s, cured_s, spread = (parts.pop(name) for name in ("now", "compiled", "spread"))
    is_regional = bool(parts.pop("regions"))
    return TrialResult(
        trial=trial,
        now_s=now_s,
        cured_s=cured_s,
        spread_fraction=spread,
        variant="regions" if is_regional else "whole",
        parts=parts,
    )


def _in_time(measure: Callable[[], Iterator[dict[str, float]]], limit_s: float) -> dict[str, float]:
    """The last of the results that `measure` yields within the time; torch's compiler is then as if it had not run."""
    latest: dict[str, float] = {}
    with suppress(_TimeIsOver), _interrupted_after(limit_s):
        try:
            for result in measure():
                latest = result
        finally:
            torch._dynamo.reset()
    if not latest:
        raise Refused(f"it took more than {limit_s:.0f} s to compile")
    return latest


class _Regional(NamedTuple):
    """A copy of the module whose blocks are to be compiled each alone."""

    model: nn.Module
    blocks: list[nn.Module]


class _Sides(NamedTuple):
    """A copy of the module, and one to be compiled by blocks; without that the first is compiled as a whole."""

    model: nn.Module
    regional: _Regional | None


class _TimeIsOver(BaseException):
    """No Exception: dynamo takes those of a backend for the backend's own."""


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise _TimeIsOver in the code inside after so many seconds.

    Raises Refused where no timer can do so: outside the main thread, on systems without alarms, where the script uses them.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise Refused("compiling cannot be interrupted here, so it is not begun")
    if signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        raise Refused("the script uses the timer that would end compiling")

    def end(number: int, frame: FrameType | None) -> None:
        raise _TimeIsOver

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _measure(trial: TimeCompiled, sides: _Sides, captured: Captured, scene: Scene) -> Iterator[dict[str, float]]:
    """The times without autocast, then those with it too: the first are worth something if the second come too late."""
    end = perf_counter() + scene.left_s - _TO_END_S
    model, regional = sides
    call = partial(
        call_of, captured=captured, args=captured.args, kwargs=captured.kwargs, backward=trial.backward, autocast=None
    )
    with all_suspended():
        calls = {"now": call(model)}
        began = perf_counter()
        calls["compiled"] = call(_compiled(trial, sides, BACKEND))
        compile_s = perf_counter() - began
        if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            raise Refused("torch.compile found nothing in it that it can compile")
        common = {"compile": compile_s, "regions": float(regional is not None)}
        yield common | _times(calls, scene, end)
        if not trial.autocast:
            return
        half = autocast_to(getattr(torch, trial.autocast), scene)
        calls["autocast"] = call(model, autocast=half)
        times = common | _times(calls, scene, end)
        yield times
        if times["autocast"] <= _GAINS * times["now"] and end - perf_counter() > compile_s:
            calls["both"] = call(_compiled(trial, sides, _anew), autocast=half)
            yield common | _times(calls, scene, end)


def _compiled(trial: TimeCompiled, sides: _Sides, backend: str | Callable[..., Any]) -> Any:
    model, regional = sides
    options: dict[str, Any] = {"backend": backend, "dynamic": trial.dynamic or None}
    if regional is None:
        return torch.compile(model, **options)
    for block in regional.blocks:
        block.compile(**options)
    return regional.model


def _anew(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """BACKEND for one more graph of the same code.

    Dynamo's guards do not tell autocast to one dtype from that to another (torch 2.11): a graph made under a script's autocast
    to float32 would run again under one to bfloat16. A graph of another backend is not taken for it.
    """
    return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)


def _times(calls: dict[str, Callable[[], object]], scene: Scene, end: float) -> dict[str, float]:
    left_s = max(0.0, end - perf_counter())
    timings = compare_times(
        calls,
        device=scene.device,
        min_time_s=min(_MIN_S, left_s / 4),
        max_time_s=min(_MAX_S, left_s / 2),
        is_settled=scene.device == "cpu",
    )
    spread = max(t.spread or 0.0 for t in timings.values())
    return {name: t.call_s.value for name, t in timings.items()} | {"spread": spread}


def _regional(module: nn.Module, trial: TimeCompiled) -> _Regional | None:
    """A copy with the blocks of the trial's regions; None where there are none that can be compiled so.

    torch.compile passes over the calls of torch's own layers unless they are what it is asked to compile.
    """
    if not trial.regions:
        return None
    model = copied_module(module)
    inner = wrapped(model)
    children = [child for path in trial.regions for child in inner.get_submodule(path).children()]
    num = Counter(type(child) for child in children)
    blocks = [child for child in children if num[type(child)] > 1 and next(child.children(), None) is not None]
    is_torchs = any(type(block).__module__.startswith("torch.") for block in blocks)
    return None if is_torchs or not blocks else _Regional(model, blocks)


TRIAL: Final = TrialEntry(TimeCompiled, run, is_last=True)
