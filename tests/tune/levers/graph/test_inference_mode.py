from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, found, pulled, ran
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.inference_mode import LEVER


def test_evaluation_that_builds_graphs_in_vain_is_offered() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 5, "net(x)"))
    run.model(run.line("train.py", 9, "net(v)"), is_training=False, graphs_used=0)
    [candidate] = LEVER.propose(run.build(), [found(0.03)])
    assert isinstance(candidate, Candidate) and candidate.saved_s[1] == 0.03


def test_a_model_that_is_differentiated_in_evaluation_mode_is_refused() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 9, "net(v)"), is_training=False, graphs_used=0)
    run.model(run.line("attack.py", 9, "net(x)"), is_training=False, name="Victim")
    [refusal] = LEVER.propose(run.build(), [found(0.03)])
    assert isinstance(refusal, Refusal) and "Victim" in refusal.because


def test_a_run_without_evaluation_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)


def test_calls_in_evaluation_mode_build_no_graph_and_those_in_training_do() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pulled(LEVER) as hooks:
        assert net(x).requires_grad
        assert not hooks.done
        net.eval()
        assert not net(x).requires_grad
        assert hooks.done == [LEVER.id]
    assert net(x).requires_grad


HEAD = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    net, x = nn.Linear(3, 2), torch.ones(4, 3)
"""
EVALUATE = (
    HEAD
    + """

    def evaluate(net, x):
        \"\"\"The error.\"\"\"
        net.eval()
        error = net(x).square().mean()
        net.train()
        return error


    error = evaluate(net, x)
"""
)
MIXED = (
    HEAD
    + """

    def epoch(net, x):
        net(x).sum().backward()
        net.eval()
        error = net(x).square().mean()
        net.train()
        return error


    error = epoch(net, x)
"""
)
TOP = (
    HEAD
    + """
    net.eval()
    error = net(x).square().mean()
"""
)


@pytest.mark.parametrize("text", [EVALUATE, MIXED, TOP])
def test_edited_the_evaluation_builds_no_graph_and_gives_the_same(text: str) -> None:
    before, after = ran(text), ran(edited(LEVER, text))
    assert before["error"].requires_grad and not after["error"].requires_grad
    assert torch.equal(before["error"], after["error"])


def test_edited_a_function_that_only_evaluates_gets_a_decorator() -> None:
    after = edited(LEVER, EVALUATE, function="evaluate", file="train.py", code="error = net(x).square().mean()")
    assert '\n\n\n@torch.no_grad()\ndef evaluate(net, x):\n    """The error' in after
    assert "    net.eval()\n    with torch.no_grad():\n        error = net(x).square().mean()\n    net.train()" in (
        edited(LEVER, MIXED)
    )


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ("\n    net.eval()\n    net(x).sum().backward()\n", "gradients are taken"),
        ("\n    error = net(x)\n", "between eval"),
        ("\n    net.eval()\n    with torch.no_grad():\n        net(x)\n", "between eval"),
    ],
)
def test_what_is_differentiated_or_off_already_is_not_edited(tail: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(LEVER, HEAD + tail)
