from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.recomputed_constant import RULE


def test_a_constant_is_named_with_what_it_costs() -> None:
    run = EvidenceBuilder()
    line = run.line("model.py", 15, "mask = torch.full((t, t), -torch.inf).triu(1)", function="forward")
    row = run.operator("aten.triu", line, op_s=0.02)
    run.constant(line, seconds=0.02, operators=(row,))

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.operators) == (15, (row,))
    assert finding.saved_s[0] > 0.5 * 0.02
    assert diagnose(run.build(), [RULE]).findings


def test_constants_of_one_function_are_one_finding_at_the_costliest() -> None:
    run = EvidenceBuilder()
    cheap, dear = run.line("model.py", 14, function="forward"), run.line("model.py", 15, function="forward")
    run.constant(cheap, seconds=0.005)
    run.constant(dear, seconds=0.015)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, [s.line for s in finding.also]) == (15, [14])
    assert finding.cost_s == pytest.approx(0.02)


def test_constants_of_two_functions_are_two_findings() -> None:
    run = EvidenceBuilder()
    run.constant(run.line("model.py", 14, function="forward"), seconds=0.01)
    run.constant(run.line("model.py", 40, function="rotate"), seconds=0.01)
    assert sorted(f.where.line for f in RULE.check(run.build()) if f.where) == [14, 40]


def test_an_arange_of_microseconds_is_not_reported() -> None:
    run = EvidenceBuilder()
    run.constant(run.line("model.py", 14, "positions = torch.arange(t)"), seconds=5e-6)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_constant_without_a_line_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.constant(-1, seconds=0.02)
    assert not list(RULE.check(run.build()))


def lstm(run: EvidenceBuilder) -> tuple[int, int]:
    """Constant states made on line 10 and passed on line 12 into a layer whose Python lands on its first operator."""
    made = run.line("model.py", 10, "h = torch.zeros(1, n, 5)", function="forward")
    call = run.line("model.py", 12, "out, _ = self.lstm(x, (h, c))", function="forward")
    zeros = run.operator("aten.zeros", made, op_s=10e-6, python_s=20e-6)
    clone = run.operator("aten.clone", call, op_s=10e-6, python_s=0.01, module="Net.lstm")
    run.operator("aten.mkldnn_rnn_layer", call, op_s=0.02, module="Net.lstm")
    run.constant(made, seconds=30e-6, operators=(zeros,))
    run.constant(call, seconds=0.01, operators=(clone,))
    return zeros, clone


def test_the_python_of_a_layer_is_no_part_of_a_constant_passed_into_it() -> None:
    run = EvidenceBuilder()
    lstm(run)

    finding = only_finding(RULE, run.build())

    assert finding.cost_s < 100e-6
    assert diagnose(run.build(), [RULE]).findings == ()


def test_the_line_that_creates_a_constant_is_named_and_not_the_one_that_passes_it_on() -> None:
    run = EvidenceBuilder(machine=None)
    zeros, clone = lstm(run)
    run.operators[clone] = msgspec.structs.replace(run.operators[clone], op_s=0.02)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, [s.line for s in finding.also], finding.operators) == (10, [12], (zeros, clone))
    assert finding.saved_s[0] < 30e-6, "the layer may copy it all the same"


def test_a_line_in_a_file_that_a_library_generated_is_the_line_above_it() -> None:
    run = EvidenceBuilder()
    user = run.line("train.py", 30, "out = conv(x, edges)")
    generated = run.line("/tmp/torch_geometric.nn.conv.gcn_conv_GCNConv_propagate_4pkzwef5.py", 200)
    run.callers[generated] = (user,)
    run.constant(generated, seconds=0.02)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.file.rpartition("/")[2], finding.where.line) == ("train.py", 30)


@pytest.mark.parametrize(
    ("text", "edit"), [("self.sigma.repeat(y.size(0), 1)", "expand(...)"), ("torch.arange(t)", "register_buffer")]
)
def test_what_is_repeated_for_each_row_is_better_expanded(text: str, edit: str) -> None:
    run = EvidenceBuilder()
    run.constant(run.line("model.py", 15, text), seconds=0.02)
    assert edit in only_finding(RULE, run.build()).edit


def test_the_python_before_a_view_of_a_constant_is_the_loops() -> None:
    run = EvidenceBuilder()
    view = run.line("model.py", 9, "x = batch.transpose(0, 1)", function="forward")
    made = run.line("model.py", 10, "h = torch.zeros(1, n, 5)", function="forward")
    transpose = run.operator("aten.transpose", view, op_s=1e-6, python_s=0.02)
    zeros = run.operator("aten.zeros", made, op_s=0.005)
    run.constant(view, seconds=0.020001, operators=(transpose,))
    run.constant(made, seconds=0.005, operators=(zeros,))

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert finding.where.line == 10
    assert finding.cost_s < 0.006
