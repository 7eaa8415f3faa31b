"""The state of one observation, as its collectors and the Evidence read it; the Observer drives it."""

from __future__ import annotations

from threading import get_ident
from typing import Any, Literal, Protocol, TypeVar

from flatout.check.observe.accelerator import is_on_accelerator
from flatout.check.observe.calls import ModuleCalls, RootListener
from flatout.check.observe.collector import Collector, CompileClock
from flatout.check.observe.lines.sampler import UNWATCHED, Sampler
from flatout.check.observe.operators.deep import DeepLooks
from flatout.check.observe.operators.recorder import CAN_WATCH_COMPILED, OperatorListener
from flatout.check.observe.steps.blocks import UnwatchedBlocks
from flatout.check.observe.steps.optimizers import OptimizerListener, Optimizing
from flatout.check.observe.steps.schedule import Mode
from flatout.check.observe.steps.timeline import PhaseTimeline
from flatout.core.records.distributed import Place
from flatout.core.runtime.source_sites import Sites

BorderKind = Literal["none", "inference", "manual", "training", "call"]
"""By what the borders of steps were found; 'manual' is a backward without an optimizer of torch's."""

Listener = TypeVar("Listener")


class FetchListener(Protocol):
    """Hears when the loop waits for data."""

    def on_epoch_start(self) -> None: ...

    def on_fetch_start(self) -> None: ...

    def on_fetch_end(self, batch: Any) -> None: ...


class EnvironmentListener(Protocol):
    """Hears when an environment of reinforcement learning steps or is reset."""

    def on_environment_start(self) -> None: ...

    def on_environment_end(self) -> None: ...


class LoopListener(RootListener, OptimizerListener, FetchListener, EnvironmentListener, Protocol):
    """Hears of all that shows where steps end and which phase they are in."""


class ObservingTimes:
    """Seconds of the observed steps, and seconds that observing took."""

    def __init__(self) -> None:
        self.light_s = 0.0
        """Length of all light steps, the unwatched ones included."""
        self.light_own_s = 0.0
        """What light observation took, where it was measured by itself."""
        self.deep_s = 0.0
        """What close looks took: the deep steps, and all that is done between steps for them."""
        self.trials_s = 0.0


class ObservationState:
    """What is known so far of the steps of the thread that created it."""

    def __init__(self, listener: LoopListener, *, user_root: str | None, place: Place | None) -> None:
        self.listener = listener
        self.place = place
        """The rank of this process, where it is one of several."""
        self.thread_id = get_ident()
        self.sites = Sites(user_root=user_root)
        self.calls = ModuleCalls(self.sites, listener)
        self.optimizing = Optimizing(self.sites, listener)
        self.deep = DeepLooks(self.sites, self.calls, self.optimizing)
        self.timeline = PhaseTimeline(use_events=False)
        self.blocks = UnwatchedBlocks()
        self.sampler = Sampler(self.sites, phase=self._phase_of_sample)
        self.kind: BorderKind = "none"
        self.mode = Mode.WARM_UP
        self.num_steps = 0
        self.num_light = 0
        self.is_device = False
        self.times = ObservingTimes()
        self.notes: list[str] = []
        self.collectors: tuple[Collector, ...] = ()
        self._compile_clocks: tuple[CompileClock, ...] = ()

    def attach(self, collectors: tuple[Collector, ...]) -> None:
        """Take in the collectors, which are built knowing the observation."""
        self.collectors = collectors
        self.deep.listeners = self.listening(OperatorListener)
        self._compile_clocks = self.listening(CompileClock)

    def listening(self, kind: type[Listener]) -> tuple[Listener, ...]:
        """The collectors that listen to this kind of event."""
        return tuple(c for c in self.collectors if isinstance(c, kind))

    def collector(self, kind: type[Listener]) -> Listener:
        """The collector of this class."""
        return self.listening(kind)[0]

    # -- where the loop is ------------------------------------------------------------------------------------------------

    def phase(self) -> str:
        """The phase that the step in progress is in."""
        return self.timeline.phase

    def step_of_event(self) -> tuple[int, bool]:
        """The number of the step that something happens in now, and whether that step is timed."""
        self.optimizing.has_news = True
        return self.num_steps + self.blocks.num_gone, self.mode is Mode.LIGHT

    @property
    def num_watched(self) -> int:
        """Steps that were watched so far, in any way."""
        return self.num_steps - len(self.blocks.durations_s)

    @property
    def num_sampled(self) -> int:
        """Steps during which lines were sampled."""
        return self.num_light + len(self.blocks.durations_s)

    def finds_device(self) -> bool:
        """Whether the loop's parameters or inputs lie on a CUDA device."""
        return is_on_accelerator((*self.calls.tensors(), *self.optimizing.tensors()))

    def _phase_of_sample(self) -> str:
        """The phase a sample taken now is filed under."""
        if not self.blocks.is_open:
            return self.timeline.phase
        self.optimizing.has_news = True
        return UNWATCHED

    # -- what collectors have in common -----------------------------------------------------------------------------------

    def resume_recording(self) -> None:
        """The time since the last recorded operator was not the user's."""
        if self.deep.recorder is not None:
            self.deep.recorder.resume()

    def spare_compiled_code(self) -> None:
        """The script uses torch.compile: pass it on to the collectors."""
        for collector in self.collectors:
            collector.spare_compiled_code()

    @property
    def is_compiled(self) -> bool:
        """Whether the script compiled anything; interception would have dynamo give its frames up."""
        return any(clock.is_used for clock in self._compile_clocks)

    def compile_s(self) -> float:
        """Seconds of compiling since the last call of this."""
        return sum(clock.taken_s() for clock in self._compile_clocks)

    def is_interception_allowed(self) -> bool:
        """Whether operators may be recorded; a note says why not."""
        if not self.is_compiled or CAN_WATCH_COMPILED:
            return True
        note = (
            "the script uses torch.compile: no operators were recorded, since with this version of torch recording would switch "
            "the compiled code off"
        )
        if note not in self.notes:
            self.notes.append(note)
        return False
