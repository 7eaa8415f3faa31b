from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.compute.double_forward import RULE
from flatout.core.records.workload import LibraryFrame


def called_twice(*, graphs_used: int) -> EvidenceBuilder:
    run = EvidenceBuilder(backward=0.04)
    run.model(run.line("train.py", 20, "loss = criterion(net(x), y)"), call_s=0.02)
    second = run.line("train.py", 21, "accuracy = (net(x).argmax(1) == y).float().mean()")
    run.model(second, call_s=0.02, graphs_used=graphs_used)
    run.fact("double-forward", second, value=1.0)
    return run


def test_the_second_call_is_named_with_its_own_time() -> None:
    finding = only_finding(RULE, called_twice(graphs_used=0).build())
    assert finding.where is not None
    assert finding.where.line == 21
    assert [s.line for s in finding.also] == [20]
    assert finding.cost_s == pytest.approx(0.02)


def test_a_second_graph_that_is_used_costs_its_backward_too() -> None:
    assert only_finding(RULE, called_twice(graphs_used=50).build()).cost_s == pytest.approx(0.02 + 0.04 / 2)


def test_two_calls_that_were_not_seen_to_be_equal_are_left_alone() -> None:
    run = called_twice(graphs_used=0)
    run.facts.clear()
    assert not list(RULE.check(run.build()))


def shared_encoder(*, calls: float = 1.0) -> EvidenceBuilder:
    """Actor and critic call one encoder; the critic's call repeats the actor's, 10 ms forward and 20 ms backward."""
    run = EvidenceBuilder(backward=0.04)
    second = run.line("model.py", 69, "return self.value(self.encoder(obs))")
    run.operator("aten.convolution", second, op_s=0.01, module="Critic.encoder.0")
    run.operator("aten.convolution_backward", second, op_s=0.02, phase="backward", module="Critic.encoder.0")
    run.operator("aten.addmm", second, op_s=0.01, module="Critic.value")
    run.operator("aten.convolution", run.line("model.py", 59), op_s=0.01, module="Actor.encoder.0")
    run.fact("double-forward-inside", second, module="Critic.encoder", value=1.0, text=str(calls))
    return run


def test_a_module_inside_others_costs_its_operators_forward_and_backward() -> None:
    finding = only_finding(RULE, shared_encoder().build())
    assert finding.where is not None
    assert (finding.where.line, finding.module) == (69, "Critic.encoder")
    assert finding.cost_s == pytest.approx(0.03)


def test_of_several_calls_only_the_repeats_count() -> None:
    assert only_finding(RULE, shared_encoder(calls=3.0).build()).cost_s == pytest.approx(0.01)


def evaluated_encoder(*, library: str = "") -> EvidenceBuilder:
    """One training call of 10 ms and two equal ones without gradients, as on the validation and the test part; backward 40 ms."""
    run = EvidenceBuilder(backward=0.04)
    via = (LibraryFrame(file=library, line=263, text="x = self.lin(x)"),) if library else ()
    line = run.line("link_pred.py", 39, "x = self.conv1(x, edges).relu()", via=via)
    run.operator("aten.addmm", line, op_s=0.01, module="Conv.lin")
    run.operator("aten.addmm", line, op_s=0.02, calls=2, module="Conv.lin", phase="no_grad")
    run.operator("aten.mm", line, op_s=0.04, module="Conv.lin", phase="backward")
    run.fact("double-forward-inside", line, module="Conv.lin", value=1.0, text="3.0")
    return run


def test_a_repeat_without_gradients_has_no_backward() -> None:
    finding = only_finding(RULE, evaluated_encoder().build())
    assert finding.cost_s == pytest.approx(0.01)
    assert "; the forward of that 10.00 ms" in finding.because


def test_a_repeat_that_may_or_may_not_have_a_graph_gives_a_range() -> None:
    run = shared_encoder(calls=2.0)
    run.operator("aten.convolution", 0, op_s=0.01, module="Critic.encoder.0", phase="no_grad")
    low, high = only_finding(RULE, run.build()).saved_s
    assert low == pytest.approx(0.9 * 0.01)
    assert high == pytest.approx(1.1 * 0.03)


def test_a_layer_inside_a_librarys_module_is_a_note_that_names_the_call() -> None:
    evidence = evaluated_encoder(library="torch_geometric/nn/conv/gcn_conv.py").build()
    assert not list(RULE.check(evidence))
    assert RULE.note is not None
    [note] = RULE.note(evidence)
    assert note.where is not None
    assert note.where.line == 39
    assert "inside what this line calls (torch_geometric/nn/conv/gcn_conv.py:263)" in note.text


def root_called_in_evaluation(text: str = "") -> EvidenceBuilder:
    """One line calls a root module from training, with its graph used, and twice from evaluation on equal inputs."""
    run = EvidenceBuilder(backward=0.04)
    line = run.line("link_pred.py", 39)
    run.model(line, callers=(run.line("link_pred.py", 60),), call_s=0.02)
    run.model(line, callers=(run.line("link_pred.py", 70),), call_s=0.005, calls=2.0, graphs_built=0, graphs_used=0)
    run.fact("double-forward", line, value=1.0, text=text)
    return run


@pytest.mark.parametrize("text", ["", "detach", "no-graph"])
def test_a_repeat_of_a_root_module_whose_only_graph_is_the_trainings_has_no_backward(text: str) -> None:
    assert only_finding(RULE, root_called_in_evaluation(text).build()).cost_s == pytest.approx(0.01)


def test_a_result_whose_graph_is_gone_is_used_detached() -> None:
    run = called_twice(graphs_used=0)
    run.facts[0] = msgspec.structs.replace(run.facts[0], text="detach")

    assert ".detach() here" in only_finding(RULE, run.build()).edit


@pytest.mark.parametrize("name", ["double-forward-freed", "double-forward-inside-freed"])
def test_a_result_whose_graph_the_first_backward_frees_is_a_note_and_no_edit(name: str) -> None:
    run = called_twice(graphs_used=50)
    run.facts[0] = msgspec.structs.replace(run.facts[0], name=name)

    assert not list(RULE.check(run.build()))
    assert RULE.note is not None
    [note] = RULE.note(run.build())
    assert note.where is not None
    assert note.where.line == 21
    assert "frees the first graph" in note.text
