"""One observation from start to Evidence: for a script, or for a step function."""

from __future__ import annotations

import platform
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final

import msgspec
import torch
from torch.optim import Optimizer

from flatout.check.observe.accelerator import uses_cuda
from flatout.check.observe.calls import RootModule
from flatout.check.observe.collectors.compiling import CompileEvents
from flatout.check.observe.collectors.loaders import LoaderWatch
from flatout.check.observe.evidence import assemble, honest_steps
from flatout.check.observe.evidence.accounts import OperatorTable
from flatout.check.observe.evidence.spans import timeline_of
from flatout.check.observe.observer import CLOSE_LOOKS, LoopObserver
from flatout.check.observe.steps.schedule import Mode, Schedule
from flatout.check.trials.context import Scene
from flatout.check.trials.runner import run_trials
from flatout.check.trials.time_limit import OutOfTime
from flatout.core.records.distributed import Place
from flatout.core.records.evidence import Evidence
from flatout.core.records.hardware import Machine
from flatout.core.records.trial import TimeCompiled, Trial, TrialResult
from flatout.core.records.workload import Source, Workload
from flatout.core.runtime.cores import usable_cores
from flatout.core.runtime.garbage_collector import collections_put_off
from flatout.core.runtime.progress import ProgressFile
from flatout.core.runtime.script import INTERRUPTED
from flatout.core.secrets import redacted_text

FEWEST_STEPS: Final = 12
"""A script with fewer steps may end before the deep steps are done."""

Propose = Callable[[Evidence], Iterable[Trial]]
"""The thinking half's part in a capture: which trials would price what the Evidence suggests."""


class Capture:
    """Observes the thread that created it. Call `start`, let the code run, call `finish`. `place` is the rank among several.

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
        self._is_trying = False
        self._results: list[TrialResult] = []
        self._start_s = self._other_s = 0.0
        self._step_s = 0.0
        self._last: Evidence | None = None
        self._before_trials: Evidence | None = None
        """What was known when trials were asked for last."""
        self._progress = progress
        self.observer = LoopObserver(
            schedule,
            user_root=user_root,
            pause=self._pause,
            complete=self._complete,
            place=place,
            progress=progress,
        )
        self.observation = self.observer.observation

    def start(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Begin to observe the training steps; `optimizers` are those that were constructed before, where they are known."""
        began = perf_counter()
        if self._progress is not None:
            self._progress.write("waiting for a step")
        self.observation.optimizing.await_steps_of(optimizers)
        self.observer.install()
        self._start_s = perf_counter() - began

    @property
    def is_complete(self) -> bool:
        """Whether enough steps were observed."""
        return self.observer.is_complete

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one call of a step function, whose borders are the steps."""
        self.observer.begin_call()
        yield
        self.observer.end_call()

    def finish(self, *, exit: str, exit_code: int | None) -> Evidence:
        """End the observation (if it has not ended by itself), run the trials that are left, and return the Evidence."""
        # The other ranks are being ended now; or a person waits for the report.
        is_urgent = exit_code == INTERRUPTED or (self.observation.place is not None and bool(exit_code))
        self._is_hurried = self._is_hurried or is_urgent
        if self._last is None:
            self._last = self._conclude()
        return msgspec.structs.replace(self._last, exit=redacted_text(exit), exit_code=exit_code)

    def abandon(self) -> None:
        """Take every watch away without Evidence of what there was; nothing is left to do where there is some already."""
        if self._last is None:
            self.observer.remove()
            for collector in self.observation.collectors:
                collector.close()

    def hurry(self) -> None:
        """Finish soon: no trial is begun any more, and the one that runs is given up."""
        self._is_hurried = True
        if self._is_trying:
            raise OutOfTime

    def added_s(self) -> float:
        """Seconds that observing has added to the run, up to the Evidence; 0.0 before there is one.

        Of steps that were watched closely, what they took beyond the median of ordinary ones counts.
        """
        if self._last is None:
            return 0.0
        cost, steps = self._last.observing, self.observation.timeline.steps
        looks = [s for s in steps if s.mode in (m.value for m in CLOSE_LOOKS)]
        in_looks_s = sum(s.duration_s - self._last.steps.step_s for s in looks)
        between_s = cost.deep_s - sum(s.duration_s for s in looks if s.mode == Mode.DEEP.value)
        light_s = cost.light_fraction * self.observation.times.light_s
        return self._start_s + light_s + max(0.0, in_looks_s) + max(0.0, between_s) + cost.trials_s + self._other_s

    def snapshot(self, *, exit: str, exit_code: int | None) -> Evidence:
        """What there is now, for a process that ends at once; nothing is tried or taken away any more."""
        evidence = self._last if self._last is not None else self._evidence()
        return msgspec.structs.replace(evidence, exit=redacted_text(exit), exit_code=exit_code)

    def _complete(self) -> None:
        """The schedule is done; the script goes on unobserved."""
        if self._last is None:
            try:
                self._last = self._conclude()
            except Exception as e:  # noqa: BLE001  # ours: what was known before is reported, and the script gets its end
                where = traceback.extract_tb(e.__traceback__)[-1]
                self.observation.notes.append(
                    f"what came last could not be added: {type(e).__name__}: {e} ({where.name}, line {where.lineno})"
                )
                self._last = msgspec.structs.replace(
                    self._before_trials or self._from_steps(), notes=tuple(self._notes())
                )
            if self._publish is not None:
                self._publish(self._last)

    def _conclude(self) -> Evidence:
        self.observer.remove()
        self._pause()
        began = perf_counter()
        with collections_put_off():
            evidence = self._evidence()
        for collector in self.observation.collectors:
            collector.close()
        self._other_s += perf_counter() - began
        return evidence

    def _pause(self) -> None:
        """The time for trials, and for a draft of what is known where somebody keeps one.

        Collectors look at live objects here, which may be gone when the script has ended.
        """
        if self.observer.schedule.trials_budget_s:
            self._try()
        elif self._before_trials is None:
            began = perf_counter()
            self._before_trials = self._evidence()
            self._other_s += perf_counter() - began
        if self._draft is not None and not self.observer.is_complete:
            began = perf_counter()
            self._draft(self._evidence())
            self._other_s += perf_counter() - began

    def _try(self) -> None:
        """Ask for trials and run those that have not run yet, within what is left of the budget."""
        observation = self.observation
        began = perf_counter()
        evidence = self._before_trials = self._evidence()
        done = {r.trial for r in self._results}
        wanted = [t for t in dict.fromkeys(self._propose(evidence)) if t not in done]
        self._other_s += perf_counter() - began
        self._step_s = evidence.steps.step_s
        left = self.observer.schedule.trials_limit_s(self._step_s) - observation.times.trials_s
        if not wanted or left <= 0 or self._is_hurried:
            return
        began = perf_counter()
        if self._progress is not None:
            self._progress.write("trials", num_steps=observation.num_steps)
        self._is_trying = True
        try:
            self._results += run_trials(
                wanted,
                self._scene(),
                budget_s=left,
                compile_budget_s=self.observer.schedule.compile_limit_s,
                is_hurried=lambda: self._is_hurried,
            )
        finally:
            self._is_trying = False
        observation.times.trials_s += perf_counter() - began

    def _trials_budget_s(self) -> float:
        """Seconds that trials were allowed, those for compiling included where that was tried."""
        schedule = self.observer.schedule
        has_compiled = any(isinstance(r.trial, TimeCompiled) for r in self._results)
        return schedule.trials_limit_s(self._step_s) + has_compiled * schedule.compile_limit_s

    def _scene(self) -> Scene:
        observation = self.observation
        table = OperatorTable(observation)
        _, roots = assemble.models_of(observation)
        unused = assemble.unused_gradients_of(observation, table)
        return Scene(
            examples=table.examples,
            num_calls=[o.num_calls for o in table.operators],
            outputs=[k.outputs[0] if k.outputs else None for k in table.keys],
            roots=roots,
            optimizers=list(observation.optimizing.watched.values()),
            loaders=list(observation.collector(LoaderWatch).loaders.values()),
            unused_modules=tuple(path for u in unused for path in u.modules),
            device="cuda" if observation.is_device else "cpu",
            limit_s=5.0,
            operators=table.operators,
            sources=observation.sites.table(),
            compiled=observation.collector(CompileEvents).compiled,
        )

    def _notes(self) -> Iterator[str]:
        """What could not be observed, and why."""
        observation = self.observation
        yield from observation.notes
        if observation.sampler.failure:
            yield observation.sampler.failure
        for collector in observation.collectors:
            yield from collector.notes()
        if 0 < observation.num_steps < FEWEST_STEPS and not observation.deep.steps:
            yield (
                f"only {observation.num_steps} steps, too few to look inside one: no operators, lines or trials; "
                f"let the script make {FEWEST_STEPS} or more"
            )

    def _evidence(self) -> Evidence:
        evidence = self._from_steps()
        for collector in self.observation.collectors:
            evidence = collector.fill(evidence)
        return msgspec.structs.replace(
            evidence,
            sources=tuple(_redacted(source) for source in self.observation.sites.table()),
            uses=tuple(sorted(evidence.uses, key=lambda u: -u.seconds)),
            notes=tuple(map(redacted_text, self._notes())),
        )

    def _from_steps(self) -> Evidence:
        """The Evidence without the collectors' parts: timing, operators, lines, models and optimizers."""
        observation = self.observation
        table = OperatorTable(observation)
        steps = honest_steps.steps_of(observation, table.device_s)
        models, roots = assemble.models_of(observation)
        return Evidence(
            workload=_workload_of(
                self._command,
                self._cwd,
                roots,
                observation.optimizing.optimized_ids(),
                is_device=observation.is_device if observation.kind != "none" else uses_cuda(),
                world_size=observation.place.world_size if observation.place is not None else 1,
            ),
            machine=self._machine,
            steps=steps,
            callers=assemble.callers_of(observation),
            backward_sources=tuple(sorted(s for s in observation.deep.backward_sites if s >= 0)),
            operators=table.operators,
            trace=table.trace,
            lines=assemble.sampled_lines_of(observation, table, steps),
            constants=assemble.constant_lines_of(observation, table),
            models=models,
            optimizers=assemble.optimizers_of(observation),
            unused_gradients=assemble.unused_gradients_of(observation, table),
            paddings=assemble.paddings_of(observation),
            recurrences=assemble.recurrences_of(observation, table),
            timeline=timeline_of(observation, table),
            trials=tuple(self._results),
            observing=assemble.observing_of(
                observation,
                table,
                light_fraction=self.observer.light_fraction(),
                other_s=self._other_s,
                trials_budget_s=self._trials_budget_s(),
            ),
        )


def _redacted(source: Source) -> Source:
    """A source line without the credential that may stand in it; the line itself, nearly always."""
    text = redacted_text(source.text)
    return source if text == source.text else msgspec.structs.replace(source, text=text)


def _workload_of(
    command: tuple[str, ...],
    cwd: str,
    roots: list[RootModule],
    optimized: set[int],
    *,
    is_device: bool,
    world_size: int = 1,
) -> Workload:
    """What ran, with the versions and the number of parameters of all root modules (shared ones counted once)."""
    parameters = {id(p): p for r in roots if (m := r.module()) is not None for p in m.parameters()}
    return Workload(
        command=command,
        cwd=cwd,
        python=platform.python_version(),
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name() if is_device and torch.cuda.is_initialized() else "cpu",
        num_cores=usable_cores(),
        num_threads=torch.get_num_threads(),
        world_size=world_size,
        num_parameters=sum(p.numel() for p in parameters.values()),
        trained_parameters=sum(p.numel() for key, p in parameters.items() if key in optimized),
    )
