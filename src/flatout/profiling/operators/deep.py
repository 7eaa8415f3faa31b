"""Looks inside a step: every operator with its line and module, which gradients nobody reads, which batches are padded."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import perf_counter
from typing import Any

import torch

from flatout.profiling.calls import ModuleCalls, Root, module_paths
from flatout.profiling.operators.overhead import InterceptionCost, interception_cost
from flatout.profiling.operators.padding import PaddedTensor, padded_rows, signs_of
from flatout.profiling.operators.recorder import DeepStep, Example, Inspect, OperatorKey, OperatorRecorder
from flatout.profiling.patching import Patches
from flatout.profiling.sites import Sites
from flatout.profiling.steps.optimizing import Optimizing

_UNKNOWN = count(-1, -1)


class Given:
    """A tensor that a model was called with, and in which step first."""

    def __init__(self, tensor: torch.Tensor, step: int) -> None:
        self.step = step
        self._tensor = weakref.ref(tensor)
        self._version = _version(tensor)

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether this is the very tensor, as it was."""
        return self._tensor() is tensor and self._version == _version(tensor)


class DeepLooks:
    """The deep steps of one observation and what they showed. `recorder` is there from the first to the last of them."""

    def __init__(self, sites: Sites, calls: ModuleCalls, optimizing: Optimizing, *, thread_id: int) -> None:
        self.steps: list[DeepStep] = []
        self.recorder: OperatorRecorder | None = None
        self.interception = InterceptionCost(0.0, 0.0)
        self.examples: dict[OperatorKey, Example] = {}
        self.callers: dict[int, tuple[int, ...]] = {}
        self.backward_sites: set[int] = set()
        self.outside_float64: set[int] = set()
        self.padded: dict[str, PaddedTensor] = {}
        self.padding_signs: tuple[str, ...] = ()
        self.unused: dict[str, tuple[int, int]] = {}
        self.trained_modules: set[str] = set()
        self.graph_flop: dict[OperatorKey, int] = {}
        self._given: dict[int, Given] = {}
        self._patches = Patches()
        self.inspectors: list[Inspect] = []
        self._sites = sites
        self._calls = calls
        self._optimizing = optimizing
        self._thread_id = thread_id

    def open(self, *, phase: Callable[[], str], is_device: bool) -> None:
        """Record the step that begins now."""
        if self.recorder is None:
            self.interception = interception_cost(self._sites, is_device=is_device)
            self.recorder = OperatorRecorder(
                self._sites,
                phase=phase,
                module=self._calls.module_path,
                is_device=is_device,
                thread_id=self._thread_id,
                inspectors=self.inspectors,
            )
            self.recorder.enter()
            self._watch_graphs(self.recorder)
        self._calls.is_deep = True
        self._calls.begin_deep()
        self.recorder.begin()

    def close(self, duration_s: float, root_calls: int) -> None:
        """The step ended: file what was recorded."""
        assert self.recorder is not None
        self.recorder.is_paused = True
        step = self.recorder.end(tuple(self._calls.cells.values()))
        step.duration_s = duration_s
        step.root_calls = root_calls
        self.steps.append(step)
        self._note_gradients()
        self.recorder.is_paused = False

    def leave(self) -> None:
        """Stop recording, and keep what the recorder knows."""
        self._calls.is_deep = False
        if self.recorder is not None:
            self._patches.undo()
            self.recorder.leave()
            self.graph_flop = self.recorder.graph_flop
            self.examples = self.recorder.examples
            self.callers = self.recorder.callers
            self.backward_sites = self.recorder.backward_sites
            self.outside_float64 = self.recorder.outside_float64
            self.recorder = None

    def phases_of_lines(self) -> dict[tuple[str, int], dict[str, float]]:
        """For each line seen in the deep steps, the seconds of its operators by phase; a line that calls backward is in that."""
        phases: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for step in self.steps:
            for call in step.calls:
                if call.key.phase != "backward":  # told at the line of the forward, where no sample finds it
                    phases[self._sites.line_of(call.key.site)][call.key.phase] += call.op_s
        for site in self.backward_sites:
            phases[self._sites.line_of(site)] = {"backward": 1.0}
        return phases

    def _watch_graphs(self, recorder: OperatorRecorder) -> None:
        """Have the graphs that Inductor compiled tell the recorder when they run."""
        kind = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
        if kind is not None:
            original: Callable[..., object] = kind.__call__

            def __call__(self: object, inputs: Sequence[object]) -> object:
                return recorder.graph(lambda: original(self, inputs), inputs)

            self._patches.set(kind, "__call__", __call__)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do something of ours meanwhile: what runs inside is neither recorded nor timed."""
        recorder = self.recorder
        if recorder is None:
            yield
            return
        recorder.is_paused = True
        try:
            yield
        finally:
            recorder.is_paused = False
            recorder.resume()

    @contextmanager
    def between(self) -> Iterator[None]:
        """As `aside`, for what is short and frequent: the user's own Python before it keeps its time."""
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
            recorder.skip(perf_counter() - began)

    def look_for_padding(self, tensors: dict[str, torch.Tensor], root: Root) -> None:
        """Note which of a root call's inputs end in constants."""
        recorder = self.recorder
        if recorder is not None:
            recorder.is_paused = True
        for name, tensor in tensors.items():
            rows = padded_rows(tensor)
            if rows is None:
                continue
            found = self.padded.setdefault(name, PaddedTensor(name, tensor))
            found.add(rows)
            if min(rows.lengths) < rows.width:
                signs = signs_of(root.module(), list(tensors.values()), rows.lengths)
                self.padding_signs = tuple(dict.fromkeys(self.padding_signs + signs))
            if recorder is not None:
                found.source = recorder.creator_site(tensor)
        if recorder is not None:
            recorder.is_paused = False
            recorder.resume()

    def compare_inputs(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a root call without gradients begins with what the call before was given."""
        if root.grad_enabled and root.is_training:
            return
        with self.aside():
            root.compare_with_last(args, kwargs)

    def note_inputs(self, tensors: Iterable[torch.Tensor], *, step: int) -> None:
        """Remember what a step is given, to know again what is no batch: the edges of a graph, a grid of points."""
        for tensor in tensors:
            given = self._given.get(id(tensor))
            if given is None or not given.is_same(tensor):
                self._given[id(tensor)] = Given(tensor, step)

    def is_standing(self, tensor: torch.Tensor, *, step: int) -> bool:
        """Whether the very same tensor was given in a step before this one, and nothing has been written to it since."""
        given = self._given.get(id(tensor))
        return given is not None and given.step < step and given.is_same(tensor)

    def _note_gradients(self) -> None:
        """Which modules' own parameters got gradients though no optimizer holds them."""
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


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor has been written to; inference tensors do not count that, so none of them is the same twice."""
    return tensor._version if not tensor.is_inference() else next(_UNKNOWN)
