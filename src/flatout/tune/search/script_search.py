"""Tuning a script: levers proposed by what was observed, tried in processes of their own, adopted when proved."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final

import msgspec

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Rule
from flatout.core.records.lever import Lever, Parameters, PlannedLever
from flatout.core.records.memory import Memory
from flatout.core.records.plan import Circumstances, LeftOut, Plan, PlanStep, Tuned, digest_of_text
from flatout.core.records.verdict import Guarantee, Verdict
from flatout.core.secrets import redacted_arguments
from flatout.machine.cost.accounting import main_model
from flatout.machine.cost.memory import main_memory
from flatout.tune.search.comparisons import ComparisonsAhead, LeverComparison, Workers, request_with
from flatout.tune.search.goal import Objective, SearchGoal
from flatout.tune.search.pace import SHORT_RACE, Pace, guessed_start_s
from flatout.tune.search.proposals import judged_by_losses, lever_proposals
from flatout.tune.search.search import search_levers
from flatout.tune.search.search_log import SearchLog, lever_key
from flatout.tune.search.whole_run import run_start_s
from flatout.tune.verify.conditions import coarsest
from flatout.tune.verify.proof import ScriptProver
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side_process import Request, SideProcess

_FINAL_SEED: Final = 1000
"""The last proof runs on random numbers that no lever was chosen with."""
_FINAL_PROCESSES: Final = 3
_FINAL_PROCESSES_ON_DEVICE: Final = 2
_TRIAL_PROCESSES_ON_DEVICE: Final = 1
"""Pairs for one lever where a device does the work: its kernels take as long in one process as in another (padded sizes of a
GPT-2 small on an H200: 0.98 and 1.01 in two runs), and half a minute of compiling belongs to each start."""
_LONG_CYCLE_S: Final = 1.5
"""A race of whole rollouts that take longer takes a minute for one pair of processes."""
_SHORTEST_S: Final = 30.0
"""A process may take so long for its first steps however little of the budget is left."""
_LONGER: Final = 4.0
"""How many times as long a race goes on that is to decide what could not be told from noise."""
_WORTH_A_START: Final = 0.4
"""While so much of the budget is left, another comparison is begun where none has shown how long they take: all failed."""


_FEWEST_COMPARED: Final = 4
_NUM_RECORDINGS: Final = 22
"""First steps that a trial and the final proof run: both sides, float64, plain float32, and three under noise, which take twice
as long."""
_COMPARED_SHARE: Final = 0.4
"""Of the budget, for those."""
_LEARNING_SHARE: Final = 0.03
"""Of the budget, for the steps of one run that shows how far a change of quality gets."""
_FEWEST_LOSSES, _MOST_LOSSES = 50, 1000


class ScriptBench:
    """Compares lists of levers on a script, within a budget. Use it in a `with`."""

    def __init__(
        self,
        script: Request,
        plan: Plan,
        levers: Mapping[str, Lever],
        terms: ProofTerms,
        *,
        budget_s: float,
        step_s: float,
        start_s: float,
        effort_of: Callable[[Lever, Parameters], float],
        on_progress: Callable[[str], None],
        losses_of_a_step: int = 1,
        run_steps: int = 0,
        workers: Workers | None = None,
        device: str = "",
        memory: Memory | None = None,
    ) -> None:
        self._effort_of = effort_of
        self._script = script
        self._plan = plan
        self._terms = terms
        self._run_steps = run_steps
        self._levers = levers
        self._on_progress = on_progress
        self._prover = ScriptProver(script, terms, on_progress=self._with_time_left)
        if memory is not None and memory.measured_peak_bytes and memory.total_bytes:
            self._prover.expect(device, memory.measured_peak_bytes, memory.total_bytes)
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-tune-")
        self._deadline_s = monotonic() + budget_s
        self._pace = Pace(start_s, terms.budget_s)
        self._doubtful_s = _WORTH_A_START * budget_s
        num_losses = losses_of_a_step * _LEARNING_SHARE * budget_s / step_s if step_s else _MOST_LOSSES
        self._num_losses = max(_FEWEST_LOSSES, min(_MOST_LOSSES, round(num_losses)))
        self._num_compared = 0
        self._doing = ""
        self._num_plans = 0
        self._ahead = None
        if workers is not None:
            self._ahead = ComparisonsAhead(workers, device=device, on_progress=self._with_time_left)

    def __enter__(self) -> ScriptBench:
        self._prover.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._ahead is not None:
            self._ahead.end()
        self._prover.__exit__(kind, error, tb)
        self._folder.cleanup()

    def expect(self, pairs: Sequence[tuple[Sequence[PlannedLever], Sequence[PlannedLever]]]) -> None:
        """Have workers begin with these comparisons for time, if there are workers."""
        if self._ahead is not None:
            self._ahead.expect([self._comparison(before, after, "time") for before, after in pairs])

    def _comparison(
        self, before: Sequence[PlannedLever], after: Sequence[PlannedLever], objective: Objective
    ) -> LeverComparison:
        return LeverComparison.of(
            self._script,
            self._plan,
            (before, after),
            usual_terms=self._terms,
            terms=self._terms_of(after, objective=objective, is_final=False),
        )

    def _terms_of(self, after: Sequence[PlannedLever], *, objective: Objective, is_final: bool) -> ProofTerms:
        """What is to be proved of these levers, whoever does it."""
        terms = msgspec.structs.replace(
            self._terms,
            objective=objective,
            at=precision_of(after, self._levers) or self._terms.at,
            warm_up_steps=max((planned.warm_up_steps for planned in after), default=0),
            run_steps=0 if is_final else self._run_steps,
        )
        if not any(planned.guarantee == "quality" for planned in after):
            return terms
        num_seeds = terms.num_seeds if is_final else 1
        return msgspec.structs.replace(terms, guarantee="quality", num_losses=self._num_losses, num_seeds=num_seeds)

    def compare(
        self,
        before: Sequence[PlannedLever],
        after: Sequence[PlannedLever],
        *,
        objective: Objective,
        is_final: bool,
        is_longer: bool = False,
    ) -> Verdict:
        """A Verdict on two lists of levers, as the protocol `LeverBench` has it."""
        began, judged_s, raced_s = monotonic(), self._prover.recording_s, self._prover.racing_s
        self._num_compared += 1
        if self._ahead is not None and not is_final and not is_longer:
            found = self._ahead.take(self._comparison(before, after, objective), timeout_s=max(0.0, self._left_s))
            if found is not None:
                return found
        terms = self._terms_of(after, objective=objective, is_final=is_final)
        if is_final:
            num_processes = _FINAL_PROCESSES if self._terms.num_processes > 1 else _FINAL_PROCESSES_ON_DEVICE
            if self._pace.needed_s(0.0) > self._left_s:
                num_processes = self._terms.num_processes
            race_s = max(SHORT_RACE * terms.budget_s, min(terms.budget_s, self._left_s - self._pace.final_start_s()))
            terms = msgspec.structs.replace(
                terms, seed=_FINAL_SEED, num_processes=num_processes, decisive=math.inf, budget_s=race_s
            )
        else:
            spare_s = self._left_s - (
                self._pace.least_final_s() if before else 0.0
            )  # what is in the plan is to be proved
            terms = msgspec.structs.replace(terms, timeout_s=min(terms.timeout_s, max(_SHORTEST_S, spare_s)))
        if is_longer:
            terms = msgspec.structs.replace(terms, budget_s=_LONGER * terms.budget_s, decisive=math.inf)
        verdict = self._prover.prove(self._request(before), self._request(after), terms)
        if verdict.speed is not None and not is_longer:  # one that failed says nothing of how long others take
            added = () if is_final else [planned for planned in after if planned not in before]
            effort = max((self._effort_of(self._levers[p.id], p.parameters) for p in added), default=1.0)
            self._pace.add(
                monotonic() - began,
                effort,
                judged_s=self._prover.recording_s - judged_s,
                raced_s=self._prover.racing_s - raced_s,
            )
        return verdict

    def has_time(self, *, is_final: bool, effort: float = 1.0, is_longer: bool = False) -> bool:
        """Whether a comparison of this effort and the final proof after it should end in time; the first one is always made."""
        if not is_longer and (is_final or not self._num_compared):
            return True
        if not self._pace.is_known and not is_longer:
            return self._left_s > self._doubtful_s
        more_s = (_LONGER - 1) * self._terms.budget_s if is_longer else 0.0
        needed_s = self._pace.final_s() if is_final else self._pace.needed_s(effort)
        return needed_s + more_s < self._left_s

    def can_end(self, effort: float) -> bool:
        """Whether a comparison of this effort should end in time, the final proof left out."""
        return self._pace.alone_s(effort) < self._left_s

    def has_time_for_each(self, efforts: Sequence[float]) -> bool:
        """Whether comparisons of these efforts and the final proof should end in time, by what those so far took."""
        return self._pace.all_s(efforts) < self._left_s

    def is_late(self) -> bool:
        """Whether the final proof, and what judges it, would end after the budget."""
        return self._pace.least_final_s() > self._left_s

    @property
    def _left_s(self) -> float:
        return self._deadline_s - monotonic()

    def peak_bytes(self) -> int:
        """What the untouched script holds at its peak in steps after the first, or in those where there are no others.

        Raises VerificationError when it does not run.
        """
        request = msgspec.structs.replace(self._script, num_recorded=self._terms.num_steps, seed=self._terms.seed)
        with SideProcess(request) as process:
            answer = process.answer(timeout_s=self._terms.timeout_s)
            if answer.what == "recorded":
                process.order(self._terms.num_steps)
                later = process.answer(timeout_s=self._terms.timeout_s)
                answer = later if later.what == "ran" else answer
        return answer.device_peak_bytes or answer.peak_bytes

    def _with_time_left(self, text: str) -> None:
        self._on_progress(f"{self._doing}: {text}; {max(0.0, self._left_s):.0f} s left")

    def describe(self, doing: str) -> None:
        """Set what the following comparisons are for, and report it."""
        self._doing = doing
        self._with_time_left("starting")

    def _request(self, levers: Sequence[PlannedLever]) -> Request:
        self._num_plans += 1
        path = Path(self._folder.name) / f"plan{self._num_plans}.toml"
        return request_with(self._script, self._plan, levers, self._levers, path)


def precision_of(levers: Iterable[PlannedLever], known: Mapping[str, Lever]) -> str:
    """The coarsest precision that the levers have numbers rounded to; '' when they leave it."""
    selected = ((known[planned.id].dtype, planned.parameters) for planned in levers)
    return coarsest(dtype(parameters) for dtype, parameters in selected if dtype is not None)


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What a search for a plan is to find, and what it may take."""

    terms: ProofTerms
    """How each comparison is made; 'quality' levers are judged by its metric, else by the first losses."""
    budget_s: float
    """Seconds for everything that is tried."""
    log: SearchLog
    """Where attempts are written, and found when the search goes on after it was stopped."""
    allow: Guarantee | None = None
    """The weakest guarantee of a lever; None is that of the terms."""
    objective: Objective = "time"
    num_steps: int = 0
    """Steps of the runs that the plan is for; 0: as many as the script has, if it came to its end."""
    most_bytes: int = 0
    """What a step may hold at its peak: of the device's memory where there is one, else of the process; 0: no limit."""
    workers: Workers | None = None
    """Who makes comparisons ahead of the search, on machines like this one; None: it makes them all itself."""


def search_script(
    script: Request,
    file: Path,
    evidence: Evidence,
    rules: Iterable[Rule],
    levers: Iterable[Lever],
    settings: SearchSettings,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """The fastest plan (or the smallest) that could be proved for a script, of this file, that was observed."""
    known = {lever.id: lever for lever in levers}
    terms, log = settings.terms, settings.log
    if evidence.workload.device != "cpu":
        terms = msgspec.structs.replace(terms, num_processes=_TRIAL_PROCESSES_ON_DEVICE)
    num_steps = _num_compared(terms.num_steps, evidence.steps.whole_s, settings.budget_s)
    terms = msgspec.structs.replace(terms, num_steps=num_steps, cycle=_updates_of_a_step(evidence))
    if terms.cycle > 1 and evidence.steps.whole_s > _LONG_CYCLE_S:
        terms = msgspec.structs.replace(terms, num_processes=1)
    proposed = lever_proposals(evidence, rules, known.values())
    if settings.allow == "quality" and terms.metric is None:
        proposed = judged_by_losses(proposed, known)
    plan = Plan(
        script=str(file),
        script_digest=digest_of_text(file.read_bytes()),
        arguments=redacted_arguments(script.arguments),
        module=script.target if script.kind == "module" else "",
        proved_on=circumstances_of(evidence),
    )
    memory = main_memory(evidence) if evidence.workload.device != "cpu" else None
    goal = SearchGoal(
        evidence.steps.whole_s,
        memory.measured_peak_bytes or 0 if memory is not None else 0,
        settings.objective,
        settings.most_bytes,
        settings.allow if settings.allow is not None else settings.terms.guarantee,
        settings.num_steps,
        evidence.workload.device != "cpu",
    )
    with ScriptBench(
        script,
        plan,
        known,
        terms,
        budget_s=settings.budget_s,
        step_s=goal.step_s,
        start_s=guessed_start_s(
            goal.is_on_device,
            num_steps=terms.num_steps,
            step_s=goal.step_s,
            compile_s=evidence.compilation.compile_s if evidence.compilation is not None else 0.0,
        ),
        effort_of=goal.effort_of,
        on_progress=on_progress,
        losses_of_a_step=_losses_of_a_step(evidence),
        run_steps=settings.num_steps,
        workers=settings.workers,
        device=evidence.workload.device,
        memory=memory,
    ) as bench:
        goal = goal._replace(peak_bytes=bench.peak_bytes() if settings.most_bytes else goal.peak_bytes)
        found = search_levers(proposed.candidates, known, bench, log, goal, on_progress=bench.describe)
    refused = (LeftOut(lever=r.lever, because=r.because, is_for_script=False) for r in proposed.refusals)
    tuned = Tuned(
        plan=msgspec.structs.replace(plan, because=_why_empty(goal)),
        left_out=(*found.left_out, *refused),
        attempts=tuple(log.attempts),
        is_complete=found.is_complete,
    )
    if found.proof is None:
        return tuned
    speed, start_s, late = found.proof.speed, None, ""
    if speed is not None and speed.num_first:  # whole runs that are judged by a metric have no first steps
        start_s = run_start_s(msgspec.structs.replace(plan, lever=found.levers), script, timeout_s=terms.timeout_s)
        # a text has no start of its own; a run of the user's is to gain, and not only perhaps
        late = goal.too_late_at_worst(speed, 0.0 if is_text(found.levers, known) else start_s or 0.0)
    if late:
        dropped = (LeftOut(lever=p.id, because=late, gain=p.measured[0] if p.measured else 1.0) for p in found.levers)
        empty = msgspec.structs.replace(plan, because=late)
        return msgspec.structs.replace(tuned, plan=empty, left_out=(*dropped, *tuned.left_out))
    plan = msgspec.structs.replace(
        plan,
        lever=found.levers,
        measured=(speed.ratio, speed.low, speed.high) if speed is not None else None,
        guarantee=found.proof.equality.guarantee,
        run_start_s=start_s,
        pays_from=speed.pays_from(start_s) if speed is not None and start_s is not None else None,
    )
    steps = tuple(PlanStep(planned=planned, verdict=_verdict_of(planned, log)) for planned in found.levers)
    return msgspec.structs.replace(tuned, plan=plan, steps=steps, proof=found.proof)


def _num_compared(usual: int, step_s: float, budget_s: float) -> int:
    """How many steps a proof compares: fewer than usual where steps are so long that two proofs would take most of the budget."""
    return max(min(_FEWEST_COMPARED, usual), min(usual, int(_COMPARED_SHARE * budget_s / (_NUM_RECORDINGS * step_s))))


def _updates_of_a_step(evidence: Evidence) -> int:
    """How often the loop updates in one of its steps: more than once in reinforcement learning, after each rollout."""
    return max(1, round(min((o.calls for o in evidence.optimizers), default=1.0)))


def _losses_of_a_step(evidence: Evidence) -> int:
    """How often the main model is called for an update: so often, about, backward is."""
    model = main_model(evidence)
    return max(1, round(evidence.models[model].calls)) if model is not None else 1


def is_text(levers: Iterable[PlannedLever], known: Mapping[str, Lever]) -> bool:
    """Whether `flatout edit` may write all these levers, as a text or as variables to start it with."""
    return all(known[p.id].edit is not None or known[p.id].environment is not None for p in levers)


def circumstances_of(evidence: Evidence) -> Circumstances:
    """What a plan was proved on, as the evidence shows it."""
    workload = evidence.workload
    return Circumstances(
        device=workload.device,
        num_cores=workload.num_cores,
        torch=workload.torch,
        python=workload.python,
        num_parameters=workload.num_parameters,
        models=tuple(dict.fromkeys(m.num_parameters for m in evidence.models)),
        world_size=workload.world_size,
    )


def _verdict_of(planned: PlannedLever, log: SearchLog) -> Verdict | None:
    """The Verdict that let a lever into the plan."""
    key = lever_key([planned])
    attempts = (
        a for a in reversed(log.attempts) if a.kind in ("add", "swap", "again") and lever_key(a.after[-1:]) == key
    )
    return next((a.verdict for a in attempts if a.verdict.outcome == "proved"), None)


def _why_empty(goal: SearchGoal) -> str:
    if goal.must_shrink:
        there, allowed = goal.peak_bytes / 2**30, goal.most_bytes / 2**30
        return f"the untouched script takes {there:.2f} GiB, {allowed:.2f} GiB are allowed, and nothing that was tried fits"
    return f"nothing that was tried is equal and {'faster' if goal.objective == 'time' else 'smaller'}"
