"""What a further collector looks like to the observer: it watches from install to remove, and hears of close looks."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from flatout.profiling.calls import Root
from flatout.profiling.patching import Patches
from flatout.profiling.steps.schedule import Mode


class Collector(Protocol):
    """Gathers one kind of evidence beside the step machinery. All calls come from the observed thread.

    `begin` and `end` are called at the borders of every step that is not plain light observation or unwatched, before the
    step's clock starts and after it has stopped; what they take counts as the cost of close looks. An error raised here ends
    the observation, never the script.
    """

    def install(self, patches: Patches) -> None:
        """Put watches in place."""

    def begin(self, mode: Mode) -> None:
        """A step in this mode begins."""

    def end(self, mode: Mode) -> None:
        """The step in this mode ended."""

    def remove(self) -> None:
        """Take away what `patches` does not restore."""


class StepWatch(Protocol):
    """Who is told of what happens within the MEMORY step, and of the ends of light steps."""

    def on_batch(self, value: Any, *, is_fetched: bool) -> None:
        """A loader gave this (`is_fetched`), or a module with parameters is called with it."""

    def on_backward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """torch.autograd's function `name` is about to run with these arguments."""

    def on_light(self) -> None:
        """A step under light observation ended."""


class RootWatcher(Protocol):
    """Is told of the calls of root modules. The recorder of operators is paused meanwhile."""

    def on_root_inputs(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_deep: bool) -> None:
        """A root module is about to be called with these: told of its first call, and of every call in a deep step."""

    def on_root_output(self, root: Root, output: Any) -> None:
        """A root module returned this, in a deep step."""


class InnerWatcher(Protocol):
    """Is told of the calls of modules inside root modules in deep steps. The recorder of operators is paused meanwhile."""

    def on_inner_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """A module inside a root module is about to be called, in a deep step; what is returned comes back at the end."""

    def on_inner_end(self, token: object, output: Any) -> None:
        """That module returned this; not told where the token was None."""
