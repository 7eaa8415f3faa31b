"""What outlives the step that created it, step after step: a leak, and the line that keeps it.

Tensors and graph nodes of a watched step are looked for some steps later: storages by weak references, nodes by their
sequence numbers in the graphs of living tensors. What is still there after three steps, and grows, has a holder: the
container or variable found by walking the garbage collector's referrers upwards to a name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import msgspec
from torch import Tensor

from flatout.check.observe.memory import device as device_memory
from flatout.check.observe.memory.census import Census
from flatout.check.observe.memory.graphs import AutogradGraph, next_number, node_of
from flatout.check.observe.memory.holders import Holder, find_holders
from flatout.check.observe.memory.process import malloc_state
from flatout.check.observe.memory.storages import Storages, Stored
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.operators.recorder import storage_of
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.memory import Growth, Memory
from flatout.core.tensors.nests import tensors_in
from flatout.machine.cost.accounting import group_by

_LOOKS_AFTER: Final = (3, 16, 64, 256, 1024)
"""Steps after the watched one at which survivors are looked for; later ones only while there are any."""
_OWNED: Final = ("parameters", "buffers", "gradients", "optimizer state")
_NODE_BYTES: Final = 500
"""About what one node of a graph takes, its edges and shapes included (torch 2.13, measured as malloc's growth)."""
_GROWING: Final = 0.5
"""Everything that Python holds must have grown by this share of the survivors for each step since."""
_SAMPLE_S: Final = 0.1
_SAMPLE_FRACTION: Final = 0.002
"""Of the loop's time for samples: glibc walks over all free blocks for its statistics, 1 ms where there are many."""
_FEWEST_SAMPLES: Final = 8
_FEWEST_STEPS: Final = 20
_MOST_GROUPS: Final = 8


class Sample(NamedTuple):
    """Bytes in use at the end of a light step."""

    step: int
    host: int
    device: int


class _LiveTensors(NamedTuple):
    """Living tensors that keep something of the watched step alive: one stands for all created at its line."""

    tensor: Tensor
    site: int
    bytes: int
    num_tensors: int
    num_nodes: int


class Survivors:
    """Follows what a watched step left behind. `judge` is called with the first census after it."""

    def __init__(self, observation: ObservationState, *, judge: Callable[[Census], None]) -> None:
        self.is_over = False
        self.growth: dict[str, list[Growth]] = {}
        self._observation = observation
        self._judge = judge
        self._surviving_storages: list[Stored] = []
        self._numbers: list[tuple[int, int]] = []
        """First and last graph node of the watched step and of the closely watched ones after it."""
        self._ended_at: int | None = None
        self._looks = 0
        self._bytes_before = 0
        self._samples: list[Sample] = []
        self._next_sample_s = 0.0
        self._next = 0

    # -- the watched step -------------------------------------------------------------------------------------------------

    def begin(self, storages: Storages) -> None:
        """The watched step begins with these storages."""
        self._bytes_before = sum(s.bytes for s in storages.all if s.kind not in _OWNED)

    def end(self, storages: Storages, *, first: int) -> None:
        """It ended: remember what is still alive of what it created."""
        self._surviving_storages = [s for s in storages.all if s.born >= 0 and s.is_alive and s.kind not in _OWNED]
        self._numbers = [(first, next_number() - 1)]
        self._ended_at = self._observation.num_steps
        self._looks = 0
        self._next = next_number()
        self._samples.clear()
        self.growth.clear()

    def begin_step(self) -> None:
        """A closely watched step begins."""
        self._next = next_number()

    # -- later ------------------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether the end of a light step is to be looked at; costs nothing."""
        if self._ended_at is None or self.is_over:
            return False
        is_time = bisect_right(_LOOKS_AFTER, self._observation.num_steps - self._ended_at) > self._looks
        return is_time or len(self._numbers) < 4 or perf_counter() >= self._next_sample_s

    def look(self) -> None:
        """A later step ended: look at what is left, if it is time."""
        if self._ended_at is None or self.is_over:
            return
        elapsed = self._observation.num_steps - self._ended_at
        if len(self._numbers) < 4 and self._next < next_number():
            self._numbers.append((self._next, next_number() - 1))
            self._next = next_number()
        if (num_due := bisect_right(_LOOKS_AFTER, elapsed)) > self._looks:
            began = perf_counter()
            self._looks = num_due
            self._look(elapsed)
            if not self.growth:
                self._looks = len(_LOOKS_AFTER)
            if self._observation.mode is Mode.LIGHT:
                self._observation.times.deep_s += perf_counter() - began
                self._observation.timeline.restart()
        self._sample()

    def _look(self, elapsed: int) -> None:
        census = Census()
        if not self.growth:
            self._judge(census)
        alive = {s.key: s for s in self._surviving_storages if s.is_alive}
        leftovers = _living_graphs(census, self._numbers, alive)
        leftovers += self._living_tensors(census, elapsed, alive)
        leftovers = sorted(leftovers, key=lambda k: -(k.bytes + _NODE_BYTES * k.num_nodes))[:_MOST_GROUPS]
        tensors = [k.tensor for k in leftovers]
        del census
        holders = find_holders(tensors, self._observation.sites, [k.site for k in leftovers])
        self.growth = defaultdict(list)
        for found, holder in zip(leftovers, holders, strict=True):
            self.growth[str(found.tensor.device)].append(_growth(found, holder))

    def _living_tensors(self, census: Census, elapsed: int, alive: dict[int, Stored]) -> list[_LiveTensors]:
        """Tensors of the watched step that Python still holds, where all that it holds has grown as fast."""
        if not alive:
            return []
        recorder = self._observation.deep.recorder
        examples = self._observation.deep.examples | (recorder.examples if recorder is not None else {})
        ours = {id(t) for e in examples.values() for t in tensors_in((e.args, e.kwargs))}
        storages = Storages(lambda: "other")
        for tensor in census.tensors:
            if id(tensor) not in ours:
                storages.add(tensor, is_old=True)
        storages.name(census.roles())
        growth = sum(s.bytes for s in storages.all if s.kind not in _OWNED) - self._bytes_before
        groups: dict[int, list[tuple[Stored, Tensor]]] = defaultdict(list)
        for tensor in census.tensors:
            now = storages.find(tensor)
            then = alive.pop(now.key, None) if now is not None and now.kind not in _OWNED else None
            if then is not None:
                groups[then.site].append((then, tensor))
        storages.close()
        total = sum(s.bytes for group in groups.values() for s, _ in group)
        if growth < _GROWING * total * elapsed:
            return []
        return [
            _LiveTensors(max(group, key=lambda g: g[0].bytes)[1], site, sum(s.bytes for s, _ in group), len(group), 0)
            for site, group in groups.items()
        ]

    # -- the slope --------------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        now = perf_counter()
        if self._observation.mode is not Mode.LIGHT or now < self._next_sample_s:
            return
        state = malloc_state()
        device = device_memory.allocated(0) if self._observation.is_device else 0
        self._samples.append(Sample(self._observation.num_steps, state.used if state is not None else 0, device))
        end = perf_counter()
        self._next_sample_s = end + max(_SAMPLE_S, (end - now) / _SAMPLE_FRACTION)
        self._observation.times.light_own_s += end - now

    def complete(self, memories: tuple[Memory, ...]) -> tuple[Memory, ...]:
        """The records with what grew."""
        return tuple(
            msgspec.structs.replace(
                memory,
                growth=tuple(self.growth.get(memory.device, ())),
                growth_bytes_per_step=self._slope(is_device=memory.device != "cpu"),
                num_retries=device_memory.retries() if memory.device != "cpu" else 0,
            )
            for memory in memories
        )

    def _slope(self, *, is_device: bool) -> float:
        """Bytes more per step: the median slope between samples half a run from each other; 0 where there are too few."""
        samples = self._samples[len(self._samples) // 5 :]  # after trials the heap settles
        if len(samples) < _FEWEST_SAMPLES or samples[-1].step - samples[0].step < _FEWEST_STEPS:
            return 0.0
        half = len(samples) // 2
        pairs = [(a, b) for a, b in zip(samples[:half], samples[-half:], strict=True) if b.step > a.step]
        slopes = [((b.device - a.device) if is_device else (b.host - a.host)) / (b.step - a.step) for a, b in pairs]
        return max(0.0, median(slopes)) if slopes else 0.0


def _living_graphs(census: Census, numbers: list[tuple[int, int]], alive: dict[int, Stored]) -> list[_LiveTensors]:
    """Tensors whose graphs reach back into the watched step, and into each step between.

    What of the watched step's storages they account for is taken out of `alive`.
    """
    if len(numbers) < 3:
        return []
    graph = AutogradGraph()
    nodes = ((n._sequence_nr(), t, n) for t in census.tensors if (n := node_of(t)) is not None)
    reached = [0] * len(numbers)
    found: list[tuple[Tensor, int]] = []
    graph_tensors: list[list[Tensor]] = []
    # The youngest first: what is referenced is the end of a graph, and its inner tensors are alive only through it.
    for _, tensor, node in sorted(nodes, key=lambda row: -row[0]):
        before = len(graph.saved)
        new = graph.walk([node], oldest=numbers[0][0])
        inside = [sum(first <= n <= last for n in new) for first, last in numbers]
        reached = [a + b for a, b in zip(reached, inside, strict=True)]
        if inside[0]:
            found.append((tensor, inside[0]))
            graph_tensors.append([tensor, *graph.saved[before:]])
    graph.close()
    if not all(reached[:3]):
        return []
    leftovers = []
    for (tensor, num), tensors in zip(found, graph_tensors, strict=True):
        own = [s for t in tensors if (s := alive.pop(storage_of(t), None)) is not None]
        site = own[0].site if own and own[0].key == storage_of(tensor) else -1
        leftovers.append(_LiveTensors(tensor, site, sum(s.bytes for s in own), len(own), num))
    return _by_line(leftovers)


def _by_line(leftovers: list[_LiveTensors]) -> list[_LiveTensors]:
    """One for all that were created at a line."""
    groups = group_by(leftovers, lambda k: k.site if k.site >= 0 else -id(k.tensor))
    return [
        _LiveTensors(
            g[0].tensor, g[0].site, sum(k.bytes for k in g), sum(k.num_tensors for k in g), sum(k.num_nodes for k in g)
        )
        for g in groups.values()
    ]


def _growth(leftovers: _LiveTensors, holder: Holder) -> Growth:
    return Growth(
        source=leftovers.site,
        holder=holder.site,
        container=holder.words,
        bytes_per_step=leftovers.bytes + _NODE_BYTES * leftovers.num_nodes,
        tensors_per_step=float(leftovers.num_tensors),
        has_graph=leftovers.num_nodes > 0,
    )
