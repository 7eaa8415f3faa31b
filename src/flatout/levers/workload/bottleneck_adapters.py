"""Small bottlenecks behind frozen modules are trained.

What        `flatout.adapting.bottleneck`: down, ReLU, up, added to what a module gives (Houlsby et al. 2019).
Guarantee   QUALITY: the metric tells. Before the first step the outputs are the model's, bit for bit.
Price       See docs/how-to/adapt-a-model.md. The bottlenecks stay in the model: calls get longer.
Refuses     Models without modules to put them behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from flatout.levers.training import adapted
from flatout.records.lever import Lever, Offer, Parameters, Reduction, Refusal, integer

if TYPE_CHECKING:
    from flatout.levers.subjects import Subject

_RATE: Final = 4.0
"""Times the learning rate of full training: what is trained starts at zero and is small."""


def offers(subject: Subject) -> Iterator[Offer | Refusal]:
    """One width."""
    because = "gradients and moments of the weights are neither computed nor kept"
    yield Offer(lever=LEVER.id, name="bottlenecks of 16", parameters={"width": 16}, because=because)


def apply(subject: Subject, parameters: Parameters) -> Subject:
    """Raises UsageError where the model has nothing to put bottlenecks behind."""
    from flatout.adapting.front import bottleneck

    found = bottleneck(subject.model, width=integer(parameters, "width"), seed=subject.purpose.seed)
    return adapted(subject, found, _RATE)


LEVER = Lever(
    id="workload.bottleneck-adapters",
    title="Bottlenecks behind frozen modules are trained",
    guarantee="quality",
    module=__name__,
    reduction=Reduction(kind="training", offers=offers, apply=apply),
)
