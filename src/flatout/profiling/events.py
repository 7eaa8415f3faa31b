"""What the watched calls report as they happen: modules, loaders, optimizers, the backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from torch import nn

from flatout.profiling.calls import ModuleCalls, Root, iter_tensors
from flatout.profiling.collector import InnerWatcher, RootWatcher, StepWatch
from flatout.profiling.operators.deep import DeepLooks
from flatout.profiling.operators.padding import name_tensors
from flatout.profiling.operators.recorder import storage_of
from flatout.profiling.steps.optimizing import Optimizing
from flatout.profiling.steps.schedule import Mode
from flatout.profiling.steps.timeline import Timeline

if TYPE_CHECKING:
    from flatout.profiling.ranks.watch import RankWatch

StepKind = Literal["none", "inference", "manual", "training", "call"]

_INFERENCE_AFTER: Final = 3
"""Root calls without a backward after which a loop counts as inference."""


class Run(Protocol):
    """What events need of the observation that they are told to."""

    kind: StepKind
    mode: Mode
    thread_id: int
    seen: int
    timeline: Timeline
    calls: ModuleCalls
    optimizing: Optimizing
    deep: DeepLooks
    watch: StepWatch | None
    root_watchers: tuple[RootWatcher, ...]
    inner_watcher: InnerWatcher | None
    ranks: RankWatch | None

    def restart(self, kind: StepKind) -> None:
        """A better border of steps was found: begin again from the warm-up."""

    def border(self) -> None:
        """A step ended."""

    def on_unwatched_steps(self) -> None:
        """Steps went by unwatched, and either the block is over or something happened in the last of them."""

    def resume_recording(self) -> None:
        """The time since the last recorded operator was not the user's."""

    def fail(self, error: Exception) -> None:
        """Our own mistake."""


class Events:
    """Tells a run which phase the step is in, where steps end, and what its parts have to look at."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._in_optimizer = False
        self._in_backward = False
        self._roots_without_backward = 0
        self._leader: Root | None = None

    def on_root_call(self, root: Root) -> None:
        if root.has_parameters and self._run.kind in ("none", "inference") and not self._in_backward:
            self._roots_without_backward += 1
            if self._run.kind == "none" and self._roots_without_backward >= _INFERENCE_AFTER:
                self._leader = root
                self._run.restart("inference")
            elif self._run.kind == "inference" and root is self._leader:
                self._run.border()

    def on_root_start(self, root: Root) -> None:
        if self._in_backward:  # a forward that is computed again there is the backward's own work
            return
        is_training = root.is_training and root.grad_enabled
        is_evaluation = self._run.kind == "training" and root.has_parameters and not is_training
        if root.has_parameters:
            self._run.timeline.root_calls += 1
        self._run.timeline.switch("evaluation" if is_evaluation else "forward")

    def on_root_end(self, root: Root) -> None:
        if self._in_backward:
            return
        # What follows an evaluation call belongs to it: its metrics, its loop.
        if self._run.timeline.phase != "evaluation":
            self._run.timeline.end_root("optimizer" if self._in_optimizer else "other")

    def on_root_inputs(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._run.mode is Mode.MEMORY and self._run.watch is not None and root.has_parameters:
            self._run.watch.on_batch((args, kwargs), is_fetched=False)
        recorder = self._run.deep.recorder
        if self._run.mode is Mode.DEEP and recorder is not None and root.has_parameters:
            for tensor in iter_tensors((args, kwargs)):
                if not recorder.has_producer(tensor) and not self._run.deep.is_standing(tensor, step=self._run.seen):
                    recorder.data_storages.add(storage_of(tensor))
        if (
            self._run.mode in (Mode.WARM_UP, Mode.DEEP)
            and root.has_parameters
            and (root.is_training or self._run.kind != "training")
        ):
            self._run.deep.look_for_padding(name_tensors(args, "input") | name_tensors(kwargs), root)
            self._run.deep.compare_inputs(root, args, kwargs)
            self._run.deep.note_inputs(iter_tensors((args, kwargs)), step=self._run.seen)
        if self._run.ranks is not None and root.has_parameters and (root.is_training or self._run.kind != "training"):
            self._run.ranks.add_batch(args, kwargs)
        is_deep = self._run.mode is Mode.DEEP and recorder is not None
        if is_deep or root.calls == 1:
            with self._run.deep.aside():
                for watcher in self._run.root_watchers:
                    watcher.on_root_inputs(root, args, kwargs, is_deep=is_deep)

    def on_root_output(self, root: Root, output: Any) -> None:
        try:
            with self._run.deep.aside():
                for watcher in self._run.root_watchers:
                    watcher.on_root_output(root, output)
        except Exception as e:  # noqa: BLE001  # ours, not the user's: give up observing, let the script go on
            self.fail(e)

    def on_inner_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if self._run.inner_watcher is None or self._in_backward or self._run.mode is not Mode.DEEP:
            return None
        try:
            with self._run.deep.between():
                return self._run.inner_watcher.on_inner_start(module, args, kwargs)
        except Exception as e:  # noqa: BLE001  # ours, not the user's: give up observing, let the script go on
            self.fail(e)
            return None

    def on_inner_end(self, token: object, output: Any) -> None:
        if self._run.inner_watcher is None:
            return
        try:
            with self._run.deep.between():
                self._run.inner_watcher.on_inner_end(token, output)
        except Exception as e:  # noqa: BLE001  # ours, not the user's: give up observing, let the script go on
            self.fail(e)

    def on_epoch_start(self) -> None:
        self._run.timeline.num_starts += 1
        self._run.optimizing.has_news = True

    def on_fetch_start(self) -> None:
        self._run.timeline.switch("data")

    def on_fetch_end(self, batch: Any) -> None:
        self._run.timeline.switch("optimizer" if self._in_optimizer else "other")
        if self._run.mode is Mode.DEEP and self._run.deep.recorder is not None:
            self._run.deep.recorder.data_storages.update(storage_of(t) for t in iter_tensors(batch))
        if self._run.mode is Mode.MEMORY and self._run.watch is not None:
            try:
                self._run.watch.on_batch(batch, is_fetched=True)
            except Exception as e:  # noqa: BLE001  # ours, not the user's: give up observing, let the script go on
                self.fail(e)

    def on_optimizer_start(self) -> None:
        self._in_optimizer = True
        self._run.timeline.switch("optimizer")

    def on_closure_start(self) -> None:
        self._in_optimizer = False
        self._run.timeline.switch("other")

    def on_closure_end(self) -> None:
        self._in_optimizer = True
        self._run.timeline.switch("optimizer")

    def on_optimizer_end(self, *, is_border: bool, leader_changed: bool) -> None:
        self._in_optimizer = False
        self._run.timeline.switch("other")
        if self._run.kind != "training" or leader_changed:
            self._run.restart("training")
        elif is_border:
            self._run.border()

    def on_unwatched_steps(self) -> None:
        self._run.on_unwatched_steps()

    def fail(self, error: Exception) -> None:
        """Our own mistake."""
        self._run.fail(error)

    def watching_backward(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward or get_ident() != self._run.thread_id or not self._run.calls.is_active:
                return original(*args, **kwargs)
            self._in_backward = True
            self._roots_without_backward = 0
            self._run.timeline.switch("backward")
            if self._run.mode is Mode.MEMORY and self._run.watch is not None:
                try:
                    self._run.watch.on_backward(name, args, kwargs)
                except Exception as e:  # noqa: BLE001  # ours, not the user's: give up observing, let the script go on
                    self.fail(e)
            if self._run.deep.recorder is not None:
                self._run.deep.recorder.mark_backward(sys._getframe(1))
            if self._run.ranks is not None:
                self._run.ranks.begin_backward(sys._getframe(1))
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                if self._run.deep.recorder is not None:
                    self._run.deep.recorder.mark_backward(None)
                if self._run.ranks is not None:
                    self._run.ranks.end_backward()
                    self._run.resume_recording()
                self._run.timeline.switch("optimizer" if self._in_optimizer else "other")
                if self._run.kind in ("none", "inference"):
                    self._run.restart("manual")
                elif self._run.kind == "manual":
                    self._run.border()

        return watched
