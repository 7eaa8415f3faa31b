"""Two runs side by side: what is a change, and what is not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evidence_builder import MACHINE, EvidenceBuilder

from flatout.check.compare import ComparedRun, comparison_of, decide
from flatout.check.diagnosis import diagnose
from flatout.core.errors import UsageError
from flatout.core.records.comparison import Comparison, Ratio
from flatout.core.records.evidence import Evidence, Steps
from flatout.core.records.finding import Diagnosis, RankedFinding
from flatout.core.records.memory import Memory
from flatout.core.records.record import from_json, to_json
from flatout.machine.measure.stats import median_estimate

change = msgspec.structs.replace

DURATIONS = st.lists(st.floats(1e-4, 10.0), min_size=6, max_size=120)


def timed(durations: list[float]) -> Evidence:
    """A run whose steps took so long."""
    middle = median_estimate(durations)
    steps = Steps(
        kind="training",
        num_observed=len(durations) + 9,
        num_timed=len(durations),
        step_s=middle.value,
        low_s=middle.low,
        high_s=middle.high,
        durations_s=tuple(durations),
        phases={"forward": middle.value / 3, "backward": 2 * middle.value / 3},
        phase_intervals={"forward": (middle.low / 3, middle.high / 3)},
    )
    return change(EvidenceBuilder().build(), steps=steps)


def found(file: str, line: int, text: str, *, rule: str = "overhead.host-read", cost_s: float = 0.02) -> RankedFinding:
    return RankedFinding(
        rule=rule,
        title="A host read",
        file=f"/home/ada/{file}",
        line=line,
        regime="overhead",
        cost_s=cost_s,
        share=0.2,
        gain=(1.1, 1.2),
        because="it waits",
        edit="do not",
        text=text,
        also=(),
        module="",
        levers=(),
        basis="estimate",
    )


def run(evidence: Evidence, *findings: RankedFinding) -> ComparedRun:
    return ComparedRun(evidence, change(diagnose(evidence, ()), findings=findings))


def both(before: Evidence, after: Evidence, *, threshold: float | None = None) -> Comparison:
    return comparison_of(run(before), run(after), threshold=threshold)


def ratio_of(comparison: Comparison) -> Ratio:
    assert comparison.step.ratio is not None
    return comparison.step.ratio


@given(DURATIONS)
def test_a_run_against_itself_shows_no_change(durations: list[float]) -> None:
    evidence = timed(durations)

    comparison = both(evidence, evidence, threshold=0.0)

    ratio = ratio_of(comparison)
    assert ratio.value == 1.0
    assert ratio.low is not None and ratio.high is not None and ratio.low <= 1.0 <= ratio.high
    assert all(p.ratio is None or p.ratio.value == 1.0 for p in comparison.phases)
    assert not comparison.lines and not comparison.differences
    assert comparison.decision is not None and comparison.decision.outcome != "slower"


@pytest.mark.slow
@given(DURATIONS, DURATIONS)
def test_swapping_the_runs_turns_the_ratio_and_its_interval_round(first: list[float], second: list[float]) -> None:
    there, back = (ratio_of(both(timed(a), timed(b))) for a, b in ((first, second), (second, first)))

    assert there.low is not None and there.high is not None and back.low is not None and back.high is not None
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0)
    assert there.high * back.low == pytest.approx(1.0)


@pytest.mark.slow
@given(DURATIONS, DURATIONS, st.floats(0.1, 10.0))
def test_a_machine_twice_as_fast_changes_no_ratio(first: list[float], second: list[float], factor: float) -> None:
    plain = ratio_of(both(timed(first), timed(second)))
    scaled = ratio_of(both(timed([factor * s for s in first]), timed([factor * s for s in second])))

    assert scaled.value == pytest.approx(plain.value)
    assert scaled.low == pytest.approx(plain.low)


@pytest.mark.slow
@given(DURATIONS, DURATIONS, st.floats(0.0, 2.0))
def test_a_decision_to_fail_survives_a_lower_threshold(a: list[float], b: list[float], threshold: float) -> None:
    ratio = ratio_of(both(timed(a), timed(b)))

    if decide(ratio, threshold).outcome == "slower":
        assert decide(ratio, threshold / 2).outcome == "slower"
        assert ratio.value - 1 > threshold


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (1.06, 1.2, "slower"),
        (1.02, 1.2, "cannot tell"),
        (0.9, 1.04, "not slower"),
        (0.9, 1.06, "cannot tell"),
        (None, None, "cannot tell"),
    ],
)
def test_the_decision_is_taken_from_the_interval(low: float | None, high: float | None, outcome: str) -> None:
    assert decide(Ratio(value=1.05, low=low, high=high), 0.05).outcome == outcome


def test_spells_of_slowness_widen_the_interval() -> None:
    mixed = [1.0, 1.2] * 100
    spells = ([1.0] * 50 + [1.2] * 50) * 2

    narrow, wide = (ratio_of(both(timed([1.1] * 200), timed(d))) for d in (mixed, spells))

    assert narrow.low is not None and narrow.high is not None and wide.low is not None and wide.high is not None
    assert wide.high - wide.low >= narrow.high - narrow.low


def test_few_steps_give_a_ratio_without_an_interval() -> None:
    comparison = both(timed([1.0] * 5), timed([2.0] * 50), threshold=0.05)

    assert ratio_of(comparison) == Ratio(value=2.0)
    assert comparison.decision is not None and comparison.decision.outcome == "cannot tell"


def test_a_run_without_a_timed_step_is_refused() -> None:
    with pytest.raises(UsageError, match="the run after has no timed step"):
        both(timed([1.0] * 9), EvidenceBuilder(step_s=0.0).build())


def test_findings_are_matched_by_the_text_of_their_line_and_not_by_its_number() -> None:
    steps = timed([0.1] * 30)
    shifted, gone, new = (
        found("train.py", 12, "loss.item()"),
        found("train.py", 20, "x.cpu()"),
        found("net.py", 5, "y.tolist()"),
    )

    comparison = comparison_of(run(steps, shifted, gone), run(steps, change(shifted, line=40), new))

    assert [(f.kind, f.file_before, f.file_after) for f in comparison.findings] == [
        ("appeared", "", "net.py"),
        ("vanished", "train.py", ""),
        ("moved", "train.py", "train.py"),
    ]


def test_findings_match_between_two_checkouts() -> None:
    steps = timed([0.1] * 30)
    elsewhere = change(steps, workload=change(steps.workload, cwd="/ci/job"))
    finding = found("train.py", 12, "loss.item()")

    comparison = comparison_of(run(steps, finding), run(elsewhere, change(finding, file="/ci/job/train.py")))

    assert [f.kind for f in comparison.findings] == ["stayed"]


def test_the_same_text_twice_in_a_function_is_two_findings() -> None:
    steps = timed([0.1] * 30)
    pair = found("train.py", 12, "loss.item()"), found("train.py", 14, "loss.item()")

    comparison = comparison_of(run(steps, *pair), run(steps, pair[0]))

    assert [f.kind for f in comparison.findings] == ["vanished", "stayed"]


def in_file(file: str, *texts: str, function: str = "Net.forward", seconds: float = 0.01) -> Evidence:
    """A run with these lines in a function of a file, each of so many seconds, beside a script that is always the same."""
    builder = EvidenceBuilder()
    builder.operator("aten.add", builder.line("train.py", 3, "net(x)", function="<module>"), op_s=0.01)
    for number, text in enumerate(texts, start=11):
        builder.operator("aten.mm", builder.line(file, number, text, function=function), op_s=seconds)
    return builder.build()


def test_lines_of_a_renamed_file_are_matched() -> None:
    texts = ("h = self.one(x)", "h = h.relu()", "return self.two(h)")

    comparison = both(in_file("net.py", *texts), in_file("model/layers.py", *texts, seconds=0.03))

    assert {(line.file, line.line_before, line.line_after) for line in comparison.lines} == {
        ("model/layers.py", number, number) for number in (11, 12, 13)
    }
    [moved] = comparison.moved_functions
    assert (moved.function, moved.file_before, moved.file_after) == ("Net.forward", "net.py", "model/layers.py")
    assert both(in_file("net.py", *texts), in_file("model/layers.py", *texts)).lines == ()


def test_a_file_of_other_lines_is_no_renamed_one() -> None:
    before = in_file("net.py", "h = self.one(x)", "h = h.relu()", "return h")
    after = in_file("other.py", "h = fft(x)", "h = h.real", "return h", seconds=0.03)

    comparison = both(before, after)

    assert comparison.moved_functions == ()
    assert all(None in (line.line_before, line.line_after) for line in comparison.lines)


def test_a_function_of_a_file_that_is_still_there_stays_in_it() -> None:
    texts = ("h = self.one(x)", "return h")
    before, after = EvidenceBuilder(), EvidenceBuilder()
    for builder, files in ((before, ("a.py",)), (after, ("a.py", "b.py"))):
        for file in files:
            for number, text in enumerate(texts, start=5):
                builder.operator("aten.mm", builder.line(file, number, text, function="Net.forward"), op_s=0.01)

    comparison = both(before.build(), after.build())

    assert comparison.moved_functions == ()
    assert {(line.file, line.line_before) for line in comparison.lines} == {("b.py", None)}


def test_a_finding_in_a_renamed_file_is_moved_and_not_new() -> None:
    texts = ("h = self.one(x)", "print(h.sum().item())")
    before, after = in_file("net.py", *texts), in_file("layers.py", *texts)
    finding = found("net.py", 12, texts[1])

    comparison = comparison_of(run(before, finding), run(after, change(finding, file="/home/ada/layers.py")))

    assert [(f.kind, f.file_before, f.file_after) for f in comparison.findings] == [("moved", "net.py", "layers.py")]


def of_phases(forward_s: float, backward_s: float, *, spread: float = 0.01) -> Evidence:
    """A run of these two phases, whose intervals reach so far to both sides."""
    evidence = timed([forward_s + backward_s] * 30)
    phases = {"forward": forward_s, "backward": backward_s}
    intervals = {name: ((1 - spread) * s, (1 + spread) * s) for name, s in phases.items()}
    return change(evidence, steps=change(evidence.steps, phases=phases, phase_intervals=intervals))


def test_phases_that_changed_are_named_even_where_the_step_did_not() -> None:
    comparison = both(of_phases(0.04, 0.06), of_phases(0.06, 0.04))

    assert ratio_of(comparison).direction == "unclear"
    assert [p.name for p in comparison.changed_phases] == ["forward", "backward"]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(of_phases(0.04, 0.06), id="nothing changed"),
        pytest.param(of_phases(0.041, 0.06), id="as two runs of one script differ"),
        pytest.param(of_phases(0.06, 0.06, spread=0.3), id="intervals that overlap"),
    ],
)
def test_a_phase_within_the_noise_is_not_called_changed(after: Evidence) -> None:
    before = of_phases(0.04, 0.06, spread=0.3 if after.steps.phase_intervals["forward"][1] > 0.07 else 0.01)

    assert both(before, after).changed_phases == ()


def test_a_phase_too_short_to_count_is_not_called_changed() -> None:
    assert both(of_phases(0.0001, 0.1), of_phases(0.0002, 0.1)).changed_phases == ()


def test_an_edit_that_makes_its_function_faster_has_no_slower_line() -> None:
    before, after = in_file("net.py", "y = slow(x)", seconds=0.03), in_file("net.py", "y = fast(x)", seconds=0.01)

    assert both(before, after).slower_lines == ()
    assert [line.text for line in both(after, before).slower_lines] == ["y = slow(x)"]


def test_a_line_that_is_gone_is_not_slower() -> None:
    assert both(in_file("net.py", "y = f(x)", "z = g(y)"), in_file("net.py", "y = f(x)")).slower_lines == ()


def with_line(seconds: float, *, number: int = 7, text: str = "y = slow(x)", num_samples: int = 0) -> Evidence:
    builder = EvidenceBuilder()
    line = builder.line("net.py", number, text, function="forward")
    other = builder.line("net.py", 90, "z = y + 1", function="forward")
    builder.operator("aten.add", other, op_s=0.01)
    if num_samples:
        builder.sampled(line, seconds, num_samples=num_samples)
    else:
        builder.operator("aten.mm", line, op_s=seconds)
    return builder.build()


def test_a_line_that_became_slower_is_told_where_it_stands_now() -> None:
    [line] = both(with_line(0.01), with_line(0.03, number=11)).lines

    assert (line.file, line.line_before, line.line_after) == ("net.py", 7, 11)
    assert line.ratio == Ratio(value=pytest.approx(3.0))


def test_a_line_has_the_operators_and_the_flop_of_a_step() -> None:
    before, after = EvidenceBuilder(), EvidenceBuilder()
    for builder, calls in ((before, 2), (after, 4)):
        builder.operator("aten.mm", builder.line("net.py", 7, "y = f(x)"), calls=calls, flop=100, op_s=0.01 * calls)

    [line] = both(before.build(), after.build()).lines

    assert (line.calls_before, line.calls_after, line.flop_before, line.flop_after) == (2, 4, 200, 400)
    assert line.is_certainly_slower


def test_sampled_lines_have_an_interval_and_are_told_only_when_it_is_clear_of_one() -> None:
    [line] = both(with_line(0.01, num_samples=100), with_line(0.03, num_samples=300)).lines

    assert line.ratio is not None and line.ratio.direction == "more"
    assert both(with_line(0.01, num_samples=10), with_line(0.015, num_samples=15)).lines == ()


def test_an_edited_line_is_one_gone_and_one_new() -> None:
    lines = both(with_line(0.03), with_line(0.01, text="y = fast(x)")).lines

    assert [(line.text, line.line_before, line.line_after) for line in lines] == [
        ("y = slow(x)", 7, None),
        ("y = fast(x)", None, 7),
    ]


def test_another_machine_or_version_is_told() -> None:
    before = timed([0.1] * 30)
    slower = change(MACHINE, cpu_model="Old CPU", matmul_flop_per_s={"float32": 50e9})
    after = change(before, machine=slower, workload=change(before.workload, torch="2.14.0"))

    differences = {d.name: (d.before, d.after) for d in both(before, after).differences if d.kind == "environment"}

    assert differences == {
        "processor": ("Test CPU", "Old CPU"),
        "torch": ("2.13.0", "2.14.0"),
        "measured float32 product": ("200 GFLOP/s", "50 GFLOP/s"),
    }


def test_other_work_in_a_step_is_told() -> None:
    small, large = EvidenceBuilder(), EvidenceBuilder()
    for builder, flop in ((small, 10**9), (large, 4 * 10**9)):
        builder.operator("aten.mm", builder.line("net.py", 7), flop=flop)
    before, after = small.build(), large.build()

    [difference] = [d for d in both(before, after).differences if d.kind == "work"]

    assert (difference.name, difference.before, difference.after) == ("FLOP of a step", "1e+09", "4e+09")


def test_memory_is_compared_device_by_device() -> None:
    before, after = (
        change(timed([0.1] * 9), memory=(Memory(device="cpu", peak_bytes=size, peak_phase="backward"),))
        for size in (100, 300)
    )

    [size] = both(before, after).sizes

    assert (size.device, size.before_bytes, size.after_bytes) == ("cpu", 100, 300)


def test_a_comparison_goes_to_json_and_back() -> None:
    comparison = both(with_line(0.01), with_line(0.03), threshold=0.05)

    assert from_json(to_json(comparison), Comparison) == comparison


def test_a_diagnosis_without_findings_compares() -> None:
    nothing = Diagnosis(
        step_s=0.1, floor_s=None, explained_s=0.0, unexplained_s=0.0, findings=(), notes=(), hot_lines=(), checked=()
    )
    evidence = timed([0.1] * 30)

    assert comparison_of(ComparedRun(evidence, nothing), ComparedRun(evidence, nothing)).findings == ()
