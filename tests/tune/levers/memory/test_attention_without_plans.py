"""memory.attention-without-plans: offered where plans are built or would be, set for the process, written into the text."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled

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


def test_cudnn_is_disabled_for_the_process_and_put_back() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    q = torch.randn(1, 2, 8, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with pulled(LEVER) as hooks:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, q, q), expected)
        assert hooks.done == [LEVER.id]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_the_text_disables_it_where_the_script_starts() -> None:
    assert LEVER.edit is not None
    new = LEVER.edit("import torch.nn as nn\n\nx = nn.Linear(3, 3)\n", {})
    try:
        exec(new, {"__name__": "script"})
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises(EditError, match="itself"):
        LEVER.edit(new, {})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN computes attention on a GPU")
def test_no_attention_of_a_fresh_process_is_by_cudnn() -> None:
    said = subprocess.run(
        [sys.executable, "-c", _FIRST_ATTENTION], capture_output=True, text=True, check=True, timeout=300
    )
    assert "cudnn" not in said.stdout and "flash" in said.stdout, said.stdout


_FIRST_ATTENTION = """
import torch
from torch.profiler import ProfilerActivity, profile
from flatout.tune.levers.attention_kernels import disable_cudnn

disable_cudnn()
q = torch.randn(2, 4, 77, 64, device="cuda", dtype=torch.bfloat16)
with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
print([e.key for e in profiled.key_averages() if "attention" in e.key])
"""
