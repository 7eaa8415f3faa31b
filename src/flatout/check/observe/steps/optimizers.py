"""Optimizers: when they step, which one ends a step, and how they walk over their parameters."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from threading import get_ident
from time import perf_counter
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from flatout.core.runtime.optimizer_steps import OptimizerStepHooks
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites
from flatout.core.runtime.step_graphs import StepGraphs

_HAS_FUSED: Final = ("Adam", "AdamW", "SGD", "Adagrad")
"""torch.optim classes with a fused implementation on CPU and CUDA (torch 2.11 to 2.13 documentation)."""


_LONGEST_CYCLE: Final = 24
"""Optimizer steps looked back upon to find the cycle; a GAN with five critic steps has a cycle of six."""


_TAKES_OVER: Final = 12
"""Steps of one optimizer in a row, after which another that steps has taken over (the next fold of a cross validation)."""


class OptimizerListener(Protocol):
    """Hears of optimizer steps, on the observed thread."""

    def on_optimizer_start(self) -> None: ...

    def on_optimizer_end(self, optimizer: int, *, is_border: bool, leader_changed: bool) -> None: ...

    def on_unwatched_steps(self) -> None: ...

    def on_leader_lost(self, *, is_replaced: bool) -> None: ...

    def on_closure_start(self) -> None: ...

    def on_closure_end(self) -> None: ...

    def on_backward_replayed(self) -> None: ...


class OptimizerWatched:
    """One optimizer that stepped in the observed loop."""

    def __init__(self, optimizer: Optimizer, site: int, constructed: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.site = site
        self.constructed = constructed
        self.variant = variant_of(optimizer)
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self.num_tensors = len(parameters)
        self.num_elements = sum(p.numel() for p in parameters)
        self.parameter_ids = {id(p) for p in parameters}
        is_dense = not any(p.grad is not None and p.grad.layout != torch.strided for p in parameters)
        is_of_floats = is_dense and all(p.is_floating_point() for p in parameters)
        self.fused_supported = is_torchs_own(optimizer) and self.name in _HAS_FUSED and is_of_floats
        self.started_s = 0.0
        self.closure_s = 0.0
        """Seconds of the step in progress that went to its closure: forward and backward, not the optimizer's own work."""
        self.step_s: list[float] = []
        self.num_calls = self.num_in_step = 0
        """Its steps in the watched steps of the loop since their border was found, and in the one in progress."""


class Optimizing:
    """Watches all optimizers through torch's global hooks; finds the leader, whose step ends a step of the loop.

    With several optimizers (a GAN, several groups) the leader is the one that stepped least often of late, the latest in the
    cycle among equals: its step closes the cycle. One that takes over from another for good (models trained one after another)
    becomes the leader, and the loop goes on.
    """

    def __init__(self, sites: Sites, listener: OptimizerListener) -> None:
        self.watched: dict[int, OptimizerWatched] = {}
        self.is_active = False
        self.unwatched_ends_s: list[float] | None = None
        """Set while steps go by unwatched: their ends are stamped there, and nothing else is done at most of them."""
        self._others: list[int] = []
        """Optimizers that stepped since the last of those stamps, by their ids."""
        self._is_replaced = False
        self.num_unwatched = 0
        """After so many stamps the listener is called; sooner if `has_news` is set."""
        self.has_news = False
        self.callers: dict[int, tuple[int, ...]] = {}
        self._constructed: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._leader: OptimizerWatched | None = None
        self._recent: deque[OptimizerWatched] = deque(maxlen=_LONGEST_CYCLE)
        """The optimizers of the last steps; not their ids, which those of later optimizers may have again."""
        self._step_listener: OptimizerStepHooks | None = None
        self._sites = sites
        self._listener = listener
        self._thread_id = get_ident()

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer was constructed since `install` and is still alive."""
        return bool(self._constructed)

    def await_steps_of(self, optimizers: Iterable[Optimizer]) -> None:
        """Take in optimizers that were constructed before `install`; the lines that did it are not known."""
        for optimizer in optimizers:
            self._constructed[optimizer] = -1

    def tensors(self) -> Iterator[Tensor]:
        """The parameters that were stepped."""
        for watched in self.watched.values():
            optimizer = watched.optimizer()
            for group in optimizer.param_groups if optimizer is not None else ():
                yield from group["params"]

    def versions(self) -> tuple[int, ...]:
        """How often the first parameter of each optimizer has been changed in place."""
        firsts = (p for o in self._constructed for group in o.param_groups[:1] for p in group["params"][:1])
        return tuple(parameter._version for parameter in firsts if not parameter.is_inference())

    def install(self, patches: Patches) -> None:
        """Register torch's global step hooks and note where optimizers are constructed."""
        self._step_listener = OptimizerStepHooks(before=self._before, after=self._after)
        graphs = StepGraphs(
            before_step=lambda optimizer: self._before(optimizer, (optimizer,), {}),
            after_step=lambda optimizer: self._after(optimizer, (optimizer,), {}),
            on_backward=self._on_backward_replayed,
        )
        graphs.install(patches)
        original: Callable[..., None] = Optimizer.__init__
        watch = self

        def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            watch._constructed[self] = watch._sites.of_frame(sys._getframe(1))

        patches.set(Optimizer, "__init__", __init__)

    def remove(self) -> None:
        """Take torch's global hooks away."""
        if self._step_listener is not None:
            self._step_listener.remove()
            self._step_listener = None

    def restart(self) -> None:
        """Count the optimizers' steps from here."""
        for watched in self.watched.values():
            watched.num_calls = watched.num_in_step = 0

    def end_step(self) -> None:
        """A watched step of the loop ended."""
        for watched in self.watched.values():
            watched.num_calls += watched.num_in_step
            watched.num_in_step = 0

    def optimized_ids(self) -> set[int]:
        """Identities of all parameters that a stepping optimizer holds."""
        return set().union(*(w.parameter_ids for w in self.watched.values()))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.unwatched_ends_s is not None or not self.is_active or get_ident() != self._thread_id:
            return None
        watched = self.watched.get(id(optimizer))
        if watched is None or watched.optimizer() is not optimizer:
            frame = sys._getframe(3)  # above the listener, torch's hook and torch's step
            site = self._sites.of_frame(frame)
            self.callers[site] = self._sites.chain(frame)[1:]
            watched = OptimizerWatched(optimizer, site, self._constructed.get(optimizer, -1))
            self.watched[id(optimizer)] = watched
        self._listener.on_optimizer_start()
        watched.started_s = perf_counter()
        watched.closure_s = 0.0
        return self._with_closure_watched(watched, args, kwargs)

    def _with_closure_watched(
        self, watched: OptimizerWatched, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """The arguments of `step(closure)` with a closure that reports when it runs; None when there is none.

        Frameworks that optimize by themselves (Lightning) and L-BFGS run forward and backward inside the optimizer's step.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        def watched_closure(*own: Any, **named: Any) -> Any:
            if not self.is_active or get_ident() != self._thread_id:
                return closure(*own, **named)
            began = perf_counter()
            self._listener.on_closure_start()
            try:
                return closure(*own, **named)
            finally:
                watched.closure_s += perf_counter() - began
                self._listener.on_closure_end()

        if len(args) > 1:
            return (args[0], watched_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched_closure}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ends_s = self.unwatched_ends_s
        if ends_s is not None:
            if self._leader is None or self._leader.optimizer() is not optimizer:
                self._note_other(optimizer)
                return
            self._others.clear()
            self._recent.append(self._leader)
            ends_s.append(perf_counter())
            if self.has_news or len(ends_s) == self.num_unwatched:
                self.has_news = False
                self._listener.on_unwatched_steps()
            return
        if not self.is_active or get_ident() != self._thread_id:
            return
        watched = self.watched.get(id(optimizer))
        if watched is None:
            return
        watched.num_in_step += 1
        watched.step_s.append(perf_counter() - watched.started_s - watched.closure_s)
        self._recent.append(watched)
        is_successor = self._is_replaced or self._takes_over()
        self._is_replaced = False
        leader = watched if is_successor else self._find_leader()
        changed, self._leader = self._leader is not leader and not is_successor, leader
        self._listener.on_optimizer_end(id(optimizer), is_border=leader is watched, leader_changed=changed)

    def _on_backward_replayed(self) -> None:
        if get_ident() == self._thread_id:
            self._listener.on_backward_replayed()

    def _note_other(self, optimizer: Optimizer) -> None:
        """Another optimizer than the leader stepped while steps go by unwatched."""
        self._others.append(id(optimizer))
        if (watched := self.watched.get(id(optimizer))) is not None:
            self._recent.append(watched)
        is_replaced = len(self._others) >= _TAKES_OVER and len(set(self._others)) == 1
        if is_replaced or len(self._others) > _LONGEST_CYCLE:
            self._others.clear()
            self._recent.clear()
            self._leader, self._is_replaced = None, is_replaced
            self._listener.on_leader_lost(is_replaced=is_replaced)

    def _takes_over(self) -> bool:
        """Whether the last optimizer steps in place of the leader, which stepped alone, and is gone or does not come back."""
        *before, now = (watched for watched, _ in groupby(self._recent))
        before = [w for w in before if w is self._leader or w.optimizer() is not None]
        if self._leader is None or not before or now in before or len(before) > 1:
            return False
        is_over = before[0] is self._leader and self._leader.optimizer() is None
        return is_over or self._leader is now or sum(w is before[0] for w in self._recent) >= _TAKES_OVER

    def _find_leader(self) -> OptimizerWatched:
        present = set(self.watched.values())  # not those whose optimizers are gone and whose ids others have now
        recent = [watched for watched in self._recent if watched in present]
        counts = Counter(recent)
        fewest = min(counts.values())
        if self._leader is not None and counts.get(self._leader, -1) == fewest:
            return self._leader
        return next(watched for watched in reversed(recent) if counts[watched] == fewest)


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether the class comes with torch (a subclass of one does not count)."""
    return type(optimizer).__module__.startswith("torch.optim")


def variant_of(optimizer: Optimizer) -> Literal["for-loop", "foreach", "fused", "own"]:
    """How the optimizer walks over its parameters, by its options and torch's defaults.

    With neither option set torch takes foreach when all parameters are on an accelerator and the loop otherwise
    (torch.optim.optimizer._default_to_fused_or_foreach).
    """
    if not is_torchs_own(optimizer):
        return "own"
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if group.get("foreach"):
        return "foreach"
    if "foreach" in group and group["foreach"] is None and all(p.device.type == "cuda" for p in group["params"]):
        return "foreach"
    return "for-loop"
