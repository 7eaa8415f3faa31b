"""Expectations about a region of PyTorch code, checked by observing it: kernels, memory, host waits, compilation, equality.

Nothing is taken on trust from a compiler. Kernels and memory are what torch's profiler recorded, graph breaks what dynamo logged,
equality what came out when the function was run once more.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.core.errors import ExpectationFailed, UsageError
from flatout.tune.verify.expect.equality import against_eager
from flatout.tune.verify.expect.limits import Limits, breaches
from flatout.tune.verify.expect.messages import Breach, short_path
from flatout.tune.verify.expect.observed import ObservedRegion
from flatout.tune.verify.expect.recomputation import when_recomputed
from flatout.tune.verify.expect.region import Region
from flatout.tune.verify.expect.rerun import CallReplay

Function = TypeVar("Function", bound=Callable[..., Any])
_EQUAL: Final = (None, "bitwise", "bounded")
_RECOMPUTED: Final = (None, "equal")


def expect(
    *,
    forward_kernels: int | None = None,
    backward_kernels: int | None = None,
    peak_bytes: int | None = None,
    host_waits: int | None = None,
    graph_breaks: int | None = None,
    recompilations: int | None = None,
    equal: Literal["bitwise", "bounded"] | None = None,
    eager: Callable[..., Any] | None = None,
    recomputed: Literal["equal"] | None = None,
) -> Expectation:
    """Limit what a region may do: `with expect(...) as observed:` around code, or `@expect(...)` above a function.

    After the region, ExpectationFailed is raised for every limit that was exceeded, with operators and lines of the user's code.
    An error of the region itself passes unchanged. Without limits nothing is checked, and `observed` still has the counts.

    `equal` and `recomputed` run the function two to five times more a call, on copies of what it uses; a function that steps
    an optimizer is refused. The region's results, random numbers, tensors and switches are those of an unobserved run. Observing
    costs some 20 us an operator, and 0.4 ms an operator after the end; the first region of a process, a second or two. Backward
    formulas that torch has with and without writes in place may take the form without, as under any dispatch mode.

    Args:
        forward_kernels: At most so many kernels outside of backwards: on a device those that it executed, on a CPU the operators
            that compute, and generated kernels.
        backward_kernels: At most so many kernels inside backwards, counted alike.
        peak_bytes: At most so many bytes allocated by the region and live at one moment.
        host_waits: At most so many calls that wait for a device; on a CPU, that would wait.
        graph_breaks: At most so many places where graphs of torch.compile end early. Fails also where nothing compiled ran.
        recompilations: At most so many functions compiled again. Fails also where nothing compiled ran.
        equal: Each call of a decorated function is run again in eager mode: 'bitwise' the same, or 'bounded': no further from
            float64 than eager is. Without `eager`, something compiled must have run.
        eager: Another function that `equal` compares with.
        recomputed: 'equal' for a decorated function whose values are the same when they are computed again.

    Returns:
        A context manager, whose value is what was observed, and a decorator.

    Raises:
        UsageError: A limit that is none, `equal` or `recomputed` around a with-statement, a region inside compiled code, or
            another profiler that runs. Generators and coroutines cannot be decorated: their bodies do not run in the call.
    """
    limits = Limits(forward_kernels, backward_kernels, peak_bytes, host_waits, graph_breaks, recompilations)
    limits.check()
    if equal not in _EQUAL or recomputed not in _RECOMPUTED:
        raise UsageError(
            f"equal={equal!r}, recomputed={recomputed!r}: `equal` is 'bitwise', 'bounded' or None, `recomputed` 'equal' or None"
        )
    if eager is not None and equal is None:
        raise UsageError("`eager` is what `equal` compares with; give equal='bitwise' or equal='bounded' too")
    return Expectation(limits, _Reruns(equal, eager, recomputed))


class _Reruns(NamedTuple):
    """The expectations that run a function again."""

    equal: Literal["bitwise", "bounded"] | None
    eager: Callable[..., Any] | None
    recomputed: Literal["equal"] | None

    @property
    def is_any(self) -> bool:
        return self.equal is not None or self.recomputed is not None


class Expectation:
    """A context manager and a decorator, as `expect` returns it. One may be used many times, also inside itself."""

    def __init__(self, limits: Limits, reruns: _Reruns, *, title: str = "") -> None:
        self._limits = limits
        self._title = title
        self._reruns = reruns
        self._open: list[tuple[Region, ObservedRegion, str]] = []

    def __enter__(self) -> ObservedRegion:
        if self._reruns.is_any:
            raise UsageError(
                "`equal` and `recomputed` run the code again, and a with-statement runs once; put the code into a function and "
                "@flatout.expect(...) above it"
            )
        frame = sys._getframe(1)
        return self._begin(self._title or f"the region at {short_path(frame.f_code.co_filename)}:{frame.f_lineno}")

    def titled(self, title: str) -> Expectation:
        """The same expectations about a region that messages call `title`."""
        return Expectation(self._limits, self._reruns, title=title)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if error is not None:
            self._open.pop()[0].abandon()
            return
        observed, where = self._end()
        _raise(where, list(breaches(self._limits, observed)))

    def __call__(self, function: Function) -> Function:
        """The function, with the expectations checked at each call."""
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise UsageError(
                f"'{_name(function)}' is a generator or a coroutine, whose body does not run in the call; put a with-statement "
                "into it"
            )

        @functools.wraps(function, updated=())  # a module's attributes stay its own
        def observed_call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return self._call(function, args, kwargs)

        return observed_call  # type: ignore[return-value]  # it takes and returns what the function does

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        _refuse_compiling()
        replay = CallReplay(function, args, kwargs) if self._reruns.is_any else None
        optimizers: list[str] = []
        hook = register_optimizer_step_pre_hook(lambda o, a, k: optimizers.append(type(o).__name__))
        self._begin(f"'{_name(function)}'")
        try:
            output = function(*args, **kwargs)
        except BaseException:
            self._open.pop()[0].abandon()
            raise
        finally:
            hook.remove()
        observed, where = self._end()
        found = list(breaches(self._limits, observed))
        if replay is not None:
            if optimizers:
                raise UsageError(
                    f"{where} takes a step of {optimizers[0]}, and `equal` and `recomputed` would take more; decorate a function "
                    "that computes the loss, and its gradients"
                )
            found += self._rerun(replay, function, output, observed)
        _raise(where, found)
        return output

    def _rerun(
        self, replay: CallReplay, function: Callable[..., Any], output: Any, observed: ObservedRegion
    ) -> Iterator[Breach]:
        first = replay.first(output)
        is_compiled = observed.graphs.is_compiled
        equal, eager, recomputed = self._reruns
        if equal is not None and eager is None and not is_compiled:
            yield Breach(
                f"equal={equal!r}",
                "nothing compiled ran in it: it would be compared with itself",
                (),
                "decorate what torch.compile returned, or give the function to compare with as `eager`",
            )
        elif equal is not None:
            yield from against_eager(replay, first, function, eager, equal)
        if recomputed is not None:
            yield from when_recomputed(replay, first, function, is_compiled=is_compiled, sites=observed.sites)

    def _begin(self, where: str) -> ObservedRegion:
        _refuse_compiling()
        region, observed = Region(), ObservedRegion()
        try:
            region.enter()
        except BaseException:
            region.abandon()
            raise
        self._open.append((region, observed, where))
        return observed

    def _end(self) -> tuple[ObservedRegion, str]:
        region, observed, where = self._open.pop()
        observed._read(region)
        return observed, where


def _refuse_compiling() -> None:
    if torch.compiler.is_compiling():
        raise UsageError(
            "an expectation inside compiled code observes nothing; put it around what torch.compile returned"
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _raise(where: str, found: list[Breach]) -> None:
    __tracebackhide__ = True  # pytest then shows the user's line, not ours
    if found:
        head = f"{where} failed {'an expectation' if len(found) == 1 else f'{len(found)} expectations'}"
        raise ExpectationFailed("\n".join([head, *map(str, found)]))
