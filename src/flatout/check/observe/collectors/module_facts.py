"""True statements about the modules and optimizers of a run, read from the live objects around the deep steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from flatout.check.observe.calls import ModuleCalls, RootModule, module_paths
from flatout.check.observe.collector import Collector, RootCallListener
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.graph_passes import GraphPasses
from flatout.check.observe.nest_checksum import nest_checksum
from flatout.check.observe.steps.optimizers import OptimizerWatched, Optimizing
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact

_NORMS: Final = nn.modules.batchnorm._BatchNorm
_DROPOUTS: Final = nn.modules.dropout._DropoutNd
_FEWEST_LOOKS: Final = 3
_FEWEST_CALLS: Final = 3
_MOST_SHAPES: Final = 400
_NAMED: Final = 3


class RootCall(NamedTuple):
    """Inputs and state of a root call in a deep step, and the state of the random generator before it."""

    module: int
    inputs: int
    is_training: bool
    versions: int
    random_state: Tensor


class RootResult(NamedTuple):
    """What a root call of this step returned, and the backward passes through it."""

    checksum: int
    passes: GraphPasses


class ModuleFacts(Collector, RootCallListener):
    """Collects facts about root modules and optimizers.

    'train-in-eval', 'eval-in-train'  mode of a root module, judged with the dropout and batch norm inside it
    'double-forward'                  calls a step that repeat an earlier call of the step bit for bit; text: how the result of
                                      the earlier one can be used instead, a `graph_passes.Reuse`
    'double-forward-freed'            the same where it cannot: a backward has freed the graph that the later call's needs
    'no-gradient', 'zero-rate'        parameters an optimizer holds that never got a gradient, or whose rate is zero
    'parameter-shapes'                shapes of the tensors an optimizer holds ('64x3,64')
    'autocast'                        the autocast a root module ran under ('cpu:bfloat16')
    """

    def __init__(self, calls: ModuleCalls, optimizing: Optimizing) -> None:
        self._calls = calls
        self._optimizing = optimizing
        self._switches: dict[int, Counter[str]] = {}
        self._open: list[RootCall] = []
        self._outputs: dict[tuple[int, int, bool, int], RootResult] = {}
        self._repeats: dict[int, list[tuple[GraphPasses, GraphPasses]]] = defaultdict(list)
        self._num_deep = 0
        self._looks: Counter[int] = Counter()
        self._with_gradient: set[int] = set()
        self._with_rate: set[int] = set()
        self._of_optimizer: dict[int, tuple[ModuleFact, ...]] = {}

    # -- a collector ------------------------------------------------------------------------------------------------------

    def begin(self, mode: Mode) -> None:
        """A step that is looked at closely begins."""
        self._outputs.clear()
        self._open.clear()

    def end(self, mode: Mode) -> None:
        """The step is over; its gradients are still there, unless the loop clears them right after the update."""
        self._num_deep += mode is Mode.DEEP
        self._look_at_gradients()

    def restart(self) -> None:
        """The step that ends with the first update has gradients, too."""
        self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        for watched in self._optimizing.watched.values():
            optimizer = watched.optimizer()
            if optimizer is not None and any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
                self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        self._looks[id(optimizer)] += 1
        for group in optimizer.param_groups:
            has_rate = not _is_zero(group.get("lr", 1.0))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._with_gradient.add(id(parameter))
                if has_rate:
                    self._with_rate.add(id(parameter))

    # -- a watcher of root calls ------------------------------------------------------------------------------------------

    def on_root_inputs(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_deep: bool) -> None:
        """Note the switches inside a module at its first call, and its inputs in a deep step."""
        module = root.module()
        if module is None or not root.has_parameters:
            return
        if id(root) not in self._switches:
            self._switches[id(root)] = _switches(module)
        if is_deep:
            versions = sum(p._version for p in module.parameters() if not p.is_inference())
            state = torch.get_rng_state()
            self._open.append(RootCall(id(module), nest_checksum((args, kwargs)), module.training, versions, state))

    def on_root_output(self, root: RootModule, output: Any) -> None:
        """Judge whether the call that just ended repeated an earlier one of this step."""
        if not root.has_parameters or not self._open:
            return
        call = self._open.pop()
        if not call.inputs or not torch.equal(call.random_state, torch.get_rng_state()):
            return  # dropout: the same input twice is then no waste
        result = nest_checksum(output)
        key = (call.module, call.inputs, call.is_training, call.versions)
        earlier = self._outputs.get(key)
        if earlier is None:
            self._outputs[key] = RootResult(result, GraphPasses(output))
        elif result and earlier.checksum == result:
            self._repeats[id(root)].append((earlier.passes, GraphPasses(output)))

    # -- what came of it --------------------------------------------------------------------------------------------------

    def fill(self, evidence: Evidence) -> Evidence:
        """Add all facts so far to `module_facts`."""
        facts = (*evidence.module_facts, *self._root_facts(), *self._optimizer_facts())
        return msgspec.structs.replace(evidence, module_facts=facts)

    def _root_facts(self) -> Iterator[ModuleFact]:
        roots = [r for r in self._calls.roots.values() if r.has_parameters]
        modules = {id(r): r.alive for r in roots}
        trained = {id(modules[id(r)]) for r in roots if r.graphs_used}
        optimized = self._optimizing.optimized_ids()
        for root in roots:
            module = modules[id(root)]
            if module is None:
                continue
            switches = self._switches.get(id(root), Counter())
            on, off = _words(switches, "on"), _words(switches, "off")
            if (
                root.calls >= _FEWEST_CALLS
                and root.is_training
                and not root.graphs_used
                and on
                and id(module) in trained
            ):
                yield _fact("train-in-eval", root, text=on)
            is_optimized = any(id(p) in optimized for p in module.parameters())
            if root.graphs_used and not root.is_training and off and is_optimized:
                yield _fact("eval-in-train", root, text=off)
            yield from self._repeat_facts(root)
            if root.captured is not None and root.captured.autocast:
                dtypes = (f"{d}:{str(t).removeprefix('torch.')}" for d, t in root.captured.autocast.items())
                yield _fact("autocast", root, text=",".join(dtypes))

    def _repeat_facts(self, root: RootModule) -> Iterator[ModuleFact]:
        """One fact for each kind of use that the earlier results can be of."""
        if self._num_deep:
            reuses = Counter(earlier.reuse(later) for earlier, later in self._repeats[id(root)])
            for reuse, num in reuses.items():
                name = "double-forward-freed" if reuse == "freed" else "double-forward"
                yield _fact(name, root, value=num / self._num_deep, text=reuse)

    def _optimizer_facts(self) -> Iterator[ModuleFact]:
        for key, watched in self._optimizing.watched.items():
            optimizer = watched.optimizer()
            if optimizer is not None:  # of one that is gone, what was known of it stays
                self._of_optimizer[key] = tuple(self._facts_of(watched, optimizer))
            yield from self._of_optimizer.get(key, ())

    def _facts_of(self, watched: OptimizerWatched, optimizer: Optimizer) -> Iterator[ModuleFact]:
        owners = _owners(self._calls)
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        shapes = dict.fromkeys("x".join(map(str, p.shape)) for p in parameters)
        site = watched.constructed if watched.constructed >= 0 else watched.site
        if len(shapes) <= _MOST_SHAPES:
            text = ",".join(shapes)
            yield ModuleFact(
                name="parameter-shapes", module="", kind=watched.name, value=len(parameters), text=text, source=site
            )
        if self._looks[id(optimizer)] >= _FEWEST_LOOKS:
            bare = [p for p in parameters if id(p) not in self._with_gradient]
            yield from _parameter_facts("no-gradient", bare, watched, site, owners)
            idle = [p for p in parameters if id(p) not in self._with_rate and id(p) in self._with_gradient]
            still = {id(p) for g in optimizer.param_groups if _is_zero(g.get("lr", 1.0)) for p in g["params"]}
            yield from _parameter_facts("zero-rate", [p for p in idle if id(p) in still], watched, site, owners)


def _is_zero(rate: object) -> bool:
    return isinstance(rate, float | int) and rate == 0  # one in a tensor may lie on a device: not read


def _parameter_facts(
    name: str, parameters: list[Tensor], watched: OptimizerWatched, site: int, owners: dict[int, tuple[str, str]]
) -> Iterator[ModuleFact]:
    """One fact per module that owns such parameters itself."""
    elements: Counter[tuple[str, str]] = Counter()
    for parameter in parameters:
        elements[owners.get(id(parameter), ("", "Parameter"))] += parameter.numel()
    for (path, kind), num in elements.items():
        yield ModuleFact(name=name, module=path, kind=kind, value=num, text=watched.name, source=site)


def _owners(calls: ModuleCalls) -> dict[int, tuple[str, str]]:
    """The path and the class of the module that owns a parameter, by the parameter's identity."""
    found: dict[int, tuple[str, str]] = {}
    for root in calls.roots.values():
        module = root.alive
        if module is None:
            continue
        for path, inner in module_paths(module, root.name):
            for parameter in inner.parameters(recurse=False):
                found.setdefault(id(parameter), (path, type(inner).__name__))
    return found


def _switches(module: nn.Module) -> Counter[str]:
    """How many layers inside behave differently in training, by class and whether they are in training mode."""
    found: Counter[str] = Counter()
    for inner in module.modules():
        is_dropout = isinstance(inner, _DROPOUTS) and inner.p > 0
        if is_dropout or (isinstance(inner, _NORMS) and inner.track_running_stats):
            found[f"{'on' if inner.training else 'off'} {type(inner).__name__}"] += 1
    return found


def _words(switches: Counter[str], state: str) -> str:
    return ", ".join(f"{num} {name.split()[1]}" for name, num in switches.items() if name.startswith(f"{state} "))


def _fact(name: str, root: RootModule, *, value: float = 0.0, text: str = "") -> ModuleFact:
    return ModuleFact(name=name, module=root.name, kind=root.name, value=value, text=text, source=root.site)


COLLECTOR: Final = CollectorEntry(lambda observation: ModuleFacts(observation.calls, observation.optimizing))
