"""A step as one CUDA graph: captured once with memory of its own, replayed by one call of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from flatout.errors import UsageError
from flatout.inference.decoding.watching import Watching

Compiling = Literal["no", "default", "max-autotune-no-cudagraphs"]


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
            for own, given in zip(self._leaves, leaves, strict=True):
                if isinstance(own, Tensor) and own is not given:
                    own.copy_(given, non_blocking=True)
            self._graph.replay()
            return self._made

    def __str__(self) -> str:
        return f"a CUDA graph on {self.device}" if self.is_captured else self.why_not

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The example as the graph reads it: inputs that are written here need no copy, and none when they are handed over."""
        made: tuple[Any, ...] = tree_unflatten(self._leaves, self._spec)
        return made

    def _watch(self, state: tuple[Tensor, ...]) -> None:
        own = [t for t in self._leaves if isinstance(t, Tensor)]
        # What is compiled inside cannot be looked into, so it runs as it was written.
        with torch.compiler.set_stance("force_eager"), Watching(self.device, (*state, *own)) as watching:
            made = self._step(*self.inputs)
        refusals = dict.fromkeys(watching.refusals)
        outside = [t for t in tree_leaves(made) if isinstance(t, Tensor) and t.device != self.device]
        if outside:
            refusals[f"it returns a tensor {tuple(outside[0].shape)} on '{outside[0].device}'"] = None
        if refusals:
            raise UsageError("this step cannot be captured: " + "; ".join(refusals))

    def _captured(self, warmup: int) -> torch.cuda.CUDAGraph:
        """First calls compile, choose and allocate, which must not be captured: they come first, on a stream of their own."""
        with torch.cuda.device(self.device):
            aside, current = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                for _ in range(max(1, warmup)):
                    self._step(*self.inputs)
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._made = self._step(*self.inputs)
            except RuntimeError as e:
                reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
                raise UsageError(f"this step cannot be captured: {reason}") from e
        return graph

    def _check(self, leaves: list[Any], spec: TreeSpec) -> None:
        if spec != self._spec:
            raise UsageError("inputs are nested otherwise than the example's; give as many, in the same places")
        for own, given in zip(self._leaves, leaves, strict=True):
            if not isinstance(own, Tensor):
                if own != given:
                    raise UsageError(
                        f"an input is {given!r} and was {own!r} at capture; capture anew, or give a tensor"
                    )
            elif not isinstance(given, Tensor) or (given.shape, given.dtype) != (own.shape, own.dtype):
                told = f"{tuple(given.shape)} of {given.dtype}" if isinstance(given, Tensor) else repr(given)
                raise UsageError(
                    f"an input is {told}, the example's is {tuple(own.shape)} of {own.dtype}; capture anew"
                )
