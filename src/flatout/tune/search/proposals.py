"""What levers propose for a run that was observed, and what a search tries of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Rule
from flatout.core.records.lever import Candidate, Lever, Refusal
from flatout.machine.cost.accounting import group_by
from flatout.machine.cost.untried import as_if_tried

_UNTRIED: Final = "what it gains was not measured while the script was observed, for want of time"
_GUESSED_TOO_LITTLE: Final = (ArithmeticError, LookupError, ValueError)


class Proposals(NamedTuple):
    """Candidates and refusals of all levers for one run."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]


def lever_proposals(evidence: Evidence, rules: Iterable[Rule], levers: Iterable[Lever]) -> Proposals:
    """What each lever would do to the run that was observed, by the findings that name it as their cure.

    Where trials had no time while it was observed, what they might have confirmed is proposed as well: the search tries it.
    """
    rules, levers = tuple(rules), tuple(levers)
    certain = _proposed(evidence, _findings(evidence, rules), levers)
    guessed = as_if_tried(evidence)
    if guessed is None:
        return certain
    perhaps = _proposed(guessed, _findings(guessed, rules, may_fail=True), levers)
    known = [(c.lever, c.parameters) for c in certain.candidates]
    others = {c.lever for c in certain.candidates} - {lever.id for lever in levers if lever.is_local}
    more = tuple(
        msgspec.structs.replace(c, saved_s=(min(0.0, c.saved_s[0]), c.saved_s[1]), because=_UNTRIED)
        for c in perhaps.candidates
        if (c.lever, c.parameters) not in known and c.lever not in others
    )
    added = {c.lever for c in more}
    return Proposals((*certain.candidates, *more), tuple(r for r in certain.refusals if r.lever not in added))


def _proposed(evidence: Evidence, findings: Sequence[Finding], levers: Sequence[Lever]) -> Proposals:
    named = group_by(((lever, f) for f in findings for lever in f.levers), lambda pair: pair[0])
    proposals = [p for lever in levers for p in lever.propose(evidence, [f for _, f in named.get(lever.id, [])])]
    candidates = tuple(p for p in proposals if isinstance(p, Candidate))
    return Proposals(candidates, tuple(p for p in proposals if isinstance(p, Refusal)))


def _findings(evidence: Evidence, rules: Sequence[Rule], *, may_fail: bool = False) -> list[Finding]:
    """What the rules find; without those that read more of a trial than can be guessed, where they `may_fail`."""
    found: list[Finding] = []
    for rule in rules if evidence.steps.num_timed else ():
        with suppress(*(_GUESSED_TOO_LITTLE if may_fail else ())):
            found += rule.check(evidence)
    return found


def judged_by_losses(proposed: Proposals, known: Mapping[str, Lever]) -> Proposals:
    """The proposals without those of quality whose losses cannot be compared: larger batches, for example."""
    lost = (c for c in proposed.candidates if known[c.lever].guarantee == "quality")
    left = [c for c in lost if not known[c.lever].num_losses(c.parameters)]
    refusals = tuple(Refusal(lever=c.lever, because="only a metric can tell what it costs; see --metric") for c in left)
    return Proposals(tuple(c for c in proposed.candidates if c not in left), (*proposed.refusals, *refusals))
