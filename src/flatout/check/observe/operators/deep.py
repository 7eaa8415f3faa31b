"""Looks inside a step: every operator with its line and module, which gradients nobody reads, which batches are padded."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch

from flatout.check.observe.calls import ModuleCalls, RootModule, module_paths
from flatout.check.observe.operators.overhead import InterceptionCost, interception_cost
from flatout.check.observe.operators.padding import PaddedTensor, padded_rows, signs_of
from flatout.check.observe.operators.recorder import DeepStep, Example, OperatorKey, OperatorListener, OperatorRecorder
from flatout.check.observe.steps.optimizers import Optimizing
from flatout.core.runtime.garbage_collector import collections_put_off
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites


class ObservedInput:
    """A tensor that a model was called with, and in which step first."""

    def __init__(self, tensor: torch.Tensor, step: int) -> None:
        self.step = step
        self._tensor = weakref.ref(tensor)
        self._version = _version(tensor)

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether this is the very tensor, as it was."""
        return self._tensor() is tensor and self._version is not None and self._version == _version(tensor)


class DeepLooks:
    """The deep steps of one observation and what they showed. `recorder` is there from the first to the last of them."""

    def __init__(self, sites: Sites, calls: ModuleCalls, optimizing: Optimizing) -> None:
        self.steps: list[DeepStep] = []
        self.recorder: OperatorRecorder | None = None
        self.interception = InterceptionCost(0.0, 0.0)
        self.examples: dict[OperatorKey, Example] = {}
        self.callers: dict[int, tuple[int, ...]] = {}
        self.backward_sites: set[int] = set()
        self.environment_sites: set[int] = set()
        self.outside_float64: set[int] = set()
        self.padded: dict[str, PaddedTensor] = {}
        self.padding_signs: tuple[str, ...] = ()
        self.unused: dict[str, tuple[int, int]] = {}
        self.trained_modules: set[str] = set()
        self.graph_flop: dict[OperatorKey, int] = {}
        self._inputs: dict[int, ObservedInput] = {}
        self._patches = Patches()
        self._open = ExitStack()
        """What is ended after the last deep step."""
        self.listeners: tuple[OperatorListener, ...] = ()
        """Collectors that look further at every operator of a deep step."""
        self._sites = sites
        self._calls = calls
        self._optimizing = optimizing

    def open(self, *, phase: Callable[[], str], is_device: bool) -> None:
        """Record the step that begins now."""
        if self.recorder is None:
            self.interception = interception_cost(self._sites, is_device=is_device)
            self.recorder = OperatorRecorder(
                self._sites,
                phase=phase,
                module=self._calls.module_path,
                is_device=is_device,
                listeners=self.listeners,
            )
            self._open.enter_context(collections_put_off())
            self.recorder.enter()
            self._watch_graphs(self.recorder)
        self._calls.is_deep = True
        self._calls.begin_deep()
        self.recorder.begin()

    def close(self, root_calls: int, evaluation_calls: int) -> None:
        """The step ended, with so many calls of root modules: file what was recorded."""
        assert self.recorder is not None
        self.recorder.is_paused = True
        step = self.recorder.step
        step.cells = tuple(self._calls.cells.values())
        step.root_calls, step.evaluation_calls = root_calls, evaluation_calls
        self.steps.append(step)
        self._note_gradients()
        self.recorder.is_paused = False

    def leave(self) -> None:
        """Stop recording, and keep what the recorder knows."""
        self._calls.is_deep = False
        if self.recorder is not None:
            self._patches.undo()
            self.recorder.leave()
            self._open.close()
            self.graph_flop = self.recorder.graph_flop
            self.examples = self.recorder.examples
            self.callers = self.recorder.callers
            self.backward_sites = self.recorder.backward_sites
            self.outside_float64 = self.recorder.outside_float64
            self.recorder = None

    def phases_of_lines(self) -> dict[tuple[str, int], dict[str, float]]:
        """Seconds of operators by phase, for each line of the deep steps.

        A line that calls backward, or steps an environment, is in that phase.
        """
        phases: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for step in self.steps:
            for call in step.calls:
                if call.key.phase != "backward":  # filed at the line of the forward, where no sample finds it
                    phases[self._sites.line_of(call.key.site)][call.key.phase] += call.op_s
        for site in self.backward_sites:
            phases[self._sites.line_of(site)] = {"backward": 1.0}
        for site in self.environment_sites:
            phases[self._sites.line_of(site)].setdefault("environment", 1.0)
        return phases

    def _watch_graphs(self, recorder: OperatorRecorder) -> None:
        """Let the recorder time the graphs that Inductor compiled."""
        kind = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
        if kind is not None:
            original: Callable[..., object] = kind.__call__

            def __call__(self: object, inputs: Sequence[object]) -> object:
                return recorder.graph(lambda: original(self, inputs), inputs)

            self._patches.set(kind, "__call__", __call__)

    def paused(self) -> AbstractContextManager[None]:
        """Do something of ours meanwhile: what runs inside is neither recorded nor timed."""
        return self._unrecorded(lambda recorder, seconds: recorder.resume())

    def skipped(self) -> AbstractContextManager[None]:
        """Like `paused`, for what is short and frequent: the user's own Python before it is still timed."""
        return self._unrecorded(OperatorRecorder.skip)

    @contextmanager
    def _unrecorded(self, end: Callable[[OperatorRecorder, float], None]) -> Iterator[None]:
        """Nothing is recorded inside; `end` is called after it with the recorder and the seconds that it took."""
        recorder = self.recorder
        if recorder is None:
            yield
            return
        began = perf_counter()
        recorder.is_paused = True
        try:
            yield
        finally:
            recorder.is_paused = False
            end(recorder, perf_counter() - began)

    def look_for_padding(self, tensors: dict[str, torch.Tensor], root: RootModule) -> None:
        """Note which of a root call's inputs end in constants."""
        with self.paused():
            for name, rows in padded_rows(tensors).items():
                tensor = tensors[name]
                found = self.padded.setdefault(name, PaddedTensor(name, tensor))
                found.add(rows)
                if min(rows.lengths) < rows.width:
                    signs = signs_of(root.module(), list(tensors.values()), rows.lengths)
                    self.padding_signs = tuple(dict.fromkeys(self.padding_signs + signs))
                if self.recorder is not None:
                    found.source = self.recorder.creator_site(tensor)

    def compare_inputs(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a root call without gradients begins with the input of the call before."""
        if root.grad_enabled and root.is_training:
            return
        with self.paused():
            root.compare_with_last(args, kwargs)

    def note_inputs(self, tensors: Iterable[torch.Tensor], *, step: int) -> None:
        """Remember the inputs of a step, to recognise what is no batch: the edges of a graph, a grid of points."""
        for tensor in tensors:
            earlier = self._inputs.get(id(tensor))
            if earlier is None or not earlier.is_same(tensor):
                self._inputs[id(tensor)] = ObservedInput(tensor, step)

    def is_standing(self, tensor: torch.Tensor, *, step: int) -> bool:
        """Whether the very same tensor was an input of an earlier step, and nothing has been written to it since."""
        earlier = self._inputs.get(id(tensor))
        return earlier is not None and earlier.step < step and earlier.is_same(tensor)

    def _note_gradients(self) -> None:
        """Note modules whose own parameters got gradients though no optimizer holds them."""
        optimized = self._optimizing.optimized_ids()
        if not optimized:
            return
        for root in self._calls.roots.values():
            module = root.module()
            if module is None or not root.has_parameters:
                continue
            for path, inner in module_paths(module, root.name):
                own = list(inner.parameters(recurse=False))
                unused = [p for p in own if p.grad is not None and id(p) not in optimized]
                if unused:
                    self.unused[path] = (len(unused), sum(p.numel() for p in unused))
                if any(id(p) in optimized for p in own):
                    self.trained_modules.add(path)


def _version(tensor: torch.Tensor) -> int | None:
    """How often the tensor has been written to; None for inference tensors, which do not count that."""
    return tensor._version if not tensor.is_inference() else None
