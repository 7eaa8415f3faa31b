"""Modules inside root modules that are run again in one step on tensors that they had before."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from flatout.check.observe.calls import ModuleCalls, RootModule, is_wrapper
from flatout.check.observe.collector import Collector, InnerCallListener, RootCallListener
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.graph_passes import GraphPasses
from flatout.check.observe.nest_checksum import nest_checksum
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact
from flatout.core.runtime.source_sites import Sites

_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device)
_DEEPEST: Final = 4


class OpenCall(NamedTuple):
    """A call now running whose output is to be looked at."""

    module: int
    key: tuple[object, ...]
    is_repeat: bool
    random_state: Tensor


class EarlierCall:
    """A call of this step: its input tensors, and a checksum of its output where that was looked at."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = [weakref.ref(t) for t in tensors]
        self.output = 0
        self.passes: GraphPasses | None = None

    def had_inputs(self, tensors: list[Tensor]) -> bool:
        return all(ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True))


class RepeatedModuleCalls:
    """What is known of one module that was called again: where, under which path, how often."""

    def __init__(self, kind: str, path: str, site: int, found_in: int) -> None:
        self.kind = kind
        self.path = path
        self.site = site
        self.found_in = found_in
        self.num_repeats = 0
        self.num_calls = 0
        self.differs = False
        self.repeats: list[tuple[GraphPasses, GraphPasses]] = []

    @property
    def is_freed(self) -> bool:
        """Whether a backward frees the graph of a result before a later use of an equal one needs it."""
        return any(earlier.reuse(later) == "freed" for earlier, later in self.repeats)


class RepeatedCalls(Collector, RootCallListener, InnerCallListener):
    """Finds modules that run twice on the same input; facts 'double-forward-inside' and 'double-forward-inside-freed'.

    The first deep step finds modules that are called again with the very same tensors, unchanged, with the same weights;
    the later ones make sure of it: the outputs must agree bit for bit and no random numbers may be drawn.
    """

    def __init__(self, calls: ModuleCalls, sites: Sites) -> None:
        self._calls = calls
        self._sites = sites
        self._num_deep = 0
        self._earlier: dict[tuple[object, ...], EarlierCall] = {}
        self._found: dict[int, RepeatedModuleCalls] = {}
        self._inside: OpenCall | None = None
        self._root_key: tuple[object, ...] | None = None
        self._is_root_repeated = False

    def begin(self, mode: Mode) -> None:
        """A step that is looked at closely begins."""
        self._earlier.clear()
        self._inside = None
        self._num_deep += mode is Mode.DEEP

    def end(self, mode: Mode) -> None:
        """Forget the calls of the step."""
        self._earlier.clear()

    def restart(self) -> None:
        """The step in progress is void."""
        self._earlier.clear()

    def on_root_inputs(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_deep: bool) -> None:
        """A root module may be part of another one that is called next; its own repeats are facts 'double-forward'."""
        module = root.module()
        self._root_key, self._is_root_repeated = None, False
        if not is_deep or module is None:
            return
        inputs = self._inputs_of(module, args, kwargs)
        if inputs is not None:
            key, tensors = inputs
            earlier = self._earlier.get(key)
            self._is_root_repeated = earlier is not None and earlier.had_inputs(tensors)
            if not self._is_root_repeated:
                self._earlier[key] = EarlierCall(tensors)
                self._root_key = key

    def on_root_output(self, root: RootModule, output: Any) -> None:
        """Store a checksum of the output of a module that is also run inside another."""
        self._is_root_repeated = False
        if self._root_key is not None and id(root.module()) in self._found and self._root_key in self._earlier:
            earlier = self._earlier[self._root_key]
            earlier.output, earlier.passes = nest_checksum(output), GraphPasses(output)

    def on_inner_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        """Compare with the step's earlier calls; an OpenCall where the output is of interest."""
        inputs = None
        if self._inside is None and not self._is_root_repeated:
            inputs = self._inputs_of(module, args, kwargs)
        if inputs is None:
            return None
        key, tensors = inputs
        earlier = self._earlier.get(key)
        known = self._found.get(id(module))
        if known is not None:
            known.num_calls += known.found_in < self._num_deep and self._calls.path == known.path
        if earlier is None or not earlier.had_inputs(tensors):
            self._earlier[key] = EarlierCall(tensors)
            is_repeat = False
            if known is None:
                return None
        else:
            is_repeat = True
            if known is None:
                site = self._sites.of_frame(sys._getframe(1))
                kind = type(module).__name__
                self._found[id(module)] = RepeatedModuleCalls(kind, self._calls.path, site, self._num_deep)
        self._inside = OpenCall(id(module), key, is_repeat, torch.get_rng_state())
        return self._inside

    def on_inner_end(self, token: object, output: Any) -> None:
        """Look at the output of the call."""
        call, self._inside = self._inside, None
        if call is None or call is not token:
            return
        known, earlier = self._found[call.module], self._earlier.get(call.key)
        if not torch.equal(call.random_state, torch.get_rng_state()):
            known.differs = True
        if earlier is None or known.found_in == self._num_deep:
            return
        checksum = nest_checksum(output)
        if not call.is_repeat:
            earlier.output, earlier.passes = checksum, GraphPasses(output)
        elif checksum and checksum == earlier.output and earlier.passes is not None:
            known.num_repeats += 1
            known.repeats.append((earlier.passes, GraphPasses(output)))
        else:
            known.differs = True

    def _inputs_of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], list[Tensor]] | None:
        """A key that identifies this call within the step, and its input tensors; None where there is no such key."""
        if next(module.parameters(), None) is None:
            return None
        leaves = list(_leaves((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or any(not isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            return None
        if any(is_wrapper(t) or t.is_inference() for t in tensors):
            return None
        values = tuple((id(x), x._version) if isinstance(x, Tensor) else x for x in leaves)
        versions = sum(p._version for p in module.parameters() if not p.is_inference())
        return (id(module), module.training, torch.is_grad_enabled(), versions, values), tensors

    def fill(self, evidence: Evidence) -> Evidence:
        """Add one fact per module whose repeats agreed bit for bit: `value` repeats a step, `text` calls by that path.

        Its name ends in '-freed' where the earlier result could not be used again.
        """
        facts = (
            ModuleFact(
                name="double-forward-inside-freed" if found.is_freed else "double-forward-inside",
                module=found.path,
                kind=found.kind,
                value=found.num_repeats / (self._num_deep - found.found_in),
                text=str(found.num_calls / (self._num_deep - found.found_in)),
                source=found.site,
            )
            for found in self._found.values()
            if found.num_repeats and not found.differs
        )
        return msgspec.structs.replace(evidence, module_facts=(*evidence.module_facts, *facts))


def _leaves(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """What lies in a nest of tuples, lists and dicts; a nest too deep counts as one leaf."""
    if depth and isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item, depth - 1)
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _leaves(item, depth - 1)
    else:
        yield value


COLLECTOR: Final = CollectorEntry(lambda observation: RepeatedCalls(observation.calls, observation.sites))
