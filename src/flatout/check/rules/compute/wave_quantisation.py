"""A product's thread blocks fill the device's multiprocessors a little more than a whole number of times.

Costs        The last round runs with most multiprocessors idle: 133 tiles on 132 multiprocessors take as long as 264.
Evidence     Blocks of each launch, blocks that one multiprocessor holds (from registers, shared memory and threads), and the
             number of multiprocessors; priced from the kernel's own time.
Levers       parallelism.batch-size
False alarm  Kernels with many rounds; kernels that spread their tiles themselves and launch one block for each multiprocessor;
             launches that do not fill the device once (too little work, not a bad number); steps not bound by the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.device import DeviceKernel
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by
from flatout.machine.cost.waves import wave_efficiency

_WASTED: Final = 0.2
"""A kernel that loses less than this to its last round is left alone."""
_CERTAIN: Final = (0.25, 0.8)
"""Blocks of the last round run faster than those of full ones, since they share less: part of the loss is not real."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    step = evidence.device_step
    if step is None or step.num_sms is None or not evidence.steps.is_device_bound:
        return
    num_sms = step.num_sms
    suspects = [k for k in step.kernels if _loss(k, num_sms) > _WASTED]
    for source, kernels in group_by(suspects, lambda k: k.source).items():
        cost_s = sum(k.seconds for k in kernels)
        loss_s = sum(k.seconds * _loss(k, num_sms) for k in kernels)
        worst = max(kernels, key=lambda k: k.seconds * _loss(k, num_sms))
        resident = num_sms * worst.blocks_per_sm
        yield Finding(
            where=evidence.source_of(source),
            cost_s=min(cost_s, evidence.steps.step_s),
            saved_s=(_CERTAIN[0] * loss_s, _CERTAIN[1] * loss_s),
            because=f"{worst.num_blocks} thread blocks on {resident} places ({num_sms} multiprocessors x {worst.blocks_per_sm}) "
            f"need {-(-worst.num_blocks // resident)} rounds, the last nearly empty: {loss_s * 1e3:.2f} of {cost_s * 1e3:.2f} ms",
            edit="change the batch or the width a little, so that the product's tiles fill whole rounds",
        )


def _loss(kernel: DeviceKernel, num_sms: int) -> float:
    """Share of the kernel's time that whole rounds would not need; 0 for what is no product."""
    if not kernel.uses_matrix_units or not kernel.num_blocks or not kernel.blocks_per_sm:
        return 0.0
    return 1.0 - wave_efficiency(num_blocks=kernel.num_blocks, num_resident=num_sms * kernel.blocks_per_sm)


RULE = rule(__name__, check, title="A product that fills the device a little more than once")
