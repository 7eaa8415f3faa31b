"""Merging, ranking and pricing, with rules that find what the test tells them to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evidence_builder import MACHINE, EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.check.rules.capacity.fresh_pages import RULE as FRESH_PAGES
from flatout.check.stakes import proposed_trials
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note, Rule
from flatout.core.records.load import MachineLoad
from flatout.core.records.memory import Memory
from flatout.core.records.trial import TimeDataset, TimeOptimizer, Trial
from flatout.core.records.workload import Source

STEP_S = 0.1


def at(line: int) -> Source:
    return Source(file="/home/ada/model.py", line=line)


def found(
    saved_s: float | tuple[float, float],
    *,
    where: Source | None = None,
    operators: Sequence[int] = (),
    phases: Sequence[str] = (),
) -> Finding:
    """A finding whose `rule` is yet to be named."""
    low, high = saved_s if isinstance(saved_s, tuple) else (saved_s, saved_s)
    return Finding(
        rule="",
        regime="overhead",
        where=where,
        cost_s=high,
        saved_s=(low, high),
        because="it is slow",
        edit="make it fast",
        operators=tuple(operators),
        phases=tuple(phases),
    )


def rule(
    name: str,
    *findings: Finding,
    is_general: bool = False,
    is_cure: bool = False,
    notes: Sequence[Note] = (),
) -> Rule:
    """A rule that finds these."""
    own = [msgspec.structs.replace(f, rule=name) for f in findings]
    return Rule(
        id=name,
        title=f"Title of {name}",
        module=__name__,
        check=lambda _: iter(own),
        note=lambda _: iter(notes),
        is_general=is_general,
        is_cure=is_cure,
    )


def proposing(name: str, *trials: Trial) -> Rule:
    return Rule(id=name, title=name, module=__name__, check=lambda _: iter(()), propose=lambda _: iter(trials))


def four_operators() -> Evidence:
    """Operators 0..3 of 20 ms each: data, forward, forward, backward."""
    run = EvidenceBuilder(step_s=STEP_S)
    for number, phase in enumerate(("data", "forward", "forward", "backward")):
        run.operator("aten.mm", run.line("model.py", number + 1), op_s=0.02, phase=phase)
    return run.build()


# -------------------------------------------------------------------------------------------------------------- ranking


def test_findings_come_by_the_time_at_stake() -> None:
    rules = [rule("a.small", found(0.01)), rule("b.large", found(0.04)), rule("c.middle", found((0.01, 0.03)))]
    diagnosis = diagnose(four_operators(), rules)
    assert [f.rule for f in diagnosis.findings] == ["b.large", "c.middle", "a.small"]


def test_the_gain_is_the_speed_up_of_the_whole_step() -> None:
    [finding] = diagnose(four_operators(), [rule("a.a", found((0.02, 0.05)))]).findings
    assert finding.gain == pytest.approx((1.25, 2.0))
    assert finding.share == pytest.approx(0.5)
    assert finding.title == "Title of a.a"


def test_the_evaluation_between_the_steps_is_part_of_the_step() -> None:
    run = EvidenceBuilder(step_s=STEP_S, evaluation_s=0.1)
    diagnosis = diagnose(run.build(), [rule("a.a", found(0.1))])
    assert diagnosis.step_s == pytest.approx(0.2)
    assert diagnosis.findings[0].gain[0] == pytest.approx(2.0)


def test_what_a_cure_saves_in_a_modules_forward_it_saves_in_evaluation_passes_too() -> None:
    """20 ms of the forward's 40 lie in the module: half of an evaluation pass of 50 ms is as much slower, and all is saved."""
    run = EvidenceBuilder(step_s=STEP_S, forward=0.04, other=0.0, evaluation=0.05, evaluation_s=0.05)
    inside = run.operator("aten.mm", run.line("model.py", 9), op_s=0.02)
    outside = run.operator("aten.mm", run.line("train.py", 9), op_s=0.02, module="")
    evidence = run.build()

    def gain(row: int) -> float:
        [finding] = diagnose(evidence, [rule("a", found(0.02, operators=[row]))]).findings
        return finding.gain[0]

    whole_s = evidence.steps.whole_s
    assert gain(inside) == pytest.approx(whole_s / (whole_s - 0.02 - 0.05 / 2))
    assert gain(outside) == pytest.approx(whole_s / (whole_s - 0.02)), "the loss is no part of an evaluation pass"


def test_a_finding_carries_its_line() -> None:
    where = Source(file="/home/ada/model.py", line=7, text="x = x @ w")
    [finding] = diagnose(four_operators(), [rule("a.a", found(0.02, where=where))]).findings
    assert (finding.file, finding.line, finding.text) == ("/home/ada/model.py", 7, "x = x @ w")


def test_a_saving_of_a_few_percent_is_dropped() -> None:
    diagnosis = diagnose(four_operators(), [rule("a.a", found(0.001)), rule("b.b", found(0.02))])
    assert [f.rule for f in diagnosis.findings] == ["b.b"]
    assert diagnosis.checked == ("a.a",)


def test_what_other_processes_did_to_the_interval_does_not_hide_a_cause() -> None:
    noisy = EvidenceBuilder(step_s=STEP_S, noise_s=0.03).build()
    busy = MachineLoad(seconds=30.0, num_cores=2, own_cores=0.7, other_cores=1.3)
    disturbed = msgspec.structs.replace(noisy, load=busy)
    rules = [rule("a.large", found(0.02, where=at(1))), rule("b.small", found(0.008, where=at(2)))]

    assert diagnose(noisy, rules).findings == ()
    assert [f.rule for f in diagnose(disturbed, rules).findings] == ["a.large"]


def test_a_saving_below_the_noise_is_dropped() -> None:
    noisy = EvidenceBuilder(step_s=STEP_S, noise_s=0.03).build()
    assert not diagnose(noisy, [rule("a.a", found(0.02))]).findings
    assert diagnose(noisy, [rule("a.a", found(0.04))]).findings


def test_a_run_without_steps_is_not_judged() -> None:
    diagnosis = diagnose(EvidenceBuilder(step_s=0.0, noise_s=0.0).build(), [rule("a.a", found(0.02))])
    assert diagnosis.findings == ()
    assert diagnosis.unexplained_s == 0


# -------------------------------------------------------------------------------------------------------------- merging


def test_a_weaker_claim_on_the_same_operators_is_merged_into_the_stronger() -> None:
    rules = [rule("a.weak", found(0.02, operators=[1, 2])), rule("b.strong", found(0.03, operators=[1, 2, 3]))]
    diagnosis = diagnose(four_operators(), rules)
    assert [(f.rule, f.merged) for f in diagnosis.findings] == [("b.strong", ("a.weak",))]
    assert diagnosis.explained_s == pytest.approx(0.03)
    assert diagnosis.checked == (), "both found something"


def test_of_two_names_for_one_time_the_measured_one_is_told() -> None:
    timed = msgspec.structs.replace(found(0.028, operators=[1, 2]), basis="timed")
    rules = [rule("a.timed", timed), rule("b.estimated", found(0.03, operators=[1, 2]))]
    assert [(f.rule, f.merged) for f in diagnose(four_operators(), rules).findings] == [("a.timed", ("b.estimated",))]

    rules = [rule("a.timed", timed), rule("b.estimated", found(0.04, operators=[1, 2]))]
    assert [f.rule for f in diagnose(four_operators(), rules).findings] == ["b.estimated"]


def test_claims_that_share_little_stay_apart() -> None:
    rules = [rule("a.a", found(0.02, operators=[0, 1, 2])), rule("b.b", found(0.03, operators=[2, 3]))]
    assert len(diagnose(four_operators(), rules).findings) == 2


def test_a_claim_on_operators_of_a_claimed_phase_is_merged() -> None:
    rules = [rule("a.weak", found(0.02, operators=[0])), rule("b.strong", found(0.03, phases=["data"]))]
    assert [f.merged for f in diagnose(four_operators(), rules).findings] == [("a.weak",)]


def test_a_claim_on_a_phase_is_merged_into_one_on_its_operators() -> None:
    rules = [rule("a.strong", found(0.03, operators=[0])), rule("b.weak", found(0.02, phases=["data"]))]
    assert [f.merged for f in diagnose(four_operators(), rules).findings] == [("b.weak",)]


def test_two_rules_on_one_line_are_one_finding() -> None:
    rules = [rule("a.weak", found(0.02, where=at(5))), rule("b.strong", found(0.03, where=at(5)))]
    assert [f.merged for f in diagnose(four_operators(), rules).findings] == [("a.weak",)]


def test_two_causes_on_one_line_that_claim_different_time_stay_apart() -> None:
    waits, pads = found(0.02, where=at(5), phases=["data"]), found(0.03, where=at(5), operators=[1, 2, 3])
    assert len(diagnose(four_operators(), [rule("a.loader", waits), rule("b.padding", pads)]).findings) == 2


def test_one_rule_may_find_two_things() -> None:
    diagnosis = diagnose(four_operators(), [rule("a.a", found(0.02, operators=[1]), found(0.03, operators=[2]))])
    assert [(f.rule, f.merged) for f in diagnosis.findings] == [("a.a", ()), ("a.a", ())]


# -------------------------------------------------------------------------------------------------------- general rules


def test_a_general_rule_is_silent_where_a_cause_explains_the_time() -> None:
    rules = [rule("a.symptom", found(0.04), is_general=True), rule("b.cause", found(0.03))]
    diagnosis = diagnose(four_operators(), rules)
    assert [(f.rule, f.merged) for f in diagnosis.findings] == [("b.cause", ("a.symptom",))]


def test_a_general_rule_speaks_where_the_causes_explain_little() -> None:
    rules = [rule("a.symptom", found(0.06), is_general=True), rule("b.cause", found(0.01))]
    assert [f.rule for f in diagnose(four_operators(), rules).findings] == ["a.symptom", "b.cause"]


def test_a_general_rule_yields_to_a_smaller_cause_of_the_same_operators() -> None:
    symptom = rule("a.symptom", found(0.06, operators=[1, 2]), is_general=True)
    cause = rule("b.cause", found(0.01, operators=[1, 2]))
    [finding] = diagnose(four_operators(), [symptom, cause]).findings
    assert (finding.rule, finding.merged) == ("b.cause", ("a.symptom",))


def test_general_rules_do_not_silence_one_another() -> None:
    rules = [rule("a.one", found(0.03), is_general=True), rule("b.two", found(0.03), is_general=True)]
    assert len(diagnose(four_operators(), rules).findings) == 2


# ------------------------------------------------------------------------------------------------ cures of a whole module


def test_cures_come_after_causes_and_are_not_merged() -> None:
    cause = rule("a.cause", found(0.03, phases=["forward"]))
    cures = [rule("b.half", found(0.06, phases=["forward"]), is_cure=True), rule("c.graph", found(0.01), is_cure=True)]
    diagnosis = diagnose(four_operators(), [cause, *cures])
    assert [(f.rule, f.merged, f.is_cure) for f in diagnosis.findings] == [
        ("a.cause", (), False),
        ("b.half", (), True),
        ("c.graph", (), True),
    ]
    assert diagnosis.explained_s == pytest.approx(0.06)


def test_memory_taken_anew_is_a_finding_where_nothing_else_is_wrong() -> None:
    run = EvidenceBuilder(step_s=0.1)
    run.pages(run.line("model.py", 30, "return self.body(points)"), faults=4000, kernel_s=0.01)

    diagnosis = diagnose(run.build(), [FRESH_PAGES])

    assert [f.rule for f in diagnosis.findings] == ["capacity.fresh-pages"]
    assert diagnosis.findings[0].gain[1] < 1.15
    assert not diagnosis.notes


def test_a_cure_of_time_that_others_claim_is_a_remark() -> None:
    cures = [rule("b.half", found(0.06), is_cure=True), rule("c.graph", found(0.05), is_cure=True)]
    diagnosis = diagnose(four_operators(), [rule("a.cause", found(0.02, phases=["forward"])), *cures])
    assert [f.rule for f in diagnosis.findings] == ["a.cause", "b.half"]
    [note] = diagnosis.notes
    assert (note.rule, "2.0x" in note.text) == ("c.graph", True)
    assert sum(f.cost_s for f in diagnosis.findings) <= STEP_S


def test_a_small_cause_comes_after_a_large_cure() -> None:
    rules = [rule("a.cause", found(0.01)), rule("b.half", found(0.06), is_cure=True)]
    assert [f.rule for f in diagnose(four_operators(), rules).findings] == ["b.half", "a.cause"]


def test_a_cure_leaves_the_general_rules_alone() -> None:
    rules = [rule("a.symptom", found(0.04), is_general=True), rule("b.half", found(0.06), is_cure=True)]
    assert {f.rule for f in diagnose(four_operators(), rules).findings} == {"a.symptom", "b.half"}


def test_where_no_cause_is_found_on_a_cpu_a_cure_is_a_finding_only_where_it_gains_much() -> None:
    whole = rule("b.half", msgspec.structs.replace(found(0.05), regime="compute"), is_cure=True)
    assert [f.rule for f in diagnose(four_operators(), [whole]).findings] == ["b.half"]
    half = rule("b.half", msgspec.structs.replace(found(0.01), regime="compute"), is_cure=True)
    diagnosis = diagnose(four_operators(), [half])
    assert diagnosis.findings == ()
    [note] = diagnosis.notes
    assert (note.rule, "faster, estimated" in note.text) == ("b.half", True)
    assert "b.half" not in diagnosis.checked
    on_device = EvidenceBuilder(step_s=STEP_S, device_s=STEP_S).build()
    assert [f.rule for f in diagnose(on_device, [half]).findings] == ["b.half"]


# --------------------------------------------------------------------------------------------------------------- memory


def remembering(run: EvidenceBuilder | None = None) -> Evidence:
    """A host of 11 GiB whose step peaks at 1 GiB."""
    memory = Memory(device="cpu", peak_bytes=1 << 30, peak_phase="backward", total_bytes=11 << 30)
    return msgspec.structs.replace((run or EvidenceBuilder(step_s=STEP_S)).build(), memory=(memory,))


def heavy(*, saved_bytes: int = 0, growth: int = 0, saved_s: float = 0.0) -> Finding:
    return msgspec.structs.replace(found(saved_s), saved_bytes=saved_bytes, growth_bytes_per_step=growth)


def test_bytes_come_after_time_and_growth_before_it() -> None:
    rules = [
        rule("a.time", found(0.03)),
        rule("b.bytes", heavy(saved_bytes=1 << 29)),
        rule("c.leak", heavy(growth=1 << 20)),
    ]
    diagnosis = diagnose(remembering(), rules)

    assert [f.rule for f in diagnosis.findings] == ["c.leak", "a.time", "b.bytes"]
    assert diagnosis.explained_s == pytest.approx(0.03)
    assert diagnosis.findings[0].steps_until_full == 10 * 1024
    assert [f.saves_time for f in diagnosis.findings] == [False, True, False]


def test_a_small_share_of_the_peak_is_dropped() -> None:
    diagnosis = diagnose(remembering(), [rule("a.a", heavy(saved_bytes=1 << 26))])
    assert (diagnosis.findings, diagnosis.checked) == ((), ("a.a",))


def test_growth_that_would_take_more_than_a_day_is_dropped() -> None:
    num_bytes = 10 * (1 << 30) // (86_400 * 10)
    assert diagnose(remembering(), [rule("a.a", heavy(growth=num_bytes + 2))]).findings
    assert not diagnose(remembering(), [rule("a.a", heavy(growth=num_bytes - 2))]).findings


def test_a_finding_that_saves_both_is_told_once_with_both() -> None:
    [finding] = diagnose(remembering(), [rule("a.a", heavy(saved_bytes=1 << 29, saved_s=0.03))]).findings
    assert finding.saves_time
    assert (finding.saved_bytes, finding.peak_bytes) == (1 << 29, 1 << 30)


def test_without_a_memory_record_bytes_are_not_judged() -> None:
    assert not diagnose(four_operators(), [rule("a.a", heavy(saved_bytes=1 << 40))]).findings


# -------------------------------------------------------------------------------------------------------------- the sum


def test_what_is_explained_and_what_is_not_make_up_the_step() -> None:
    run = EvidenceBuilder(step_s=STEP_S, machine=None)
    diagnosis = diagnose(run.build(), [rule("a.a", found(0.03)), rule("b.b", found((0.01, 0.03)))])
    assert diagnosis.explained_s == pytest.approx(0.05)
    assert diagnosis.explained_s + diagnosis.unexplained_s == pytest.approx(diagnosis.step_s)


def test_the_parts_and_what_they_leave_make_up_the_step() -> None:
    run = EvidenceBuilder(step_s=STEP_S)
    flop = round(0.02 * MACHINE.matmul_flop_per_s["float32"])
    run.operator("aten.mm", run.line("model.py", 1), op_s=0.03, flop=flop)
    diagnosis = diagnose(run.build(), [rule("a.a", found(0.03))])
    assert diagnosis.floor_s == pytest.approx(0.02)
    [products] = [p for p in diagnosis.parts if p.name == "matrix products"]
    assert products.floor_fraction == pytest.approx(2 / 3, rel=0.01)
    assert sum(p.seconds for p in diagnosis.parts) + diagnosis.unexplained_s == pytest.approx(STEP_S)


def test_more_than_the_step_is_never_explained() -> None:
    diagnosis = diagnose(four_operators(), [rule(f"a.{n}", found(0.07)) for n in "abc"])
    assert diagnosis.explained_s == pytest.approx(STEP_S)
    assert diagnosis.unexplained_s == 0


# -------------------------------------------------------------------------------------------------- floor and hot lines


def worked(
    *, calls: float = 10, line: int = 1, flop: int = 10**8, op_s: float = 0.02, step_s: float = STEP_S, **kwargs: object
) -> Evidence:
    run = EvidenceBuilder(step_s=step_s, **kwargs)
    source = run.line("model.py", line)
    shape = (512, 512)
    run.operator(
        "aten.mm", source, inputs=[shape, shape], output=shape, calls=calls, op_s=op_s, python_s=0.001, flop=flop
    )
    run.operator("aten.mm", source, inputs=[shape], output=shape, calls=calls, op_s=op_s, phase="backward", flop=flop)
    run.operator("aten.mm", -1, inputs=[shape], output=shape, calls=calls, op_s=op_s, flop=flop)
    return run.build()


@pytest.mark.parametrize("flop", [10**3, 10**9])
def test_twice_the_calls_have_twice_the_floor(flop: int) -> None:
    one, two = (diagnose(worked(calls=calls, flop=flop, op_s=1.0, step_s=4.0), []) for calls in (10, 20))
    assert one.floor_s is not None
    assert two.floor_s == pytest.approx(2 * one.floor_s)
    assert two.hot_lines[0].floor_s == pytest.approx(2 * one.hot_lines[0].floor_s)
    assert two.hot_lines[0].flop == 2 * one.hot_lines[0].flop
    assert two.hot_lines[0].bytes == 2 * one.hot_lines[0].bytes


def test_without_a_machine_there_is_no_floor() -> None:
    diagnosis = diagnose(worked(machine=None), [rule("a.a", found(0.03))])
    assert (diagnosis.floor_s, diagnosis.hot_lines) == (None, ())
    assert diagnosis.findings, "what the rules find needs no floor"


def test_a_hot_line_sums_its_operators_forward_and_backward() -> None:
    [line] = diagnose(worked(op_s=0.02), []).hot_lines
    assert line.source.line == 1
    assert line.seconds == pytest.approx(0.041)
    assert line.python_s == pytest.approx(0.001)


def test_operators_without_a_line_count_for_the_floor_of_the_step_alone() -> None:
    diagnosis = diagnose(worked(), [])
    assert diagnosis.floor_s is not None
    assert diagnosis.floor_s > sum(line.floor_s or 0.0 for line in diagnosis.hot_lines)


def test_hot_lines_come_by_their_time() -> None:
    run = EvidenceBuilder(step_s=STEP_S)
    for line, seconds in ((1, 0.01), (2, 0.03), (3, 0.02)):
        run.operator("aten.mm", run.line("model.py", line), op_s=seconds)
    assert [h.source.line for h in diagnose(run.build(), []).hot_lines] == [2, 3, 1]


@pytest.mark.parametrize(
    ("flop", "op_s", "regime"), [(10**9, 0.06, "compute"), (10**3, 0.002, "bandwidth"), (10**3, 0.02, "overhead")]
)
def test_a_hot_line_says_what_bounds_it(flop: int, op_s: float, regime: str) -> None:
    [line] = diagnose(worked(flop=flop, op_s=op_s), []).hot_lines
    assert line.regime == regime


def test_a_dtype_without_a_measured_rate_has_the_floor_of_its_traffic() -> None:
    unmeasured = msgspec.structs.replace(MACHINE, matmul_flop_per_s={})
    diagnosis = diagnose(worked(machine=unmeasured, flop=10**9), [])
    assert diagnosis.floor_s is not None
    assert 0 < diagnosis.floor_s < 0.1


# ---------------------------------------------------------------------------------------------- trials, notes, refusals


def test_a_trial_that_two_rules_want_is_run_once() -> None:
    one, other = TimeOptimizer(optimizer=0), TimeDataset(loader=0)
    rules = [proposing("a.a", one), proposing("b.b", other, one), rule("c.c")]
    assert proposed_trials(four_operators(), rules) == (one, other)


def test_without_timed_steps_nothing_is_tried() -> None:
    run = EvidenceBuilder(step_s=0.0, noise_s=0.0)
    assert proposed_trials(run.build(), [proposing("a.a", TimeOptimizer(optimizer=0))]) == ()


def test_refused_trials_are_told_once_with_their_reason() -> None:
    run = EvidenceBuilder()
    run.refused(TimeOptimizer(optimizer=0), TimeOptimizer(optimizer=1), why="its state is on another device")
    [refused] = diagnose(run.build(), []).refused
    assert "its state is on another device" in refused


def test_a_note_on_a_reported_line_is_left_out() -> None:
    notes = [Note(rule="a.a", where=at(5), text="told"), Note(rule="a.a", where=at(6), text="new")]
    diagnosis = diagnose(four_operators(), [rule("a.a", found(0.03, where=at(5)), notes=notes)])
    assert [n.text for n in diagnosis.notes] == ["new"]


def test_a_note_on_a_line_that_was_merged_is_left_out() -> None:
    notes = [Note(rule="b.b", where=at(5), text="contradicts")]
    rules = [rule("a.a", found(0.03, where=at(5))), rule("b.b", found(0.02, where=at(5)), notes=notes)]
    [finding] = diagnose(four_operators(), rules).findings
    assert finding.merged == ("b.b",)
    assert not diagnose(four_operators(), rules).notes


# ------------------------------------------------------------------------------------------------------ beside a device


def beside(device_s: float | None) -> Evidence:
    """Steps of 100 ms whose one line keeps the host busy for 60 ms and the device for 5."""
    run = EvidenceBuilder(step_s=STEP_S, device_s=device_s)
    run.operator("aten.norm", run.line("model.py", 1), op_s=0.005, python_s=0.06, phase="other")
    return run.build()


@pytest.mark.parametrize(("device_s", "saved_s"), [(None, 0.06), (0.02, 0.06), (0.09, 0.015)])
def test_the_hosts_time_saves_what_the_device_idles_and_no_more(device_s: float | None, saved_s: float) -> None:
    [finding] = diagnose(beside(device_s), [rule("a.a", found(0.06, operators=(0,)))]).findings
    assert finding.gain[1] == pytest.approx(STEP_S / (STEP_S - saved_s))


def test_the_devices_own_time_is_saved_though_it_never_idles() -> None:
    busy = msgspec.structs.replace(found(0.06, operators=(0,)), regime="compute")
    [finding] = diagnose(beside(STEP_S), [rule("a.a", busy)]).findings
    assert finding.gain[1] == pytest.approx(STEP_S / (STEP_S - 0.06))


def test_a_devices_operators_are_told_by_how_far_they_are_above_their_floor() -> None:
    run = EvidenceBuilder(step_s=STEP_S, device_s=0.09)
    inside = EvidenceBuilder(step_s=STEP_S, device_s=0.09)
    bandwidth = MACHINE.copy_bytes_per_s
    rows = (
        ("aten.add", 0.02, 0.019),
        ("inductor.triton_red_fused_0", 0.03, 0.01),
        ("inductor.triton_poi_fused_1", 0.04, 0.0),
    )
    for op, seconds, _ in rows:
        inside.operator(op, op_s=seconds)
    operators = tuple(
        msgspec.structs.replace(o, bytes=round(floor_s * bandwidth), flop=0)
        for o, (_, _, floor_s) in zip(inside.build().operators, rows, strict=True)
    )
    kernels = diagnose(msgspec.structs.replace(run.build(), kernel_operators=operators), []).kernels

    assert [k.op for k in kernels] == ["inductor.triton_red_fused_0", "aten.add", "inductor.triton_poi_fused_1"]
    assert [k.above_floor_s for k in kernels] == pytest.approx([0.02, 0.001, 0.0], rel=0.01)
    assert kernels[-1].floor_s is None, "nothing is known of what it reads and writes"
    assert not diagnose(beside(None), []).kernels, "on a CPU lines say the same"


# ---------------------------------------------------------------------------------------------------------- any findings

SECONDS = st.floats(0, 3 * STEP_S, allow_nan=False)
FINDINGS = st.builds(
    lambda saved, where, operators, phases: found(
        (min(saved), max(saved)), where=at(where) if where else None, operators=sorted(operators), phases=phases
    ),
    saved=st.tuples(SECONDS, SECONDS),
    where=st.integers(0, 3),
    operators=st.sets(st.integers(0, 3)),
    phases=st.lists(st.sampled_from(["data", "forward", "backward"]), max_size=2),
)
RULES = st.lists(st.tuples(st.booleans(), st.lists(FINDINGS, max_size=3)), max_size=5).map(
    lambda made: [rule(f"a.{n}", *findings, is_general=general) for n, (general, findings) in enumerate(made)]
)


@pytest.mark.slow
@given(RULES)
def test_whatever_the_rules_find_no_more_than_the_step_is_claimed(rules: list[Rule]) -> None:
    diagnosis = diagnose(four_operators(), rules)

    assert 0 <= diagnosis.explained_s <= STEP_S
    assert 0 <= diagnosis.unexplained_s <= STEP_S
    for finding in diagnosis.findings:
        low, high = finding.gain
        assert 1 <= low <= high < math.inf
        assert 0 <= finding.share <= 1
        assert finding.cost_s <= STEP_S


@pytest.mark.slow
@given(RULES)
def test_every_rule_is_either_named_or_has_found_nothing(rules: list[Rule]) -> None:
    diagnosis = diagnose(four_operators(), rules)
    named = {f.rule for f in diagnosis.findings} | {m for f in diagnosis.findings for m in f.merged}
    named |= {law.rule for law in diagnosis.broken}
    assert sorted([*diagnosis.checked, *named]) == sorted(r.id for r in rules)
    assert all(f.rule not in f.merged for f in diagnosis.findings)


def test_evaluation_costs_no_more_than_its_batches_do_in_training() -> None:
    """Most of an evaluation of a few batches is the start of its loader's workers."""
    costs = []
    for fetches in (0.0, 0.05, 1.5):
        run = EvidenceBuilder(step_s=STEP_S, evaluation_s=0.08, evaluation=0.08, forward=0.06, other=0.0)
        row = run.operator("aten.mm", run.line("model.py", 5), op_s=0.02, module="Net")
        run.loader(run.line("train.py", 9))
        if fetches:
            run.loader(run.line("train.py", 20))
            run.loaders[1] = msgspec.structs.replace(run.loaders[1], fetches=fetches)
        [finding] = diagnose(run.build(), [rule("a.a", found(0.02, operators=[row]))]).findings
        costs.append(finding.cost_s)
    unknown, few, many = costs
    assert many == pytest.approx(unknown) == pytest.approx(0.02 + 0.08 / 3)
    assert few == pytest.approx(0.02 + 0.06 * 0.05 / 3)


def test_lines_of_packages_are_not_told_as_further_places() -> None:
    own, installed = at(7), Source(file="/venv/lib/site-packages/torch/utils/data/dataset.py", line=205)
    finding = msgspec.structs.replace(found(0.03, where=at(5)), also=(own, installed))
    [ranked] = diagnose(four_operators(), [rule("a.a", finding)]).findings
    assert ranked.also == (own,)
