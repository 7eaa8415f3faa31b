"""One step's memory: its curve, its peak, and which lines created what is alive at it; and what stays alive from step to step.

The step is watched by a dispatch mode (profiling/memory/mode.py) that files every storage; what the machine's own accounting
has of the same step (resident size, the device's allocator) is stored beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NamedTuple

import msgspec
import torch

from flatout.check.observe.calls import RootModule
from flatout.check.observe.collector import BackwardListener, BatchListener, Collector, EndedStep, StepListener
from flatout.check.observe.memory.census import Census
from flatout.check.observe.memory.device import DeviceMemory
from flatout.check.observe.memory.graphs import AutogradGraph, next_number, node_of, tensors_in_sequences
from flatout.check.observe.memory.mode import MemoryMode
from flatout.check.observe.memory.optimizer_state import OptimizerStates
from flatout.check.observe.memory.parts import WatchedMemory, memories_of
from flatout.check.observe.memory.process import malloc_state, resident_bytes
from flatout.check.observe.memory.releases import Releases
from flatout.check.observe.memory.storages import Storages, Stored
from flatout.check.observe.memory.survivors import Survivors
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import Memory, RetainedGraph
from flatout.core.records.usage import ModuleFact
from flatout.core.runtime.patches import Patches
from flatout.core.tensors.nests import tensors_in

_RISE: Final = 1.02
"""The machine's accounting is read whenever the living bytes exceed those of the reading before by this factor."""
_BACKWARD_OPTIONS: Final = {"backward": (2, 3), "grad": (3, 4)}
"""Positions of retain_graph and create_graph in torch.autograd.backward and torch.autograd.grad (torch 2.11 to 2.13)."""


class Retained(NamedTuple):
    """A backward that retained its graph on purpose: its line and the numbers of its nodes."""

    site: int
    numbers: frozenset[int]


class _MemoryStep:
    """What is gathered while the step is watched."""

    def __init__(self, observation: ObservationState, after: Any) -> None:
        self.watched = WatchedMemory(Storages(observation.phase))
        self.storages, self.process = self.watched.storages, self.watched.process
        self.mode = MemoryMode(observation.sites, self.storages, module=observation.calls.module_path, after=after)
        self.read_at: dict[str, float] = {}
        self.device = DeviceMemory()
        self.first_number = 0
        self.backward_numbers: list[set[int]] = []
        self.retained: list[Retained] = []
        self.reached_older = False
        self.leaf_ids: set[int] = set()
        self.recomputes = False


class MemoryLook(Collector, StepListener, BatchListener, BackwardListener):
    """Follows the MEMORY step, and looks later at what outlived it."""

    def __init__(self, observation: ObservationState) -> None:
        self.memories: tuple[Memory, ...] = ()
        self.recompute_facts: tuple[ModuleFact, ...] = ()
        self.releases = Releases(observation.sites, observation.thread_id)
        self.states = OptimizerStates()
        self.survivors = Survivors(observation, judge=self.states.judge)
        self._observation = observation
        self._step: _MemoryStep | None = None
        self._is_off = False

    # -- the collector ----------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Watch the calls that give memory back."""
        self.releases.install(patches)

    def begin(self, mode: Mode) -> None:
        """Watch the memory step, or prepare to look for survivors."""
        self._abort()
        with self._undisturbed():
            is_compiled = self._observation.is_compiled  # interception would have dynamo give its frames up
            if mode is Mode.MEMORY and is_compiled:
                self._observation.notes.append(
                    "the script uses torch.compile: what is alive at the memory's peak was not recorded"
                )
            elif mode is Mode.MEMORY and not self._is_off:
                self._open()
            else:
                self.survivors.begin_step()

    def end(self, mode: Mode) -> None:
        """A closely watched step ended."""
        if self._observation.num_steps <= 1:
            self.releases.clear()
        with self._undisturbed():
            if mode is Mode.MEMORY and self._step is not None:
                self._close(self._step)
            elif mode is Mode.DEEP:
                self.survivors.look()

    def restart(self) -> None:
        """The step in progress is the best there is of its memory until the next such step."""
        if self._observation.mode not in (Mode.LIGHT, Mode.DONE):
            self.end(self._observation.mode)

    def remove(self) -> None:
        """Leave the mode if the observation ends within the step."""
        self._abort()
        self.survivors.is_over = True

    # -- events within steps ----------------------------------------------------------------------------------------------

    def on_batch(self, value: Any, *, root: RootModule | None) -> None:
        """Name the storages of batches."""
        step = self._step
        if step is None:
            return
        with self._undisturbed():
            for tensor in tensors_in(value):
                stored = step.storages.add(tensor)
                if stored is not None and not stored.kind and (root is None or _is_prepared(stored, tensor)):
                    stored.kind = "batch"

    def on_backward_start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        """Walk the graph that the backward is about to go through."""
        step = self._step
        if step is None:
            return
        with self._undisturbed():
            graph = AutogradGraph()
            first = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            graph.walk(node_of(t) for t in tensors_in_sequences(first))
            step.storages.add_saved(graph.saved)
            step.leaf_ids |= graph.leaf_ids
            step.recomputes |= graph.recomputes
            step.reached_older |= any(n < step.first_number for n in graph.numbers)
            step.backward_numbers.append(graph.numbers)
            retain, create = (
                args[i] if len(args) > i else kwargs.get(option)
                for i, option in zip(_BACKWARD_OPTIONS[name], ("retain_graph", "create_graph"), strict=True)
            )
            if retain and not create:
                site = self._observation.sites.of_frame(frame)
                step.retained.append(Retained(site, frozenset(graph.numbers)))
            graph.close()

    def on_backward_end(self) -> None:
        """The graph was walked before."""

    def on_step_end(self, step: EndedStep) -> None:
        """Look at what outlived earlier steps after a light step."""
        if step.mode is Mode.LIGHT and self.survivors.is_due():
            with self._undisturbed():
                self.survivors.look()

    # -- the step ---------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        observation = self._observation
        step = self._step = _MemoryStep(observation, self._after_operator)
        storages = step.storages
        census = Census()
        graph = census.graph()
        before = resident_bytes()
        for tensor in (*census.tensors, *graph.saved):
            stored = storages.add(tensor, is_old=True)
            if stored is not None and before is not None and stored.device == "cpu" and stored.bytes > before:
                stored.bytes = stored.resident_bytes = 0  # mapped from a file, and hardly in memory
        storages.name(census.roles())
        self.states.begin(census)
        graph.close()
        del census, graph
        step.first_number = next_number()
        self.survivors.begin(storages)
        if observation.is_device:
            step.device.start()
        step.watched.start()
        observation.calls.is_deep = True
        observation.calls.begin_deep()
        step.mode.enter()

    def _close(self, step: _MemoryStep) -> None:
        self._step = None
        observation = self._observation
        step.mode.leave()
        observation.calls.is_deep = False
        step.storages.close()
        step.process.stop()
        step.watched.device_peaks = step.device.stop() if observation.is_device else {}
        if step.mode.failure is not None:
            raise step.mode.failure
        census = Census()
        step.storages.name(census.roles())
        self.states.end(step.leaf_ids)
        del census
        step.watched.retained = tuple(self._retained(step))
        self.memories = memories_of(step.watched)
        if step.recomputes:
            self.recompute_facts = tuple(
                ModuleFact(name="recompute", module=module, kind="torch.utils.checkpoint", source=site)
                for site, module in step.mode.checkpoint_calls.items()
            )
        self.survivors.end(step.storages, first=step.first_number)

    def _retained(self, step: _MemoryStep) -> Iterator[RetainedGraph]:
        """Backwards whose retained graph nobody used."""
        if step.reached_older:
            return
        last = {r.site: (i, r) for i, r in enumerate(step.retained)}
        for site, (_, retained) in last.items():
            users = sum(bool(retained.numbers & numbers) for numbers in step.backward_numbers)
            if users > 1:
                continue
            saved_bytes = sum(s.bytes for s in step.storages.all if s.is_saved and not s.kind and s.is_alive)
            num = sum(r.site == site for r in step.retained)
            yield RetainedGraph(source=site, bytes=saved_bytes, num_calls=num)

    def _after_operator(self) -> None:
        """Read the machine's accounting where the tensors reach a new height."""
        step = self._step
        if step is None:
            return
        for device, live in step.storages.live.items():
            if live > _RISE * step.read_at.get(device, 0.0):
                step.read_at[device] = live
                if device == "cpu":
                    step.watched.malloc_at_peak = malloc_state()
                    step.process.look()
                elif device.startswith("cuda:"):
                    step.device.look(int(device[5:]))

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Look at tensors without subclasses' code, and without warnings for what is looked at.

        Our own mistake ends the look at memory and nothing else: what was observed until then is reported, with a note.
        """
        with warnings.catch_warnings(action="ignore"), torch._C.DisableTorchFunctionSubclass():
            try:
                yield
            except Exception as e:  # noqa: BLE001  # ours, not the user's: the rest of the observation goes on
                self._is_off = self.survivors.is_over = True
                self._abort()
                self._observation.notes.append(f"memory was not watched to the end: {type(e).__name__}: {e}")

    def _abort(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.mode.leave()
            step.storages.close()
            step.process.stop()
            step.device.abort()
            self._observation.calls.is_deep = False

    # -- evidence ---------------------------------------------------------------------------------------------------------

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `memory`, the calls that give memory back, and facts of recomputation and optimizer state."""
        uses = self.releases.uses(self._observation.num_steps)
        facts = self.recompute_facts + self.states.facts()
        return msgspec.structs.replace(
            evidence,
            memory=self.survivors.complete(self.memories),
            uses=evidence.uses + uses,
            module_facts=evidence.module_facts + facts,
        )


def _is_prepared(stored: Stored, tensor: torch.Tensor) -> bool:
    """Whether a model's input was created outside any module: a batch, and not what another model computed."""
    return not stored.module and not tensor.requires_grad and stored.phase in ("data", "transfer", "other", "forward")
