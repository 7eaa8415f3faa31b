"""Only biases are trained.

What        `flatout.adapting.bitfit`: biases of layers and norms (Ben Zaken et al. 2022), nothing else.
Guarantee   QUALITY: the metric tells. The outputs before the first step are the model's.
Price       See docs/how-to/adapt-a-model.md.
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
