from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.compute.repeated_gradient import RULE


def walked(*, walks: float = 9, results: float = 3, is_graph: bool = True) -> EvidenceBuilder:
    """Steps with 40 ms of backward, of which the walks from line 7 take half; two thirds of them could be spared."""
    run = EvidenceBuilder(backward=0.040)
    line = run.line("pinn.py", 7, "return torch.autograd.grad(u.sum(), x, create_graph=True)[0]")
    run.fact(
        "repeated-gradient", line, value=walks, text=f"{results:g},0.5,{0.5 * (1 - results / walks)},{int(is_graph)}"
    )
    return run


def test_walks_from_the_same_results_are_named_with_what_the_final_backward_spares() -> None:
    finding = only_finding(RULE, walked().build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (7, pytest.approx(0.040))
    spared, again = 0.020 * 2 / 3, 0.020 * 2 / 3
    assert finding.saved_s == pytest.approx((spared + 0.6 * again, spared + again))
    assert "9 walks a step through the graphs of 3 result(s)" in finding.because


def test_gradients_that_are_not_differentiated_again_save_their_own_walks_alone() -> None:
    finding = only_finding(RULE, walked(is_graph=False).build())
    assert finding.saved_s == pytest.approx((0.020 * 2 / 3, 0.020 * 2 / 3))


def test_a_run_without_such_walks_is_left_alone() -> None:
    assert not list(RULE.check(EvidenceBuilder().build()))
