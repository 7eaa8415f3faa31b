from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.run.evaluation_graph import RULE
from flatout.core.records.trial import TimeModel


def evaluated(*, graphs_built: int = 50, graphs_used: int = 0, call_s: float = 0.03) -> EvidenceBuilder:
    """Training on line 20 of train.py, and evaluation on line 50."""
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20, "loss = net(x)"))
    run.model(
        run.line("train.py", 50, "logits = net(x)", function="evaluate"),
        call_s=call_s,
        is_training=False,
        graphs_built=graphs_built,
        graphs_used=graphs_used,
    )
    return run


def without_graph(model: int, *, num_live_outputs: int = 1) -> TimeModel:
    return TimeModel(model=model, variant="without-graph", backward=False, num_live_outputs=num_live_outputs)


def test_a_call_whose_graph_nobody_uses_is_tried_without_it() -> None:
    assert proposed(RULE, evaluated().build()) == [without_graph(1)]


def test_the_call_is_named() -> None:
    run = evaluated(call_s=0.03)
    run.tried(without_graph(1), kept=0.6)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (50, "trial")
    assert finding.saved_s[0] < 0.4 * 0.03 < finding.saved_s[1]


def test_memory_that_the_graph_takes_anew_in_the_script_goes_with_it() -> None:
    run = evaluated(call_s=0.06)
    run.tried(without_graph(1), kept=0.9, now_s=0.01)
    without_faults = run.build()
    run.pages(run.models[1].source, faults=12_000, kernel_s=0.04)

    finding = only_finding(RULE, run.build())

    assert not [f for f in RULE.check(without_faults) if f.saved_s[1] > 0.2 * 0.06]
    assert finding.saved_s == pytest.approx((0.06 - 2 * 0.009, 0.06 - 0.009))


def test_several_modules_at_one_place_are_one_finding_and_tried_as_they_hold_their_graphs() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 50, "return decoder(encoder(x))")
    run.model(line, name="Encoder", call_s=0.02, graphs_used=0)
    run.model(line, name="Decoder", call_s=0.01, graphs_used=0)
    [trial] = proposed(RULE, run.build())
    assert trial == without_graph(0, num_live_outputs=2)
    run.tried(trial, kept=0.6)

    finding = only_finding(RULE, run.build())

    assert "Encoder" in finding.because
    assert "Decoder" in finding.because
    assert abs(finding.cost_s - 0.03) < 1e-9


def test_a_line_shared_with_training_is_named_at_its_caller() -> None:
    run = EvidenceBuilder()
    shared = run.line("train.py", 10, "return loss(net(x), y)", function="loss_of")
    train, evaluate = run.line("train.py", 30), run.line("train.py", 60)
    run.model(shared, callers=(train,))
    run.model(shared, callers=(evaluate,), call_s=0.03, graphs_used=0)
    run.tried(*proposed(RULE, run.build()), kept=0.6)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert finding.where.line == 60
    assert [s.line for s in finding.also] == [10]


def test_a_graph_that_is_used_later_is_left_alone() -> None:
    run = evaluated(graphs_used=1)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_call_without_a_graph_is_left_alone() -> None:
    assert not proposed(RULE, evaluated(graphs_built=0).build())


def test_a_call_or_two_are_left_alone() -> None:
    assert not proposed(RULE, evaluated(graphs_built=2).build())


def test_a_trial_without_gain_is_not_reported() -> None:
    run = evaluated()
    run.tried(*proposed(RULE, run.build()), kept=1.01)
    assert diagnose(run.build(), [RULE]).findings == ()
