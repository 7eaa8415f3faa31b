"""What a Verdict says, in a sentence and in rows."""

from __future__ import annotations

import msgspec
import pytest

from flatout.core.records.verdict import Difference, Equality, Footprint, Outcome, Speed, Verdict
from flatout.report.parts.verdict import verdict_blocks, verdict_cases, verdict_headline
from flatout.report.text import plain_text

SPEED = Speed(ratio=1.5, low=1.4, high=1.6, num_pairs=12, before_s=0.012, after_s=0.008)
SLOWER = Speed(ratio=0.5, low=0.4, high=0.6, num_pairs=12, before_s=0.008, after_s=0.016)
EQUAL = Equality(
    guarantee="bounded",
    holds=True,
    num_steps=8,
    num_tensors=100,
    reference="float64",
    factor=4.0,
    worst=0.25,
    before_error=1e-6,
    after_error=2e-6,
)
WRONG = Equality(
    guarantee="bounded",
    holds=False,
    num_steps=8,
    num_tensors=100,
    reference="float64",
    factor=4.0,
    worst=99.0,
    first=Difference(step=3, what="gradient", tensor="Net.head.weight", error=0.01, allowed=1e-5),
)


def verdict(outcome: Outcome, *, equality: Equality = EQUAL, speed: Speed | None = SPEED, because: str = "") -> Verdict:
    return Verdict(
        before="a.py",
        after="b.py",
        equality=equality,
        speed=speed,
        footprints=(Footprint(device="cpu", before_bytes=1 << 30, after_bytes=1 << 29),),
        outcome=outcome,
        because=because,
        device="cpu",
        torch="2.13.0",
        python="3.11.7",
        seconds=12.0,
    )


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (verdict("proved"), "PROVED: equal within the rounding of the steps before, 1.50x (1.40 - 1.60) faster"),
        (verdict("proved", speed=None), "PROVED: equal within the rounding of the steps before; not timed"),
        (
            verdict("slower", speed=SLOWER),
            "SLOWER: equal within the rounding of the steps before, but 0.50x (0.40 - 0.60) as fast",
        ),
        (verdict("different", equality=WRONG, speed=None), "DIFFERENT: step 3, gradient Net.head.weight"),
        (verdict("unknown", because="too few steps", speed=None), "COULD NOT TELL: too few steps"),
        (verdict("unknown", because="noisy"), "COULD NOT TELL: noisy, 1.50x (1.40 - 1.60)"),
        (
            verdict(
                "unknown", equality=Equality(guarantee="bounded", holds=None, because="no reference"), because="noisy"
            ),
            "COULD NOT TELL: noisy",
        ),
    ],
)
def test_the_answer_comes_first_in_a_sentence(found: Verdict, sentence: str) -> None:
    assert verdict_headline(found) == sentence
    assert text_of(found).startswith(sentence)


def test_rows_say_what_was_compared_and_measured() -> None:
    text = " ".join(text_of(verdict("proved")).split())
    assert "8 steps, 100 tensors" in text
    assert "12.0 ms -> 8.00 ms a step; 12 pairs" in text
    assert "1.00 GiB -> 512 MiB (0.50x)" in text
    assert "cpu; torch 2.13.0, Python 3.11.7" in text


def test_what_differs_first_is_told_with_what_was_allowed() -> None:
    text = " ".join(text_of(verdict("different", equality=WRONG, speed=None)).split())
    assert "step 3, gradient Net.head.weight: off by 0.01 of its norm, 1e-05 allowed" in text


def text_of(found: Verdict) -> str:
    return plain_text(verdict_blocks(found))


def test_a_longer_start_is_told_with_the_steps_that_make_up_for_it() -> None:
    slow = Speed(
        ratio=1.5,
        low=1.4,
        high=1.6,
        num_pairs=12,
        before_s=0.012,
        after_s=0.008,
        num_first=8,
        first_before_s=2.0,
        first_after_s=10.0,
    )
    text = " ".join(text_of(verdict("proved", speed=slow)).split())
    assert slow.break_even_steps == 8 + 2000
    assert "made up for after 2008 steps" in text
    assert "made up for" not in text_of(verdict("proved"))


def test_levers_that_met_nothing_to_change_are_named() -> None:
    found = msgspec.structs.replace(verdict("unknown"), missed=("graph.compile", "memory.channels-last"))
    assert "met nothing to change in these steps: graph.compile, memory.channels-last" in " ".join(
        text_of(found).split()
    )
    assert "met nothing" not in text_of(verdict("unknown"))


def test_a_start_is_never_made_up_for_by_steps_that_are_no_faster() -> None:
    never = Speed(ratio=0.5, low=0.4, high=0.6, num_pairs=12, before_s=1, after_s=2, num_first=8, first_after_s=1)
    assert never.break_even_steps is None
    assert SPEED.break_even_steps == 0


def test_a_whole_run_gains_what_its_steps_save_less_what_it_starts_later() -> None:
    speed = Speed(
        ratio=2.0,
        low=1.9,
        high=2.1,
        num_pairs=12,
        before_s=0.2,
        after_s=0.1,
        num_first=8,
        first_before_s=3.0,
        first_after_s=12.0,
    )
    assert speed.pays_from(1.0) == 8 + 100
    sure = msgspec.structs.replace(speed, low=speed.ratio / 1.1).at_least
    assert sure.ratio == pytest.approx(speed.ratio / 1.1) and sure.after_s == pytest.approx(1.1 * speed.after_s)
    assert (sure.pays_from(1.0) or 1e9) > 8 + 100
    for num_steps in (8, 50, 108, 1000):
        before_s, after_s = 3.0 + 0.2 * (num_steps - 8), 1.0 + 12.0 + 0.1 * (num_steps - 8)
        assert speed.gain_of_run(num_steps, 1.0) == pytest.approx(before_s / after_s)
        assert (speed.gain_of_run(num_steps, 1.0) >= 1) == (num_steps >= 108)


UNSURE = msgspec.structs.replace(EQUAL, holds=None, because="too few steps")


@pytest.mark.parametrize(
    ("found", "equality", "speed"),
    [
        (verdict("proved"), "passed", "passed"),
        (verdict("proved", speed=None), "passed", "skipped"),
        (verdict("slower", speed=SLOWER), "passed", "failed"),
        (verdict("different", equality=WRONG, speed=None), "failed", "skipped"),
        (verdict("different", because="it leaks"), "failed", "skipped"),
        (verdict("unknown", equality=UNSURE, speed=None, because="too few steps"), "error", "skipped"),
        (verdict("unknown", because="neither faster nor slower"), "passed", "error"),
    ],
)
def test_cases_fail_as_the_exit_code_says(found: Verdict, equality: str, speed: str) -> None:
    cases = {case.name: case for case in verdict_cases(found)}

    assert (cases["equality"].result, cases["speed"].result) == (equality, speed)
    results = {case.result for case in cases.values()}
    assert {0: not results & {"failed", "error"}, 1: "failed" in results, 3: "error" in results}[found.exit_code]
    assert all(case.message for case in cases.values() if case.result != "passed")


def test_losses_are_named_once() -> None:
    assert Difference(step=1, what="loss", tensor="loss 1").place == "loss 1"
    assert Difference(step=1, what="gradient", tensor="head.weight").place == "gradient head.weight"
    assert Difference(step=1, what="loss", tensor="").place == "loss"
    assert Difference(step=1, what="gradient", tensor="gradient_net.weight").place == "gradient gradient_net.weight"
