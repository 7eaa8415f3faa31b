"""Promises about a region of PyTorch code, kept by observation: what it runs, holds, waits for, compiles; and that it is equal.

Nothing is believed of a compiler. Kernels and memory are what torch's profiler saw, graph breaks what dynamo wrote down, equality
what came out when the function was run once more.
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

from flatout.errors import PromiseBroken, UsageError
from flatout.verification.promises.equality import against_eager
from flatout.verification.promises.limits import Limits, breaches
from flatout.verification.promises.recomputation import when_recomputed
from flatout.verification.promises.region import Region
from flatout.verification.promises.rerun import Stage
from flatout.verification.promises.seen import Seen
from flatout.verification.promises.telling import Breach, short

Function = TypeVar("Function", bound=Callable[..., Any])
_EQUAL: Final = (None, "bitwise", "bounded")
_RECOMPUTED: Final = (None, "equal")


def guarantee(
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
) -> Guarantee:
    """Promise what a region does: `with guarantee(...) as seen:` around code, or `@guarantee(...)` above a function.

    After the region PromiseBroken is raised for what was not kept, with operators and lines of the user's; an error that the
    region raises itself passes as it is. `seen` tells afterwards what was seen; without any promise, that is all.

    - `forward_kernels`, `backward_kernels`: at most so many kernels outside and inside backwards. On a device they are those that
      it executed, on a CPU the operators that compute, and generated kernels (`promises.kernels`).
    - `peak_bytes`: at most so many bytes of the region's own at one moment (`promises.memory`).
    - `host_waits`: at most so many calls that wait for a device; on a CPU, that would wait (`promises.waits`).
    - `graph_breaks`, `recompilations`: at most so many places where graphs of torch.compile end early, at most so many functions
      compiled again (`promises.graphs`). Broken also where nothing compiled ran: then it would say nothing.
    - `equal`: of a decorated function, each call is run again in eager mode: 'bitwise' the same, or 'bounded': no further from
      float64 than eager is (`promises.equality`). `eager` gives another function to compare with. Without it, something compiled
      must have run.
    - `recomputed`: 'equal' for a decorated function whose values are the same when they are computed again
      (`promises.recomputation`).

    The last two run the function two to five times more a call, on copies of what it uses (`promises.rerun`); a function that
    steps an optimizer is refused. The region's results, random numbers, tensors and switches are those of an unobserved run.
    Observing costs some 20 us an operator, and 0.4 ms an operator after the end; the first region of a process, a second or two.
    Backward formulas that torch has with and without writes in place may take the form without, as under any dispatch mode.

    Raises UsageError for a limit that is none, for `equal` or `recomputed` around a with-statement, inside compiled code, and
    when another profiler runs. Generators and coroutines cannot be decorated: their bodies do not run in the call.
    """
    limits = Limits(forward_kernels, backward_kernels, peak_bytes, host_waits, graph_breaks, recompilations)
    limits.check()
    if equal not in _EQUAL or recomputed not in _RECOMPUTED:
        raise UsageError(
            f"equal={equal!r}, recomputed={recomputed!r}: `equal` is 'bitwise', 'bounded' or None, `recomputed` 'equal' or None"
        )
    if eager is not None and equal is None:
        raise UsageError("`eager` is what `equal` compares with; say equal='bitwise' or equal='bounded' too")
    return Guarantee(limits, _Reruns(equal, eager, recomputed))


class _Reruns(NamedTuple):
    """The promises that run a function again."""

    equal: Literal["bitwise", "bounded"] | None
    eager: Callable[..., Any] | None
    recomputed: Literal["equal"] | None

    @property
    def is_any(self) -> bool:
        return self.equal is not None or self.recomputed is not None


class Guarantee:
    """What `guarantee` returns: a context manager, and a decorator. One may be used many times, also inside itself."""

    def __init__(self, limits: Limits, reruns: _Reruns, *, title: str = "") -> None:
        self._limits = limits
        self._title = title
        self._reruns = reruns
        self._open: list[tuple[Region, Seen, str]] = []

    def __enter__(self) -> Seen:
        if self._reruns.is_any:
            raise UsageError(
                "`equal` and `recomputed` run the code again, and a with-statement runs once; put the code into a function and "
                "@flatout.guarantee(...) above it"
            )
        frame = sys._getframe(1)
        return self._begin(self._title or f"the region at {short(frame.f_code.co_filename)}:{frame.f_lineno}")

    def titled(self, title: str) -> Guarantee:
        """The same promises about a region that messages call so."""
        return Guarantee(self._limits, self._reruns, title=title)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if error is not None:
            self._open.pop()[0].abandon()
            return
        seen, where = self._end()
        _raise(where, list(breaches(self._limits, seen)))

    def __call__(self, function: Function) -> Function:
        """The function, with the promises checked at each call."""
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise UsageError(
                f"'{_name(function)}' is a generator or a coroutine, whose body does not run in the call; put a with-statement "
                "into it"
            )

        @functools.wraps(function, updated=())  # a module's attributes stay its own
        def promised(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return self._call(function, args, kwargs)

        return promised  # type: ignore[return-value]  # it takes and returns what the function does

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        _refuse_compiling()
        stage = Stage(function, args, kwargs) if self._reruns.is_any else None
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
        seen, where = self._end()
        found = list(breaches(self._limits, seen))
        if stage is not None:
            if optimizers:
                raise UsageError(
                    f"{where} takes a step of {optimizers[0]}, and `equal` and `recomputed` would take more; decorate a function "
                    "that computes the loss, and its gradients"
                )
            found += self._rerun(stage, function, output, seen)
        _raise(where, found)
        return output

    def _rerun(self, stage: Stage, function: Callable[..., Any], output: Any, seen: Seen) -> Iterator[Breach]:
        first = stage.first(output)
        is_compiled = seen.graphs.is_compiled
        equal, eager, recomputed = self._reruns
        if equal is not None and eager is None and not is_compiled:
            yield Breach(
                f"equal={equal!r}",
                "nothing compiled ran in it: it would be compared with itself",
                (),
                "decorate what torch.compile returned, or give the function to compare with as `eager`",
            )
        elif equal is not None:
            yield from against_eager(stage, first, function, eager, equal)
        if recomputed is not None:
            yield from when_recomputed(stage, first, function, is_compiled=is_compiled, sites=seen.sites)

    def _begin(self, where: str) -> Seen:
        _refuse_compiling()
        region, seen = Region(), Seen()
        try:
            region.enter()
        except BaseException:
            region.abandon()
            raise
        self._open.append((region, seen, where))
        return seen

    def _end(self) -> tuple[Seen, str]:
        region, seen, where = self._open.pop()
        seen._fill(region.leave(), region.sites)
        return seen, where


def _refuse_compiling() -> None:
    if torch.compiler.is_compiling():
        raise UsageError("a guarantee inside compiled code sees nothing; put it around what torch.compile returned")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _raise(where: str, found: list[Breach]) -> None:
    __tracebackhide__ = True  # pytest then shows the user's line, not ours
    if found:
        head = f"{where} broke {'a promise' if len(found) == 1 else f'{len(found)} promises'}"
        raise PromiseBroken("\n".join([head, *map(str, found)]))
