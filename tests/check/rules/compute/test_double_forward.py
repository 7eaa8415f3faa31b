from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.compute.double_forward import RULE


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
