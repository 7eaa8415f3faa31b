"""What the watched calls report as they happen: modules, loaders, optimizers, the backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final, Protocol

from torch import nn

from flatout.check.observe.calls import RootModule
from flatout.check.observe.collector import BackwardListener, BatchListener, InnerCallListener, RootCallListener
from flatout.check.observe.observation import BorderKind, ObservationState
from flatout.check.observe.operators.padding import name_tensors
from flatout.check.observe.operators.recorder import storage_of
from flatout.check.observe.steps.schedule import Mode
from flatout.core.tensors.nests import tensors_in

_INFERENCE_AFTER: Final = 3
"""Root calls without a backward after which a loop counts as inference."""


class StepBorders(Protocol):
    """What is done where events show that a step ended."""

    def restart(self, kind: BorderKind) -> None:
        """A better border of steps was found: begin again from the warm-up."""

    def border(self) -> None:
        """A step ended: file it, and prepare the next."""

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
        self._leader: RootModule | None = None
        self._batches: tuple[BatchListener, ...] = ()
        self._backwards: tuple[BackwardListener, ...] = ()
        self._root_calls: tuple[RootCallListener, ...] = ()
        self._inner_calls: tuple[InnerCallListener, ...] = ()

    def follow(self, observation: ObservationState) -> None:
        """Work for this observation and its collectors, before the first event."""
        self._observation = observation
        self._batches = observation.listening(BatchListener)
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
            if self._observation.kind == "none" and self._roots_without_backward >= _INFERENCE_AFTER:
                self._leader = root
                self._borders.restart("inference")
            elif self._observation.kind == "inference" and root is self._leader:
                self._borders.border()

    def on_root_start(self, root: RootModule) -> None:
        if self._in_backward:  # a forward that is computed again there is the backward's own work
            return
        is_training = root.is_training and root.grad_enabled
        is_evaluation = self._observation.kind == "training" and root.has_parameters and not is_training
        if root.has_parameters:
            self._observation.timeline.root_calls += 1
        self._observation.timeline.switch("evaluation" if is_evaluation else "forward")

    def on_root_end(self, root: RootModule) -> None:
        if self._in_backward:
            return
        # What follows an evaluation call belongs to it: its metrics, its loop.
        if self._observation.timeline.phase != "evaluation":
            self._observation.timeline.end_root("optimizer" if self._in_optimizer else "other")

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

    def on_epoch_start(self) -> None:
        self._observation.timeline.num_starts += 1
        self._observation.optimizing.has_news = True

    def on_fetch_start(self) -> None:
        self._observation.timeline.switch("data")

    def on_fetch_end(self, batch: Any) -> None:
        self._observation.timeline.switch("optimizer" if self._in_optimizer else "other")
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

    def on_optimizer_end(self, *, is_border: bool, leader_changed: bool) -> None:
        self._in_optimizer = False
        self._observation.timeline.switch("other")
        if self._observation.kind != "training" or leader_changed:
            self._borders.restart("training")
        elif is_border:
            self._borders.border()

    def on_unwatched_steps(self) -> None:
        self._borders.on_unwatched_steps()

    def fail(self, error: Exception) -> None:
        """An error of our own: stop observing, and let the script go on."""
        self._borders.fail(error)

    def watching_backward(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward or get_ident() != self._observation.thread_id or not self._observation.calls.is_active:
                return original(*args, **kwargs)
            self._in_backward = True
            self._roots_without_backward = 0
            self._observation.timeline.switch("backward")
            frame = sys._getframe(1)
            with self.guarded():
                for listener in self._backwards:
                    listener.on_backward_start(name, args, kwargs, frame)
            if self._observation.deep.recorder is not None:
                self._observation.deep.recorder.note_backward(frame)
            del frame
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                if self._observation.deep.recorder is not None:
                    self._observation.deep.recorder.note_backward(None)
                for listener in self._backwards:
                    listener.on_backward_end()
                self._observation.timeline.switch("optimizer" if self._in_optimizer else "other")
                if self._observation.kind in ("none", "inference"):
                    self._borders.restart("manual")
                elif self._observation.kind == "manual":
                    self._borders.border()

        return watched
