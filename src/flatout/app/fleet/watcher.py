"""Watches the training job of this process: times its steps, samples its node, and looks into some steps once.

The training pays for a clock's reading at each step, and for one look into its steps, which is made once the job has run so long
that it stays below the share of its time that the policy allows. Everything else is done by a thread that mostly sleeps.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from torch.optim.optimizer import Optimizer

from flatout.app.fleet.identity import JobPlace, job_here, place_here, with_parameters
from flatout.app.fleet.node_watch import NodeWatch
from flatout.blocks.recording.job_store.opening import default_store, open_store, policy_of
from flatout.blocks.recording.job_store.policy import FleetPolicy, redacted
from flatout.blocks.recording.job_store.store import JobStore
from flatout.core import units
from flatout.core.errors import FlatoutError
from flatout.core.records.job import JobOutcome, JobRecord
from flatout.core.runtime.optimizer_steps import OptimizerStepHooks
from flatout.core.runtime.script import error_line
from flatout.machine.measure.stats import median_estimate

if TYPE_CHECKING:
    from flatout.app.fleet.look import JobLook

_TIMED: Final = 500
"""Steps of which the median is taken, the last ones."""
_FEWEST_TIMED: Final = 5
_STEP_COST_S: Final = 0.5e-6
"""What the hook takes of each step (bench/watch_cost.py: 0.3 to 0.5 us on an EPYC)."""
_LOOK_S: Final = 1.0
_LOOK_STEPS: Final = 12.0
"""What a look is expected to take: so many seconds, and so many steps' time (bench/watch_cost.py --look: half a second with steps
of 15 ms). What it took is counted."""
_IMPORTS_S: Final = 0.5
_PROFILER_S: Final = 3.0
"""Opening the profiler of a GPU's kernels, about."""
_OTHERS: Final = 24
"""Steps of other optimizers in a row, after which the one whose steps are counted is taken to be gone."""


_current: list[JobWatcher] = []
"""The watcher of this process; at most one."""


def end_watch(error: str) -> str:
    """The training is over, though not the interpreter: write how it ended, '' for well; a sentence on what watching took.

    Returns '' where nothing is watched.
    """
    if not _current:
        return ""
    watcher = _current[0]
    is_interrupted = error.startswith(KeyboardInterrupt.__name__)
    watcher.end("ended" if is_interrupted else "failed" if error else "finished", error)
    return watcher.cost_text()


def begin_to_watch(optimizer: Optimizer, *, num_before: int) -> None:
    """Watch the job of this process from now on; `num_before` steps have been made. What goes wrong is printed, never raised."""
    began = perf_counter()
    try:
        place = place_here(os.environ)
        if place.local_rank:
            return
        path = Path(os.environ.get("FLATOUT_STORE") or default_store())
        store = open_store(path)  # before the policy, for the better message where the path is wrong
        watcher = JobWatcher(store, policy_of(path), place, optimizer, num_before=num_before)
        watcher.start(perf_counter() - began)
        _current.append(watcher)
    except FlatoutError as e:
        sys.stderr.write(f"flatout: this job is not watched: {e}\n")
    except Exception as e:  # noqa: BLE001  # ours; no job fails because it is not watched
        sys.stderr.write(f"flatout: this job is not watched: {error_line(e)}\n")


class JobWatcher:
    """The watcher of one process; `start` begins, and the interpreter's end writes the last record."""

    def __init__(
        self,
        store: JobStore,
        policy: FleetPolicy,
        place: JobPlace,
        optimizer: Optimizer,
        *,
        num_before: int = 0,
    ) -> None:
        self._store, self._policy, self._place = store, policy, place
        self._pid = os.getpid()
        self._leader, self._num_others = id(optimizer), 0
        self._began_s = _process_began_s()
        self._record = with_parameters(
            job_here(os.environ, place, policy, began_s=self._began_s, version=_version()), optimizer
        )
        self._record = msgspec.structs.replace(self._record, start_s=max(0.0, _now_s() - self._began_s))
        self._durations: deque[float] = deque(maxlen=_TIMED)
        self._num_steps, self._num_timed, self._last = num_before, 0, perf_counter()
        self._node = NodeWatch(self._record, place)
        self._lock = threading.Lock()
        """Held while the record is written, which may take seconds: never taken by a step."""
        self._revision = 0
        self._is_over = threading.Event()
        self._spent_s = self._thread_s = 0.0
        self._step_listener: OptimizerStepHooks | None = None
        self._look: JobLook | None = None
        self._is_look_wanted = policy.watch.looks and place.rank == 0
        self._is_look_due = False
        self._is_failing = False
        self._not_looked = "" if self._is_look_wanted else "the policy wants no looks" if place.rank == 0 else "rank 0"

    def start(self, spent_s: float) -> None:
        """Begin to watch; `spent_s` is what it has taken of the training until now."""
        began = perf_counter()
        self._step_listener = OptimizerStepHooks(after=self._on_step)
        atexit.register(self._end_at_exit)
        thread = threading.Thread(target=self._run, name="flatout-watch", daemon=True)
        thread.start()
        self._last = perf_counter()
        self._spent_s += spent_s + self._last - began

    # -- the training's thread --------------------------------------------------------------------------------------------

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) != self._leader:
            self._num_others += 1
            if self._num_others > _OTHERS:
                self._leader, self._num_others = id(optimizer), 0
            return
        now = perf_counter()
        self._durations.append(now - self._last)
        self._last = now
        self._num_steps += 1
        self._num_timed += 1
        self._num_others = 0
        if self._is_look_due:
            self._begin_look(optimizer)

    def _begin_look(self, optimizer: Optimizer) -> None:
        self._is_look_due = False
        if os.getpid() != self._pid:  # a forked child
            return
        began = perf_counter()
        try:
            from flatout.app.fleet.look import JobLook

            self._look = JobLook(self._place, self._record, self._end_look)
            self._not_looked = self._look.start(optimizer)
            if self._not_looked:
                self._look = None
        except Exception as e:  # noqa: BLE001  # ours
            self._not_looked, self._look = f"looking failed: {error_line(e)}", None
        self._last = perf_counter()
        self._spent_s += self._last - began

    def _end_look(self, look: JobLook) -> None:
        """The look is over, and the training goes on without it."""
        self._record, self._look = look.record, None
        self._not_looked = look.failure
        self._spent_s += look.spent_s
        self._durations.clear()  # some of them were watched closely
        self._last = perf_counter()

    # -- the watching thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._beat()
        except Exception as e:  # noqa: BLE001  # ours; the training goes on, and its end is still written
            sys.stderr.write(f"flatout: this job is watched no more: {error_line(e)}\n")

    def _beat(self) -> None:
        heartbeat_s = self._policy.watch.heartbeat_s
        wait_s = min(1.0, heartbeat_s)
        written_s = perf_counter() - heartbeat_s
        while not self._is_over.wait(wait_s):
            if os.getpid() != self._pid:
                return
            began_s = thread_time()
            self._node.sample()
            if self._is_look_wanted and self._is_worth_a_look():
                self._is_look_wanted = False
                self._import_for_look()
                self._is_look_due = True
            if perf_counter() - written_s >= heartbeat_s:
                written_s = perf_counter()
                self._write("running")
            wait_s = heartbeat_s / 4
            self._thread_s += thread_time() - began_s

    def _is_worth_a_look(self) -> bool:
        """Whether a look would stay within its share of what the job has run already."""
        if len(self._durations) < _FEWEST_TIMED:
            return False
        return self._cost_s() + self._expected_s() <= self._policy.watch.cost_fraction * self._elapsed_s()

    def _expected_s(self) -> float:
        durations = sorted(self._durations.copy())  # the training goes on adding
        step_s = durations[len(durations) // 2] if durations else 0.0
        device_s = _PROFILER_S if self._record.num_gpus else 0.0
        return _IMPORTS_S + _LOOK_S + device_s + _LOOK_STEPS * step_s

    def _import_for_look(self) -> None:
        """Import what a look needs here, so that the training does not wait for the disk."""
        with suppress(Exception):  # the look says what is missing
            from flatout.app.fleet.look import import_all

            import_all()

    def _cost_s(self) -> float:
        # While this thread works the training may wait for the interpreter: all of its time counts.
        return self._spent_s + self._thread_s + _STEP_COST_S * self._num_timed

    def _elapsed_s(self) -> float:
        return max(0.0, _now_s() - self._began_s)

    # -- writing ----------------------------------------------------------------------------------------------------------

    def _write(self, outcome: JobOutcome, error: str = "") -> None:
        with self._lock:
            if outcome == "running" and self._is_over.is_set():
                return  # the end has been written, or will be: nothing comes after it
            record = self._with_numbers(outcome, error)
            try:
                self._store.write(redacted(record, self._policy.redact))
                self._revision = record.revision
                self._is_failing = False
            except FlatoutError as e:
                if not self._is_failing:
                    sys.stderr.write(f"flatout: the record of this job cannot be written now: {e}\n")
                self._is_failing = True

    def _with_numbers(self, outcome: JobOutcome, error: str) -> JobRecord:
        durations = list(self._durations.copy())
        found = median_estimate(durations) if len(durations) >= _FEWEST_TIMED else None
        readings = self._node.readings()
        before = self._record
        return msgspec.structs.replace(
            before,
            revision=self._revision + 1,
            written_s=_now_s(),
            outcome=outcome,
            error=error,
            num_steps=self._num_steps,
            num_timed=len(durations),
            step_s=found.value if found is not None else before.step_s,
            low_s=found.low if found is not None else before.low_s,
            high_s=found.high if found is not None else before.high_s,
            last_step_s=_now_s() - (perf_counter() - self._last),
            utilisation=readings.utilisation if readings.utilisation is not None else before.utilisation,
            memory_bytes=readings.memory_bytes,
            health=readings.health,
            not_looked=self._why_not_looked(),
            observing_s=self._cost_s(),
        )

    def _why_not_looked(self) -> str:
        if self._not_looked or self._record.saved_fraction is not None:
            return self._not_looked
        share = units.percent(self._policy.watch.cost_fraction)
        expected_s = self._expected_s()
        return (
            f"a look takes about {units.duration(expected_s)}, which is {share} of "
            f"{units.long_duration(expected_s / self._policy.watch.cost_fraction)}; the job has run "
            f"{units.long_duration(self._elapsed_s())}"
        )

    def end(self, outcome: JobOutcome, error: str) -> None:
        """Write how the training ended, and watch no more; nothing happens the second time, nor in a forked child."""
        if os.getpid() != self._pid or self._is_over.is_set():
            return
        self._is_over.set()
        atexit.unregister(self._end_at_exit)
        if self._step_listener is not None:
            self._step_listener.remove()
        with suppress(Exception):
            if self._look is not None:
                self._look.finish()
        self._write(outcome, error)
        _current.clear()

    def cost_text(self) -> str:
        """A sentence on what watching took."""
        cost_s, elapsed_s = self._cost_s(), self._elapsed_s()
        return (
            f"watching took {units.duration(cost_s)} of the {units.long_duration(elapsed_s)} of this job, "
            f"{units.percent(cost_s / elapsed_s if elapsed_s else 0.0)}"
        )

    def _end_at_exit(self) -> None:
        """The interpreter ends, and knows how."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, KeyboardInterrupt):
            self.end("ended", "KeyboardInterrupt")
        else:
            self.end("finished" if error is None else "failed", error_line(error) if error is not None else "")


def _now_s() -> float:
    return datetime.now(UTC).timestamp()


def _process_began_s() -> float:
    """The Unix time at which this process began, which is when its GPUs were taken; now where that is not known."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _now_s()
    return _now_s() - max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))


def _version() -> str:
    try:
        return version("flatout")
    except PackageNotFoundError:
        return ""
