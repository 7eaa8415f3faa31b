"""Attention by cuDNN: where it is offered, and what it sets."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled

from flatout.core.errors import EditError
from flatout.core.records.device import DeviceKernel, DeviceStep
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.memory.cudnn_attention import LEVER

FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, cutlass::bfloat16_t>>"
GEMM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"


def offered(*kernels: tuple[str, float], device: str = "NVIDIA H200") -> Candidate | Refusal:
    evidence = EvidenceBuilder(forward=0.06, backward=0.04, device_s=0.09).build()
    rows = tuple(DeviceKernel(name=n, source=-1, phase="forward", num_launches=12, seconds=s) for n, s in kernels)
    step = DeviceStep(name=device, span_s=0.1, busy_s=0.09, kernels=rows)
    workload = msgspec.structs.replace(evidence.workload, device=device)
    return next(iter(LEVER.propose(msgspec.structs.replace(evidence, workload=workload, device_step=step), ())))


def test_it_is_offered_for_the_time_in_flash_attention() -> None:
    found = offered((FLASH, 0.02), (GEMM, 0.06))
    assert isinstance(found, Candidate)
    assert 0 < found.saved_s[0] < found.saved_s[1] < 0.02


@pytest.mark.parametrize(
    ("kernels", "device", "why"),
    [
        ([(FLASH, 0.001), (GEMM, 0.08)], "NVIDIA H200", "1.00 ms of a step"),
        ([(GEMM, 0.08)], "NVIDIA H200", "of a step"),
        ([(FLASH, 0.02)], "NVIDIA A100-SXM4-80GB", "from Hopper on"),
        ([(FLASH, 0.02)], "cpu", "from Hopper on"),
    ],
)
def test_it_is_refused(kernels: list[tuple[str, float]], device: str, why: str) -> None:
    found = offered(*kernels, device=device)
    assert isinstance(found, Refusal) and why in found.because


def test_the_order_is_set_and_put_back() -> None:
    before = torch._C._get_sdp_priority_order()
    q = torch.randn(1, 2, 8, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    with pulled(LEVER) as hooks:
        assert torch._C._get_sdp_priority_order()[0] == int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), expected)
        assert hooks.done == [LEVER.id]
    assert torch._C._get_sdp_priority_order() == before


def test_the_text_sets_it_where_the_script_starts() -> None:
    assert LEVER.edit is not None
    new = LEVER.edit("import torch\n\nx = torch.zeros(3)\n", {})
    assert "from torch.nn.attention import SDPBackend, sdpa_kernel" in new
    before = torch._C._get_sdp_priority_order()
    names = {"__name__": "script"}  # they live as long as a script's do
    try:
        exec(new, names)
        assert torch._C._get_sdp_priority_order() != before
    finally:
        torch._C._set_sdp_priority_order(before)
    with pytest.raises(EditError, match="itself"):
        LEVER.edit(new, {})
