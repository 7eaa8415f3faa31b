"""The process in which one side of a proof runs: a script that takes its steps on order.

The first steps are recorded. From then on the script stands still between two steps until the parent orders some; it answers with
the seconds they took. So two scripts take turns, and what slows the machine slows both.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from multiprocessing.popen_fork import Popen as Forked
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import current_thread, get_ident, main_thread
from time import perf_counter
from typing import IO, Any, Final, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.check.observe.steps.optimizers import Optimizing
from flatout.core.records.record import Record, from_json
from flatout.core.runtime.dynamo_frames import frame_outside_dynamo, outside_dynamo
from flatout.core.runtime.fork_server import die_with_parent
from flatout.core.runtime.optimizer_steps import OptimizerStepHooks
from flatout.core.runtime.own_calls import is_own_call
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.replayed_backwards import listen_to_replays
from flatout.core.runtime.script import end_script
from flatout.core.runtime.source_sites import Sites
from flatout.core.runtime.step_graphs import is_step_captured, note_backward
from flatout.tune.verify.conditions import SidePrecision
from flatout.tune.verify.environment_answers import EnvironmentAnswers, Rollouts
from flatout.tune.verify.recording import Recorder
from flatout.tune.verify.tensor_digests import forget_signs

_INFERENCE_AFTER: Final = 3
"""Root calls without a backward after which a loop counts as inference, as when observing."""

_EVALUATION_AT_MOST: Final = 200
"""So many calls may come before the first backward of a script that has created an optimizer."""
_MANUAL_AFTER: Final = 32
"""Backwards without an optimizer's step after which the script updates by hand; one that accumulates makes fewer."""

Kind = Literal["none", "training", "manual", "inference"]


class SideAnswer(Record, frozen=True, kw_only=True):
    """What a side reports to its parent, one line of JSON each."""

    what: Literal["recorded", "ran", "ended"]
    num_steps: int = 0
    """Steps since the start."""
    seconds: float = 0.0
    """Of the steps that were ordered; of 'recorded' since the script's first line, less what recording took."""
    peak_bytes: int = 0
    """Most resident memory; of 'ran' since the first steps, so that neither the start nor recording counts."""
    device_peak_bytes: int = 0
    device_free_bytes: int = 0
    device_total_bytes: int = 0
    device: str = "cpu"
    kind: Kind = "none"
    error: str = ""
    mean_loss: float | None = None
    """Of a run that ended after the losses that were asked for."""
    num_workers: int = 0
    """Processes that the script has started, as a loader's workers: they hand over their batches in turn."""
    missed: tuple[str, ...] = ()
    """Levers of its plan that have met nothing to change so far."""
    cycle: int | None = None
    """Steps between the last two rollouts of a policy: 0 as long as that is not known, None without environments."""
    is_finite: bool = True
    """Of 'ran': whether the weights that optimizers update are. Kernels on NaN take less power, and may take less time."""


class StepOrder(Record, frozen=True, kw_only=True):
    """What a side is to do next; no steps end the script."""

    num_steps: int = 0
    is_lean: bool = False
    """Give back the device's memory that is cached when the steps are done. One step that is not timed comes before them."""


class Orders:
    """The two pipes to the parent: orders come in, answers go out."""

    def __init__(self, orders: IO[str], answers: IO[str]) -> None:
        self._orders = orders
        self._answers = answers

    @classmethod
    def of_descriptors(cls, orders: int, answers: int) -> Orders:
        """The pipes behind two inherited file descriptors, which children of the script do not inherit."""
        os.set_inheritable(orders, False)
        os.set_inheritable(answers, False)
        return cls(os.fdopen(orders, "r"), os.fdopen(answers, "w"))

    def answer(self, answer: SideAnswer) -> None:
        """Report to the parent, if there still is one."""
        with suppress(BrokenPipeError, ValueError):
            self._answers.write(msgspec.json.encode(answer).decode() + "\n")
            self._answers.flush()

    def wait(self) -> StepOrder:
        """The next order; to end when the parent has gone."""
        line = self._orders.readline()
        return from_json(line, StepOrder) if line.strip() else StepOrder()


class ProofSide:
    """Finds the borders of steps, records the first `num_recorded` of them, and takes the others on order."""

    def __init__(
        self,
        orders: Orders,
        recorder: Recorder | None,
        *,
        num_recorded: int,
        precision: SidePrecision,
        user_root: str | None,
        environment_answers: Path | None = None,
    ) -> None:
        self.num_steps = 0
        self.kind: Kind = "none"
        self._orders = orders
        self._recorder = recorder
        self._num_recorded = num_recorded
        self._precision = precision
        self._optimizing = Optimizing(Sites(user_root=user_root), self)
        self._environments = EnvironmentAnswers(
            replayed=environment_answers,
            is_wanted=lambda: recorder is not None and self._is_recording,
            on_action=self._add_action,
        )
        self._patches = Patches()
        self._step_listener: OptimizerStepHooks | None = None
        self._stop_listening: Callable[[], None] = lambda: None
        self._thread_id = get_ident()
        self._depth = 0
        self._in_backward = False
        self._calls_without_backward = 0
        self._backwards_without_update = 0
        self._leader: nn.Module | None = None
        self._left = 0
        self._is_lean = self._is_waking = False
        self._began_s = 0.0
        self._recording_s = 0.0
        self._rollouts = Rollouts()
        self.missed: Callable[[], tuple[str, ...]] = tuple
        """Which levers of the plan have met nothing to change so far."""

    def install(self) -> None:
        """Begin to watch calls, backwards and optimizers."""
        self._began_s = perf_counter()
        self._optimizing.install(self._patches)
        self._optimizing.is_active = True
        self._environments.install(self._patches)
        self._patches.set(Optimizer, "__init__", self._finding_environments(Optimizer.__init__))
        self._step_listener = OptimizerStepHooks(before=self._before_update)
        self._patches.set(BaseProcess, "start", _noting_thread(BaseProcess.start))
        self._patches.set(BaseProcess, "_bootstrap", _dying_with_parent(BaseProcess._bootstrap))  # type: ignore[attr-defined]
        self._patches.set(nn.Module, "__call__", self._watching_calls(nn.Module.__call__))
        self._patches.set(torch.autograd, "backward", self._watching_backward(torch.autograd.backward))
        self._stop_listening = listen_to_replays(self._on_backward)

    def remove(self) -> None:
        """Stop watching, and undo every patch."""
        self._optimizing.is_active = False
        self._optimizing.remove()
        if self._step_listener is not None:
            self._step_listener.remove()
        self._stop_listening()
        self._patches.undo()

    def ended(self, error: str, *, seconds: float = 0.0, num_losses: int = 0, mean_loss: float | None = None) -> None:
        """The script has ended, by itself or by an error; `seconds` and losses are those of a run in one go."""
        self.num_steps = num_losses or self.num_steps
        self._orders.answer(self._answer("ended", error=error, seconds=seconds, mean_loss=mean_loss))

    # -- events -----------------------------------------------------------------------------------------------------------

    def on_optimizer_start(self) -> None:
        """Gradients are recorded by a hook of our own, which gets the optimizer."""

    def on_optimizer_end(self, optimizer: int, *, is_border: bool, leader_changed: bool) -> None:
        if self.kind in ("manual", "inference"):
            self._restart()
        self.kind = "training"
        if is_border:
            self._border()

    def on_closure_start(self) -> None:
        """Forward and backward inside the optimizer's step: nothing changes."""

    def on_closure_end(self) -> None:
        """Nothing changes at the end of a closure either."""

    def on_backward_replayed(self) -> None:
        """A graph of the script's own has replayed a backward, and no optimizer's step that could be seen."""
        self._on_backward(())
        self._on_backward_end()

    def on_unwatched_steps(self) -> None:
        """Nothing to do: every step is watched."""

    def on_leader_lost(self, *, is_replaced: bool) -> None:
        """Nothing to do: every step is watched."""

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._precision.prepare_update(optimizer)
        if self._recorder is not None and self._is_recording and get_ident() == self._thread_id:
            with self._recording():
                self._recorder.add_gradients(optimizer)

    def _watching_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @frame_outside_dynamo
        def backward(tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            if self._in_backward or get_ident() != self._thread_id:
                return original(tensors, *args, **kwargs)
            if is_step_captured():
                note_backward()
                return original(tensors, *args, **kwargs)
            self._on_backward((tensors,) if isinstance(tensors, Tensor) else tensors)
            self._in_backward = True
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
            self._on_backward_end()

        return backward

    @outside_dynamo
    def _on_backward_end(self) -> None:
        if not self._optimizing.watched:
            self._backwards_without_update += 1
            if self._backwards_without_update > _MANUAL_AFTER:
                self.kind = "manual"
                self._border()

    @outside_dynamo
    def _on_backward(self, losses: Sequence[Tensor]) -> None:
        """A backward begins, or a graph has replayed one."""
        self._calls_without_backward = 0
        if self.kind == "inference":
            self._restart()
        if self._recorder is not None and self._is_recording:
            with self._recording():
                for loss in losses:
                    self._recorder.add_loss(loss)

    def _watching_calls(self, original: Callable[..., Any]) -> Callable[..., Any]:
        side = self
        is_compiling = torch.compiler.is_dynamo_compiling  # dynamo folds it, so that no guard looks at our own state

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or side._depth or side._in_backward or get_ident() != side._thread_id or is_own_call():
                return original(self, *args, **kwargs)
            if next(self.parameters(), None) is None:
                return original(self, *args, **kwargs)
            side._before_call(self)
            args, kwargs, context = side._precision.prepare(self, args, kwargs)
            side._depth += 1
            try:
                with context:
                    output = side._precision.finish(original(self, *args, **kwargs))
            finally:
                side._depth -= 1
            if side._recorder is not None and side._is_recording and not torch.is_grad_enabled():
                with side._recording():
                    side._recorder.add_output(output)
            return output

        return __call__

    def _finding_environments(self, original: Callable[..., None]) -> Callable[..., None]:
        """By the time that an optimizer is made, a script has imported its environments."""

        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._environments.find()
            original(optimizer, *args, **kwargs)

        return __init__

    def _add_action(self, action: Any) -> None:
        if self._recorder is not None:
            with self._recording():
                self._recorder.add_action(action)

    @property
    def _is_rollout(self) -> bool:
        """Whether calls without gradients collect what is learnt from later."""
        return bool(self._environments.num_calls) and self._optimizing.has_optimizers

    def _before_call(self, module: nn.Module) -> None:
        if self._recorder is not None and self._is_recording:
            self._recorder.add_module(module)
        if self.kind in ("none", "inference") and not self._is_rollout:
            if self._leader is None and not self._optimizing.watched:
                self._calls_without_backward += 1
                fewest = _EVALUATION_AT_MOST if self._optimizing.has_optimizers else _INFERENCE_AFTER
                if self._calls_without_backward > fewest:
                    self.kind, self._leader = "inference", module
            if self.kind == "inference" and module is self._leader:
                self._border()

    # -- steps ------------------------------------------------------------------------------------------------------------

    @property
    def _is_recording(self) -> bool:
        return self.num_steps < self._num_recorded and not _is_capturing()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """What goes by inside is not the script's own time. The device first finishes what is."""
        _settle()
        began = perf_counter()
        try:
            yield
        finally:
            self._recording_s += perf_counter() - began

    def _restart(self) -> None:
        """What counted as steps of inference was an evaluation before the training: begin again."""
        self.kind, self._leader = "none", None
        self.num_steps = self._left = 0
        self._rollouts = Rollouts()
        if self._recorder is not None:
            self._recorder.clear()

    def _border(self) -> None:
        """A step has ended: record it, or go on until what was ordered is done."""
        if _is_capturing():  # into a graph of the script's own, where nothing can be waited for
            return
        self.num_steps += 1
        self._rollouts.add_step(self._environments.num_calls)
        if self.num_steps <= self._num_recorded:
            if self._recorder is not None:
                with self._recording():
                    self._recorder.end(self.num_steps)
            if self.num_steps < self._num_recorded:
                return
            _settle()
            since_s = perf_counter() - self._began_s - self._recording_s
            answer = self._answer("recorded", seconds=since_s)
            self._end_recording()
            # what other runs of the same script find free while this one stands
            free_bytes, total_bytes = _device_bytes()
            self._orders.answer(
                msgspec.structs.replace(answer, device_free_bytes=free_bytes, device_total_bytes=total_bytes)
            )
        elif self._is_waking:
            self._is_waking = False
            _settle()
            self._began_s = perf_counter()
            return
        elif self._left > 1:
            self._left -= 1
            return
        else:
            _settle()
            seconds = perf_counter() - self._began_s
            answer = msgspec.structs.replace(self._answer("ran", seconds=seconds), is_finite=self._is_finite())
            if self._is_lean and _is_device():
                torch.cuda.empty_cache()
            self._orders.answer(answer)
        with _standing_workers():
            order = self._orders.wait()
        if not order.num_steps:
            self.remove()
            end_script()
        self._left = order.num_steps
        self._is_lean = self._is_waking = order.is_lean
        self._began_s = perf_counter()

    @torch.no_grad()
    def _is_finite(self) -> bool:
        optimizers = [watched.optimizer() for watched in self._optimizing.watched.values()]
        groups = [group for optimizer in optimizers if optimizer is not None for group in optimizer.param_groups]
        weights = {id(p): p for group in groups for p in group["params"] if type(p) is nn.Parameter and p.numel()}
        plain = [p for p in weights.values() if p.layout == torch.strided and p.is_floating_point()]
        finite = [torch.linalg.vector_norm(p, float("inf")).isfinite() for p in plain]
        return all(bool(torch.stack(of_device).all()) for of_device in _by_device(finite))

    def _end_recording(self) -> None:
        """Release what recording holds, and start the peaks anew: those of the steps that follow are the script's own."""
        if self._recorder is not None:
            self._environments.write(self._recorder.folder)
        self._recorder = None
        forget_signs()
        _reset_peaks()
        if _is_device():
            torch.cuda.empty_cache()

    def _answer(
        self,
        what: Literal["recorded", "ran", "ended"],
        *,
        seconds: float = 0.0,
        error: str = "",
        mean_loss: float | None = None,
    ) -> SideAnswer:
        is_device = _is_device()
        return SideAnswer(
            what=what,
            num_steps=self.num_steps,
            seconds=seconds,
            peak_bytes=_resident_peak_bytes(),
            device_peak_bytes=torch.cuda.max_memory_allocated() + _bytes_of_graphs() if is_device else 0,
            device=torch.cuda.get_device_name() if is_device else "cpu",
            kind=self.kind,
            error=error,
            mean_loss=mean_loss,
            num_workers=len(active_children()),
            missed=self.missed(),
            cycle=self._rollouts.cycle if self._environments.num_calls else None,
        )


@contextmanager
def _standing_workers() -> Iterator[None]:
    """The processes that the script has started stand still with it.

    Batches that a loader's workers prepared meanwhile would have the next steps wait for none, and the other side would share its
    cores with them.
    """
    workers = [w for w in active_children() if isinstance(getattr(w, "_popen", None), Forked) and _is_of_main_thread(w)]
    _send(workers, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(workers, signal.SIGCONT)


def _dying_with_parent(bootstrap: Callable[..., int]) -> Callable[..., int]:
    """Forked processes die with the thread that has forked them: one that stands could not find out that it has gone."""

    def run(self: BaseProcess, *args: Any, **kwargs: Any) -> int:
        if _is_of_main_thread(self):
            die_with_parent()
        return bootstrap(self, *args, **kwargs)

    return run


def _noting_thread(start: Callable[..., None]) -> Callable[..., None]:
    def run(self: BaseProcess, *args: Any, **kwargs: Any) -> None:
        self._is_of_main_thread = current_thread() is main_thread()  # type: ignore[attr-defined]
        start(self, *args, **kwargs)

    return run


def _is_of_main_thread(process: BaseProcess) -> bool:
    return getattr(process, "_is_of_main_thread", False)


def _send(processes: Sequence[BaseProcess], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            if process.pid is not None:
                os.kill(process.pid, number)


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor)
    return list(devices.values())


def _settle() -> None:
    """Let the device finish its queue, so that no stretch of steps pays for another's."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # noqa: TID251  # between two stretches, in which nothing is measured


def _is_capturing() -> bool:
    return _is_device() and torch.cuda.is_current_stream_capturing()


def _is_device() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _device_bytes() -> tuple[int, int]:
    """What is free of the device's memory, and all of it."""
    return torch.cuda.mem_get_info() if _is_device() else (0, 0)


def _bytes_of_graphs() -> int:
    """What captured graphs hold of the device for their replays, which the allocator counts as free."""
    segments = torch.cuda.memory_snapshot()
    own = (s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
    return sum(s["total_size"] - s["allocated_size"] for s in own)


def _reset_peaks() -> None:
    """Have the peaks of resident and of device memory start from what is held now. They are those of a process of ours.

    On Linux alone for resident memory: elsewhere it stays that of the whole process, on both sides alike.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps memory that was freed, which still is resident
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _resident_peak_bytes() -> int:
    """The most memory this process held resident since `_reset_peaks`.

    Linux tells it as VmHWM (proc(5)). getrusage's figure is no less than what the parent held when it started this process.
    """
    import resource

    peak = proc_bytes("/proc/self/status", "VmHWM")
    return (
        peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )  # bytes on macOS (getrusage(2))


def proc_bytes(file: str, name: str) -> int | None:
    """A figure of memory in a file of Linux's /proc, 0 where the file lacks it; None where there is no such file."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
