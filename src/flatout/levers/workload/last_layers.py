"""Only the last layers are trained; backward ends where they begin.

What        `flatout.adapting.freeze`: everything before the last modules is frozen.
Guarantee   QUALITY: the metric tells. The outputs before the first step are the model's.
Price       See docs/how-to/adapt-a-model.md.
Refuses     Models of a single module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from flatout.levers.training import adapted
from flatout.records.lever import Lever, Offer, Parameters, Reduction, Refusal, integer

if TYPE_CHECKING:
    from flatout.levers.subjects import Subject

_RATE: Final = 1.0
"""Times the learning rate of full training: the same weights, only fewer."""


def offers(subject: Subject) -> Iterator[Offer | Refusal]:
    """The last module, and the last three, where there are more."""
    num = sum(1 for m in subject.model.modules() if any(True for _ in m.parameters(recurse=False)))
    if num < 2:
        yield Refusal(lever=LEVER.id, because="the model has a single module with parameters")
    for last in (1, 3):
        if last < num:
            name = f"last {last} layers" if last > 1 else "last layer"
            because = "nothing before it is gone through backwards"
            yield Offer(lever=LEVER.id, name=name, parameters={"last": last}, because=because)


def apply(subject: Subject, parameters: Parameters) -> Subject:
    """Raises UsageError where the model has fewer modules."""
    from flatout.adapting.front import freeze

    return adapted(subject, freeze(subject.model, last=integer(parameters, "last")), _RATE)


LEVER = Lever(
    id="workload.last-layers",
    title="Only the last layers are trained",
    guarantee="quality",
    module=__name__,
    reduction=Reduction(kind="training", offers=offers, apply=apply),
)
