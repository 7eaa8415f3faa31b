"""Tuning a script: levers proposed by what was seen, tried in processes of their own, kept when proved."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, NamedTuple

import msgspec

from flatout.cost.accounting import group_by
from flatout.planning.ledger import Ledger
from flatout.planning.search import Found, Tried, search
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.lever import Candidate, Lever, PlannedLever, Refusal
from flatout.records.plan import Circumstances, Plan, to_toml
from flatout.records.record import write_file
from flatout.records.verdict import Guarantee, Verdict
from flatout.verification.process import Request
from flatout.verification.proof import Prover, Terms

_FINAL_SEED: Final = 1000
"""The last proof runs on random numbers that no lever was chosen with."""
_FIRST_GUESS_S: Final = 30.0
"""What a comparison takes, before one has been made."""


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
        self._levers = levers
        self._prover = Prover(script, terms, tell=tell)
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-tune-")
        self._deadline_s = monotonic() + budget_s
        self._longest_s = 0.0
        self._num_plans = 0

    def __enter__(self) -> ScriptBench:
        self._prover.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._prover.__exit__(kind, error, tb)
        self._folder.cleanup()

    def compare(self, before: Sequence[PlannedLever], after: Sequence[PlannedLever], *, is_final: bool) -> Verdict:
        """See Bench."""
        began = monotonic()
        seed = _FINAL_SEED if is_final else None
        verdict = self._prover.prove(self._request(before), self._request(after), seed=seed)
        self._longest_s = max(self._longest_s, monotonic() - began)
        return verdict

    def has_time(self, *, is_final: bool) -> bool:
        """See Bench: a comparison is begun when it and the final proof should end in time."""
        if is_final:
            return True
        return monotonic() + 2 * (self._longest_s or _FIRST_GUESS_S) < self._deadline_s

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


class Tuned(NamedTuple):
    """What came of tuning: the plan (maybe empty), its proof, what was left out and why."""

    plan: Plan
    proof: Verdict | None
    left_out: tuple[Tried, ...]
    is_complete: bool


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
    tell: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """The fastest plan that could be proved for a script that was checked."""
    known = {lever.id: lever for lever in levers}
    said = proposals(evidence, rules, known.values())
    with ScriptBench(script, known, terms, budget_s=budget_s, tell=tell) as bench:
        found = search(said.candidates, known, bench, ledger, step_s=evidence.steps.whole_s, allow=allow, tell=tell)
    refused = tuple(Tried(r.lever, r.because) for r in said.refusals)
    plan = Plan(
        script=script.target,
        arguments=script.arguments,
        measured=_ratio(found),
        guarantee=found.proof.equality.guarantee if found.proof is not None else "exact",
        because="" if found.levers else "nothing that was tried is equal and faster",
        proved_on=circumstances,
        lever=found.levers,
    )
    return Tuned(plan, found.proof, (*found.left_out, *refused), found.is_complete)


def _ratio(found: Found) -> tuple[float, float, float] | None:
    speed = found.proof.speed if found.proof is not None else None
    return (speed.ratio, speed.low, speed.high) if speed is not None else None
