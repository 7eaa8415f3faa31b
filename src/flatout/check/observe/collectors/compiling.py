"""What torch.compile does while the script runs: frames, graph breaks, recompiles, limits, and the seconds they take.

Everything is read from the books that dynamo keeps anyway (compilation metrics, reasons of graph breaks, its callbacks at the
start and end of a compilation), so no logging is switched on and nothing is paid while nothing compiles. While dynamo compiles,
what flatout replaced is put back, so that the compiled code is that of the unobserved run.
"""

from __future__ import annotations

import re
import statistics
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from time import perf_counter
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import torch
from torch import nn

from flatout.check.observe.collector import Collector, CompileClock
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.schedule import Mode
from flatout.check.observe.steps.timeline import COMPILE, TimedStep
from flatout.core.records.compilation import Compilation, CompileEvent
from flatout.core.records.evidence import Evidence
from flatout.core.records.workload import Source
from flatout.core.runtime.patches import Patches, all_suspended
from flatout.core.runtime.source_sites import Sites

Kind = Literal["frame", "graph-break", "recompile", "limit", "cudagraph-skip"]

_FRAME_IN_STACK: Final = re.compile(r'File "([^"]+)", line (\d+)')
_LONGEST_REASON: Final = 200
_FEWEST_BEFORE_LIMIT: Final = 3


class PhaseClock(Protocol):
    """Holds the phase that the step is in."""

    phase: str

    def switch(self, phase: str) -> None: ...


class CompileSpan(NamedTuple):
    """One outermost compilation: its id ('3/1'), its seconds, the step it fell into, whether that step is timed."""

    compile_id: str
    seconds: float
    step: int
    is_timed: bool


class _Tally:
    """The events of one kind at one line."""

    def __init__(self) -> None:
        self.reason = ""
        self.count = 0
        self.seconds = 0.0
        self.in_steps = 0
        self.last_step = -1

    def add(self, reason: str, seconds: float, span: CompileSpan | None) -> None:
        self.reason = reason
        self.count += 1
        self.seconds += seconds
        if span is not None:
            self.in_steps += span.is_timed
            self.last_step = max(self.last_step, span.step)


class CompileEvents(Collector, CompileClock):
    """Follows dynamo from the moment the script loads it.

    `step` gives (the number of the step in progress, whether it is timed); `clock` the timeline whose phase is 'compile' while
    a compilation runs, `steps` its finished steps. `on_use` is called when the script asks for compiled code.
    """

    def __init__(
        self,
        sites: Sites,
        *,
        clock: Callable[[], PhaseClock],
        step: Callable[[], tuple[int, bool]],
        on_use: Callable[[], None],
        steps: Callable[[], list[TimedStep]] = list,
    ) -> None:
        self.compiled: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
        """Modules passed to or returned by torch.compile, with the options they were compiled with."""
        self.spans: list[CompileSpan] = []
        self._sites = sites
        self._clock = clock
        self._step = step
        self._on_use = on_use
        self._steps = steps
        self._compiled_at: dict[int, None] = {}
        self._tallies: dict[tuple[Kind, int], _Tally] = {}
        self._frames: dict[str, tuple[str, int]] = {}
        self._utils: Any = None
        self._last_metric: object = None
        self._num_breaks = 0
        self._num_frames = 0
        self._counts = (0, 0)
        self._gained = [0, 0]
        self._is_on = True
        self._began_s = 0.0
        self._phase_before = "other"
        self._untaken_s = 0.0
        self._handlers: Any = None
        self._suspension = ExitStack()

    # -- the collector's life ---------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Note the lines that call torch.compile."""
        patches.set(torch, "compile", self._noting(torch.compile))
        self._attach()

    def begin(self, mode: Mode) -> None:
        """Look whether dynamo has been loaded meanwhile."""
        self._attach()

    def end(self, mode: Mode) -> None:
        """Look whether dynamo has been loaded in this step."""
        self._attach()

    def restart(self) -> None:
        """Look whether dynamo has been loaded until now."""
        self._attach()

    def remove(self) -> None:
        """Take the callbacks away, and read what is left in the books."""
        self._drain()
        if self._handlers is not None:
            with suppress(ValueError):  # torch._dynamo.reset() forgets them
                self._handlers.remove_start_callback(self._on_start)
                self._handlers.remove_end_callback(self._on_end)
            self._handlers = None
        self._suspension.close()
        self._is_on = False

    def pause(self) -> None:
        """What compiles from now on is ours."""
        self._drain()
        self._is_on = False

    def resume(self) -> None:
        """What compiles from now on is the script's again."""
        if self._utils is not None:
            self._skip_books()
        if self._handlers is not None and self._on_start not in self._handlers.start_callbacks:
            self._handlers.register_start_callback(self._on_start)  # a trial that compiled reset dynamo
            self._handlers.register_end_callback(self._on_end)
        self._is_on = self._handlers is not None or self._utils is None

    def taken_s(self) -> float:
        """Seconds of compiling since the last call of this."""
        seconds, self._untaken_s = self._untaken_s, 0.0
        return seconds

    # -- what came of it --------------------------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Whether the script compiled anything."""
        return bool(self._tallies) or bool(self.spans)

    def record(self, steps: list[TimedStep]) -> Compilation | None:
        """All events, most time first; None when nothing was compiled. `steps` are those of the timeline."""
        self._drain()
        if not self.is_used and not self._compiled_at:
            return None
        events = tuple(
            CompileEvent(
                kind=kind,
                source=source,
                reason=t.reason,
                count=t.count,
                seconds=t.seconds,
                in_steps=t.in_steps,
                last_step=t.last_step,
            )
            for (kind, source), t in sorted(self._tallies.items(), key=lambda item: -item[1].seconds)
        )
        return Compilation(
            compile_s=sum(s.seconds for s in self.spans) or sum(e.seconds for e in events),
            num_frames=self._num_frames,
            num_graphs=self._gained[0],
            events=events,
            compiled_at=tuple(self._compiled_at),
            before_limit_s=self._before_limit_s(steps),
        )

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `compilation` to the Evidence."""
        return msgspec.structs.replace(evidence, compilation=self.record(self._steps()))

    def _before_limit_s(self, steps: list[TimedStep]) -> float | None:
        """The median step between the first compilation and the first limit, without the time of compiling."""
        if not any(kind == "limit" for kind, _ in self._tallies):
            return None
        compiled = [i for i, s in enumerate(steps) if s.phases.get(COMPILE, 0.0) > 0]
        between = [s for i, s in enumerate(steps) if compiled and compiled[0] < i <= compiled[-1]]
        if len(between) < _FEWEST_BEFORE_LIMIT:
            return None
        return statistics.median(s.duration_s - s.phases.get(COMPILE, 0.0) for s in between)

    # -- dynamo's callbacks -----------------------------------------------------------------------------------------------

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return original(*args, **kwargs)
            site = self._sites.of_frame(sys._getframe(1))
            self._on_use()
            result = original(*args, **kwargs)
            self._attach()
            if site >= 0 and not kwargs.get("disable"):
                self._compiled_at.setdefault(site)
            model = args[0] if args else kwargs.get("model")
            options = {k: v for k, v in kwargs.items() if k != "model"}
            for module in (getattr(model, "__self__", None), result):
                if isinstance(module, nn.Module):
                    self.compiled[module] = options
            return result

        return compile

    def _attach(self) -> None:
        """Follow dynamo as soon as the script has loaded it."""
        utils = sys.modules.get("torch._dynamo.utils")
        callbacks = sys.modules.get("torch._dynamo.callback")
        if self._handlers is not None or utils is None or callbacks is None or not self._is_on:
            return
        if not hasattr(utils, "_compilation_metrics") or not hasattr(callbacks, "callback_handler"):
            return  # still being imported
        self._utils = utils
        self._handlers = callbacks.callback_handler
        self._handlers.register_start_callback(self._on_start)
        self._handlers.register_end_callback(self._on_end)
        _hide_own_frames(sys.modules.get("torch._dynamo.eval_frame"))
        _forget_own_call(utils)
        self._skip_books()

    def _on_start(self, args: Any) -> None:
        self._suspension = ExitStack()
        self._suspension.enter_context(all_suspended())
        clock = self._clock()
        self._phase_before = clock.phase
        if self._is_on:
            clock.switch(COMPILE)
        self._began_s = perf_counter()

    def _on_end(self, args: Any) -> None:
        seconds = perf_counter() - self._began_s
        if self._is_on:
            self._clock().switch(self._phase_before)
            self._untaken_s += seconds
            self.spans.append(CompileSpan(str(args.compile_id), seconds, *self._step()))
        self._suspension.close()
        if self._is_on:
            self._drain()

    # -- dynamo's books ---------------------------------------------------------------------------------------------------

    def _skip_books(self) -> None:
        metrics = self._utils._compilation_metrics
        self._last_metric = metrics[-1] if metrics else None
        self._num_breaks = len(self._utils.graph_break_reasons)
        self._counts = self._counters()

    def _counters(self) -> tuple[int, int]:
        counters = self._utils.counters
        return counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]

    def _drain(self) -> None:
        """Read what the books have gained since the last time."""
        if self._utils is None or not self._is_on:
            return
        spans = {s.compile_id: s for s in self.spans}
        latest = self.spans[-1] if self.spans else None
        for metric in self._new_metrics():
            self._file(metric, spans, latest)
        reasons = self._utils.graph_break_reasons
        for reason in reasons[min(self._num_breaks, len(reasons)) :]:
            site = self._site_of_stack([(f.filename, f.lineno or 0, f.name) for f in reason.user_stack])
            self._tally("graph-break", site).add(_one_sentence(reason.reason), 0.0, latest)
        self._num_breaks = len(reasons)
        counts = self._counters()
        for i, (new, old) in enumerate(zip(counts, self._counts, strict=True)):
            self._gained[i] += max(0, new - old)
        self._counts = counts
        num_filed = sum(t.count for (kind, _), t in self._tallies.items() if kind == "cudagraph-skip")
        for _ in range(self._gained[1] - num_filed):
            self._tally("cudagraph-skip", self._call_site()).add("found when the graph was to be recorded", 0.0, latest)

    def _new_metrics(self) -> list[Any]:
        metrics: deque[Any] = self._utils._compilation_metrics
        new = []
        for metric in reversed(metrics):
            if metric is self._last_metric:
                break
            new.append(metric)
        if metrics:
            self._last_metric = metrics[-1]
        return new[::-1]

    def _file(self, metric: Any, spans: dict[str, CompileSpan], latest: CompileSpan | None) -> None:
        """File one entry of dynamo's compilation metrics."""
        compile_id = str(metric.compile_id or "")
        frame_id = compile_id.partition("/")[0]
        seconds = (metric.duration_us or 0) * 1e-6
        span = spans.get(compile_id)
        if metric.co_filename and metric.co_firstlineno:
            self._frames.setdefault(frame_id, (metric.co_filename, metric.co_firstlineno))
            self._num_frames += bool(metric.has_guarded_code)
        file, line = self._frames.get(frame_id, ("", 0))
        first = self._site_of_stack([(file, line, _plain_name(metric.co_name or ""))])
        skip = getattr(metric, "cudagraph_skip_reason", None)
        if skip:
            self._tally("cudagraph-skip", first).add(_one_sentence(skip), 0.0, span)
        if metric.recompile_reason:
            stack = [(f, int(n), "") for f, n in _FRAME_IN_STACK.findall(metric.recompile_reason)]
            source = self._site_of_stack(stack) if stack else first
            is_limit = bool(metric.fail_type) and "recompile_limit" in (metric.fail_reason or "").replace(" ", "_")
            kind: Kind = "limit" if is_limit else "recompile"
            self._tally(kind, source).add(_guard(metric.recompile_reason), seconds, span or latest)
        elif metric.is_forward is False:  # a backward compiled when it first ran: time of the frame it belongs to
            self._tally("frame", first).seconds += seconds
        elif metric.fail_type and file:
            at = (metric.fail_user_frame_filename or file, metric.fail_user_frame_lineno or line, "")
            self._tally("graph-break", self._site_of_stack([at])).add(
                f"the function is left to eager: {_one_sentence(metric.fail_reason or metric.fail_type)}", seconds, span
            )
        elif file:
            self._tally("frame", first).add(_plain_name(metric.co_name or ""), seconds, span)

    def _tally(self, kind: Kind, source: int) -> _Tally:
        return self._tallies.setdefault((kind, source), _Tally())

    def _site_of_stack(self, stack: list[tuple[str, int, str]]) -> int:
        """The innermost of these (file, line, function) that is the user's, else where torch.compile was called."""
        for file, line, function in reversed(stack):
            if file and self._sites.is_user_file(file):
                return self._sites.add(Source(file=file, line=line, function=_plain_name(function)))
        return self._call_site()

    def _call_site(self) -> int:
        return next(iter(self._compiled_at), -1)


def _own_codes(module: ModuleType) -> Iterator[CodeType]:
    """All code of the functions defined in this module of ours, inner ones included."""
    waiting: list[object] = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    while waiting:
        value = waiting.pop()
        if isinstance(value, FunctionType):
            waiting.append(value.__code__)
        elif isinstance(value, CodeType):
            yield value
            waiting.extend(c for c in value.co_consts if isinstance(c, CodeType))
        elif isinstance(value, type):
            waiting.extend(v for v in vars(value).values() if isinstance(v, FunctionType))


def _hide_own_frames(eval_frame: ModuleType | None) -> None:
    """Have dynamo pass over our wrappers' frames and compile what they call, as it does with torch's own."""
    skip: Callable[[CodeType], None] | None = getattr(eval_frame, "skip_code", None)
    if skip is None:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(("flatout.check.observe.", "flatout.core.runtime.")):
            for code in _own_codes(module):
                skip(code)


def _forget_own_call(utils: ModuleType) -> None:
    """Put the original where dynamo stored our wrapper: it keeps what `nn.Module.__call__` was when it was imported."""
    with all_suspended():
        original = nn.Module.__call__
    for module in (utils, sys.modules.get("torch._dynamo.variables.nn_module")):
        stored = getattr(module, "unpatched_nn_module_call", original)
        if module is not None and stored is not original and stored.__module__.startswith("flatout."):
            module.__dict__["unpatched_nn_module_call"] = original


def _plain_name(name: str) -> str:
    """The function's own name, also for a piece of it that dynamo compiled after a graph break."""
    return re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", name)


def _one_sentence(reason: str) -> str:
    """The first line of torch's message, with its explanation."""
    if reason.startswith("generic_jump"):
        return "a branch that depends on a tensor's value"
    first, _, rest = reason.strip().partition("\n")
    explanation = re.search(r"Explanation: ([^\n]*?)(?:\. |\.?\n|$)", rest + "\n")
    text = f"{first}: {explanation[1]}" if explanation else first
    return _ascii(text)[:_LONGEST_REASON]


def _guard(reason: str) -> str:
    """The check that failed: '2/0: s.n == 0     # s.n += 1 ...' is 's.n == 0'."""
    text = re.sub(r"^\d+/\d+: ", "", reason.strip()).split("\n")[0].split("  #")[0]
    return _ascii(text.strip())[:_LONGEST_REASON]


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def _build(observation: ObservationState) -> CompileEvents:
    return CompileEvents(
        observation.sites,
        clock=lambda: observation.timeline,
        step=observation.step_of_event,
        on_use=observation.spare_compiled_code,
        steps=lambda: observation.timeline.steps,
    )


COLLECTOR: Final = CollectorEntry(_build)
