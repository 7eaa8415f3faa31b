"""memory.attention-without-plans: offered where plans are built or would be, set for the process, written into the text."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch.nn.attention import SDPBackend

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.memory.attention_without_plans import LEVER


def offered(*widths: int, device: str = "NVIDIA H200") -> Candidate | Refusal:
    run = EvidenceBuilder(device_s=0.05)
    for width in widths:
        run.operator("aten._softmax", output=(8, 12, width, width))
    run.operator("aten._softmax", output=(8, 1000))
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, device=device)
    return next(iter(LEVER.propose(msgspec.structs.replace(evidence, workload=workload), [])))


def test_it_is_offered_with_the_gain_of_the_plans_that_are_built() -> None:
    [candidate] = LEVER.propose(EvidenceBuilder(device_s=0.05).build(), [found(0.02)])
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s[1] == pytest.approx(0.02) and not candidate.is_companion


def test_beside_other_levers_it_is_offered_where_written_out_attention_changes_its_shape() -> None:
    candidate = offered(320, 352)
    assert isinstance(candidate, Candidate) and candidate.is_companion
    assert "2 shapes" in candidate.because


@pytest.mark.parametrize(
    ("widths", "device"), [((320,), "NVIDIA H200"), ((320, 352), "NVIDIA A100"), ((320, 352), "cpu")]
)
def test_it_is_refused(widths: tuple[int, ...], device: str) -> None:
    said = offered(*widths, device=device)
    assert isinstance(said, Refusal) and said.because == "no attention builds plans for new shapes"


def test_cudnn_comes_last_and_the_order_is_put_back() -> None:
    before = torch._C._get_sdp_priority_order()
    q = torch.randn(1, 2, 8, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with pulled(LEVER) as hooks:
        order = torch._C._get_sdp_priority_order()
        assert order.index(int(SDPBackend.FLASH_ATTENTION)) == 0
        assert order.index(int(SDPBackend.MATH)) < order.index(int(SDPBackend.CUDNN_ATTENTION))
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, q, q), expected)
        assert hooks.done == [LEVER.id]
    assert torch._C._get_sdp_priority_order() == before


def test_the_text_sets_it_where_the_script_starts() -> None:
    assert LEVER.edit is not None
    new = LEVER.edit("import torch\n\nx = torch.zeros(3)\n", {})
    before = torch._C._get_sdp_priority_order()
    names = {"__name__": "script"}
    try:
        exec(new, names)
        assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.FLASH_ATTENTION)
    finally:
        torch._C._set_sdp_priority_order(before)
    with pytest.raises(EditError, match="itself"):
        LEVER.edit(new, {})
