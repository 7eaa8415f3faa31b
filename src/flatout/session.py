"""The verbs: each a few composed lines over the rooms."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from flatout.comparison import Run, compare
from flatout.diagnosis import diagnose, proposals
from flatout.errors import CaptureError, EditError, PlanError, RecordError
from flatout.merging import merge
from flatout.records.comparison import Comparison
from flatout.records.evidence import Evidence
from flatout.records.finding import Diagnosis
from flatout.records.hardware import Machine
from flatout.records.plan import Circumstances, Plan, from_toml, mismatches, other_model
from flatout.records.record import Record, to_json, write_file
from flatout.records.trial import Trial
from flatout.records.tuned import Tuned
from flatout.registry import lever_of, levers, rules

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from flatout.levers.editing import Edits
    from flatout.levers.live import Applied, Model, Optimizer
    from flatout.planning.ledger import Ledger
    from flatout.planning.search import Objective
    from flatout.profiling.running.script import Script
    from flatout.profiling.steps.schedule import Schedule
    from flatout.records.shrinking import Order, Shrunk
    from flatout.records.verdict import Guarantee, Verdict
    from flatout.verification.process import Request
    from flatout.verification.proof import Terms

Batch = TypeVar("Batch")


class Checked(Record, frozen=True, kw_only=True):
    """What `check` returns: what was seen, and what it means. Print it for the report."""

    evidence: Evidence
    diagnosis: Diagnosis

    def __str__(self) -> str:
        from flatout.reporting.text import as_text

        return as_text(self.evidence, self.diagnosis)


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
    stop: bool
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
    """Observe `step(batch)` over `batches`, and say where its time goes and what would make it faster.

    Stops drawing batches after `observe_s` seconds of light observation. `machine` is what `flatout.measure_machine()` returned;
    without it the report has no roofline. What `step` computes, the random streams and global switches stay as they are.

    Raises CaptureError when `batches` is empty; what `step` raises is the caller's.
    """
    from flatout.profiling.capture import Capture
    from flatout.profiling.steps.schedule import Schedule

    capture = Capture(
        command=(f"{step.__module__}.{getattr(step, '__qualname__', type(step).__name__)}",),
        cwd=os.getcwd(),
        schedule=Schedule(observe_s=observe_s),
        machine=machine,
        propose=_propose,
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
    if not evidence.steps.num_seen:
        raise CaptureError("`batches` gave no batch, so no step ran; pass an iterable with at least ten batches")
    return Checked(evidence=evidence, diagnosis=diagnose(evidence, rules()))


def evidence_in(paths: Sequence[Path]) -> Evidence:
    """The Evidence in files that flatout wrote, or in traces of torch.profiler: one, one for each rank, or a folder of them.

    Raises RecordError when a file cannot be read or is neither.
    """
    from flatout.reporting.json_report import read_evidence
    from flatout.traces.ranks import evidence_of_bytes, evidence_of_files, files_in
    from flatout.traces.reading import MOST_BYTES, is_trace

    first, *others = files = files_in(paths)
    try:
        if first.stat().st_size > MOST_BYTES:
            return evidence_of_files(files)  # which says that it is too large
    except OSError:
        pass  # reading it says what is wrong
    data = _bytes_of(first)
    if is_trace(data):
        return evidence_of_files(files) if others else evidence_of_bytes(data, first)
    evidence = read_evidence(data)
    return merge([evidence, *(read_evidence(_bytes_of(file)) for file in others)]) if others else evidence


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
    one, two = (Run(evidence, diagnose_all(evidence)) for evidence in (before, after))
    return compare(one, two, threshold=fail_if_slower)


def observe_script(observation: Observation, script: Script, machine: Machine | None) -> int:
    """Run `script` under observation in this process, write its Evidence, and return the exit code python would give."""
    from flatout.profiling.capture import Capture
    from flatout.profiling.place import Place
    from flatout.profiling.running.progress import ProgressFile
    from flatout.profiling.running.script import end_script, run_script
    from flatout.profiling.running.termination import TERMINATED, writing_when_terminated
    from flatout.profiling.steps.schedule import Schedule

    path = Path(observation.evidence_path)

    is_alone = observation.world_size == 1

    def publish(evidence: Evidence) -> None:
        write_file(path, to_json(evidence))
        if (
            observation.stop and is_alone
        ):  # one rank that ends leaves the others waiting; who started them ends them all
            end_script()

    capture = Capture(
        command=observation.command,
        cwd=os.getcwd(),
        schedule=Schedule(observe_s=observation.observe_s) if is_alone else _schedule_of_rank(observation),
        machine=machine,
        propose=_propose,
        user_root=script.root,
        publish=publish,
        progress=ProgressFile(Path(observation.progress_path)) if observation.progress_path else None,
        place=None if is_alone else Place(observation.rank, observation.world_size),
        draft=None if is_alone else lambda evidence: write_file(draft_path(path), to_json(evidence)),
    )
    if is_alone:
        capture.start()
        outcome = run_script(script)
        write_file(path, to_json(capture.finish(exit=outcome.exit, exit_code=outcome.exit_code)))
        return outcome.exit_code

    def write_now() -> None:
        write_file(path, to_json(capture.snapshot(exit="ended by SIGTERM", exit_code=TERMINATED)))

    with writing_when_terminated(write_now) as ending:
        capture.start()
        outcome = run_script(script)
        ending.has_begun = True
        write_file(path, to_json(capture.finish(exit=outcome.exit, exit_code=outcome.exit_code)))
    return outcome.exit_code


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file.

    Raises PlanError when it cannot be read, is cut off, or names a lever that there is not.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise PlanError(f"cannot read '{path}': {e.strerror or e}; give the file that `flatout tune` wrote") from e
    plan = from_toml(data, name=f"'{path}'")
    for planned in plan.lever:
        lever_of(planned.id)
    return plan


def environment_of(plan: Plan) -> dict[str, str]:
    """The variables that the plan's levers want before the process starts."""
    found: dict[str, str] = {}
    for planned in plan.lever:
        lever = lever_of(planned.id)
        if lever.environment is not None:
            found.update(lever.environment(planned.parameters))
    return found


def precision_of_plan(plan: Plan) -> str:
    """The coarsest precision that the plan's levers have numbers rounded to; '' when they leave it."""
    from flatout.tuning import precision_of

    return precision_of(plan.lever, {planned.id: lever_of(planned.id) for planned in plan.lever})


def run_planned(plan: Plan, script: Script, *, tell: Callable[[str], None], world_size: int = 1) -> int:
    """Run `script` in this process with the plan's levers pulled; the exit code python would give.

    `tell` hears at the end which levers met nothing to change. Raises PlanError when the plan was proved on something that
    differs in a way that matters.
    """
    from flatout.levers.apply import applied, circumstances
    from flatout.profiling.running.script import end_script, run_script

    _must_fit(plan, circumstances(world_size=world_size))
    others: list[str] = []

    def look_at(module: nn.Module) -> None:
        """Of the first model that is called; levers that come as source may have changed it already."""
        if not others and not any(lever_of(p.id).apply is None for p in plan.lever):
            others.append(other_model(plan, sum(p.numel() for p in module.parameters())))
            if others[0]:
                end_script()

    with applied(plan, root=script.root, look_at=look_at) as seams:
        outcome = run_script(script.with_code(seams.code_of(script.file)))
        missed = [planned.id for planned in plan.lever if planned.id not in seams.done]
    if any(others):
        raise _elsewhere(others)
    if missed:
        tell(f"these levers of the plan met nothing to change: {', '.join(missed)}")
    return outcome.exit_code


def apply(
    plan: Plan | Path | str,
    *,
    model: Model = None,  # type: ignore[assignment]
    optimizer: Optimizer = None,  # type: ignore[assignment]
    loader: DataLoader[Any] | None = None,
) -> Applied[Model, Optimizer]:
    """Pull the plan's levers on objects that exist, until `undo()` or the end of a `with`; `plan` may be the path of its file.

    Use what it returns: `model` and `optimizer` are the same objects, `loader` may be another one. `not_applied` names the levers
    that cannot be pulled on them, with the reason. Call it before `Accelerator.prepare` or `Trainer`. Raises PlanError when the
    plan was proved on something that differs in a way that matters.
    """
    from flatout.levers.apply import circumstances
    from flatout.levers.live import Applied as Pulled

    plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    _must_fit(plan, circumstances(world_size=_world_size()))
    other = other_model(plan, sum(p.numel() for p in model.parameters())) if model is not None else ""
    if other:
        raise _elsewhere([other])
    return Pulled(plan, model, optimizer, loader)


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _must_fit(plan: Plan, here: Circumstances) -> None:
    """Raises PlanError when the plan was proved on something that differs in a way that matters."""
    differences = mismatches(plan, here)
    if differences:
        raise _elsewhere(differences)


def _elsewhere(differences: Iterable[str]) -> PlanError:
    return PlanError(
        f"the plan was proved elsewhere ({'; '.join(differences)}); tune again here, or empty its table [proved_on] to run "
        "it unproved"
    )


def edit_script(plan: Plan, script: Path) -> Edits:
    """What the plan changes in the text of `script` and of the files beside it; nothing is written.

    Raises PlanError when a lever names a file outside of the script's folder, RecordError when the script cannot be read.
    """
    from flatout.levers.editing import edits

    return edits(plan, script)


def tune_script(
    request: Request,
    evidence: Evidence,
    *,
    terms: Terms,
    budget_s: float,
    ledger: Ledger,
    allow: Guarantee | None = None,
    objective: Objective = "time",
    most_bytes: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """The fastest plan (or the smallest) for a script that was observed, proved within `terms` and found within `budget_s`.

    `allow` is the weakest guarantee of a lever; 'quality' needs a metric in the terms. With `most_bytes` it holds no more than
    that at its peak: of the device's memory, or of the process on a CPU. What was tried stays in `ledger`. Raises
    VerificationError when the untouched script does not run.
    """
    from flatout.tuning import tune

    workload = evidence.workload
    here = Circumstances(
        device=workload.device,
        num_cores=workload.num_cores,
        torch=workload.torch,
        python=workload.python,
        num_parameters=workload.num_parameters,
        models=tuple(dict.fromkeys(m.num_parameters for m in evidence.models)),
        world_size=workload.world_size,
    )
    return tune(
        request,
        evidence,
        rules(),
        levers(),
        terms=terms,
        allow=allow if allow is not None else terms.guarantee,
        budget_s=budget_s,
        ledger=ledger,
        circumstances=here,
        objective=objective,
        most_bytes=most_bytes,
        tell=tell,
    )


def import_stage() -> None:
    """Import all that `run_stage` needs before it comes to the script, and nothing that starts threads or a device."""
    import numpy  # noqa: F401  # seeded with the others
    import torch._dynamo  # noqa: F401  # a second, at the first optimizer that is made

    import flatout.levers.apply
    import flatout.levers.seams
    import flatout.profiling.running.script
    import flatout.verification.conditions
    import flatout.verification.process
    import flatout.verification.recording
    import flatout.verification.stage  # noqa: F401


def run_stage(request: Request, script: Script, *, orders: int, answers: int) -> int:
    """Run `script` as one side of a proof, taking its steps on order; the exit code python would give.

    `orders` and `answers` are the file descriptors of the pipes to the parent.
    """
    from flatout.levers.apply import applied
    from flatout.profiling.patching import Patches
    from flatout.profiling.running.script import run_script
    from flatout.verification.conditions import Precision, seed_all
    from flatout.verification.recording import Recorder
    from flatout.verification.stage import Orders, Stage

    patches = Patches()
    if request.seed is not None:
        seed_all(request.seed, patches)
    precision = Precision(request.dtype)
    stage = Stage(
        Orders.of_descriptors(orders, answers),
        Recorder(Path(request.folder)) if request.folder else None,
        num_recorded=request.num_recorded,
        precision=precision,
        user_root=script.root,
    )
    plan = read_plan(Path(request.plan)) if request.plan else Plan()
    began_s = perf_counter()
    try:
        with applied(plan, root=script.root) as seams, precision.surroundings():
            script = script.with_code(seams.code_of(script.file))
            if not request.is_whole:
                stage.install()
            outcome = run_script(script)
            stage.remove()
    except EditError as e:
        stage.ended(str(e))
        return 2
    finally:
        patches.undo()
    sys.stdout.flush()
    stage.ended("" if outcome.exit_code == 0 else outcome.exit, seconds=perf_counter() - began_s)
    return outcome.exit_code


def verify(
    before: Request, after: Request, terms: Terms | None = None, *, tell: Callable[[str], None] = lambda _: None
) -> Verdict:
    """Prove that the script `after` does what `before` does, and faster: a Verdict with what was compared and measured.

    `tell` hears what is being done. Raises VerificationError when `before` does not run.
    """
    from flatout.verification.proof import Terms as Usual
    from flatout.verification.proof import prove

    return prove(before, after, terms if terms is not None else Usual(), tell=tell)


def draft_path(path: Path) -> Path:
    """Where a rank leaves what it has seen so far, in case it is killed before it can write `path`."""
    return path.with_suffix(".draft")


def _schedule_of_rank(observation: Observation) -> Schedule:
    """Close looks at the same steps on all ranks, so by counts alone; trials on rank 0, whose findings are reported."""
    from flatout.profiling.steps.schedule import Schedule

    usual = Schedule()
    return Schedule(
        observe_s=observation.observe_s,
        deep_budget_s=float("inf"),
        trials_budget_s=usual.trials_budget_s if observation.rank == 0 else 0.0,
        num_settle=3,
    )


def _propose(evidence: Evidence) -> tuple[Trial, ...]:
    return proposals(evidence, rules())


def shrink_named(
    order: Order,
    command: Sequence[str],
    *,
    budget: str,
    budget_s: float,
    limit_s: float,
    out: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Shrunk:
    """The cheapest model that keeps its metric, each composition tried in a process of its own: `command ORDER ANSWER`.

    `budget` is what of the metric may be lost ('1%', or '0.01' in its own unit), `budget_s` the time to try things in, `limit_s`
    that of one composition; what was chosen is written to `out`. Raises PlanError when the model as it is cannot be measured.
    """
    from flatout.shrinking.apart import Apart
    from flatout.shrinking.shrink import Allowance, Settings, shrink

    bench = Apart(order, command, limit_s=limit_s)
    settings = Settings(
        model=order.model,
        objective=order.objective,
        allowance=Allowance.of(budget),
        is_cost=order.is_cost,
        budget_s=budget_s,
    )
    found, composition = shrink(bench, levers(), settings, tell=tell)
    if out is not None:
        written = bench.write(composition, out)
        if written.because:
            raise PlanError(f"{found.chosen} could not be written: {written.because}")
    return found
