"""Low-rank pairs beside frozen weights are trained, instead of the weights.

What        `flatout.core.records.adapt.Lora`: a product of two small matrices added to the weights of linear layers,
            convolutions, recurrent layers and attention (Hu et al. 2021); with a learned length of each row, too (DoRA, Liu et
            al. 2024).
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

from flatout.core.parts import reduction
from flatout.core.records.adapt import Lora
from flatout.core.records.lever import Parameters, integer
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from flatout.shrink.candidate import CandidateModel

_RATE: Final = 4.0
"""Times the learning rate of full training: one of the pair starts at zero. Schulman et al., LoRA Without Regret, 2025, found
about 10 for language models; less is safer for small ones."""


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """Options of two ranks, and DoRA."""
    because = "gradients and moments of the weights are neither computed nor kept"
    for rank, is_dora in ((4, False), (16, False), (16, True)):
        name = f"{'DoRA' if is_dora else 'LoRA'} {rank}"
        yield Option(reduction=REDUCTION.id, name=name, parameters={"rank": rank, "is_dora": is_dora}, because=because)


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Raises UsageError where the model has nothing to put pairs beside."""
    rank, is_dora = integer(parameters, "rank"), bool(parameters.get("is_dora", False))
    return candidate.adapted(Lora(rank=rank, is_dora=is_dora), _RATE)


REDUCTION = reduction(__name__, options, apply, title="Low-rank pairs are trained")
