"""The search for a plan: levers in the order of what they promise, each kept when a Verdict proves it, all proved at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from flatout.cost.throughput import speed_up
from flatout.planning.ledger import Attempt, Ledger
from flatout.records.lever import Candidate, Lever, PlannedLever
from flatout.records.verdict import Guarantee, Verdict

_RANKS: Final[Mapping[Guarantee, int]] = {"exact": 0, "bounded": 1, "quality": 2}
_SMALLEST_GAIN: Final = 1.02
"""A lever whose best promise is below this is not tried: no interval on an ordinary machine would exclude 1."""


class Tried(NamedTuple):
    """A lever that is not in the plan, and why."""

    lever: str
    because: str


class Found(NamedTuple):
    """Where a search ended: the levers of the plan, the final proof of them all, what was left out, whether time ran out."""

    levers: tuple[PlannedLever, ...]
    proof: Verdict | None
    left_out: tuple[Tried, ...]
    is_complete: bool


class Bench(Protocol):
    """Who compares two lists of levers on the script."""

    def compare(self, before: Sequence[PlannedLever], after: Sequence[PlannedLever], *, is_final: bool) -> Verdict:
        """Is `after` equal to the untouched script, and faster than `before`? A final comparison uses fresh seeds."""

    def has_time(self, *, is_final: bool) -> bool:
        """Whether the budget allows another comparison; the final one is always kept room for."""


def search(
    candidates: Sequence[Candidate],
    levers: Mapping[str, Lever],
    bench: Bench,
    ledger: Ledger,
    *,
    step_s: float,
    allow: Guarantee = "bounded",
    tell: Callable[[str], None] = lambda _: None,
) -> Found:
    """The best plan that could be proved: never slower, never wrong; empty where nothing helps.

    `step_s` is the untouched step, against which promises are weighed.
    """
    run = _Search(levers, bench, ledger, step_s, tell)
    allowed, refused = _allowed(candidates, levers, allow)
    run.left_out += refused
    run.climb(sorted(allowed, key=lambda c: -sum(c.saved_s)))
    run.prune()
    return run.finish()


def _allowed(
    candidates: Sequence[Candidate], levers: Mapping[str, Lever], allow: Guarantee
) -> tuple[list[Candidate], list[Tried]]:
    kept, refused = [], []
    for candidate in candidates:
        guarantee = levers[candidate.lever].guarantee
        if _RANKS[guarantee] <= _RANKS[allow]:
            kept.append(candidate)
        else:
            refused.append(Tried(candidate.lever, f"its guarantee is '{guarantee}', '{allow}' is allowed"))
    return kept, refused


class _Search:
    def __init__(
        self, levers: Mapping[str, Lever], bench: Bench, ledger: Ledger, step_s: float, tell: Callable[[str], None]
    ) -> None:
        self.left_out: list[Tried] = []
        self._levers = levers
        self._bench = bench
        self._ledger = ledger
        self._left_s = step_s
        self._step_s = step_s
        self._tell = tell
        self._plan: tuple[PlannedLever, ...] = ()
        self._is_complete = True

    def climb(self, candidates: Sequence[Candidate]) -> None:
        """Add one lever after the other, each on top of those that were kept."""
        for candidate in candidates:
            lever = self._levers[candidate.lever]
            why = self._why_not(candidate, lever)
            if why:
                self.left_out.append(Tried(candidate.lever, why))
                continue
            low, high = (speed_up(self._left_s, min(s, 0.98 * self._left_s)) for s in candidate.saved_s)
            planned = PlannedLever(
                id=lever.id,
                guarantee=lever.guarantee,
                parameters=candidate.parameters,
                predicted=(low, high),
                because=candidate.because,
            )
            verdict = self._try("add", (*self._plan, planned), planned)
            if verdict is None:
                self._is_complete = False
                return
            if verdict.outcome != "proved" or verdict.speed is None:
                self.left_out.append(Tried(lever.id, _words(verdict)))
                continue
            speed = verdict.speed
            measured = (speed.ratio, speed.low, speed.high)
            self._plan = (*self._plan, msgspec.structs.replace(planned, measured=measured))
            self._left_s = self._left_s / max(1.0, speed.ratio)

    def prune(self) -> None:
        """Take out what does not pay any more since others came in."""
        for planned in self._plan[:-1]:
            without = tuple(p for p in self._plan if p is not planned)
            verdict = self._try("drop", without, planned)
            if verdict is None:
                self._is_complete = False
                return
            if verdict.equality.is_kept and verdict.outcome in ("proved", "unknown") and verdict.speed is not None:
                self._plan = without
                self.left_out.append(Tried(planned.id, "the others leave it nothing to gain"))

    def finish(self) -> Found:
        """Prove all together against the untouched script, with fresh seeds; what cannot be proved loses its last lever."""
        while self._plan:
            verdict = self._try("final", self._plan, self._plan[-1])
            if verdict is not None and verdict.outcome == "proved":
                return Found(self._plan, verdict, tuple(self.left_out), self._is_complete)
            why = _words(verdict) if verdict is not None else "there was no time left to prove it"
            self.left_out.append(Tried(self._plan[-1].id, f"all together: {why}"))
            self._plan = self._plan[:-1]
        return Found((), None, tuple(self.left_out), self._is_complete)

    def _why_not(self, candidate: Candidate, lever: Lever) -> str:
        if any(p.id == lever.id and not (lever.is_local and p.parameters != candidate.parameters) for p in self._plan):
            return "another way to pull it is in the plan"
        clash = next(
            (p.id for p in self._plan if p.id in lever.conflicts or lever.id in self._levers[p.id].conflicts), ""
        )
        if clash:
            return f"it does not go with {clash}"
        most = speed_up(self._left_s, min(candidate.saved_s[1], 0.98 * self._left_s))
        return f"it promises {most:.2f}x at most" if most < _SMALLEST_GAIN else ""

    def _try(self, purpose: str, after: tuple[PlannedLever, ...], lever: PlannedLever) -> Verdict | None:
        """The Verdict, from the ledger where it is known; None when the time is up."""
        before = () if purpose == "final" else self._plan
        known = self._ledger.find(purpose, before, after)
        if known is not None:
            return known.verdict
        if not self._bench.has_time(is_final=purpose == "final"):
            return None
        self._tell(
            f"{'proving' if purpose == 'final' else 'trying'} {lever.id if purpose != 'final' else 'all together'}"
        )
        verdict = self._bench.compare(before, after, is_final=purpose == "final")
        attempt = Attempt(
            purpose="add" if purpose == "add" else "drop" if purpose == "drop" else "final",
            before=before,
            after=after,
            lever=lever.id,
            verdict=verdict,
        )
        self._ledger.add(attempt)
        return verdict


def _words(verdict: Verdict) -> str:
    """Why a Verdict does not let a lever in."""
    if verdict.outcome == "different":
        first = verdict.equality.first
        if first is None:
            return verdict.because
        return f"different in step {first.step}, {first.what} {first.tensor}".rstrip()
    if verdict.speed is None:
        return verdict.because
    speed = verdict.speed
    return f"{verdict.because}: {speed.ratio:.2f}x ({speed.low:.2f} - {speed.high:.2f})"
