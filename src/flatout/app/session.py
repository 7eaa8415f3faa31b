"""The verbs: each a few composed lines over the rooms."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from flatout.app.results import ReportedResult
from flatout.check.compare import ComparedRun, comparison_of
from flatout.check.diagnosis import diagnose
from flatout.check.merge_ranks import merge
from flatout.check.stakes import proposed_trials
from flatout.core.errors import CaptureError, EditError, RecordError, UsageError
from flatout.core.files import write_whole_file
from flatout.core.records.comparison import Comparison
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis
from flatout.core.records.hardware import Machine
from flatout.core.records.plan import Plan, text_root
from flatout.core.records.record import Record, to_json
from flatout.core.records.trial import TimeCompiled, Trial
from flatout.core.registry import reductions, rules
from flatout.report.document import Block

if TYPE_CHECKING:
    from flatout.check.observe.steps.schedule import Schedule
    from flatout.core.records.shrink import Order, Shrunk
    from flatout.core.runtime.script import Script
    from flatout.tune.verify.side_process import Request

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True, repr=False)
class Checked(ReportedResult):
    """What `check` returns: the evidence and its diagnosis. Print it for the report, or leave it as a cell's last value."""

    evidence: Evidence
    diagnosis: Diagnosis

    def blocks(self) -> list[Block]:
        """The report of `flatout check`, as a terminal shows it."""
        from flatout.report.parts.diagnosis import diagnosis_blocks

        return diagnosis_blocks(self.evidence, self.diagnosis)

    def short_blocks(self) -> list[Block]:
        """Headline, phases and causes; the rest is folded away."""
        from flatout.report.parts.diagnosis import short_diagnosis_blocks

        return short_diagnosis_blocks(self.evidence, self.diagnosis)

    def page(self) -> bytes:
        """The page that `flatout check --html` writes."""
        from flatout.report.html import html_report

        return html_report(self.evidence, self.diagnosis)

    def record_json(self) -> bytes:
        """What `flatout check --json` writes, which `flatout report` and `flatout compare` read."""
        from flatout.report.json_report import json_report

        return json_report(self.evidence, self.diagnosis)


class Observation(Record, frozen=True, kw_only=True):
    """A request to observe a script in a fresh process: what the parent tells the child, and where the Evidence goes.

    The child keeps writing how far it has come to `progress_path`, unless that is empty.
    """

    target: str
    kind: Literal["script", "module"]
    arguments: tuple[str, ...]
    command: tuple[str, ...]
    evidence_path: str
    progress_path: str = ""
    machine_path: str
    observe_s: float
    effort: float = 1.0
    """The share of the usual budgets that close looks and trials may take."""
    has_trials: bool = True
    is_for_search: bool = False
    """A search follows, which tries each lever in processes of its own: on a device compiling is left to it."""
    stop: bool
    """Whether the script is ended when the observation is complete; of several ranks each goes on until it is ended."""
    rank: int = 0
    world_size: int = 1
    """Above 1 this process is one of several that train together: it writes its own Evidence, to be merged with the others'."""


def check(
    step: Callable[[Batch], object],
    batches: Iterable[Batch],
    *,
    observe_s: float = 30.0,
    machine: Machine | None = None,
) -> Checked:
    """Observe `step(batch)` over `batches`, and report where its time goes and what would make it faster.

    What `step` computes, the random streams and global switches stay as they are.

    Args:
        step: One training or inference step.
        batches: What `step` is called with, at least ten of them.
        observe_s: Seconds of light observation, after which no more batches are drawn.
        machine: What `flatout.measure_machine()` returned; without it the report has no roofline.

    Returns:
        The evidence and its diagnosis; print it for the report.

    Raises:
        CaptureError: `batches` is empty. What `step` raises passes as it is.
    """
    from flatout.check.capture import Capture
    from flatout.check.observe.steps.schedule import Schedule

    capture = Capture(
        command=(f"{step.__module__}.{getattr(step, '__qualname__', type(step).__name__)}",),
        cwd=os.getcwd(),
        schedule=Schedule(observe_s=observe_s),
        machine=machine,
        propose=propose_trials,
    )
    capture.start()
    error: BaseException | None = None
    try:
        for batch in batches:
            with capture.step():
                step(batch)
            if capture.is_complete:
                break
    except BaseException as e:
        error = e
        raise
    finally:
        evidence = capture.finish(exit="finished" if error is None else repr(error), exit_code=None)
    if not evidence.steps.num_observed:
        raise CaptureError("`batches` gave no batch, so no step ran; pass an iterable with at least ten batches")
    return Checked(evidence=evidence, diagnosis=diagnose(evidence, rules()))


def evidence_in(paths: Sequence[Path]) -> Evidence:
    """The Evidence in files that flatout wrote, or in traces of torch.profiler: one, one for each rank, or a folder of them.

    Raises RecordError when a file cannot be read or is neither.
    """
    from flatout.check.traces.kineto import MOST_BYTES, is_trace
    from flatout.check.traces.ranks import evidence_of_bytes, evidence_of_files, files_in
    from flatout.report.json_report import read_evidence

    first, *others = files = files_in(paths)
    try:
        if first.stat().st_size > MOST_BYTES:
            return evidence_of_files(files)  # which says that it is too large
    except OSError:
        pass  # reading it says what is wrong
    data = _bytes_of(first)
    if is_trace(data):
        return evidence_of_files(files) if others else evidence_of_bytes(data, first)
    found = []
    for file, contents in chain([(first, data)], ((file, _bytes_of(file)) for file in others)):
        try:
            found.append(read_evidence(contents))
        except RecordError as e:
            raise RecordError(f"'{file}': {e}") from e
    return merge(found) if others else found[0]


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise RecordError(
            f"cannot read '{path}': {e.strerror or e}; give the file that --json wrote, or a trace of torch.profiler"
        ) from e


def diagnose_all(evidence: Evidence) -> Diagnosis:
    """Diagnose Evidence, captured here or elsewhere, by every rule that is installed."""
    return diagnose(evidence, rules())


def compare_runs(before: Evidence, after: Evidence, *, fail_if_slower: float | None = None) -> Comparison:
    """What changed from one run to another, both judged by the rules that are installed.

    `fail_if_slower` is the fraction by which a step may be slower (0.05 for 5 %); the comparison then holds a decision.
    Raises UsageError when one of the runs has no timed step.
    """
    one, two = (ComparedRun(evidence, diagnose_all(evidence)) for evidence in (before, after))
    return comparison_of(one, two, threshold=fail_if_slower)


def observe_script(observation: Observation, script: Script, machine: Machine | None) -> int:
    """Run `script` under observation in this process, write its Evidence, and return the exit code python would give."""
    from flatout.check.capture import Capture
    from flatout.core.records.distributed import Place
    from flatout.core.runtime.progress import ProgressFile
    from flatout.core.runtime.script import end_script, mute, run_script, writing_when_terminated

    path, is_alone = Path(observation.evidence_path), observation.world_size == 1

    def written(evidence: Evidence) -> bytes:
        return to_json(msgspec.structs.replace(evidence, notes=(*script.notes, *evidence.notes)))

    def write(evidence: Evidence) -> None:
        write_whole_file(path, written(evidence))

    def publish(evidence: Evidence) -> None:
        write(evidence)
        # one rank that ends leaves the others waiting; who started them ends them all
        if observation.stop and is_alone:
            mute()
            end_script()

    capture = Capture(
        command=observation.command,
        cwd=os.getcwd(),
        schedule=_schedule_of(observation) if is_alone else _schedule_of_rank(observation),
        machine=machine,
        propose=_propose_before_search if observation.is_for_search else propose_trials,
        user_root=script.root,
        publish=publish,
        progress=ProgressFile(Path(observation.progress_path)) if observation.progress_path else None,
        place=None if is_alone else Place(observation.rank, observation.world_size),
        draft=lambda evidence: write_whole_file(draft_path(path), written(evidence)),
    )

    def write_now(number: int) -> None:
        write(capture.snapshot(exit=ended_by(number), exit_code=128 + number))

    with writing_when_terminated(write_now, hurry=capture.hurry) as ending:
        capture.start()
        outcome = run_script(script)
        ending.begin()
        write(capture.finish(exit=outcome.exit, exit_code=outcome.exit_code))
    return outcome.exit_code


def import_for_side() -> None:
    """Import all that `run_side` needs before it comes to the script, and nothing that starts threads or a device."""
    with suppress(ImportError):
        import numpy  # noqa: F401  # seeded with the others
    with suppress(ImportError):
        import flatout.tune.rewrite.source  # half a second: libcst, with which levers change texts
    import torch._dynamo  # noqa: F401  # a second, at the first optimizer that is made

    import flatout.app.plans
    import flatout.tune.apply
    import flatout.tune.verify.ordered_draws
    import flatout.tune.verify.rounding_noise
    import flatout.tune.verify.side  # noqa: F401


def run_side(request: Request, script: Script, *, orders: int, answers: int) -> int:
    """Run `script` as one side of a proof, taking its steps on order; the exit code python would give.

    `orders` and `answers` are the file descriptors of the pipes to the parent.
    """
    from flatout.app.plans import read_plan
    from flatout.core.runtime.patches import Patches
    from flatout.core.runtime.script import end_script, run_script
    from flatout.tune.apply import applied
    from flatout.tune.verify.conditions import SidePrecision, seed_all
    from flatout.tune.verify.losses import FirstLosses, joined_losses
    from flatout.tune.verify.ordered_draws import ordered_draws
    from flatout.tune.verify.recording import Recorder
    from flatout.tune.verify.rounding_noise import RoundingNoise
    from flatout.tune.verify.side import Orders, ProofSide

    patches = Patches()
    if request.seed is not None:
        seed_all(request.seed, patches)
    precision = SidePrecision(request.dtype)
    side = ProofSide(
        Orders.of_descriptors(orders, answers),
        Recorder(Path(request.folder)) if request.folder else None,
        num_recorded=request.num_recorded,
        precision=precision,
        user_root=script.root,
        environment_answers=Path(request.environment_answers) if request.environment_answers else None,
    )
    plan = read_plan(Path(request.plan)) if request.plan else Plan()
    means: list[float] = []

    def end_with(mean: float) -> None:
        means.append(mean)
        end_script()

    losses = FirstLosses(request.num_losses, end_with, each=joined_losses(plan.lever))
    began_s = perf_counter()
    try:
        noise = RoundingNoise(request.noise_seed) if request.noise_seed else nullcontext()
        draws = ordered_draws() if request.has_ordered_draws else nullcontext()
        root = str(text_root(plan, Path(script.file).resolve()))
        with applied(plan, root=root, texts=request.texts) as hooks, precision.surroundings(), draws, noise:
            script = script.with_code(hooks.code_of(script.file))
            side.missed = lambda: tuple(p.id for p in plan.lever if p.id not in hooks.done)
            if not request.is_whole:
                side.install()
            elif request.num_losses:
                losses.install()
            outcome = run_script(script)
            side.remove()
            losses.remove()
    except EditError as e:
        side.ended(str(e))
        return 2
    finally:
        patches.undo()
    sys.stdout.flush()
    side.ended(
        "" if outcome.exit_code == 0 else outcome.exit,
        seconds=perf_counter() - began_s,
        num_losses=losses.num_losses_so_far,
        mean_loss=next(iter(means), None),
    )
    return outcome.exit_code


def ended_by(number: int) -> str:
    """How the Evidence says that a signal ended the script.

    >>> ended_by(15)
    'ended by SIGTERM'
    """
    try:
        return f"ended by {signal.Signals(number).name}"
    except ValueError:  # real-time signals have no names
        return f"ended by signal {number}"


def draft_path(path: Path) -> Path:
    """Where a process writes what it has observed so far, in case it is killed before it can write `path`."""
    return path.with_suffix(".draft")


def _schedule_of(observation: Observation) -> Schedule:
    from flatout.check.observe.steps.schedule import Schedule

    usual, effort = Schedule(), observation.effort
    of_trials = effort if observation.has_trials else 0.0
    return Schedule(
        observe_s=observation.observe_s,
        deep_budget_s=effort * usual.deep_budget_s,
        trials_budget_s=of_trials * usual.trials_budget_s,
        compile_budget_s=of_trials * usual.compile_budget_s,
    )


def _schedule_of_rank(observation: Observation) -> Schedule:
    """Close looks at the same steps on all ranks, so by counts alone; trials on rank 0, whose findings are reported."""
    from flatout.check.observe.steps.schedule import Schedule

    usual = Schedule()
    return Schedule(
        observe_s=observation.observe_s,
        deep_budget_s=float("inf"),
        trials_budget_s=usual.trials_budget_s if observation.rank == 0 and observation.has_trials else 0.0,
        num_settle=3,
    )


def propose_trials(evidence: Evidence) -> tuple[Trial, ...]:
    """What the installed rules want tried on what was observed."""
    return proposed_trials(evidence, rules())


def _propose_before_search(evidence: Evidence) -> tuple[Trial, ...]:
    """Trials of a script that a search follows: on a device one that compiles takes as long as a comparison would."""
    is_device = evidence.workload.device != "cpu"
    return tuple(t for t in propose_trials(evidence) if not (is_device and isinstance(t, TimeCompiled)))


def shrink_named(
    order: Order,
    command: Sequence[str],
    *,
    budget: str,
    budget_s: float,
    limit_s: float,
    out: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[Shrunk, str]:
    """The cheapest model that keeps its metric, each composition tried in a process of its own: `command ORDER ANSWER`.

    `budget` is what of the metric may be lost ('1%', or '0.01' in its own unit), `budget_s` the time to try things in, `limit_s`
    that of one composition; what was selected is written to `out`.

    Returns:
        What was found, and why it could not be written ('' where it was, or need not).

    Raises:
        PlanError: The model as it is cannot be measured.
        UsageError: It could not be written either.
    """
    from flatout.core.records.allowance import Allowance
    from flatout.shrink.compose.shrink import ShrinkSettings, find_cheapest
    from flatout.shrink.compose.subprocess_trials import SubprocessTrials

    bench = SubprocessTrials(order, command, limit_s=limit_s)
    settings = ShrinkSettings(
        model=order.model,
        objective=order.objective,
        allowance=Allowance.of(budget, name="--accuracy-loss"),
        is_cost=order.is_cost,
        budget_s=budget_s,
    )
    if out is not None and (because := bench.why_not_writable()):
        raise UsageError(because)
    found, composition = find_cheapest(bench, reductions(), settings, on_progress=on_progress)
    return found, "" if out is None else bench.write_shrunk(composition, out).because
