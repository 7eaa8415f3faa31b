"""What the watched calls report as they happen: modules, loaders, optimizers, the backward."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any, Final, Protocol

from torch import nn

from flatout.check.observe.calls import RootModule
from flatout.check.observe.collector import (
    BackwardListener,
    BatchListener,
    InnerCallListener,
    OptimizerStepListener,
    RootCallListener,
)
from flatout.check.observe.observation import BorderKind, ObservationState
from flatout.check.observe.operators.padding import name_tensors
from flatout.check.observe.operators.recorder import storage_of
from flatout.check.observe.steps.schedule import Mode
from flatout.core.runtime.dynamo_frames import frame_outside_dynamo, is_in_compiled_call, outside_dynamo
from flatout.core.runtime.step_graphs import is_step_captured, note_backward
from flatout.core.tensors.nests import tensors_in

_INFERENCE_AFTER: Final = 3
"""Root calls without a backward after which a loop counts as inference."""
_BACKWARDS_AWAITED: Final = 500
"""Backwards after which an optimizer that was constructed is not waited for any longer: derivatives inside a step (a solver's, a
gradient penalty's) and accumulated gradients are fewer."""
_UPDATES_UNSEEN: Final = 3
"""After so many backwards before which parameters had changed an optimizer is taken to step where no hook sees it: in compiled
code. What changes weights between two backwards of a step (SAM, a line search) is followed by a step that is seen."""
_LEADER_GONE: Final = 100
"""Calls of other root modules after which the one that began the steps is taken to be over; in a step there are fewer."""
_UPDATES_OF_ITERATION: Final = 2
"""Steps that each optimizer makes between two rollouts from which on the loop's step is the iteration: a rollout, its updates."""
_MOST_UPDATES: Final = 2000
"""After so many optimizer steps without the next rollout the environment is only used before or between long trainings."""


class StepBorders(Protocol):
    """What is done where events show that a step ended."""

    def restart(self, kind: BorderKind) -> None:
        """A better border of steps was found: begin again from the warm-up."""

    def border(self) -> None:
        """A step ended: file it, and prepare the next."""

    def cut_block(self) -> None:
        """End the unwatched steps before their time, and watch again."""

    def on_unwatched_steps(self) -> None:
        """Steps went by unwatched, and either the block is over or something happened in the last of them."""

    def fail(self, error: Exception) -> None:
        """An error of our own: stop observing, and let the script go on."""


class Events:
    """Finds the phase that the step is in and where steps end, and passes on to collectors what they listen to."""

    _observation: ObservationState

    def __init__(self, borders: StepBorders) -> None:
        self._borders = borders
        self._in_optimizer = False
        self._in_backward = False
        self._roots_without_backward = 0
        self._num_backwards = 0
        """Backwards while no optimizer had stepped."""
        self._num_updates_unseen = 0
        """Those of them before which parameters had changed since the backward before."""
        self._versions: tuple[int, ...] = ()
        """How often optimizers' parameters had been changed by the last of them."""
        self._leader: RootModule | None = None
        self._calls_of_others = 0
        """Calls of other root modules since the leader's last."""
        self.is_by_iteration = False
        """Whether a step is an iteration of reinforcement learning: a rollout in the environment, and the updates after it."""
        self._has_environment = False
        self._updates: Counter[int] = Counter()
        """Steps of each optimizer since the last rollout."""
        self._is_unit_known = False
        self._is_called_outside = False
        """Whether environments or loaders are called outside of compiled code, where a step can end."""
        self._is_end_due = False
        """Whether a step's backward ended inside of compiled code: the step ends at the next such call."""
        self._is_border_noted = False
        """Whether the border at the call that begins now was the end of unwatched steps."""
        self._batches: tuple[BatchListener, ...] = ()
        self._optimizer_steps: tuple[OptimizerStepListener, ...] = ()
        self._backwards: tuple[BackwardListener, ...] = ()
        self._root_calls: tuple[RootCallListener, ...] = ()
        self._inner_calls: tuple[InnerCallListener, ...] = ()

    @property
    def leader(self) -> RootModule | None:
        """The root module whose calls begin the steps of an inference loop."""
        return self._leader

    def follow(self, observation: ObservationState) -> None:
        """Work for this observation and its collectors, before the first event."""
        self._observation = observation
        self._batches = observation.listening(BatchListener)
        self._optimizer_steps = observation.listening(OptimizerStepListener)
        self._backwards = observation.listening(BackwardListener)
        self._root_calls = observation.listening(RootCallListener)
        self._inner_calls = observation.listening(InnerCallListener)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error in here is ours and not the user's: give up observing, let the script go on."""
        try:
            yield
        except Exception as e:  # noqa: BLE001  # see above
            self.fail(e)

    def on_root_call(self, root: RootModule) -> None:
        if root.has_parameters and self._observation.kind in ("none", "inference") and not self._in_backward:
            self._roots_without_backward += 1
            least = _LEADER_GONE if self._is_optimizer_awaited else _INFERENCE_AFTER
            if self._observation.kind == "none" and self._roots_without_backward >= least:
                self._leader = root
                self._borders.restart("inference")
            elif self._observation.kind == "inference" and root is self._leader:
                self._calls_of_others = 0
                if not self._is_border_noted:
                    self._borders.border()
                self._is_border_noted = False
            elif self._observation.kind == "inference":
                self._calls_of_others += 1
                if self._calls_of_others > _LEADER_GONE:  # a warm-up on a line of its own is over
                    self._calls_of_others, self._leader = 0, root
                    self._borders.restart("inference")

    def on_root_start(self, root: RootModule) -> None:
        if self._in_backward:  # a forward that is computed again there is the backward's own work
            return
        # A network that is trained with its normalisation frozen is in evaluation mode, and its graphs are used.
        is_training = root.grad_enabled and (root.is_training or root.graphs_used > 0)
        is_evaluation = self._observation.kind == "training" and root.has_parameters and not is_training
        if root.has_parameters:
            self._observation.timeline.root_calls += 1
            self._observation.timeline.evaluation_calls += is_evaluation
        passive = "rollout" if self.is_by_iteration else "evaluation"
        self._observation.timeline.switch(passive if is_evaluation else "forward")

    def on_root_end(self, root: RootModule) -> None:
        if self._in_backward:
            return
        # What follows an evaluation call belongs to it: its metrics, its loop.
        if self._observation.timeline.phase not in ("evaluation", "rollout"):
            self._observation.timeline.end_root("optimizer" if self._in_optimizer else self._between)

    def on_root_inputs(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observation, deep = self._observation, self._observation.deep
        is_deep = observation.mode is Mode.DEEP and deep.recorder is not None
        if root.has_parameters:
            for listener in self._batches:
                listener.on_batch((args, kwargs), root=root)
            if is_deep and deep.recorder is not None:
                for tensor in tensors_in((args, kwargs)):
                    if not deep.recorder.has_producer(tensor) and not deep.is_standing(
                        tensor, step=observation.num_steps
                    ):
                        deep.recorder.data_storages.add(storage_of(tensor))
            is_of_loop = root.is_training or observation.kind != "training"
            if observation.mode in (Mode.WARM_UP, Mode.DEEP) and is_of_loop:
                deep.look_for_padding(name_tensors(args, "input") | name_tensors(kwargs), root)
                deep.compare_inputs(root, args, kwargs)
                deep.note_inputs(tensors_in((args, kwargs)), step=observation.num_steps)
        if is_deep or root.calls == 1:
            with deep.paused():
                for watcher in self._root_calls:
                    watcher.on_root_inputs(root, args, kwargs, is_deep=is_deep)

    def on_root_output(self, root: RootModule, output: Any) -> None:
        with self.guarded(), self._observation.deep.paused():
            for listener in self._root_calls:
                listener.on_root_output(root, output)

    def on_inner_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if self._in_backward or self._observation.mode is not Mode.DEEP:
            return None
        with self.guarded(), self._observation.deep.skipped():
            tokens = [listener.on_inner_start(module, args, kwargs) for listener in self._inner_calls]
            return tokens if any(token is not None for token in tokens) else None
        return None

    def on_inner_end(self, token: object, output: Any) -> None:
        assert isinstance(token, list)
        with self.guarded(), self._observation.deep.skipped():
            for listener, own in zip(self._inner_calls, token, strict=True):
                if own is not None:
                    listener.on_inner_end(own, output)

    @property
    def _is_optimizer_awaited(self) -> bool:
        """Whether a backward was seen and an optimizer exists: its step will end the loop's first step."""
        is_early = 0 < self._num_backwards <= _BACKWARDS_AWAITED and self._num_updates_unseen < _UPDATES_UNSEEN
        return self._observation.optimizing.has_optimizers and is_early

    @property
    def _between(self) -> str:
        """The phase of what the loop does between the calls that are watched."""
        return "rollout" if self.is_by_iteration and not self._updates else "other"

    def on_environment_start(self) -> None:
        with self.guarded():
            self._on_outside_call()
            self._begin_rollout()
        self._observation.timeline.switch("environment")

    def on_environment_end(self) -> None:
        self._observation.resume_recording()
        self._observation.timeline.switch(self._between)

    def _begin_rollout(self) -> None:
        """An environment is about to be stepped: where updates came before, an iteration ended."""
        self._has_environment = True
        if not self._updates:
            return
        is_iteration = self.is_by_iteration or min(self._updates.values()) >= _UPDATES_OF_ITERATION
        self._updates.clear()
        self._is_unit_known = True
        if is_iteration and not self.is_by_iteration:
            self.is_by_iteration = True
            self._borders.restart("training")
        elif is_iteration:
            self._borders.border()

    def on_epoch_start(self) -> None:
        self._observation.timeline.num_starts += 1
        self._observation.optimizing.has_news = True

    def on_fetch_start(self) -> None:
        with self.guarded():
            self._on_outside_call()
        self._observation.timeline.switch("data")

    def on_fetch_end(self, batch: Any) -> None:
        self._observation.timeline.switch("optimizer" if self._in_optimizer else self._between)
        if self._observation.mode is Mode.DEEP and self._observation.deep.recorder is not None:
            self._observation.deep.recorder.data_storages.update(storage_of(t) for t in tensors_in(batch))
        with self.guarded():
            for listener in self._batches:
                listener.on_batch(batch, root=None)

    def on_optimizer_start(self) -> None:
        self._in_optimizer = True
        self._observation.timeline.switch("optimizer")

    def on_closure_start(self) -> None:
        self._in_optimizer = False
        self._observation.timeline.switch("other")

    def on_closure_end(self) -> None:
        self._in_optimizer = True
        self._observation.timeline.switch("optimizer")

    def on_optimizer_end(self, optimizer: int, *, is_border: bool, leader_changed: bool) -> None:
        self._in_optimizer = False
        self._observation.timeline.switch("other")
        with self.guarded():
            for listener in self._optimizer_steps:
                listener.on_optimizer_step(optimizer)
        if self._has_environment:
            self._updates[optimizer] += 1
            if self.is_by_iteration:
                return
            self._is_unit_known |= self._updates[optimizer] > _MOST_UPDATES
            if not self._is_unit_known and self._observation.kind == "training":
                return
        if self._observation.kind != "training" or leader_changed:
            self._borders.restart("training")
        elif is_border:
            self._borders.border()

    def on_unwatched_steps(self) -> None:
        self._borders.on_unwatched_steps()

    def on_leader_lost(self, *, is_replaced: bool) -> None:
        if is_replaced:
            self._borders.cut_block()
            self._observation.timeline.restart()
        else:
            self._borders.restart("training")

    def on_counted_call(self) -> None:
        self._borders.border()
        self._is_border_noted = self._observation.calls.is_active

    def fail(self, error: Exception) -> None:
        """An error of our own: stop observing, and let the script go on."""
        self._borders.fail(error)

    def _end_backward_without_steps(self) -> None:
        """A backward ended and no optimizer has stepped: it ends a step, unless an optimizer is to be expected."""
        self._num_backwards += 1
        versions = self._observation.optimizing.versions()
        self._num_updates_unseen += self._num_backwards > 1 and versions != self._versions
        self._versions = versions
        if not self._is_optimizer_awaited:
            self._borders.restart("manual")
        elif self._observation.kind == "inference":
            self._borders.restart("none")

    def watching_backward(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @frame_outside_dynamo
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward or get_ident() != self._observation.thread_id:
                return original(*args, **kwargs)
            if is_step_captured():
                note_backward()
                return original(*args, **kwargs)
            is_watched, is_inside = self._on_backward_start(name, args, kwargs, sys._getframe(1)), is_in_compiled_call()
            try:
                return original(*args, **kwargs)
            finally:
                self._on_backward_end(is_watched=is_watched, is_inside=is_inside)

        return watched

    @outside_dynamo
    def _on_backward_start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> bool:
        """A backward begins; whether the step that it is in is watched."""
        observation = self._observation
        if observation.kind == "inference" and observation.blocks.is_open:
            self._borders.cut_block()  # this is no loop of inference any more
        if not observation.calls.is_active:
            return False
        self._in_backward = True
        self._roots_without_backward = 0
        observation.timeline.switch("backward")
        with self.guarded():
            for listener in self._backwards:
                listener.on_backward_start(name, args, kwargs, frame)
        if observation.deep.recorder is not None:
            observation.deep.recorder.note_backward(frame)
        return True

    def on_backward_replayed(self) -> None:
        observation = self._observation
        if observation.kind == "inference" and observation.blocks.is_open:
            self._borders.cut_block()
        self._roots_without_backward = 0
        self._end_step_by_backward(is_watched=observation.calls.is_active)

    @outside_dynamo
    def _on_backward_end(self, *, is_watched: bool, is_inside: bool) -> None:
        observation = self._observation
        if not is_watched:
            self._end_step_by_backward(is_watched=False)
            return
        self._in_backward = False
        if observation.deep.recorder is not None:
            observation.deep.recorder.note_backward(None)
        for listener in self._backwards:
            listener.on_backward_end()
        observation.timeline.switch("optimizer" if self._in_optimizer else "other")
        if is_inside and self._is_called_outside:
            self._is_end_due = True
        else:
            self._end_step_by_backward(is_watched=True)

    def _on_outside_call(self) -> None:
        """Something is called that ends a step whose backward compiled code has made."""
        if is_in_compiled_call():
            return
        self._is_called_outside = True
        if self._is_end_due:
            self._is_end_due = False
            self._end_step_by_backward(is_watched=self._observation.calls.is_active)

    def _end_step_by_backward(self, *, is_watched: bool) -> None:
        """A backward has ended, and so has a step where no optimizer of torch's shows steps."""
        kind = self._observation.kind
        if is_watched and kind in ("none", "inference"):
            self._end_backward_without_steps()
        elif kind == "manual" and (is_watched or self._observation.blocks.is_open):
            self._borders.border()
