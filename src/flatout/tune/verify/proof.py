"""Proving that a script is equal to another and faster: recordings compared, steps raced."""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Final, Literal

import msgspec
import torch

from flatout.core.records.record import Record
from flatout.core.records.verdict import (
    FEWEST_PAIRS,
    Equality,
    Footprint,
    Guarantee,
    Outcome,
    Reference,
    Speed,
    Verdict,
)
from flatout.tune.verify.conditions import roundoff
from flatout.tune.verify.environment_answers import FILE
from flatout.tune.verify.equality import (
    closeness,
    compare_bounded,
    compare_exact,
    differ_in_losses,
    is_close,
    is_same_start,
    own_roundoff,
    with_losses_added,
    with_names_of,
)
from flatout.tune.verify.fork_server import fork_servers
from flatout.tune.verify.quality import NUM_RUNS, Metric, WholeRuns
from flatout.tune.verify.recording import Step, read_recorded_steps
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Failed, Precision, Request, SideProcess
from flatout.tune.verify.speed import Race

_How = Literal["", "ordered draws", "answers"]
"""What runs share besides seeds: draws that do not depend on dtype and memory format, or the answers of environments."""
_WHOLE_RUN_S: Final = 3600.0
"""What a whole run may take."""
_SAME_SIZE: Final = 0.02
"""Peaks of two processes that run the same differ by about this share."""
_NUM_NOISY: Final = 3
"""Runs under rounding noise: a fourth is off more than these in one case of four, and four times as much is allowed."""
_SPARED: Final = 0.8
_WIDE: Final = 2.2
_NOISY: Final = 1.4
"""What a run in float64, and another under rounding noise, holds at most, by what the script holds: numbers twice as wide, and
what an operator returns once more."""
_COLD_S: Final = 3.0
"""What was compiled for so long is found in a cache by the next process: that one shows what a run pays at its start."""
_ROUNDS: Final = 4
"""How often two scripts are started again because their steps ran out before the interval was there."""


class ProofTerms(Record, frozen=True, kw_only=True):
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
    is_compared: bool = True
    """Whether what is computed is looked at; if not, nothing is proved, and only speed is told."""
    objective: Literal["time", "memory"] = "time"
    """What the change is for: 'memory' is proved by a smaller peak, whatever it costs in time."""
    metric: Metric | None = None
    """What QUALITY is judged by; whole runs are compared then, `num_runs` of each side."""
    num_runs: int = NUM_RUNS
    warm_up_steps: int = 0
    """Steps of the changed side before the race: until a cache is filled it gains nothing, and what it takes is no leak."""
    cycle: int = 1
    """Steps of a stretch, or a multiple: those between two rollouts, in reinforcement learning."""
    decisive: float = math.inf
    """A ratio so far from 1 in the first pair of processes (or its inverse) needs no further pair."""


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
        self._device = "cpu"
        self._peak_bytes = self._free_bytes = 0
        """Of the device: what the script holds at its peak, and what is free while one side stands."""
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-proof-")
        self._servers = fork_servers()
        self._recorded: dict[tuple[int, str, int, _How], list[Step]] = {}
        self._unrecordable: dict[tuple[int, str, int, _How], str] = {}
        """Why steps could not be recorded by a process alone, which is not tried again."""
        self.recording_s = 0.0
        """Spent so far on runs that judge what others compute; each is made once for a seed."""
        self.racing_s = 0.0
        """Spent so far on races, without starting what races."""
        self._how: _How = ""
        """What is the same in all runs that are recorded now, besides seeds."""
        self._environments: dict[int, Path] = {}
        """What the environments answered in the base's run on a seed, where it has any."""
        self._num_folders = 0
        self._whole: dict[Metric, WholeRuns] = {}
        self._num_steps = 0
        """How many steps the script has, once one has ended."""

    def __enter__(self) -> ScriptProver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._servers is not None:
            self._servers.end()
        self._folder.cleanup()

    def prove(self, before: Request, after: Request, terms: ProofTerms | None = None) -> Verdict:
        """Is `after` equal to the base, and faster than `before`? Within these terms, or those of all.

        Raises VerificationError when `before` does not run.
        """
        began = perf_counter()
        self._terms = terms if terms is not None else self._usual
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
            raise Failed("quality can only be told by a metric, and none was given")
        whole = self._whole.get(terms.metric)
        if whole is None:
            timeout_s = max(terms.timeout_s, _WHOLE_RUN_S)
            whole = self._whole[terms.metric] = WholeRuns(terms.metric, self._process, timeout_s=timeout_s)
        seeds = range(terms.seed, terms.seed + terms.num_runs)
        self._on_progress(f"{terms.num_runs} whole runs of both sides")
        for seed in seeds:
            whole.run(self._base, seed)  # a script that does not run is an error; a changed one, a verdict
        try:
            equality, speed = whole.compare(self._base, before, after, seeds)
            outcome, because = _judged(equality, speed, "", is_timed=True)
        except Failed as e:
            equality, speed = Equality(guarantee="quality", holds=None, because="no runs to compare"), None
            outcome, because = "different", str(e)
        return self._verdict(before, after, (equality, speed, ()), (outcome, because), began)

    def _verdict(
        self,
        before: Request,
        after: Request,
        found: tuple[Equality, Speed | None, tuple[Footprint, ...]],
        judged: tuple[Outcome, str],
        began: float,
    ) -> Verdict:
        num_seeds = self._terms.num_runs if self._terms.guarantee == "quality" else 1
        return Verdict(
            before=before.plan or before.target,
            after=after.plan or after.target,
            equality=found[0],
            speed=found[1],
            footprints=found[2],
            outcome=judged[0],
            because=judged[1],
            device=self._device,
            torch=str(torch.__version__),
            python=platform.python_version(),
            seeds=tuple(range(self._terms.seed, self._terms.seed + num_seeds)),
            seconds=perf_counter() - began,
        )

    def _compare_and_race(self, before: Request, after: Request) -> tuple[Equality, Race | None, str]:
        """Equality, the race if there was one, and what went wrong on the changed side ('' when nothing did)."""
        terms, seed = self._terms, self._terms.seed
        none = Equality(guarantee=terms.guarantee, holds=None, because="nothing was compared")
        with ExitStack() as stack:
            self._on_progress("the first steps of both sides")
            is_base = before == self._base and (seed, "", 0, "") not in self._recorded
            # both are recorded, whether it is read or not: it leaves its traces in allocators, which race alike then
            one_request, two_request = self._recording(before), self._recording(after)
            one_process, one, two_process = self._started(stack, one_request, two_request)
            if one.what == "ended" and (one.error or not one.num_steps):
                raise Failed(f"'{before.target}' ended after {one.num_steps} steps: {one.error or 'too few'}")
            self._device, self._peak_bytes = one.device, one.device_peak_bytes
            self._free_bytes = one.device_free_bytes
            if is_base:
                self._recorded[seed, "", 0, ""] = read_recorded_steps(Path(one_request.folder))
                self._note_environments(one_request)
            try:
                two = two_process.answer(timeout_s=terms.timeout_s)
                if two.what == "ended" and two.error:
                    return none, None, f"'{after.target}' ended after {two.num_steps} steps: {two.error}"
            except Failed as e:
                return none, None, str(e)
            self._free_bytes = two.device_free_bytes or self._free_bytes
            equality = (
                self._compared(after, read_recorded_steps(Path(two_request.folder))) if terms.is_compared else none
            )
            has_more = "ended" not in (one.what, two.what)
            is_in_order = equality.holds is True or not terms.is_compared
            if not is_in_order or not terms.is_timed or not has_more:
                return equality, None, ""
            self._on_progress("racing")
            race = Race(
                budget_s=terms.budget_s / terms.num_processes,
                timeout_s=terms.timeout_s,
                warm_up_steps=terms.warm_up_steps,
                cycle=terms.cycle,
            )
            race.started(one, two)
            try:
                self._race(race, one_process, two_process)
            except Failed as e:
                return equality, None, str(e)
            one_process.let_go()
            two_process.let_go()
        self._start_warm(race, one, two_request)
        return equality, race, race.leak()

    def _start_warm(self, race: Race, one: SideAnswer, request: Request) -> None:
        """Start the changed side once more where the only one compiled for long: later runs find that in a cache."""
        speed = race.speed()
        if speed is None or race.num_starts > 1 or speed.later_s < _COLD_S or speed.ratio < 1:
            return
        self._on_progress("its start once more, now that its kernels are compiled")
        try:
            with self._process(msgspec.structs.replace(request, folder="")) as process:
                race.started(one, process.answer(timeout_s=self._terms.timeout_s))
        except Failed:
            return  # what was seen counts

    def _compared(self, after: Request, steps: list[Step]) -> Equality:
        """The change judged by its steps, and once more with ordered draws where its first losses are others.

        Where environments answer, bit for bit or with the base's answers.
        """
        terms = self._terms
        if terms.seed in self._environments and terms.guarantee != "exact":
            exact = compare_exact(self._steps(terms.seed, ""), steps)
            return exact if exact.holds else self._compared_with_answers(after)
        equality = self._compare(steps)
        if self._terms.guarantee == "exact" or equality.holds or not _differs_from_start(equality):
            return equality
        return self._compared_with_ordered_draws(after, steps) or equality

    def _compared_with_answers(self, after: Request) -> Equality:
        """The change judged on the answers that environments gave in the base's run: a rollout magnifies the last digits."""
        self._how = "answers"
        try:
            self._on_progress("the first steps once more, with the environment's answers of the first run")
            return self._compare(self._first_steps(self._recording(after)))
        except Failed as e:
            return Equality(guarantee=self._terms.guarantee, holds=None, because=str(e))
        finally:
            self._how = ""

    def _note_environments(self, request: Request) -> None:
        path = Path(request.folder) / FILE
        if path.exists() and request.seed is not None:
            self._environments[request.seed] = path

    def _compared_with_ordered_draws(self, after: Request, steps: list[Step]) -> Equality | None:
        """The change judged on random numbers that depend on shapes alone; None where it draws as before or differs all the same.

        It is equal then, and otherwise draws other numbers of the same distribution, which has to be allowed.
        """
        self._how = "ordered draws"
        try:
            self._on_progress("the first steps once more, with random numbers that depend on shapes alone")
            ordered = self._first_steps(self._recording(after))
            if compare_exact(steps[:1], ordered[:1]).holds:
                return None
            equality = self._compare(ordered)
        except Failed:
            return None
        finally:
            self._how = ""
        if equality.holds is not True:
            return None
        if self._terms.guarantee == "distribution":
            return msgspec.structs.replace(equality, guarantee="distribution")
        why = "it draws other random numbers of the same distribution (equal when both draw alike); see --allow distribution"
        return msgspec.structs.replace(equality, guarantee="distribution", holds=False, because=why)

    def _compare(self, after: list[Step]) -> Equality:
        terms, seed, at = self._terms, self._terms.seed, self._terms.at
        base = self._steps(seed, "")
        after = with_names_of(base, after)
        exact = compare_exact(base, after)
        if terms.guarantee == "exact" or exact.holds:
            return exact
        try:
            first = [(at, 0), *((precision, 0) for _, precision in self._finer())]
            # what is judged at a coarser precision mostly is equal by the finer one
            self._record_together(first[:2] if at else [*first, *self._more_to_judge_by(at)])
            rough = self._steps(seed, at)
        except Failed as e:
            why = f"not equal bit for bit, and no steps to measure the rounding by: {e}"
            return Equality(guarantee=terms.guarantee, holds=None, num_steps=len(base), first=exact.first, because=why)
        equality, reference = self._against_references(rough, after)
        if _may_be_rounding(equality, eps=_roundoff_of(rough, at)):
            self._record_together(self._more_to_judge_by(at))
            equality = self._under_noise(rough, after, reference) or equality
        return msgspec.structs.replace(equality, at=at)

    def _against_references(self, rough: list[Step], after: list[Step]) -> tuple[Equality, list[Step] | None]:
        """The change judged by more precise runs of the same steps, and the run that judged it; None where there is none."""
        terms = self._terms
        found = Equality(guarantee=terms.guarantee, holds=None, num_steps=len(rough), because="no step was recorded")
        for name, dtype in self._finer():
            try:
                reference = self._steps(terms.seed, dtype)
            except Failed as e:
                found = msgspec.structs.replace(found, because=f"there is no run in a finer precision ({name}): {e}")
                continue
            is_trusted = name == "float64" and self._is_reference(reference)
            found = _bounded(rough, after, reference, at=terms.at, name=name, is_trusted=is_trusted)
            if found.holds is not None:
                return found, reference
        return found, None

    def _under_noise(self, rough: list[Step], after: list[Step], reference: list[Step] | None) -> Equality | None:
        """The change judged by what rounding noise does to the steps before it; None where noisy runs are not of the same steps.

        One run of chaotic steps can be near the reference by luck, and a unit of ReLU that flips changes a gradient by per cents;
        random numbers that depend on the dtype leave no reference but the steps themselves.
        """
        terms = self._terms
        noisy = []
        for noise_seed in range(1, _NUM_NOISY + 1):
            try:
                steps = self._steps(terms.seed, terms.at, noise_seed)
            except Failed:
                return None
            if not is_same_start(steps, rough, eps=max(_roundoff_of(rough, terms.at), self._coarsest_by_default)):
                return None
            noisy.append(steps)
        name: Reference = "noise"
        return _bounded(rough, after, reference or rough, at=terms.at, name=name, is_trusted=True, noisy=noisy)

    def _finer(self) -> Iterator[tuple[Reference, Precision]]:
        """Precisions finer than the one whose rounding counts, the cheapest first: beside 16 bits the script as it is will do."""
        if self._terms.at:
            yield "finer", self._strict if self._terms.at == "tf32" else ""
        yield "float64", "float64"

    @property
    def _coarsest_by_default(self) -> float:
        """The spacing of numbers that products in float32 may be rounded to: cuDNN takes TF32 unless it is told not to."""
        return roundoff("float32" if self._device == "cpu" else "tf32")

    @property
    def _strict(self) -> Precision:
        """The script's own precision, without TF32."""
        return "" if self._device == "cpu" else "strict"

    def _is_reference(self, steps: list[Step]) -> bool:
        """Whether steps in float64 are those of the script: so they are when the script in plain float32 comes close to them.

        What runs by default may be far off: convolutions on a GPU round to TF32.
        """
        try:
            return is_close(self._steps(self._terms.seed, self._strict), steps)
        except Failed:
            return False

    def _steps(self, seed: int, dtype: str, noise_seed: int = 0) -> list[Step]:
        """The base's steps, in this precision and with this rounding noise; run for that if they have not been.

        Raises Failed when they cannot be run.
        """
        # the base's own answers are what it gets again
        how: _How = "" if self._how == "answers" and not dtype and not noise_seed else self._how
        key = (seed, dtype, noise_seed, how)
        if key in self._unrecordable:
            raise Failed(self._unrecordable[key])
        if key not in self._recorded:
            precision = f" in {dtype}" if dtype else ""
            self._on_progress(f"the steps before the change{precision}{' under rounding noise' if noise_seed else ''}")
            request = msgspec.structs.replace(self._recording(self._base), dtype=dtype, noise_seed=noise_seed)
            try:
                with self._judging():
                    self._recorded[key] = self._first_steps(request)
                    self._note_environments(request)
            except Failed as e:
                self._unrecordable[key] = str(e)
                raise
        return self._recorded[key]

    def _more_to_judge_by(self, at: str) -> list[tuple[str, int]]:
        """Precisions and noise seeds of the runs that are wanted where a finer one alone does not judge."""
        return [(self._strict, 0), *((at, 1 + i) for i in range(_NUM_NOISY))]

    def _record_together(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Record the base's steps in these precisions and with these noise seeds, at once as far as the device has memory.

        A process takes most of its time to start, for which the device does nothing. On a CPU they would wait for each other.
        """
        if self._device == "cpu":
            return
        seed, how = self._terms.seed, self._how
        wanted = list(dict.fromkeys(wanted))
        known = self._recorded.keys() | self._unrecordable.keys()
        left = [(dtype, noise) for dtype, noise in wanted if (seed, dtype, noise, how) not in known]
        while left:
            num = _num_that_fit([dtype for dtype, _ in left], self._peak_bytes, self._free_bytes)
            group, left = left[:num], left[num:]
            self._on_progress(f"the steps before the change in {len(group)} other ways at once")
            with self._judging(), ExitStack() as stack:
                requests = [
                    msgspec.structs.replace(self._recording(self._base), dtype=dtype, noise_seed=noise)
                    for dtype, noise in group
                ]
                processes = [stack.enter_context(self._process(request)) for request in requests]
                for (dtype, noise), process in zip(group, processes, strict=True):
                    with suppress(Failed):  # it is run alone where it is wanted, with all the memory
                        self._recorded[seed, dtype, noise, how] = self._recorded_by(process)

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """What goes by inside is spent once for all that are judged by it."""
        began = perf_counter()
        try:
            yield
        finally:
            self.recording_s += perf_counter() - began

    def _first_steps(self, request: Request) -> list[Step]:
        """What a process for this request records. Raises Failed when it cannot be run."""
        with self._process(request) as process:
            return self._recorded_by(process)

    def _recorded_by(self, process: SideProcess) -> list[Step]:
        answer = process.answer(timeout_s=self._terms.timeout_s)
        if answer.what == "ended" and (answer.error or not answer.num_steps):
            raise Failed(answer.error or f"it ended after {answer.num_steps} steps")
        return read_recorded_steps(Path(process.request.folder))

    def _started(
        self, stack: ExitStack, first: Request, second: Request
    ) -> tuple[SideProcess, SideAnswer, SideProcess]:
        """Both sides, and what the first answered when it stood. They start at once where a device does the work.

        On a CPU they would wait for each other's threads: the first eight steps of two digit_vae took 12 s at once on two cores,
        and 2 s one after the other.
        """
        one = stack.enter_context(self._process(first))
        if self._device != "cpu":
            two = stack.enter_context(self._process(second))
            return one, one.answer(timeout_s=self._terms.timeout_s), two
        answer = one.answer(timeout_s=self._terms.timeout_s)
        return one, answer, stack.enter_context(self._process(second))

    def _process(self, request: Request) -> SideProcess:
        return SideProcess(request, self._servers)

    def _recording(self, request: Request) -> Request:
        self._num_folders += 1
        folder = Path(self._folder.name) / str(self._num_folders)
        folder.mkdir()
        terms = self._terms
        answers = self._environments.get(terms.seed) if self._how == "answers" else None
        return msgspec.structs.replace(
            request,
            folder=str(folder),
            num_recorded=terms.num_steps,
            seed=terms.seed,
            has_ordered_draws=self._how == "ordered draws",
            environment_answers=str(answers or ""),
        )

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


def _bounded(
    rough: list[Step],
    after: list[Step],
    reference: list[Step],
    *,
    at: str,
    name: Reference,
    is_trusted: bool,
    noisy: Sequence[list[Step]] = (),
) -> Equality:
    """`compare_bounded`, with losses added up where a step starts its backwards from another number of them."""
    if differ_in_losses(rough, after):
        rough, after, reference, *noisy = map(with_losses_added, (rough, after, reference, *noisy))
    eps = _roundoff_of(rough, at)
    equality = compare_bounded(rough, after, reference, eps=eps, is_trusted=is_trusted, noisy=noisy)
    return msgspec.structs.replace(equality, reference=name)


def _num_that_fit(dtypes: Sequence[str], peak_bytes: int, free_bytes: int) -> int:
    """How many of the first of these runs of a script go on a device at once, beside two that stand: one at least."""
    left, num = _SPARED * (free_bytes - peak_bytes), 0
    for dtype in dtypes:
        left -= (_WIDE if dtype == "float64" else _NOISY) * peak_bytes
        if left < 0:
            break
        num += 1
    return max(1, num)


def _differs_from_start(equality: Equality) -> bool:
    """Whether the first loss or output is another number already, or nothing is known of it."""
    first = equality.first
    return first is None or (first.step == 1 and first.what in ("loss", "output") and first.error is not None)


def _may_be_rounding(equality: Equality, *, eps: float) -> bool:
    """Whether a change that was not found equal may be after all: rounding leaves half of the digits of the first loss."""
    first = equality.first
    if equality.holds or first is None:
        return not equality.holds
    return first.error is not None and (not _differs_from_start(equality) or first.error <= closeness(first.what, eps))


def _roundoff_of(steps: list[Step], at: str) -> float:
    return roundoff(at) if at else own_roundoff(steps)


def _judged(equality: Equality, speed: Speed | None, failure: str, *, is_timed: bool) -> tuple[Outcome, str]:
    if failure:
        return "different", failure
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


def _judged_by_size(equality: Equality, footprints: tuple[Footprint, ...], failure: str) -> tuple[Outcome, str]:
    """The device's peak where there is one, else the host's."""
    if failure:
        return "different", failure
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
