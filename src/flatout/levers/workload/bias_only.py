"""Only biases are trained.

What        `flatout.adapting.bitfit`: biases of layers and norms (Ben Zaken et al. 2022), nothing else.
Guarantee   QUALITY: the metric tells. The outputs before the first step are the model's.
Price       After as many steps as full training, 3 seeds, 95 % intervals (`bench/adapting_quality.py`): 33 points of accuracy
            with an MLP of 256 (31 to 36), 65 with a CNN of 32 (63 to 67), digits turned by a quarter; 0.45 bits a character (0.43
            to 0.47) with a transformer of 64, from prose to code. Gains (`bench/adapting.py`): 0.3 to 1 % of gradients and
            moments stay; a step takes 0.49 of full training's with an MLP of 1024, 0.63 with a transformer of 256, 0.79 to 0.92
            with a GRU, a CNN and a U-Net. One thread of a Xeon. Not worth it on models as small as these: `workload.last-layers`
            was faster and lost less on all three.
Refuses     Models without biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from flatout.levers.training import adapted
from flatout.records.lever import Lever, Offer, Parameters, Reduction, Refusal

if TYPE_CHECKING:
    from flatout.levers.subjects import Subject

_RATE: Final = 10.0
"""Times the learning rate of full training: Ben Zaken et al. 2022 took 1e-4 to 1e-3 where full training took 1e-5 to 1e-4."""


def offers(subject: Subject) -> Iterator[Offer | Refusal]:
    """All biases."""
    yield Offer(lever=LEVER.id, name="biases only", because="a bias's gradient is a sum, a weight's a product")


def apply(subject: Subject, parameters: Parameters) -> Subject:
    """Raises UsageError where the model has no biases."""
    from flatout.adapting.front import bitfit

    return adapted(subject, bitfit(subject.model), _RATE)


LEVER = Lever(
    id="workload.bias-only",
    title="Only biases are trained",
    guarantee="quality",
    module=__name__,
    reduction=Reduction(kind="training", offers=offers, apply=apply),
)
