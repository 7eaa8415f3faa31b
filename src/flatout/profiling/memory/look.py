"""One step's memory: its curve, its peak, and who made what is alive at it; and what stays alive from step to step.

The step is watched by a dispatch mode (profiling/memory/mode.py) that files every storage; what the machine's own accounting
says of the same step (resident size, the device's allocator) is kept beside it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from flatout.profiling.calls import iter_tensors
from flatout.profiling.memory.census import Census, gradient_of, without_functions
from flatout.profiling.memory.device import DeviceMemory
from flatout.profiling.memory.graphs import Graph, next_number, node_of, tensors_in
from flatout.profiling.memory.mode import MemoryMode
from flatout.profiling.memory.optimizer_state import OptimizerStates
from flatout.profiling.memory.parts import Watched, memories_of
from flatout.profiling.memory.process import Malloc, Moment, ProcessPeak, malloc_state, resident_bytes
from flatout.profiling.memory.releases import Releases
from flatout.profiling.memory.storages import Storages, Stored
from flatout.profiling.memory.survivors import Survivors
from flatout.profiling.observer import Observer
from flatout.profiling.patching import Patches
from flatout.profiling.steps.schedule import Mode
from flatout.records.memory import Memory, RetainedGraph
from flatout.records.usage import CallUse, ModuleFact

_RISE: Final = 1.02
"""The machine's accounting is read whenever the living bytes exceed those of the reading before by this factor."""
_BACKWARD_OPTIONS: Final = {"backward": (2, 3), "grad": (3, 4)}
"""Positions of retain_graph and create_graph in torch.autograd.backward and torch.autograd.grad (torch 2.11 to 2.13)."""


class Retained(NamedTuple):
    """A backward that kept its graph on purpose: its line and the numbers of its nodes."""

    site: int
    numbers: frozenset[int]


class _Step:
    """What is gathered while the step is watched."""

    def __init__(self, observer: Observer, after: Any) -> None:
        self.storages = Storages(lambda: observer.timeline.phase)
        self.mode = MemoryMode(
            observer.sites,
            self.storages,
            phase=lambda: observer.timeline.phase,
            module=observer.calls.module_path,
            after=after,
        )
        self.process = ProcessPeak(lambda: Moment(len(self.storages.events), self.storages.live.get("cpu", 0)))
        self.start_resident: int | None = None
        self.start_malloc: Malloc | None = None
        self.malloc_at_peak: Malloc | None = None
        self.read_at: dict[str, float] = {}
        self.device = DeviceMemory()
        self.first_number = 0
        self.numbers_seen: list[set[int]] = []
        self.retained: list[Retained] = []
        self.reached_older = False
        self.leaf_ids: set[int] = set()
        self.recomputes = False


class MemoryLook:
    """The collector of memory. It follows the observer's MEMORY step, and looks later at what outlived it."""

    def __init__(self, observer: Observer) -> None:
        self.memories: tuple[Memory, ...] = ()
        self.recompute_facts: tuple[ModuleFact, ...] = ()
        self.releases = Releases(observer.sites, observer.thread_id)
        self.states = OptimizerStates()
        self.survivors = Survivors(observer, judge=self.states.judge)
        self._observer = observer
        self._step: _Step | None = None
        self._is_off = False

    # -- the collector ----------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Watch the calls that give memory back."""
        self.releases.install(patches)

    def begin(self, mode: Mode) -> None:
        """The memory step begins."""
        self._abort()
        with self._undisturbed():
            is_compiled = self._observer.compiling.is_used  # interception would have dynamo give its frames up
            if mode is Mode.MEMORY and is_compiled:
                self._observer.notes.append(
                    "the script uses torch.compile: what is alive at the memory's peak was not recorded"
                )
            elif mode is Mode.MEMORY and not self._is_off:
                self._open()
            else:
                self.survivors.begin_step()

    def end(self, mode: Mode) -> None:
        """A closely watched step ended."""
        if self._observer.seen <= 1:
            self.releases.clear()
        with self._undisturbed():
            if mode is Mode.MEMORY and self._step is not None:
                self._close(self._step)
            elif mode is Mode.DEEP:
                self.survivors.look()

    def remove(self) -> None:
        """Leave the mode if the observation ends within the step."""
        self._abort()
        self.survivors.is_over = True

    # -- events within steps ----------------------------------------------------------------------------------------------

    def on_batch(self, value: Any, *, is_fetched: bool) -> None:
        """A loader gave this, or a root module is called with it."""
        step = self._step
        if step is None:
            return
        with self._undisturbed():
            for tensor in iter_tensors(value):
                stored = step.storages.add(tensor)
                if stored is not None and not stored.kind and (is_fetched or _is_prepared(stored, tensor)):
                    stored.kind = "batch"

    def on_backward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A backward is about to go through the graph of these tensors."""
        step = self._step
        if step is None:
            return
        with self._undisturbed():
            graph = Graph()
            first = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            graph.walk(node_of(t) for t in tensors_in(first))
            step.storages.mark_saved(graph.saved)
            step.leaf_ids |= graph.leaf_ids
            step.recomputes |= graph.recomputes
            step.reached_older |= any(n < step.first_number for n in graph.numbers)
            step.numbers_seen.append(graph.numbers)
            retain, create = (
                args[i] if len(args) > i else kwargs.get(option)
                for i, option in zip(_BACKWARD_OPTIONS[name], ("retain_graph", "create_graph"), strict=True)
            )
            if retain and not create:
                site = self._observer.sites.of_frame(sys._getframe(2))
                step.retained.append(Retained(site, frozenset(graph.numbers)))
            graph.close()

    def on_light(self) -> None:
        """A step ended under light observation."""
        if self.survivors.is_due():
            with self._undisturbed():
                self.survivors.look()

    # -- the step ---------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        observer = self._observer
        step = self._step = _Step(observer, self._after_operator)
        storages = step.storages
        census = Census()
        graph = census.graph()
        before = resident_bytes()
        for tensor in (*census.tensors, *graph.saved):
            stored = storages.add(tensor, is_old=True)
            if stored is not None and before is not None and stored.device == "cpu" and stored.bytes > before:
                stored.bytes = stored.held = 0  # mapped from a file, and hardly in memory
        storages.name(census.roles())
        self.states.begin(census)
        graph.close()
        del census, graph
        step.first_number = next_number()
        self.survivors.begin(storages)
        if observer.is_device:
            step.device.start()
        step.start_resident, step.start_malloc = resident_bytes(), malloc_state()
        step.malloc_at_peak = step.start_malloc
        step.process.start()
        observer.calls.is_deep = True
        observer.calls.begin_deep()
        step.mode.enter()

    def _close(self, step: _Step) -> None:
        self._step = None
        observer = self._observer
        step.mode.leave()
        observer.calls.is_deep = False
        step.storages.close()
        step.process.stop()
        device_peaks = step.device.stop() if observer.is_device else {}
        if step.mode.failure is not None:
            raise step.mode.failure
        census = Census()
        step.storages.name(census.roles())
        for tensor in census.tensors:
            grad = gradient_of(tensor)
            if grad is not None:
                step.storages.name([("gradients", grad)])
        self.states.end(step.leaf_ids)
        del census
        watched = Watched(
            storages=step.storages,
            start_resident=step.start_resident,
            start_malloc=step.start_malloc,
            malloc_at_peak=step.malloc_at_peak,
            process=step.process,
            device_peaks=device_peaks,
            retained=tuple(self._retained(step)),
        )
        self.memories = memories_of(watched)
        if step.recomputes:
            self.recompute_facts = tuple(
                ModuleFact(name="recompute", module=module, kind="torch.utils.checkpoint", source=site)
                for site, module in step.mode.checkpoint_calls.items()
            )
        self.survivors.end(step.storages, first=step.first_number)

    def _retained(self, step: _Step) -> Iterator[RetainedGraph]:
        """Backwards that kept their graph for nobody."""
        if step.reached_older:
            return
        last = {r.site: (i, r) for i, r in enumerate(step.retained)}
        for site, (_, retained) in last.items():
            users = sum(bool(retained.numbers & numbers) for numbers in step.numbers_seen)
            if users > 1:
                continue
            held = sum(s.bytes for s in step.storages.all if s.is_saved and not s.kind and s.is_alive)
            num = sum(r.site == site for r in step.retained)
            yield RetainedGraph(source=site, bytes=held, num_calls=num)

    def _after_operator(self) -> None:
        """Read the machine's accounting where the tensors reach a new height."""
        step = self._step
        if step is None:
            return
        for device, live in step.storages.live.items():
            if live > _RISE * step.read_at.get(device, 0.0):
                step.read_at[device] = live
                if device == "cpu":
                    step.malloc_at_peak = malloc_state()
                    step.process.look()
                elif device.startswith("cuda:"):
                    step.device.look(int(device[5:]))

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Look at tensors without subclasses' code, and without warnings for what is looked at.

        Our own mistake ends the look at memory and nothing else: what was seen till then is told, with a note.
        """
        with warnings.catch_warnings(), without_functions():
            warnings.simplefilter("ignore")
            try:
                yield
            except Exception as e:  # noqa: BLE001  # ours, not the user's: the rest of the observation goes on
                self._is_off = self.survivors.is_over = True
                self._abort()
                self._observer.notes.append(f"memory was not watched to the end: {type(e).__name__}: {e}")

    def _abort(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.mode.leave()
            step.storages.close()
            step.process.stop()
            step.device.abort()
            self._observer.calls.is_deep = False

    # -- evidence ---------------------------------------------------------------------------------------------------------

    def evidence(self) -> tuple[Memory, ...]:
        """Memory of the host and of each device, with what grew."""
        return self.survivors.complete(self.memories)

    def uses(self) -> tuple[CallUse, ...]:
        """Calls of gc.collect and empty_cache by line."""
        return self.releases.uses(self._observer.seen)

    def facts(self) -> tuple[ModuleFact, ...]:
        """Recomputation in use, and optimizer state that serves nothing."""
        return self.recompute_facts + self.states.facts()


def _is_prepared(stored: Stored, tensor: torch.Tensor) -> bool:
    """Whether a model's input was made outside any module: a batch, and not what another model computed."""
    return not stored.module and not tensor.requires_grad and stored.phase in ("data", "transfer", "other", "forward")
