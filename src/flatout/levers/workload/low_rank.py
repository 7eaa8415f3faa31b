"""Low-rank pairs beside frozen weights are trained, instead of the weights.

What        `flatout.adapting.lora`: a product of two small matrices added to the weights of linear layers, convolutions,
            recurrent layers and attention (Hu et al. 2021); with a learned length of each row, too (DoRA, Liu et al. 2024).
Guarantee   QUALITY: the metric tells. Before the first step the outputs are the model's, bit for bit.
Price       After as many steps as full training, rank 16, 3 seeds, 95 % intervals (`bench/adapting_quality.py`): 0.8 points of
            accuracy with an MLP of 256 (0.0 to 1.6), 8.4 with a CNN of 32 (7.1 to 9.9), digits turned by a quarter; 0.17 bits a
            character (0.16 to 0.18) with a transformer of 64, from prose to code. Gains, rank 8 (`bench/adapting.py`): 2 to 12 %
            of gradients and moments stay; a step takes 0.55 of full training's with an MLP of 1024, 0.79 with a transformer of
            256. One thread of a Xeon. Not worth it in convolutions and GRUs (0.86 to 1.09), nor DoRA for speed (0.69 to 1.13),
            nor for new classes where the head is too small for a pair and stays frozen (CNN: 7 % right, of 98 %).
Refuses     Models without such layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from flatout.levers.training import adapted
from flatout.records.lever import Lever, Offer, Parameters, Reduction, Refusal, integer

if TYPE_CHECKING:
    from flatout.levers.subjects import Subject

_RATE: Final = 4.0
"""Times the learning rate of full training: one of the pair starts at zero. Schulman et al., LoRA Without Regret, 2025, found
about 10 for language models; less is safer for small ones."""


def offers(subject: Subject) -> Iterator[Offer | Refusal]:
    """Two ranks, and DoRA."""
    because = "gradients and moments of the weights are neither computed nor kept"
    for rank, is_dora in ((4, False), (16, False), (16, True)):
        name = f"{'DoRA' if is_dora else 'LoRA'} {rank}"
        yield Offer(lever=LEVER.id, name=name, parameters={"rank": rank, "is_dora": is_dora}, because=because)


def apply(subject: Subject, parameters: Parameters) -> Subject:
    """Raises UsageError where the model has nothing to put pairs beside."""
    from flatout.adapting.front import lora

    rank, is_dora = integer(parameters, "rank"), bool(parameters.get("is_dora", False))
    return adapted(subject, lora(subject.model, rank=rank, is_dora=is_dora, seed=subject.purpose.seed), _RATE)


LEVER = Lever(
    id="workload.low-rank",
    title="Low-rank pairs are trained",
    guarantee="quality",
    module=__name__,
    reduction=Reduction(kind="training", offers=offers, apply=apply),
)
