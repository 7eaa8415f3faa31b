"""One observation from start to Evidence: for a script, or for a step function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final

import msgspec

from flatout.profiling.collectors.escapes import Escapes
from flatout.profiling.collectors.gradients import RepeatedGradients
from flatout.profiling.collectors.module_facts import ModuleFacts
from flatout.profiling.collectors.reads import uses_cuda
from flatout.profiling.collectors.repeats import RepeatedCalls
from flatout.profiling.collectors.settings import environment
from flatout.profiling.collectors.values import Values
from flatout.profiling.evidence import assemble, honest_steps, reads
from flatout.profiling.evidence.accounts import OperatorTable
from flatout.profiling.evidence.spans import timeline_of
from flatout.profiling.evidence.workload import workload_of
from flatout.profiling.memory.look import MemoryLook
from flatout.profiling.observer import Observer
from flatout.profiling.place import Place
from flatout.profiling.running.progress import ProgressFile
from flatout.profiling.steps.schedule import Schedule
from flatout.profiling.trials.runner import run_trials
from flatout.profiling.trials.scene import Scene
from flatout.records.evidence import Evidence
from flatout.records.hardware import Machine
from flatout.records.span import StepTimeline
from flatout.records.trial import Trial, TrialResult
from flatout.records.usage import CallUse

FEWEST_STEPS: Final = 12
"""A script with fewer steps may end before the deep steps are done."""

Propose = Callable[[Evidence], Iterable[Trial]]
"""The thinking half's part in a capture: which trials would price what the Evidence suggests."""


class Capture:
    """Observes the thread that made it. Call `start`, let the code run, call `finish`. `place` tells the rank among several.

    `publish` receives the Evidence as soon as the observation is complete, while the script may still be running, and never
    more than once before `finish`. `draft` receives what there is after the close looks, in case the process is killed later.
    """

    def __init__(
        self,
        *,
        command: tuple[str, ...],
        cwd: str,
        schedule: Schedule,
        machine: Machine | None,
        propose: Propose,
        user_root: str | None = None,
        publish: Callable[[Evidence], None] | None = None,
        progress: ProgressFile | None = None,
        place: Place | None = None,
        draft: Callable[[Evidence], None] | None = None,
    ) -> None:
        self._command = command
        self._cwd = cwd
        self._machine = machine
        self._propose = propose
        self._publish = publish
        self._draft = draft
        self._is_hurried = False
        self._results: list[TrialResult] = []
        self._other_s = 0.0
        self._last: Evidence | None = None
        self.observer = Observer(schedule, user_root=user_root, pause=self._pause, complete=self._complete, place=place)
        self.memory = MemoryLook(self.observer)
        self.observer.collectors += (self.memory,)
        self.observer.watch = self.memory
        self._escapes, self._values = Escapes(), Values()
        self._module_facts = ModuleFacts(self.observer.calls, self.observer.optimizing)
        self._repeats = RepeatedCalls(self.observer.calls, self.observer.sites)
        self._gradients = RepeatedGradients(self.observer.deep, self.observer.sites)
        self.observer.collectors += (self._escapes, self._module_facts, self._repeats, self._gradients)
        self.observer.root_watchers += (self._module_facts, self._repeats)
        self.observer.inner_watcher = self._repeats
        self.observer.deep.inspectors += [self._escapes.inspect, self._values.inspect]
        self.observer.progress = progress

    def start(self) -> None:
        """Begin to observe."""
        if self.observer.progress is not None:
            self.observer.progress.tell("waiting for a step")
        self.observer.install()

    @property
    def is_complete(self) -> bool:
        """Whether enough was seen."""
        return self.observer.is_complete

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one call of a step function, whose borders are the steps."""
        self.observer.begin_call()
        yield
        self.observer.end_call()

    def finish(self, *, exit: str, exit_code: int | None) -> Evidence:
        """End the observation (if it has not ended by itself), run the trials that are left, and return the Evidence."""
        self._is_hurried = self.observer.ranks is not None and bool(exit_code)  # the other ranks are being ended now
        if self._last is None:
            self._last = self._conclude()
        return msgspec.structs.replace(self._last, exit=exit, exit_code=exit_code)

    def snapshot(self, *, exit: str, exit_code: int | None) -> Evidence:
        """What there is now, for a process that ends at once; nothing is tried or taken away any more."""
        evidence = self._last if self._last is not None else self._evidence()
        return msgspec.structs.replace(evidence, exit=exit, exit_code=exit_code)

    def _complete(self) -> None:
        """The observer has seen enough; the script goes on without it."""
        if self._last is None:
            self._last = self._conclude()
            if self._publish is not None:
                self._publish(self._last)

    def _conclude(self) -> Evidence:
        self.observer.remove()
        self._pause(self.observer)
        began = perf_counter()
        evidence = self._evidence()
        self.observer.feeding.close()
        self._other_s += perf_counter() - began
        return evidence

    def _pause(self, observer: Observer) -> None:
        """Ask for trials and run those that have not run yet, within what is left of the budget."""
        began = perf_counter()
        evidence = self._evidence()
        done = {r.trial for r in self._results}
        wanted = [t for t in dict.fromkeys(self._propose(evidence)) if t not in done]
        self._other_s += perf_counter() - began
        left = observer.schedule.trials_budget_s - observer.trials_s
        if wanted and left > 0 and not self._is_hurried:
            began = perf_counter()
            if observer.progress is not None:
                observer.progress.tell("trials", num_steps=observer.seen)
            if observer.ranks is not None:
                observer.ranks.fence(True)
            try:
                self._results += run_trials(wanted, self._scene(), budget_s=left)
            finally:
                if observer.ranks is not None:
                    observer.ranks.fence(False)
            observer.trials_s += perf_counter() - began
        if self._draft is not None and not observer.is_complete:
            self._draft(self._evidence())

    def _scene(self) -> Scene:
        observer = self.observer
        table = OperatorTable(observer)
        _, roots = assemble.models_of(observer)
        unused = assemble.unused_gradients_of(observer, table)
        return Scene(
            examples=table.examples,
            num_calls=[o.num_calls for o in table.operators],
            outputs=[k.outputs[0] if k.outputs else None for k in table.keys],
            roots=roots,
            optimizers=list(observer.optimizing.watched.values()),
            loaders=list(observer.feeding.loaders.values()),
            unused_modules=tuple(path for u in unused for path in u.modules),
            device="cuda" if observer.is_device else "cpu",
            limit_s=5.0,
            compiled=observer.compiling.compiled,
        )

    def _notes(self) -> Iterator[str]:
        """What could not be seen, and why."""
        observer = self.observer
        yield from observer.notes
        yield from filter(None, (observer.sampler.failure, observer.uses.failure))
        if observer.kernels.failure:
            yield observer.kernels.failure
        if (processes := observer.processes.note()) is not None:
            yield processes
        if observer.ranks is not None:
            yield from observer.ranks.notes()
        if 0 < observer.seen < FEWEST_STEPS and not observer.deep.steps:
            yield (
                f"only {observer.seen} steps, too few to look inside one: no operators, lines or trials; "
                f"let the script make {FEWEST_STEPS} or more"
            )

    def _timeline(self, table: OperatorTable) -> StepTimeline | None:
        """A typical step on the host, and on the device the step that its kernels were recorded in."""
        timeline, kernels = timeline_of(self.observer, table), self.observer.kernels
        if timeline is None or not kernels.spans:
            return timeline
        return msgspec.structs.replace(
            timeline,
            spans=(*timeline.spans, *kernels.spans),
            num_left_out=timeline.num_left_out + kernels.num_spans_left_out,
        )

    def _uses(self) -> tuple[CallUse, ...]:
        """Calls worth knowing about, the dearest first."""
        observer = self.observer
        uploads = reads.uploads_of(observer)
        rows = observer.uses.rows(
            num_steps=observer.seen, reads=observer.reads.seen, num_read_steps=observer.reads.num_steps
        )
        return tuple(sorted((*rows, *uploads, *self.memory.uses()), key=lambda u: -u.seconds))

    def _evidence(self) -> Evidence:
        observer = self.observer
        table = OperatorTable(observer, self._escapes.keys if self._escapes.is_known else None)
        steps = honest_steps.steps_of(observer, table.device_s)
        models, roots = assemble.models_of(observer)
        workload = workload_of(
            self._command,
            self._cwd,
            roots,
            observer.optimizing.optimized_ids(),
            observer.settings.read(environment()),
            is_device=observer.is_device if observer.kind != "none" else uses_cuda(),
            world_size=observer.ranks.place.world_size if observer.ranks is not None else 1,
        )
        lines = assemble.lines_of(observer, table, steps.step_s)
        return Evidence(
            workload=workload,
            machine=self._machine,
            steps=steps,
            sources=observer.sites.table(),
            callers=assemble.callers_of(observer),
            backward_sources=tuple(sorted(s for s in observer.deep.backward_sites if s >= 0)),
            float64_sources=tuple(
                sorted(
                    {
                        s
                        for k, s in observer.settings.float64_arrays.items()
                        if k in observer.deep.outside_float64 and s >= 0
                    }
                )
            ),
            operators=table.operators,
            trace=table.trace,
            lines=lines,
            host_reads=reads.host_reads_of(observer),
            constants=assemble.constants_of(observer, table),
            models=models,
            optimizers=assemble.optimizers_of(observer),
            unused_gradients=assemble.unused_gradients_of(observer, table),
            loaders=assemble.loaders_of(observer),
            paddings=assemble.paddings_of(observer),
            recurrences=assemble.recurrences_of(observer, table),
            device_step=honest_steps.device_step_of(observer, steps),
            memory=self.memory.evidence(),
            uses=self._uses(),
            compilation=observer.compiling.record(observer.timeline.steps),
            timeline=self._timeline(table),
            fresh_pages=observer.faults.evidence(len(observer.deep.steps)),
            module_facts=(
                *self.memory.facts(),
                *self._module_facts.facts(),
                *self._repeats.facts(),
                *self._gradients.facts(),
                *self._values.facts(),
            ),
            distributed=observer.ranks.record(lines, steps.phases, steps.step_s) if observer.ranks else None,
            trials=tuple(self._results),
            observing=assemble.observing_of(observer, table, self._other_s),
            notes=tuple(self._notes()),
        )
