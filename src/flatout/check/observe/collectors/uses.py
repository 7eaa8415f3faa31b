"""Calls that are no operators but take a step's time: saving, copying state, converting, checking, logging; by the user's line.

What is rare (a file saved every hundred steps) is watched all the time, what may be frequent only in the step that watches host
reads too. A watched call costs about a microsecond more than an unwatched one.
"""

from __future__ import annotations

import builtins
import copy
import functools
import gc
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sized
from threading import get_ident
from time import perf_counter
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.optimizer import Optimizer

from flatout.check.observe.collector import Collector, EndedStep, StepListener
from flatout.check.observe.collectors.host_reads import HostReads
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import CallUse
from flatout.core.runtime.patches import Patches
from flatout.core.tensors.nests import tensors_in

Describe = Callable[[tuple[Any, ...], dict[str, Any]], tuple[str, int]]
"""From a call's arguments to (detail, bytes)."""

_LOGGERS: Final = (
    ("tqdm.std", "tqdm", ("set_postfix", "set_postfix_str", "set_description", "set_description_str", "update", "refresh")),
    ("torch.utils.tensorboard.writer", "SummaryWriter", ("add_scalar", "add_scalars", "add_histogram", "add_image", "flush")),
    ("tensorboardX.writer", "SummaryWriter", ("add_scalar", "add_scalars", "add_histogram", "add_image", "flush")),
    ("wandb.sdk.wandb_run", "Run", ("log",)),
)  # fmt: skip
"""(module, class, methods) of what logs a run; watched once the script has imported it."""


_FEWEST_CALLS: Final = 3
"""With so many calls in a step, their mean does without the first."""


class Use(NamedTuple):
    """What makes two calls the same row."""

    name: str
    site: int
    detail: str


class _Sum:
    """Calls and seconds of one row; the phase and the bytes of its first call."""

    def __init__(self, phase: str, num_bytes: int) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.phase = phase
        self.bytes = num_bytes
        self._shortest_call_s = float("inf")
        """Mean of a call, in the step where it was shortest."""

    def add_step(self, calls: list[float]) -> None:
        """Add a step's calls. Each takes what it took in the best step, without a first call that others followed.

        The rest is the machine's, or ours: the first call finds the watches cold (65 us, the next four 26 to 36 us each, measured
        on Categorical's checks).
        """
        self.calls += len(calls)
        warm = calls[1:] if len(calls) >= _FEWEST_CALLS else calls
        self._shortest_call_s = min(self._shortest_call_s, sum(warm) / len(warm))
        self.seconds = self.calls * self._shortest_call_s


class CallUses(Collector, StepListener):
    """Watches calls that take a step's time besides its operators."""

    def __init__(self, observation: ObservationState) -> None:
        self.callers: dict[int, tuple[int, ...]] = {}
        self.by_step: dict[int, float] = {}
        """Seconds of rare calls in a step, by its index in the timeline."""
        self.is_on = False
        self.failure = ""
        self._observation = observation
        self._sites = observation.sites
        self._thread_id = observation.thread_id
        self._inside = False
        self._rare: dict[Use, _Sum] = {}
        self._waiting: list[tuple[Use, float]] = []
        self._waiting_step = -1
        self._frequent: dict[Use, _Sum] = {}
        self._in_step: dict[Use, list[float]] = {}
        """Seconds of each frequent call in the step in progress."""
        self._reads: HostReads | None = None
        self._num_hot = 0
        self._untaken_s = 0.0
        self._autocast = ""
        self._patches = Patches()
        self._hot = Patches()
        self._unguarded = Patches()
        self._has_compiled = False
        self._loggers_watched: set[str] = set()

    # -- the collector's life ---------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Watch the rare calls all the time."""
        self._patches = patches
        self.is_on = True
        for owner, name, public, describe in _rare_calls():
            self._watch(patches, owner, name, public, describe)
        self._watch(self._unguarded, builtins, "print", "print", None)
        scaler = torch.amp.GradScaler
        for name in ("scale", "update"):
            self._watch(patches, scaler, name, f"GradScaler.{name}", self._describe_scaler)
        self._note_autocast(patches)

    def begin(self, mode: Mode) -> None:
        """Watch frequent calls as well in a step that watches host reads."""
        self._watch_loggers()
        if mode is Mode.READS and not self._has_compiled:
            self._reads = next(iter(self._observation.listening(HostReads)), None)
            for owner, name, public, describe in _frequent_calls():
                self._watch(self._hot, owner, name, public, describe, is_hot=True)
            for name in ("__init__", "_validate_sample"):
                public = f"Distribution.{name}"
                self._watch(self._hot, Distribution, name, public, _describe_checks, is_hot=True, is_internal=True)

    def end(self, mode: Mode) -> None:
        """Forget the calls of the step."""
        if mode is Mode.READS:
            self._hot.undo()
            self._num_hot += 1
            for use, calls in self._in_step.items():
                self._frequent[use].add_step(calls)
            self._in_step.clear()

    def remove(self) -> None:
        """Put back what is watched in single steps, and print."""
        self._hot.undo()
        self._unguarded.undo()
        self.is_on = False

    def pause(self) -> None:
        """Calls of trials are not the script's."""
        self.is_on = False

    def resume(self) -> None:
        """Watch again what the script does."""
        self.is_on = not self.failure

    def spare_compiled_code(self) -> None:
        """Leave alone the functions that compiled code checks to be the ones it was compiled with."""
        self._has_compiled = True
        self._hot.undo()
        self._unguarded.undo()

    def restart(self) -> None:
        """Forget the calls so far."""
        self._hot.undo()
        self._rare.clear()
        self._waiting.clear()
        self._frequent.clear()
        self._in_step.clear()
        self.by_step.clear()
        self._untaken_s = 0.0
        self._num_hot = 0

    # -- what came of it --------------------------------------------------------------------------------------------------

    def fill(self, evidence: Evidence) -> Evidence:
        """Add rows to `uses`, per step, and who called their lines. What came after the last step's border belongs to no step."""
        num_steps = self._observation.num_steps
        self._file_waiting(num_steps)
        rows = [_row(use, s, max(1, num_steps)) for use, s in self._rare.items() if s.calls]
        rows += [_row(use, s, max(1, self._num_hot)) for use, s in self._frequent.items() if s.calls]
        callers = {site: lines for site, lines in self.callers.items() if lines}
        return msgspec.structs.replace(evidence, uses=(*evidence.uses, *rows), callers=callers | evidence.callers)

    def notes(self) -> Iterator[str]:
        """The reason why watching stopped early."""
        if self.failure:
            yield self.failure

    def on_step_end(self, step: EndedStep) -> None:
        """File the seconds of rare calls since the step before."""
        seconds, self._untaken_s = self._untaken_s, 0.0
        if seconds:
            self.by_step[step.position] = seconds

    # -- watching ---------------------------------------------------------------------------------------------------------

    def _watch(
        self,
        patches: Patches,
        owner: object,
        name: str,
        public: str,
        describe: Describe | None,
        *,
        is_hot: bool = False,
        is_internal: bool = False,
    ) -> None:
        """Watch one function; calls from torch's own code count only where it is internal, at the user's line that led there.

        What watching host reads inside it takes is not its time.
        """
        original: Callable[..., Any] = getattr(owner, name)
        is_compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._inside or not self.is_on or get_ident() != self._thread_id:
                return original(*args, **kwargs)
            self._inside = True
            reads = self._reads
            watching_s = reads.own_s if reads is not None else 0.0
            start = perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = perf_counter() - start
                if reads is not None:
                    seconds = max(0.0, seconds - (reads.own_s - watching_s))
                self._note(public, describe, args, kwargs, seconds, is_hot=is_hot, is_internal=is_internal)
                self._inside = False

        patches.set(owner, name, watched)

    def _watch_loggers(self) -> None:
        """Watch the loggers that the script has imported meanwhile."""
        for module_name, kind, methods in _LOGGERS:
            owner = getattr(sys.modules.get(module_name), kind, None)
            if owner is not None and module_name not in self._loggers_watched:
                self._loggers_watched.add(module_name)
                for name in methods:
                    if callable(getattr(owner, name, None)):
                        self._watch(self._patches, owner, name, f"{kind}.{name}", None)

    def _note_autocast(self, patches: Patches) -> None:
        """Keep the dtype of the autocast region entered last."""
        kind = torch.amp.autocast_mode.autocast
        original: Callable[..., Any] = kind.__enter__
        is_compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def entering(self: Any) -> Any:
            if not is_compiling() and getattr(self, "_enabled", False):
                uses._autocast = str(self.fast_dtype).removeprefix("torch.")
            return original(self)

        uses = self
        patches.set(kind, "__enter__", entering)

    def _describe_scaler(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
        scaler = args[0]
        is_enabled = bool(scaler.is_enabled())
        device = next((t.device.type for t in tensors_in((args[1:], kwargs))), getattr(scaler, "_device", ""))
        return f"enabled={is_enabled}, device={device}, autocast={self._autocast or 'none'}", 0

    def _note(
        self,
        public: str,
        describe: Describe | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds: float,
        *,
        is_hot: bool,
        is_internal: bool,
    ) -> None:
        try:
            frame = sys._getframe(2)
            site = self._sites.of_frame(frame)
            if site < 0 or (not is_internal and frame.f_globals.get("__name__", "").startswith(("torch.", "flatout."))):
                return
            if site not in self.callers:
                self.callers[site] = self._sites.chain(frame)[1:]
            detail, num_bytes = describe(args, kwargs) if describe is not None else ("", 0)
            use = Use(public, site, detail)
            sums = self._frequent if is_hot else self._rare
            if use not in sums:
                sums[use] = _Sum(self._observation.phase(), num_bytes)
            if is_hot:
                self._in_step.setdefault(use, []).append(seconds)
            else:
                self._untaken_s += seconds
                # It counts once its step has ended.
                self._file_waiting(self._observation.step_of_event()[0])
                self._waiting.append((use, seconds))
        except Exception as e:  # noqa: BLE001  # ours, and raised here it would come out of the user's line
            self.is_on = False
            self.failure = f"watching of calls stopped early: {type(e).__name__}: {e}"

    def _file_waiting(self, step: int) -> None:
        if step != self._waiting_step:
            for use, seconds in self._waiting:
                self._rare[use].calls += 1
                self._rare[use].seconds += seconds
            self._waiting.clear()
            self._waiting_step = step


def _row(use: Use, total: _Sum, num_steps: int) -> CallUse:
    return CallUse(
        name=use.name,
        source=use.site,
        calls=total.calls / num_steps,
        seconds=total.seconds / num_steps,
        bytes=total.bytes,
        detail=use.detail,
        phase=total.phase,
    )


def _rare_calls() -> Iterator[tuple[object, str, str, Describe | None]]:
    """Rows of (owner, attribute, public name, what to note of its arguments) of what is watched in every step."""
    yield torch, "save", "torch.save", _describe_state
    yield copy, "deepcopy", "copy.deepcopy", _describe_state
    yield nn.Module, "state_dict", "Module.state_dict", None
    yield nn.Module, "load_state_dict", "Module.load_state_dict", None
    yield Optimizer, "state_dict", "Optimizer.state_dict", None
    yield torch.cuda, "empty_cache", "torch.cuda.empty_cache", None
    yield gc, "collect", "gc.collect", None
    yield time, "sleep", "time.sleep", None
    yield torch, "set_num_threads", "torch.set_num_threads", None
    yield logging.Logger, "handle", "Logger.handle", None
    for name in ("run", "call", "check_output"):
        yield subprocess, name, f"subprocess.{name}", None
    safetensors = sys.modules.get("safetensors.torch")
    for name in ("save_file", "save_model"):
        if hasattr(safetensors, name):
            yield safetensors, name, f"safetensors.torch.{name}", _describe_state


def _frequent_calls() -> Iterator[tuple[object, str, str, Describe | None]]:
    """The same of what is watched in single steps only."""
    for name in ("tensor", "as_tensor", "from_numpy"):
        yield torch, name, f"torch.{name}", _describe_data
    for name in ("isnan", "isinf", "isfinite"):
        yield torch, name, f"torch.{name}", None
        yield Tensor, name, f"torch.{name}", None
    yield Optimizer, "zero_grad", "Optimizer.zero_grad", _describe_zeroing
    yield nn.Module, "zero_grad", "Module.zero_grad", _describe_zeroing
    yield nn.utils, "clip_grad_norm_", "clip_grad_norm_", None


def _describe_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
    """What kind of object holds state, and the bytes of its tensors."""
    value = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(value, nn.Module):
        return "module", sum(_num_bytes(t) for t in (*value.parameters(), *value.buffers()))
    num_bytes = sum(_num_bytes(t) for t in tensors_in(value))
    return "tensors" if num_bytes else "other", num_bytes


def _describe_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
    """Where a tensor's data came from: 'list' (numbers), 'arrays' (a list of arrays), 'array', 'tensor', 'scalar'."""
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, (list, tuple)):
        inner: Any = data
        num = 1
        while isinstance(inner, (list, tuple)):
            num *= len(inner)
            inner = inner[0] if inner else None
        if hasattr(inner, "__array__") and inner.ndim:
            return "arrays", num * int(inner.nbytes)
        return ("list" if num >= _MANY_ELEMENTS else "short list"), num * 8
    if isinstance(data, Tensor):
        return "tensor", _num_bytes(data)
    if hasattr(data, "__array__"):
        return "array", int(getattr(data, "nbytes", 0))
    return ("other" if isinstance(data, Sized) else "scalar"), 0


_MANY_ELEMENTS: Final = 64


def _describe_checks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
    """Whether the distribution checks its arguments, which is all that its base class takes time for."""
    return ("checked" if args[0]._validate_args else ""), 0


def _describe_zeroing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
    to_none = kwargs.get("set_to_none", args[1] if len(args) > 1 else True)
    return f"set_to_none={bool(to_none)}", 0


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


COLLECTOR: Final = CollectorEntry(CallUses)
