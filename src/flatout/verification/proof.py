"""Proving that a script is equal to another and faster: recordings compared, steps raced."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Final

import msgspec
import torch

from flatout.records.record import Record
from flatout.records.verdict import Equality, Footprint, Guarantee, Outcome, Speed, Verdict
from flatout.verification.conditions import roundoff
from flatout.verification.equality import compare_bounded, compare_exact, with_names_of
from flatout.verification.process import Failed, Request, StageProcess
from flatout.verification.recording import Step, read_steps
from flatout.verification.speed import Race

_ROUNDS: Final = 4
"""How often two scripts are started again because their steps ran out before the interval was there."""


class Terms(Record, frozen=True, kw_only=True):
    """What is to be proved, and how hard to try."""

    guarantee: Guarantee = "bounded"
    num_steps: int = 8
    """Steps that are compared."""
    budget_s: float = 15.0
    """For racing, both sides together."""
    num_processes: int = 2
    """Pairs of processes that race, one after the other: two processes of one script differ by more than their own steps do."""
    timeout_s: float = 300.0
    """For one answer of a process: start, recording, or a stretch of steps."""
    seed: int = 0
    at: str = ""
    """The precision whose rounding counts: with 'bfloat16' the steps before the change are judged under autocast to that. ''
    is as the script has it."""
    is_timed: bool = True


def prove(before: Request, after: Request, terms: Terms, *, tell: Callable[[str], None] = lambda _: None) -> Verdict:
    """A Verdict on two scripts that should do the same; each runs in processes of its own.

    Raises VerificationError when the script before the change does not run to the end of its first steps.
    """
    with Prover(before, terms, tell=tell) as prover:
        return prover.prove(before, after)


class Prover:
    """Proves changes of one script, `base`: what is computed is compared with it, speed with what is raced.

    The base's steps are recorded once for a seed and kept until the end of the context.
    """

    def __init__(self, base: Request, terms: Terms, *, tell: Callable[[str], None] = lambda _: None) -> None:
        self._base = base
        self._terms = terms
        self._tell = tell
        self._device = "cpu"
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-proof-")
        self._kept: dict[tuple[int, str], list[Step]] = {}
        self._num_folders = 0

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._folder.cleanup()

    def prove(self, before: Request, after: Request, *, seed: int | None = None, at: str | None = None) -> Verdict:
        """Is `after` equal to the base, and faster than `before`? With the terms' seed and precision, or others.

        Raises VerificationError when `before` does not run.
        """
        began, seed = perf_counter(), self._terms.seed if seed is None else seed
        at = self._terms.at if at is None else at
        equality, race, failure = self._compare_and_race(before, after, seed, at)
        speed = race.speed() if race is not None else None
        outcome, because = _judged(equality, speed, failure, is_timed=self._terms.is_timed)
        return Verdict(
            before=before.plan or before.target,
            after=after.plan or after.target,
            equality=equality,
            speed=speed,
            footprints=_footprints(race),
            outcome=outcome,
            because=because,
            device=self._device,
            torch=str(torch.__version__),
            python=platform.python_version(),
            seeds=(seed,),
            seconds=perf_counter() - began,
        )

    def _compare_and_race(
        self, before: Request, after: Request, seed: int, at: str
    ) -> tuple[Equality, Race | None, str]:
        """Equality, the race if there was one, and what went wrong on the changed side ('' when nothing did)."""
        none = Equality(guarantee=self._terms.guarantee, is_kept=None, because="nothing was compared")
        with ExitStack() as stack:
            self._tell("the steps before the change")
            is_base = before == self._base and (seed, "") not in self._kept
            one_request = self._recording(before, seed) if is_base else self._standing(before, seed)
            one_process = stack.enter_context(StageProcess(one_request))
            one = one_process.answer(timeout_s=self._terms.timeout_s)
            if one.what == "ended" and (one.error or not one.num_steps):
                raise Failed(f"'{before.target}' ended after {one.num_steps} steps: {one.error or 'too few'}")
            self._device = one.device
            if is_base:
                self._kept[seed, ""] = read_steps(Path(one_request.folder))
            two_request = self._recording(after, seed)
            try:
                self._tell("the steps after the change")
                two_process = stack.enter_context(StageProcess(two_request))
                two = two_process.answer(timeout_s=self._terms.timeout_s)
                if two.what == "ended" and two.error:
                    return none, None, f"'{after.target}' ended after {two.num_steps} steps: {two.error}"
            except Failed as e:
                return none, None, str(e)
            equality = self._compare(read_steps(Path(two_request.folder)), seed, at)
            has_more = "ended" not in (one.what, two.what)
            if equality.is_kept is not True or not self._terms.is_timed or not has_more:
                return equality, None, ""
            self._tell("racing")
            budget_s = self._terms.budget_s / self._terms.num_processes
            race = Race(budget_s=budget_s, timeout_s=self._terms.timeout_s)
            try:
                self._race(race, one_process, two_process)
            except Failed as e:
                return equality, None, str(e)
        return equality, race, ""

    def _compare(self, after: list[Step], seed: int, at: str) -> Equality:
        terms = self._terms
        base = self._steps(seed, "")
        after = with_names_of(base, after)
        exact = compare_exact(base, after)
        if terms.guarantee == "exact" or exact.is_kept:
            return exact
        try:
            rough = self._steps(seed, at)
            reference = self._steps(seed, "float64")
        except Failed as e:
            why = f"not equal bit for bit, and no steps to measure the rounding by: {e}"
            return Equality(
                guarantee=terms.guarantee, is_kept=None, num_steps=len(base), first=exact.first, because=why
            )
        equality = compare_bounded(rough, after, reference, eps=roundoff(at or "float32"))
        return msgspec.structs.replace(equality, at=at)

    def _steps(self, seed: int, dtype: str) -> list[Step]:
        """The base's steps, in this precision; run for that if they have not been.

        Raises Failed when they cannot be run.
        """
        if (seed, dtype) not in self._kept:
            self._tell(f"the steps before the change in {dtype}" if dtype else "the steps before the change")
            request = msgspec.structs.replace(self._recording(self._base, seed), dtype=dtype)
            with StageProcess(request) as process:
                answer = process.answer(timeout_s=self._terms.timeout_s)
                if answer.what == "ended" and (answer.error or not answer.num_steps):
                    raise Failed(answer.error or f"it ended after {answer.num_steps} steps")
            self._kept[seed, dtype] = read_steps(Path(request.folder))
        return self._kept[seed, dtype]

    def _recording(self, request: Request, seed: int) -> Request:
        self._num_folders += 1
        folder = Path(self._folder.name) / str(self._num_folders)
        folder.mkdir()
        return msgspec.structs.replace(request, folder=str(folder), num_recorded=self._terms.num_steps, seed=seed)

    def _standing(self, request: Request, seed: int) -> Request:
        """The script with nothing recorded, standing after as many steps."""
        return msgspec.structs.replace(request, folder="", num_recorded=self._terms.num_steps, seed=seed)

    def _race(self, race: Race, one: StageProcess, two: StageProcess) -> None:
        race.run(one, two)
        num_whole = int(not race.has_ended)
        for _ in range(self._terms.num_processes - 1 + _ROUNDS):
            if num_whole >= self._terms.num_processes:
                return
            for process in (one, two):
                process.end()  # what it holds of a device's memory is wanted now
            first, second = (msgspec.structs.replace(p.request, folder="") for p in (one, two))
            with StageProcess(first) as again_one, StageProcess(second) as again_two:
                for side in (again_one, again_two):
                    side.answer(timeout_s=self._terms.timeout_s)
                race.run(again_one, again_two)
                num_whole += not race.has_ended


def _footprints(race: Race | None) -> tuple[Footprint, ...]:
    if race is None or race.last is None:
        return ()
    one, two = race.last
    found = [Footprint(device="cpu", before_bytes=one.peak_bytes, after_bytes=two.peak_bytes)]
    if one.device_peak_bytes:
        found.append(
            Footprint(device=one.device, before_bytes=one.device_peak_bytes, after_bytes=two.device_peak_bytes)
        )
    return tuple(found)


def _judged(equality: Equality, speed: Speed | None, failure: str, *, is_timed: bool) -> tuple[Outcome, str]:
    if failure:
        return "different", failure
    if equality.is_kept is None:
        return "unknown", equality.because
    if not equality.is_kept:
        return "different", equality.because or "the steps differ"
    if not is_timed:
        return "proved", "equal; not timed"
    if speed is None:
        return "unknown", "equal; too few steps to time"
    if speed.is_faster:
        return "proved", "equal and faster"
    if speed.is_slower:
        return "slower", "equal, and slower"
    return "unknown", "equal; neither faster nor slower beyond the noise"
