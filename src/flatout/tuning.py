"""Tuning a script: levers proposed by what was seen, tried in processes of their own, kept when proved."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import monotonic
from types import TracebackType
from typing import Final, NamedTuple

import msgspec

from flatout.cost.accounting import group_by
from flatout.planning.ledger import Ledger, key_of
from flatout.planning.search import Found, Objective, Wanted, search
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.lever import Candidate, Lever, PlannedLever, Refusal
from flatout.records.plan import Circumstances, Plan, to_toml
from flatout.records.record import write_file
from flatout.records.tuned import LeftOut, Rung, Tuned
from flatout.records.verdict import Guarantee, Verdict
from flatout.verification.conditions import coarsest
from flatout.verification.process import Request, StageProcess
from flatout.verification.proof import Prover, Terms

_FINAL_SEED: Final = 1000
"""The last proof runs on random numbers that no lever was chosen with."""
_FINAL_PROCESSES: Final = 3
_TRIAL_PROCESSES_ON_DEVICE: Final = 1
"""Pairs for one lever where a device does the work: its kernels take as long in one process as in another (padded sizes of a
GPT-2 small on an H200: 0.98 and 1.01 in two runs), and half a minute of compiling belongs to each start."""
_SHORTEST_S: Final = 30.0
"""A process may take so long for its first steps however little of the budget is left."""
_FINAL_SHARE: Final = 2.5
"""The final proof takes so many times as long as a comparison of one pair of processes: more processes, and other seeds."""
_FIRST_GUESS_S: Final = 10.0
"""What a comparison takes, before one has been made: 5 to 9 s for small models on two cores, 10 to 40 s on an H200."""


class Proposals(NamedTuple):
    """What levers say to a run."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]


def proposals(evidence: Evidence, rules: Iterable[Rule], levers: Iterable[Lever]) -> Proposals:
    """What each lever would do to the run that was seen, given the findings that name it as their cure."""
    findings = [f for rule in rules for f in rule.check(evidence)] if evidence.steps.num_timed else []
    named = group_by(((lever, f) for f in findings for lever in f.levers), lambda pair: pair[0])
    candidates: list[Candidate] = []
    refusals: list[Refusal] = []
    for lever in levers:
        cures: Sequence[Finding] = [f for _, f in named.get(lever.id, [])]
        for said in lever.propose(evidence, cures):
            if isinstance(said, Candidate):
                candidates.append(said)
            else:
                refusals.append(said)
    return Proposals(tuple(candidates), tuple(refusals))


class ScriptBench:
    """Compares lists of levers on a script, within a budget. Use it in a `with`."""

    def __init__(
        self,
        script: Request,
        levers: Mapping[str, Lever],
        terms: Terms,
        *,
        budget_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._script = script
        self._terms = terms
        self._levers = levers
        self._tell = tell
        self._prover = Prover(script, terms, tell=self._with_time_left)
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-tune-")
        self._deadline_s = monotonic() + budget_s
        self._took_s: list[float] = []
        self._doing = ""
        self._num_plans = 0

    def __enter__(self) -> ScriptBench:
        self._prover.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._prover.__exit__(kind, error, tb)
        self._folder.cleanup()

    def compare(
        self, before: Sequence[PlannedLever], after: Sequence[PlannedLever], *, objective: Objective, is_final: bool
    ) -> Verdict:
        """See Bench."""
        began = monotonic()
        terms = msgspec.structs.replace(
            self._terms, objective=objective, at=precision_of(after, self._levers) or self._terms.at
        )
        if any(planned.guarantee == "quality" for planned in after):
            terms = msgspec.structs.replace(terms, guarantee="quality")
        if is_final:
            terms = msgspec.structs.replace(terms, seed=_FINAL_SEED, num_processes=_FINAL_PROCESSES, decisive=math.inf)
        else:
            terms = msgspec.structs.replace(terms, timeout_s=min(terms.timeout_s, max(_SHORTEST_S, self._left_s)))
        verdict = self._prover.prove(self._request(before), self._request(after), terms)
        if verdict.speed is not None:  # one that failed says nothing of how long others take
            self._took_s.append(monotonic() - began)
        return verdict

    def has_time(self, *, is_final: bool) -> bool:
        """See Bench: a comparison is begun when it and the final proof should end in time."""
        if is_final:
            return True
        usual_s = median(self._took_s) if self._took_s else _FIRST_GUESS_S
        return (1 + _FINAL_SHARE / self._terms.num_processes) * usual_s < self._left_s

    @property
    def _left_s(self) -> float:
        return self._deadline_s - monotonic()

    def peak_bytes(self) -> int:
        """What the untouched script holds at its peak in its first steps.

        Raises VerificationError when it does not run.
        """
        request = msgspec.structs.replace(self._script, num_recorded=self._terms.num_steps, seed=self._terms.seed)
        with StageProcess(request) as process:
            answer = process.answer(timeout_s=self._terms.timeout_s)
        return answer.device_peak_bytes or answer.peak_bytes

    def _with_time_left(self, text: str) -> None:
        self._tell(f"{self._doing}: {text}; {max(0.0, self._left_s):.0f} s left")

    def tell(self, doing: str) -> None:
        """What the following comparisons are for."""
        self._doing = doing
        self._with_time_left("starting")

    def _request(self, levers: Sequence[PlannedLever]) -> Request:
        if not levers:
            return self._script
        self._num_plans += 1
        path = Path(self._folder.name) / f"plan{self._num_plans}.toml"
        write_file(path, to_toml(Plan(script=self._script.target, lever=tuple(levers))))
        environment: dict[str, str] = {}
        for planned in levers:
            wanted = self._levers[planned.id].environment
            environment |= wanted(planned.parameters) if wanted is not None else {}
        return msgspec.structs.replace(self._script, plan=str(path), environment=environment)


def precision_of(levers: Iterable[PlannedLever], known: Mapping[str, Lever]) -> str:
    """The coarsest precision that the levers have numbers rounded to; '' when they leave it."""
    chosen = ((known[planned.id].dtype, planned.parameters) for planned in levers)
    return coarsest(dtype(parameters) for dtype, parameters in chosen if dtype is not None)


def tune(
    script: Request,
    evidence: Evidence,
    rules: Iterable[Rule],
    levers: Iterable[Lever],
    *,
    terms: Terms,
    allow: Guarantee,
    budget_s: float,
    ledger: Ledger,
    circumstances: Circumstances,
    objective: Objective = "time",
    most_bytes: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """The fastest plan (or the smallest) that could be proved for a script that was checked.

    `most_bytes` is what a step may hold at its peak: of the device's memory where there is one, else of the process.
    """
    known = {lever.id: lever for lever in levers}
    if evidence.workload.device != "cpu":
        terms = msgspec.structs.replace(terms, num_processes=_TRIAL_PROCESSES_ON_DEVICE)
    said = proposals(evidence, rules, known.values())
    with ScriptBench(script, known, terms, budget_s=budget_s, tell=tell) as bench:
        peak_bytes = bench.peak_bytes() if most_bytes else 0
        wanted = Wanted(evidence.steps.whole_s, peak_bytes, objective, most_bytes)
        found = search(said.candidates, known, bench, ledger, wanted, allow=allow, tell=bench.tell)
    left_out = [LeftOut(lever=tried.lever, because=tried.because) for tried in found.left_out]
    left_out += [
        LeftOut(lever=refusal.lever, because=refusal.because, is_for_script=False) for refusal in said.refusals
    ]
    plan = Plan(
        script=script.target,
        arguments=script.arguments,
        measured=_ratio(found),
        guarantee=found.proof.equality.guarantee if found.proof is not None else "exact",
        because="" if found.levers else _why_empty(wanted, is_untried=not found.is_complete and not ledger.attempts),
        proved_on=circumstances,
        lever=found.levers,
    )
    return Tuned(
        plan=plan,
        rungs=tuple(Rung(planned=planned, verdict=_verdict_of(planned, ledger)) for planned in found.levers),
        proof=found.proof,
        left_out=tuple(left_out),
        attempts=tuple(ledger.attempts),
        is_complete=found.is_complete,
    )


def _verdict_of(planned: PlannedLever, ledger: Ledger) -> Verdict | None:
    """The Verdict that let a lever into the plan."""
    wanted = key_of([planned])
    attempts = (a for a in reversed(ledger.attempts) if a.purpose in ("add", "swap") and key_of(a.after[-1:]) == wanted)
    return next((a.verdict for a in attempts if a.verdict.outcome == "proved"), None)


def _why_empty(wanted: Wanted, *, is_untried: bool) -> str:
    if is_untried:
        return "the time was up before anything could be tried; give it more with --budget"
    if wanted.must_shrink:
        there, allowed = wanted.peak_bytes / 2**30, wanted.most_bytes / 2**30
        return f"the untouched script takes {there:.2f} GiB, {allowed:.2f} GiB are allowed, and nothing that was tried fits"
    return f"nothing that was tried is equal and {'faster' if wanted.objective == 'time' else 'smaller'}"


def _ratio(found: Found) -> tuple[float, float, float] | None:
    speed = found.proof.speed if found.proof is not None else None
    return (speed.ratio, speed.low, speed.high) if speed is not None else None
