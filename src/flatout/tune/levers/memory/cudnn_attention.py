"""Attention by cuDNN's kernels where FlashAttention-2's run.

What        `torch.nn.attention.sdpa_kernel` for the whole process, cuDNN before FlashAttention in its order; calls that cuDNN
            does not take go to the next one, as before. Code that is compiled takes the order at its compilation.
Guarantee   BOUNDED: the same sums in another order.
Refuses     Devices older than Hopper, on which cuDNN's kernels are no faster; steps with little time in FlashAttention's kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from flatout.core.errors import LeverRefused
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate
from flatout.machine.cost.accounting import milliseconds
from flatout.tune.levers.attention_kernels import (
    HOPPER_OR_LATER,
    attention_kernels_lever,
    set_order,
    with_order,
)

_KERNELS: Final = re.compile(r"flash_(fwd|bwd|::flash_)|flash::|pytorch_flash")
_SMALL_PART: Final = 0.03
_SAVED: Final = (0.1, 0.55)
"""Of FlashAttention-2's time: cuDNN's kernels took 0.51 of it forward and 0.55 backward with heads of 128 numbers, and save less
with heads of 64 (H200, bfloat16, causal, 16 k tokens)."""
_EFFORT: Final = 2.0
_ORDER: Final = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for devices of Hopper's generation and later that spend time in FlashAttention's kernels."""
    if not HOPPER_OR_LATER.search(evidence.workload.device):
        raise LeverRefused("cuDNN's kernels for attention are faster from Hopper on")
    step = evidence.device_step
    if step is None:
        raise LeverRefused("the kernels of a step were not recorded")
    seconds = sum(k.seconds for k in step.kernels if _KERNELS.search(k.name))
    if seconds < _SMALL_PART * evidence.steps.step_s:
        raise LeverRefused(f"kernels of FlashAttention take {milliseconds(seconds)} of a step")
    yield Candidate(
        parameters={},
        saved_s=(_SAVED[0] * seconds, _SAVED[1] * seconds),
        because=f"kernels of FlashAttention-2 take {milliseconds(seconds)} of a step, and cuDNN has faster ones for this device",
    )


LEVER = attention_kernels_lever(
    __name__,
    propose,
    partial(set_order, _ORDER),
    partial(with_order, names=_ORDER),
    effort=_EFFORT,
    title="Attention by cuDNN",
)
