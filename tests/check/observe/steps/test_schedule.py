from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatout.check.observe.steps.schedule import Mode, Schedule


def modes(schedule: Schedule, num: int, *, deep_allowed: bool = True) -> list[Mode]:
    return [
        schedule.mode(num_steps=num_steps, deep_elapsed_s=0.0, light_elapsed_s=0.0, deep_allowed=deep_allowed)
        for num_steps in range(num)
    ]


def test_a_short_script_is_observed_from_all_sides() -> None:
    assert set(modes(Schedule(), 12)) == {Mode.WARM_UP, Mode.LIGHT, Mode.READS, Mode.MEMORY, Mode.DEEP}


def test_no_deep_step_where_they_are_not_allowed() -> None:
    assert Mode.DEEP not in modes(Schedule(), 50, deep_allowed=False)


def test_a_device_gets_a_step_for_its_kernels() -> None:
    schedule = Schedule()
    on_device = [
        schedule.mode(num_steps=n, deep_elapsed_s=0.0, light_elapsed_s=0.0, deep_allowed=True, is_device=True)
        for n in range(40)
    ]
    assert on_device.count(Mode.KERNELS) == schedule.num_kernels
    assert on_device.index(Mode.KERNELS) < on_device.index(Mode.DEEP)
    assert on_device[: on_device.index(Mode.KERNELS)].count(Mode.LIGHT) == schedule.num_light_on_device
    assert Mode.KERNELS not in modes(schedule, 40)


def test_the_observation_ends_after_its_time() -> None:
    late = Schedule(observe_s=1.0).mode(num_steps=100, deep_elapsed_s=0.0, light_elapsed_s=1.1, deep_allowed=True)
    assert late is Mode.DONE


@given(
    num_steps=st.integers(0, 100_000),
    deep=st.floats(0, 1e3),
    light=st.floats(0, 1e3),
    allowed=st.booleans(),
)
def test_deep_steps_never_come_before_a_light_one_nor_beyond_their_number(
    num_steps: int, deep: float, light: float, allowed: bool
) -> None:
    schedule = Schedule()
    mode = schedule.mode(num_steps=num_steps, deep_elapsed_s=deep, light_elapsed_s=light, deep_allowed=allowed)
    before = schedule.num_warm_up + schedule.num_light_before + schedule.num_reads + schedule.num_memory
    if mode is Mode.DEEP:
        assert allowed
        assert before <= num_steps < before + schedule.num_deep


@given(num_steps=st.integers(0, 200), is_device=st.booleans())
def test_a_block_leaves_no_close_look_out(num_steps: int, is_device: bool) -> None:
    schedule = Schedule()
    room = schedule.room_for_block(num_steps=num_steps, is_device=is_device)
    if not room:
        return
    skipped = [
        schedule.mode(num_steps=n, deep_elapsed_s=0.0, light_elapsed_s=0.0, deep_allowed=True, is_device=is_device)
        for n in range(
            num_steps, num_steps + min(room, 300) + 1
        )  # the steps of the block, and the watched one after it
    ]
    assert set(skipped) == {Mode.LIGHT}


def test_of_long_steps_fewer_are_waited_for() -> None:
    schedule = Schedule(observe_s=8.0)
    early = schedule.for_long_steps(num_steps=5, light_elapsed_s=10.0, num_calls=2)
    assert early is schedule  # two light steps are too few
    enough = schedule.for_long_steps(num_steps=6, light_elapsed_s=3.0, num_calls=2)
    assert enough.num_before_looks(is_device=True) == 6
    assert [mode_after(enough, n) for n in (5, 6, 7)] == [Mode.LIGHT, Mode.READS, Mode.KERNELS]
    short = schedule.for_long_steps(num_steps=6, light_elapsed_s=0.1, num_calls=2)
    assert short.num_before_looks(is_device=True) == Schedule().num_before_looks(is_device=True)


def test_long_steps_of_many_calls_are_not_looked_at_for_their_memory() -> None:
    schedule = Schedule(deep_budget_s=15.0)
    for num_calls, num_memory in ((2, 1), (2048, 0)):
        assert schedule.for_long_steps(num_steps=6, light_elapsed_s=11.0, num_calls=num_calls).num_memory == num_memory
    assert schedule.for_long_steps(num_steps=6, light_elapsed_s=0.5, num_calls=2048).num_memory == 1


def test_the_device_is_not_traced_over_thousands_of_calls() -> None:
    for num_calls, num_kernels in ((320, Schedule().num_kernels), (2300, 0)):
        schedule = Schedule().for_long_steps(num_steps=6, light_elapsed_s=20.0, num_calls=num_calls)
        assert schedule.num_kernels == num_kernels


def test_steps_by_another_border_were_a_warm_up() -> None:
    assert Schedule().after_restart(100).num_warm_up == 1
    assert Schedule().after_restart(2).num_warm_up == Schedule().num_warm_up


def mode_after(schedule: Schedule, num_steps: int) -> Mode:
    return schedule.mode(
        num_steps=num_steps, deep_elapsed_s=0.0, light_elapsed_s=0.0, deep_allowed=True, is_device=True
    )
