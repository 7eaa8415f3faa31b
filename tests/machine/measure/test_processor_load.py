"""Who used the cores: from counters, and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from time import perf_counter

import pytest

from flatout.machine.measure.processor_load import LoadReading, TimedLoad, cores_of, read_load


def reading(at_s: float, *, busy_s: float = 0.0, own_s: float = 0.0, stolen_s: float = 0.0) -> LoadReading:
    return LoadReading(
        at_s=at_s, busy_s=busy_s, stolen_s=stolen_s, own_s=own_s, waited_s=None, throttled_s=0.0, num_cores=2
    )


def test_what_is_not_our_own_is_others() -> None:
    load = TimedLoad().between(reading(0.0), reading(10.0, busy_s=15.0, own_s=9.0, stolen_s=3.0)).load()

    assert load is not None
    assert load.own_cores == pytest.approx(0.9)
    assert load.other_cores == pytest.approx(0.6)
    assert load.stolen_cores == pytest.approx(0.3)
    assert load.is_busy_with_others
    assert load.is_stolen_from


def test_several_stretches_count_together_and_what_lies_between_them_does_not() -> None:
    timed = TimedLoad().between(reading(0.0), reading(1.0, busy_s=1.0, own_s=1.0))
    timed = timed.between(reading(50.0, busy_s=90.0, own_s=2.0), reading(53.0, busy_s=93.0, own_s=5.0))

    load = timed.load()

    assert load is not None
    assert load.seconds == pytest.approx(4.0)
    assert load.other_cores == pytest.approx(0.0)
    assert not load.is_disturbed


def test_a_stretch_of_few_ticks_tells_nothing() -> None:
    assert TimedLoad().between(reading(0.0), reading(0.05, busy_s=0.05)).load() is None


def test_a_system_that_counts_nothing_is_not_called_quiet() -> None:
    load = TimedLoad().between(reading(0.0), reading(10.0, own_s=9.0)).load()

    assert load is not None
    assert load.other_cores is None


def test_cores_that_the_process_may_not_use_do_not_count() -> None:
    line = "cpu{} 100 0 0 0 0 0 0 0 0 0"
    one, _ = cores_of([line.format(0), line.format(7)], {7})
    both, _ = cores_of([line.format(0), line.format(7)], {0, 7})

    assert both == pytest.approx(2 * one)


@pytest.mark.slow
@pytest.mark.skipif(read_load() is None, reason="this system has no /proc/stat")
def test_a_process_that_spins_on_one_of_our_cores_is_found() -> None:
    core = min(os.sched_getaffinity(0))
    # Not below this process, so it is another's: the shell that starts it ends at once.
    spin = f"import os, time; os.sched_setaffinity(0, {{{core}}}); end = time.time() + 3\nwhile time.time() < end: pass"
    subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{spin}" &'], check=True, stdout=subprocess.DEVNULL)
    before = read_load()
    end = perf_counter() + 1.5
    while perf_counter() < end:  # our own work is not the other's
        sum(range(1000))

    load = TimedLoad().between(before, read_load()).load()

    assert load is not None
    assert load.other_cores is not None
    assert load.other_cores > 0.2
    assert load.own_cores > 0.2
