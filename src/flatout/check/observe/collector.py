"""What a collector of evidence looks like to the observer: life hooks, and the events that it may listen to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

from flatout.check.observe.calls import RootModule
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence
from flatout.core.runtime.patches import Patches


class Collector:
    """Gathers one kind of evidence. Hooks that a collector does not define do nothing; all are called from the observed thread.

    `begin` and `end` are called at the borders of every step that is not plain light observation or unwatched, before the
    step's clock starts and after it has stopped; what they take counts as the cost of close looks. An error raised here ends
    the observation, never the script. Events within steps are for collectors that also derive from a listener below.
    """

    def install(self, patches: Patches) -> None:
        """Put the collector's watches in place."""

    def begin(self, mode: Mode) -> None:
        """A step in this mode begins."""

    def end(self, mode: Mode) -> None:
        """The step in this mode ended. What was begun last is ended first."""

    def begin_light(self) -> None:
        """A series of light steps begins."""

    def end_light(self) -> None:
        """The series of light steps is over."""

    def restart(self) -> None:
        """A better border of steps was found: the step in progress gets no end, and what came before was no step."""

    def pause(self) -> None:
        """What happens from now on is flatout's doing: trials run."""

    def resume(self) -> None:
        """What happens from now on is the script's again."""

    def spare_compiled_code(self) -> None:
        """The script uses torch.compile: leave alone the functions that compiled code checks."""

    def remove(self) -> None:
        """The observation is over: take away what `patches` does not restore, also in the middle of a step."""

    def fill(self, evidence: Evidence) -> Evidence:
        """The Evidence with this collector's part added. May be asked several times, for drafts."""
        return evidence

    def notes(self) -> Iterable[str]:
        """What could not be observed, and why."""
        return ()

    def close(self) -> None:
        """The last Evidence is complete: remove what is left on disk."""


class EndedStep(NamedTuple):
    """A step that has just ended. `mode` is None for one that went by unwatched; `position` is its place in the timeline."""

    mode: Mode | None
    position: int
    duration_s: float


class StepListener(ABC):
    """Hears of the end of every step."""

    @abstractmethod
    def on_step_end(self, step: EndedStep) -> None:
        """A step ended; of several unwatched ones in a row only the last is reported."""


class BatchListener(ABC):
    """Hears of batches: what loaders give and what root modules with parameters are called with."""

    @abstractmethod
    def on_batch(self, value: Any, *, root: RootModule | None) -> None:
        """A loader gave this (`root` is None), or this root module is about to be called with it."""


class BackwardListener(ABC):
    """A collector that is notified of backward passes."""

    @abstractmethod
    def on_backward_start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        """A function `name` of torch.autograd is about to run with these arguments, called from `frame`."""

    @abstractmethod
    def on_backward_end(self) -> None:
        """The backward pass has returned."""


class OptimizerStepListener(ABC):
    """Hears of optimizers that stepped, in watched steps."""

    @abstractmethod
    def on_optimizer_step(self, optimizer: int) -> None:
        """The optimizer of this identity stepped; the step of the loop may end with it."""


class RootCallListener(ABC):
    """Hears of calls of root modules. The recorder of operators is paused meanwhile."""

    @abstractmethod
    def on_root_inputs(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_deep: bool) -> None:
        """A root module is about to be called with these: at its first call, and at every call in a deep step."""

    @abstractmethod
    def on_root_output(self, root: RootModule, output: Any) -> None:
        """A root module returned this, in a deep step."""


class InnerCallListener(ABC):
    """Hears of calls of modules inside root modules in deep steps. The recorder of operators is paused meanwhile."""

    @abstractmethod
    def on_inner_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """A module inside a root module is about to be called, in a deep step; what is returned comes back at the end."""

    @abstractmethod
    def on_inner_end(self, token: object, output: Any) -> None:
        """The inner module returned this; not called where the token was None."""


class CompileClock(ABC):
    """Knows of the script's compiled code, which must not be intercepted, and of compiling, which is no part of a step."""

    @property
    @abstractmethod
    def is_used(self) -> bool:
        """Whether the script compiled anything."""

    @abstractmethod
    def taken_s(self) -> float:
        """Seconds of compiling since the last call of this."""


class CommunicationClock(ABC):
    """Knows how long a rank waits for the others."""

    @abstractmethod
    def exposed_s(self, phase: str | None = None) -> float:
        """Median exposed communication of a step: in one phase, or in all."""
