"""Gradients that are computed and then cleared before their optimizer steps: another network's, in an adversarial loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from flatout.check.observe.calls import RootModule
from flatout.check.observe.collector import BackwardListener, Collector, OptimizerStepListener, RootCallListener
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.memory.graphs import tensors_in_sequences
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.operators.recorder import DeepStep, OperatorCall, OperatorListener, RecordedCall
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact
from flatout.core.runtime.patches import Patches
from flatout.core.tensors.nests import tensors_in

_MOST_NODES: Final = 200_000
"""Nodes of a graph that are looked at to find the calls it came from."""


_NO_OPTIMIZER: Final = frozenset((-1,))


class _Backward:
    """One backward pass of a deep step: its operators, the calls it went through, and what became of the gradients."""

    def __init__(self, roots: dict[str, int], first: int, before: dict[int, list[object]]) -> None:
        self.before = before
        """By optimizer, the gradients that were there before."""
        self.reached: set[int] = set()
        """Optimizers whose parameters it gave gradients."""
        self.roots = roots
        """Line of the call, by the name of the root module whose graph it walks through."""
        self.step: DeepStep | None = None
        self.calls = range(first, first)
        self.behind: dict[int, frozenset[int]] = {}
        """By the sequence number of a node, the optimizers of the parameters that its gradient leads to."""
        self.ends: dict[int, frozenset[int]] = {}
        """The same by operator, counted in the step."""
        self.used: set[int] = set()
        self.cleared: set[int] = set()
        """Optimizers that stepped with its gradients, and those whose gradients were cleared first."""


class DiscardedGradients(Collector, BackwardListener, OptimizerStepListener, RootCallListener, OperatorListener):
    """Facts 'discarded-gradient'. Watches the deep steps, and what becomes of their gradients afterwards."""

    def __init__(self, observation: ObservationState) -> None:
        self._observation = observation
        self._deep = observation.deep
        self._patches = Patches()
        self._is_watching = False
        self._outputs: dict[int, tuple[object, RootModule]] = {}
        """Nodes that root modules returned in the step in progress; while they live, no other has their ids."""
        self._open: list[_Backward] = []
        """Backward passes whose gradients were neither used nor cleared by every optimizer yet."""
        self._all: list[_Backward] = []
        self._current: _Backward | None = None
        self._is_deep = False

    # -- the collector's life ---------------------------------------------------------------------------------------------

    def begin(self, mode: Mode) -> None:
        """A step begins; in deep ones every backward pass is noted."""
        self._is_deep = mode is Mode.DEEP
        if self._is_deep and not self._is_watching:
            self._is_watching = True
            for owner in (Optimizer, nn.Module):
                self._patches.set(owner, "zero_grad", self._clearing(owner.zero_grad))

    def end(self, mode: Mode) -> None:
        """The operators of the step's backward passes are known now."""
        if mode is Mode.DEEP and self._deep.steps:
            for backward in self._all:
                backward.step = backward.step or self._deep.steps[-1]
        self._outputs.clear()
        self._is_deep = False

    def pause(self) -> None:
        """Trials run backward passes of their own."""
        self._is_deep = False

    def restart(self) -> None:
        """Forget the steps so far."""
        self.remove()
        self._all.clear()

    def remove(self) -> None:
        """Take the watches away, and let go of the step's graphs."""
        self._patches.undo()
        self._is_watching = False
        self._outputs.clear()
        self._open.clear()

    # -- events -----------------------------------------------------------------------------------------------------------

    def on_root_inputs(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_deep: bool) -> None:
        """Inputs of calls tell nothing of gradients."""

    def on_root_output(self, root: RootModule, output: Any) -> None:
        """Remember which call made this node of the graph."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                self._outputs[id(tensor.grad_fn)] = (tensor.grad_fn, root)

    def on_backward_start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        """A backward pass begins; torch.autograd.grad writes into no parameter."""
        recorder = self._deep.recorder
        if not self._is_deep or name != "backward" or recorder is None:
            return
        with self._deep.paused():
            losses = list(tensors_in_sequences(args[0] if args else kwargs.get("tensors")))
            self._current = _Backward(self._roots_behind(losses), len(recorder.step.calls), self._gradients())
            self._current.behind = self._parameters_behind(losses)

    def on_operator(self, call: OperatorCall) -> None:
        """An operator ran: in a backward, for a node of its graph."""
        recorder, current = self._deep.recorder, self._current
        node: Any = torch._C._current_autograd_node() if current is not None else None
        if current is None or recorder is None or node is None:
            return
        ends = self._owners_of(node.variable) if _is_leaf(node) else current.behind.get(node._sequence_nr())
        if ends is not None:
            current.ends[len(recorder.step.calls) - 1] = ends

    def on_backward_end(self) -> None:
        """The backward pass has returned."""
        recorder, current = self._deep.recorder, self._current
        self._current = None
        if current is not None and recorder is not None:
            current.calls = range(current.calls.start, len(recorder.step.calls))
            now = self._gradients()
            current.reached = {key for key in now if now[key] != current.before.get(key)}
            current.before, current.behind = {}, {}
            self._open.append(current)
            self._all.append(current)

    def _gradients(self) -> dict[int, list[object]]:
        """Which gradients the parameters of each optimizer have, and how often each was written to."""
        found: dict[int, list[object]] = {}
        for key, watched in self._observation.optimizing.watched.items():
            optimizer = watched.optimizer()
            parameters = _parameters_of(optimizer) if optimizer is not None else ()
            gradients = (p.grad for p in parameters)
            found[key] = [None if g is None else (id(g), g._version) for g in gradients]
        return found

    def _roots_behind(self, losses: Iterable[Tensor]) -> dict[str, int]:
        """The root modules that the graph behind these goes through, with the line of the call."""
        found: dict[str, int] = {}
        waiting = [t.grad_fn for t in losses if t.grad_fn is not None]
        known = set(map(id, waiting))
        while waiting and len(known) < _MOST_NODES:
            node = waiting.pop()
            known_output = self._outputs.get(id(node))
            if known_output is not None:
                found.setdefault(known_output[1].name, known_output[1].site)
            for following, _ in node.next_functions:
                if following is not None and id(following) not in known:
                    known.add(id(following))
                    waiting.append(following)
        return found

    def _parameters_behind(self, losses: Iterable[Tensor]) -> dict[int, frozenset[int]]:
        """By the sequence number of each node behind these, the optimizers whose parameters it leads to; empty where the graph is
        too large to look at.
        """
        found: dict[int, frozenset[int]] = {}
        nodes: dict[int, Any] = {}
        """Held here, so that no id comes twice."""
        waiting: list[tuple[Any, bool]] = [(t.grad_fn, False) for t in losses if t.grad_fn is not None]
        behind: dict[int, frozenset[int]] = {}
        while waiting:
            node, is_complete = waiting.pop()
            following = [n for n, _ in node.next_functions if n is not None]
            if is_complete:
                behind[id(node)] = frozenset().union(*(behind[id(n)] for n in following))
                found[node._sequence_nr()] = behind[id(node)]
            elif id(node) not in nodes:
                nodes[id(node)] = node
                if _is_leaf(node):
                    behind[id(node)] = self._owners_of(node.variable)
                else:
                    waiting.append((node, True))
                    waiting += [(n, False) for n in following]
            if len(nodes) > _MOST_NODES:
                return {}
        return found

    def _owners_of(self, leaf: Tensor) -> frozenset[int]:
        """The optimizers that hold this leaf; a leaf of none may be read by hand."""
        watched = self._observation.optimizing.watched
        return frozenset(key for key, w in watched.items() if id(leaf) in w.parameter_ids) or _NO_OPTIMIZER

    def on_optimizer_step(self, optimizer: int) -> None:
        """An optimizer stepped with the gradients that reached its parameters."""
        for backward in self._open:
            if optimizer in backward.reached - backward.cleared:
                backward.used.add(optimizer)

    def _clearing(self, original: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            if self._open:
                self._note_cleared(owner)
            original(owner, *args, **kwargs)

        return zero_grad

    def _note_cleared(self, owner: Optimizer | nn.Module) -> None:
        """The gradients of these parameters go; those of optimizers that did not step since the backward were for nothing."""
        ids = set(map(id, _parameters_of(owner)))
        for key, watched in self._observation.optimizing.watched.items():
            if watched.parameter_ids & ids:
                for backward in self._open:
                    if key in backward.reached - backward.used:
                        backward.cleared.add(key)
        self._open = [b for b in self._open if not b.reached <= b.used | b.cleared]

    # -- what came of it --------------------------------------------------------------------------------------------------

    def fill(self, evidence: Evidence) -> Evidence:
        """Add a fact a root module: `value` passes a step; `text` 'how,fraction' of the operators' time in the backward phase.

        'all' is what a detached input would spare (nothing behind it is used), 'weights' what parameters that require no gradient
        would (the gradient goes through the module to one that is used).
        """
        steps = [s for s in self._deep.steps if any(b.step is s for b in self._all)]
        total_s = sum(_seconds(c) for s in steps for c in s.calls if c.key.phase == "backward")
        if not total_s:
            return evidence
        found: dict[tuple[str, str, int], list[float]] = {}
        for backward in self._all:
            for name, how, seconds in self._spared(backward):
                row = found.setdefault((name, how, backward.roots[name]), [0.0, 0.0])
                row[0] += 1
                row[1] += seconds
        facts = (
            ModuleFact(
                name="discarded-gradient",
                module=name,
                kind="",
                value=num / len(steps),
                text=f"{how},{seconds / total_s:.4f}",
                source=site,
            )
            for (name, how, site), (num, seconds) in found.items()
        )
        return msgspec.structs.replace(evidence, module_facts=(*evidence.module_facts, *facts))

    def _spared(self, backward: _Backward) -> Iterator[tuple[str, str, float]]:
        """(root module, how, seconds) of a pass, by what the gradients that its operators compute lead to."""
        if backward.step is None or not backward.used:
            return
        owners = self._owners()
        calls = ((i, backward.step.calls[i]) for i in backward.calls if i < len(backward.step.calls))
        known = [(c, backward.ends[i]) for i, c in calls if i in backward.ends]
        cleared = {n for n in backward.roots if (o := owners.get(n)) and o <= backward.cleared}
        for name in cleared:
            own = [(call, ends) for call, ends in known if _root_of(call) == name]
            discarded_s = sum(_seconds(call) for call, ends in own if ends <= backward.cleared)
            passing = [call for call, ends in own if not ends <= backward.cleared]
            if passing:
                shapes = self._shapes(name)
                yield name, "weights", discarded_s + sum(_weight_share(c, shapes) * _seconds(c) for c in passing)
            elif discarded_s:
                yield name, "all", discarded_s

    def _owners(self) -> dict[str, set[int]]:
        """By root module, the optimizers that hold its parameters."""
        owners: dict[str, set[int]] = {}
        for root in self._observation.calls.roots.values():
            module = root.alive
            if module is not None and root.has_parameters:
                ids = set(map(id, module.parameters()))
                watched = self._observation.optimizing.watched
                owners[root.name] = {key for key, w in watched.items() if w.parameter_ids & ids}
        return owners

    def _shapes(self, name: str) -> set[tuple[int, ...]]:
        """Shapes of a root module's parameters, matrices also transposed."""
        roots = (r for r in self._observation.calls.roots.values() if r.name == name)
        module = next((r.alive for r in roots if r.alive is not None), None)
        shapes = {tuple(p.shape) for p in module.parameters()} if module is not None else set()
        return shapes | {s[::-1] for s in shapes if len(s) == 2}


def _parameters_of(owner: Optimizer | nn.Module) -> Iterator[Tensor]:
    if isinstance(owner, nn.Module):
        yield from owner.parameters()
    else:
        for group in owner.param_groups:
            yield from group["params"]


def _is_leaf(node: Any) -> bool:
    """Whether a node of a graph adds to the gradient of a leaf, its `variable`."""
    return type(node).__name__ == "AccumulateGrad"


def _root_of(call: RecordedCall) -> str:
    return call.key.module.partition(".")[0]


def _weight_share(call: RecordedCall, shapes: set[tuple[int, ...]]) -> float:
    """Share of an operator of the backward that computes a parameter's gradient; a convolution's is about half of it."""
    outputs = [tuple(m.shape) for m in call.key.outputs]
    if "convolution_backward" in call.key.op:
        return 0.5
    return 1.0 if outputs and all(s in shapes for s in outputs) else 0.0


def _seconds(call: RecordedCall) -> float:
    """What the step spends on a recorded call: the device's time where there is one."""
    if call.events is None:
        return call.op_s + call.python_s
    call.events[1].synchronize()
    return float(call.events[0].elapsed_time(call.events[1])) * 1e-3


COLLECTOR: Final = CollectorEntry(DiscardedGradients)
