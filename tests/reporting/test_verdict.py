"""What a Verdict says, in a sentence and in rows."""

from __future__ import annotations

import pytest
from rich.console import Console

from flatout.records.lever import PlannedLever
from flatout.records.plan import Plan
from flatout.records.verdict import Difference, Equality, Footprint, Outcome, Speed, Verdict
from flatout.reporting.ladder import ladder
from flatout.reporting.verdict import headline, verdict_report

SPEED = Speed(ratio=1.5, low=1.4, high=1.6, num_pairs=12, before_s=0.012, after_s=0.008)
SLOWER = Speed(ratio=0.5, low=0.4, high=0.6, num_pairs=12, before_s=0.008, after_s=0.016)
EQUAL = Equality(
    guarantee="bounded",
    is_kept=True,
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
    is_kept=False,
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
        (verdict("unknown", because="too few steps"), "COULD NOT TELL: too few steps"),
    ],
)
def test_the_answer_comes_first_in_a_sentence(found: Verdict, sentence: str) -> None:
    assert headline(found) == sentence
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


def test_a_ladder_has_a_rung_for_each_lever_and_the_reasons_of_the_others() -> None:
    plan = Plan(
        lever=(
            PlannedLever(id="graph.compile", guarantee="bounded", predicted=(1.1, 1.6), measured=(1.5, 1.4, 1.6)),
            PlannedLever(id="parallelism.thread-count", guarantee="bounded", parameters={"num_threads": 2}),
        )
    )
    text = " ".join(
        shown(ladder(plan, verdict("proved"), [("memory.channels-last", "no image")], is_complete=False)).split()
    )
    assert text.startswith("1.50x faster (1.40 - 1.60), 12.0 ms -> 8.00 ms a step")
    assert "1 graph.compile 1.10 - 1.60x 1.50x (1.40 - 1.60) bounded" in text
    assert "parallelism.thread-count (num_threads=2)" in text
    assert "memory.channels-last no image" in text
    assert "goes on from here" in text


def test_without_a_plan_the_ladder_says_so() -> None:
    text = shown(ladder(Plan(), None, [("graph.compile", "slower")], is_complete=True))
    assert text.startswith("No plan")
    assert "slower" in text


def text_of(found: Verdict) -> str:
    return shown(verdict_report(found))


def shown(drawing: object) -> str:
    console = Console(width=100, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(drawing)
    return capture.get()
