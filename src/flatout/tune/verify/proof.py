"""Proving that a script is equal to another and faster: recordings compared, steps raced."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Final, NamedTuple

import msgspec
import torch

from flatout.core.records.verdict import FEWEST_PAIRS, Equality, Footprint, Outcome, Speed, Verdict
from flatout.tune.verify.base_runs import BaseRuns
from flatout.tune.verify.equality_judge import EqualityJudge
from flatout.tune.verify.losses import LossRuns
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.quality import Metric, WholeRuns
from flatout.tune.verify.recording import read_recorded_steps
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Failed, NoAnswer, Request, SideProcess, is_out_of_memory
from flatout.tune.verify.speed import Race

_WHOLE_RUN_S: Final = 3600.0
"""What a whole run may take."""
_SAME_SIZE: Final = 0.02
"""Peaks of two processes that run the same differ by about this share."""
_COLD_S: Final = 3.0
"""What was compiled for so long is found in a cache by the next process: that one shows what a run pays at its start."""
_SOON: Final = 0.1
"""What pays within this part of a run, compiled anew, does so all the sooner from a cache."""
_ROUNDS: Final = 4
"""How often two scripts are started again because their steps ran out before the interval was there."""


class _Failure(NamedTuple):
    """What went wrong on the changed side ('' when nothing did), and what that says of the change."""

    because: str = ""
    outcome: Outcome = "different"

    @classmethod
    def of(cls, error: Failed) -> _Failure:
        """One that was not done in time may compute the same."""
        return cls(str(error), "unknown" if isinstance(error, NoAnswer) else "different")


def prove_script(
    before: Request, after: Request, terms: ProofTerms, *, on_progress: Callable[[str], None] = lambda _: None
) -> Verdict:
    """A Verdict on two scripts that should do the same; each runs in processes of its own.

    Raises VerificationError when the script before the change does not run to the end of its first steps.
    """
    with ScriptProver(before, terms, on_progress=on_progress) as prover:
        return prover.prove(before, after)


class ScriptProver:
    """Proves changes of one script, `base`: what is computed is compared with it, speed with what is raced.

    The base's steps are recorded once for a seed and kept until the end of the context.
    """

    def __init__(
        self, base: Request, terms: ProofTerms, *, on_progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self._base = base
        self._terms = self._usual = terms
        self._on_progress = on_progress
        self._runs = BaseRuns(base, terms, on_progress)
        self._judge = EqualityJudge(self._runs, on_progress)
        self.racing_s = 0.0
        """Spent so far on races, without starting what races."""
        self._spent_before = (0.0, 0.0)
        self._missed: tuple[str, ...] = ()
        """Levers of the changed side that met nothing to change so far."""
        self._whole: dict[Metric, WholeRuns] = {}
        self._losses = LossRuns(self._runs.process, timeout_s=max(terms.timeout_s, _WHOLE_RUN_S))

    def __enter__(self) -> ScriptProver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._runs.end()

    def expect(self, device: str, peak_bytes: int, total_bytes: int) -> None:
        """What was observed of the base before: its device, what it holds of that at its peak, and how much there is.

        Both sides of the first comparison start at once then where they have room.
        """
        self._runs.expect(device, peak_bytes, total_bytes)

    @property
    def recording_s(self) -> float:
        """Seconds spent so far on runs that judge what others compute; each is made once for a seed."""
        return self._runs.recording_s

    def prove(self, before: Request, after: Request, terms: ProofTerms | None = None) -> Verdict:
        """Is `after` equal to the base, and faster than `before`? Within these terms, or those of all.

        Raises VerificationError when `before` does not run.
        """
        began = perf_counter()
        self._spent_before = self.recording_s, self.racing_s
        self._missed = ()
        self._terms = self._runs.terms = terms if terms is not None else self._usual
        if self._terms.guarantee == "quality":
            return self._prove_quality(before, after, began)
        equality, race, failure = self._compare_and_race(before, after)
        speed = race.speed() if race is not None else None
        footprints = race.footprints() if race is not None else ()
        if self._terms.objective == "time":
            outcome, because = _judged(equality, speed, failure, is_timed=self._terms.is_timed)
        else:
            outcome, because = _judged_by_size(equality, footprints, failure)
        return self._verdict(before, after, (equality, speed, footprints), (outcome, because), began)

    def _prove_quality(self, before: Request, after: Request, began: float) -> Verdict:
        """Whole runs on seeds that follow the terms', by the metric."""
        terms = self._terms
        if terms.metric is None:
            return self._prove_by_losses(before, after, began)
        whole = self._whole.get(terms.metric)
        if whole is None:
            timeout_s = max(terms.timeout_s, _WHOLE_RUN_S)
            whole = self._whole[terms.metric] = WholeRuns(terms.metric, self._runs.process, timeout_s=timeout_s)
        seeds = range(terms.seed, terms.seed + terms.num_runs)
        self._on_progress(f"{terms.num_runs} whole runs of both sides")
        for seed in seeds:
            whole.run(self._base, seed)  # a script that does not run is an error; a changed one, a verdict
        try:
            equality, speed = whole.compare(self._base, before, after, seeds)
            outcome, because = _judged(equality, speed, _Failure(), is_timed=True)
        except Failed as e:
            equality, speed = Equality(guarantee="quality", holds=None, because="no runs to compare"), None
            outcome, because = "different", str(e)
        return self._verdict(before, after, (equality, speed, ()), (outcome, because), began)

    def _prove_by_losses(self, before: Request, after: Request, began: float) -> Verdict:
        """The race first: what is not faster need not learn as much."""
        terms = self._terms
        self._terms = self._runs.terms = msgspec.structs.replace(terms, guarantee="bounded", is_compared=False)
        _, race, failure = self._compare_and_race(before, after)
        self._terms = self._runs.terms = terms
        speed = race.speed() if race is not None else None
        equality = Equality(guarantee="quality", holds=None, because="its losses were not looked at")
        if failure.because:
            return self._verdict(before, after, (equality, speed, ()), (failure.outcome, failure.because), began)
        if terms.is_timed and (speed is None or not speed.is_faster):
            is_slower = speed is not None and speed.is_slower
            words = "slower" if is_slower else "neither faster nor slower beyond the noise"
            outcome: Outcome = "slower" if is_slower else "unknown"
            return self._verdict(before, after, (equality, speed, ()), (outcome, words), began)
        try:
            equality = self._losses.compare(
                self._base,
                after,
                range(terms.seed, terms.seed + terms.num_seeds),
                num_losses=terms.num_losses,
                allowed=terms.allowed_loss,
                at_once=self._runs.has_room_for_two,
            )
            judged = _judged(equality, speed, _Failure(), is_timed=terms.is_timed)
        except Failed as e:
            judged = _Failure.of(e).outcome, str(e)
        return self._verdict(before, after, (equality, speed, ()), judged, began)

    def _verdict(
        self,
        before: Request,
        after: Request,
        found: tuple[Equality, Speed | None, tuple[Footprint, ...]],
        judged: tuple[Outcome, str],
        began: float,
    ) -> Verdict:
        runs = self._terms.num_runs if self._terms.metric is not None else self._terms.num_seeds
        num_seeds = runs if self._terms.guarantee == "quality" else 1
        return Verdict(
            before=before.plan or before.target,
            after=after.plan or after.target,
            equality=found[0],
            speed=found[1],
            footprints=found[2],
            outcome=judged[0],
            because=judged[1],
            device=self._runs.device,
            torch=str(torch.__version__),
            python=platform.python_version(),
            seeds=tuple(range(self._terms.seed, self._terms.seed + num_seeds)),
            seconds=perf_counter() - began,
            missed=self._missed,
            judging_s=self.recording_s - self._spent_before[0],
            racing_s=self.racing_s - self._spent_before[1],
        )

    def _compare_and_race(self, before: Request, after: Request) -> tuple[Equality, Race | None, _Failure]:
        """Equality, the race if there was one, and what went wrong on the changed side.

        What was out of memory while both sides ran is tried again with one running after the other.
        """
        is_first = not self._runs.is_tight
        try:
            found = self._compared_and_raced(before, after)
        except Failed as e:
            if not is_first or not is_out_of_memory(str(e)):
                raise
        else:
            if not is_first or not is_out_of_memory(found[2].because):
                return found
        self._runs.is_tight = True
        self._on_progress("out of memory beside each other: once more, one after the other")
        return self._compared_and_raced(before, after)

    def _compared_and_raced(self, before: Request, after: Request) -> tuple[Equality, Race | None, _Failure]:
        terms = self._terms
        none = Equality(guarantee=terms.guarantee, holds=None, because="nothing was compared")
        with ExitStack() as stack:
            self._on_progress("the first steps of both sides")
            # both are recorded, whether it is read or not: it leaves its traces in allocators, which race alike then
            one_request, two_request = self._runs.recording(before), self._runs.recording(after)
            if terms.is_compared and terms.at:
                stack.callback(self._runs.end_begun)
                self._runs.begin(terms.at)
            one_process, one, two_process = self._started(stack, one_request, two_request)
            if one.what == "ended" and (one.error or not one.num_steps):
                raise Failed(f"'{before.target}' ended after {one.num_steps} steps: {one.error or 'too few'}")
            self._runs.device = one.device
            self._runs.note_memory(one)
            if before == self._base:
                self._runs.add(one_request)
            try:
                two = two_process.answer(timeout_s=terms.timeout_s)
                if two.what == "ended" and two.error:
                    return none, None, _Failure(f"'{after.target}' ended after {two.num_steps} steps: {two.error}")
            except Failed as e:
                return none, None, _Failure.of(e)
            self._runs.note_memory(one, two)
            steps = read_recorded_steps(Path(two_request.folder))
            equality = self._judge.judge(after, steps) if terms.is_compared else none
            self._runs.end_begun()  # what was not asked for must not run beside the race
            has_more = "ended" not in (one.what, two.what)
            is_in_order = equality.holds is True or not terms.is_compared
            if not is_in_order or not terms.is_timed or not has_more:
                return equality, None, _Failure()
            self._on_progress("racing")
            race = Race(
                budget_s=terms.budget_s / terms.num_processes,
                timeout_s=terms.timeout_s,
                warm_up_steps=terms.warm_up_steps,
                cycle=terms.cycle,
                is_lean=self._runs.is_tight,
            )
            race.started(one, two)
            try:
                self._race(race, one_process, two_process)
            except Failed as e:
                return equality, None, _Failure.of(e)
            self._missed = two_process.missed
            one_process.let_go()
            two_process.let_go()
        self._start_warm(race, one, two_request)
        return equality, race, _Failure(race.leak())

    def _start_warm(self, race: Race, one: SideAnswer, request: Request) -> None:
        """Start the changed side once more where the only one compiled for long: later runs find that in a cache."""
        speed = race.speed()
        if speed is None or race.num_starts > 1 or speed.later_s < _COLD_S or speed.ratio < 1:
            return
        pays_from = speed.pays_from(0.0)
        if pays_from is not None and pays_from < _SOON * self._terms.run_steps:
            return
        self._on_progress("its start once more, now that its kernels are compiled")
        try:
            with self._runs.process(msgspec.structs.replace(request, folder="")) as process:
                race.started(one, process.answer(timeout_s=self._terms.timeout_s))
        except Failed:
            return  # what was seen counts

    def _started(
        self, stack: ExitStack, first: Request, second: Request
    ) -> tuple[SideProcess, SideAnswer, SideProcess]:
        """Both sides, and what the first answered when it stood. They start at once where a device does the work and has room.

        On a CPU they would wait for each other's threads: the first eight steps of two digit_vae took 12 s at once on two cores,
        and 2 s one after the other.
        """
        one = stack.enter_context(self._runs.process(first))
        if self._runs.device != "cpu" and not self._runs.is_tight:
            two = stack.enter_context(self._runs.process(second))
            return one, one.answer(timeout_s=self._terms.timeout_s), two
        answer = one.answer(timeout_s=self._terms.timeout_s)
        return one, answer, stack.enter_context(self._runs.process(second))

    def _race(self, race: Race, one: SideProcess, two: SideProcess) -> None:
        self._run_race(race, one, two)
        num_whole = int(not race.has_ended)
        for _ in range(self._terms.num_processes - 1 + _ROUNDS):
            if num_whole >= self._terms.num_processes or (num_whole and self._is_decided(race)):
                return
            for process in (one, two):
                process.let_go()
            for process in (one, two):
                process.end()  # what it holds of a device's memory is wanted now
            first, second = (msgspec.structs.replace(p.request, folder="") for p in (one, two))
            with ExitStack() as stack:
                again_one, one_answer, again_two = self._started(stack, first, second)
                race.started(one_answer, again_two.answer(timeout_s=self._terms.timeout_s))
                self._run_race(race, again_one, again_two)
                num_whole += not race.has_ended

    def _run_race(self, race: Race, one: SideProcess, two: SideProcess) -> None:
        began = perf_counter()
        try:
            race.run(one, two)
        finally:
            self.racing_s += perf_counter() - began

    def _is_decided(self, race: Race) -> bool:
        speed, most = race.speed(), self._terms.decisive
        return speed is not None and speed.num_pairs >= FEWEST_PAIRS and (speed.low > most or speed.high < 1 / most)


def _judged(equality: Equality, speed: Speed | None, failure: _Failure, *, is_timed: bool) -> tuple[Outcome, str]:
    if failure.because:
        return failure.outcome, failure.because
    if equality.holds is None:
        return "unknown", equality.because
    if not equality.holds:
        return "different", equality.because or "the steps differ"
    if not is_timed:
        return "proved", "equal; not timed"
    if speed is None:
        return "unknown", "equal; too few steps to time"
    if speed.is_faster:
        return "proved", "equal and faster"
    if speed.is_slower:
        return "slower", "equal, and slower"
    if speed.num_pairs < FEWEST_PAIRS:
        return (
            "unknown",
            f"equal; {speed.num_pairs} pairs of stretches are too few to tell whether it is faster, give it more time",
        )
    return "unknown", "equal; neither faster nor slower beyond the noise"


def _judged_by_size(equality: Equality, footprints: tuple[Footprint, ...], failure: _Failure) -> tuple[Outcome, str]:
    """The device's peak where there is one, else the host's."""
    if failure.because:
        return failure.outcome, failure.because
    if equality.holds is not True:
        return _judged(equality, None, failure, is_timed=True)
    if not footprints:
        return "unknown", "equal; too few steps to see its memory"
    low, high = footprints[-1].fraction
    if high < 1 - _SAME_SIZE:
        return "proved", "equal and smaller"
    if low > 1 + _SAME_SIZE:
        return "slower", "equal, and larger"
    return "unknown", "equal; neither smaller nor larger beyond the noise"
