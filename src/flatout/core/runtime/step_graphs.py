"""Steps in CUDA graphs of the script's own: captured once, with a backward or an optimizer's step inside, and then replayed.

A replay runs no Python, so that neither a backward nor an optimizer is called: what watches steps hears of each replay instead.
What is captured is not run, and counts as no step. Graphs that flatout captures for the script are not watched here: they tell of
their replays by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flatout.core.runtime.dynamo_frames import frame_outside_dynamo
from flatout.core.runtime.own_calls import is_own_call
from flatout.core.runtime.patches import Patches

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

StepListener = Callable[["Optimizer"], object]


class _Captured:
    """What a graph replays: optimizers' steps, in their order, and backwards."""

    def __init__(self) -> None:
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self.num_backwards = 0


_KNOWN: weakref.WeakKeyDictionary[Any, _Captured] = weakref.WeakKeyDictionary()
"""What graphs replay that were captured while somebody watched; all who watch share it."""
_CAPTURES: list[_Captured] = []
"""Those that are being captured now."""


def is_step_captured() -> bool:
    """Whether what is called now is not run but captured, into a graph that is watched."""
    if _CAPTURES and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        _CAPTURES.clear()  # captures that failed, and were never ended
    return bool(_CAPTURES)


def note_step(optimizer: Optimizer) -> None:
    """Remember that the graph that is being captured replays this optimizer's step."""
    _CAPTURES[-1].optimizers.append(weakref.ref(optimizer))


def note_backward() -> None:
    """Remember that the graph that is being captured replays a backward."""
    _CAPTURES[-1].num_backwards += 1


class StepGraphs:
    """Tells of replays: of each optimizer's step before and after it, or of a backward where no optimizer steps in the graph."""

    def __init__(self, *, before_step: StepListener, after_step: StepListener, on_backward: Callable[[], None]) -> None:
        self._before_step, self._after_step, self._on_backward = before_step, after_step, on_backward

    def install(self, patches: Patches, graph_type: type[Any] | None = None) -> None:
        """Watch what torch's graphs, or those of another type, capture and replay, until the patches are undone."""
        if graph_type is None:
            graph_type = torch.cuda.CUDAGraph
        patches.set(graph_type, "capture_begin", self._beginning(graph_type.capture_begin))
        patches.set(graph_type, "capture_end", self._ending(graph_type.capture_end))
        patches.set(graph_type, "replay", self._replaying(graph_type.replay))

    def _beginning(self, original: Callable[..., None]) -> Callable[..., None]:
        @frame_outside_dynamo
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            original(graph, *args, **kwargs)
            if not is_own_call() and _KNOWN.get(graph) not in _CAPTURES:  # another who watches has noted it
                _KNOWN[graph] = _Captured()
                _CAPTURES.append(_KNOWN[graph])

        return capture_begin

    def _ending(self, original: Callable[..., None]) -> Callable[..., None]:
        @frame_outside_dynamo
        def capture_end(graph: Any) -> None:
            captured = _KNOWN.get(graph)
            if captured in _CAPTURES:
                _CAPTURES.remove(captured)
            original(graph)

        return capture_end

    def _replaying(self, original: Callable[..., None]) -> Callable[..., None]:
        @frame_outside_dynamo
        def replay(graph: Any) -> None:
            captured = _KNOWN.get(graph)
            if captured is None or is_step_captured():
                return original(graph)
            optimizers = [optimizer for one in captured.optimizers if (optimizer := one()) is not None]
            for optimizer in optimizers:
                self._before_step(optimizer)
            original(graph)
            for optimizer in optimizers:
                self._after_step(optimizer)
            if captured.num_backwards and not optimizers:
                self._on_backward()

        return replay
