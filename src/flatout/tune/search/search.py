"""The search for a plan: levers in the order of what they promise, each kept when a Verdict proves it, all proved at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from flatout.core.records.lever import Candidate, Lever, PlannedLever
from flatout.core.records.plan import Attempt, AttemptKind, LeftOut
from flatout.core.records.verdict import GUARANTEES, Speed, Verdict, What
from flatout.tune.search.goal import Objective, SearchGoal
from flatout.tune.search.plan_so_far import MUCH_SMALLER, PlanSoFar, gain_of, guarantee_of, settings_of
from flatout.tune.search.search_log import SearchLog
from flatout.tune.search.selection import allowed_candidates, by_gain_for_effort, cheap_as_one, one_of_each_lever
from flatout.tune.search.verdict_words import why_not_proved

_STRONG: Final = 2.0
"""A lever that gained so much is not taken out again for what others do."""
_WORTH_DIGITS: Final = 1.1
"""What a lever that rounds more coarsely must surely gain; our judgement of what a person would give digits up for."""
_DOING: Final[Mapping[AttemptKind, str]] = {
    "add": "trying {}",
    "swap": "trying {} another way",
    "drop": "trying without {}",
    "again": "racing {} longer",
    "together": "trying {} with others as one",
    "final": "proving all together",
    "final-again": "racing all together longer",
}
_BEYOND_DOUBT: Final = 1.3
"""A lever that was proved to be so much faster in the middle was not picked for its luck among some tens that were tried."""
_NOTHING_LOST: Final = 0.99
"""A lever is taken out where the plan without it is at least so many times as fast: it costs nothing to keep what may help."""
_WORTH_A_LONGER_RACE: Final = 1.03
"""What is equal and so much faster by the first race is raced longer where there is time left in the end."""
_MET_NOTHING: Final = "it met nothing to change in the steps that were raced"
_NO_COMPANY: Final = "it gains nothing alone, and nothing else made the step so fast that it would wait for this"


class LeverSearchResult(NamedTuple):
    """Where a search ended: the levers of the plan, the final proof of them all, what was left out, whether time ran out."""

    levers: tuple[PlannedLever, ...]
    proof: Verdict | None
    left_out: tuple[LeftOut, ...]
    is_complete: bool


class LeverBench(Protocol):
    """Who compares two lists of levers on the script."""

    def compare(
        self,
        before: Sequence[PlannedLever],
        after: Sequence[PlannedLever],
        *,
        objective: Objective,
        is_final: bool,
        is_longer: bool = False,
    ) -> Verdict:
        """Is `after` equal to the untouched script, and faster or smaller than `before`?

        A final comparison uses fresh seeds; a longer one races longer.
        """

    def has_time(self, *, is_final: bool, effort: float = 1.0, is_longer: bool = False) -> bool:
        """Whether the budget allows another comparison, of this effort; the final one is always left room for.

        The final one itself is always made; once more, and longer, in time that is left.
        """

    def can_end(self, effort: float) -> bool:
        """Whether a comparison of this effort should end in time, the final proof left out."""

    def has_time_for_each(self, efforts: Sequence[float]) -> bool:
        """Whether comparisons of these efforts, one after the other, and the final one should all end in time."""

    def is_late(self) -> bool:
        """Whether a final comparison would end after the budget."""

    def expect(self, pairs: Sequence[tuple[Sequence[PlannedLever], Sequence[PlannedLever]]]) -> None:
        """Comparisons for time that come next as long as they adopt nothing, soonest first: whoever can begins with them."""


def search_levers(
    candidates: Sequence[Candidate],
    levers: Mapping[str, Lever],
    bench: LeverBench,
    log: SearchLog,
    goal: SearchGoal,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> LeverSearchResult:
    """The best plan that could be proved: never slower, never wrong, never over the limit; empty where nothing helps."""
    allowed, refused = allowed_candidates(candidates, levers, goal.allow)
    run = _LeverSearch(PlanSoFar(levers, goal, allowed), levers, bench, log, goal, on_progress)
    run.left_out += refused
    if goal.objective == "time" and not goal.must_shrink:
        run.left_out += [
            LeftOut(lever=c.lever, because="it saves memory and costs time") for c in allowed if c.saved_s[1] < 0
        ]
    beside = [c for c in allowed if c.beside]
    allowed = [c for c in allowed if not c.beside]
    smaller = sorted((c for c in allowed if c.saved_bytes > 0), key=lambda c: -c.saved_bytes)
    if goal.objective == "memory" or goal.must_shrink:
        run.shrink(smaller)
    if goal.objective == "time":
        ordered = by_gain_for_effort([c for c in allowed if c.saved_s[1] >= 0], levers, goal)
        run.climb([c for c in ordered if not c.is_companion], [c for c in ordered if c.is_companion])
        run.prune()
        run.decide()
    run.spare([*run.welcome, *beside])
    return run.finish()


class _LeverSearch:
    def __init__(
        self,
        plan: PlanSoFar,
        levers: Mapping[str, Lever],
        bench: LeverBench,
        log: SearchLog,
        goal: SearchGoal,
        on_progress: Callable[[str], None],
    ) -> None:
        self.left_out: list[LeftOut] = []
        self._levers = levers
        self._bench = bench
        self._log = log
        self._goal = goal
        self._on_progress = on_progress
        self._so_far = plan
        self._undecided: list[tuple[Candidate, Speed]] = []
        """Candidates that are equal and seemed to be faster, on top of the plan as it is."""
        self._reasons: dict[int, LeftOut] = {}
        """Why a candidate was left out when it was tried, by its identity: tried again, it gets another reason."""
        self.welcome: list[Candidate] = []
        """Candidates that save much of a device's memory and hardly any time, to be tried in the end."""
        self._blamed: list[Candidate] = []
        """Candidates by which a plan of several failed, or that met nothing to change: alone it would be the same."""
        self._failed: dict[str, list[Verdict]] = {}
        """Verdicts on ways to pull a lever that failed or computed something else."""
        self._is_complete = True
        self._has_joined = self._has_joined_expensive = False

    def shrink(self, candidates: Sequence[Candidate]) -> None:
        """Add levers that save memory: all that do where memory is the aim, else until the limit is kept."""
        for number, candidate in enumerate(candidates):
            why = self._so_far.clash(candidate)
            if why:
                self._leave_out(candidate.lever, why)
                continue
            verdict = self._add(candidate, "memory")
            if verdict is None:
                self._leave_out_unreached(candidates[number:])
                return
            if verdict.outcome == "proved":
                self._so_far.needed.add(candidate.lever)
                if self._goal.objective == "time" and _peak(verdict) <= self._goal.most_bytes:
                    return

    def _join(self, candidates: Sequence[Candidate], first: Candidate) -> None:
        """Try all that is cheap and promises something as one, once there is no time to try one after the other.

        That is what a person would do; and of two things that limit a step each hides what the other gains. On a device `first`,
        the next to be tried alone, goes before them where it is expensive and promises more than all of them: compiling, mostly.
        """
        tried = cheap_as_one(self._so_far, candidates, self._levers, self._goal)
        efforts = [self._so_far.effort_of(c.lever, c.parameters) for c in tried if not c.is_companion]
        is_alone = len(tried) < 2 or not efforts
        if self._has_joined or is_alone or (len(efforts) == len(tried) and self._bench.has_time_for_each(efforts)):
            return
        if (
            self._goal.is_on_device
            and self._is_expensive(first)
            and self._so_far.predicted_saving([first]) > self._so_far.predicted_saving(tried)
        ):
            return
        self._has_joined = True
        self._try_without_suspects(tried)

    def _join_expensive(self, candidates: Sequence[Candidate]) -> None:
        """Try as one what is expensive, or judged by losses, on a device, once nothing cheap is left.

        Only where there is no time for each, but still for the first alone should they fail. What compiles does so once then,
        which is most of such a comparison.
        """
        if self._has_joined_expensive or not self._goal.is_on_device:
            return
        if any(not c.is_companion for c in cheap_as_one(self._so_far, candidates, self._levers, self._goal)):
            return
        tried = one_of_each_lever(self._so_far, candidates)
        efforts = [self._so_far.effort_of(c.lever, c.parameters) for c in tried]
        if len(tried) < 2 or self._bench.has_time_for_each(efforts):
            return
        if self._bench.has_time_for_each([max(efforts), efforts[0]]):
            self._has_joined_expensive = True
            self._try_without_suspects(tried)

    def _try_without_suspects(self, tried: list[Candidate]) -> None:
        """Try these as one; where that fails, once more without those that it may have failed by."""
        while len(tried) > 1 and not all(c.is_companion for c in tried):
            verdict = self._try_joined([self._so_far.planned(candidate) for candidate in tried], tried)
            suspects = self._suspects(verdict, tried)
            if not suspects:
                return
            tried = [c for c in tried if not any(c is one for one in suspects)]

    def _suspects(self, verdict: Verdict | None, tried: Sequence[Candidate]) -> list[Candidate]:
        """Those of several candidates without which a plan that failed, or was not equal, is worth another trial.

        The one whose kind of error it was, which is not tried again; else those that may round. None where that leaves nothing.
        """
        if verdict is None or verdict.outcome != "different":
            return []
        error = verdict.because if verdict.equality.holds is None else ""
        found = [c for c in tried if any(words in error for words in self._levers[c.lever].errors)]
        if len(found) == 1:
            self._blamed.append(found[0])
            self._leave_out(found[0].lever, error, self._so_far.most_gain(found[0]))
        else:
            found = [c for c in tried if guarantee_of(self._levers[c.lever], c) != "exact"]
        return found if len(found) < len(tried) else []

    def _is_expensive(self, candidate: Candidate) -> bool:
        """Whether a candidate takes too long to be tried with others, and there is the time to try it."""
        effort = self._so_far.effort_of(candidate.lever, candidate.parameters)
        return effort > self._goal.cheap and self._bench.can_end(effort)

    def climb(self, candidates: Sequence[Candidate], companions: Sequence[Candidate] = ()) -> None:
        """Add one lever after the other, each on top of those that were kept; companions beside others alone.

        What would take the place of another lever that was kept comes behind the rest, and what was in doubt is tried again then.
        """
        rivals: list[Candidate] = []
        doubtful = self._climb(candidates, rivals, companions)
        more = self._climb([*rivals, *(c for c, plan, _ in doubtful if plan != self._so_far.levers)], None)
        self._undecided = [(c, speed) for c, plan, speed in [*doubtful, *more] if plan == self._so_far.levers]
        for companion in companions:
            if not self._so_far.is_planned(companion):
                self._leave_out(companion.lever, _NO_COMPANY)

    def decide(self) -> None:
        """Try all together, and race longer, in the time that is left, what could not be told from noise."""
        self._add_together()
        for candidate, speed in self._undecided:
            if speed.ratio > _WORTH_A_LONGER_RACE and not self._so_far.clash(candidate):
                self._add(candidate, "time", kind="again")

    def _add_together(self) -> None:
        """Try what seemed to be faster as one: gains that are small alone add up, and of two limits each hides the other's."""
        before, new, tried = self._so_far.levers, list[PlannedLever](), []
        for candidate, speed in self._undecided:
            self._so_far.levers = (*before, *new)  # clashes are those with what came before it
            if speed.ratio > 1 and not self._so_far.displaced(candidate) and not self._so_far.clash(candidate):
                low_to_high = (speed.ratio, speed.low, speed.high)
                tried.append(candidate)
                new.append(msgspec.structs.replace(self._so_far.planned(candidate), measured=low_to_high))
        self._so_far.levers = before
        if len(tried) > 1:
            self._try_joined(new, tried)
            self._undecided = [(c, speed) for c, speed in self._undecided if not self._so_far.is_planned(c)]

    def _try_joined(self, new: Sequence[PlannedLever], tried: Sequence[Candidate]) -> Verdict | None:
        """Try a plan that has these levers more, and keep it if it is proved; None when the time is up."""
        before = self._so_far.levers
        verdict = self._try("together", (*before, *new), new[-1], "time")
        if verdict is None or verdict.outcome != "proved" or verdict.speed is None or self._is_over(verdict):
            return verdict
        judged, speed = verdict.equality.guarantee, verdict.speed
        idle = [planned for planned in new if planned.id in verdict.missed]
        for planned in idle:  # without them it is the same plan
            self._leave_out(planned.id, _MET_NOTHING)
            self._blamed += [c for c in tried if (c.lever, c.parameters) == (planned.id, planned.parameters)]
        new = [planned for planned in new if planned not in idle]
        if not new:
            return verdict
        if self._goal.too_late(speed) or any(self._is_too_little(planned, verdict) for planned in new):
            return verdict
        weaker = (max(planned.guarantee, judged, key=GUARANTEES.index) for planned in new)
        new = [msgspec.structs.replace(p, guarantee=g) for p, g in zip(new, weaker, strict=True)]
        if not any(planned.measured for planned in new):  # nothing is known of one alone
            new[-1] = msgspec.structs.replace(new[-1], measured=(speed.ratio, speed.low, speed.high))
        self._so_far.levers = (*before, *new)
        self._so_far.step_s /= max(1.0, speed.ratio)
        reasons = [self._reasons.pop(id(candidate), None) for candidate in tried]
        self.left_out = [one for one in self.left_out if not any(one is reason for reason in reasons)]
        return verdict

    def _climb(
        self,
        candidates: Sequence[Candidate],
        rivals: list[Candidate] | None,
        companions: Sequence[Candidate] = (),
    ) -> list[tuple[Candidate, tuple[PlannedLever, ...], Speed]]:
        """Candidates that could not be told from noise, with the plan they came on top of and what the race said.

        Rivals go to that list, if any.
        """
        doubtful: list[tuple[Candidate, tuple[PlannedLever, ...], Speed]] = []
        candidates = list(candidates)
        for number in range(len(candidates)):
            self._put_first(candidates, number)
            candidate = candidates[number]
            if not self._is_due(candidate, candidates):
                continue
            if rivals is not None and any(p.id != candidate.lever for p in self._so_far.displaced(candidate)):
                rivals.append(candidate)
                continue
            if rivals is not None:
                self._join([*(c for c, _, _ in doubtful), *candidates[number:], *companions], candidate)
                self._join_expensive(candidates[number:])
            if self._so_far.is_planned(candidate) or any(candidate is one for one in self._blamed):
                continue  # it came in with others, or failed with them
            why = self._so_far.why_not(candidate)
            if why and self._so_far.is_much_smaller(candidate) and not self._so_far.clash(candidate):
                self.welcome.append(candidate)
                continue
            if why:
                self._leave_out(candidate.lever, why, self._so_far.most_gain(candidate))
                continue
            plan = self._so_far.levers
            self._bench.expect(self._upcoming([candidate, *candidates[number + 1 :]]))
            verdict = self._add(candidate, "time")
            if verdict is not None and verdict.outcome == "different":
                self._failed.setdefault(candidate.lever, []).append(verdict)
                candidates[number + 1 :] = sorted(candidates[number + 1 :], key=lambda c: not self._is_called_for(c))
            if verdict is None and self._so_far.effort_of(candidate.lever, candidate.parameters) > 1:
                self._leave_out_unreached([candidate])  # there may be time for a shorter one
                continue
            if verdict is None:
                self._leave_out_unreached([*(rivals or ()), *candidates[number:]])
                if rivals is not None:
                    rivals.clear()
                break
            if verdict.outcome == "unknown" and verdict.speed is not None and verdict.speed.ratio > 1:
                doubtful.append((candidate, plan, verdict.speed))
        return doubtful

    def _is_called_for(self, candidate: Candidate) -> bool:
        """Whether it is a fallback for what another way to pull its lever failed with."""
        return any(_shows(verdict, candidate.fallback_for) for verdict in self._failed.get(candidate.lever, ()))

    def _is_due(self, candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
        """Whether it is no fallback, as long as none is called for, or one that is."""
        if candidate.fallback_for:
            return self._is_called_for(candidate)
        return not any(c.lever == candidate.lever and self._is_called_for(c) for c in candidates)

    def _upcoming(
        self, candidates: Sequence[Candidate]
    ) -> list[tuple[tuple[PlannedLever, ...], tuple[PlannedLever, ...]]]:
        """The comparisons of these candidates on top of the plan as it is, without those that are known or will not be made."""
        plan = self._so_far.levers
        pairs = [
            (plan, (*plan, self._so_far.planned(c)))
            for c in candidates
            if not self._so_far.displaced(c)
            and self._is_due(c, candidates)
            and not self._so_far.is_planned(c)
            and not any(c is one for one in self._blamed)
            and not self._so_far.why_not(c)
        ]
        return [(before, after) for before, after in pairs if self._log.find("add", before, after) is None]

    def _put_first(self, candidates: list[Candidate], number: int) -> None:
        """Exchange the next candidate for another way to pull its lever that is the better one for steps as short as they are."""
        for other in range(number + 1, len(candidates)):
            rival = candidates[other]
            is_first = rival.lever == candidates[number].lever and self._so_far.step_s < rival.first_below_s
            if is_first and self._is_due(rival, candidates):
                candidates[number], candidates[other] = rival, candidates[number]
                return

    def _add(self, candidate: Candidate, objective: Objective, kind: Literal["add", "again"] = "add") -> Verdict | None:
        """Try one more lever, or another way to pull one, and keep it if it is proved; None when the time is up."""
        planned, others = self._so_far.planned(candidate), self._so_far.displaced(candidate)
        rest = tuple(p for p in self._so_far.levers if p not in others)
        verdict = self._try("swap" if others else kind, (*rest, planned), planned, objective)
        if verdict is None:
            self._is_complete = False
            return None
        before_this = self._reasons.pop(id(candidate), None)
        self.left_out = [one for one in self.left_out if one is not before_this]
        gain = verdict.speed.ratio if verdict.speed is not None else self._so_far.most_gain(candidate)
        if planned.id in verdict.missed and verdict.outcome != "different":
            self._leave_out(planned.id, _MET_NOTHING)
            return verdict
        if verdict.outcome != "proved":
            as_what = f"as {settings_of(planned.parameters)}: " if any(p.id == planned.id for p in others) else ""
            self._reasons[id(candidate)] = self._leave_out(planned.id, as_what + why_not_proved(verdict), gain)
            return verdict
        if objective == "time" and self._is_too_little(planned, verdict):
            self._leave_out(planned.id, f"too little for coarser numbers: {why_not_proved(verdict)}", gain)
            return verdict
        if objective == "time" and verdict.speed is not None and (late := self._goal.too_late(verdict.speed)):
            self._leave_out(planned.id, late, gain)
            return verdict
        if objective == "time" and self._is_over(verdict):
            self._leave_out(planned.id, f"it takes {_peak(verdict) / 2**30:.2f} GiB, more than allowed", gain)
            return verdict
        speed = verdict.speed
        weaker = max(planned.guarantee, verdict.equality.guarantee, key=GUARANTEES.index)
        planned = msgspec.structs.replace(planned, guarantee=weaker)
        if speed is not None:
            before = gain_of(others)
            measured = (before * speed.ratio, before * speed.low, before * speed.high)
            planned = msgspec.structs.replace(planned, measured=measured)
            self._so_far.step_s = self._so_far.step_s / max(1.0, speed.ratio)
        self._so_far.levers = (*rest, planned)
        for other in others:
            because = f"{planned.id} in its place is faster"
            if other.id == planned.id:
                because = f"as {settings_of(other.parameters)}: another way to pull it is faster"
            self._leave_out(other.id, because)
        return verdict

    def _leave_out_unreached(self, candidates: Sequence[Candidate]) -> None:
        """Name what there was no time for, with what it promises."""
        for candidate in candidates:
            is_planned = any(p.id == candidate.lever for p in self._so_far.levers)
            was_tried = id(candidate) in self._reasons
            if is_planned or was_tried or not self._is_due(candidate, candidates):
                continue
            low, high = self._so_far.predicted(candidate)
            predicted = (
                f"predicted {low:.2f} - {high:.2f}x"
                if high <= 2 * low
                else f"its gain is not known, {high:.1f}x at most"
            )
            unreached = f"not tried, the time was up: {predicted}"
            self._leave_out(candidate.lever, self._so_far.why_not(candidate) or unreached, high)

    def _leave_out(self, lever: str, because: str, gain: float = 1.0) -> LeftOut:
        known = next((one for one in self.left_out if (one.lever, one.because) == (lever, because)), None)
        if known is None:
            known = LeftOut(lever=lever, because=because, gain=gain)
            self.left_out.append(known)
        return known

    def _is_too_little(self, planned: PlannedLever, verdict: Verdict) -> bool:
        """Digits are given up for a gain that a person would give them up for."""
        dtype = self._levers[planned.id].dtype
        return dtype is not None and verdict.speed is not None and verdict.speed.low < _WORTH_DIGITS

    def _is_over(self, verdict: Verdict) -> bool:
        return bool(self._goal.most_bytes) and _peak(verdict) > self._goal.most_bytes

    def _grows(self, verdict: Verdict) -> bool:
        """Whether a step of a device holds so much more that what it lost was worth keeping for its memory."""
        fraction = verdict.footprints[-1].fraction[0] if verdict.footprints else 1.0
        return self._goal.is_on_device and fraction * MUCH_SMALLER >= 1.0

    def prune(self) -> None:
        """Take out what does not pay any more since others came in, the weakest first."""
        weak = [p for p in self._so_far.levers[:-1] if p.measured is not None and p.measured[0] < _STRONG]
        for planned in sorted(weak, key=lambda p: p.measured or ()):
            if planned.id in self._so_far.needed:
                continue
            without = tuple(p for p in self._so_far.levers if p is not planned)
            verdict = self._try("drop", without, planned, "time")
            if verdict is None:
                self._is_complete = False
                return
            if self._is_over(verdict):
                continue
            if verdict.equality.holds and _is_as_fast(verdict) and not self._grows(verdict):
                self._so_far.levers = without
                self._leave_out(planned.id, "the others leave it nothing to gain")

    def spare(self, candidates: Sequence[Candidate]) -> None:
        """Add what makes a step smaller and no slower; what acts on the work of others, where one of them is in the plan."""
        for candidate in candidates:
            if candidate.beside and not {p.id for p in self._so_far.levers} & set(candidate.beside):
                lacking = f"it acts on {' and '.join(candidate.beside)}, which the plan does not have"
                self.left_out.append(LeftOut(lever=candidate.lever, because=lacking, is_for_script=False))
                continue
            if why := self._so_far.clash(candidate):
                self._leave_out(candidate.lever, why)
                continue
            planned = self._so_far.planned(candidate)
            verdict = self._try("add", (*self._so_far.levers, planned), planned, "time")
            if verdict is None:
                self._is_complete = False
                self._leave_out(candidate.lever, "not tried, the time was up: it saves memory")
                continue
            if verdict.speed is None or not (verdict.equality.holds and _is_as_fast(verdict)):
                self._leave_out(candidate.lever, why_not_proved(verdict))
                continue
            if not verdict.footprints or verdict.footprints[-1].fraction[1] > MUCH_SMALLER:
                self._leave_out(candidate.lever, "it hardly saves memory here")
                continue
            guarantee = max(planned.guarantee, verdict.equality.guarantee, key=GUARANTEES.index)
            measured = (verdict.speed.ratio, verdict.speed.low, verdict.speed.high)
            planned = msgspec.structs.replace(planned, guarantee=guarantee, measured=measured)
            self._so_far.levers = (*self._so_far.levers, planned)

    def finish(self) -> LeverSearchResult:
        """Prove all together against the untouched script, with fresh seeds; what cannot be proved loses its last lever.

        What came in as one goes as one where it is equal and gains nothing: each of them alone would take as long to prove.
        """
        objective: Objective = "memory" if self._so_far.needed else "time"
        while self._so_far.levers:
            alone = self._proved_alone()
            if alone is not None and self._bench.is_late():
                return self._ended(alone)
            verdict = self._try("final", self._so_far.levers, self._so_far.levers[-1], objective)
            if verdict is not None and verdict.outcome == "unknown" and _may_be_faster(verdict):
                verdict = self._try("final-again", self._so_far.levers, self._so_far.levers[-1], objective) or verdict
            if verdict is not None and verdict.outcome == "proved" and not self._is_over(verdict):
                return self._ended(verdict)
            why = why_not_proved(verdict) if verdict is not None else "there was no time left to prove it"
            is_equal = verdict is not None and verdict.equality.holds is True and not self._is_over(verdict)
            rest = self._so_far.levers[:-1]
            while is_equal and rest and rest[-1].measured is None and rest[-1].id not in self._so_far.needed:
                rest = rest[:-1]
            for planned in reversed(self._so_far.levers[len(rest) :]):
                self._leave_out(planned.id, f"all together: {why}", gain_of([planned]))
            self._so_far.levers = rest
        return self._ended(None)

    def _ended(self, proof: Verdict | None) -> LeverSearchResult:
        return LeverSearchResult(self._so_far.levers, proof, tuple(dict.fromkeys(self.left_out)), self._is_complete)

    def _proved_alone(self) -> Verdict | None:
        """The Verdict that compared this whole plan with the untouched script, where its gain is beyond doubt."""
        kinds: tuple[AttemptKind, ...] = ("again", "together", "add", "swap")
        attempts = (
            [a for kind in kinds if (a := self._log.find(kind, (), self._so_far.levers))] if self._so_far.levers else []
        )
        verdict = attempts[0].verdict if attempts else None
        if verdict is None or verdict.outcome != "proved" or verdict.speed is None or self._is_over(verdict):
            return None
        is_sure = verdict.speed.low >= _WORTH_DIGITS or verdict.speed.ratio >= _BEYOND_DOUBT
        return verdict if is_sure else None

    def _try(
        self, kind: AttemptKind, after: tuple[PlannedLever, ...], lever: PlannedLever, objective: Objective
    ) -> Verdict | None:
        """The Verdict, from the log where it is known; None when the time is up."""
        is_final, is_longer = kind in ("final", "final-again"), kind in ("again", "final-again")
        before = () if is_final else self._so_far.levers
        known = self._log.find(kind, before, after)
        if known is not None:
            return known.verdict
        effort = self._so_far.effort_of(lever.id, lever.parameters) if kind in ("add", "swap", "again") else 1.0
        if kind == "together":
            effort = max(self._so_far.effort_of(planned.id, planned.parameters) for planned in after)
        if not self._bench.has_time(is_final=is_final, effort=effort, is_longer=is_longer):
            return None
        self._on_progress(
            f"{_DOING[kind].format(lever.id)} (best so far {self._goal.step_s / self._so_far.step_s:.2f}x)"
        )
        verdict = self._bench.compare(before, after, objective=objective, is_final=is_final, is_longer=is_longer)
        self._log.add(Attempt(kind=kind, before=before, after=after, lever=lever.id, verdict=verdict))
        return verdict


def _is_as_fast(verdict: Verdict) -> bool:
    return verdict.speed is not None and not verdict.speed.is_slower and verdict.speed.ratio > _NOTHING_LOST


def _may_be_faster(verdict: Verdict) -> bool:
    """Whether a longer race may show that what is equal is faster."""
    return bool(verdict.equality.holds) and verdict.speed is not None and verdict.speed.ratio > _WORTH_A_LONGER_RACE


def _shows(verdict: Verdict, words: Sequence[str]) -> bool:
    """Whether what differed is called by one of these words, or its error has one that names no kind of difference."""
    first = verdict.equality.first
    differed = first.what if first is not None else ""
    return any(word == differed if word in get_args(What) else word in verdict.because for word in words)


def _peak(verdict: Verdict) -> int:
    """Peak bytes after the change, of the device where there is one; 0 if it is not known."""
    return verdict.footprints[-1].after_bytes if verdict.footprints else 0
