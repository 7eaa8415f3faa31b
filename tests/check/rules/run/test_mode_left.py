from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder

from flatout.check.rules.run.mode_left import RULE


def trained_and_evaluated(*, loops: tuple[int, ...], fact: str = "train-in-eval") -> EvidenceBuilder:
    """A training loop at line 20 inside epochs at line 10; another call of the module inside `loops`."""
    run = EvidenceBuilder()
    run.optimizer(run.line("train.py", 25, "optimizer.step()", loops=(10, 20)))
    call = run.line("train.py", 32, "scores = net(x)", loops=loops)
    run.model(call, graphs_built=0, graphs_used=0)
    run.fact(fact, call, text="2 Dropout")
    return run


def test_an_evaluation_loop_in_training_mode_is_told() -> None:
    (note,) = RULE.note(trained_and_evaluated(loops=(10, 30)).build()) if RULE.note else ()
    assert note.where is not None
    assert note.where.line == 32
    assert "2 Dropout" in note.text


def test_a_generator_that_runs_without_gradients_inside_the_training_loop_is_left_alone() -> None:
    assert RULE.note is not None
    assert not list(RULE.note(trained_and_evaluated(loops=(10, 20)).build()))


def test_training_in_evaluation_mode_is_told() -> None:
    assert RULE.note is not None
    (note,) = RULE.note(trained_and_evaluated(loops=(10, 20), fact="eval-in-train").build())
    assert ".train()" in note.text


def test_nothing_is_claimed_to_cost_time() -> None:
    assert not list(RULE.check(trained_and_evaluated(loops=(10, 30)).build()))
