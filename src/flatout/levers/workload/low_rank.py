"""Low-rank pairs beside frozen weights are trained, instead of the weights.

What        `flatout.adapting.lora`: a product of two small matrices added to the weights of linear layers, convolutions,
            recurrent layers and attention (Hu et al. 2021); with a learned length of each row, too (DoRA, Liu et al. 2024).
Guarantee   QUALITY: the metric tells. Before the first step the outputs are the model's, bit for bit.
Price       See docs/how-to/adapt-a-model.md: the metric after as many steps as full training took.
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
