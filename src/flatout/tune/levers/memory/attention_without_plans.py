"""Attention by kernels that take any shape, where cuDNN would build a plan for each new one.

What        `torch.backends.cuda.enable_cudnn_sdp(False)`: the kernels of FlashAttention and the memory-efficient ones compute it.
            An order of `torch.nn.attention.sdpa_kernel` does not last: the first attention of a process puts cuDNN first again.
Guarantee   BOUNDED: the same sums in another order.
Refuses     Scripts whose attention builds no plans, and would build none if it were fused: shapes that stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from flatout.core.errors import LeverRefused
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate
from flatout.tune.levers.attention_kernels import HOPPER_OR_LATER, attention_kernels_lever, disable_cudnn, without_cudnn

_SOFTMAX: Final = "aten._softmax"
_FEWEST_SHAPES: Final = 2


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where plans are built, and beside other levers where attention that is written out changes its shape."""
    if findings:
        first = findings[0]
        yield Candidate(parameters={}, saved_s=first.saved_s, where=first.where, because=first.because)
        return
    shapes = {o.outputs[0].shape for o in evidence.operators if o.op == _SOFTMAX and o.phase == "forward" and o.outputs}
    scores = {shape for shape in shapes if len(shape) == 4}  # [batch, heads, queries, keys]
    if len(scores) < _FEWEST_SHAPES or not HOPPER_OR_LATER.search(evidence.workload.device):
        raise LeverRefused("no attention builds plans for new shapes")
    yield Candidate(
        parameters={},
        saved_s=(0.0, 0.0),
        is_companion=True,
        because=f"attention has {len(scores)} shapes; once it is fused, cuDNN would build a plan for each",
    )


LEVER = attention_kernels_lever(
    __name__,
    propose,
    disable_cudnn,
    without_cudnn,
    conflicts=("memory.cudnn-attention",),
    title="Attention without a plan for each shape",
)
