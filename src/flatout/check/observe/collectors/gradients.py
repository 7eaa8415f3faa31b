"""Gradients of one result taken in several walks through its graph (`torch.autograd.grad`), where one walk gives them all."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.memory.graphs import tensors_in_sequences
from flatout.check.observe.nest_checksum import nest_checksum
from flatout.check.observe.operators.deep import DeepLooks
from flatout.check.observe.operators.recorder import RecordedCall
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites

_SUMS: Final = ("SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1")
"""What makes a scalar of a result so that its gradient can be taken; each walk makes a new one."""


class _Walk(NamedTuple):
    """One call of torch.autograd.grad: its line, the tensors it asked for, whether they can be differentiated, its operators."""

    site: int
    inputs: frozenset[int]
    is_graph: bool
    calls: range


class _WalkTotals:
    """The walks of one line, in all deep steps together."""

    def __init__(self) -> None:
        self.num_walks = 0
        self.num_results = 0
        self.walks_s = 0.0
        self.saved_s = 0.0
        self.is_graph = True


class RepeatedGradients(Collector):
    """Facts 'repeated-gradient'. Watches the deep steps alone."""

    def __init__(self, deep: DeepLooks, sites: Sites) -> None:
        self._deep = deep
        self._sites = sites
        self._patches = Patches()
        self._walks: dict[tuple[object, ...], list[_Walk]] = {}
        self._alive: list[object] = []
        """Nodes and tensors of the step: while they live, no other object has their ids."""
        self._lines: dict[int, _WalkTotals] = defaultdict(_WalkTotals)
        self._num_steps = 0
        self._backward_s = 0.0
        self._differentiated_again: dict[int, int] = {}
        """Calls that build a graph of the gradient itself, by line."""

    def begin(self, mode: Mode) -> None:
        """A step begins; only deep ones matter."""
        if mode is Mode.DEEP:
            self._patches.set(torch.autograd, "grad", self._watching(torch.autograd.grad))

    def end(self, mode: Mode) -> None:
        """Add up the results that were walked from more than once, for different tensors."""
        if mode is not Mode.DEEP:
            return
        self._patches.undo()
        self._num_steps += 1
        calls = self._deep.steps[-1].calls
        self._backward_s += sum(_seconds(c) for c in calls if c.key.phase == "backward")
        for walks in self._walks.values():
            asked = [i for w in walks for i in w.inputs]
            if len(walks) > 1 and len(asked) == len(set(asked)):  # the same gradient twice may be meant
                self._add(walks, [sum(_seconds(calls[i]) for i in w.calls if i < len(calls)) for w in walks])
        self._walks.clear()
        self._alive.clear()

    def restart(self) -> None:
        """Forget the step in progress."""
        self.remove()

    def remove(self) -> None:
        """Put torch's function back, and let go of the step's tensors."""
        self._patches.undo()
        self._walks.clear()
        self._alive.clear()

    def fill(self, evidence: Evidence) -> Evidence:
        """Add one fact a line to `module_facts`: `value` walks a step, `text` 'results,walks_fraction,saved_fraction,graph'.

        The fractions are of the operators' time in the backward phase: all these walks, and those that one walk a result spares;
        'graph' is 1 where the gradients are differentiated again. Those have a fact of their own, 'gradient-of-gradient'.
        """
        again = (
            ModuleFact(
                name="gradient-of-gradient", module="", kind="", value=num / max(1, self._num_steps), source=site
            )
            for site, num in self._differentiated_again.items()
        )
        facts = (
            ModuleFact(
                name="repeated-gradient",
                module="",
                kind="",
                value=totals.num_walks / self._num_steps,
                text=f"{totals.num_results / self._num_steps:g},{totals.walks_s / self._backward_s:.4f},"
                f"{totals.saved_s / self._backward_s:.4f},{int(totals.is_graph)}",
                source=site,
            )
            for site, totals in self._lines.items()
            if self._backward_s > 0 and site >= 0
        )
        return msgspec.structs.replace(evidence, module_facts=(*evidence.module_facts, *facts, *again))

    def _add(self, walks: Sequence[_Walk], seconds: Sequence[float]) -> None:
        totals = self._lines[walks[0].site]
        total_s = sum(seconds)
        totals.num_walks += len(walks)
        totals.num_results += 1
        totals.walks_s += total_s
        totals.saved_s += total_s - max(seconds)
        totals.is_graph &= all(w.is_graph for w in walks)

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(*args: Any, **kwargs: Any) -> Any:
            recorder = self._deep.recorder
            key = self._key(args, kwargs) if recorder is not None else None
            if recorder is not None and kwargs.get("create_graph"):
                site = self._sites.of_frame(sys._getframe(1))
                self._differentiated_again[site] = self._differentiated_again.get(site, 0) + 1
            if recorder is None or key is None:
                return original(*args, **kwargs)
            site, first = self._sites.of_frame(sys._getframe(1)), len(recorder.step.calls)
            inputs = list(tensors_in_sequences(args[1] if len(args) > 1 else kwargs.get("inputs")))
            self._alive += inputs
            recorder.resume()
            result = original(*args, **kwargs)
            calls = range(first, len(recorder.step.calls))
            walk = _Walk(site, frozenset(map(id, inputs)), bool(kwargs.get("create_graph")), calls)
            self._walks.setdefault(key, []).append(walk)
            return result

        return grad

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...] | None:
        """What a walk starts from: node, number of its output, how it was summed, and the gradient that is handed in."""
        outputs = list(tensors_in_sequences(args[0] if args else kwargs.get("outputs")))
        if len(outputs) != 1 or outputs[0].grad_fn is None:
            return None
        node, number, summed = outputs[0].grad_fn, outputs[0].output_nr, ""
        behind, number_behind = node.next_functions[0] if node.name() in _SUMS and outputs[0].dim() == 0 else (None, 0)
        if behind is not None:
            summed, node, number = node.name(), behind, number_behind
        self._alive.append(node)
        weights = args[2] if len(args) > 2 else kwargs.get("grad_outputs")
        checksum = nest_checksum(weights) if weights is not None else 1
        return (id(node), number, summed, checksum) if checksum else None


def _seconds(call: RecordedCall) -> float:
    """What the step spends on a recorded call: the device's time where there is one."""
    if call.events is None:
        return call.op_s + call.python_s
    call.events[1].synchronize()
    return float(call.events[0].elapsed_time(call.events[1])) * 1e-3


COLLECTOR: Final = CollectorEntry(lambda observation: RepeatedGradients(observation.deep, observation.sites))
