"""A step as one CUDA graph: captured once with memory of its own, replayed by one call of the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.errors import UsageError
from flatout.core.tensors.nests import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

Compiling = Literal["no", "default", "max-autotune-no-cudagraphs"]
_WAITS: Final = {
    "aten::_local_scalar_dense": "the host reads a number (.item(), bool(), int(), float() or a branch on a tensor)",
    "aten::is_nonzero": "the host reads a number (a branch on a tensor)",
    "aten::equal": "the host reads whether two tensors are equal",
}
_SHAPES: Final = {
    f"aten::{name}": f"{name}: the size of its result depends on numbers"
    for name in ("nonzero", "masked_select", "unique2", "_unique2", "unique_dim", "unique_consecutive", "argwhere")
}
_FOLDERS: Final = tuple(str(Path(path).parent) for path in (torch.__file__, __file__))


class Graphed:
    """`step`, captured with inputs like `example`; calling it copies inputs to where the graph reads them and replays.

    What it returns is the graph's own memory, overwritten by the next call. Inputs are tensors (in any nesting) of the example's
    shapes and dtypes; anything else among them is part of the graph and must be equal in each call. No gradients. Weights are
    read where they lie at capture: change them in place.

    `state`: tensors that the step changes besides (`cache.state`); they are as they were when this returns, though the step has
    run several times by then. `compile`: torch.compile the step first, by that mode.

    The step is first run operator by operator. Raises UsageError, with the reason and the line, for what a graph cannot hold: the
    host reading a number, sizes that depend on numbers, copies between host and device, changes of tensors that are not named.
    On a CPU there are no graphs: the plain (or compiled) function runs, `is_captured` is False and `why_not` says so; the same
    refusals hold.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        example: tuple[Any, ...],
        *,
        state: Iterable[Tensor] = (),
        compile: Compiling = "no",
        warmup: int = 3,
    ) -> None:
        leaves, self._spec = tree_flatten(example)
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        state = tuple(state)
        devices = {t.device for t in (*tensors, *state)}
        if len(devices) != 1 or not tensors:
            raise UsageError(
                f"inputs and state lie on {sorted(map(str, devices))}; give tensors of one device, one at least"
            )
        self.device = devices.pop()
        self._leaves = [t.detach().clone() if isinstance(t, Tensor) else t for t in leaves]
        self._step = step
        saved = [t.clone() for t in state]
        with torch.no_grad():
            self._watch(state)
            if compile != "no":
                self._step = torch.compile(step, fullgraph=True, mode=None if compile == "default" else compile)
            self._graph = self._captured(warmup) if self.device.type == "cuda" else None
            for t, before in zip(state, saved, strict=True):
                t.copy_(before)
        self.is_captured = self._graph is not None
        self.why_not = (
            "" if self.is_captured else f"there are no CUDA graphs on '{self.device}'; the plain function runs"
        )

    def __call__(self, *args: Any) -> Any:
        """The step on these inputs. Raises UsageError for inputs unlike the example's."""
        leaves, spec = tree_flatten(args)
        self._check(leaves, spec)
        with torch.no_grad():
            if self._graph is None:
                return self._step(*args)
            for own, value in zip(self._leaves, leaves, strict=True):
                if isinstance(own, Tensor) and own is not value:
                    own.copy_(value, non_blocking=True)
            self._graph.replay()
            return self._outputs

    def __str__(self) -> str:
        return f"a CUDA graph on {self.device}" if self.is_captured else self.why_not

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The example as the graph reads it: inputs that are written here need no copy, and none when they are handed over."""
        result: tuple[Any, ...] = tree_unflatten(self._leaves, self._spec)
        return result

    def _watch(self, state: tuple[Tensor, ...]) -> None:
        own = [t for t in self._leaves if isinstance(t, Tensor)]
        # What is compiled inside cannot be looked into, so it runs as it was written.
        with torch.compiler.set_stance("force_eager"), _Watching(self.device, (*state, *own)) as watching:
            result = self._step(*self.inputs)
        refusals = dict.fromkeys(watching.refusals)
        outside = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.device != self.device]
        if outside:
            refusals[f"it returns a tensor {tuple(outside[0].shape)} on '{outside[0].device}'"] = None
        if refusals:
            raise UsageError("this step cannot be captured: " + "; ".join(refusals))

    def _captured(self, warmup: int) -> torch.cuda.CUDAGraph:
        """First calls compile, choose and allocate, which must not be captured: they come first, on a stream of their own."""
        with torch.cuda.device(self.device):
            warmup_stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            warmup_stream.wait_stream(current)
            with torch.cuda.stream(warmup_stream):
                for _ in range(max(1, warmup)):
                    self._step(*self.inputs)
            current.wait_stream(warmup_stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._outputs = self._step(*self.inputs)
            except RuntimeError as e:
                reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
                raise UsageError(f"this step cannot be captured: {reason}") from e
        return graph

    def _check(self, leaves: list[Any], spec: TreeSpec) -> None:
        if spec != self._spec:
            raise UsageError("inputs are nested otherwise than the example's; give as many, in the same places")
        for own, value in zip(self._leaves, leaves, strict=True):
            if not isinstance(own, Tensor):
                if own != value:
                    raise UsageError(
                        f"an input is {value!r} and was {own!r} at capture; capture anew, or give a tensor"
                    )
            elif not isinstance(value, Tensor) or (value.shape, value.dtype) != (own.shape, own.dtype):
                description = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
                raise UsageError(
                    f"an input is {description}, the example's is {tuple(own.shape)} of {own.dtype}; capture anew"
                )


# -- what a graph cannot hold -----------------------------------------------------------------------------------------------


class _Watching(TorchDispatchMode):
    """Inside this `with`: `refusals`, each a sentence with the line, of what cannot be captured on `device`.

    `state`: tensors that the step may change; another that it changes, and that it has not result itself, is a refusal.
    """

    def __init__(self, device: torch.device, state: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusals: list[str] = []
        self._device = device
        self._own = {_memory(t) for t in state}
        self._live: list[Tensor] = []  # so that no memory is handed out twice, and new memory is known as such

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._look(func, args, kwargs)
        result = func(*args, **kwargs)
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and _memory(t) not in inputs:
                self._own.add(_memory(t))
                self._live.append(t)
        return result

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name
        why = _WAITS.get(name) or _SHAPES.get(name)
        if name == "aten::index" and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or ()
        ):
            why = "an index by a mask: the size of its result depends on numbers"
        if name in ("aten::_to_copy", "aten::copy_"):
            why = self._moved(name, args, kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            info = argument.alias_info
            if info is not None and info.is_write and isinstance(value, Tensor) and _memory(value) not in self._own:
                why = f"a tensor {tuple(value.shape)} is changed that was not named in `state`"
        if why is not None:
            self.refusals.append(f"{why}, at {_line()}")

    def _moved(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """A copy between host and device that the host would wait for."""
        source = args[1] if name == "aten::copy_" else args[0]
        target = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or source.device)
        if source.device.type != target.type and not source.is_pinned():
            return f"a tensor {tuple(source.shape)} goes from {source.device.type} to {target.type}"
        return None


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def _line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line"
