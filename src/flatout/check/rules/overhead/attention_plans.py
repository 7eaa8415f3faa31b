"""Attention by cuDNN meets one new shape after another, and an execution plan is built for each.

Costs        0.1 - 1.7 s of the host for each new width (H200, cuDNN 9.19, bench/attention_shapes_device.py), where the kernels of
             FlashAttention and the memory-efficient ones take any shape at once. From PyTorch 2.11 on cuDNN comes first on Hopper
             and Blackwell.
Evidence     Calls of aten._scaled_dot_product_cudnn_attention, forward and backward, that keep the host for longer than a call
             whose plan is there: on shapes that differ from step to step, or on one, where steps that were timed before and had
             their plans, if shapes stayed the same, took as long.
Levers       memory.attention-without-plans
False alarm  The first steps of any script: a shape that comes again costs nothing. Few shapes are all met soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import milliseconds

_OP: Final = "aten._scaled_dot_product_cudnn_attention"
_PLANNED_S: Final = 0.002
"""A call with a plan keeps the host for 0.1 - 0.5 ms; building one, which all layers share, took 40 ms at least (same place)."""
_FEWEST_SHAPES: Final = 2
_SMALL_PART: Final = 0.02
_SLOWER: Final = 0.3
"""Of what the device takes for attention: what other kernels may take longer, masked, with heads of 64 (same place)."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all plans, at the line of the attention that took longest."""
    calls = [o for o in evidence.operators if o.op.startswith(_OP)]
    built = [o for o in calls if o.num_calls and o.python_s / o.num_calls > _PLANNED_S]
    shapes = {_queries(o) for o in built}
    cost_s = min(sum(o.python_s for o in built), evidence.steps.whole_s)
    idle_s = evidence.steps.step_s - (evidence.steps.device_s or 0.0)
    is_usual = len(shapes) >= _FEWEST_SHAPES or (bool(shapes) and cost_s < idle_s)
    if not is_usual or cost_s < _SMALL_PART * evidence.steps.step_s:
        return
    slower_s = _SLOWER * sum(o.op_s for o in calls)
    yield Finding(
        where=evidence.source_of(max(built, key=lambda o: o.python_s).source),
        cost_s=cost_s,
        saved_s=(max(0.0, 0.5 * cost_s - slower_s), cost_s),
        because=f"cuDNN builds a plan for each new shape of attention: {len(shapes)} in the steps that were looked at, "
        f"{milliseconds(cost_s)} of the host a step",
        edit="torch.backends.cuda.enable_cudnn_sdp(False), TORCH_CUDNN_SDPA_DEPRIORITIZED=1 in the environment, or widths "
        "rounded up to few",
        also=evidence.sources_of(o.source for o in built),
        basis="timed",
    )


def _queries(operator: Operator) -> tuple[int, ...]:
    return operator.inputs[0].shape if operator.inputs else ()


RULE = rule(__name__, check, title="A new attention plan for each shape")
