"""Claims that contradict the measured step are left out, and the report says which."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evidence_builder import MACHINE, EvidenceBuilder
from tests.lawful import assert_lawful

from flatout.check.diagnosis import diagnose
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis, Finding, Rule
from flatout.core.records.hardware import Machine
from flatout.report.parts.diagnosis import diagnosis_blocks, diagnosis_headline
from flatout.report.text import plain_text

STEP_S = 0.1
ATTENTION = "aten._scaled_dot_product_flash_attention"
FLOAT32 = MACHINE.matmul_flop_per_s["float32"]
WITH_TF32 = msgspec.structs.replace(MACHINE, matmul_flop_per_s={**MACHINE.matmul_flop_per_s, "tf32": 8 * FLOAT32})


def diagnosed(evidence: Evidence, *claims: tuple[float, float, float]) -> Diagnosis:
    """With a finding of its own rule for each (cost, least saved, most saved), in seconds."""
    rules = [_rule(f"a.rule-{number}", *claim) for number, claim in enumerate(claims)]
    found = diagnose(evidence, rules)
    assert_lawful(found, evidence)
    return found


def _rule(name: str, cost_s: float, low_s: float, high_s: float) -> Rule:
    finding = Finding(
        rule=name, regime="overhead", where=None, cost_s=cost_s, saved_s=(low_s, high_s), because="slow", edit="mend it"
    )
    return Rule(id=name, title=name, module=__name__, check=lambda _: iter([finding]))


def worked(*rows: tuple[str, float, float], machine: Machine = MACHINE, **settings: str) -> Evidence:
    """A step with a line for each (operator, seconds, seconds of FLOP at the rate of float32)."""
    run = EvidenceBuilder(step_s=STEP_S, machine=machine)
    for number, (op, op_s, work_s) in enumerate(rows, start=1):
        shape = (64, 64)
        run.operator(
            op, run.line("model.py", number), inputs=[shape], output=shape, op_s=op_s, flop=round(work_s * FLOAT32)
        )
    for name, value in settings.items():
        run.setting(name, value)
    return run.build()


# --------------------------------------------------------------------------------------------------------------- floors


def test_a_floor_above_the_time_of_its_line_is_left_out_and_said() -> None:
    found = diagnosed(worked((ATTENTION, 0.02, 0.05), ("aten.mm", 0.04, 0.01)))
    assert [line.floor_s for line in found.hot_lines] == [pytest.approx(0.01), None]
    assert found.floor_s == pytest.approx(0.01), "the other line's is a floor of the step still"
    [law] = found.broken
    assert law.law == "floor"
    assert "model.py:1: 50.0 ms" in law.text
    assert "20.0 ms" in law.text


def test_a_floor_within_the_spread_of_two_measurements_is_the_time_itself() -> None:
    found = diagnosed(worked((ATTENTION, 0.02, 0.0205)))
    assert found.hot_lines[0].floor_s == pytest.approx(0.02)
    assert not found.broken


def test_a_line_too_short_to_be_timed_has_no_floor() -> None:
    found = diagnosed(worked(("aten.mm", 0.0, 0.001), ("aten.mm", 0.04, 0.01)))
    assert [line.floor_s for line in found.hot_lines] == [pytest.approx(0.01), None]
    assert not found.broken


def test_lines_that_are_right_alone_and_too_long_together_have_no_floor_of_the_step() -> None:
    found = diagnosed(worked(("aten.mm", 0.08, 0.07), ("aten.mm", 0.08, 0.07)))
    assert found.floor_s is None
    assert "the floor of the step" in found.broken[0].text


def test_a_rate_that_the_step_itself_reached_is_the_ceiling() -> None:
    found = diagnosed(worked(("aten.convolution", 0.02, 0.04), ("aten.convolution", 0.04, 0.04)))
    assert [line.floor_s for line in found.hot_lines] == [pytest.approx(0.02), pytest.approx(0.02)]
    assert not found.broken


@pytest.mark.parametrize(
    ("op", "settings", "has_tf32s"),
    [
        ("aten.mm", {}, False),
        ("aten.mm", {"float32_matmul_precision": "highest"}, False),
        ("aten.mm", {"float32_matmul_precision": "high"}, True),
        ("aten.convolution", {}, True),
        ("aten.convolution", {"cudnn_allow_tf32": "False", "float32_matmul_precision": "high"}, False),
        ("aten._cudnn_rnn", {"cudnn_allow_tf32": "True"}, True),
    ],
)
def test_products_that_may_run_in_tf32_have_its_floor(op: str, settings: dict[str, str], has_tf32s: bool) -> None:
    found = diagnosed(worked((op, 0.05, 0.04), machine=WITH_TF32, **settings))
    assert found.hot_lines[0].floor_s == pytest.approx(0.04 / 8 if has_tf32s else 0.04)


# ------------------------------------------------------------------------------------------------------ costs and gains


def test_a_cause_that_takes_more_than_the_step_is_left_out_and_said() -> None:
    found = diagnosed(worked(), (1.5 * STEP_S, 0.5 * STEP_S, STEP_S), (0.03, 0.02, 0.03))
    assert [f.rule for f in found.findings] == ["a.rule-1"]
    [law] = found.broken
    assert (law.law, law.rule) == ("cost", "a.rule-0")
    assert found.checked == (), "it was not found in order"
    assert "150 ms of a step of 100 ms" in law.text


def test_causes_share_the_step() -> None:
    found = diagnosed(worked(), (0.07, 0.07, 0.07), (0.06, 0.06, 0.06))
    assert [f.cost_s for f in found.findings] == [pytest.approx(0.07), pytest.approx(0.03)]
    assert found.findings[1].gain[1] == pytest.approx(1 / 0.7)


def test_a_cause_for_which_nothing_is_left_is_no_finding() -> None:
    found = diagnosed(worked(), (0.06, 0.06, 0.06), (0.04, 0.04, 0.04), (0.03, 0.03, 0.03))
    assert [f.rule for f in found.findings] == ["a.rule-0", "a.rule-1"]


def test_a_cause_with_a_small_gain_leaves_the_time_to_one_with_a_large_gain() -> None:
    found = diagnosed(worked(), (0.09, 0.05, 0.06), (0.095, 0.01, 0.03))
    assert [f.cost_s for f in found.findings] == [pytest.approx(0.07), pytest.approx(0.03)]
    assert found.findings[1].gain == pytest.approx((1 / 0.9, 1 / 0.7))


def test_no_more_is_gained_than_goes_with_the_cause() -> None:
    [finding] = diagnosed(worked(), (0.02, 0.02, 0.09)).findings
    assert finding.gain == pytest.approx((1.25, 1.25))


def test_what_is_left_of_a_step_is_no_less_than_what_can_be_measured() -> None:
    [finding] = diagnosed(worked(), (STEP_S, STEP_S, STEP_S)).findings
    assert finding.gain[1] <= 25.0001


def test_the_report_says_what_was_left_out() -> None:
    evidence = worked((ATTENTION, 0.02, 0.05))
    text = " ".join(plain_text(diagnosis_blocks(evidence, diagnosed(evidence))).split())
    assert "left out" in text
    assert "more than the 20.0 ms that it took" in text


def test_the_headline_is_the_median_step_and_what_comes_on_top_is_told_beside_it() -> None:
    evidence = worked()
    steps = msgspec.structs.replace(evidence.steps, evaluation_s=0.02, occasional_s=0.01)
    evidence = msgspec.structs.replace(evidence, steps=steps)
    headline = diagnosis_headline(evidence, diagnosed(evidence))
    assert headline.startswith("100 ms a training step, and 30.0 ms for what comes between steps. ")


seconds = st.floats(0, 3 * STEP_S)


@given(
    claims=st.lists(st.tuples(seconds, seconds, seconds).map(lambda c: (c[0], *sorted(c[1:]))), max_size=5),
    rows=st.lists(st.tuples(st.sampled_from(["aten.mm", ATTENTION]), seconds, seconds), max_size=5),
    evaluation_s=seconds,
    noise_s=st.floats(0, STEP_S / 2),
)
def test_whatever_rules_claim_the_report_is_lawful(
    claims: list[tuple[float, float, float]],
    rows: list[tuple[str, float, float]],
    evaluation_s: float,
    noise_s: float,
) -> None:
    evidence = worked(*rows)
    steps = msgspec.structs.replace(
        evidence.steps, evaluation_s=evaluation_s, low_s=STEP_S - noise_s, high_s=STEP_S + noise_s
    )
    diagnosed(msgspec.structs.replace(evidence, steps=steps), *claims)
